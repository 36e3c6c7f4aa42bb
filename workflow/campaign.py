"""The loop: propose, submit, record. It ends when the budget or the space does."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from apps.contract import TrainTask
from workflow.console import Console
from workflow.ledger import Ledger
from workflow.plan import Planner, search_rng
from workflow.search.base import Search
from workflow.tasks import Engine, Outcome

# Attempts at a task in one session where it is not the training's fault that it ended. Each goes
# on from the checkpoint of the one before.
MAX_ATTEMPTS = 3
NOT_ITS_FAULT = ("lost", "killed")
REFRESH_S = 0.5


@dataclass
class Campaign:
    """A study being run."""

    planner: Planner
    search: Search
    ledger: Ledger
    engine: Engine
    console: Console
    num_slots: int
    running: dict[Future[Any], tuple[TrainTask, int]] = field(default_factory=dict)

    def run(self) -> None:
        """Run the study to its end.

        The trials that the ledger knows come first: what finished is in the cache, the rest runs.
        Then the search goes on.
        """
        waiting = self._trials()
        is_more = True
        while True:
            while is_more and self._has_room():
                trial = next(waiting, None)
                is_more = trial is not None
                if trial is not None:
                    self._start(trial)
            if not self.running:
                return
            self.engine.check()
            done, _ = wait(self.running, timeout=REFRESH_S, return_when=FIRST_COMPLETED)
            for future in done:
                task, attempt = self.running.pop(future)
                self._record(task, attempt, self.engine.outcome(task, future))
            self.console.refresh(self.ledger)

    def _has_room(self) -> bool:
        """Whether to start a trial: as late as slots stay busy, so that the search knows most."""
        trials = {task.trial for task, _ in self.running.values()}
        budget = self.planner.file.study.search.num_parallel
        return len(trials) < budget and len(self.running) <= self.num_slots

    def _trials(self) -> Iterator[int]:
        """The numbers of the trials to run; new ones are proposed when they are asked for."""
        study = self.planner.file.study
        for trial in range(study.search.num_trials):
            if trial not in self.ledger.trials_by_number:
                points = self.search.propose(
                    *self.ledger.known_points(), num=1, rng=search_rng(study.seed, trial)
                )
                if not points:
                    self.console.note(f"the space is exhausted after {trial} trials")
                    return
                self.ledger.record_trial(trial, points[0], study.data.folds)
            yield trial

    def _start(self, trial: int) -> None:
        state = self.ledger.trials_by_number[trial]
        for task in self.planner.tasks(trial, state.point):
            self._submit(task, attempt=1)

    def _submit(self, task: TrainTask, attempt: int) -> None:
        state = self.ledger.state(task)
        if not self.engine.is_finished(task):
            self.ledger.record_start(task, state.attempts + 1)
        self.running[self.engine.submit(task, state.attempts)] = (task, attempt)

    def _record(self, task: TrainTask, attempt: int, outcome: Outcome) -> None:
        folder = self.ledger.relative(outcome.folder)
        if outcome.failure is not None:
            self.ledger.record_failed(task, outcome.failure, folder=folder)
            self.console.ended(task, outcome)
            if outcome.failure.reason in NOT_ITS_FAULT and attempt < MAX_ATTEMPTS:
                self._submit(task, attempt + 1)
        elif outcome.result is not None and not self.ledger.has_result(task):
            cached = outcome.cached
            self.ledger.record_done(task, outcome.result, cached=cached, folder=folder)
            self.console.ended(task, outcome)
