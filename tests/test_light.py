"""Who only looks has a copy of a run folder, and neither Parsl nor torch nor MPI."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from made_runs import Made, make_run

from apps.contract import N3LOError
from workflow import session
from workflow.ledger import Ledger

HEAVY = (
    *("parsl", "torch", "mpi4py", "h5py", "horovod", "pytorch_optimizer"),
    *("skopt", "sklearn", "matplotlib", "optuna", "cmaes"),
)
# As where they are not installed: Python does not find them.
PROGRAM = f"""\
import json, sys
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *where: (
    None if name.partition(".")[0] in {HEAVY} else find(name, *where)
)
from workflow import cli

print([cli.main(words) for words in json.loads(sys.argv[1])])
"""


@pytest.fixture
def light(tmp_path):
    """Run commands without what trains; their exit statuses, and all that they print."""

    def run(*commands: list[str]) -> tuple[list[int], subprocess.CompletedProcess[str]]:
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROGRAM, json.dumps(commands)],
            cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        return json.loads(done.stdout.splitlines()[-1]), done

    return run


def copied(tmp_path: Path) -> Path:
    """A run folder, away from its model and data and with another name."""
    folder = make_run(tmp_path / "runs" / "made", Made(failed=(1,)))
    return folder.rename(tmp_path / "that of Monday")


def test_a_copied_folder_is_looked_at_without_what_trains(light, tmp_path):
    folder = str(copied(tmp_path))
    statuses, done = light(
        ["status", folder],
        ["status", folder, "--watch"],
        ["show", "t003", folder],
        ["logs", "t001-f0", folder],
        ["report", folder],
        ["export", folder, "--to", "tasks.csv"],
        ["export", folder, "--to", "trials.parquet", "--table", "trials"],
        ["sites", "list"],
    )
    assert statuses == [0] * 8, done.stderr
    assert done.stderr == ""
    for said in ("made: not running; 12 trials", "t003: done;", "not finite", "Best trials"):
        assert said in done.stdout
    assert len(pd.read_csv(tmp_path / "tasks.csv")) == 12 * 3
    assert len(pd.read_parquet(tmp_path / "trials.parquet")) == 12


@pytest.mark.parametrize("method", ["bayesian", "skopt", "optuna", "evolution"])
def test_a_report_does_without_the_library_of_the_search(light, tmp_path, method):
    folder = copied(tmp_path)
    study = folder / "study.toml"
    study.write_text(study.read_text().replace('"random"', f'"{method}"'))
    statuses, done = light(["report", str(folder)])
    assert statuses == [0], done.stderr
    assert done.stderr == ""


def test_what_trains_says_what_to_install(light, study_path, tmp_path):
    study, folder = str(study_path), str(copied(tmp_path))
    statuses, done = light(
        ["run", study],
        ["rerun", study, "--trial", "1"],
        ["plan", study],
        ["ensemble", folder],
        ["generate", folder, "--to", "made.h5"],
        ["export-model", folder, "--to", "best.onnx"],
        ["sites", "check", "local"],
    )
    assert statuses == [2] * 7
    missing = ["parsl", "parsl", *["torch"] * 4, "parsl"]
    assert done.stderr.splitlines() == [
        f"n3lo: {name} is not installed in {sys.prefix}: pip install 'n3lo[run]' (or 'make setup')"
        for name in missing
    ]
    assert not (tmp_path / "runs" / "small").exists()


def test_the_budget_of_a_folder_is_that_of_its_last_start(tmp_path):
    """Its study.toml is of the first, without what the command line said."""
    folder = copied(tmp_path)
    assert session.open_ledger(folder, tmp_path)[1].study.search.num_trials == 12
    ledger = Ledger(folder)
    fingerprint = ledger.sessions[-1]["fingerprint"]
    ledger.record_session(fingerprint=fingerprint, num_trials=40, num_parallel=3)
    search = session.open_ledger(folder, tmp_path)[1].study.search
    assert (search.num_trials, search.num_parallel) == (40, 3)


def test_a_folder_without_a_ledger_is_told(tmp_path):
    with pytest.raises(N3LOError, match=r"^there is no ledger in .*: name a run folder, or a stud"):
        session.open_ledger(tmp_path, tmp_path)
