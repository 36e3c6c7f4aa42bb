"""Machines: how the tasks of a study map to each. Only the chosen site's file is imported."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping

from sites.base import Site, SiteError, build

# name -> "module:Class"
SITES = {
    "local": "sites.local:Local",
    "slurm": "sites.slurm:Slurm",
    "frontier": "sites.slurm:Frontier",
    "perlmutter": "sites.slurm:Perlmutter",
    "daint_alps": "sites.slurm:DaintAlps",
    "piz_daint": "sites.slurm:PizDaint",
    "summit": "sites.lsf:Summit",
}


def get(name: str, settings: Mapping[str, str]) -> Site:
    """The site of that name, with its settings.

    Raises:
        SiteError: there is no such site, or a setting is wrong or missing.
    """
    if name not in SITES:
        near = difflib.get_close_matches(name, SITES, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(sorted(SITES))}"
        raise SiteError(f"--site {name}: no such site; {hint}")
    module, _, class_name = SITES[name].partition(":")
    return build(getattr(importlib.import_module(module), class_name), settings)
