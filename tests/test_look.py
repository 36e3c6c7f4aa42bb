"""A look from a terminal: the same facts for people and, by --json, for programs."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import re
import threading
import time
from collections.abc import Iterator

import pytest
from test_launch import make_result
from test_ledger import FINGERPRINT, task_of

from apps.contract import Failure, N3LOError, TaskPaths, write_json
from workflow import look
from workflow.console import terminal
from workflow.ledger import Ledger, session_facts
from workflow.search import Proposal
from workflow.study import Study, load


@pytest.fixture
def study(study_path) -> Study:
    return load(study_path).study


@pytest.fixture
def ledger(tmp_path) -> Ledger:
    """Trial 0 is done; of trial 1 a fold failed and the other runs, in epoch 7."""
    ledger = Ledger(tmp_path / "runs" / "small")
    ledger.folder.mkdir(parents=True)
    facts = {"site": "slurm", "host": "login1", "pid": 42, "node_share": 0.5}
    ledger.record_session(**session_facts(FINGERPRINT, **facts))
    for trial in range(2):
        ledger.record_trial(Proposal({"training.optimizer.lr": 0.1}, number=trial), num_folds=2)
        for fold in range(2):
            ledger.record_start(task_of(trial, fold), 1)
    for fold in range(2):
        task = task_of(0, fold)
        result = dataclasses.asdict(make_result(task, fom=0.5 + fold, seconds=3600.0))
        ledger.record_done(task, result, cached=False, folder=task.id)
    place = {"job": "17", "nodes": ["n1"]}
    failure = Failure(reason="signal", code=9, message="ended by SIGKILL")
    ledger.record_failed(task_of(1, 0), failure, folder="t001-f0", place=place)
    paths = TaskPaths(ledger.folder / "t001-f1")
    write_json(paths.place, {"job": "18", "hosts": ["n2"], "begun": time.time() - 60})
    rows = [json.dumps({"epoch": epoch, "val_loss": 1 / epoch}) for epoch in range(1, 8)]
    paths.history.write_text("\n".join(rows) + '\n{"epoch": 8, "val_')  # it is being written
    paths.stderr.write_text("".join(f"line {number}\n" for number in range(100)))
    return ledger


@pytest.fixture
def driver(ledger) -> Iterator[threading.Event]:
    """Somebody is at work in the folder, until the event is set."""
    gone = threading.Event()
    file = open(ledger.folder / "driver.lock", "w")  # noqa: SIM115  the lock is the point

    def hold() -> None:
        gone.wait(60)
        file.close()

    fcntl.flock(file, fcntl.LOCK_EX)
    thread = threading.Thread(target=hold)
    thread.start()
    yield gone
    gone.set()
    thread.join()


@pytest.mark.usefixtures("driver")
def test_an_overview_says_what_is_done_what_runs_and_what_it_costs(ledger, study):
    seen = look.overview(ledger, study)
    assert json.loads(json.dumps(seen, allow_nan=False)) == seen
    assert seen["running"] is True
    assert seen["tasks"] == {"done": 2, "failed": 1, "running": 1}
    assert seen["failures"] == {"signal 9": 1}
    assert seen["best"]["trial"] == 0
    assert seen["best"]["score"] == pytest.approx(1.0)
    [now] = seen["now"]
    assert (now["task"], now["epoch"], now["job"], now["nodes"]) == ("t001-f1", 7, "18", ["n2"])
    assert now["val_loss"] == pytest.approx(1 / 7)
    assert seen["node_hours"] == pytest.approx(2 * 0.5)  # of half a node each


def test_without_a_driver_nothing_runs(ledger, study):
    seen = look.overview(Ledger(ledger.folder), study)
    assert (seen["running"], seen["now"]) == (False, [])
    assert seen["tasks"] == {"done": 2, "failed": 1, "waiting": 1}


@pytest.mark.usefixtures("driver")
def test_what_is_not_finite_is_none(ledger, study):
    with open(TaskPaths(ledger.folder / "t001-f1").history, "a") as file:
        file.write('\n{"epoch": 8, "val_loss": Infinity}\n')
    [now] = look.overview(ledger, study)["now"]
    assert (now["epoch"], now["val_loss"]) == (8, None)


def test_the_budget_is_that_of_the_last_start(ledger, study):
    ledger.record_session(**session_facts(FINGERPRINT, num_trials=77))
    assert look.overview(ledger, study)["num_trials"] == 77


@pytest.mark.usefixtures("driver")
def test_a_status_is_one_screen(ledger, study, capsys):
    look.print_status(ledger, study, terminal())
    said = capsys.readouterr().out
    assert "driver: process 42 on login1, slurm" in said
    assert "failed: signal 9 1" in said
    assert re.search(r"t001-f1 +7 +0.1429 +\d\d s +job 18, on n2", said)


def test_of_many_trials_a_status_shows_the_best(ledger, study, capsys):
    for number in range(2, 40):
        ledger.record_trial(Proposal({"training.optimizer.lr": 0.1}, number=number), num_folds=1)
        task = task_of(number, 0)
        result = dataclasses.asdict(make_result(task, fom=100.0 - number))
        ledger.record_done(task, result, cached=False, folder=task.id)
    look.print_status(Ledger(ledger.folder), study, terminal())
    said = capsys.readouterr().out
    assert "... and 28 more; `export` has all trials" in said
    assert [line[:4] for line in said.splitlines() if line.startswith("t0")][:3] == [
        "t000", "t039", "t038",
    ]  # fmt: skip


def test_a_watch_ends_with_the_driver(ledger, study, driver, capsys, monkeypatch):
    monkeypatch.setattr(look, "REFRESH_S", 0.02)
    threading.Timer(0.3, driver.set).start()
    look.watch(ledger, study, terminal())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("small: running; 2 trials; tasks: 2 done, 1 failed, 1 running")
    assert lines[-1].startswith("small: not running;")
    assert len(lines) == 2  # a line for each change


def test_a_trial_is_shown_with_its_folds_and_why_they_failed(ledger, capsys):
    look.print_trial(ledger, 1, terminal())
    said = capsys.readouterr().out
    assert "training.optimizer.lr = 0.1" in said
    assert re.search(r"0 +failed .* 17 +n1 +signal 9 +ended by SIGKILL", said)
    assert str(ledger.folder / "t001-f0") in said


def test_a_trial_as_json_has_numbers_to_the_last_bit(ledger):
    facts = look.trial_facts(ledger, 0)
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert facts["score"] == pytest.approx(1.0, rel=1e-14)
    assert [fold["fom"] for fold in facts["folds"]] == [0.5, 1.5]
    assert facts["folds"][0]["reason"] == ""


def test_a_log_is_printed_from_its_end(ledger, capsys):
    look.print_log(ledger, "t001-f1", 3, follow=False, out=terminal())
    assert capsys.readouterr().out == "line 97\nline 98\nline 99\n"


def test_a_log_is_followed_as_long_as_a_driver_is_at_work(ledger, driver, capsys, monkeypatch):
    monkeypatch.setattr(look, "REFRESH_S", 0.05)

    def go_on() -> None:
        with open(TaskPaths(ledger.folder / "t001-f1").stderr, "a") as file:
            file.write("epoch 8\n")
        time.sleep(0.3)
        driver.set()

    threading.Timer(0.2, go_on).start()
    look.print_log(ledger, "1-1", 1, follow=True, out=terminal())
    assert capsys.readouterr().out.split("\n")[:2] == ["line 99", "epoch 8"]


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("x", "'x': write the task as t003-f1, which is fold 1 of trial 3"),
        ("t009-f0", "t009-f0: there is no such task in"),
        ("t000-f0", "t000-f0: its log is gone, or was not copied"),
        ("t002-f0", "t002-f0: it has no log yet"),
    ],
)
def test_a_log_that_is_not_there_is_told(ledger, task, reason):
    ledger.record_trial(Proposal({"training.optimizer.lr": 0.1}, number=2), num_folds=2)
    with pytest.raises(N3LOError) as caught:
        look.log_of(ledger, task)
    assert str(caught.value).startswith(reason)


def test_a_trial_that_is_not_there_is_told(ledger):
    with pytest.raises(N3LOError, match=r"^t007: there is no such trial in .*: t000 to t001$"):
        look.trial_facts(ledger, 7)


@pytest.mark.parametrize("content", ["", "torn", "[1]\n", '{"epoch": 1}\n'])
def test_the_last_row_of_a_history_is_whole_or_there_is_none(tmp_path, content):
    path = tmp_path / "history.jsonl"
    assert look.last_row(path) == {}
    path.write_text(content)
    assert look.last_row(path) == ({"epoch": 1} if "epoch" in content else {})
