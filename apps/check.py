"""Look at a task before any job is started: its data, its model, and whether they fit each other.

    python -P -m apps.check task.json report.json

Needs no MPI, so it runs on a login node. Exit status 2 and {"error": ...} if the user has to mend
something.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apps.contract import N3LOError, TrainTask, write_json
from apps.data import class_of_event, make_batch, plan_of, prepare, trains, validates
from apps.experiment import Supervised, build_model, describe, model_file
from apps.hdf5 import Fields, Index, Reader
from apps.history import check_metric_names


def main() -> None:
    task, report = TrainTask.read(Path(sys.argv[1])), Path(sys.argv[2])
    try:
        write_json(report, check(task))
    except N3LOError as error:
        write_json(report, {"error": str(error)})
        sys.exit(2)


def check(task: TrainTask) -> dict[str, Any]:
    """All that can be known of a task without training it.

    Raises:
        N3LOError: the task could not be trained.
    """
    torch.set_num_threads(1)
    torch.manual_seed(task.seed)
    index, fold_of_event = prepare(task.data, task.split_seed)
    experiment = Supervised(build_model(task.model), task.training)
    check_metric_names(task, experiment.metrics)
    experiment.schedulers(experiment.optimizers(), updates_per_epoch=1)
    is_training = trains(fold_of_event, task.fold)
    plan = plan_of(task, index, is_training, task.ranks.readers, epoch=1)
    try_model(task, experiment, index)

    folds = range(task.data.folds)
    classes = class_of_event(index)
    non_finite = count_non_finite(index)
    return {
        "events": index.num_events,
        "inputs": describe_fields(index.inputs),
        "targets": describe_fields(index.targets),
        "non_finite": non_finite,
        "classes": None if classes is None else np.bincount(classes).tolist(),
        "train_events": [int(trains(fold_of_event, fold).sum()) for fold in folds],
        "val_events": [int(validates(fold_of_event, fold).sum()) for fold in folds],
        "num_parameters": experiment.num_parameters,
        "steps_per_epoch": plan.num_steps,
        "warnings": [
            f"{name} holds {count} values that are not finite (nan or inf)"
            for name, count in non_finite.items()
            if count > 0
        ],
    }


def try_model(task: TrainTask, experiment: Supervised, index: Index) -> None:
    """Model, loss and metrics on the first events, without a gradient."""
    first = np.arange(min(2, index.num_events))  # BatchNorm needs two
    arrays = Reader(index, index.fields).gather(first)
    batch = make_batch(index, arrays, len(first), torch.device("cpu"))
    try:
        with torch.no_grad():
            experiment.evaluate(batch)
    except Exception as error:
        plain = isinstance(error, N3LOError)
        reason = str(error) if plain else describe(error, model_file(task.model))
        raise N3LOError(
            f"model '{task.model.source.rpartition(':')[2]}' fails on the first batch: {reason}; "
            f"inputs are {shapes(index.inputs)}, targets are {shapes(index.targets)}"
        ) from error


def count_non_finite(index: Index) -> dict[str, int]:
    """How many numbers of each field are nan or inf; reads everything once, block by block."""
    counts = dict.fromkeys((field.text for field in index.fields), 0)
    reader = Reader(index, index.fields)
    for first, end in pairwise(index.block_starts):
        arrays = reader.gather(np.arange(first, end))
        for field, array in zip(index.fields, arrays, strict=True):
            counts[field.text] += int(array.size - np.isfinite(array).sum())
    return counts


def describe_fields(fields: Fields) -> dict[str, dict[str, Any]]:
    """Shape of one event, and type in the model."""
    return {
        field.text: {"shape": list(field.shape), "dtype": field.dtype.name}
        for field in fields.members
    }


def shapes(fields: Fields) -> str:
    """Of a batch of B events, as a person writes them."""
    written = [
        f"({', '.join(['B', *map(str, field.shape)])}{'' if field.shape else ','})"
        for field in fields.members
    ]
    if fields.kind == "one":
        return written[0]
    names = [field.name for field in fields.members]
    return ", ".join(f"{name} {shape}" for name, shape in zip(names, written, strict=True))


if __name__ == "__main__":
    main()
