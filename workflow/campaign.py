"""The loop: propose, submit, record. It ends when the budget, a stop rule or the space does."""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from apps.contract import TrainTask
from workflow.console import Console, clock
from workflow.ledger import Ledger
from workflow.plan import Planner, fitted, search_rng
from workflow.racing import hopeless
from workflow.search.base import Observation, Search
from workflow.stop import reason_to_stop
from workflow.study import Search as SearchSection
from workflow.tasks import Engine, Outcome

# Attempts at a task in one session that end without a new epoch, for what came from outside. Each
# goes on from the checkpoint of the one before.
MAX_ATTEMPTS = 3
FROM_OUTSIDE = (
    *("walltime", "node_lost", "launch_failed", "signal"),
    *(f"signal {number:d}" for number in (signal.SIGKILL, signal.SIGTERM)),
)
REFRESH_S = 0.5


@dataclass
class Campaign:
    """A study being run."""

    planner: Planner
    search: Search
    ledger: Ledger
    engine: Engine
    console: Console
    node_share: float = 1.0  # of a node, that one task occupies
    warm: Sequence[Observation] = ()  # trials of earlier studies
    last_begin: float = math.inf  # of a task, as of time.time(): the site is over then
    cut_off: int = 0  # tasks for which there was no time any more
    has_trained: bool = False  # anything that is kept
    running: dict[Future[Any], tuple[TrainTask, int]] = field(default_factory=dict)
    waiting: deque[int] = field(default_factory=deque)  # trials that are to be started
    folds: dict[int, deque[TrainTask]] = field(default_factory=dict)  # not submitted yet, by trial
    epochs: dict[str, int] = field(default_factory=dict)  # that tasks have trained, by their id
    is_over: bool = False  # no more proposals

    def run(self) -> None:
        """Run the study to its end, or to that of the site.

        The trials that the ledger knows come first: what finished is in the cache, the rest runs.
        Then the search goes on.
        """
        self.waiting.extend(self.ledger.counted(self.settings.num_trials))
        while True:
            while self._has_room() and self._start_next():
                pass
            self._propose_ahead()
            if not self.running:
                return
            self.engine.check()
            for line in self.engine.news():
                self.console.note(f"{clock()} {line}")
            done, _ = wait(self.running, timeout=REFRESH_S, return_when=FIRST_COMPLETED)
            for future in done:
                task, attempt = self.running.pop(future)
                self._record(task, attempt, self.engine.outcome(task, future))
            self.console.refresh(self.ledger)

    @property
    def is_cut_short(self) -> bool:
        """Whether the site was over before the study was."""
        has_more = self.cut_off or self.waiting
        return self._is_late() and bool(has_more or not (self.is_over or self._is_enough()))

    @property
    def settings(self) -> SearchSection:
        return self.planner.file.study.search

    # -- trials ------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        """Whether to start a trial: as late as slots stay busy, so that the search knows most."""
        if self._is_late():
            return False
        trials = {task.trial for task, _ in self.running.values()}
        used = sum(self.engine.share(task) for task, _ in self.running.values())
        return len(trials) < self.settings.num_parallel and used <= 1

    def _is_late(self) -> bool:
        return time.time() >= self.last_begin

    def _start_next(self) -> bool:
        """Start a trial: one that is waiting, or else a new one; False if there is none now."""
        if not self.waiting and not self._propose():
            return False
        ready = next((trial for trial in self.waiting if self._is_ready(trial)), None)
        if ready is None:
            return False
        self.waiting.remove(ready)
        self._start(ready)
        return True

    def _is_ready(self, trial: int) -> bool:
        """Whether the trial that it goes on from, if any, has ended, or never will."""
        number = self.ledger.trials_by_number[trial].proposal.parent
        if number is None:
            return True
        parent = self.ledger.trials_by_number[number]
        return parent.is_ended or parent.aside

    def _propose_ahead(self) -> None:
        """While slots are busy, so that the next one to be free need not wait for the search."""
        while len(self.waiting) < self.settings.prepare_ahead and self._propose():
            pass

    def _propose(self) -> bool:
        """Have the search propose a trial, and record it; False if it does not."""
        known = self.ledger.trials_by_number
        if not self.is_over:
            self.is_over = self._is_enough()
        if self.is_over:
            return False
        number = len(known)
        history, pending = fitted(self.planner.file, *self.ledger.known())
        rng = search_rng(self.planner.file.study.seed, number)
        start = time.perf_counter()
        proposals = self.search.propose([*self.warm, *history], pending, 1, rng)
        seconds = time.perf_counter() - start
        if not proposals:
            self.is_over = not pending
            if self.is_over:
                self.console.note(f"the search has no more to propose after {number} trials")
            return False
        proposal = self.planner.with_first_point(proposals[0], [*history, *pending], rng)
        proposal = dataclasses.replace(proposal, number=number)
        folds = self.planner.file.study.data.folds
        self.ledger.record_trial(proposal, folds, seconds, self.search.continues)
        self.waiting.append(number)
        return True

    def _is_enough(self) -> bool:
        counted = sum(not trial.aside for trial in self.ledger.trials_by_number.values())
        if counted >= self.settings.num_trials:
            return True
        reason = reason_to_stop(self.settings.stop, self.ledger, self.node_share)
        if reason is not None:
            self.console.note(f"no more trials: {reason}")
        return reason is not None

    # -- tasks -------------------------------------------------------------------------------

    def _start(self, trial: int) -> None:
        state = self.ledger.trials_by_number[trial]
        parent = state.proposal.parent
        if parent is not None and not self.ledger.trials_by_number[parent].is_done:
            if not state.is_done:
                message = f"t{parent:03d}, from which it goes on, has no state"
                self.ledger.record_orphaned(trial, message)
            return
        tasks = self.planner.known_tasks(self.ledger, trial)
        # What was dropped stays so, unless it was because of a fold that failed and runs again.
        stay = () if state.status == "failed" else ("dropped",)
        of_status = {task.fold: state.tasks[task.fold].status for task in tasks}
        known = [task for task in tasks if of_status[task.fold] == "done"]
        self.folds[trial] = deque(
            task for task in tasks if of_status[task.fold] not in ("done", *stay)
        )
        for task in known:
            self._submit(task, attempt=1)
        racing = self.settings.racing
        for _ in range(len(tasks) if racing is None else racing.min_folds - len(known)):
            self._submit_next_fold(trial)

    def _submit_next_fold(self, trial: int) -> None:
        if self.folds[trial]:
            self._submit(self.folds[trial].popleft(), attempt=1)

    def _submit(self, task: TrainTask, attempt: int) -> None:
        if self._is_late():
            self.cut_off += 1
            return
        state = self.ledger.state(task)
        self.epochs.setdefault(task.id, self.engine.epochs(task))
        if not self.engine.is_finished(task):
            self.ledger.record_start(task, state.attempts + 1)
        future = self.engine.submit(task, state.attempts, self.ledger.nodes_to_avoid())
        self.running[future] = (task, attempt)

    def _record(self, task: TrainTask, attempt: int, outcome: Outcome) -> None:
        folder = self.ledger.relative(outcome.folder)
        if outcome.failure is not None:
            self.ledger.record_failed(task, outcome.failure, folder=folder, place=outcome.place)
            next_attempt = self._next_attempt(task, attempt, outcome)
            self.console.ended(task, outcome, goes_on=next_attempt is not None)
            if next_attempt is not None:
                self._submit(task, next_attempt)
                return
        elif outcome.result is not None and not self.ledger.has_result(task):
            cached = outcome.cached
            self.ledger.record_done(
                task, outcome.result, cached=cached, folder=folder, place=outcome.place
            )
            self.engine.foresee(self.ledger.least_s())
            self.has_trained |= not cached
            self.console.ended(task, outcome)
        self._go_on(task.trial)

    def _next_attempt(self, task: TrainTask, attempt: int, outcome: Outcome) -> int | None:
        """The number of the next attempt at a task that failed; None if it stays failed."""
        assert outcome.failure is not None
        if outcome.failure.name not in FROM_OUTSIDE:
            return None
        if outcome.failure.reason == "walltime" and not outcome.place:  # it had no time to begin
            return attempt
        if self._got_on(task):
            self.has_trained = True
            return 1
        return attempt + 1 if attempt < MAX_ATTEMPTS else None

    def _got_on(self, task: TrainTask) -> bool:
        """Whether an attempt that was cut off has trained a further epoch."""
        before, self.epochs[task.id] = self.epochs[task.id], self.engine.epochs(task)
        # Fewer than before are of a training that began anew in the folder of another.
        return self.epochs[task.id] > before

    def _go_on(self, trial: int) -> None:
        """With the next fold of a trial, unless those that ended leave it without a chance."""
        left = self.folds[trial]
        if not left or any(task.trial == trial for task, _ in self.running.values()):
            return
        assert self.settings.racing is not None  # without, all folds start at once
        why = hopeless(trial, self.ledger, self.settings.racing)
        if why is None:
            self._submit_next_fold(trial)
            return
        self.ledger.record_dropped(trial, [task.fold for task in left], why)
        self.console.note(f"t{trial:03d} dropped: {why}")
        left.clear()
