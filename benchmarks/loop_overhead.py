"""The training loop on one rank against a bare loop of PyTorch on the same model and data.

    python benchmarks/loop_overhead.py

Epochs of both in turn, on the same weights, so that a noisy machine is noisy for both. Two figures:
the median of the ratios of neighbours, and the ratio of the fastest epochs, which others on the
machine disturbed least. The bare loop has its events in memory as tensors and
does nothing but shuffle, gather, forward, backward and step.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from mpi4py import MPI
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from apps.contract import TrainTask, from_dict, write_json
from apps.data import FoldBatches, Share, prepare
from apps.experiment import Supervised, build_model
from apps.strategies import create
from apps.topology import Topology

ROOT = Path(__file__).resolve().parent.parent
JETS = ROOT / "studies/data/lhc_jets_pythia8_2000x100x16.h5"
RESULTS = Path(__file__).parent / "results" / "loop_overhead.json"
PAIRS = 31
GPU = torch.cuda.is_available()

Loop = Callable[[], float]  # seconds of an epoch


class Images(nn.Sequential):
    """A small convolutional network, as of calorimeter images."""

    def __init__(self) -> None:
        layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
        pool = [nn.ReLU(), nn.AvgPool2d(4), nn.Flatten()]
        super().__init__(nn.Unflatten(1, (1, 32)), *layers, *pool, nn.Linear(1024, 5))


def images(folder: Path) -> Path:
    rng = np.random.default_rng(1)
    path = folder / "images.h5"
    with h5py.File(path, "w") as file:
        file["x"] = rng.random((2048, 32, 32), np.float32)
        file["y"] = rng.integers(5, size=2048)
    return path


def showers(folder: Path) -> Path:
    rng = np.random.default_rng(1)
    path = folder / "showers.h5"
    with h5py.File(path, "w") as file:
        file["x"] = rng.random((2048, 25, 25, 25), np.float32)
        file["y"] = rng.random((2048, 1), np.float32)
    return path


def cases(folder: Path) -> dict[str, dict[str, Any]]:
    jets = {"files": [str(JETS)], "inputs": "jetConstituentList", "targets": "jets[:, -6:-1]"}
    pictures = {"files": [str(images(folder))], "inputs": "x", "targets": "y"}
    here = Path(__file__).resolve()
    scaling = here.with_name("scaling.py")
    large = {
        "3D convolutions, showers, batch 128": {
            "model": {"source": f"{scaling}:Showers"},
            "data": {**pictures, "files": [str(showers(folder))]},
            "training": {"batch_size": 128, "loss": "mse"},
        },
    }  # fmt: skip
    return (large if GPU else {}) | {
        "DeepSets, jets, batch 128": {
            "model": {"source": "apps.models.jets:DeepSets"}, "data": jets,
            "training": {"batch_size": 128},
        },
        "convolutions, images, batch 128": {
            "model": {"source": f"{here}:Images"}, "data": pictures,
            "training": {"batch_size": 128},
        },
    }  # fmt: skip


def loops(case: dict[str, Any]) -> tuple[Loop, Loop]:
    """An epoch of ours, and of the bare loop."""
    content = {
        "study": "overhead", "trial": 0, "fold": 0, "seed": 1, "split_seed": 1,
        "layout": {"gpus_per_rank": int(GPU)},
        "objective": {"metric": "val_loss", "goal": "min"},
        "fingerprint": {"data": "d", "model": "m", "code": "c"},
        **case,
    }  # fmt: skip
    content["training"] |= {"optimizer": {"name": "sgd", "lr": 1e-3}}
    content["data"] |= {"memory_gb": 4.0}
    task = from_dict(TrainTask, content)
    topology = Topology.start(task.training, task.layout, MPI.COMM_SELF)
    index, fold_of_event = prepare(task.data, task.split_seed)
    share = Share(rank=0, num_ranks=1, group_size=1)
    data = FoldBatches(task, index, fold_of_event, share, topology.device)
    experiment = Supervised(build_model(task.model), task.training)
    strategy = create(task.training, experiment, topology, data.preview())
    network = experiment.networks["model"].train()

    def ours() -> float:
        start = time.perf_counter()
        strategy.train(data.training(1))
        strategy.clock.read()
        return wall_since(start)

    events = np.flatnonzero(data._is_training)
    x, y = (torch.from_numpy(each[events]).to(topology.device) for each in data.source._arrays)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    size = task.training.batch_size
    loss_of = {"mse": mse_loss, "cross_entropy": cross_entropy}[task.training.loss]

    def bare() -> float:
        start = time.perf_counter()
        order = torch.randperm(len(x))
        for rows in order.split(size):
            loss = loss_of(network(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return wall_since(start)

    return ours, bare


def wall_since(start: float) -> float:
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for title, case in cases(Path(name)).items():
            ours, bare = loops(case)
            ours(), bare()  # warm up
            pairs = [(ours(), bare()) for _ in range(PAIRS)]
            ratio = statistics.median(own / other for own, other in pairs)
            seconds = statistics.median(other for _, other in pairs)
            fastest = min(own for own, _ in pairs) / min(other for _, other in pairs)
            rows.append({
                "case": title, "bare_s": seconds, "ours_over_bare": ratio, "of_fastest": fastest,
            })  # fmt: skip
            print(
                f"{title}: bare {seconds:.3f} s an epoch, ours / bare = {ratio:.3f} in the median, "
                f"{fastest:.3f} of the fastest epochs",
                flush=True,
            )
    device = torch.cuda.get_device_name() if GPU else f"1 core, {platform.processor()}"
    write_json(RESULTS, {"device": device, "torch": torch.__version__, "rows": rows})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
