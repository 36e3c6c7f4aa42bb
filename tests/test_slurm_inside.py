"""The driver in a job of a real Slurm: `--site inside` and `--driver-in-job`."""

from __future__ import annotations

import shlex
import sys

import pytest
from conftest import ROOT
from slurm_helpers import own_cluster, rows, wait_until  # noqa: F401

from workflow.ledger import Ledger

pytestmark = pytest.mark.slurm

OF_JOB = ("nodes=2", "cores_per_node=2", "partition=debug")


@pytest.fixture
def command(study_path, tmp_path):
    """The command line of a driver."""

    def words(site: str, *more: str) -> list[str]:
        runs = ["--runs", str(tmp_path / "runs")]
        program = [sys.executable, str(ROOT / "run_workflow.py"), str(study_path)]
        return [*program, *runs, "--site", site, *more]

    return words


@pytest.fixture
def submit(cluster, command):
    """Have a job of two nodes run the driver; its output."""

    def run(walltime_min: int) -> str:
        settings = [*OF_JOB, f"walltime_min={walltime_min}"]
        words = [word for each in settings for word in ("--set", each)]
        driver = cluster.start(*command("slurm", *words, "--driver-in-job"))
        said = (cluster.folder / "out.txt").read_text
        assert driver.wait(timeout=60) == 0, said()
        wait_until(lambda: not cluster.jobs(), patience_s=600)
        return said()

    return run


def output_of_jobs(tmp_path) -> list[str]:
    folder = tmp_path / "runs" / "small" / "jobs"
    return [path.read_text() for path in sorted(folder.glob("*.stdout"))]


def test_a_study_runs_in_the_job_around_its_driver(cluster, command, tmp_path):
    out = tmp_path / "out.txt"
    options = ("--nodes=2", "--exclusive", "--time=10", f"--output={out}")
    job = cluster.start("sbatch", "--wait", *options, "--wrap", shlex.join(command("inside")))
    assert job.wait(timeout=120) == 0, out.read_text()
    assert "tasks at once: 4, each of 1 ranks" in out.read_text()
    tasks = Ledger(tmp_path / "runs" / "small").tasks()
    assert set(tasks["status"]) == {"done"}
    assert {node for row in rows(tmp_path, "end") for node in row["nodes"]} <= {"n1", "n2"}
    assert tasks["job"].nunique() == 1


@pytest.mark.long
def test_a_driver_whose_job_ends_too_soon_goes_on_in_another(submit, edit, tmp_path):
    """An epoch is 2 batches; 280 take more than the 30 s that a job of 2 minutes has for them."""
    model = tmp_path / "my_model.py"
    slow = model.read_text().replace("return self", "time.sleep(0.05)\n        return self")
    model.write_text(f"import time\n\n{slow}")
    edit("epochs = 2", "epochs = 280")
    edit("num_trials = 3", "num_trials = 1")
    edit("folds = 2", "folds = 1")
    said = submit(walltime_min=2)
    *others, last = output_of_jobs(tmp_path)
    assert others
    for output in others:
        assert "the job ends; 1 task cut off; the same command goes on in another" in output
        assert output.splitlines()[-1].endswith("goes on with the study")
    assert "best trial t" in last
    first = min(rows(tmp_path, "end"), key=lambda row: row["time"])["job"]
    assert f"job {first} was submitted to Slurm" in said
    ledger = Ledger(tmp_path / "runs" / "small")
    assert set(ledger.tasks()["status"]) == {"done"}
    failed = [row["reason"] for row in rows(tmp_path, "end") if row["status"] == "failed"]
    assert failed == ["walltime"] * len(others)
    history = ledger.history(trial=0, fold=0)
    assert list(history["epoch"]) == list(range(1, len(history) + 1))  # none was trained twice
