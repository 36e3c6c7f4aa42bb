"""Studies on a real Slurm."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import ROOT
from slurm_helpers import (
    SETTINGS,
    assert_each_done_once,
    own_cluster,  # noqa: F401
    start_of_driver,  # noqa: F401
    wait_until,
)

from workflow.ledger import Ledger

pytestmark = pytest.mark.slurm


def test_what_it_needs_is_installed():
    for program in ("slurmctld", "slurmd", "munged", "srun", "unshare", "nsenter"):
        assert shutil.which(program), f"{program} is missing: 'make slurm' installs it"


def test_a_study_that_began_on_this_host_goes_on_there(n3lo, drive, study_path, tmp_path):
    assert n3lo(study_path, "--trials", "1", "--set", "cores=2").returncode == 0
    assert drive("walltime_min=10").wait(timeout=180) == 0
    assert_each_done_once(tmp_path, num_tasks=6, epochs=2)


def test_pilots_of_several_nodes_run_at_once(cluster, drive, edit, tmp_path):
    edit("num_parallel = 2", "num_parallel = 3")
    driver = drive("walltime_min=10", "pilots=2", "cores_per_node=1")
    wait_until(lambda: len(cluster.jobs()) == 2)
    assert driver.wait(timeout=180) == 0, (cluster.folder / "out.txt").read_text()
    assert set(Ledger(tmp_path / "runs" / "small").tasks()["status"]) == {"done"}


@pytest.fixture
def check(cluster, tmp_path):
    def start(*settings: str) -> subprocess.Popen:
        words = [word for each in (*SETTINGS, *settings) for word in ("--set", each)]
        driver = [sys.executable, str(ROOT / "run_workflow.py"), "sites", "check", "slurm"]
        return cluster.start(*driver, *words, "--runs", str(tmp_path / "runs"))

    return start


def test_a_check_says_that_all_is_well(cluster, check):
    assert check("walltime_min=10").wait(timeout=180) == 0
    said = (cluster.folder / "out.txt").read_text().rpartition("site slurm:")[2]
    assert "2 ranks on 2 nodes, 2 cores each" in said
    assert said.count(", 2 ranks, ready in") == 2
    assert said.endswith("all is well\n"), said
    assert cluster.jobs() == []


def test_a_check_says_if_launcher_and_mpi_do_not_fit_together(cluster, check):
    assert check("walltime_min=10", "mpi=none").wait(timeout=180) == 1
    said = (cluster.folder / "out.txt").read_text().rpartition("to mend:")[2]
    assert "do not fit together; try --set mpi=pmix" in said, said


def test_a_check_that_is_stopped_leaves_no_job(cluster, check):
    checking = check("walltime_min=10")
    wait_until(cluster.jobs)
    os.kill(checking.pid, signal.SIGINT)
    assert checking.wait(timeout=60) == 130
    assert cluster.jobs() == []
