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
import errno
import fcntl
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd

from apps.contract import (
    Failure,
    Fingerprint,
    N3LOError,
    Start,
    TaskPaths,
    TrainTask,
    append_json_line,
    json_row,
)
from workflow import tables
from workflow.arguments import Trial, Whole, checked
from workflow.folds import FoldModel
from workflow.scores import Scoring, mean_and_spread
from workflow.search.base import Observation, Proposal
from workflow.space import Point

NAME = "ledger.jsonl"
LOCK = "driver.lock"  # held by the driver that is at work in the folder
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
class Attempt:
    """One start of a task, and what became of it."""

    trial: int
    fold: int
    attempt: int  # from 1
    submitted: float  # Unix seconds, as the others
    begun: float = math.nan
    ended: float = math.nan
    status: str = "running"  # done, failed, lost
    reason: str = ""
    message: str = ""
    job: str = ""
    nodes: list[str] = field(default_factory=list)


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

    @checked
    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self.path = self.folder / NAME
        self.is_running = False  # a driver, when the file was read, as seen from this host
        self._forget_all()
        self.refresh()

    def _forget_all(self) -> None:
        self.sessions: list[dict[str, Any]] = []
        self.trials_by_number: dict[int, TrialState] = {}
        self.attempts_made: list[Attempt] = []
        self.spans: list[tuple[float, float]] = []  # first and last row of each session, Unix s
        self._failed_on: dict[str, set[tuple[int, int]]] = {}  # tasks, since one was done there
        self._least_s = 0.0
        self._last_attempts: dict[tuple[int, int], Attempt] = {}
        self._num_read = 0  # bytes of the file

    def refresh(self) -> bool:
        """Read what a driver has added; return whether the tables have changed.

        `history()` reads its files each time, and they grow between the rows of the ledger.

        Raises:
            N3LOError: it may not be read, or a file is where its folder should be.
        """
        was_running, self.is_running = self.is_running, is_running(self.folder)
        has_changed = self._read_on()
        # Of one that began meanwhile there may be rows.
        self.is_running = self.is_running or (has_changed and is_running(self.folder))
        return has_changed or was_running != self.is_running

    def _read_on(self) -> bool:
        """Apply the rows that were added; return whether there were any."""
        try:
            with open(self.path, "rb") as file:
                if file.seek(0, os.SEEK_END) < self._num_read:  # another ledger took its place
                    self._forget_all()
                file.seek(self._num_read)
                added = file.read()
        except FileNotFoundError:
            return False
        except (NotADirectoryError, PermissionError) as error:
            if not self.folder.is_file():
                raise N3LOError(f"cannot read '{self.path}': {error.strerror}") from None
            of_it = self.folder.parent if self.folder.name == NAME else f"runs/{self.folder.stem}"
            raise N3LOError(
                f"'{self.folder}' is a file; a ledger is named by its run folder, such as '{of_it}'"
            ) from None
        rows = []
        for line in added.splitlines(keepends=True):
            row = json_row(line)
            if row is None and not line.endswith(b"\n"):
                break  # it is being written
            self._num_read += len(line)
            if row is not None:
                rows.append(row)
        for row in rows:
            self._apply(row)
        return bool(rows)

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
        self.is_running = True  # also where the file system cannot lock
        row = {"event": event, "time": time.time(), **facts}
        append_json_line(self.path, row)
        self._num_read = self.path.stat().st_size
        self._apply(row)

    # -- replaying ---------------------------------------------------------------------------

    def _apply(self, row: dict[str, Any]) -> None:
        if self.spans and row.get("event") != "session":
            self.spans[-1] = (self.spans[-1][0], row.get("time", 0.0))
        handler = getattr(self, f"_apply_{row.get('event')}", None)
        if handler is not None:  # an event of a later version is passed over
            handler(row)

    def _apply_session(self, row: dict[str, Any]) -> None:
        if self.sessions and self.sessions[-1]["fingerprint"] != row["fingerprint"]:
            for trial in self.trials_by_number.values():
                _forget(trial)
        self.attempts_made = self._attempts_without_driver()
        self._last_attempts.clear()
        self.trials_by_number = self._trials_without_driver()
        for trial in self.trials_by_number.values():
            trial.aside = False
        self.sessions.append(row)
        self.spans.append((row["time"], row["time"]))

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
        task = row["trial"], row["fold"]
        self._last_attempts[task] = Attempt(*task, row["attempt"], row["time"])
        self.attempts_made.append(self._last_attempts[task])

    def _apply_end(self, row: dict[str, Any]) -> None:
        state = self._state(row)
        state.key, state.status, state.ended = row["key"], row["status"], row["time"]
        state.reason, state.message = row.get("reason", ""), row.get("message", "")
        state.cached, state.folder = row.get("cached", False), row["folder"]
        state.result = row.get("result", {})
        state.job, state.nodes = row.get("job", ""), row.get("nodes", [])
        state.begun = row.get("begun", math.nan)
        attempt = self._last_attempts.pop((row["trial"], row["fold"]), None)
        if attempt is not None:
            for name in ("status", "reason", "message", "job", "nodes", "begun", "ended"):
                setattr(attempt, name, getattr(state, name))
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
        return self._of_largest_budget(sorted(self.trials_by_number))

    def compared(self) -> list[int]:
        """The trials that are compared: of the largest budget with which one has all its results.

        What trials with less have come to says little of what they would come to with more.
        """
        done = [n for n, trial in sorted(self.trials_by_number.items()) if trial.is_done]
        with_it = set(map(self._budget, self._of_largest_budget(done)))
        return [n for n in sorted(self.trials_by_number) if self._budget(n) in with_it]

    def _of_largest_budget(self, trials: list[int]) -> list[int]:
        largest = max(map(self._budget, trials), default=())
        return [n for n in trials if self._budget(n) == largest]

    def _budget(self, trial: int) -> tuple[float, ...]:
        settings = self.trials_by_number[trial].proposal.settings
        return tuple(settings.get(path, math.inf) for path in BUDGETS)

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
        return sum(last - first for first, last in self.spans) / 3600

    def relative(self, folder: Path) -> str:
        """A task's folder, relative to the run folder."""
        return os.path.relpath(folder, self.folder.resolve())

    def fingerprint(self) -> Fingerprint | None:
        """Of the last session; None before the first."""
        return Fingerprint(**self.sessions[-1]["fingerprint"]) if self.sessions else None

    def tasks(self) -> pd.DataFrame:
        """One row a (trial, fold), sorted by them; docs/ledger.md has the columns.

        Raises:
            N3LOError: there is no ledger. So do the other tables.
        """
        self._require()
        return tables.tasks(self._trials_now())

    def trials(self) -> pd.DataFrame:
        """One row a trial."""
        self._require()
        return tables.trials(self._trials_now(), self.scoring)

    def attempts(self) -> pd.DataFrame:
        """One row an attempt at a task, in the order of their starts."""
        self._require()
        made = self.attempts_made if self.is_running else self._attempts_without_driver()
        return tables.attempts(made)

    def _trials_now(self) -> dict[int, TrialState]:
        return self.trials_by_number if self.is_running else self._trials_without_driver()

    def _trials_without_driver(self) -> dict[int, TrialState]:
        """What ran has been interrupted, and waits for the next driver."""
        return {number: _interrupted(trial) for number, trial in self.trials_by_number.items()}

    def _attempts_without_driver(self) -> list[Attempt]:
        """What ran is lost, and ended with the last row of its driver."""
        end = self.spans[-1][1] if self.spans else math.nan
        return [
            dataclasses.replace(each, status="lost", ended=end)
            if each.status == "running"
            else each
            for each in self.attempts_made
        ]

    @checked
    def history(self, trial: Trial | None = None, fold: Whole | None = None) -> pd.DataFrame:
        """One row an epoch of each task: losses, metrics, lr, and what its seconds went into.

        Args:
            trial, fold: of these alone; a trial as 3 or "t003".

        Raises:
            N3LOError: there is no such trial or fold.
        """
        self._require()
        if trial is not None:
            self.require_trial(trial)
        folds = {part for state in self.trials_by_number.values() for part in state.tasks}
        if fold is not None and fold not in folds:
            there = f"0 to {max(folds)}" if folds else "none"
            raise N3LOError(f"fold {fold}: there is no such fold in {self.folder}: {there}")
        return tables.histories(
            {
                (number, part): self.files_of(number, part).history
                for number, state in sorted(self.trials_by_number.items())
                for part in sorted(state.tasks)
                if trial in (None, number) and fold in (None, part)
            }
        )

    def require_trial(self, number: int) -> None:
        """
        Raises:
            N3LOError: there is no such trial.
        """
        if number not in self.trials_by_number:
            known = len(self.trials_by_number)
            there = f"t000 to t{known - 1:03d}" if known else "none"
            raise N3LOError(f"t{number:03d}: there is no such trial in {self.folder}: {there}")

    def files_of(self, trial: int, fold: int) -> TaskPaths:
        """The files of a task, wherever they are: those of another study if it was cached."""
        state = self.trials_by_number[trial].tasks[fold]
        return TaskPaths(self.place_of(state.folder or f"t{trial:03d}-f{fold}"))

    def place_of(self, relative: str) -> Path:
        """A task's folder, from what `relative` gave; of another study without "..", as a path."""
        place = self.folder / relative
        return place.resolve() if relative.startswith("..") else place

    def _require(self) -> None:
        if not self.trials_by_number and not self.path.exists():
            raise N3LOError(f"there is no ledger in '{self.folder}'")


def is_running(folder: Path) -> bool:
    """Whether a driver is at work in the folder, as seen from this host."""
    try:
        with open(folder / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno == errno.EWOULDBLOCK
    return False


def _interrupted(trial: TrialState) -> TrialState:
    """As it is once its driver is gone."""
    changed = {
        fold: dataclasses.replace(state, status="waiting", reason="driver_lost")
        for fold, state in trial.tasks.items()
        if state.status == "running"
    }
    return dataclasses.replace(trial, tasks={**trial.tasks, **changed}) if changed else trial


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
    return start_s + (tables.seconds_per_epoch(state.result) or 0.0)


def _forget(trial: TrialState) -> None:
    """All of the trial's tasks are to be run again; what they have cost goes on counting."""
    trial.tasks = {
        fold: TaskState(attempts=old.attempts, occupied_s=old.occupied_s)
        for fold, old in trial.tasks.items()
    }


def session_facts(fingerprint: Fingerprint, **facts: Any) -> dict[str, Any]:
    """The facts of a session row."""
    return {"fingerprint": dataclasses.asdict(fingerprint), **facts}
