"""Small studies to run, and the command to run them with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from apps.physics.observables import Observables, observe

ROOT = Path(__file__).resolve().parent.parent

MODEL = """\
import torch


class Tagger(torch.nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, width), torch.nn.ReLU(), torch.nn.Linear(width, 2)
        )

    def forward(self, x):
        return self.layers(x)
"""

STUDY = """\
name = "small"
seed = 5

[model]
source = "my_model.py:Tagger"
args = { width = 4 }

[data]
files = ["events.h5"]
inputs = "x"
targets = "y"
folds = 2

[training]
strategy = "local"
epochs = 2
batch_size = 16
metrics = ["accuracy"]
optimizer = { name = "sgd", lr = 0.1 }

[layout]
walltime_min = 2

[search]
method = "random"
objective = { metric = "val_loss", goal = "min" }
num_trials = 3
num_parallel = 2

[search.space]
"training.optimizer.lr" = { type = "real", low = 1e-3, high = 1.0, log = true }
"model.args.width" = { type = "int", low = 2, high = 8 }
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long first: one that came last would keep one process busy alone."""
    marks = ("slurm", "campaign", "mpi")
    items.sort(key=lambda item: [item.get_closest_marker(mark) is None for mark in marks])


def write_events(path: Path, events: int = 64) -> None:
    """Two classes of events that a line separates: x (events, 3), y (events,)."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(events, 3)).astype("float32")
    with h5py.File(path, "w") as file:
        file["x"] = x
        file["y"] = (x.sum(axis=1) > 0).astype("int64")


@pytest.fixture
def study_path(tmp_path: Path) -> Path:
    """A study of 3 trials x 2 folds that trains in a second, with model and data beside it."""
    write_events(tmp_path / "events.h5")
    (tmp_path / "my_model.py").write_text(MODEL)
    path = tmp_path / "small.toml"
    path.write_text(STUDY)
    return path


@pytest.fixture
def edit(study_path: Path) -> Callable[[str, str], Path]:
    """Replace a piece of the study's text; it must be there."""

    def replace(old: str, new: str) -> Path:
        text = study_path.read_text()
        assert old in text
        study_path.write_text(text.replace(old, new))
        return study_path

    return replace


@pytest.fixture
def n3lo(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the program in the test's folder, as a user does."""

    def run(*words: object, env: dict[str, str] | None = None, timeout: float = 300):
        return subprocess.run(
            [sys.executable, str(ROOT / "run_workflow.py"), *map(str, words)],
            cwd=tmp_path,
            # A sites.toml of whoever runs the tests has no say in them.
            env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path / "config"), **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def geant4_parts() -> tuple[Observables, Observables]:
    """What is seen in the two files of 1000 showers."""
    observed = []
    for number in (1, 2):
        file = ROOT / f"studies/data/clic_ecal_electrons_geant4_part{number}.h5"
        with h5py.File(file) as showers:
            observed.append(observe(showers["ECAL"][:], showers["energy"][:]))
    return observed[0], observed[1]
