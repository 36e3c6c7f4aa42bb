"""The ledger: rows in, tables out; nothing that a kill can take away."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Iterator

import numpy as np
import pandas as pd
import pytest
from test_launch import make_result, make_task

from apps.contract import Failure, Fingerprint, N3LOError, Objective, TaskPaths
from workflow import runfolder
from workflow.ledger import Ledger, session_facts
from workflow.scores import Scoring
from workflow.search import Proposal
from workflow.stop import node_hours

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
def ledger(tmp_path) -> Iterator[Ledger]:
    """Of a driver at work. Trial 0: done in both folds; 1: one fold failed; 2: one is running."""
    ledger = Ledger(tmp_path)
    start_session(ledger)
    for trial in range(3):
        point = {"a.lr": 0.1 * (trial + 1), "a.kind": "x"}
        ledger.record_trial(Proposal(point, number=trial), num_folds=2)
    finish(ledger, 0, 1, 0.4)
    finish(ledger, 0, 0, 0.2)
    finish(ledger, 1, 0, 0.1)
    ledger.record_start(task_of(1, 1), 1)
    ledger.record_failed(task_of(1, 1), Failure(reason="diverged", message="nan"), folder="t001-f1")
    ledger.record_start(task_of(2, 0), 1)
    with runfolder._lock(tmp_path):
        yield ledger


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


def test_a_task_has_the_seconds_of_its_epochs_and_of_each_part_of_them(tmp_path):
    """Epochs 4 to 6 in 6 seconds: it went on from another task after its third."""
    ledger = Ledger(tmp_path)
    ledger.record_trial(Proposal({"a.lr": 1.0}, number=0), num_folds=2)
    result = dataclasses.asdict(
        make_result(task_of(0, 0), start_epoch=3, epochs=6, seconds=6.0, compute_s=2.0, idle_s=0.5)
    )
    ledger.record_done(task_of(0, 0), result, cached=False, folder="t000-f0")
    tasks = Ledger(tmp_path).tasks()
    parts = ["compute_s", "communication_s", "data_s", "idle_s"]
    assert tasks.loc[0, ["seconds_per_epoch", *parts]].tolist() == [2.0, 2.0, 0.1, 0.1, 0.5]
    assert set(tasks[["seconds_per_epoch", *parts]].dtypes) == {np.dtype(float)}
    assert tasks.loc[1, parts].isna().all()


def test_results_of_earlier_versions_lack_what_was_not_measured_yet(ledger):
    measured = ("compute_s", "communication_s", "data_s", "idle_s")
    rows = [json.loads(line) for line in ledger.path.read_text().splitlines()]
    for row in rows:
        for name in (*measured, "training_s", "start_epoch", "lost_ranks", "inference_us"):
            row.get("result", {}).pop(name, None)
    ledger.path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = Ledger(ledger.folder).tasks()
    assert tasks[list(measured)].isna().all(axis=None)
    assert set(tasks[list(measured)].dtypes) == {np.dtype(float)}
    assert tasks.loc[0, ["seconds_per_epoch", "samples_per_second"]].tolist() == [1.0, 10.0]


def test_the_score_is_the_mean_over_folds_and_spread_their_standard_deviation(ledger):
    trial = ledger.trials().iloc[0]
    assert trial["score"] == pytest.approx(0.3)
    assert trial["spread"] == pytest.approx(0.2 / math.sqrt(2))  # of 0.2 and 0.4, n - 1


def test_the_search_is_told_of_ended_trials_with_the_error_of_their_mean(ledger):
    history, pending = ledger.known()
    assert history[0].value == pytest.approx(0.3)
    assert history[0].noise == pytest.approx(0.1)
    assert history[1].value is None
    assert [(each.number, each.point["a.lr"]) for each in pending] == [(2, pytest.approx(0.3))]


def test_the_mean_does_not_depend_on_which_fold_ended_first(tmp_path):
    foms = [0.1, 0.2, 0.3]
    scores = []
    for order in ([0, 1, 2], [2, 0, 1]):
        ledger = Ledger(tmp_path / str(order))
        ledger.folder.mkdir()
        ledger.record_trial(Proposal({"a.lr": 1.0}, number=0), num_folds=3)
        for fold in order:
            finish(ledger, 0, fold, foms[fold])
        scores.append(ledger.known()[0][0].value)
    assert scores[0] == scores[1]


def test_a_task_without_an_end_is_lost_once_a_new_driver_starts(ledger):
    again = Ledger(ledger.folder)
    start_session(again)
    state = again.trials_by_number[2].tasks[0]
    assert (state.status, state.reason, state.attempts) == ("waiting", "driver_lost", 1)


def test_without_a_driver_nothing_runs_for_whoever_reads(ledger, tmp_path):
    """As the next driver will say, though the last one could write no line: a copy has none."""
    assert Ledger(tmp_path).tasks()["status"].tolist()[4] == "running"
    copy = Ledger(shutil.copytree(tmp_path, tmp_path / "copy"))
    seen = [copy.tasks(), copy.trials(), copy.attempts()]
    assert seen[0].loc[4, ["status", "reason"]].tolist() == ["waiting", "driver_lost"]
    assert seen[1]["status"].tolist() == ["done", "failed", "waiting"]
    assert seen[2]["status"].tolist() == ["done", "done", "done", "failed", "lost"]
    assert seen[2].loc[4, "ended"].timestamp() == pytest.approx(copy.spans[-1][1], abs=1e-6)
    start_session(copy)
    for before, now in zip(seen, [copy.tasks(), copy.trials(), copy.attempts()], strict=True):
        assert same(before, now)


def test_a_refresh_sees_that_a_driver_has_ended(tmp_path):
    with runfolder._lock(tmp_path):
        driver = Ledger(tmp_path)
        start_session(driver)
        driver.record_trial(Proposal({"a.lr": 1.0}, number=0), num_folds=1)
        driver.record_start(task_of(0, 0), 1)
        seen = Ledger(tmp_path)
        assert not seen.refresh()
        assert seen.attempts()["status"].tolist() == ["running"]
    assert seen.refresh()
    assert seen.attempts()["status"].tolist() == ["lost"]


def test_a_ledger_is_named_by_its_run_folder_which_may_begin_with_a_tilde(
    ledger, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert len(Ledger(f"~/{tmp_path.name}").trials()) == 3
    with pytest.raises(N3LOError, match=r"is a file; .* by its run folder, such as '.*'$") as told:
        Ledger(ledger.path)
    assert str(told.value).endswith(f"such as '{tmp_path}'")
    (tmp_path / "tiny.toml").write_text("")
    with pytest.raises(N3LOError, match=r"tiny.toml' is a file; .* such as 'runs/tiny'$"):
        Ledger(tmp_path / "tiny.toml")


def test_a_trial_may_be_given_by_its_name(ledger):
    history = TaskPaths(ledger.folder / "t001-f0").history
    history.parent.mkdir()
    history.write_text('{"epoch": 1, "val_loss": 0.5}\n')
    for trial in (1, "1", "t001", np.int64(1)):
        assert ledger.history(trial=trial)["val_loss"].tolist() == [0.5]
    with pytest.raises(N3LOError, match=r"Ledger.history: trial: 'first' is not a trial, such as"):
        ledger.history(trial="first")


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


def test_what_a_proposal_is_besides_its_point_is_kept(tmp_path):
    ledger = Ledger(tmp_path)
    start_session(ledger)
    ledger.record_trial(Proposal({"a.lr": 1.0}, {"training.epochs": 3}, number=0), 2)
    child = Proposal({"a.lr": 1.0}, {"training.epochs": 9}, parent=0, tags={"rung": 1}, number=1)
    ledger.record_trial(child, 2, seconds=0.25)
    finish(ledger, 0, 0, 0.5)
    again = Ledger(tmp_path)
    assert again.trials_by_number[1].proposal == child
    assert again.root(1) == 0
    start = again.starts(1)[0]
    assert start.key == task_of(0, 0).key()
    assert start.folder == str(tmp_path.resolve() / task_of(0, 0).id)
    trial = again.trials().iloc[1]
    columns = ["training.epochs", "rung", "parent", "search_seconds"]
    assert trial[columns].tolist() == [9, 1, 0, 0.25]


def test_the_search_is_told_the_mean_that_a_dropped_trial_would_have(tmp_path):
    """Fold 1 is 0.1 worse than fold 0 for all trials."""
    ledger = Ledger(tmp_path)
    for trial, level in enumerate([1.0, 2.0, 3.0]):
        ledger.record_trial(Proposal({"a.lr": level}, number=trial), num_folds=2)
        finish(ledger, trial, 0, level - 0.05)
        if trial < 2:
            finish(ledger, trial, 1, level + 0.05)
    ledger.record_dropped(2, [1], "hopeless")
    again = Ledger(tmp_path)
    assert again.trials_by_number[2].status == "dropped"
    assert again.tasks()["message"].iloc[5] == "hopeless"
    history, pending = again.known()
    assert pending == []
    assert history[2].value == pytest.approx(3.0)
    assert math.isnan(again.trials()["score"].iloc[2])  # only a whole trial can be the best


def test_trials_set_aside_are_not_told_until_they_fit_again(ledger):
    ledger.record_aside([0])
    assert ledger.trials()["status"].iloc[0] == "aside"
    assert [seen.proposal.number for seen in ledger.known()[0]] == [1]
    start_session(ledger)
    assert ledger.trials()["status"].iloc[0] == "done"


def test_a_trial_whose_parent_failed_has_failed_with_that_reason(ledger):
    ledger.record_orphaned(2, "t001, from which it goes on, failed")
    tasks = ledger.tasks().query("trial == 2")
    assert list(tasks["reason"]) == ["parent", "parent"]
    assert ledger.trials_by_number[2].is_ended


def test_a_spread_penalty_and_further_objectives_are_the_sessions(ledger):
    """0.2 and 0.4 have the mean 0.3 and the deviation 0.2 / sqrt(2)."""
    scoring = Scoring(
        Objective(metric="val_loss", goal="min"), 1.0, (Objective(metric="seconds", goal="min"),)
    )
    ledger.record_session(**session_facts(FINGERPRINT, scoring=scoring.plain()))
    trial = Ledger(ledger.folder).trials().iloc[0]
    assert trial["score"] == pytest.approx(0.3 + 0.2 / math.sqrt(2))
    assert trial["pareto"]
    assert ledger.known()[0][0].further == (make_result(task_of(0, 0), fom=0.2).seconds,)


def test_the_budget_counts_the_first_trials_that_fit(ledger):
    ledger.record_aside([0])
    assert ledger.counted(1) == [1]
    assert ledger.counted(9) == [1, 2]


def test_only_trials_with_the_largest_budget_count_as_trained_in_full(tmp_path):
    ledger = Ledger(tmp_path)
    for number, epochs in enumerate([1, 3, 1, 3]):
        proposal = Proposal({"a.lr": 1.0 + number}, {"training.epochs": epochs}, number=number)
        ledger.record_trial(proposal, 1)
    assert ledger.in_full() == [1, 3]
    ledger.record_trial(Proposal({"a.lr": 9.0}, number=4), 1)
    assert ledger.in_full() == [4]


def test_the_hours_of_a_study_are_those_of_its_sessions(tmp_path):
    (tmp_path / "ledger.jsonl").write_text(
        "".join(
            json.dumps({"event": event, "time": hour * 3600.0, "trials": [], "fingerprint": {}})
            + "\n"
            for event, hour in [("session", 0), ("aside", 2), ("session", 10), ("aside", 11)]
        )
    )
    assert Ledger(tmp_path).hours() == pytest.approx(3.0)


def test_a_node_on_which_three_tasks_failed_in_a_row_is_to_be_avoided(tmp_path):
    ledger = Ledger(tmp_path)
    start_session(ledger)
    for trial in range(4):
        ledger.record_trial(Proposal({}, number=trial), num_folds=2)

    def fail(trial: int, reason: str = "exit") -> None:
        task, failure = task_of(trial, 0), Failure(reason=reason, message="")
        place = {"job": "7", "nodes": ["n1", "n2"]}
        ledger.record_failed(task, failure, folder=task.id, place=place)

    for trial in (0, 0, 0, 1, 1):  # of a task that fails everywhere it is not the node's fault
        fail(trial)
    fail(2, "diverged")
    assert ledger.nodes_to_avoid() == []
    fail(3)
    assert ledger.nodes_to_avoid() == Ledger(tmp_path).nodes_to_avoid() == ["n1", "n2"]
    task = task_of(2, 1)
    result = dataclasses.asdict(make_result(task))
    place = {"job": "8", "nodes": ["n2"]}
    ledger.record_done(task, result, cached=False, folder=task.id, place=place)
    assert ledger.nodes_to_avoid() == ["n1"]


def test_where_a_task_ran_is_in_its_row_whether_it_was_done_or_failed(tmp_path):
    ledger = Ledger(tmp_path)
    start_session(ledger)
    ledger.record_trial(Proposal({}, number=0), num_folds=2)
    place = {"job": "7", "nodes": ["n1", "n2"], "begun": 1.5}
    failure = Failure(reason="signal", code=9, message="")
    ledger.record_failed(task_of(0, 0), failure, folder="t000-f0", place=place)
    result = dataclasses.asdict(make_result(task_of(0, 1), hosts=["h1", "h1"]))
    ledger.record_done(task_of(0, 1), result, cached=False, folder="t000-f1", place=place)
    tasks = Ledger(tmp_path).tasks()
    assert list(tasks["job"]) == ["7", "7"]
    assert list(tasks["host"]) == ["n1,n2", "h1"]  # as ranks call it, where they lived to tell
    assert list(tasks["reason"]) == ["signal 9", ""]
    assert set(tasks["begun"]) == {pd.Timestamp(1.5, unit="s", tz="UTC")}


def test_what_was_cut_off_has_occupied_its_nodes_too(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.record_trial(Proposal({}, number=0), num_folds=1)
    of = {"trial": 0, "fold": 0, "key": ""}
    cut_off = {"status": "failed", "reason": "walltime", "message": "", "folder": ""}
    result = dataclasses.asdict(make_result(task_of(0, 0), seconds=30.0))
    for submitted, begun, ended, facts in [
        (0.0, 100.0, 700.0, cut_off),  # and 100 s in the queue
        (700.0, None, 800.0, cut_off),  # too late in a pilot to begin
        (800.0, 900.0, 1000.0, {"status": "done", "result": result, "folder": ""}),
    ]:
        ledger._apply({"event": "start", "time": submitted, "attempt": 1, **of})
        place = {} if begun is None else {"begun": begun}
        ledger._apply({"event": "end", "time": ended, **of, **facts, **place})
    assert node_hours(ledger, node_share=0.5) == pytest.approx((600 + 100) * 0.5 / 3600)


def test_the_least_time_for_a_task_is_the_longest_start_and_epoch(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.record_trial(Proposal({}, number=0), num_folds=3)
    assert ledger.least_s() is None
    # It took 5 s to begin: 25 s, of which 20 s were for 10 epochs; the second went on.
    for fold, (lasted, seconds, epochs) in enumerate([(25, 20, 10), (3, 60, 10), (8, 4, 1)]):
        facts = {"seconds": seconds, "epochs": epochs}
        result = dataclasses.asdict(make_result(task_of(0, fold), **facts))
        of = {"trial": 0, "fold": fold, "key": ""}
        row = {"event": "end", "time": 100.0 + lasted, **of}
        ledger._apply({"event": "start", "time": 99.0, "attempt": 1, **of})
        ledger._apply({**row, "status": "done", "folder": "", "result": result, "begun": 100.0})
        assert ledger.least_s() == pytest.approx([7.0, 7.0, 8.0][fold])
    # A result that an earlier attempt had left says nothing of the time that it took.
    ledger._apply({"event": "start", "time": 7000.0, "attempt": 2, **of})
    ledger._apply({**row, "time": 7001.0, "status": "done", "folder": "", "result": result})
    assert ledger.least_s() == pytest.approx(8.0)


def test_a_task_of_another_study_is_shown_by_its_own_path(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "linked").symlink_to("runs")
    ledger = Ledger(tmp_path / "linked" / "mine")
    assert ledger.place_of("t000-f0") == ledger.folder / "t000-f0"
    theirs = (tmp_path / "runs/theirs/t000-f0").resolve()
    assert ledger.place_of(ledger.relative(theirs)) == theirs
