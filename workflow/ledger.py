"""The ledger: the only state of a study. JSON lines, appended and fsynced; read as pandas tables.

Events, one a line:
    session  a driver started: version, host, site, fingerprint, number of trials
    trial    a point was proposed, before anything of it was submitted
    start    an attempt at a task was submitted
    end      an attempt ended: done (with its result) or failed (with its reason)
    rerun    the user asked for trials to run again
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from apps.contract import (
    Failure,
    Fingerprint,
    TrainTask,
    append_json_line,
    read_json_lines,
)
from workflow.search.base import Observation
from workflow.space import Point

NAME = "ledger.jsonl"


@dataclass
class TaskState:
    """What the ledger knows of one (trial, fold)."""

    key: str = ""
    attempts: int = 0
    status: str = "waiting"  # waiting, running, done, failed
    reason: str = ""
    message: str = ""
    cached: bool = False
    submitted: float = math.nan  # Unix seconds
    ended: float = math.nan
    folder: str = ""  # of its files, relative to the run folder
    result: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrialState:
    """What the ledger knows of one trial."""

    trial: int
    point: Point
    tasks: dict[int, TaskState]  # by fold

    def observation(self) -> Observation | None:
        """What the search is told: None while a fold is missing.

        The mean is taken in the folds' order, not in the order in which they ended: the last bit
        differs, and a search that compares scores would then take another path.
        """
        states = [self.tasks[fold] for fold in sorted(self.tasks)]
        if any(state.status in ("waiting", "running") for state in states):
            return None
        if any(state.status == "failed" for state in states):
            return Observation(point=self.point, value=None, noise=None)
        mean, spread = _mean_and_spread([state.result["fom"] for state in states])
        noise = spread / math.sqrt(len(states)) if len(states) > 1 else None
        return Observation(point=self.point, value=mean, noise=noise)


def _mean_and_spread(values: list[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; the latter is NaN of one value."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


class Ledger:
    """The ledger of one run folder. Reading is safe while a driver writes."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.path = self.folder / NAME
        self.sessions: list[dict[str, Any]] = []
        self.trials_by_number: dict[int, TrialState] = {}
        for row in read_json_lines(self.path):
            self._apply(row)

    # -- writing -----------------------------------------------------------------------------

    def record_session(self, **facts: Any) -> None:
        self._record("session", **facts)

    def record_trial(self, trial: int, point: Point, num_folds: int) -> None:
        self._record("trial", trial=trial, point=point, num_folds=num_folds)

    def record_start(self, task: TrainTask, attempt: int) -> None:
        self._record("start", trial=task.trial, fold=task.fold, attempt=attempt, key=task.key())

    def record_done(
        self, task: TrainTask, result: dict[str, Any], *, cached: bool, folder: str
    ) -> None:
        self._record_end(task, status="done", cached=cached, folder=folder, result=result)

    def record_failed(self, task: TrainTask, failure: Failure, *, folder: str) -> None:
        self._record_end(
            task, status="failed", reason=failure.reason, message=failure.message, folder=folder
        )

    def record_rerun(self, trials: list[int]) -> None:
        self._record("rerun", trials=trials)

    def _record_end(self, task: TrainTask, **facts: Any) -> None:
        self._record("end", trial=task.trial, fold=task.fold, key=task.key(), **facts)

    def _record(self, event: str, **facts: Any) -> None:
        row = {"event": event, "time": time.time(), **facts}
        append_json_line(self.path, row)
        self._apply(row)

    # -- replaying ---------------------------------------------------------------------------

    def _apply(self, row: dict[str, Any]) -> None:
        handler = getattr(self, f"_apply_{row.get('event')}", None)
        if handler is not None:  # an event of a later version is passed over
            handler(row)

    def _apply_session(self, row: dict[str, Any]) -> None:
        if self.sessions and self.sessions[-1]["fingerprint"] != row["fingerprint"]:
            for trial in self.trials_by_number.values():
                _forget(trial)
        for trial in self.trials_by_number.values():
            for state in trial.tasks.values():
                if state.status == "running":  # its driver is gone
                    state.status, state.reason = "waiting", "lost"
        self.sessions.append(row)

    def _apply_trial(self, row: dict[str, Any]) -> None:
        tasks = {fold: TaskState() for fold in range(row["num_folds"])}
        self.trials_by_number[row["trial"]] = TrialState(row["trial"], row["point"], tasks)

    def _apply_start(self, row: dict[str, Any]) -> None:
        state = self._state(row)
        state.key, state.attempts = row["key"], row["attempt"]
        state.status, state.reason, state.message = "running", "", ""
        state.submitted, state.ended = row["time"], math.nan

    def _apply_end(self, row: dict[str, Any]) -> None:
        state = self._state(row)
        state.key, state.status, state.ended = row["key"], row["status"], row["time"]
        state.reason, state.message = row.get("reason", ""), row.get("message", "")
        state.cached, state.folder = row.get("cached", False), row["folder"]
        state.result = row.get("result", {})

    def _apply_rerun(self, row: dict[str, Any]) -> None:
        for number in row["trials"]:
            _forget(self.trials_by_number[number])

    def _state(self, row: dict[str, Any]) -> TaskState:
        return self.trials_by_number[row["trial"]].tasks[row["fold"]]

    # -- reading -----------------------------------------------------------------------------

    def state(self, task: TrainTask) -> TaskState:
        return self.trials_by_number[task.trial].tasks[task.fold]

    def has_result(self, task: TrainTask) -> bool:
        """Whether the task's result is in the ledger."""
        state = self.state(task)
        return state.status == "done" and state.key == task.key()

    def known_points(self) -> tuple[list[Observation], list[Point]]:
        """What the search is told: the trials that ended, and the points of those that have not."""
        history, pending = [], []
        for _, trial in sorted(self.trials_by_number.items()):
            observation = trial.observation()
            if observation is None:
                pending.append(trial.point)
            else:
                history.append(observation)
        return history, pending

    def relative(self, folder: Path) -> str:
        """A task's folder, relative to the run folder."""
        return os.path.relpath(folder, self.folder.resolve())

    def fingerprint(self) -> Fingerprint | None:
        """Of the last session; None before the first."""
        return Fingerprint(**self.sessions[-1]["fingerprint"]) if self.sessions else None

    def tasks(self) -> pd.DataFrame:
        """One row a (trial, fold), sorted by them; the columns are documented in the README."""
        return _table(list(self._task_rows()), self._task_columns())

    def trials(self) -> pd.DataFrame:
        """One row a trial; the columns are documented in the README."""
        return _table(list(self._trial_rows()), self._trial_columns())

    def history(self, trial: int, fold: int) -> pd.DataFrame:
        """One row an epoch of one task: epoch, loss, val_loss, metrics, lr, seconds."""
        state = self.trials_by_number[trial].tasks[fold]
        folder = self.folder / (state.folder or f"t{trial:03d}-f{fold}")
        return pd.DataFrame(read_json_lines(folder / "history.jsonl"))

    def _parameters(self) -> list[str]:
        names: dict[str, None] = {}
        for trial in self.trials_by_number.values():
            names.update(dict.fromkeys(trial.point))
        return list(names)

    def _metrics(self) -> list[str]:
        names: dict[str, None] = {}
        for trial in self.trials_by_number.values():
            for state in trial.tasks.values():
                names.update(dict.fromkeys(state.result.get("metrics", {})))
        return list(names)

    def _task_columns(self) -> list[str]:
        return [
            *("trial", "fold", "status", "reason", "fom"),
            *self._parameters(),
            *self._metrics(),
            *("epoch", "epochs", "stopped", "seconds", "samples_per_second", "num_ranks", "host"),
            *("attempt", "cached", "submitted", "ended", "message", "key", "folder"),
        ]

    def _task_rows(self) -> Iterator[dict[str, Any]]:
        for number, trial in sorted(self.trials_by_number.items()):
            for fold, state in sorted(trial.tasks.items()):
                result = state.result
                yield {
                    **{name: result.get(name) for name in _RESULT_COLUMNS},
                    **result.get("metrics", {}),
                    **trial.point,
                    "trial": number,
                    "fold": fold,
                    "status": state.status,
                    "reason": state.reason,
                    "host": ",".join(dict.fromkeys(result.get("hosts", []))),
                    "attempt": state.attempts,
                    "cached": state.cached,
                    "submitted": _utc(state.submitted),
                    "ended": _utc(state.ended),
                    "message": state.message,
                    "key": state.key,
                    "folder": state.folder,
                }

    def _trial_columns(self) -> list[str]:
        return ["trial", "status", "score", "spread", *self._parameters(), "done", "seconds"]

    def _trial_rows(self) -> Iterator[dict[str, Any]]:
        for number, trial in sorted(self.trials_by_number.items()):
            states = [trial.tasks[fold] for fold in sorted(trial.tasks)]
            foms = [state.result["fom"] for state in states if state.status == "done"]
            score, spread = (
                _mean_and_spread(foms) if len(foms) == len(states) else (math.nan, math.nan)
            )
            yield {
                **trial.point,
                "trial": number,
                "status": _trial_status({state.status for state in states}),
                "score": score,
                "spread": spread,
                "done": len(foms),
                "seconds": sum(state.result.get("seconds", 0.0) for state in states),
            }


_RESULT_COLUMNS = (
    "fom", "epoch", "epochs", "stopped", "seconds", "samples_per_second", "num_ranks",
)  # fmt: skip


# The types of columns, of which some may be empty or all missing; those of parameters come from
# their values, and all others are float64.
_INTEGERS = ("trial", "fold", "epoch", "epochs", "num_ranks", "attempt", "done")
_TEXTS = ("status", "reason", "stopped", "host", "message", "key", "folder")
_DTYPES: dict[str, str] = {
    **dict.fromkeys(_INTEGERS, "Int64"),
    **dict.fromkeys(_TEXTS, "string"),
    "cached": "boolean",
    "submitted": "datetime64[ns, UTC]",
    "ended": "datetime64[ns, UTC]",
}


def _table(rows: list[dict[str, Any]], columns: list[str]) -> pd.DataFrame:
    """Rows as a frame whose columns keep their type whatever is missing."""
    return pd.DataFrame({name: _column([row.get(name) for row in rows], name) for name in columns})


def _column(values: list[Any], name: str) -> pd.Series[Any]:
    return pd.Series(values, dtype=_DTYPES.get(name) or _dtype_of(values))


def _dtype_of(values: list[Any]) -> str:
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float}:
        return "Int64" if kinds == {int} else "float64"
    return {frozenset({bool}): "boolean", frozenset({str}): "string"}.get(
        frozenset(kinds), "object"
    )


def _forget(trial: TrialState) -> None:
    """All of the trial's tasks are to be run again; their attempts go on counting."""
    trial.tasks = {fold: TaskState(attempts=old.attempts) for fold, old in trial.tasks.items()}


def _trial_status(of_tasks: set[str]) -> str:
    for status in ("running", "failed", "waiting"):
        if status in of_tasks:
            return status
    return "done"


def _utc(seconds: float) -> pd.Timestamp:
    return pd.Timestamp(seconds, unit="s", tz="UTC")  # NaN becomes NaT


def session_facts(fingerprint: Fingerprint, **facts: Any) -> dict[str, Any]:
    """The facts of a session row."""
    return {"fingerprint": dataclasses.asdict(fingerprint), **facts}
