"""Each strategy has a real study: studies/parallel."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from typing import get_args, get_type_hints

import pytest
from conftest import ROOT

from apps.check import check
from apps.contract import Fingerprint, Training
from workflow.ledger import Ledger
from workflow.plan import Planner
from workflow.study import load

pytestmark = pytest.mark.campaign

STUDIES = {path.stem: path for path in sorted((ROOT / "studies" / "parallel").glob("*.toml"))}


# These go from strategy to strategy; whole trainings under each are tested in
# test_parallel_training.py and test_central_training.py.
RUN = ("algorithms", "spectrum")


FEWER = {"algorithms": 4, "spectrum": 4}  # trials, which have three strategies


def test_every_strategy_has_an_example():
    used = {tomllib.loads(path.read_text())["training"]["strategy"] for path in STUDIES.values()}
    assert used == set(get_args(get_type_hints(Training)["strategy"])) - {"local"}


@pytest.mark.parametrize("name", STUDIES)
def test_an_example_fits_its_model_and_data(name):
    file = load(STUDIES[name])
    planner = Planner(file, file.data_files(), Fingerprint(data="d", model="m", code="c"))
    report = check(planner.base_task())
    assert report["warnings"] == []


@pytest.mark.long
@pytest.mark.parametrize("name", RUN)
def test_an_example_runs_to_its_end_and_learns(name, tmp_path):
    wanted = tomllib.loads(STUDIES[name].read_text())["search"]["num_trials"]
    num_trials = FEWER.get(name, wanted)
    done = subprocess.run(
        [sys.executable, str(ROOT / "run_workflow.py"), str(STUDIES[name]),
         "--runs", str(tmp_path), "--set", "cores=5", "--trials", str(num_trials)],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ledger = Ledger(tmp_path / f"parallel-{name}")
    trials, tasks = ledger.trials(), ledger.tasks()
    assert len(trials) == num_trials
    assert set(trials["status"]) == {"done"}
    assert trials["score"].min() < 1.3  # ln 5 = 1.61 is chance
    central = tasks[tasks["updates"].notna()]
    assert (central["staleness"] >= 0).all()
    assert trials["training.strategy"].nunique() >= 3
