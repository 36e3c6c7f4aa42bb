"""The ledger: the only state of a study. JSON lines, appended and fsynced; read as pandas tables.

Events, one a line:
    session  a driver started: version, host, site, fingerprint, number of trials
    trial    a trial was proposed, before anything of it was submitted
    aside    trials that do not fit the space as it is in this session
    start    an attempt at a task was submitted
    end      an attempt ended: done (with its result) or failed (with its reason)
    drop     the folds of a trial that are not trained, because its first ones make it hopeless
    rerun    the user asked for trials to run again
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd

from apps.contract import (
    Failure,
    Fingerprint,
    Start,
    TrainTask,
    append_json_line,
    read_json_lines,
)
from workflow.folds import FoldModel
from workflow.scores import Scoring, mean_and_spread, pareto_front
from workflow.search.base import Observation, Proposal
from workflow.space import Point

NAME = "ledger.jsonl"
BAD_NODE = 3  # tasks in a row that failed on it
NOT_OF_A_NODE = ("walltime", "time_limit", "diverged", "parent")  # of failures
BUDGETS = ("training.epochs", "data.train_fraction")  # of which a search gives some trials less


@dataclass
class TaskState:
    """What the ledger knows of one (trial, fold)."""

    key: str = ""
    attempts: int = 0
    status: str = "waiting"  # waiting, running, done, failed, dropped
    reason: str = ""
    message: str = ""
    cached: bool = False
    submitted: float = math.nan  # Unix seconds
    begun: float = math.nan
    ended: float = math.nan
    occupied_s: float = 0.0  # for which all its attempts have had their room, seconds
    job: str = ""  # of the batch system
    nodes: list[str] = field(default_factory=list)
    folder: str = ""  # of its files, relative to the run folder
    result: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrialState:
    """What the ledger knows of one trial."""

    proposal: Proposal
    tasks: dict[int, TaskState]  # by fold
    keep_state: bool = False
    aside: bool = False  # it does not fit the space any more
    search_seconds: float = math.nan  # that its proposal took

    @property
    def point(self) -> Point:
        return self.proposal.point

    @property
    def status(self) -> str:
        """waiting, running, done, failed, dropped, or aside."""
        if self.aside:
            return "aside"
        statuses = {state.status for state in self.tasks.values()}
        order = ("running", "failed", "waiting", "dropped")
        return next((status for status in order if status in statuses), "done")

    @property
    def is_ended(self) -> bool:
        return all(state.status not in ("waiting", "running") for state in self.tasks.values())

    @property
    def is_done(self) -> bool:
        """Whether all folds have their results, also where the trial is aside."""
        return all(state.status == "done" for state in self.tasks.values())

    def foms(self) -> list[float | None]:
        """The figures of merit; None where there is none.

        In the order of folds and not in that in which they ended: the last bit of their mean would
        differ, and a search that compares scores would then take another path.
        """
        return [self.tasks[fold].result.get("fom") for fold in sorted(self.tasks)]

    def facts(self, name: str) -> list[float]:
        """A metric, or another number of the result, of each fold that has it, in their order."""
        found = []
        for fold in sorted(self.tasks):
            result = self.tasks[fold].result
            value = result.get("metrics", {}).get(name, result.get(name))
            if value is not None:
                found.append(float(value))
        return found

    def cost(self) -> float:
        """Rank-seconds of its trainings."""
        results = [state.result for state in self.tasks.values() if state.result]
        return float(sum(result["seconds"] * result["num_ranks"] for result in results))


class Ledger:
    """The ledger of one run folder. Reading is safe while a driver writes."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.path = self.folder / NAME
        self.sessions: list[dict[str, Any]] = []
        self.trials_by_number: dict[int, TrialState] = {}
        self._spans: list[tuple[float, float]] = []  # first and last row of each session
        self._failed_on: dict[str, set[tuple[int, int]]] = {}  # tasks, since one was done there
        self._least_s = 0.0
        for row in read_json_lines(self.path):
            self._apply(row)

    # -- writing -----------------------------------------------------------------------------

    def record_session(self, **facts: Any) -> None:
        self._record("session", **facts)

    def record_trial(
        self,
        proposal: Proposal,
        num_folds: int,
        seconds: float = 0.0,
        keep_state: bool = False,
    ) -> None:
        """A proposal, with its number.

        Args:
            seconds: how long the search took to make it.
            keep_state: whether others may go on from it, whatever the study's method is later.
        """
        self._record(
            "trial",
            trial=proposal.number,
            point=proposal.point,
            num_folds=num_folds,
            settings=dict(proposal.settings),
            parent=proposal.parent,
            tags=dict(proposal.tags),
            search_seconds=round(seconds, 4),
            keep_state=keep_state,
        )

    def record_aside(self, trials: list[int]) -> None:
        self._record("aside", trials=trials)

    def record_start(self, task: TrainTask, attempt: int) -> None:
        self._record("start", trial=task.trial, fold=task.fold, attempt=attempt, key=task.key())

    def record_done(
        self,
        task: TrainTask,
        result: dict[str, Any],
        *,
        cached: bool,
        folder: str,
        place: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """A task with its result.

        Args:
            place: `job`, `nodes` and `begun` of its last attempt, where it ran now.
        """
        self._record_end(task, status="done", cached=cached, folder=folder, result=result, **place)

    def record_failed(
        self,
        task: TrainTask,
        failure: Failure,
        *,
        folder: str,
        place: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._record_end(
            task,
            status="failed",
            reason=failure.name,
            message=failure.message,
            folder=folder,
            **place,
        )

    def record_orphaned(self, trial: int, message: str) -> None:
        """All folds of a trial failed, because there is nothing that they could go on from."""
        facts = {"status": "failed", "reason": "parent", "message": message}
        for fold in self.trials_by_number[trial].tasks:
            self._record("end", trial=trial, fold=fold, key="", folder="", **facts)

    def record_dropped(self, trial: int, folds: list[int], message: str) -> None:
        self._record("drop", trial=trial, folds=folds, message=message)

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
        if self._spans and row.get("event") != "session":
            self._spans[-1] = (self._spans[-1][0], row.get("time", 0.0))
        handler = getattr(self, f"_apply_{row.get('event')}", None)
        if handler is not None:  # an event of a later version is passed over
            handler(row)

    def _apply_session(self, row: dict[str, Any]) -> None:
        if self.sessions and self.sessions[-1]["fingerprint"] != row["fingerprint"]:
            for trial in self.trials_by_number.values():
                _forget(trial)
        for trial in self.trials_by_number.values():
            trial.aside = False
            for state in trial.tasks.values():
                if state.status == "running":  # its driver is gone
                    state.status, state.reason = "waiting", "driver_lost"
        self.sessions.append(row)
        self._spans.append((row["time"], row["time"]))

    def _apply_trial(self, row: dict[str, Any]) -> None:
        number = row["trial"]
        proposal = Proposal(
            row["point"], row.get("settings", {}), row.get("parent"), row.get("tags", {}), number
        )
        tasks = {fold: TaskState() for fold in range(row["num_folds"])}
        seconds = row.get("search_seconds", math.nan)
        self.trials_by_number[number] = TrialState(
            proposal, tasks, row.get("keep_state", False), search_seconds=seconds
        )

    def _apply_aside(self, row: dict[str, Any]) -> None:
        for number in row["trials"]:
            self.trials_by_number[number].aside = True

    def _apply_drop(self, row: dict[str, Any]) -> None:
        for fold in row["folds"]:
            state = self.trials_by_number[row["trial"]].tasks[fold]
            state.status, state.message = "dropped", row["message"]

    def _apply_start(self, row: dict[str, Any]) -> None:
        state = self._state(row)
        state.key, state.attempts = row["key"], row["attempt"]
        state.status, state.reason, state.message = "running", "", ""
        state.submitted, state.begun, state.ended = row["time"], math.nan, math.nan

    def _apply_end(self, row: dict[str, Any]) -> None:
        state = self._state(row)
        state.key, state.status, state.ended = row["key"], row["status"], row["time"]
        state.reason, state.message = row.get("reason", ""), row.get("message", "")
        state.cached, state.folder = row.get("cached", False), row["folder"]
        state.result = row.get("result", {})
        state.job, state.nodes = row.get("job", ""), row.get("nodes", [])
        state.begun = row.get("begun", math.nan)
        ran_now = state.begun > state.submitted  # and not in an earlier attempt, or nowhere
        if ran_now:
            state.occupied_s += state.ended - state.begun
        elif not state.cached:
            state.occupied_s += state.result.get("seconds", 0.0)
        if ran_now and state.result:
            self._least_s = max(self._least_s, _least_s(state))
        for node in row.get("nodes", []):
            if row["status"] == "done":
                self._failed_on.pop(node, None)
            elif state.reason not in NOT_OF_A_NODE:
                self._failed_on.setdefault(node, set()).add((row["trial"], row["fold"]))

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

    @property
    def scoring(self) -> Scoring:
        """How trials are compared, as the last session had it."""
        return Scoring.of_plain(self.sessions[-1].get("scoring") if self.sessions else None)

    def fold_model(self) -> FoldModel:
        """What the trials that are done on all folds say about folds."""
        done = {n: t.foms() for n, t in self.trials_by_number.items() if t.status == "done"}
        return FoldModel.of(done)

    def known(self) -> tuple[list[Observation], list[Proposal]]:
        """What the search is told: the trials that ended, and those that have not, by number."""
        history, pending = [], []
        folds, scoring = self.fold_model(), self.scoring
        for _, trial in sorted(self.trials_by_number.items()):
            if trial.aside:
                continue
            if trial.is_ended:
                history.append(_observation(trial, folds, scoring))
            else:
                pending.append(trial.proposal)
        return history, pending

    def counted(self, num_trials: int) -> list[int]:
        """The trials in a budget of `num_trials`: the first that are not aside."""
        known = [n for n, trial in sorted(self.trials_by_number.items()) if not trial.aside]
        return known[:num_trials]

    def in_full(self) -> list[int]:
        """The trials with the largest budget so far; where none has less, all of them.

        A trial whose proposal does not set it has the study's own, which is the largest.
        """
        proposals = {n: trial.proposal for n, trial in sorted(self.trials_by_number.items())}
        found = list(proposals)
        for path in BUDGETS:
            budget = {n: proposals[n].settings.get(path, math.inf) for n in found}
            found = [n for n in found if budget[n] == max(budget.values())]
        return found

    def root(self, trial: int) -> int:
        """The trial from which this one, or its parent, or its parent's parent, ... began."""
        parent = self.trials_by_number[trial].proposal.parent
        return trial if parent is None else self.root(parent)

    def starts(self, trial: int) -> dict[int, Start]:
        """What the folds of a trial go on from, by fold; empty without a parent."""
        parent = self.trials_by_number[trial].proposal.parent
        if parent is None:
            return {}
        return {
            fold: Start(key=state.key, folder=str((self.folder / state.folder).resolve()))
            for fold, state in self.trials_by_number[parent].tasks.items()
        }

    def nodes_to_avoid(self) -> list[str]:
        """Those on which different tasks failed one after the other."""
        return sorted(name for name, tasks in self._failed_on.items() if len(tasks) >= BAD_NODE)

    def least_s(self) -> float | None:
        """The longest, in seconds, that a task has needed to begin and to train one epoch.

        With less time left it is of no use to start one: it would leave no checkpoint. None as long
        as no task was done.
        """
        return self._least_s or None

    def hours(self) -> float:
        """For which drivers were at work on this study, all sessions together."""
        return sum(last - first for first, last in self._spans) / 3600

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
        return _table(self._trial_rows(), self._trial_columns())

    def history(self, trial: int, fold: int) -> pd.DataFrame:
        """One row an epoch of one task: losses, metrics, lr, and what its seconds went into."""
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
            *("epoch", "epochs", "stopped", "seconds", "seconds_per_epoch", "samples_per_second"),
            *("compute_s", "communication_s", "data_s", "idle_s", "inference_us"),
            *("num_parameters", "num_ranks", "lost_ranks", "updates", "staleness"),
            *("job", "host", "attempt", "cached", "submitted", "begun", "ended", "message"),
            *("key", "folder"),
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
                    "seconds_per_epoch": _seconds_per_epoch(result),
                    "status": state.status,
                    "reason": state.reason,
                    "host": ",".join(dict.fromkeys(result.get("hosts", state.nodes))),
                    "job": state.job,
                    "attempt": state.attempts,
                    "cached": state.cached,
                    "submitted": _utc(state.submitted),
                    "begun": _utc(state.begun),
                    "ended": _utc(state.ended),
                    "message": state.message,
                    "key": state.key,
                    "folder": state.folder,
                }

    def _tags(self) -> list[str]:
        """The search's own columns: what else a proposal set, and its labels."""
        names: dict[str, None] = {}
        for trial in self.trials_by_number.values():
            names.update(dict.fromkeys([*trial.proposal.settings, *trial.proposal.tags]))
        return [name for name in names if name not in self._parameters()]

    def _trial_columns(self) -> list[str]:
        further = [each.metric for each in self.scoring.further]
        return [
            *("trial", "status", "score", "spread", *further, *(["pareto"] if further else [])),
            *self._parameters(),
            *self._tags(),
            *("parent", "done", "seconds", "search_seconds"),
        ]

    def _trial_rows(self) -> list[dict[str, Any]]:
        scoring = self.scoring
        further = [each.metric for each in scoring.further]
        rows = []
        for number, trial in sorted(self.trials_by_number.items()):
            foms = trial.facts("fom")
            is_done = trial.status == "done"
            rows.append(
                {
                    **trial.proposal.tags,
                    **trial.proposal.settings,
                    **trial.point,
                    **{name: mean_and_spread(trial.facts(name))[0] for name in further if is_done},
                    "trial": number,
                    "status": trial.status,
                    "score": scoring.score(foms) if is_done else math.nan,
                    "spread": mean_and_spread(foms)[1] if is_done else math.nan,
                    "parent": trial.proposal.parent,
                    "done": len(foms),
                    "seconds": sum(trial.facts("seconds")),
                    "search_seconds": trial.search_seconds,
                }
            )
        values = [[row.get(name, math.nan) for name in ("score", *further)] for row in rows]
        for row, is_best in zip(rows, pareto_front(values, scoring.goals), strict=True):
            row["pareto"] = is_best
        return rows


def _observation(trial: TrialState, folds: FoldModel, scoring: Scoring) -> Observation:
    """What the search is told of a trial that ended.

    Of one whose last folds were dropped: its mean, as far as the first ones tell it.
    """
    cost = trial.cost() or None
    foms = trial.foms()
    if trial.status == "failed":
        return Observation(trial.proposal, None, cost=cost)
    value = folds.mean(foms) if trial.status == "dropped" else scoring.score(trial.facts("fom"))
    further = tuple(mean_and_spread(trial.facts(each.metric))[0] for each in scoring.further)
    return Observation(trial.proposal, value, folds.noise(foms), further, cost)


def _least_s(state: TaskState) -> float:
    """What a task took to begin, and one of its epochs."""
    # An attempt that went on where another was cut off has trained part of the seconds alone.
    start_s = max(state.ended - state.begun - float(state.result["seconds"]), 0.0)
    return start_s + (_seconds_per_epoch(state.result) or 0.0)


def _seconds_per_epoch(result: dict[str, Any]) -> float | None:
    """Of the epochs of this task; those that it went on from are not in its seconds."""
    if not result:
        return None
    num_epochs: int = result["epochs"] - result.get("start_epoch", 0)
    return float(result["seconds"]) / num_epochs


_RESULT_COLUMNS = (
    "fom", "epoch", "epochs", "stopped", "seconds", "samples_per_second", "compute_s",
    "communication_s", "data_s", "idle_s", "inference_us", "num_parameters", "num_ranks",
    "lost_ranks", "updates", "staleness",
)  # fmt: skip


# The types of columns, of which some may be empty or all missing; those of parameters come from
# their values, and all others are float64.
_INTEGERS = (
    *("trial", "fold", "epoch", "epochs", "num_parameters", "num_ranks", "attempt"),
    *("lost_ranks", "updates"),
    *("parent", "done"),
)
_TEXTS = ("status", "reason", "stopped", "job", "host", "message", "key", "folder")
_DTYPES: dict[str, str] = {
    **dict.fromkeys(_INTEGERS, "Int64"),
    **dict.fromkeys(_TEXTS, "string"),
    "cached": "boolean",
    "pareto": "boolean",
    "submitted": "datetime64[ns, UTC]",
    "begun": "datetime64[ns, UTC]",
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
    """All of the trial's tasks are to be run again; what they have cost goes on counting."""
    trial.tasks = {
        fold: TaskState(attempts=old.attempts, occupied_s=old.occupied_s)
        for fold, old in trial.tasks.items()
    }


def _utc(seconds: float) -> pd.Timestamp:
    return pd.Timestamp(seconds, unit="s", tz="UTC")  # NaN becomes NaT


def session_facts(fingerprint: Fingerprint, **facts: Any) -> dict[str, Any]:
    """The facts of a session row."""
    return {"fingerprint": dataclasses.asdict(fingerprint), **facts}
