"""Each strategy with a central copy of the weights runs a real study: studies/parallel."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT

from apps.contract import CENTRAL
from workflow.ledger import Ledger

pytestmark = pytest.mark.campaign

STUDIES = {path.stem: path for path in sorted((ROOT / "studies" / "parallel").glob("*.toml"))}


def test_every_strategy_with_a_centre_has_an_example():
    used = {tomllib.loads(path.read_text())["training"]["strategy"] for path in STUDIES.values()}
    assert used == set(CENTRAL)


@pytest.mark.parametrize("name", STUDIES)
def test_an_example_runs_to_its_end_and_learns(name, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "run_workflow.py"), str(STUDIES[name]),
         "--runs", str(tmp_path), "--set", "cores=5"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ledger = Ledger(tmp_path / f"parallel-{name}")
    trials, tasks = ledger.trials(), ledger.tasks()
    assert len(trials) == tomllib.loads(STUDIES[name].read_text())["search"]["num_trials"]
    assert set(trials["status"]) == {"done"}
    assert trials["score"].min() < 1.3  # ln 5 = 1.61 is chance
    central = tasks[tasks["updates"].notna()]
    assert (central["staleness"] >= 0).all()
    if name == "algorithms":
        assert trials["training.strategy"].nunique() >= 3
    else:
        assert len(central) == len(tasks)
