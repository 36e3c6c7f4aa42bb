"""A study: one TOML file, checked once, with errors that name file, line and key.

Its sections are the classes of `apps/contract.py`, so that what is checked here is what the ranks
read. A search dimension names any value of the study by its dotted path; a trial is the study with
those values replaced.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import glob
import json
import math
import re
import tomllib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from apps.contract import (
    Data,
    Layout,
    Model,
    N3LOError,
    Objective,
    Plain,
    Section,
    Training,
    require,
)
from workflow.space import Choice, Dimension, Point, Space

# What a trial may replace. The folds and the files are the same for all trials, or their scores
# could not be compared.
SEARCHABLE = ("model.", "data.", "training.", "layout.")
NOT_SEARCHABLE = ("data.files", "data.folds", "data.fold_by", "training.metrics")


@dataclass(frozen=True, kw_only=True)
class Search(Section):
    """How points of the space are proposed, and how many."""

    method: str = "bayesian"
    objective: Objective
    num_trials: int
    num_parallel: int = 1  # N_G, trials that run at once
    space: dict[str, Dimension]
    options: dict[str, Plain] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.num_trials >= 1, f"num_trials: {self.num_trials} is not at least 1")
        require(self.num_parallel >= 1, f"num_parallel: {self.num_parallel} is not at least 1")
        require(len(self.space) >= 1, "space: name at least one value to search")


@dataclass(frozen=True, kw_only=True)
class Study(Section):
    """All sections of a study file."""

    name: str
    seed: int = 1
    model: Model
    data: Data
    training: Training = field(default_factory=Training)
    layout: Layout = field(default_factory=Layout)
    search: Search

    def __post_init__(self) -> None:
        require(
            re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name) is not None,
            f"name: '{self.name}' must be letters, digits, '.', '_', '-' (it names a folder)",
        )
        require(self.seed >= 0, f"seed: {self.seed} is not at least 0")
        require(self.name != "cache", "name: 'cache' is the folder of the results of all studies")
        known = metric_names(self.training)
        for key, metric in self._metrics_in_use():
            require(
                metric in known,
                f"{key}: there is no metric '{metric}'; with these training.metrics there are: "
                f"{', '.join(known)}",
            )

    def _metrics_in_use(self) -> Iterator[tuple[str, str]]:
        yield "search.objective.metric", self.search.objective.metric
        if self.training.early_stopping is not None:
            yield "training.early_stopping.metric", self.training.early_stopping.metric
        if self.training.target is not None:
            yield "training.target.metric", self.training.target.metric


def metric_names(training: Training) -> list[str]:
    """What a training measures each epoch: the loss and the metrics, on training and validation."""
    names = ["loss", *training.metrics]
    return names + [f"val_{name}" for name in names]


@dataclass(frozen=True)
class StudyFile:
    """A study and where it came from."""

    path: Path
    text: str
    content: dict[str, Any]  # the TOML, with what the command line replaced
    study: Study

    @property
    def space(self) -> Space:
        return Space(self.study.search.space)

    def at(self, point: Point) -> Study:
        """The study of one trial: this one with the point's values replaced.

        Raises:
            N3LOError: the study is not valid there.
        """
        return _validate(_replaced(self.content, point), self.path, self.text)

    def data_files(self) -> list[Path]:
        """The data files, absolute, in the study's order; a pattern gives its matches sorted.

        Raises:
            N3LOError: a file is not there, or a pattern matches none.
        """
        files: list[Path] = []
        folder = self.path.parent.resolve()
        where = self.where("data", "files") + "data.files"
        for name in self.study.data.files:
            pattern = Path(name).expanduser()
            matches = sorted(glob.glob(str(pattern), root_dir=self.path.parent))
            found = [(self.path.parent / match).resolve() for match in matches]
            if not found:
                what = "no file matches" if glob.has_magic(name) else "there is no file"
                raise N3LOError(f"{where}: {what} '{name}' ({folder / pattern})")
            twice = [path for path in found if path in files]
            if twice:  # its events would be in training and validation at once
                raise N3LOError(f"{where}: '{name}' names {twice[0]} once more")
            files += found
        return files

    def where(self, *key: str) -> str:
        """ "file:line: " of a key."""
        return _where(self.path, self.text, key)


def load(path: Path, overrides: Mapping[str, Plain] | None = None) -> StudyFile:
    """Read and check a study file.

    Args:
        path: the TOML file.
        overrides: dotted path -> value, from the command line.

    Raises:
        N3LOError: the file or a value in it is wrong; one line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise N3LOError(f"there is no study file '{path}'{_similar_file(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise N3LOError(f"cannot read the study file '{path}': {error}") from None
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise N3LOError(f"{path}: not valid TOML: {error}") from None
    _validate(content, path, text)
    content = _replaced(content, overrides or {})
    file = StudyFile(path, text, content, _validate(content, path, text))
    for dotted, dimension in file.study.search.space.items():
        _check_path(file, dotted)
        _check_ends(file, dotted, dimension)
    return file


def _replaced(content: dict[str, Any], values: Mapping[str, Plain]) -> dict[str, Any]:
    """A copy of a study's content with the values at these dotted paths."""
    content = copy.deepcopy(content)
    for path, value in values.items():
        *parents, last = path.split(".")
        section = content
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return content


def _similar_file(path: Path) -> str:
    siblings = sorted(path.parent.glob("*.toml")) if path.parent.is_dir() else []
    if not siblings:
        return ""
    return f"; in '{path.parent}' there are: {', '.join(file.name for file in siblings)}"


def _check_path(file: StudyFile, dotted: str) -> None:
    """A dimension must name a value that the study has, or that has a default."""
    where = file.where("search", "space", dotted) + "search.space"
    if not dotted.startswith(SEARCHABLE):
        raise N3LOError(
            f"{where}: '{dotted}' cannot be searched; it must be a value of [model], "
            f"[data], [training] or [layout]"
        )
    if dotted in NOT_SEARCHABLE:
        raise N3LOError(f"{where}: '{dotted}' cannot be searched: it is the same for all trials")
    section: Any = dataclasses.asdict(file.study)
    walked: list[str] = []
    for name in dotted.split("."):
        known = list(section) if isinstance(section, dict) else []
        if name not in known:
            inside = ".".join(walked) or "the study"
            near = difflib.get_close_matches(name, known, 1)
            said = (
                f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(known) or 'none'}"
            )
            raise N3LOError(f"{where}: '{dotted}' leads nowhere: {inside} has no '{name}'; {said}")
        section = section[name]
        walked.append(name)


def _check_ends(file: StudyFile, dotted: str, dimension: Dimension) -> None:
    """The study must be valid at each end of a dimension, or trials would fail on the way."""
    ends = dimension.values if isinstance(dimension, Choice) else [dimension.low, dimension.high]
    for value in ends:
        try:
            file.at({dotted: value})
        except N3LOError as error:
            reason = str(error).split(": ", 1)[-1]
            where = file.where("search", "space", dotted) + "search.space"
            raise N3LOError(f"{where}: '{dotted}' = {value!r} is not valid: {reason}") from None


def _validate(content: dict[str, Any], path: Path, text: str) -> Study:
    for key, value in _leaves(content):
        if isinstance(value, float) and not math.isfinite(value):
            raise N3LOError(f"{_where(path, text, key)}{'.'.join(key)}: {value} is not finite")
    try:
        # JSON mode, because pydantic's strict mode takes tables for sections there.
        return _STUDY.validate_json(json.dumps(content, default=str), strict=True)
    except ValidationError as error:
        # An unknown key is often the cause of the others ("missing"), so it is named first.
        errors = error.errors(include_url=False)
        unknown = [item for item in errors if item["type"] == "unexpected_keyword_argument"]
        raise N3LOError(_explain((unknown or errors)[0], path, text)) from None


def _leaves(
    content: dict[str, Any], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All values of nested tables, with the keys that lead there."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


_STUDY: TypeAdapter[Study] = TypeAdapter(Study)

_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a text in quotes",
    "bool_type": "true or false",
    "list_type": "a list in [ ]",
    "dict_type": "a table",
    "dataclass_type": "a table",
}


def _explain(error: ErrorDetails, path: Path, text: str) -> str:
    """One line for a pydantic error: file, line, key, value, and what was wanted."""
    location = tuple(str(part) for part in error["loc"])
    tags = {"real", "int", "choice", "str", "list[str]", "dict[str,str]", "Model"}
    key = tuple(part for i, part in enumerate(location) if i == 0 or part not in tags)
    dotted = ".".join(f'"{part}"' if "." in part else part for part in key)
    where = _where(path, text, key)
    kind, value = error["type"], error["input"]
    if kind == "unexpected_keyword_argument":
        known = _known_keys(key[:-1])
        near = difflib.get_close_matches(key[-1], known, 1)
        said = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(known)}"
        section = ".".join(key[:-1])
        return f"{where}{section + ': ' if section else ''}unknown key '{key[-1]}'; {said}"
    if kind in ("missing", "missing_argument"):
        return f"{where}{dotted} is missing"
    if kind == "value_error":
        said = str(error["ctx"]["error"]) if "ctx" in error else error["msg"]
        return f"{where}{dotted + ': ' if dotted else ''}{said}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        given = value.get("type") if isinstance(value, dict) else value
        return f"{where}{dotted}: type {given!r} is none of 'real', 'int', 'choice'"
    if kind == "literal_error":
        expected = error["ctx"]["expected"].replace(" or ", ", ")
        return f"{where}{dotted}: {value!r} is none of {expected}"
    if kind in _WANTED:
        shown = json.dumps(value) if isinstance(value, str | bool) else repr(value)
        return f"{where}{dotted}: {shown} is not {_WANTED[kind]}"
    return f"{where}{dotted}: {value!r}: {error['msg']}"


def _known_keys(key: tuple[str, ...]) -> list[str]:
    """The keys of the section at `key`, for suggestions."""
    section: Any = Study
    for i, part in enumerate(key):
        if key[:i] == ("search", "space"):
            return ["type", "low", "high", "log", "num", "values"]
        section = get_type_hints(section).get(part)
        if isinstance(section, types.UnionType):
            section = next(arg for arg in get_args(section) if arg is not type(None))
        if not dataclasses.is_dataclass(section):
            return []
    return [field.name for field in dataclasses.fields(section)]


def _where(path: Path, text: str, key: tuple[str, ...]) -> str:
    """ "file:line: " of the deepest part of `key` that has a line of its own."""
    found = ""
    section: tuple[str, ...] = ()
    best = -1
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[([^\[\]]+)\]\s*(#.*)?$", line)
        assigned = re.match(r'\s*("[^"]+"|[A-Za-z0-9_.-]+)\s*=', line)
        if header:
            here = section = _split(header[1])
        elif assigned:
            here = section + _split(assigned[1])
        else:
            continue
        if key[: len(here)] == here and len(here) > best:
            best, found = len(here), f":{number}"
    return f"{path}{found}: "


def _split(key: str) -> tuple[str, ...]:
    """A TOML key's parts: a."b.c" -> ("a", "b.c")."""
    parts = re.findall(r'"([^"]+)"|([A-Za-z0-9_-]+)', key)
    return tuple(quoted or bare for quoted, bare in parts)
