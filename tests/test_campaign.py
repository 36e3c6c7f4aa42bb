"""The loop, with an engine of threads instead of Parsl and a formula instead of training."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from test_launch import make_result, wait_for

from apps.contract import Failure, Fingerprint, N3LOError, TrainTask
from workflow import session
from workflow.campaign import MAX_ATTEMPTS, Campaign
from workflow.console import Console
from workflow.ledger import Ledger, session_facts
from workflow.plan import Planner
from workflow.search import METHODS
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
        self.num_slots = num_slots
        self.pool = ThreadPoolExecutor(num_slots)
        self.finished: dict[str, dict] = {}
        self.executed: list[str] = []
        self.foreseen: list[float | None] = []
        self.avoided: dict[str, list[str]] = {}  # nodes, by task
        self.trained: dict[str, int] = {}  # epochs of tasks
        self.place: dict = {"job": "7", "nodes": ["n1"]}
        self.most_trials = 0
        self.most_running = 0
        self._running: list[TrainTask] = []
        self._lock = threading.Lock()

    def check(self) -> None:
        """Threads do not break down."""

    def news(self) -> list[str]:
        return []

    def foresee(self, least_s: float | None) -> None:
        self.foreseen.append(least_s)

    def epochs(self, task: TrainTask) -> int:
        return self.trained.get(task.id, 0)

    def share(self, task: TrainTask) -> Fraction:
        return Fraction(1, self.num_slots)

    def is_finished(self, task: TrainTask) -> bool:
        return task.key() in self.finished

    def submit(self, task: TrainTask, attempt: int, avoid: list[str]) -> Future:
        self.avoided[task.id] = avoid
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
            return Outcome(failure=value, folder=folder, place=self.place)
        return Outcome(result=value, cached=cached, folder=folder, place=self.place)


@pytest.fixture
def campaign(study_path, tmp_path):
    """Start a driver: `campaign(engine, method=..., num_trials=...)` returns its ledger."""

    def run(
        engine: ThreadEngine, method: str = "random", num_trials: int = 5, parallel: int = 2, **more
    ):
        file = load(study_path, {
            "search.method": method,
            "search.num_trials": num_trials,
            "search.num_parallel": parallel,
            **{f"search.{key}": value for key, value in more.items()},
        })  # fmt: skip
        search = session.make_search(file)
        planner = Planner(file, file.data_files(), FINGERPRINT)
        (tmp_path / "run").mkdir(exist_ok=True)
        ledger = Ledger(tmp_path / "run")
        scoring = session.scoring_of(file.study.search).plain()
        ledger.record_session(**session_facts(FINGERPRINT, site="threads", scoring=scoring))
        session.set_aside(ledger, file)
        folds = file.study.data.folds
        console = Console(file.study.search.objective, num_trials, folds, engine.num_slots)
        Campaign(planner, search, ledger, engine, console).run()
        return ledger

    return run


@pytest.fixture
def engine(tmp_path) -> ThreadEngine:
    return ThreadEngine(tmp_path / "run")


@pytest.mark.parametrize("method", ["random", "grid", "bayesian", "sobol"])
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


def test_tasks_are_kept_off_a_node_on_which_others_failed(campaign, engine):
    engine.train = lambda task: Failure(reason="exit", code=1, message="")
    ledger = campaign(engine)
    assert engine.avoided["t000-f0"] == []
    assert engine.avoided["t004-f0"] == ["n1"]
    assert ledger.nodes_to_avoid() == ["n1"]


@pytest.mark.parametrize("method", ["random", "bayesian"])
def test_a_study_in_which_all_fails_ends(campaign, engine, method):
    engine.train = lambda task: Failure(reason="exception", message="RuntimeError: no")
    assert list(campaign(engine, method, num_trials=8).trials()["status"]) == ["failed"] * 8


def test_a_lost_worker_costs_an_attempt_and_not_the_task(campaign, engine):
    def train(task):
        if task.id == "t000-f0" and engine.executed.count(task.id) < MAX_ATTEMPTS:
            return Failure(reason="node_lost", message="its pilot is gone")
        return distance(task)

    engine.train = train
    ledger = campaign(engine)
    assert list(ledger.trials()["status"]) == ["done"] * 5
    assert ledger.trials_by_number[0].tasks[0].attempts == MAX_ATTEMPTS


def test_a_task_that_kills_its_workers_is_given_up(campaign, engine):
    engine.train = lambda task: Failure(reason="signal", code=9, message="killed")
    ledger = campaign(engine, num_trials=1)
    assert list(ledger.tasks()["status"]) == ["failed", "failed"]
    assert list(ledger.tasks()["reason"]) == ["signal 9", "signal 9"]
    assert len(engine.executed) == 2 * MAX_ATTEMPTS


@pytest.mark.parametrize(("reason", "code"), [("exit", 3), ("signal", 11), ("oom", None)])
def test_what_a_training_does_itself_is_not_tried_again(campaign, engine, reason, code):
    engine.train = lambda task: Failure(reason=reason, code=code, message="")
    campaign(engine, num_trials=1)
    assert len(engine.executed) == 2


def test_pilots_that_end_before_a_task_has_begun_cost_no_attempt(campaign, engine):
    def train(task):
        if engine.executed.count(task.id) <= 3 * MAX_ATTEMPTS:
            return Failure(reason="walltime", message="too late in the pilot to begin")
        return distance(task)

    engine.train, engine.place = train, {}
    assert list(campaign(engine, num_trials=1).tasks()["status"]) == ["done", "done"]


def test_a_task_that_goes_on_is_not_said_to_have_failed(campaign, engine, capsys):
    def train(task):
        if engine.executed.count(task.id) == 1:
            return Failure(reason="walltime", message="the pilot ended")
        return distance(task)

    engine.train = train
    campaign(engine, num_trials=1)
    said = capsys.readouterr().out
    assert "t000-f0 cut off, and goes on: walltime: the pilot ended (job 7, on n1, " in said
    assert "t000-f0/stderr.txt)" in said
    assert "failed" not in said


def test_walltimes_do_not_use_up_attempts_while_a_task_gets_on(campaign, engine):
    needs = 3 * MAX_ATTEMPTS

    def train(task):
        engine.trained[task.id] = engine.trained.get(task.id, 0) + 1
        if engine.trained[task.id] < needs:
            return Failure(reason="walltime", message="the pilot ended")
        return distance(task)

    engine.train = train
    ledger = campaign(engine, num_trials=1)
    assert list(ledger.tasks()["status"]) == ["done", "done"]
    assert len(engine.executed) == 2 * needs


def test_what_another_training_left_in_the_folder_costs_one_attempt_at_most(campaign, engine):
    engine.trained = {"t000-f0": 100, "t000-f1": 100}
    needs = 3 * MAX_ATTEMPTS

    def train(task):
        began_anew = engine.executed.count(task.id) == 1
        engine.trained[task.id] = 1 if began_anew else engine.trained[task.id] + 1
        if engine.trained[task.id] < needs:
            return Failure(reason="walltime", message="the pilot ended")
        return distance(task)

    engine.train = train
    assert list(campaign(engine, num_trials=1).tasks()["status"]) == ["done", "done"]


def test_a_task_whose_epoch_is_longer_than_a_pilot_is_given_up(campaign, engine):
    def train(task):
        engine.trained[task.id] = 1  # one epoch, in the first pilot
        return Failure(reason="walltime", message="the pilot ended")

    engine.train = train
    ledger = campaign(engine, num_trials=1)
    assert list(ledger.tasks()["status"]) == ["failed", "failed"]
    assert len(engine.executed) == 2 * (1 + MAX_ATTEMPTS)


def test_pilots_to_come_hear_how_long_the_least_task_lasts(campaign, engine):
    ledger = campaign(engine, num_trials=1)
    assert engine.foreseen == [None, None]  # without a place
    engine.place = {"job": "7", "nodes": ["n1"], "begun": time.time() + 60}
    ledger = campaign(engine, num_trials=2)
    assert engine.foreseen[-1] == ledger.least_s() == pytest.approx(1.0, abs=0.5)


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


# -- trials that go on from each other -------------------------------------------------------------

HALVING = {"method": "halving", "options": {"eta": 3, "min_epochs": 1, "proposer": "random"}}
POPULATION = {"method": "population", "options": {"population": 4, "steps": 3}}


def curve(task):
    """Falls with the epochs, to a level that depends on the learning rate."""
    return distance(task) + 1 / task.training.epochs


@pytest.fixture
def nine_epochs(edit):
    edit("epochs = 2", "epochs = 9")


@pytest.mark.usefixtures("nine_epochs")
@pytest.mark.parametrize("settings", [HALVING, POPULATION], ids=["halving", "population"])
def test_a_child_starts_from_its_parents_folds_after_they_ended(campaign, engine, settings):
    seen = []

    def train(task):
        seen.append(task)
        return curve(task)

    engine.train = train
    ledger = campaign(engine, num_trials=12, **settings)
    assert list(ledger.trials()["status"]) == ["done"] * 12
    children = [task for task in seen if task.start is not None]
    assert children
    assert all(task.keep_state for task in seen)
    for task in children:
        proposal = ledger.trials_by_number[task.trial].proposal
        parent = ledger.trials_by_number[proposal.parent].tasks[task.fold]
        assert task.start.key == parent.key
        assert task.start.folder.endswith(f"/run/t{proposal.parent:03d}-f{task.fold}")
        assert parent.ended <= ledger.state(task).submitted
        root = next(t for t in seen if (t.trial, t.fold) == (ledger.root(task.trial), task.fold))
        assert task.seed == root.seed
        assert task.training.epochs > root.training.epochs


@pytest.mark.usefixtures("nine_epochs")
@pytest.mark.parametrize("settings", [HALVING, POPULATION], ids=["halving", "population"])
def test_a_second_start_of_such_a_study_executes_nothing(campaign, engine, settings):
    engine.train = curve
    before = campaign(engine, num_trials=12, **settings)
    engine.executed.clear()
    after = campaign(engine, num_trials=12, **settings)
    assert engine.executed == []
    assert after.trials()["score"].equals(before.trials()["score"])


@pytest.mark.usefixtures("nine_epochs")
def test_a_child_waits_for_a_parent_that_runs_again(campaign, engine):
    engine.train = curve
    ledger = campaign(engine, num_trials=12, **HALVING)
    child = next(t for t in ledger.trials_by_number.values() if t.proposal.parent is not None)
    parent = ledger.trials_by_number[child.proposal.parent]
    for state in [*parent.tasks.values(), *child.tasks.values()]:
        engine.finished.pop(state.key, None)
    engine.executed.clear()
    campaign(engine, num_trials=12, **HALVING)
    number = parent.proposal.number
    assert len(engine.executed) == 4
    assert set(engine.executed[:2]) == {f"t{number:03d}-f0", f"t{number:03d}-f1"}


@pytest.mark.usefixtures("nine_epochs")
def test_a_child_whose_parent_fails_now_fails_with_that_reason(campaign, engine):
    engine.train = curve
    ledger = campaign(engine, num_trials=12, **HALVING)
    child = next(t for t in ledger.trials_by_number.values() if t.proposal.parent is not None)
    number = child.proposal.parent
    for state in [*ledger.trials_by_number[number].tasks.values(), *child.tasks.values()]:
        engine.finished.pop(state.key, None)
    ledger.record_rerun([child.proposal.number])
    engine.train = lambda task: Failure(reason="exception", message="no")
    tasks = campaign(engine, num_trials=12, **HALVING).tasks()
    assert list(tasks.query("trial == @child.proposal.number")["reason"]) == ["parent", "parent"]
    assert list(tasks.query("trial == @number")["reason"]) == ["exception", "exception"]


def test_racing_is_refused_where_trials_go_on_from_each_other(campaign, engine):
    with pytest.raises(N3LOError, match="'halving' stops trials by itself"):
        campaign(engine, racing={"alpha": 0.05}, **HALVING)


# -- fold racing -----------------------------------------------------------------------------------


@pytest.fixture
def five_folds(edit):
    edit("folds = 2", "folds = 5")


def with_fold_effect(task):
    """Folds differ by 1, trials by decades, and what is left is 0.01."""
    rng = np.random.default_rng([task.trial, task.fold])
    return distance(task) + task.fold + 0.01 * rng.normal()


@pytest.mark.usefixtures("five_folds")
def test_a_hopeless_trial_is_not_trained_on_its_other_folds(campaign, engine):
    engine.train = with_fold_effect
    ledger = campaign(engine, num_trials=20, racing={"alpha": 0.05, "min_folds": 1})
    trials = ledger.trials()
    assert set(trials["status"]) == {"done", "dropped"}
    assert len(engine.executed) < 0.7 * 100
    for number, trial in ledger.trials_by_number.items():
        if trial.status == "dropped":
            done = [fold for fold, state in trial.tasks.items() if state.status == "done"]
            assert done == list(range(len(done)))
            assert "its chance to beat" in trial.tasks[4].message
            assert math.isnan(trials["score"][number])


@pytest.mark.usefixtures("five_folds")
def test_racing_finds_the_best_trial_that_a_whole_study_finds(campaign, engine, tmp_path):
    engine.train = with_fold_effect
    raced = campaign(engine, num_trials=20, racing={"alpha": 0.05}).trials()
    (tmp_path / "run").rename(tmp_path / "raced")
    whole = ThreadEngine(tmp_path / "run", with_fold_effect)
    all_of_them = campaign(whole, num_trials=20).trials()
    assert raced["score"].idxmin() == all_of_them["score"].idxmin()
    assert len(whole.executed) == 100


@pytest.mark.usefixtures("five_folds")
def test_a_raced_study_that_starts_again_stands_by_what_it_dropped(campaign, engine):
    engine.train = with_fold_effect
    before = campaign(engine, num_trials=12, racing={"alpha": 0.05})
    engine.executed.clear()
    after = campaign(engine, num_trials=12, racing={"alpha": 0.05})
    assert engine.executed == []
    assert list(after.tasks()["status"]) == list(before.tasks()["status"])


@pytest.mark.usefixtures("five_folds")
def test_racing_begins_after_min_folds_and_trains_no_fold_more_than_it_must(campaign, engine):
    engine.train = with_fold_effect
    racing = {"alpha": 0.05, "min_folds": 2}
    # One at a time: else a trial may be dropped late, for another that has got better meanwhile.
    ledger = campaign(engine, num_trials=12, parallel=1, racing=racing)
    dropped = [t for t in ledger.trials_by_number.values() if t.status == "dropped"]
    assert dropped
    assert {len(trial.facts("fom")) for trial in dropped} == {2}


@pytest.mark.usefixtures("five_folds")
def test_with_racing_a_failed_fold_spares_the_others(campaign, engine):
    engine.train = lambda task: Failure(reason="diverged", message="nan")
    ledger = campaign(engine, num_trials=3, racing={"alpha": 0.05})
    assert len(engine.executed) == 3
    assert list(ledger.trials()["status"]) == ["failed"] * 3


# -- the end of a study ----------------------------------------------------------------------------


def test_a_study_in_which_all_fails_stops_early_and_says_why(campaign, engine, capsys):
    engine.train = lambda task: Failure(reason="exception", message="RuntimeError: no")
    ledger = campaign(engine, num_trials=50, parallel=1, stop={"failures": 4})
    assert len(ledger.trials()) == 4
    assert (
        "no more trials: the last 4 all failed (exception 8); search.stop.failures = 4"
        in capsys.readouterr().out
    )


def test_a_target_value_ends_the_study(campaign, engine, capsys):
    ledger = campaign(engine, num_trials=50, parallel=1, stop={"value": 0.5})
    scores = ledger.trials()["score"]
    assert scores.iloc[-1] <= 0.5 < scores.iloc[:-1].min()
    assert f"t{len(scores) - 1:03d} has" in capsys.readouterr().out


def test_no_improvement_ends_the_study(campaign, engine):
    scores = campaign(engine, num_trials=200, parallel=1, stop={"no_improvement": 6}).trials()
    assert scores["score"].idxmin() == len(scores) - 7


def test_node_hours_end_the_study(campaign, engine):
    """A task of make_result takes `seconds` of a whole node."""
    ledger = campaign(engine, num_trials=2, parallel=1)
    hours = sum(ledger.tasks()["seconds"]) / 3600
    ledger = campaign(engine, num_trials=50, parallel=1, stop={"node_hours": 2.4 * hours})
    assert len(ledger.trials()) == 5  # 2.4 x 2 trials are 4.8


def test_what_runs_when_a_rule_is_met_ends_as_usual(campaign, tmp_path):
    engine = ThreadEngine(tmp_path / "run", num_slots=8)
    trials = campaign(engine, num_trials=50, parallel=4, stop={"value": 0.7}).trials()
    assert set(trials["status"]) == {"done"}


def test_a_proposal_that_is_prepared_ahead_is_in_the_ledger_before_a_slot_is_free(campaign, engine):

    def train(task):
        """Ends only once the next trial is in the ledger."""
        wanted = min(task.trial + 2, 6)
        wait_for(lambda: len(Ledger(engine.folder).trials_by_number) >= wanted, 10)
        return distance(task)

    engine.train = train
    ledger = campaign(engine, num_trials=6, parallel=1, prepare_ahead=1)
    assert list(ledger.trials()["status"]) == ["done"] * 6


# -- a space that changes --------------------------------------------------------------------------

WIDTH = '"model.args.width" = { type = "int", low = 2, high = 8 }'


def test_rows_that_fit_a_changed_space_are_reused_and_the_others_set_aside(campaign, engine, edit):
    before = campaign(engine, num_trials=6).trials()
    engine.executed.clear()
    edit(WIDTH, WIDTH.replace("high = 8", "high = 7"))
    after = campaign(engine, num_trials=8).trials()
    fits = before["model.args.width"] <= 7
    assert 0 < fits.sum() < 6
    assert list(after["status"][:6]) == ["done" if fit else "aside" for fit in fits]
    assert (after["status"] == "done").sum() == 8
    assert len(engine.executed) == 2 * (8 - fits.sum())


def test_a_new_dimension_finds_the_studys_own_value_in_earlier_rows(campaign, engine, edit):
    campaign(engine, num_trials=4)
    engine.executed.clear()
    edit(WIDTH, WIDTH + '\n"training.batch_size" = { type = "int", low = 8, high = 64 }')
    after = campaign(engine, num_trials=5).trials()
    assert list(after["status"]) == ["done"] * 5  # all ran with batch_size 16, the study's own
    assert len(engine.executed) == 2


@pytest.mark.usefixtures("nine_epochs")
def test_a_finished_trial_stays_so_when_its_parent_does_not_fit_any_more(campaign, engine, edit):
    engine.train = curve
    before = campaign(engine, num_trials=12, **POPULATION).trials()
    moved = before.dropna(subset=["parent"]).merge(before, left_on="parent", right_on="trial")
    lr = "training.optimizer.lr"
    lower = moved[moved[f"{lr}_x"] < moved[f"{lr}_y"]]
    assert len(lower) > 0
    high = (lower[f"{lr}_x"].iloc[0] + lower[f"{lr}_y"].iloc[0]) / 2
    edit("high = 1.0", f"high = {high}")
    after = campaign(engine, num_trials=12, **POPULATION).trials()
    assert set(after["status"][:12]) == {"done", "aside"}


@pytest.mark.usefixtures("nine_epochs")
@pytest.mark.parametrize(
    ("first", "second"),
    [(HALVING, {"method": "random"}), ({"method": "random"}, HALVING)],
    ids=["from halving", "to halving"],
)
def test_another_method_finds_the_finished_trials_done(campaign, engine, first, second):
    engine.train = curve
    before = campaign(engine, num_trials=9, **first).trials()
    engine.executed.clear()
    after = campaign(engine, num_trials=12, **second).trials()
    assert list(after["status"]) == ["done"] * 12
    assert list(after["score"][:9]) == list(before["score"])
    assert {name[:4] for name in engine.executed} == {"t009", "t010", "t011"}


@pytest.mark.usefixtures("nine_epochs")
@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("multi", "constructive")])
def test_every_method_runs_a_study_in_which_every_third_trial_fails(campaign, engine, method):
    def train(task):
        if task.trial % 3 == 1:
            return Failure(reason="diverged", message="nan")
        return curve(task)

    engine.train = train
    options = {"population": POPULATION["options"], "evolution": {"population": 4}}.get(method, {})
    trials = campaign(engine, method, num_trials=12, options=options).trials()
    assert len(trials) == 12
    assert set(trials["status"]) == {"done", "failed"}
