"""Machines: how the tasks of a study map to each. Only the chosen site's file is imported."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from sites.base import Site, SiteError
from sites.settings import (
    Given,
    build,
    derived,
    hint,
    model_of,
    read,
    said_by_job,
    said_by_user,
)

# name -> "module:Class"
SITES = {
    "local": "sites.local:Local",
    "inside": "sites.inside:Inside",
    "slurm": "sites.slurm:Slurm",
    "frontier": "sites.slurm:Frontier",
    "perlmutter": "sites.slurm:Perlmutter",
    "daint_alps": "sites.slurm:DaintAlps",
    "piz_daint": "sites.slurm:PizDaint",
    "summit": "sites.lsf:Summit",
    "pbs": "sites.pbs:Pbs",
    "polaris": "sites.pbs:Polaris",
    "titan": "sites.pbs:Titan",
    "theta": "sites.pbs:Theta",
}


def get(name: str, settings: Mapping[str, str], folders: Sequence[Path] = ()) -> Site:
    """The site of that name, with its settings.

    Args:
        settings: of the command line, as text. They come before those of files.
        folders: where a sites.toml is looked for; what the first says comes first.

    Raises:
        SiteError: there is no such site, or a setting is wrong or missing.
    """
    site, given = find(name, folders)
    site, of_job = site.here()
    return build(site, {**said_by_job(of_job), **given, **said_by_user(settings)})


def find(name: str, folders: Sequence[Path] = ()) -> tuple[type[Site], dict[str, Given]]:
    """The site of that name, and which settings of it stand in files.

    Raises:
        SiteError: there is no such site, or a file is wrong.
    """
    tables = read(folders)
    table = tables.get(name, {})
    if name in SITES:
        return _load(name), table
    if name in tables:
        return derived(name, table, _load(model_of(name, table, SITES)))
    known = sorted({*SITES, *tables})
    raise SiteError(f"--site {name}: no such site; {hint(name, known)}")


def names(folders: Sequence[Path] = ()) -> list[str]:
    """Of all sites: those here, and the user's own."""
    return list(dict.fromkeys([*SITES, *read(folders)]))


def _load(name: str) -> type[Site]:
    module, _, class_name = SITES[name].partition(":")
    site: type[Site] = getattr(importlib.import_module(module), class_name)
    return site
