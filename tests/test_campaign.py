"""The loop, with an engine of threads instead of Parsl and a formula instead of training."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from test_launch import make_result

from apps.contract import Failure, Fingerprint, TrainTask
from workflow.campaign import MAX_ATTEMPTS, Campaign
from workflow.console import Console
from workflow.ledger import Ledger, session_facts
from workflow.plan import Planner
from workflow.search import create
from workflow.study import load
from workflow.tasks import EngineError, Outcome

FINGERPRINT = Fingerprint(data="d", model="m", code="c")


def distance(task: TrainTask) -> float:
    """A figure of merit: how far the learning rate is from 0.1, in decades."""
    return abs(math.log10(task.training.optimizer["lr"]) + 1) + 0.01 * task.fold


class ThreadEngine:
    """workflow.tasks.Engine in threads; `train` returns a figure of merit or a Failure."""

    def __init__(self, folder: Path, train: Callable = distance, num_slots: int = 2) -> None:
        self.folder = folder
        self.train = train
        self.pool = ThreadPoolExecutor(num_slots)
        self.finished: dict[str, dict] = {}
        self.executed: list[str] = []
        self.most_trials = 0
        self.most_running = 0
        self._running: list[TrainTask] = []
        self._lock = threading.Lock()

    def check(self) -> None:
        """Threads do not break down."""

    def is_finished(self, task: TrainTask) -> bool:
        return task.key() in self.finished

    def submit(self, task: TrainTask, attempt: int) -> Future:
        if self.is_finished(task):
            future: Future = Future()
            future.set_result((self.finished[task.key()], True))
            return future
        return self.pool.submit(self._execute, task)

    def _execute(self, task: TrainTask):
        with self._lock:
            self.executed.append(task.id)
            self._running.append(task)
            self.most_running = max(self.most_running, len(self._running))
            self.most_trials = max(self.most_trials, len({t.trial for t in self._running}))
        time.sleep(0.002)
        try:
            value = self.train(task)
        finally:
            with self._lock:
                self._running.remove(task)
        if isinstance(value, Failure):
            return value, False
        result = dataclasses.asdict(make_result(task, fom=value))
        self.finished[task.key()] = result
        return result, False

    def outcome(self, task: TrainTask, future: Future) -> Outcome:
        value, cached = future.result()
        folder = self.folder / task.id
        if isinstance(value, Failure):
            return Outcome(failure=value, folder=folder)
        return Outcome(result=value, cached=cached, folder=folder)


@pytest.fixture
def campaign(study_path, tmp_path):
    """Start a driver: `campaign(engine, method=..., num_trials=...)` returns its ledger."""

    def run(engine: ThreadEngine, method: str = "random", num_trials: int = 5, parallel: int = 2):
        file = load(study_path, {
            "search.method": method,
            "search.num_trials": num_trials,
            "search.num_parallel": parallel,
        })  # fmt: skip
        planner = Planner(file, file.data_files(), FINGERPRINT)
        (tmp_path / "run").mkdir(exist_ok=True)
        ledger = Ledger(tmp_path / "run")
        ledger.record_session(**session_facts(FINGERPRINT, site="threads"))
        search = create(method, file.space, "min", {}, file.study.seed)
        console = Console(file.study.search.objective, num_trials, 2, 2)
        Campaign(planner, search, ledger, engine, console, num_slots=2).run()
        return ledger

    return run


@pytest.fixture
def engine(tmp_path) -> ThreadEngine:
    return ThreadEngine(tmp_path / "run")


@pytest.mark.parametrize("method", ["random", "grid", "bayesian"])
def test_the_budget_is_met_exactly(campaign, engine, method):
    ledger = campaign(engine, method, num_trials=7)
    assert list(ledger.trials()["status"]) == ["done"] * 7
    assert len(engine.executed) == 7 * 2


def test_no_more_trials_run_at_once_than_allowed(campaign, tmp_path):
    engine = ThreadEngine(tmp_path / "run", num_slots=8)
    campaign(engine, num_trials=12, parallel=2)
    assert engine.most_trials <= 2


def test_folds_of_one_trial_run_side_by_side(campaign, engine):
    meeting = threading.Barrier(2, timeout=10)

    def train(task):
        meeting.wait()  # passes only if both folds are there at once
        return 0.5

    engine.train = train
    assert list(campaign(engine, num_trials=2, parallel=1).trials()["done"]) == [2, 2]


def test_a_second_start_executes_nothing(campaign, engine):
    before = campaign(engine).tasks()
    engine.executed.clear()
    after = campaign(engine)
    assert engine.executed == []
    assert list(after.tasks()["fom"]) == list(before["fom"])


def test_a_lost_result_is_executed_again_and_no_other(campaign, engine):
    ledger = campaign(engine)
    lost = ledger.trials_by_number[2].tasks[1]
    del engine.finished[lost.key]
    engine.executed.clear()
    campaign(engine)
    assert engine.executed == ["t002-f1"]


def test_a_larger_budget_continues_the_study(campaign, engine):
    first = campaign(engine, num_trials=3).tasks()
    engine.executed.clear()
    second = campaign(engine, num_trials=5).tasks()
    assert sorted({name[:4] for name in engine.executed}) == ["t003", "t004"]
    assert list(second["fom"][:6]) == list(first["fom"])


def test_a_study_that_is_continued_equals_one_that_was_not(campaign, engine, tmp_path):
    for num_trials in (2, 3, 6):
        continued = campaign(engine, num_trials=num_trials)
    (tmp_path / "run").rename(tmp_path / "continued")
    at_once = campaign(ThreadEngine(tmp_path / "run"), num_trials=6)
    columns = ["trial", "fold", "fom", "training.optimizer.lr", "model.args.width", "key"]
    assert continued.tasks()[columns].equals(at_once.tasks()[columns])


def test_a_failed_task_is_a_row_and_the_others_go_on(campaign, engine):
    def train(task):
        if task.id == "t001-f0":
            return Failure(reason="diverged", message="training loss became nan in epoch 1")
        return distance(task)

    engine.train = train
    ledger = campaign(engine)
    assert list(ledger.trials()["status"]) == ["done", "failed", "done", "done", "done"]
    assert engine.executed.count("t001-f0") == 1
    engine.train = distance
    engine.executed.clear()
    assert list(campaign(engine).trials()["status"]) == ["done"] * 5
    assert engine.executed == ["t001-f0"]


@pytest.mark.parametrize("method", ["random", "bayesian"])
def test_a_study_in_which_all_fails_ends(campaign, engine, method):
    engine.train = lambda task: Failure(reason="exception", message="RuntimeError: no")
    assert list(campaign(engine, method, num_trials=8).trials()["status"]) == ["failed"] * 8


def test_a_lost_worker_costs_an_attempt_and_not_the_task(campaign, engine):
    def train(task):
        if task.id == "t000-f0" and engine.executed.count(task.id) < MAX_ATTEMPTS:
            return Failure(reason="lost", message="the worker that ran it died")
        return distance(task)

    engine.train = train
    ledger = campaign(engine)
    assert list(ledger.trials()["status"]) == ["done"] * 5
    assert ledger.trials_by_number[0].tasks[0].attempts == MAX_ATTEMPTS


def test_a_task_that_kills_its_workers_is_given_up(campaign, engine):
    engine.train = lambda task: Failure(reason="killed", message="signal 9")
    ledger = campaign(engine, num_trials=1)
    assert list(ledger.tasks()["status"]) == ["failed", "failed"]
    assert len(engine.executed) == 2 * MAX_ATTEMPTS


def test_an_exhausted_space_ends_the_study_early(campaign, engine, edit):
    edit('"training.optimizer.lr" = { type = "real", low = 1e-3, high = 1.0, log = true }\n', "")
    ledger = campaign(engine, num_trials=20)
    assert len(ledger.trials()) == 7  # the widths 2 to 8


def test_proposals_are_made_as_late_as_the_slots_stay_busy(campaign, engine):
    """With two slots and two folds a trial, a third trial is not proposed with two under way."""
    seen = []

    def train(task):
        seen.append((task.trial, len(Ledger(engine.folder).trials_by_number)))
        return distance(task)

    engine.train = train
    campaign(engine, num_trials=8, parallel=8)
    assert max(proposed - trial for trial, proposed in seen) <= 3


def test_an_engine_that_breaks_down_ends_the_study_and_loses_nothing(campaign, engine):
    outcome = engine.outcome
    calls = []

    def broken(task, future):
        calls.append(task)
        if len(calls) > 4:
            raise EngineError("no block could be started")
        return outcome(task, future)

    engine.outcome = broken
    with pytest.raises(EngineError):
        campaign(engine)
    engine.outcome = outcome
    engine.executed.clear()
    assert list(campaign(engine).trials()["status"]) == ["done"] * 5
    assert len(engine.executed) <= 6
