"""ResNet-50, AlexNet and GoogLeNet on 1 to n ranks: images a second.

    python benchmarks/image_models.py --ranks 1 2 4 8          # on a machine with GPUs, one a rank
    python benchmarks/image_models.py --size 64 --images 64 --batch 4 --classes 10     # anywhere
    python benchmarks/image_models.py --from results.json      # the table of an earlier run

Whole trainings by gradient all-reduce, each launched as a site would, of networks of torchvision on
images in the shape of ImageNet (imagenet_like.py). Weak scaling keeps the batch of a rank, strong
scaling that of all ranks together. The first epoch, in which libraries start and choose their
kernels, is left out; the median of the others counts.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from imagenet_like import write
from parametric_showers import processor
from scaling import DDP, GPU, Row, measure

from apps.contract import write_json

MODELS: dict[str, dict[str, Any]] = {  # with their arguments
    "resnet50": {},
    "alexnet": {},
    "googlenet": {"aux_logits": False, "init_weights": False},
}
EPOCHS = 4


def train(folder: Path, model: str, ranks: int, batch: int, given: argparse.Namespace) -> Row:
    """One training of a number of ranks, with `batch` images on each."""
    content = {
        "study": "image_models", "trial": 0, "fold": 0, "seed": 1, "split_seed": 1,
        "model": {
            "source": f"torchvision.models:{model}",
            "args": {"num_classes": given.classes, **MODELS[model]},
        },
        "data": {
            "files": [str(folder / "images.h5")], "inputs": {"x": "images"}, "targets": "labels",
            "stratify": False,
            "transforms": {"x": [
                {"name": "transpose", "axes": [3, 1, 2]},
                {"name": "scale", "by": 0.0157, "offset": -2.0},
            ]},
        },
        "training": {
            **DDP, "epochs": EPOCHS, "batch_size": batch, "select": "last",
            "precision": "bf16" if GPU else "fp32",
            "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
        },
        "layout": {"num_workers": ranks, "gpus_per_rank": int(GPU)},
        "objective": {"metric": "val_loss", "goal": "min"},
        "fingerprint": {"data": "d", "model": model, "code": "c"},
    }  # fmt: skip
    return measure(folder, content)


def run(given: argparse.Namespace) -> dict[str, Any]:
    """All trainings; what is measured is written at once, as a machine may be taken away."""
    record = {"machine": machine(), "images": given.images, "size": given.size, "rows": []}
    with tempfile.TemporaryDirectory(dir=given.scratch) as name:
        folder = Path(name)
        write(folder / "images.h5", given.images, given.size, given.classes)
        for model in given.models:
            for ranks in given.ranks:
                ways = {"weak": given.batch, "strong": max(1, given.batch // ranks)}
                for way, batch in ways.items() if ranks > 1 else [("weak", given.batch)]:
                    row = {"model": model, "way": way, **train(folder, model, ranks, batch, given)}
                    record["rows"].append(row)
                    print(row, flush=True)
                    if given.to:
                        write_json(given.to, record)
    return record


def machine() -> dict[str, Any]:
    device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if GPU else processor()
    return {"device": device, "cores": os.cpu_count(), "torch": torch.__version__}


def table(record: dict[str, Any]) -> str:
    """Markdown; efficiency is against the fewest ranks, each rank of which counts."""
    size = record["size"]
    lines = [
        ", ".join(f"{key} {value}" for key, value in record["machine"].items()),
        f"{record['images']} images of {size} x {size}, of which four fifths are trained on",
        "",
        "| model, parameters | scaling | ranks | batch of a rank | images/s | efficiency | s an "
        "epoch | communication |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        same = [each for each in record["rows"] if each["model"] == row["model"]]
        fewest = min(same, key=lambda each: each["ranks"])
        rate, parts = row["samples_per_second"], seconds(row)
        ideal = fewest["samples_per_second"] * row["ranks"] / fewest["ranks"]
        lines.append(
            f"| {row['model']}, {row['parameters'] / 1e6:.1f} million | {row['way']} "
            f"| {row['ranks']} | {row['batch_size']} | {rate:.1f} | {rate / ideal:.0%} "
            f"| {parts:.1f} | {row['communication_s'] / parts:.0%} |"
        )
    return "\n".join(lines)


def seconds(row: Row) -> float:
    """An epoch's training steps."""
    return sum(row[f"{part}_s"] for part in ("compute", "communication", "data", "idle"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--images", type=int, default=5120)
    parser.add_argument("--size", type=int, default=224, help="of each side, in pixels")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=128, help="images of a rank")
    parser.add_argument("--scratch", type=Path, help="a folder for the images")
    parser.add_argument("--to", type=Path, help="a JSON file of all that is measured")
    parser.add_argument("--from", dest="earlier", type=Path, help="such a file: only the table")
    given = parser.parse_args()
    record = json.loads(given.earlier.read_text()) if given.earlier else run(given)
    print(table(record))


if __name__ == "__main__":
    main()
