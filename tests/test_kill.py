"""Nothing is lost: kill -9 of the driver, of a worker, of a rank; and what Ctrl-C leaves behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest
from conftest import ROOT
from test_cli import left_over
from test_launch import wait_for

from apps.contract import read_json_lines
from workflow.ledger import Ledger

pytestmark = pytest.mark.campaign

COLUMNS = ["trial", "fold", "status", "fom", "training.optimizer.lr", "model.args.width", "key"]


@pytest.fixture
def start(study_path, tmp_path):
    """Start a driver and do not wait for it.

    Its output goes to files: what outlives it would keep a pipe open.
    """

    def run(*words: str) -> subprocess.Popen:
        with open(tmp_path / "out.txt", "w") as out, open(tmp_path / "err.txt", "w") as err:
            return subprocess.Popen(
                [sys.executable, str(ROOT / "run_workflow.py"), str(study_path), *words],
                cwd=tmp_path,
                stdout=out,
                stderr=err,
                start_new_session=True,
                # What a shell starts in the background ignores Ctrl-C: CI may be such.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    return run


def rows(tmp_path, event: str) -> list[dict]:
    found = read_json_lines(tmp_path / "runs" / "small" / "ledger.jsonl")
    return [row for row in found if row["event"] == event]


def finished(tmp_path) -> set[tuple[int, int]]:
    return {(row["trial"], row["fold"]) for row in rows(tmp_path, "end") if row["status"] == "done"}


def ranks(tmp_path) -> list[psutil.Process]:
    """The live training processes of this test, without their mpirun."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[1:4] == ["-P", "-m", "apps.train"] and str(tmp_path) in words[-1]:
            found.append(process)
    return found


@pytest.mark.long  # test_slurm_proofs.py does it ten times, there
def test_a_driver_killed_at_random_moments_loses_nothing(start, n3lo, study_path, tmp_path):
    moments = random.Random(7)
    done: set[tuple[int, int]] = set()
    for _ in range(3):
        driver = start("--set", "cores=2")
        time.sleep(moments.uniform(2, 14))
        driver.kill()
        driver.wait()
        assert done <= finished(tmp_path)
        done = finished(tmp_path)
    last = n3lo(study_path, "--set", "cores=2")
    assert last.returncode == 0, last
    assert not left_over(tmp_path)

    # no task was started after its result was recorded
    ended: set[tuple[int, int]] = set()
    for row in read_json_lines(tmp_path / "runs" / "small" / "ledger.jsonl"):
        task = (row.get("trial"), row.get("fold"))
        if row["event"] == "start":
            assert task not in ended
        if row["event"] == "end" and row["status"] == "done":
            ended.add(task)

    # the table is that of a run which was left alone
    disturbed = Ledger(tmp_path / "runs" / "small").tasks()
    undisturbed = n3lo(study_path, "--runs", "alone")
    assert undisturbed.returncode == 0
    assert disturbed[COLUMNS].equals(Ledger(tmp_path / "alone" / "small").tasks()[COLUMNS])


def family(tmp_path, place: int) -> psutil.Process | None:
    """A live rank (place 0), or what started it (1, 2, ...)."""
    for rank in ranks(tmp_path):
        line = [rank, *rank.parents()]
        if "process_worker_pool" in " ".join(line[3].cmdline() if len(line) > 3 else []):
            return line[place]
    return None


def failures(tmp_path) -> list[str]:
    return [row["reason"] for row in rows(tmp_path, "end") if row["status"] == "failed"]


def test_a_killed_rank_or_worker_or_pool_of_workers_costs_an_attempt(start, tmp_path):
    driver = start("--set", "cores=1")
    for killed, place in enumerate([0, 2, 3]):  # of rank, mpirun, worker, pool
        wait_for(lambda place=place: family(tmp_path, place), 60).kill()
        wait_for(lambda killed=killed: len(failures(tmp_path)) > killed, 60)
    assert driver.wait(timeout=200) == 0, (tmp_path / "out.txt").read_text()
    assert failures(tmp_path) == ["signal 9", "signal", "node_lost"]
    tasks = Ledger(tmp_path / "runs" / "small").tasks()
    assert set(tasks["status"]) == {"done"}
    assert not left_over(tmp_path)


def test_a_killed_interchange_ends_the_session_and_the_same_command_goes_on(
    start, n3lo, study_path, tmp_path
):
    driver = start("--set", "cores=1")
    wait_for(lambda: ranks(tmp_path), 60)
    [interchange] = [
        child
        for child in psutil.Process(driver.pid).children()
        if "interchange" in " ".join(child.cmdline())
    ]
    interchange.kill()
    assert driver.wait(timeout=60) == 2
    assert (tmp_path / "err.txt").read_text() == (
        "n3lo: the task engine broke down: Parsl's interchange ended with status -9; the same "
        "command goes on\n"
    )
    assert not left_over(tmp_path)
    assert n3lo(study_path).returncode == 0


@pytest.mark.parametrize(("number", "status", "said"), [
    (signal.SIGINT, 130, "n3lo: interrupted; the same command goes on from here\n"),
    (signal.SIGTERM, 143, "n3lo: terminated; the same command goes on from here\n"),
])  # fmt: skip
def test_a_driver_that_is_told_to_end_takes_everything_along(start, tmp_path, number, status, said):
    driver = start()
    wait_for(lambda: ranks(tmp_path), 60)
    os.killpg(driver.pid, number)  # as a terminal does, `timeout`, or a batch system
    assert driver.wait(timeout=60) == status
    assert (tmp_path / "err.txt").read_text() == said
    assert not left_over(tmp_path)


def test_a_study_whose_trials_go_on_from_each_other_survives_kills(
    start, n3lo, study_path, edit, tmp_path
):
    halving = 'method = "halving"\noptions = { eta = 3, min_epochs = 1, proposer = "random" }'
    edit('method = "random"', halving)
    edit("epochs = 2", "epochs = 9")
    edit("num_trials = 3", "num_trials = 6")
    moments = random.Random(3)
    for _ in range(2):
        driver = start("--set", "cores=2")
        time.sleep(moments.uniform(4, 14))
        driver.kill()
        driver.wait()
    last = n3lo(study_path, "--set", "cores=2")
    assert last.returncode == 0, last
    assert not left_over(tmp_path)
    assert set(Ledger(tmp_path / "runs" / "small").trials()["status"]) == {"done"}

    # no finished task was trained again, and every child began where its parent ended
    ended: set[tuple[int, int]] = set()
    for row in read_json_lines(tmp_path / "runs" / "small" / "ledger.jsonl"):
        task = (row.get("trial"), row.get("fold"))
        if row["event"] == "start":
            assert task not in ended
        if row["event"] == "end" and row["status"] == "done":
            ended.add(task)
    ledger = Ledger(tmp_path / "runs" / "small")
    children = [t for t in ledger.trials_by_number.values() if t.proposal.parent is not None]
    assert len(ended) == 12
    assert children
    for child in children:
        for fold, state in child.tasks.items():
            parent = ledger.trials_by_number[child.proposal.parent].tasks[fold]
            assert state.result["start_epoch"] == parent.result["epochs"]
