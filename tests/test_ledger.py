"""The ledger: rows in, tables out; nothing that a kill can take away."""

from __future__ import annotations

import dataclasses
import math

import pandas as pd
import pytest
from test_launch import make_result, make_task

from apps.contract import Failure, Fingerprint
from workflow.ledger import Ledger, session_facts

FINGERPRINT = Fingerprint(data="d", model="m", code="c")


def task_of(trial: int, fold: int):
    return dataclasses.replace(make_task(), trial=trial, fold=fold)


def start_session(ledger: Ledger, fingerprint: Fingerprint = FINGERPRINT) -> None:
    ledger.record_session(**session_facts(fingerprint, site="local"))


def finish(ledger: Ledger, trial: int, fold: int, fom: float) -> None:
    task = task_of(trial, fold)
    ledger.record_start(task, ledger.state(task).attempts + 1)
    result = make_result(task, fom=fom)
    ledger.record_done(task, dataclasses.asdict(result), cached=False, folder=task.id)


@pytest.fixture
def ledger(tmp_path) -> Ledger:
    """Trial 0: done in both folds; trial 1: one fold failed; trial 2: one fold is running."""
    ledger = Ledger(tmp_path)
    start_session(ledger)
    for trial in range(3):
        ledger.record_trial(trial, {"a.lr": 0.1 * (trial + 1), "a.kind": "x"}, num_folds=2)
    finish(ledger, 0, 1, 0.4)
    finish(ledger, 0, 0, 0.2)
    finish(ledger, 1, 0, 0.1)
    ledger.record_start(task_of(1, 1), 1)
    ledger.record_failed(task_of(1, 1), Failure(reason="diverged", message="nan"), folder="t001-f1")
    ledger.record_start(task_of(2, 0), 1)
    return ledger


def same(one: pd.DataFrame, other: pd.DataFrame) -> bool:
    pd.testing.assert_frame_equal(one, other)
    return True


def test_reading_the_file_gives_what_was_written(ledger):
    again = Ledger(ledger.folder)
    assert same(again.tasks(), ledger.tasks())
    assert same(again.trials(), ledger.trials())


def test_there_is_one_row_for_each_trial_and_fold(ledger):
    tasks = ledger.tasks()
    assert list(zip(tasks["trial"], tasks["fold"], strict=True)) == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip
    assert list(tasks["status"]) == ["done", "done", "done", "failed", "running", "waiting"]
    assert tasks.loc[3, "reason"] == "diverged"


def test_columns_keep_their_type_when_tasks_fail_or_wait(ledger):
    tasks = ledger.tasks()
    assert tasks["fom"].dtype == float
    assert tasks["a.lr"].dtype == float
    assert tasks["trial"].dtype == "Int64"
    assert tasks["cached"].dtype == "boolean"
    assert isinstance(tasks["ended"].dtype, pd.DatetimeTZDtype)
    assert math.isnan(tasks.loc[5, "fom"])


def test_the_score_is_the_mean_over_folds_and_spread_their_standard_deviation(ledger):
    trial = ledger.trials().iloc[0]
    assert trial["score"] == pytest.approx(0.3)
    assert trial["spread"] == pytest.approx(0.2 / math.sqrt(2))  # of 0.2 and 0.4, n - 1


def test_the_search_is_told_of_ended_trials_with_the_error_of_their_mean(ledger):
    history, pending = ledger.known_points()
    assert history[0].value == pytest.approx(0.3)
    assert history[0].noise == pytest.approx(0.1)
    assert history[1].value is None
    assert [point["a.lr"] for point in pending] == [pytest.approx(0.3)]


def test_the_mean_does_not_depend_on_which_fold_ended_first(tmp_path):
    foms = [0.1, 0.2, 0.3]
    scores = []
    for order in ([0, 1, 2], [2, 0, 1]):
        ledger = Ledger(tmp_path / str(order))
        ledger.folder.mkdir()
        ledger.record_trial(0, {"a.lr": 1.0}, num_folds=3)
        for fold in order:
            finish(ledger, 0, fold, foms[fold])
        scores.append(ledger.known_points()[0][0].value)
    assert scores[0] == scores[1]


def test_a_task_without_an_end_is_lost_once_a_new_driver_starts(ledger):
    again = Ledger(ledger.folder)
    start_session(again)
    state = again.trials_by_number[2].tasks[0]
    assert (state.status, state.reason, state.attempts) == ("waiting", "lost", 1)


def test_results_of_other_code_do_not_count_but_points_do(ledger):
    start_session(ledger, Fingerprint(data="d", model="edited", code="c"))
    assert set(ledger.tasks()["status"]) == {"waiting"}
    assert len(ledger.trials_by_number) == 3


def test_trials_to_rerun_are_waiting_again(ledger):
    ledger.record_rerun([0])
    tasks = ledger.tasks()
    assert list(tasks["status"])[:2] == ["waiting", "waiting"]
    assert list(tasks["attempt"])[:2] == [1, 1]


def test_a_kill_in_the_middle_of_a_row_loses_that_row_alone(ledger, tmp_path):
    content = ledger.path.read_bytes()
    ledger.path.write_bytes(content[:-10])
    again = Ledger(ledger.folder)
    assert list(again.tasks()["status"])[:4] == list(ledger.tasks()["status"])[:4]
    finish(again, 2, 1, 0.5)
    assert Ledger(ledger.folder).trials_by_number[2].tasks[1].status == "done"


def test_an_event_of_a_later_version_is_passed_over(ledger):
    with open(ledger.path, "a") as file:
        file.write('{"event": "from_the_future", "x": 1}\n')
    assert same(Ledger(ledger.folder).tasks(), ledger.tasks())
