"""Samples per second on one and on several ranks, of whole trainings on random events.

    python benchmarks/scaling.py run --ranks 1 2          # on a machine with GPUs, one a rank
    python benchmarks/scaling.py run --models mlp --ranks 1 2     # anywhere
    python benchmarks/scaling.py table

Weak scaling keeps the batch of a rank, strong scaling that of all ranks together. The first epoch,
in which libraries start and choose their kernels, is left out; the median of the others counts.
"strategies" are other ways to use as many ranks, on the model with the most parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import nn

from apps.contract import TaskPaths, TrainResult, TrainTask, from_dict, read_json_lines, write_json
from sites.launchers import Shape, mpirun

RESULTS = Path(__file__).parent / "results" / "scaling.json"
GPU = torch.cuda.is_available()
EPOCHS = 4
DDP = {"strategy": "allreduce", "backend": "ddp"}

Row = dict[str, Any]


class Showers(nn.Sequential):
    """3D convolutions on 25 x 25 x 25 cells, as in the 3DGAN: few parameters, much arithmetic."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for before, after in ((1, 32), (32, 16), (16, 16), (16, 16)):
            layers += [nn.Conv3d(before, after, 5, padding=2), nn.LeakyReLU()]
        end = [nn.AvgPool3d(5), nn.Flatten(), nn.Linear(2000, 1)]
        super().__init__(nn.Unflatten(1, (1, 25)), *layers, *end)


class Bottleneck(nn.Module):
    """Of He et al. 2015, arXiv:1512.03385, figure 5, right."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.skip: nn.Module = nn.Identity()
        if before != after or stride > 1:
            convolution = nn.Conv2d(before, after, 1, stride, bias=False)
            self.skip = nn.Sequential(convolution, nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.skip(x))


class ResNet50(nn.Sequential):
    """Their table 1: 25.6 million parameters, 1000 classes, images of 3 x 224 x 224."""

    def __init__(self) -> None:
        stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        blocks, before = [], 64
        for width, number, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for block in range(number):
                blocks.append(Bottleneck(before, width, stride if block == 0 else 1))
                before = 4 * width
        end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000)]
        super().__init__(*stem, nn.MaxPool2d(3, 2, 1), *blocks, *end)


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        hidden = [layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.ReLU())]
        super().__init__(*hidden, nn.Linear(512, 1))


# The shape of an event, how many there are, the batch of a rank, and the loss.
MODELS: dict[str, tuple[type[nn.Module], tuple[int, ...], int, int, str]] = {
    "showers": (Showers, (25, 25, 25), 16_384, 128, "mse"),
    "resnet50": (ResNet50, (3, 224, 224), 2560, 128, "cross_entropy"),
    "mlp": (Mlp, (512,), 20_000, 64, "mse"),
}
STRATEGIES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "sharded": ({"strategy": "sharded"}, {"ranks_per_worker": 2}),
    "sharded, fp16": ({"strategy": "sharded", "precision": "fp16"}, {"ranks_per_worker": 2}),
    "ddp, fp16": ({**DDP, "precision": "fp16"}, {"num_workers": 2}),
    "ddp, PowerSGD": ({**DDP, "reduction": {"compression": "powersgd"}}, {"num_workers": 2}),
    "ddp, compiled": ({**DDP, "compile": True}, {"num_workers": 2}),
    "pipeline": ({"strategy": "pipeline"}, {"ranks_per_worker": 2}),
    "one rank, two GPUs": ({"strategy": "local"}, {"gpus_per_rank": 2}),
}


def events(folder: Path, model: str) -> Path:
    _, shape, number, _, loss = MODELS[model]
    path, rng = folder / f"{model}.h5", np.random.default_rng(1)
    if not path.exists():
        with h5py.File(path, "w") as file:
            file["x"] = rng.random((number, *shape), np.float32)
            classes = rng.integers(1000, size=number)
            file["y"] = classes if loss == "cross_entropy" else rng.random((number, 1), np.float32)
    return path


def train(folder: Path, model: str, training: dict[str, Any], layout: dict[str, int]) -> Row:
    """One training, launched as a site would: its rate, and what an epoch was spent on."""
    make, _, _, batch, loss = MODELS[model]
    content = {
        "study": "scaling", "trial": 0, "fold": 0, "seed": 1, "split_seed": 1,
        "model": {"source": f"{Path(__file__).resolve()}:{make.__name__}"},
        "data": {"files": [str(events(folder, model))], "inputs": "x", "targets": "y",
                 "memory_gb": 16.0, "stratify": False},
        "training": {
            "epochs": EPOCHS, "batch_size": batch, "loss": loss, "select": "last",
            "precision": "bf16" if GPU else "fp32", "optimizer": {"name": "sgd", "lr": 1e-4},
            **training,
        },
        "layout": {"gpus_per_rank": int(GPU), **layout},
        "objective": {"metric": "val_loss", "goal": "min"},
        "fingerprint": {"data": "d", "model": model, "code": "c"},
    }  # fmt: skip
    return {"model": model, **measure(folder, content)}


def measure(folder: Path, content: dict[str, Any]) -> Row:
    """Train a task, given as plain values, and see how fast it was after the first epoch."""
    task = from_dict(TrainTask, content)
    paths = TaskPaths(Path(tempfile.mkdtemp(dir=folder)))
    task.write(paths.task)
    shape = Shape(num_ranks=task.ranks.total, gpus_per_rank=task.layout.gpus_per_rank)
    line = [*mpirun(shape), sys.executable, "-m", "apps.train", str(paths.task)]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    subprocess.run(line, env={**os.environ, **root, "OMP_NUM_THREADS": "1"}, check=True)
    result = TrainResult.read(paths.result)
    names = ("compute_s", "communication_s", "data_s", "idle_s")
    measured = [row for row in read_json_lines(paths.history) if row["epoch"] > 1]
    seconds = [sum(row[name] for name in names) for row in measured]
    spent = {name: statistics.median(row[name] for row in measured) for name in names}
    rate = result.num_train / statistics.median(seconds)
    return {
        "ranks": task.ranks.total, "parameters": result.num_parameters,
        "batch_size": task.training.batch_size, "samples_per_second": rate, **spent,
    }  # fmt: skip


def run(models: list[str], ranks: list[int], rounds: int, others: bool) -> None:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wanted: list[tuple[str, str, dict[str, Any], dict[str, int]]] = []
        for model in models:
            batch = MODELS[model][3]
            for number in ranks:
                layout = {"num_workers": number}
                wanted.append((model, "weak", DDP, layout))
                if number > 1:
                    smaller = {**DDP, "batch_size": batch // number}
                    wanted.append((model, "strong", smaller, layout))
        for _ in range(rounds):
            for model, way, training, layout in wanted:
                note(rows, way, train(folder, model, training, layout))
        for way, (training, layout) in STRATEGIES.items() if others else ():
            try:
                note(rows, way, train(folder, "resnet50", training, layout))
            except subprocess.CalledProcessError as error:
                print(way, "failed:", error, flush=True)


def note(rows: list[Row], way: str, row: Row) -> None:
    """Keep a row, at once: a machine may be taken away."""
    rows.append({"way": way, **row})
    print(rows[-1], flush=True)
    device = torch.cuda.get_device_name() if GPU else platform.processor()
    machine = {"device": device, "cores": os.cpu_count(), "torch": torch.__version__}
    write_json(RESULTS, {"machine": machine, "rows": rows})


def table() -> None:
    """Markdown: the best of each, its efficiency against one rank, and where the time went."""
    record = json.loads(RESULTS.read_text())
    print(", ".join(f"{key} {value}" for key, value in record["machine"].items()) + "\n")
    print("| model, parameters | way | ranks | samples/s | efficiency | compute, communication, "
          "data, idle |")  # fmt: skip
    print("|---|---|---|---|---|---|")
    best: dict[tuple[str, str, int], Row] = {}
    for row in record["rows"]:
        key = row["model"], row["way"], row["ranks"]
        if key not in best or row["samples_per_second"] > best[key]["samples_per_second"]:
            best[key] = row
    for (model, way, ranks), row in best.items():
        alone = best[model, "weak", 1]["samples_per_second"]
        gpus = 2 if "two GPUs" in way else ranks
        efficiency = row["samples_per_second"] / alone / gpus
        spent = [row[f"{name}_s"] for name in ("compute", "communication", "data", "idle")]
        parts = ", ".join(f"{seconds / sum(spent):.1%}" for seconds in spent)
        print(f"| {model}, {row['parameters'] / 1e6:.2g} million | {way} | {ranks} | "
              f"{row['samples_per_second']:.0f} | {efficiency:.1%} | {parts} |")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["showers", "resnet50"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--strategies", action="store_true", help="the other ways, too")
    given = parser.parse_args()
    if given.action == "run":
        run(given.models, given.ranks, given.rounds, given.strategies)
    else:
        table()


if __name__ == "__main__":
    main()
