"""A master and a worker on a GPU against one process on it, and how many workers a master serves.

    python benchmarks/parameter_gpu.py run            # on a machine with a GPU
    python benchmarks/parameter_gpu.py run --gpus 2   # a worker on each of two
    python benchmarks/parameter_gpu.py table

Whole trainings of `apps.train`, on random showers of 25 x 25 x 25 cells: a 3D convolution with few
parameters, and a wide network with many. One master saturates where its updates per second (many
workers that compute nothing, on the same machine) are as many as those of its workers together.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import nn

from apps.contract import TaskPaths, TrainResult, TrainTask, from_dict, write_json
from sites.launchers import Shape, mpirun

RESULTS = Path(__file__).parent / "results"
EVENTS, EPOCHS, BATCH = 4096, 3, 128
ROUNDS = 2
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "one process": ("local", {}),
    "downpour, messages": ("downpour", {}),
    "downpour, messages, overlap": ("downpour", {"overlap": True}),
    "downpour, messages, every 4 batches": ("downpour", {"sync_every": 4}),
    "downpour, window": ("downpour", {"transport": "window"}),
    "easgd, every 4 batches": ("easgd", {"sync_every": 4}),
}


class Convolutions(nn.Sequential):
    """Like the 3DGAN's discriminator: much arithmetic, about 0.1 million parameters."""

    def __init__(self) -> None:
        widths = [1, 32, 16, 16, 16]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv3d(before, after, 5, padding=2), nn.LeakyReLU()]
        super().__init__(
            nn.Unflatten(1, (1, 25)), *layers, nn.AvgPool3d(5), nn.Flatten(), nn.Linear(2000, 1)
        )


class Wide(nn.Sequential):
    """Little arithmetic for its 50 million parameters: the hardest case for a master."""

    def __init__(self) -> None:
        hidden = [nn.Linear(3000, 1000), nn.ReLU(), nn.Linear(1000, 1)]
        super().__init__(nn.Flatten(), nn.Linear(25**3, 3000), nn.ReLU(), *hidden)


MODELS = {"convolutions": Convolutions, "wide": Wide}


def train(folder: Path, data: Path, model: str, setting: str, workers: int) -> TrainResult:
    """One training, launched as a site would."""
    strategy, exchange = SETTINGS[setting]
    task = from_dict(
        TrainTask,
        {
            "study": "gpu", "trial": 0, "fold": 0, "seed": 1, "split_seed": 1,
            "model": {"source": f"{Path(__file__).resolve()}:{MODELS[model].__name__}"},
            "data": {"files": [str(data)], "inputs": "x", "targets": "y", "memory_gb": 8.0},
            "training": {
                "strategy": strategy, "exchange": exchange, "epochs": EPOCHS,
                "batch_size": BATCH, "loss": "mse", "optimizer": {"name": "sgd", "lr": 1e-4},
            },
            "layout": {
                "num_workers": workers if strategy != "local" else 1,
                "gpus_per_rank": int(torch.cuda.is_available()),
            },
            "objective": {"metric": "val_loss", "goal": "min"},
            "fingerprint": {"data": "d", "model": model, "code": "c"},
        },
    )  # fmt: skip
    paths = TaskPaths(folder)
    task.write(paths.task)
    shape = Shape(num_ranks=task.ranks.total)
    line = [*mpirun(shape), sys.executable, "-m", "apps.train", str(paths.task)]
    subprocess.run(line, env=environment(), check=True)
    return TrainResult.read(paths.result)


def environment() -> dict[str, str]:
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**os.environ, **root, "OMP_NUM_THREADS": "1"}


def most_updates(num_parameters: int, workers: int) -> float:
    """Updates per second of one master, the best of several windows."""
    program = Path(__file__).with_name("parameter_exchange.py")
    line = [*mpirun(Shape(num_ranks=1 + workers)), sys.executable, str(program), "child"]
    job = subprocess.run(
        [*line, str(num_parameters), "messages"],
        env=environment(), check=True, capture_output=True, text=True,
    )  # fmt: skip
    return max(json.loads(each)["updates_per_second"] for each in job.stdout.splitlines())


def results_of(gpus: int) -> Path:
    return RESULTS / ("parameter_gpu.json" if gpus == 1 else f"parameter_gpu_{gpus}.json")


def run(models: list[str], workers: int, gpus: int) -> None:
    """Measure some models anew; the results of the others stay."""
    results = results_of(gpus)
    old = json.loads(results.read_text()) if results.exists() else {"rows": [], "limits": {}}
    rows: list[dict[str, Any]] = [row for row in old["rows"] if row["model"] not in models]
    limits: dict[str, float] = old["limits"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rng = np.random.default_rng(1)
        with h5py.File(folder / "showers.h5", "w") as file:
            file["x"] = rng.random((EVENTS, 25, 25, 25), np.float32)
            file["y"] = rng.random((EVENTS, 1), np.float32)
        for model in models:
            for number in range(ROUNDS):
                for setting in SETTINGS:
                    place = folder / f"{model}-{setting}-{number}".replace(" ", "-")
                    place.mkdir()
                    result = train(place, folder / "showers.h5", model, setting, gpus)
                    rate, parameters = result.samples_per_second, result.num_parameters
                    rows.append({"model": model, "setting": setting, "samples_per_second": rate,
                                 "parameters": parameters})  # fmt: skip
                    print(rows[-1], flush=True)
            limits[model] = most_updates(parameters, workers)
            print(model, limits[model], flush=True)
            save(results, rows, workers, limits)


def save(results: Path, rows: list[dict[str, Any]], workers: int, limits: dict[str, float]) -> None:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    machine = {"gpu": gpu, "cores": os.cpu_count(), "torch": torch.__version__,
               "host": platform.processor()}  # fmt: skip
    write_json(results, {"machine": machine, "rows": rows, "workers": workers, "limits": limits})


def table(gpus: int) -> None:
    """Markdown: samples/s, against one process, and the number of workers that one master feeds."""
    record = json.loads(results_of(gpus).read_text())
    print(", ".join(f"{key} {value}" for key, value in record["machine"].items()) + "\n")
    print("| model, parameters | setting | samples/s | of one process | saturates at workers |")
    print("|---|---|---|---|---|")
    best: dict[tuple[str, str], float] = {}
    sizes = {row["model"]: row["parameters"] for row in record["rows"]}
    for row in record["rows"]:
        key = row["model"], row["setting"]
        best[key] = max(best.get(key, 0.0), row["samples_per_second"])
    for (model, setting), rate in best.items():
        strategy, exchange = SETTINGS[setting]
        updates = rate / BATCH / exchange.get("sync_every", 1)
        limit = record["limits"].get(model)  # None if a run ended before it was measured
        served = limit / updates * gpus if limit else None
        central = strategy == "downpour" and "transport" not in exchange
        workers_served = f"{served:.0f}" if central and served else ""
        print(
            f"| {model}, {sizes[model] / 1e6:.2g} million | {setting} | {rate:.0f} | "
            f"{rate / best[model, 'one process']:.0%} | {workers_served} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("--workers", type=int, default=6, help="that compute nothing")
    parser.add_argument("--gpus", type=int, default=1, help="a worker on each")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    given = parser.parse_args()
    if given.action == "run":
        run(given.models, given.workers, given.gpus)
    else:
        table(given.gpus)


if __name__ == "__main__":
    main()
