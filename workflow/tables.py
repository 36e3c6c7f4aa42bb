"""The ledger as pandas tables: tidy, with columns that keep their type whatever is missing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from apps.contract import json_rows, read_json_lines
from workflow.scores import Scoring, mean_and_spread, pareto_front

if TYPE_CHECKING:
    from workflow.ledger import Attempt, TaskState, TrialState

Trials = Mapping[int, "TrialState"]  # by number

PARAMETERS = "*parameters*"  # stands for the dotted paths of the space
METRICS = "*metrics*"  # stands for what the trainings measured
SEARCH = "*search*"  # stands for what the search notes of its proposals
FILES_AT_ONCE = 500  # histories that are read into one block


@dataclass(frozen=True)
class Column:
    """One column, as docs/ledger.md has it."""

    name: str
    dtype: str  # of pandas; empty: by its values
    unit: str
    meaning: str


_WHICH = (
    Column("trial", "Int64", "", "number of the trial"),
    Column("fold", "Int64", "", "number of the fold"),
)
_WHERE = (
    Column("job", "string", "", "the batch job it ran in; empty where there is no batch system"),
    Column("host", "string", "", "its nodes, separated by commas"),
)
_WHY = (
    Column("reason", "string", "", "why it failed; the README lists all reasons"),
    Column("message", "string", "", "what was said when it failed"),
)
_WHEN = (
    Column("submitted", "datetime64[ns, UTC]", "UTC", "given to Parsl"),
    Column("begun", "datetime64[ns, UTC]", "UTC", "its ranks were launched"),
    Column("ended", "datetime64[ns, UTC]", "UTC", "its end was recorded"),
)

TASKS = (
    *_WHICH,
    Column("status", "string", "", "waiting, running, done, failed, dropped (by racing)"),
    _WHY[0],
    Column("fom", "float64", "of the metric", "the objective's metric at the selected epoch"),
    Column(PARAMETERS, "", "", "the trial's point: a column each dotted path of the space"),
    Column(METRICS, "float64", "of the metric", "losses and metrics at the selected epoch"),
    Column("epoch", "Int64", "", "the selected epoch, from 1"),
    Column("epochs", "Int64", "", "epochs that were trained"),
    Column("stopped", "string", "", "why training ended: epochs, early_stopping, target, ..."),
    Column("seconds", "float64", "s", "of training and validation, without start-up"),
    Column("seconds_per_epoch", "float64", "s", "of training and validation, in the mean epoch"),
    Column("samples_per_second", "float64", "1/s", "of all ranks together, in training steps"),
    Column("compute_s", "float64", "s", "of training steps: computing, in the mean rank"),
    Column("communication_s", "float64", "s", "of training steps: exchange beside no computing"),
    Column("data_s", "float64", "s", "of training steps: waiting for the next batch"),
    Column("idle_s", "float64", "s", "of training steps: waiting for the slowest rank"),
    Column("inference_us", "float64", "µs", "forward pass of an event in validation, on one rank"),
    Column("num_parameters", "Int64", "", "of the model"),
    Column("num_ranks", "Int64", "", "MPI ranks of the training"),
    Column("lost_ranks", "Int64", "", "that died in a training which went on without them"),
    Column("updates", "Int64", "", "of the central weights, where there are any"),
    Column("staleness", "float64", "updates", "mean number of others between weights and update"),
    *_WHERE,
    Column("attempt", "Int64", "", "how often it was started"),
    Column("cached", "boolean", "", "whether its result was taken from the cache"),
    *_WHEN,
    _WHY[1],
    Column("key", "string", "", "its key in the cache"),
    Column("folder", "string", "", "of its files, relative to the run folder"),
)

TRIALS = (
    _WHICH[0],
    Column("status", "string", "", "as of tasks; aside: outside a space that has changed"),
    Column("score", "float64", "of the metric", "mean over the folds, less any spread_penalty"),
    Column("spread", "float64", "of the metric", "sample standard deviation over the folds"),
    Column(METRICS, "float64", "of the metric", "further objectives: mean over the folds"),
    Column("pareto", "boolean", "", "whether it is in the front; with further objectives only"),
    Column(PARAMETERS, "", "", "its point: a column each dotted path of the space"),
    Column(SEARCH, "", "", "what else the search set, and its labels (rung, generation, ...)"),
    Column("parent", "Int64", "", "the trial that it went on from"),
    Column("done", "Int64", "", "folds that are done"),
    Column("seconds", "float64", "s", "of training and validation, all folds together"),
    Column("search_seconds", "float64", "s", "that its proposal took"),
)

ATTEMPTS = (
    *_WHICH,
    Column("attempt", "Int64", "", "number of the attempt, from 1"),
    Column("status", "string", "", "running, done, failed, or lost (its driver ended before it)"),
    *_WHY,
    *_WHERE,
    *_WHEN,
)

HISTORY = (
    *_WHICH,
    Column("epoch", "Int64", "", "from 1"),
    Column(METRICS, "float64", "of the metric", "losses and metrics after this epoch"),
    Column("lr", "float64", "", "learning rate"),
    Column("seconds", "float64", "s", "since training began, earlier attempts included"),
    Column("compute_s", "float64", "s", "of this epoch, as of tasks"),
    Column("communication_s", "float64", "s", "of this epoch, as of tasks"),
    Column("data_s", "float64", "s", "of this epoch, as of tasks"),
    Column("idle_s", "float64", "s", "of this epoch, as of tasks"),
)

_DTYPES = {
    column.name: column.dtype
    for column in (*TASKS, *TRIALS, *ATTEMPTS, *HISTORY)
    if column.dtype and not column.name.startswith("*")
}
# Numbers of a training's result that are columns as they are.
_OF_RESULT = (
    "fom", "epoch", "epochs", "stopped", "seconds", "samples_per_second", "compute_s",
    "communication_s", "data_s", "idle_s", "inference_us", "num_parameters", "num_ranks",
    "lost_ranks", "updates", "staleness",
)  # fmt: skip


def tasks(trials: Trials) -> pd.DataFrame:
    """One row a (trial, fold), sorted by them."""
    metrics = _names(state.result.get("metrics", {}) for _, _, state in _states(trials))
    rows = [
        {
            **{name: state.result.get(name) for name in _OF_RESULT},
            **state.result.get("metrics", {}),
            **trial.point,
            "trial": trial.proposal.number,
            "fold": fold,
            "seconds_per_epoch": seconds_per_epoch(state.result),
            "status": state.status,
            "reason": state.reason,
            "host": ",".join(dict.fromkeys(state.result.get("hosts", state.nodes))),
            "job": state.job,
            "attempt": state.attempts,
            "cached": state.cached,
            "submitted": state.submitted,
            "begun": state.begun,
            "ended": state.ended,
            "message": state.message,
            "key": state.key,
            "folder": state.folder,
        }
        for trial, fold, state in _states(trials)
    ]
    return _table(rows, _filled(TASKS, {PARAMETERS: parameters(trials), METRICS: metrics}))


def trials(trials: Trials, scoring: Scoring) -> pd.DataFrame:
    """One row a trial, sorted by number."""
    further = [each.metric for each in scoring.further]
    rows = [_trial_row(trial, scoring) for _, trial in sorted(trials.items())]
    if further:
        values = [[row.get(name, math.nan) for name in ("score", *further)] for row in rows]
        for row, is_best in zip(rows, pareto_front(values, scoring.goals), strict=True):
            row["pareto"] = is_best
    dimensions = parameters(trials)
    notes = _names({**t.proposal.settings, **t.proposal.tags} for t in trials.values())
    names = {
        PARAMETERS: dimensions,
        METRICS: further,
        SEARCH: [name for name in notes if name not in dimensions],
    }
    columns = _filled(TRIALS, names)
    return _table(rows, [name for name in columns if further or name != "pareto"])


def attempts(made: Iterable[Attempt]) -> pd.DataFrame:
    """One row an attempt at a task, in the order of their starts."""
    rows = [{**vars(each), "host": ",".join(each.nodes)} for each in made]
    return _table(rows, _filled(ATTEMPTS, {}))


def parameters(trials: Trials) -> list[str]:
    """The dotted paths of all points, in the order of the study."""
    return _names(trial.point for trial in trials.values())


def _trial_row(trial: TrialState, scoring: Scoring) -> dict[str, Any]:
    foms = trial.facts("fom")
    is_done = trial.status == "done"
    further = [each.metric for each in scoring.further if is_done]
    return {
        **trial.proposal.tags,
        **trial.proposal.settings,
        **trial.point,
        **{name: mean_and_spread(trial.facts(name))[0] for name in further},
        "trial": trial.proposal.number,
        "status": trial.status,
        "score": scoring.score(foms) if is_done else math.nan,
        "spread": mean_and_spread(foms)[1] if is_done else math.nan,
        "parent": trial.proposal.parent,
        "done": len(foms),
        "seconds": sum(trial.facts("seconds")),
        "search_seconds": trial.search_seconds,
    }


def seconds_per_epoch(result: Mapping[str, Any]) -> float | None:
    """Of the epochs of this task; those that it went on from are not in its seconds."""
    if not result:
        return None
    num_epochs: int = result["epochs"] - result.get("start_epoch", 0)
    return float(result["seconds"]) / num_epochs


# -- histories -------------------------------------------------------------------------------------


def history(path: Path) -> pd.DataFrame:
    """One row an epoch of the task whose history this is; without rows where there is none."""
    return pd.DataFrame(read_json_lines(path))


def histories(paths: Mapping[tuple[int, int], Path]) -> pd.DataFrame:
    """One row an epoch of each task, with `trial` and `fold` before it.

    Args:
        paths: the histories by (trial, fold); one that is not there has no rows, and a line that
            is being written is left out.
    """
    found = list(paths.items())
    blocks = [
        _block(dict(found[first : first + FILES_AT_ONCE]))
        for first in range(0, len(found), FILES_AT_ONCE)
    ]
    first_names = [column.name for column in (*_WHICH, HISTORY[2])]
    empty = pd.DataFrame({name: pd.Series(dtype=_DTYPES[name]) for name in first_names})
    frame = pd.concat([block for block in blocks if len(block)] or [empty], ignore_index=True)
    return frame[[*first_names, *frame.columns.difference(first_names, sort=False)]]


def _block(paths: Mapping[tuple[int, int], Path]) -> pd.DataFrame:
    """Of some files, read at once: a million lines one by one take most of a minute."""
    import pyarrow
    from pyarrow import json as arrow_json

    whole = {task: lines for task, path in paths.items() if (lines := _whole_lines(path))}
    if not whole:
        return pd.DataFrame()
    try:
        table = arrow_json.read_json(BytesIO(b"".join(whole.values())))
        frame: pd.DataFrame = table.to_pandas()
    except pyarrow.ArrowInvalid:  # NaN, or a line that a kill tore: no JSON for strict readers
        rows = {task: json_rows(lines) for task, lines in whole.items()}
        frame = pd.DataFrame([row for each in rows.values() for row in each])
        counts = [len(each) for each in rows.values()]
    else:
        counts = [lines.count(b"\n") for lines in whole.values()]
    for place, name in enumerate(("trial", "fold")):
        values = pd.Series([task[place] for task in whole], dtype="Int64")
        frame[name] = values.repeat(counts).reset_index(drop=True)
    for name in frame.columns.intersection([column.name for column in HISTORY]):
        frame[name] = pd.Series(frame[name], dtype=_DTYPES[name])
    return frame


def _whole_lines(path: Path) -> bytes:
    """Without the last line if it has no end yet, and without empty ones."""
    try:
        content = path.read_bytes()
    except OSError:
        return b""
    lines = content[: content.rfind(b"\n") + 1].split(b"\n")
    return b"".join(line + b"\n" for line in lines if line.strip())


# -- frames ----------------------------------------------------------------------------------------


def _states(trials: Trials) -> Iterable[tuple[TrialState, int, TaskState]]:
    for _, trial in sorted(trials.items()):
        for fold, state in sorted(trial.tasks.items()):
            yield trial, fold, state


def _names(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    """All keys, in the order in which they first come."""
    names: dict[str, None] = {}
    for mapping in mappings:
        names.update(dict.fromkeys(mapping))
    return list(names)


def _filled(columns: Sequence[Column], names: Mapping[str, list[str]]) -> list[str]:
    """The names of columns, with those that stand for others replaced by them."""
    return [name for column in columns for name in names.get(column.name, [column.name])]


def _table(rows: list[dict[str, Any]], names: list[str]) -> pd.DataFrame:
    return pd.DataFrame({name: _column([row.get(name) for row in rows], name) for name in names})


def _column(values: list[Any], name: str) -> pd.Series[Any]:
    dtype = _DTYPES.get(name) or _dtype_of(values)
    if dtype.startswith("datetime"):
        seconds = pd.Series(values, dtype="float64")  # NaN becomes NaT
        return pd.Series(pd.to_datetime(seconds, unit="s", utc=True), dtype="datetime64[ns, UTC]")
    return pd.Series(values, dtype=dtype)


def _dtype_of(values: list[Any]) -> str:
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float}:
        return "Int64" if kinds == {int} else "float64"
    return {frozenset({bool}): "boolean", frozenset({str}): "string"}.get(
        frozenset(kinds), "object"
    )


TABLES: dict[str, tuple[Column, ...]] = {
    "tasks": TASKS,
    "trials": TRIALS,
    "attempts": ATTEMPTS,
    "history": HISTORY,
}
