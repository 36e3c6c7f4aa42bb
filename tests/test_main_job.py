"""The main job, as the README has it: the default study on real jets, its first trials.

Whole, it takes seven minutes beside other tests; `make run` runs it.
"""

from __future__ import annotations

import subprocess
import sys
import time

import h5py
import numpy as np
import pytest
from conftest import ROOT

from apps.contract import TaskPaths
from benchmarks.jets_baseline import logistic_regression
from workflow.ledger import Ledger

pytestmark = pytest.mark.campaign

NUM_TRIALS = 2


def run(folder) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "run_workflow.py"), "--trials", str(NUM_TRIALS)],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where `python run_workflow.py` was run once, without a study."""
    folder = tmp_path_factory.mktemp("main")
    start = time.monotonic()
    result = run(folder)
    assert result.returncode == 0, result
    assert "best trial t" in result.stdout
    print(f"the main job took {time.monotonic() - start:.0f} s")
    return folder


def test_there_is_a_row_for_each_trial_and_fold_with_all_its_facts(folder):
    tasks = Ledger(folder / "runs" / "jets").tasks()
    assert len(tasks) == NUM_TRIALS * 3
    assert set(tasks["status"]) == {"done"}
    assert (tasks["num_ranks"] == 2).all()
    filled = ["fom", "loss", "val_loss", "val_accuracy", "seconds", "samples_per_second", "host",
              "attempt", "training.optimizer.lr", "training.batch_size", "model.args.width",
              "model.args.depth", "model.args.activation"]  # fmt: skip
    assert tasks[filled].notna().all().all()
    assert (tasks["fom"] == tasks["val_accuracy"]).all()


def test_the_best_trial_beats_chance_and_a_logistic_regression_on_the_same_folds(folder):
    ledger = Ledger(folder / "runs" / "jets")
    best = ledger.trials()["score"].max()
    baseline = np.mean(logistic_regression(TaskPaths(ledger.folder / "t000-f0").task))
    print(f"best trial {best:.3f}, logistic regression {baseline:.3f}, chance 0.200")
    assert best > 0.55
    assert best > baseline + 0.1


def test_every_fold_validates_on_other_jets_and_all_are_used(folder):
    tasks = Ledger(folder / "runs" / "jets").tasks()
    with h5py.File(ROOT / "studies" / "data" / "lhc_jets_pythia8_2000x100x16.h5") as file:
        events = len(file["jets"])
    from apps.contract import TrainResult

    for _, trial in tasks.groupby("trial"):
        results = [
            TrainResult.read(TaskPaths(folder / "runs" / "jets" / name).result)
            for name in trial["folder"]
        ]
        assert sum(result.num_val for result in results) == events
        assert {result.num_train + result.num_val for result in results} == {events}


def test_a_second_start_trains_nothing(folder):
    before = Ledger(folder / "runs" / "jets").path.read_text().count('"start"')
    assert run(folder).returncode == 0
    assert Ledger(folder / "runs" / "jets").path.read_text().count('"start"') == before
