"""Tasks, data and launches for the tests of the training program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np

from apps import room
from apps.contract import TrainTask, from_dict

ROOT = Path(__file__).resolve().parent.parent
JETS = ROOT / "studies/data/lhc_jets_pythia8_2000x100x16.h5"

# Trains several tasks one after the other: starting ranks costs more than these trainings.
TRAIN_ALL = """
import sys
from mpi4py import MPI
from pathlib import Path
from apps.contract import TaskPaths, TrainTask
from apps.train import train
for path in map(Path, sys.argv[1:]):
    train(TrainTask.read(path), TaskPaths(path.parent))
"""


def write_h5(path: Path, chunk: int | None = None, **datasets: np.ndarray) -> Path:
    """An HDF5 file; "__" in a name stands for "/"."""
    with h5py.File(path, "w") as file:
        for name, values in datasets.items():
            chunks = (min(chunk, len(values)), *values.shape[1:]) if chunk else None
            file.create_dataset(name.replace("__", "/"), data=values, chunks=chunks)
    return path


def classes_h5(path: Path, events: int = 121, chunk: int | None = 10) -> Path:
    """x (events, 3) and the class y (events,) of 3; number (events,) tells events apart."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(events, 3)).astype(np.float32)
    y = x.argmax(axis=1).astype(np.int32)
    return write_h5(path, chunk, x=x, y=y, number=np.arange(events, dtype=np.float32))


def make_task(files: list[Path], **sections: Any) -> TrainTask:
    """A task on `classes_h5` data; a section given as a dict replaces single values."""
    content: dict[str, Any] = {
        "study": "test",
        "trial": 0,
        "fold": 0,
        "seed": 11,
        "split_seed": 5,
        "model": {"source": "torch.nn:Linear", "args": {"in_features": 3, "out_features": 3}},
        "data": {"files": [str(each) for each in files], "inputs": "x", "targets": "y", "folds": 3},
        "training": {"epochs": 3, "batch_size": 7, "optimizer": {"name": "sgd", "lr": 0.1}},
        "layout": {},
        "objective": {"metric": "val_loss", "goal": "min"},
        "fingerprint": {"data": "d", "model": "m", "code": "c"},
    }
    for name, value in sections.items():
        content[name] = {**content[name], **value} if isinstance(value, dict) else value
    return from_dict(TrainTask, content)


def write_task(folder: Path, task: TrainTask) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    task.write(folder / "task.json")
    return folder / "task.json"


def launch(num_ranks: int, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run python with these words on some ranks; one rank needs no mpirun."""
    return subprocess.run(
        launch_line(num_ranks, *words),
        env=launch_environment(**environment),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def launch_line(num_ranks: int, *words: object) -> list[str]:
    mpirun = [str(Path(sys.executable).with_name("mpirun")), "--host", f"localhost:{num_ranks}"]
    mpirun += ["-n", str(num_ranks), "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    return [*(mpirun if num_ranks > 1 else []), sys.executable, "-P", *map(str, words)]


@contextmanager
def pilot(folder: Path, **node: Any) -> Iterator[None]:
    """The environment of a worker, with room for everything."""
    (folder / "pool").mkdir(parents=True, exist_ok=True)
    plenty = {"cores": [str(core) for core in range(64)], "gpus": [], **node}
    facts = {room.POOL: str(folder / "pool"), room.NODES: "n1", room.NODE: json.dumps(plenty)}
    with mock.patch.dict(os.environ, facts):
        yield


def launch_of(command: list[str], environment: dict[str, str] | None = None) -> dict[str, Any]:
    """How to start a task, as its app is told."""
    need = {"nodes": 1, "ranks": 1, "cores_per_rank": 1, "gpus": 0}
    how = {"command": command, "environment": environment or {}}
    return {**how, "need": need, "avoid": []}


def launch_environment(**environment: str) -> dict[str, str]:
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # One host, as sites.launchers.mpirun has it: MPI looks for no network.
    mca = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm", "OMPI_MCA_osc": "^ucx"}
    return {**os.environ, **root, **mca, "OMP_NUM_THREADS": "1", **environment}


def without_clock(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a history that two equal trainings have in common."""
    return [
        {name: value for name, value in row.items() if name != "seconds" and name[-2:] != "_s"}
        for row in rows
    ]


def train_all(num_ranks: int, *tasks: Path) -> None:
    done = launch(num_ranks, "-c", TRAIN_ALL, *tasks)
    assert done.returncode == 0, done.stderr
