"""What a site is told: by --set, by a sites.toml beside the study, and by the user's own.

A table of such a file is a site's, and its keys are settings. A table whose name is not that of a
site here makes one: it is `like` one of those, with values of its own.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import os
import re
import tomllib
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from sites.base import SettingError, Site, SiteError

FILE = "sites.toml"
MISSING = dataclasses.MISSING
KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


@dataclass(frozen=True, kw_only=True)
class Given:
    """A value as the user wrote it: a text of --set, or what TOML makes of it."""

    value: object
    origin: str  # "--set", or "sites.toml:3"
    key: str  # "--set nodes", or "sites.toml:3: [mine] nodes"

    @property
    def said(self) -> str:
        if self.is_text:
            return f"{self.key}={self.value}"
        return f"{self.key} = {json.dumps(self.value, ensure_ascii=False, default=str)}"

    @property
    def is_text(self) -> bool:
        return self.origin == "--set"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A field of a site, and its value where the user gave one or it has a default."""

    name: str
    kind: type
    meaning: str
    default: Any  # `MISSING` where the setting is required
    value: Any  # `MISSING` where it is required and not given
    origin: str


def user_folder() -> Path:
    """Of the sites.toml that is for all studies of a user."""
    configuration = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(configuration) / "n3lo"


def said_by_user(settings: Mapping[str, str]) -> dict[str, Given]:
    """Settings of the command line."""
    return {
        key: Given(value=text, origin="--set", key=f"--set {key}") for key, text in settings.items()
    }


def said_by_job(settings: Mapping[str, int]) -> dict[str, Given]:
    """Settings that the job around this process has."""
    return {
        key: Given(value=value, origin="the job", key=f"the job: {key}")
        for key, value in settings.items()
    }


def read(folders: Sequence[Path]) -> dict[str, dict[str, Given]]:
    """What the sites.toml of some folders say, by site; the first folder's word counts.

    Raises:
        SiteError: a file cannot be read, is not TOML, or has something besides tables.
    """
    tables: dict[str, dict[str, Given]] = {}
    for path in (folder / FILE for folder in folders):
        try:
            text = path.read_text(encoding="utf-8")
            content = tomllib.loads(text)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise SiteError(f"{path}: it cannot be read: {error.strerror}") from None
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SiteError(f"{path}: not valid TOML: {error}") from None
        for site, table in content.items():
            if not isinstance(table, dict):
                where = _origin(path, text, "", site)
                raise SiteError(f"{where}: {site}: write it below the name of its site, as [NAME]")
            given = tables.setdefault(site, {})
            for key, value in table.items():
                origin = _origin(path, text, site, key)
                said = Given(value=value, origin=origin, key=f"{origin}: [{site}] {key}")
                given.setdefault(key, said)
    return tables


def build(site: type[Site], given: Mapping[str, Given]) -> Site:
    """A site from its settings.

    Raises:
        SiteError: a setting is unknown, has a value that it cannot have, or is missing.
    """
    settings = settings_of(site, given)
    missing = [setting for setting in settings if setting.value is MISSING]
    if missing:
        raise SiteError(
            f"site '{site.name}' needs {', '.join(each.name for each in missing)}: add "
            f"{' '.join(f'--set {each.name}=...' for each in missing)}, or "
            f"{', '.join(map(_line_of_file, missing))} below [{site.name}] in "
            f"{user_folder() / FILE}"
        )
    try:
        return site(**{setting.name: setting.value for setting in settings}, **site.fixed)
    except SettingError as error:
        if error.name not in given:
            raise
        raise SiteError(f"{given[error.name].said}: {error.reason}") from None


def settings_of(site: type[Site], given: Mapping[str, Given]) -> list[Setting]:
    """All settings of a site that the user may give, in the order of its fields.

    Raises:
        SiteError: one that is given is unknown, or not of its type.
    """
    fields = {
        field.name: field for field in dataclasses.fields(site) if field.name not in site.fixed
    }
    for key, said in given.items():
        if key not in fields:
            meant = hint(key, fields, "it knows")
            raise SiteError(f"{said.key}: site '{site.name}' has no such setting; {meant}")
    hints = get_type_hints(site)
    settings = []
    for name, field in fields.items():
        kind, is_optional = _kind(hints[name])
        value, origin = field.default, "" if field.default is MISSING else "default"
        if name in given:
            value, origin = _value(given[name], kind, is_optional), given[name].origin
        settings.append(
            Setting(
                name=name,
                kind=kind,
                meaning=_meaning(site, name),
                default=field.default,
                value=value,
                origin=origin,
            )
        )
    return settings


def model_of(name: str, table: Mapping[str, Given], sites: Collection[str]) -> str:
    """Which of some sites one of the user's own is like.

    Raises:
        SiteError: it does not say, or its name is of no use.
    """
    where = next((given.key.rpartition(" ")[0] for given in table.values()), f"{FILE}: [{name}]")
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):  # it becomes part of a folder's
        raise SiteError(f"{where}: the name of a site has only letters, digits, '_' and '-'")
    if "like" not in table:
        raise SiteError(
            f"{where}: no such site; {hint(name, sites)}; a site of your own says which of those "
            f'here it is like: like = "slurm"'
        )
    like = str(_value(table["like"], str, is_optional=False))
    if like not in sites:
        raise SiteError(f"{table['like'].said}: no such site; {hint(like, sites)}")
    return like


def derived(
    name: str, table: Mapping[str, Given], model: type[Site]
) -> tuple[type[Site], dict[str, Given]]:
    """A site of the user's own, and its settings: what its table has besides words about it."""
    settings = dict(table)
    like, summary = settings.pop("like"), settings.pop("summary", None)
    first = _value(summary, str, is_optional=False) if summary else f"Yours, like {model.name}."
    doc = f"{first}\n\nIn {like.origin}, like {model.name}: {inspect.getdoc(model)}"
    return type(name, (model,), {"name": name, "__doc__": doc}), settings


def hint(word: str, words: Collection[str], listing: str = "there are") -> str:
    """At the word that was meant, or at all there are."""
    near = difflib.get_close_matches(word, words, 1)
    return f"did you mean '{near[0]}'?" if near else f"{listing}: {', '.join(words)}"


def _line_of_file(setting: Setting) -> str:
    return f'{setting.name} = "..."' if setting.kind is str else f"{setting.name} = ..."


def _kind(hint: Any) -> tuple[type, bool]:
    """`int | None` -> int, and that it may be none."""
    if isinstance(hint, types.UnionType):
        [kind] = (each for each in get_args(hint) if each is not types.NoneType)
        return kind, True
    return hint, False


def _meaning(site: type[Site], name: str) -> str:
    """Where a class only gives a field another default, it is what the class above says."""
    for above in site.__mro__:
        own: Any = inspect.get_annotations(above, eval_str=True).get(name)
        if get_origin(own) is Annotated:
            return str(own.__metadata__[0])
    return ""


def _value(given: Given, kind: type, is_optional: bool) -> object:
    """What a field is to have; an empty text is none at all where the field may be none."""
    if given.value == "" and is_optional:
        return None
    if given.is_text:
        try:
            return _from_text(str(given.value), kind)
        except ValueError:
            raise SiteError(f"{given.said}: {given.value!r} is not {KINDS[kind]}") from None
    if kind is float and type(given.value) is int:
        return float(given.value)
    if type(given.value) is not kind:  # true would pass for a whole number
        raise SiteError(f"{given.said} is not {KINDS[kind]}{_quotes(given.value, kind)}")
    return given.value


def _from_text(text: str, kind: type) -> object:
    if kind is bool and text not in ("true", "false"):
        raise ValueError
    return text == "true" if kind is bool else kind(text)


def _quotes(value: object, kind: type) -> str:
    """How a value of a file is mended, if quotes are all that is wrong with it."""
    if kind is str:
        return "; put it in quotes"
    if not isinstance(value, str):
        return ""
    try:
        _from_text(value, kind)
    except ValueError:
        return ""
    return "; leave out the quotes"


def _origin(path: Path, text: str, site: str, key: str) -> str:
    """ "file:line" of a key below [site], or of the table where the key has no line of its own."""
    table, found = "", ""
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"""\s*\[\s*["']?([^\[\]"']+?)["']?\s*\]""", line)
        assigned = re.match(r"""\s*["']?([\w-]+)["']?\s*=""", line)
        if header:
            table = header[1]
        if table == site and assigned and assigned[1] == key:
            return f"{path}:{number}"
        if table == site and header:
            found = f":{number}"
    return f"{path}{found}"
