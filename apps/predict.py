"""What a trained network gives for events: of other files, or those that its training judged it by.

python -P -m apps.predict TASK_FOLDER OUT.h5 --on new.root
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch
from torch import Tensor

from apps.check import name_of, shapes
from apps.contract import FILE, VERSION, Data, N3LOError, TaskPaths, TrainTask
from apps.data import VALIDATION_FACTOR, Batch, make_batch, prepare, validates
from apps.ensemble import OUTPUTS, Told, append, average_of, names
from apps.experiment import Experiment, Supervised, describe, model_file
from apps.hdf5 import Index, Reader, index_files
from apps.losses import Key, form
from apps.new_h5 import new_h5
from apps.trained import load_trained, this_device
from apps.transforms import Kept, kept, with_kept


class Trained(NamedTuple):
    """A finished task, and the events that it is applied to."""

    task: TrainTask
    experiment: Experiment
    transforms: Kept  # with the numbers of its training
    index: Index  # without targets, if the files are not the task's own
    events: np.ndarray  # their numbers in the index, (N,)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="apps.predict", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="TASK_FOLDER")
    parser.add_argument("out", type=Path, metavar="OUT.h5")
    parser.add_argument("--on", nargs="+", default=[], metavar="FILE")
    options = parser.parse_args(words)
    try:
        print(write(load(options.folder, options.on), options.out))
    except N3LOError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def predict(folder: str | Path, files: Sequence[str | Path] = ()) -> dict[str, np.ndarray]:
    """The arrays that `n3lo predict` writes, in memory.

    Args:
        folder: of a finished task, such as "runs/jets/t003-f0".
        files: of events, which need have no targets; none = the task's validation events.

    Returns:
        By name, (N, ...) each: `output`, or `output_NAME` or `output_NUMBER` of each of several. Of
        validation events also `events`, numbered through all files of the study, `target` as the
        loss gets it, and `weight` as it is stored.

    Raises:
        N3LOError: the task is not finished, its network does not take these events, or an input is
            "@file", which other files have not.
    """
    parts = list(batches(load(Path(folder), files)))
    return {name: torch.cat([part[name].values for part in parts]).numpy() for name in parts[0]}


def write(trained: Trained, out: Path) -> str:
    """The same as HDF5, batch by batch.

    Returns:
        A line about what was written.
    """
    task, files = trained.task, trained.index.files
    if out.resolve() in {Path(each).resolve() for each in files}:
        raise N3LOError(f"--to {out}: is one of the files that are read; name another")
    with new_h5(out) as (file, check_disk):
        file.attrs["study"] = f"{task.study}, task {task.id}, key {task.key()}"
        file.attrs["versions"] = f"n3lo {VERSION}, torch {torch.__version__}"
        for arrays in batches(trained):
            for name, each in arrays.items():
                append(file, name, each)
            check_disk()
        written = [f"{name} {each.shape}" for name, each in file.items()]
        # No attribute: HDF5 takes 64 KiB for one, which are the references to 4096 texts.
        file.create_dataset("files", data=files, dtype=h5py.string_dtype())
    return f"{out}: {', '.join(written)}, by {task.id}"


def load(folder: Path, files: Sequence[str | Path]) -> Trained:
    task, experiment = load_trained(folder, this_device())
    if "model" not in experiment.networks:
        raise N3LOError(
            f"model '{name_of(task)}' is several networks ({', '.join(experiment.networks)}), of "
            "which none predicts a target: 'export-model' writes one, 'generate' its showers"
        )
    transforms = kept(TaskPaths(folder).transforms, task.data.transforms)
    if files:
        index = with_kept(index_new(task.data, list(map(str, files))), transforms)
        return Trained(task, experiment, transforms, index, np.arange(index.num_events))
    index, fold_of_event = prepare(task.data, task.split_seed)
    events = np.flatnonzero(validates(fold_of_event, task.fold))
    return Trained(task, experiment, transforms, with_kept(index, transforms), events)


def index_new(data: Data, files: list[str]) -> Index:
    """Of files that are not the task's own."""
    if FILE in str(data.inputs):
        raise N3LOError(
            f"--on: the network was trained with '{FILE}' among its inputs, a number that the "
            "study gives to each of its own files; for other files, store it in them all as an "
            "array, and train with that"
        )
    try:
        new = replace(data, files=files, file_numbers=None)
        return index_files(new, with_targets=False)
    except N3LOError as error:
        raise N3LOError(re.sub("^data.files: ", "--on: ", str(error))) from error


@torch.no_grad()
def batches(trained: Trained) -> Iterator[dict[str, Told]]:
    """All arrays, of some events after the others; on the CPU."""
    task, experiment, _, index, events = trained
    size = VALIDATION_FACTOR * task.training.batch_size
    with closing(Reader(index, index.fields)) as reader:
        for some in np.array_split(events, -(-len(events) // size)):
            batch = make_batch(index, reader.gather(some), len(some), experiment.device)
            found = {
                name: told(trained, key, values)
                for name, (key, values) in by_name(forward(trained, batch)).items()
            }
            if index.targets.members:
                targets = by_name(batch.targets).items()
                found |= {
                    name.replace("output", "target", 1): Told(values.cpu())
                    for name, (_, values) in targets
                }
                found["events"] = Told(torch.from_numpy(some))
            if batch.weights is not None:
                found["weight"] = Told(batch.weights.cpu())
            yield found


def forward(trained: Trained, batch: Batch) -> Any:
    """What the network gives, (B, ...), or a list or table of such.

    Raises:
        N3LOError: it fails, or gives anything else.
    """
    task, experiment = trained.task, trained.experiment
    try:
        outputs = experiment.forward(experiment.served("model"), batch.inputs)
    except (N3LOError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a user's model can raise anything
        raise N3LOError(
            f"model '{name_of(task)}' fails: {describe(error, model_file(task.model))}; inputs are "
            f"{shapes(trained.index.inputs)}"
        ) from error
    if isinstance(task.data.targets, list) and isinstance(outputs, Tensor):
        outputs = [outputs]
    for _, values in by_name(outputs).values():
        if not isinstance(values, Tensor) or values.shape[:1] != (batch.num_events,):
            raise N3LOError(
                f"model '{name_of(task)}' gives {form(outputs)}, not one row for each of the "
                f"{batch.num_events} events"
            )
    return outputs


def by_name(values: Any) -> dict[str, tuple[Key, Any]]:
    """One or several outputs, by the names that they have in the file."""
    values = list(values) if isinstance(values, tuple) else values
    keys = names(values).items()
    return {name: (key, values if key is None else values[key]) for name, key in keys}


def told(trained: Trained, key: Key, values: Tensor) -> Told:
    """An output in the form that is of use to people, and what it is.

    A loss of the model's own does not say what its outputs are, which then stay as they are.
    """
    experiment = trained.experiment
    is_known = isinstance(experiment, Supervised)
    average = average_of(experiment.losses.name(key)) if is_known else OUTPUTS
    target = target_of(trained.task.data.targets, key, is_known)
    steps = [] if target is None else trained.transforms.get(target, [])
    return Told(
        average.written(average.back(average.form(values), 1)).cpu(),
        {"values": average.of, "steps": json.dumps(steps)},
    )


def target_of(targets: str | list[str] | dict[str, str], key: Key, alike: bool) -> str | None:
    """What the study calls the target of an output; None if it has none in that place.

    Args:
        alike: the outputs have the form of the targets, as those of a model with a loss of its own
            need not.
    """
    if isinstance(targets, list):
        return targets[key] if isinstance(key, int) and key < len(targets) else None
    if isinstance(targets, dict):
        return key if isinstance(key, str) and key in targets else None
    if key is None:
        return targets
    return str(key) if alike else None  # of a group, each array by its name


if __name__ == "__main__":
    sys.exit(main())
