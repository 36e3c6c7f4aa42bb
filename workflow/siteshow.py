"""What sites there are, and what one of them is told: `sites list`, `sites show`."""

from __future__ import annotations

import inspect
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console as Terminal
from rich.table import Table
from rich.text import Text

import sites
from sites.base import SiteError
from sites.settings import (
    FILE,
    KINDS,
    MISSING,
    Setting,
    said_by_job,
    said_by_user,
    settings_of,
    user_folder,
)
from workflow import PROGRAM

EXAMPLE = {int: "N", float: "X", str: "TEXT", bool: "true"}


def print_list(folders: Sequence[Path], out: Terminal) -> None:
    """All sites, those here first, with a line for each."""
    table = Table("site", "programs", "what it is", box=None, pad_edge=False, header_style="bold")
    for name in sites.names(folders):
        site, _ = sites.find(name, folders)
        found = "found" if all(map(shutil.which, site.programs)) else "-"
        table.add_row(*map(Text, (name, found, (inspect.getdoc(site) or "").partition("\n")[0])))
    out.print(table)


def print_site(name: str, said: Mapping[str, str], folders: Sequence[Path], out: Terminal) -> None:
    """What a site is, its settings with their values, and a command that runs a study there.

    Args:
        said: settings of the command line.
    """
    site, given = sites.find(name, folders)
    of_job: dict[str, int] = {}
    with suppress(SiteError):  # a site that is not here is shown as it is in general
        site, of_job = site.here()
    settings = settings_of(site, {**said_by_job(of_job), **given, **said_by_user(said)})
    out.print(Text(f"{name}: {inspect.getdoc(site)}\n"))
    out.print(_table(settings))
    file = user_folder() / FILE
    for line in (
        "",
        f"Where values come from: --set first, then {FILE} beside the study, then {file}, below "
        f"[{name}]. An empty text stands for none.",
        f"For example: {PROGRAM} my_study.toml --site {name}{_words(settings, said)}",
    ):
        out.print(Text(line), soft_wrap=True)


def _table(settings: Sequence[Setting]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("setting", "type", "default", "now", "from", "meaning"):
        # The name of a setting, to be copied, is in one piece as long as there is room.
        table.add_column(heading, overflow="fold", no_wrap=heading == "setting")
    for each in settings:
        default = "required" if each.default is MISSING else _shown(each.default)
        value = "missing" if each.value is MISSING else _shown(each.value)
        kind = KINDS[each.kind].removeprefix("a ")
        origin = each.origin.replace(str(Path.home()), "~") or "-"
        cells = (each.name, kind, default, value, origin, each.meaning)
        table.add_row(*map(Text, cells))
    return table


def _shown(value: object) -> str:
    return "none" if value is None else str(value) or '""'


def _words(settings: Sequence[Setting], said: Mapping[str, str]) -> str:
    """The --set of a command: what was given so, and a stand-in for all that is missing."""
    texts = {each.name: EXAMPLE[each.kind] for each in settings if each.value is MISSING}
    texts.update(said)
    return "".join(f" --set {shlex.quote(f'{name}={text}')}" for name, text in texts.items())
