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
import itertools
import json
import math
import os
import re
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from apps.contract import (
    FILE,
    OWN_LOSS,
    Count,
    Data,
    Layout,
    Model,
    N3LOError,
    Natural,
    Objective,
    OptionalCount,
    OptionalPositive,
    Plain,
    Range,
    Section,
    Training,
    goal_of,
    metric_name,
    require,
)
from apps.rules import check_collate, check_ranks, check_used
from apps.staging import stage
from workflow import toml
from workflow.expression import Expression
from workflow.space import (
    Choice,
    Dimension,
    Integer,
    Ordinal,
    Point,
    Real,
    Scalar,
    Space,
    SpaceError,
)

# What a trial may replace. The folds and the files are the same for all trials, or their scores
# could not be compared.
SEARCHABLE = ("model.", "data.", "training.", "layout.")

# Values that may be valid alone and not together (see `check_ranks`).
GO_TOGETHER = (
    "layout.",
    *("training.strategy", "training.backend", "training.exchange.", "training.reduction."),
    *("training.split.", "training.optimizer.", "training.precision", "training.accumulate"),
    *("training.schedule_per", "training.sync_batchnorm", "training.compile"),
    *("training.cuda_graphs", "training.recompute"),
    *("training.scheduler.", "training.lr_scaling", "training.batch_size"),
)
MOST_COMBINATIONS = 1000  # of choices that are tried
MOST_VALUES = 16  # of an integer, for each to be tried
NOT_SEARCHABLE = (
    *("data.files", "data.folds", "data.fold_by", "data.transforms", "data.collate"),
    *("data.reader", "data.weights", "data.file_numbers", "model.files"),
    *("training.metrics", "training.tensorboard"),
)

BUDGET = ("search.num_trials", "search.num_parallel")  # a run folder knows those of each start

SEVERAL_OBJECTIVES = ("multi", "optuna")  # methods that look for a Pareto front

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"  # of a study, which names a folder

# A key of TOML, such as a."b.c".'d e', and a part of it.
PART = r"""[\w-]+|"(?:[^"\\]|\\.)+"|'[^']+'"""
KEY = rf"[ \t]*(?:{PART})(?:[ \t]*\.[ \t]*(?:{PART}))*[ \t]*"

# What a further objective may be besides a metric: numbers of each training's result.
RESULT_FACTS = ("num_parameters", "seconds", "samples_per_second", "inference_us")


@dataclass(frozen=True, kw_only=True)
class Racing(Section):
    """Leave out a trial's other folds once its chance to be the best is below `alpha`."""

    alpha: Annotated[float, Range(above=0, below=0.5)] = 0.05  # a probability
    min_folds: Count = 1  # that each trial is trained on


@dataclass(frozen=True, kw_only=True)
class Stop(Section):
    """When no more trials are proposed, though there are fewer than `num_trials`."""

    value: float | None = None  # the score of a trial that is good enough
    no_improvement: OptionalCount = None  # trials in a row that are not the best so far
    node_hours: OptionalPositive = None  # used by trainings
    hours: OptionalPositive = None  # that drivers were at work
    failures: Count = 10  # trials failed in a row


@dataclass(frozen=True, kw_only=True)
class Search(Section):
    """How points of the space are proposed, and how many."""

    method: str = "bayesian"  # or random, grid, sobol, evolution, halving, population, ...
    objective: Objective  # what a task returns to the search
    further_objectives: list[Objective] = field(default_factory=list)  # for a Pareto front
    # a score is the mean over folds, worsened by so many deviations
    spread_penalty: Annotated[float, Range(at_least=0)] = 0.0
    num_trials: Count  # points of the space that are tried, at most
    num_parallel: Count = 1  # N_G, trials that run at once
    prepare_ahead: Natural = 0  # proposals made before there is a slot for them
    # by the dotted path of the value that a trial replaces
    space: dict[str, Dimension] = field(metadata={"schema": {"minProperties": 1}})
    constraints: list[str] = field(default_factory=list)  # "model.args.width <= 512"
    first_points: list[dict[str, Scalar]] = field(default_factory=list)  # the search fills them in
    warm_start: list[str] = field(default_factory=list)  # run folders of earlier studies
    racing: Racing | None = None  # None = each trial trains all its folds
    stop: Stop = field(default_factory=Stop)  # before there are num_trials
    options: dict[str, Plain] = field(default_factory=dict)  # of the method: docs/search.md

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.space) >= 1, "space: name at least one value to search")
        has_further = len(self.further_objectives) > 0
        require(
            has_further or self.method != "multi",
            "further_objectives: method 'multi' needs at least one",
        )
        require(
            not has_further or self.method in SEVERAL_OBJECTIVES,
            f"further_objectives: only {SEVERAL_OBJECTIVES} have them, not '{self.method}'",
        )
        metrics = [self.objective.metric]
        for objective in self.further_objectives:
            twice = objective.metric in metrics
            require(not twice, f"further_objectives: '{objective.metric}' is an objective twice")
            metrics.append(objective.metric)


@dataclass(frozen=True, kw_only=True)
class Study(Section):
    """All sections of a study file."""

    name: str = field(metadata={"schema": {"pattern": f"^{NAME}$"}})  # of the run folder
    seed: Natural = 1  # of weights, folds, shuffling and search
    model: Model  # what is trained
    data: Data  # what it is trained on
    training: Training = field(default_factory=Training)  # how
    layout: Layout = field(default_factory=Layout)  # on how many ranks, cores and GPUs
    search: Search  # for the best values

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            re.fullmatch(NAME, self.name) is not None,
            f"name: '{self.name}' must be letters, digits, '.', '_', '-' (it names a folder)",
        )
        require(self.name != "cache", "name: 'cache' is the folder of the results of all studies")
        if self.training.loss != OWN_LOSS:  # else the model knows, which runs in another process
            self.check_metrics(metric_names(self.training))
        self._check_goals()
        self._check_folds()
        check_ranks(self.training, self.layout)
        check_collate(self.data, self.training, self.layout)
        check_used(self.training, self.layout, self.search.space)

    def check_metrics(self, measured: list[str]) -> None:
        """See that what the study decides by is measured.

        Raises:
            ValueError: it is not; the text names the key.
        """
        for objective in self.search.further_objectives:
            self._check_metric(
                "search.further_objectives", objective.metric, [*measured, *RESULT_FACTS]
            )
        for key, metric in self._metrics_in_use():
            self._check_metric(key, metric, measured)

    def _check_metric(self, key: str, metric: str, known: list[str]) -> None:
        require(
            metric in known,
            f"{key}: there is no metric '{metric}'; with these training.metrics there are: "
            f"{', '.join(known)}",
        )

    def _check_goals(self) -> None:
        for key in ("early_stopping", "target"):
            watched = getattr(self.training, key)
            require(
                watched is None or watched.goal is not None or goal_of(watched.metric) is not None,
                f"training.{key}.goal: the name '{watched and watched.metric}' does not say what "
                "is better of it; set it to 'min' or 'max'",
            )

    def _check_folds(self) -> None:
        folds, racing = self.data.folds, self.search.racing
        require(
            self.search.spread_penalty == 0 or folds >= 2,
            f"search.spread_penalty: needs data.folds of at least 2, not {folds}",
        )
        if racing is not None:
            require(
                folds > racing.min_folds,
                f"search.racing: needs data.folds above min_folds = {racing.min_folds}, "
                f"not {folds}",
            )

    def _metrics_in_use(self) -> Iterator[tuple[str, str]]:
        yield "search.objective.metric", self.search.objective.metric
        if self.training.early_stopping is not None:
            yield "training.early_stopping.metric", self.training.early_stopping.metric
        if self.training.target is not None:
            yield "training.target.metric", self.training.target.metric


def metric_names(training: Training) -> list[str]:
    """What a training measures each epoch: the loss and the metrics, on training and validation."""
    names = ["loss", *map(metric_name, training.metrics)]
    return names + [f"val_{name}" for name in names]


@dataclass(frozen=True)
class StudyFile:
    """A study and where it came from."""

    path: Path
    text: str
    content: dict[str, Any]  # the TOML, with what was replaced
    study: Study
    replaced: Mapping[str, Plain] = field(default_factory=dict)  # dotted path -> value

    @cached_property
    def copy(self) -> str:
        """The text that a run folder keeps: its own, where no more than the budget is replaced.

        Raises:
            N3LOError: a value is none that TOML has.
        """
        beyond = {name: value for name, value in self.replaced.items() if name not in BUDGET}
        if not beyond:
            return self.text
        said = ", ".join(
            f"{name} left out" if value is None else f"{name} = {toml.value(value, name)}"
            for name, value in beyond.items()
        )
        return f"# {self.path.name} with {said}\n{toml.text(self.content)}"

    @cached_property
    def space(self) -> Space:
        """
        Raises:
            SpaceError: a condition or a constraint is wrong; not of a file that `load` gave.
        """
        search = self.study.search
        try:
            constraints = tuple(Expression.parse(text) for text in search.constraints)
        except ValueError as error:
            raise SpaceError(str(error), "constraints") from None
        return Space(search.space, constraints)

    def own_values(self) -> dict[str, Scalar]:
        """What the study itself says, by dotted path: every value that a trial could replace."""
        sections = dataclasses.asdict(self.study)
        searchable = {name: sections[name] for name in ("model", "data", "training", "layout")}
        return {
            ".".join(key): value
            for key, value in _leaves(searchable)
            if isinstance(value, bool | int | float | str)
        }

    def at(self, point: Point) -> Study:
        """The study of one trial: this one with the point's values replaced.

        Raises:
            N3LOError: the study is not valid there.
        """
        keys = {tuple(path.split(".")): value for path, value in point.items()}
        return _validate(self._with(keys), self.path, self.text)

    def replacing(self, overrides: Mapping[str, Plain]) -> StudyFile:
        """This file with values in place of those that it has; see `load`.

        Raises:
            N3LOError: a path or a value is wrong.
        """
        values: dict[tuple[str, ...], Plain] = {}
        for path, value in overrides.items():
            key = _split(path)
            if not key:
                raise N3LOError(
                    f"{self.path}: {path!r} is no path of a value; write one as in "
                    "'training.epochs', with quotes around a part that has dots or blanks"
                )
            is_section = len(key) == 1 and isinstance(getattr(self.study, key[0], None), Section)
            parts = {key: value}
            if is_section and isinstance(value, dict):
                parts = {(*key, name): part for name, part in value.items()}
            for each in parts:
                values.pop(each, None)  # the last to be set is the last to be put
            values |= parts
        content = self._with(values)
        replaced = {".".join(map(toml.key, key)): value for key, value in values.items()}
        study = _validate(content, self.path, self.text)
        return StudyFile(self.path, self.text, content, study, replaced)

    def _with(self, values: Mapping[tuple[str, ...], Plain]) -> dict[str, Any]:
        """A copy of the content with the values at these keys.

        Raises:
            N3LOError: a key leads into a value that is no table.
        """
        content = copy.deepcopy(self.content)
        for key, value in values.items():
            try:
                _put(content, self.study, key, value)
            except ValueError as error:
                raise N3LOError(f"{self.where(*key)}{_dotted(key)}: {error}") from None
        return content

    def data_files(self, fetched: Path | None = None) -> list[Path]:
        """The data files, absolute, in the study's order; a pattern gives its matches sorted.

        Args:
            fetched: the folder of remote files, such as root://host/path, that data.copy_command
                has fetched or fetches now. All nodes see it, and not all see the network.

        Raises:
            N3LOError: a file is not there or cannot be fetched, or a pattern matches none.
        """
        files: list[Path] = []
        folder = self.path.parent.resolve()
        where = self.where("data", "files") + "data.files"
        for name in self.study.data.files:
            if is_remote(name):
                files.append(self._fetched(name, fetched))
                continue
            found = self.matching(name)
            folder_of_files = next((path for path in found if path.is_dir()), None)
            if folder_of_files is not None:
                raise N3LOError(
                    f"{where}: '{name}' is a folder; name the files in it, as in '{name}/*.h5'"
                )
            if not found:
                what = "no file matches" if glob.has_magic(name) else "there is no file"
                raise N3LOError(f"{where}: {what} '{name}' ({folder / Path(name).expanduser()})")
            twice = [path for path in found if path in files]
            if twice:  # its events would be in training and validation at once
                raise N3LOError(f"{where}: '{name}' names {twice[0]} once more")
            files += found
        return files

    def file_numbers(self) -> list[float] | None:
        """Of each of the data files, that of its entry in the study; None if no field is "@file".

        Raises:
            N3LOError: there are not as many as entries, or nothing takes them.
        """
        data, where = self.study.data, self.where("data", "file_numbers") + "data.file_numbers"
        if FILE not in f"{data.inputs} {data.targets} {data.weights}":
            if data.file_numbers is not None:
                raise N3LOError(f"{where}: no field is '{FILE}', which they would be")
            return None
        given = data.file_numbers or list(range(len(data.files)))
        if len(given) != len(data.files):
            raise N3LOError(
                f"{where}: {len(given)} numbers are not one for each of the {len(data.files)} "
                "entries of data.files"
            )
        return [
            number
            for name, number in zip(data.files, given, strict=True)
            for _ in ([name] if is_remote(name) else self.matching(name))
        ]

    def matching(self, name: str) -> list[Path]:
        """What a path or a pattern of the study names, absolute and sorted; it may be nothing."""
        path = Path(name).expanduser()
        exact = self.path.parent / path  # though brackets be in its name
        found = [str(path)] if exact.exists() else glob.glob(str(path), root_dir=self.path.parent)
        return [(self.path.parent / each).resolve() for each in sorted(found)]

    def _fetched(self, name: str, folder: Path | None) -> Path:
        where, command = self.where("data", "files"), self.study.data.copy_command
        if command is None and "DATA_COPY_COMMAND" not in os.environ:
            raise N3LOError(
                f"{where}data.files: '{name}' is remote; set data.copy_command to what fetches it, "
                f'such as "xrdcp {{}} {{}}" or "aws s3 cp {{}} {{}}"'
            )
        print(f"data.files: '{name}' is fetched, unless it is in '{folder}' already", flush=True)
        try:
            [path] = stage([name], str(folder), command)
        except N3LOError as error:
            raise N3LOError(f"{where}{error}") from None
        return path

    def where(self, *key: str) -> str:
        """ "file:line: " of a key."""
        return _where(self.path, self.text, key)


def is_remote(name: str) -> bool:
    """Whether a data file's name is a URL and no path."""
    return "://" in name


def load(path: Path, overrides: Mapping[str, Plain] | None = None) -> StudyFile:
    """Read and check a study file.

    Args:
        path: the TOML file.
        overrides: dotted path -> value, in place of what the file says. A part that has dots is
            in quotes, as in TOML; a whole section replaces those of its keys that it names. None
            leaves out what the file says: the default is back.

    Raises:
        N3LOError: the file or a value in it is wrong; one line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise N3LOError(f"there is no study file '{path}'{_similar_file(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise N3LOError(f"cannot read the study file '{path}': {error}") from None
    return parse(text, path, overrides)


def parse(text: str, path: Path, overrides: Mapping[str, Plain] | None = None) -> StudyFile:
    """Check the text of a study file.

    Args:
        path: where it is, or is to be: files are looked for beside it, and errors name it.
        overrides: as of `load`.

    Raises:
        N3LOError: a value in it is wrong; one line.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise N3LOError(f"{path}: not valid TOML: {error}") from None
    file = StudyFile(path, text, content, _validate(content, path, text))
    if overrides:
        file = file.replacing(overrides)
    for dotted in file.study.search.space:
        _check_path(file, dotted)
    _check_space(file)
    for dotted, dimension in file.study.search.space.items():
        _check_ends(file, dotted, dimension)
    _check_together(file)
    return file


def _put(table: dict[str, Any], known: Any, key: Sequence[str], value: Plain) -> None:
    """Put a value at a key of nested tables; None takes away what is there.

    Args:
        table: as written, without defaults.
        known: the same as the study has it: a section, or a table.

    Raises:
        ValueError: there is a value on the way that is no table, or nothing can be there.
    """
    name, *further = key
    inner = known.get(name) if isinstance(known, dict) else getattr(known, name, None)
    if value is None and name not in table:
        if isinstance(known, Section) and not hasattr(known, name):
            raise ValueError(f"there is no '{name}' to leave out")
    elif further:
        default = copy.deepcopy(inner) if isinstance(inner, dict) else {}  # as of the optimizer
        below = table.setdefault(name, default)
        if not isinstance(below, dict):
            raise ValueError(f"'{name}' is {below!r}, which is replaced whole")
        _put(below, inner, further, value)
    elif value is None:
        del table[name]
    elif isinstance(known, Study) and isinstance(inner, Section):
        raise ValueError(f"{value!r} is not a table")
    else:
        table[name] = value


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
    if any(f"{dotted}.".startswith(f"{each}.") for each in NOT_SEARCHABLE):
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


def _check_space(file: StudyFile) -> None:
    """Dimensions, constraints and first points must go together, and leave at least one point."""
    try:
        space = file.space
        space.check()
    except SpaceError as error:
        raise N3LOError(f"{file.where(*error.key)}{error}") from None
    try:
        space.sample(np.random.default_rng(0))
    except N3LOError as error:
        raise N3LOError(f"{file.where('search', 'constraints')}{error}") from None
    for number, point in enumerate(file.study.search.first_points, start=1):
        reason = space.why_not(point)
        if reason is not None:
            where = file.where("search", "first_points") + "search.first_points"
            raise N3LOError(f"{where}: point {number}: {reason}")


def _check_ends(file: StudyFile, dotted: str, dimension: Dimension) -> None:
    """The study must be valid at each end of a dimension, or trials would fail on the way."""
    if isinstance(dimension, Choice | Ordinal):
        ends = dimension.values
    else:
        ends = [dimension.low, dimension.high]
    above = file.space.reached(dotted) or {}  # where it is active
    for value in ends:
        try:
            file.at({**above, dotted: value})
        except N3LOError as error:
            reason = str(error).split(": ", 1)[-1]
            where = file.where("search", "space", dotted) + "search.space"
            raise N3LOError(f"{where}: '{dotted}' = {value!r} is not valid: {reason}") from None


def _few_values(dimension: Dimension) -> Sequence[Scalar]:
    """All that a dimension may be, if that can be tried."""
    if isinstance(dimension, Choice | Ordinal):
        return dimension.values
    if isinstance(dimension, Integer) and dimension.high - dimension.low < MOST_VALUES:
        return range(dimension.low, dimension.high + 1)
    return ()


def _check_together(file: StudyFile) -> None:
    """Choices that are valid alone must be so together, or a search would end at that trial."""
    space = file.space
    choices = {
        path: _few_values(dimension)
        for path, dimension in space.dimensions.items()
        if path.startswith(GO_TOGETHER) and _few_values(dimension)
    }
    for values in itertools.islice(itertools.product(*choices.values()), MOST_COMBINATIONS):
        together = dict(zip(choices, values, strict=True))
        active = space.active(together)
        point = {path: value for path, value in together.items() if path in active}
        if space.why_not(point) is None:
            try:
                file.at(point)
            except N3LOError as error:
                shown = ", ".join(f"'{path}' = {value!r}" for path, value in point.items())
                where = file.where("search", "space") + "search.space"
                reason = str(error).split(": ", 1)[-1]
                raise N3LOError(
                    f"{where}: {shown} do not go together: {reason}; add a constraint, or 'when'"
                ) from None


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

_DIMENSIONS: dict[str, type] = {"real": Real, "int": Integer, "choice": Choice, "ordinal": Ordinal}
_TYPES = ", ".join(map(repr, _DIMENSIONS))

# What pydantic puts between the keys of a value that may be of several types.
_TAGS = {
    *("real", "int", "choice", "ordinal", "bool", "float", "str"),
    *("list[str]", "dict[str,str]", "list[float]", "dict[str,float]", "Model"),
    *("list[any]", "dict[str,any]"),
}

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
    in_space = location[:2] == ("search", "space")
    dimension = _DIMENSIONS.get(location[3]) if in_space and len(location) > 3 else None
    key = tuple(part for i, part in enumerate(location) if i == 0 or part not in _TAGS)
    dotted = _dotted(key)
    where = _where(path, text, key)
    kind, value = error["type"], error["input"]
    if kind == "unexpected_keyword_argument":
        known = _keys_of(dimension) if dimension else _known_keys(key[:-1])
        near = difflib.get_close_matches(key[-1], known, 1)
        said = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(known)}"
        section = _dotted(key[:-1])
        return f"{where}{section + ': ' if section else ''}unknown key '{key[-1]}'; {said}"
    if kind in ("missing", "missing_argument"):
        return f"{where}{dotted} is missing"
    if kind == "value_error":
        said = str(error["ctx"]["error"]) if "ctx" in error else error["msg"]
        inner = said.partition(":")[0].split(".")  # checks of a whole section begin with the key
        where = _where(path, text, (*key, *inner))
        return f"{where}{dotted + ': ' if dotted else ''}{said}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        given = value.get("type") if isinstance(value, dict) else value
        return f"{where}{dotted}: type {given!r} is none of {_TYPES}"
    if kind == "literal_error":
        expected = error["ctx"]["expected"].replace(" or ", ", ")
        return f"{where}{dotted}: {value!r} is none of {expected}"
    if location[-1:] == ("bool",):  # the first of a scalar's types
        return f"{where}{dotted}: {value!r} is not a number, a text, true or false"
    if kind in _WANTED:
        shown = json.dumps(value) if isinstance(value, str | bool) else repr(value)
        return f"{where}{dotted}: {shown} is not {_WANTED[kind]}"
    return f"{where}{dotted}: {value!r}: {error['msg']}"


def _dotted(key: tuple[str, ...]) -> str:
    """A key as TOML writes it."""
    return ".".join(f'"{part}"' if "." in part else part for part in key)


def _known_keys(key: tuple[str, ...]) -> list[str]:
    """The keys of the section at `key`, for suggestions."""
    section: Any = Study
    for part in key:
        if get_origin(section) is list:  # `part` is the place in it
            [section] = get_args(section)
        else:
            section = get_type_hints(section).get(part)
        if isinstance(section, types.UnionType):
            section = next(arg for arg in get_args(section) if arg is not type(None))
        if not dataclasses.is_dataclass(section) and get_origin(section) is not list:
            return []
    return _keys_of(section)


def _keys_of(section: type) -> list[str]:
    return [field.name for field in dataclasses.fields(section)]


def _where(path: Path, text: str, key: tuple[str, ...]) -> str:
    """ "file:line: " of the deepest part of `key` that has a line of its own."""
    found = ""
    section: tuple[str, ...] = ()
    best = -1
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(rf"\s*\[({KEY})\]\s*(#.*)?$", line)
        assigned = re.match(rf"({KEY})=", line)
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
    """A TOML key's parts: a."b.c" -> ("a", "b.c"); none of what is no key."""
    if re.fullmatch(KEY, key) is None:
        return ()
    texts = [part if part[0] in "\"'" else f'"{part}"' for part in re.findall(PART, key)]
    try:
        return tuple(tomllib.loads(f"_ = [{', '.join(texts)}]")["_"])
    except tomllib.TOMLDecodeError:  # an escape that is none
        return ()
