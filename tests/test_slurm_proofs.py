"""On a real Slurm: nothing is lost and nothing is done twice, whatever ends in between."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest
from slurm_helpers import (
    assert_each_done_once,
    done,
    own_cluster,  # noqa: F401
    rows,
    start_of_driver,  # noqa: F401
    wait_until,
)
from test_cli import left_over
from test_kill import ranks

from apps.contract import TaskPaths, read_json
from apps.room import ORPHAN_GRACE_S
from workflow.ledger import Ledger

pytestmark = pytest.mark.slurm

COLUMNS = ["trial", "fold", "status", "fom", "training.optimizer.lr", "model.args.width", "key"]


@pytest.fixture
def over_two_nodes(edit) -> None:
    """Tasks of 4 ranks, and nodes of 2 cores."""
    edit('strategy = "local"', 'strategy = "allreduce"\nbackend = "ddp"')
    edit("batch_size = 16", "batch_size = 4")
    edit("[layout]", "[layout]\nnum_workers = 4")
    edit("num_trials = 3", "num_trials = 1")
    edit("epochs = 2", "epochs = 40")


def reasons(tmp_path: Path) -> list[str]:
    return [row["reason"] for row in rows(tmp_path, "end") if row["status"] == "failed"]


def places(tmp_path: Path) -> list[dict]:
    """Where tasks that train now, or did last, have their places."""
    found = []
    for begun in (tmp_path / "runs" / "small").glob("t*/begun"):
        with contextlib.suppress(FileNotFoundError):  # it is about to begin again
            found.append(read_json(TaskPaths(begun.parent).place))
    return found


def test_tasks_of_one_and_of_two_nodes_go_from_pilot_to_pilot(cluster, drive, edit, tmp_path):
    model = tmp_path / "my_model.py"  # it waits, where it would else need the cores of others
    slow = model.read_text().replace("return self", "time.sleep(0.05)\n        return self")
    model.write_text(f"import time\n\n{slow}")
    edit('strategy = "local"', 'strategy = "allreduce"\nbackend = "ddp"')
    edit("batch_size = 16", "batch_size = 4")
    edit("epochs = 2", "epochs = 60")
    edit('method = "random"', 'method = "grid"')
    edit("num_trials = 3", "num_trials = 4")
    edit(
        '"training.optimizer.lr" = { type = "real", low = 1e-3, high = 1.0, log = true }',
        '"training.optimizer.lr" = { type = "ordinal", values = [0.01, 0.1] }',
    )
    edit(
        '"model.args.width" = { type = "int", low = 2, high = 8 }',
        '"layout.num_workers" = { type = "ordinal", values = [1, 3] }',
    )
    driver = drive("walltime_min=2", "nodes=3")
    wait_until(lambda: places(tmp_path))
    [first] = cluster.jobs()
    cluster.drain("n2")
    try:
        wait_until(lambda: {place["job"] for place in places(tmp_path)} - {first}, 240)
        [second] = {place["job"] for place in places(tmp_path)} - {first}
        cluster.ask("scancel", second)
        assert driver.wait(timeout=300) == 0, (cluster.folder / "out.txt").read_text()
    finally:
        cluster.resume("n2")
    assert_each_done_once(tmp_path, num_tasks=8, epochs=60)
    assert "node_lost" in reasons(tmp_path)  # of the pilot that was cancelled
    assert set(reasons(tmp_path)) <= {"walltime", "node_lost"}
    ends = [row for row in rows(tmp_path, "end") if row["status"] == "done"]
    assert sorted(len(row["nodes"]) for row in ends) == 4 * [1] + 4 * [2]
    placed = [row for row in rows(tmp_path, "end") if "job" in row]
    assert len(rows(tmp_path, "start")) < 50  # none was offered to a pilot in vain, again and again
    assert len({row["job"] for row in placed}) >= 3
    assert not any("n2" in row["nodes"] for row in placed if row["job"] != first)
    assert cluster.jobs() == []
    assert not left_over(tmp_path)


def test_a_driver_that_is_ended_ten_times_loses_nothing(cluster, drive, edit, tmp_path):
    edit("epochs = 2", "epochs = 200")
    edit("num_trials = 3", "num_trials = 8")
    moments = random.Random(11)
    known: set[tuple[int, int]] = set()
    left: set[str] = set()  # jobs of drivers before
    for number in range(10):
        sent = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)[number % 3]
        driver = drive("walltime_min=10")
        time.sleep(moments.uniform(0, 16))
        os.kill(driver.pid, sent)
        status = driver.wait(timeout=90)
        jobs = set(cluster.jobs())
        if jobs - left:  # its own pilot, for which all of those before had to be gone
            assert status == -signal.SIGKILL
            assert not jobs & left
        if not jobs:
            assert not left_over(tmp_path)
        left = jobs
        assert known <= set(done(tmp_path))
        known = set(done(tmp_path))
    driver = drive("walltime_min=10")
    assert driver.wait(timeout=180) == 0, (cluster.folder / "out.txt").read_text()
    assert_each_done_once(tmp_path, num_tasks=16, epochs=200)
    assert cluster.jobs() == []
    assert not left_over(tmp_path)


@pytest.mark.usefixtures("over_two_nodes")
def test_a_killed_worker_takes_its_ranks_along_and_its_task_goes_on(cluster, drive, tmp_path):
    driver = drive("walltime_min=10")
    wait_until(lambda: places(tmp_path))
    [place] = places(tmp_path)
    assert len(place["hosts"]) == 2
    trained = ranks(tmp_path)
    assert len(trained) == 4
    launcher = psutil.Process(place["launched_by"][1])
    assert launcher.name() == "srun"
    launcher.parent().kill()
    _, alive = psutil.wait_procs(trained, timeout=ORPHAN_GRACE_S)
    assert not alive
    assert driver.wait(timeout=180) == 0, (cluster.folder / "out.txt").read_text()
    assert reasons(tmp_path) == ["signal"]
    assert_each_done_once(tmp_path, num_tasks=2, epochs=40)


@pytest.mark.usefixtures("over_two_nodes")
def test_when_a_node_is_lost_the_study_goes_on_in_the_next_pilot(cluster, drive, tmp_path):
    driver = drive("walltime_min=10")
    jobs: list[str] = []
    nodes: list[str] = []
    try:
        for number in (1, 0):  # of ranks alone, and that of the workers
            wait_until(lambda: any(place["job"] not in jobs for place in places(tmp_path)), 120)
            [place] = [place for place in places(tmp_path) if place["job"] not in jobs]
            jobs.append(place["job"])
            nodes.append(place["hosts"][number])
            cluster.lose(nodes[-1])
        assert driver.wait(timeout=240) == 0, (cluster.folder / "out.txt").read_text()
    finally:
        for node in nodes:
            cluster.mend(node)
    assert set(reasons(tmp_path)) == {"node_lost"}
    assert_each_done_once(tmp_path, num_tasks=2, epochs=40)
    ends = [row for row in rows(tmp_path, "end") if row["status"] == "done"]
    assert not {row["job"] for row in ends} & set(jobs)
    assert cluster.jobs() == []
    assert not left_over(tmp_path)


def test_a_study_gives_the_same_ledger_on_this_host_and_on_slurm(
    cluster, drive, n3lo, study_path, edit, tmp_path
):
    edit('strategy = "local"', 'strategy = "allreduce"\nbackend = "ddp"')
    edit("num_trials = 3", "num_trials = 2")
    edit("[layout]", "[layout]\nnum_workers = 2")  # a sum of two has no order that could differ
    there = drive("walltime_min=10")
    assert there.wait(timeout=180) == 0, (cluster.folder / "out.txt").read_text()
    here = n3lo(study_path, "--set", "cores=2", "--runs", "here")
    assert here.returncode == 0, here
    tables = [Ledger(tmp_path / runs / "small").tasks() for runs in ("here", "runs")]
    for table in tables:
        assert set(table["status"]) == {"done"}
        assert set(table["num_ranks"]) == {2}
        assert not table["cached"].any()
    pd.testing.assert_frame_equal(*(table[COLUMNS] for table in tables), check_exact=True)
