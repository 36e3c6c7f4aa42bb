"""Average what the best models of a study give, and see what that gains over the best of them.

    python -P -m apps.ensemble --member t003 T003-F0 T003-F1 --member t007 T007-F0 T007-F1 --to OUT

Members come best first, each with one task folder a fold. All of them predict the validation
events of a fold, on which none of them was trained there. Every model counts the same: a uniform
mixture, as the deep ensembles of Lakshminarayanan et al. 2017 (arXiv:1612.01474), section 2.4.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from apps.contract import N3LOError, TaskPaths, TrainTask, goal_of, write_json
from apps.data import VALIDATION_FACTOR, Batch, make_batch, prepare, validates
from apps.experiment import Supervised
from apps.hdf5 import Reader
from apps.losses import Key
from apps.new_h5 import new_h5
from apps.trained import load_trained, this_device
from apps.transforms import Kept, kept, with_kept


class Told(NamedTuple):
    """An array of a file, and what is said of it there."""

    values: Tensor
    attributes: Mapping[str, str] = {}


Keep = Callable[[int, np.ndarray, Mapping[str, Told]], None]  # fold, events, their means by name

CAUTION = (
    "± is the spread over folds; a gain is a difference on the same events. The trials were chosen "
    "by these events, so all numbers are a little flattering."
)


@dataclass(frozen=True)
class Member:
    """One trial."""

    name: str  # "t003"
    folders: list[Path]  # of its finished tasks, in the order of folds


class Model(NamedTuple):
    """What a member has trained in one fold."""

    name: str
    task: TrainTask
    experiment: Supervised
    transforms: Kept  # with the numbers of its training


class Scores(NamedTuple):
    """Loss and metrics on the validation events; arrays are (folds, members, metrics)."""

    names: list[str]  # of the members
    metrics: list[str]
    single: np.ndarray  # of each member alone
    averaged: np.ndarray  # of the first 1, 2, ... members together

    @property
    def gain(self) -> np.ndarray:
        """By how much the first 1, 2, ... together are better than the first alone.

        Where it is not known whether more is better, by how much they are more.
        """
        signs = [-1 if goal_of(name) == "min" else 1 for name in self.metrics]
        return np.array(signs) * (self.averaged - self.single[:, :1])


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="apps.ensemble", description=__doc__)
    parser.add_argument(
        "--member",
        nargs="+",
        action="append",
        required=True,
        metavar=("NAME", "TASK_FOLDER"),
        help="best first",
    )
    parser.add_argument("--to", type=Path, metavar="FOLDER")
    options = parser.parse_args(words)
    members = [Member(name, list(map(Path, folders))) for name, *folders in options.member]
    try:
        scores = ensemble(members, options.to)
    except N3LOError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join([*table(scores), CAUTION]))
    return 0


def ensemble(members: Sequence[Member], to: Path | None = None) -> Scores:
    """Judge the members, and the means of the first ones.

    Args:
        to: a folder for `ensemble.json` and `predictions.h5`, which has the mean of all members:
            `foldK/events` (N,), numbered through all files of the study, and `foldK/output`
            (N, ...), or `output_NAME` or `output_NUMBER` for each of several, whose attribute
            `values` says whether they are probabilities or outputs as models give them.

    Raises:
        N3LOError: a task is not finished, is no supervised training, or does not fit the first
            member's.
    """
    if len({len(member.folders) for member in members}) > 1:
        raise N3LOError("--member: name as many task folders for each, one a fold")
    device = this_device()
    fold_scores = []
    with predictions(to) as keep:
        for number in range(len(members[0].folders)):
            models = [load(member.name, member.folders[number], device) for member in members]
            check_alike(models)
            fold_scores.append(judge(models, keep))
    single, averaged = (np.stack(each) for each in zip(*fold_scores, strict=True))
    first = models[0]
    names = [member.name for member in members]
    scores = Scores(names, first.experiment.metrics, single, averaged)
    if to is not None:
        write_json(to / "ensemble.json", describe(members, averaged_by(first.experiment), scores))
    return scores


def load(name: str, folder: Path, device: torch.device) -> Model:
    task, experiment = load_trained(folder, device)
    if not isinstance(experiment, Supervised):
        raise N3LOError(
            f"{name}: '{task.model.source.rpartition(':')[2]}' brings its losses (training.loss = "
            "'own'), so that it is not known how its outputs are to be averaged"
        )
    return Model(name, task, experiment, kept(TaskPaths(folder).transforms, task.data.transforms))


def check_alike(models: Sequence[Model]) -> None:
    """See that the outputs of all models mean the same.

    Raises:
        N3LOError: they do not.
    """
    first = models[0]
    expected = asked_of(first.task)
    for model in models[1:]:
        for key, value in asked_of(model.task).items():
            if value != expected[key]:
                raise N3LOError(
                    f"{model.name}: its {key} is {value}, and that of {first.name} is "
                    f"{expected[key]}: they cannot be averaged"
                )


def asked_of(task: TrainTask) -> dict[str, Any]:
    """What gives outputs their meaning, by its name in the study."""
    return {
        "fold": task.fold,
        "data.targets": task.data.targets,
        "data.weights": task.data.weights,
        "training.loss": task.training.loss,
        "training.metrics": task.training.metrics,
    }


# -- the average -----------------------------------------------------------------------------------


class Average(NamedTuple):
    """How outputs are averaged. Probabilities are added up by their logarithms, as those of
    confident models would be rounded to 0 and 1."""

    of: str
    form: Callable[[Tensor], Tensor]  # what a model gives -> what is added up
    add: Callable[[Tensor, Tensor], Tensor]
    back: Callable[[Tensor, int], Tensor]  # a sum of so many -> what one model would give
    written: Callable[[Tensor], Tensor]  # what a model gives -> what is of use to people


def as_it_is(values: Tensor) -> Tensor:
    return values


def two_classes(logits: Tensor) -> Tensor:
    """Log-probabilities of yes and no, (2, B, ...)."""
    return torch.stack([functional.logsigmoid(logits), functional.logsigmoid(-logits)])


OUTPUTS = Average("outputs", as_it_is, torch.add, torch.div, as_it_is)
LOG_PROBABILITIES = Average(
    "probabilities", as_it_is, torch.logaddexp, lambda log, count: log - math.log(count), torch.exp
)
AVERAGES = {
    "cross_entropy": LOG_PROBABILITIES._replace(form=partial(torch.log_softmax, dim=1)),
    "nll_loss": LOG_PROBABILITIES,
    "binary_cross_entropy": OUTPUTS._replace(of="probabilities"),
    "binary_cross_entropy_with_logits": Average(
        "probabilities", two_classes, torch.logaddexp, lambda log, _: log[0] - log[1], torch.sigmoid
    ),
}


def average_of(loss: str) -> Average:
    """Of probabilities where the loss takes them, in one form or another; else of the outputs."""
    return AVERAGES.get(loss, OUTPUTS)


# -- a fold ----------------------------------------------------------------------------------------


@torch.no_grad()
def judge(models: Sequence[Model], keep: Keep) -> tuple[np.ndarray, np.ndarray]:
    """Loss and metrics of each model, and of the means of the first ones, (models, metrics) each.

    Held at once are the outputs of one model and the sum of all, of one batch.
    """
    task, first = models[0].task, models[0].experiment
    single, averaged = ([first.no_val_sums() for _ in models] for _ in range(2))
    for events, batches in validation(models):
        totals: dict[str, Tensor] = {}
        means: dict[str, Tensor] = {}
        for number, (model, batch) in enumerate(zip(models, batches, strict=True)):
            outputs = predict(model, batch, means)
            averages = {
                name: average_of(first.losses.name(key))
                for name, key in names(batch.targets).items()
            }
            for name, values in outputs.items():
                average = averages[name]
                form = average.form(values)
                totals[name] = average.add(totals[name], form) if number else form
                means[name] = average.back(totals[name], number + 1)
            single[number] += sums(first, outputs, batch)
            averaged[number] += sums(first, means, batch)
        written = {
            name: Told(averages[name].written(each), {"values": averages[name].of})
            for name, each in means.items()
        }
        keep(task.fold, events, written)
    return values_of(first, single), values_of(first, averaged)


def predict(model: Model, batch: Batch, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Outputs by name, (B, ...) each, in the shape of others: (B,) plus (B, 1) would be (B, B)."""
    network = model.experiment.networks["model"]
    outputs = named(model.experiment.forward(network, batch.inputs), batch.targets)
    for name, expected in like.items():
        values = outputs[name]
        if values.numel() != expected.numel():
            raise N3LOError(
                f"{model.name}: gives {tuple(values.shape[1:])} for an event, and the best model "
                f"{tuple(expected.shape[1:])}: they cannot be averaged"
            )
        outputs[name] = values.reshape(expected.shape)
    return outputs


def sums(experiment: Supervised, outputs: dict[str, Tensor], batch: Batch) -> Tensor:
    """What is measured of a batch, in the sums of the experiment."""
    as_given: Any = {key: outputs[name] for name, key in names(batch.targets).items()}
    if not isinstance(batch.targets, dict):
        as_given = list(outputs.values()) if isinstance(batch.targets, list) else as_given[None]
    return experiment.sums(experiment.loss(as_given, batch), as_given, batch)


def names(targets: Any) -> dict[str, Key]:
    """Of one or several outputs in `predictions.h5`, each with its place in the targets."""
    if isinstance(targets, dict):
        return {f"output_{name}": name for name in targets}
    if isinstance(targets, list):
        return {f"output_{number}": number for number in range(len(targets))}
    return {"output": None}


def named(values: Any, targets: Any) -> dict[str, Tensor]:
    """One or several outputs, under the names that they have in `predictions.h5`."""
    if isinstance(targets, list) and isinstance(values, Tensor):  # one output, as in `pairs`
        values = [values]
    return {name: values if key is None else values[key] for name, key in names(targets).items()}


def values_of(experiment: Supervised, models: Sequence[Tensor]) -> np.ndarray:
    """From the sums of each to (models, metrics)."""
    return np.array([list(experiment.val_means(each).values()) for each in models])


def validation(models: Sequence[Model]) -> Iterator[tuple[np.ndarray, list[Batch]]]:
    """The validation events, batch by batch: their numbers (B,), and what each model gets of them.

    Models may take different fields of an event: the data section of a study can be searched.

    Raises:
        N3LOError: not all models have the same validation events, with the same targets.
    """
    first = models[0]
    # Which events validate does not depend on how many are trained on.
    sections = [
        (replace(each.task.data, train_fraction=1.0), each.task.split_seed, each.transforms)
        for each in models
    ]
    distinct = [each for number, each in enumerate(sections) if each not in sections[:number]]
    splits = [
        (with_kept(index, numbers), fold)
        for data, seed, numbers in distinct
        for index, fold in [prepare(data, seed)]
    ]
    targets = [[field.steps for field in index.targets.members] for index, _ in splits]
    events = [np.flatnonzero(validates(fold, first.task.fold)) for _, fold in splits]
    which = [distinct.index(each) for each in sections]
    for model, source in zip(models, which, strict=True):
        if not np.array_equal(events[source], events[0]):
            raise N3LOError(
                f"{model.name}: has other validation events than {first.name}: data.stratify, "
                "data.validation_fraction or the split's seed is not the same"
            )
        if targets[source] != targets[0]:
            raise N3LOError(
                f"{model.name}: data.transforms gives its targets other numbers than those of "
                f"{first.name}: their outputs cannot be averaged"
            )
    size = VALIDATION_FACTOR * min(each.task.training.batch_size for each in models)
    with ExitStack() as stack:
        readers = [stack.enter_context(closing(Reader(index, index.fields))) for index, _ in splits]
        for some in np.array_split(events[0], -(-len(events[0]) // size)):
            read = [
                make_batch(index, reader.gather(some), len(some), first.experiment.device)
                for (index, _), reader in zip(splits, readers, strict=True)
            ]
            yield some, [read[source] for source in which]


# -- what is told and written ----------------------------------------------------------------------


def table(scores: Scores) -> list[str]:
    """Members, means of the first ones, and what these gain over the first; lines of text."""
    best, count = scores.names[0], len(scores.names)
    rows = [["", *(cell for name in scores.metrics for cell in (name, f"gain over {best}"))]]
    for number, name in enumerate(scores.names):
        cells = (with_spread(each, ".4g") for each in scores.single[:, number].T)
        rows.append([name, *(cell for each in cells for cell in (each, ""))])
    for number in range(1, count):
        pairs = zip(scores.averaged[:, number].T, scores.gain[:, number].T, strict=True)
        cells = ((with_spread(value, ".4g"), with_spread(gain, "+.2g")) for value, gain in pairs)
        rows.append([f"first {number + 1} averaged", *(cell for pair in cells for cell in pair)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def with_spread(values: np.ndarray, form: str) -> str:
    """Mean and sample standard deviation over folds; of one fold, its value."""
    mean = f"{values.mean():{form}}"
    return f"{mean} ± {values.std(ddof=1):.2g}" if len(values) > 1 else mean


def averaged_by(experiment: Supervised) -> str:
    """What is averaged, of all targets."""
    return " and ".join(sorted({average_of(name).of for name in experiment.losses.names}))


def describe(members: Sequence[Member], averaged: str, scores: Scores) -> dict[str, Any]:
    """The content of `ensemble.json`; lists of numbers have one a fold."""

    def rows(values: np.ndarray, key: str, names: Sequence[Any]) -> list[dict[str, Any]]:
        by_metric = [zip(scores.metrics, each.T.tolist(), strict=True) for each in values]
        return [{key: name, **dict(each)} for name, each in zip(names, by_metric, strict=True)]

    firsts = range(1, len(members) + 1)
    return {
        "averaged": averaged,
        "members": [
            {
                "trial": member.name,
                "weight": 1 / len(members),
                "tasks": [str(each) for each in member.folders],
                "weights": [str(TaskPaths(each).weights) for each in member.folders],
            }
            for member in members
        ],
        "single": rows(scores.single.swapaxes(0, 1), "trial", scores.names),
        "first_averaged": rows(scores.averaged.swapaxes(0, 1), "models", firsts),
        "gain_over_best": rows(scores.gain.swapaxes(0, 1), "models", firsts),
    }


@contextmanager
def predictions(folder: Path | None) -> Iterator[Keep]:
    """What takes the means, batch by batch, to a file; without a folder, nowhere."""
    if folder is None:
        yield lambda *_: None
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise N3LOError(f"--to {folder}: {error.strerror}") from error
    try:
        with new_h5(folder / "predictions.h5") as (file, check_disk):

            def keep(fold: int, events: np.ndarray, means: Mapping[str, Told]) -> None:
                group = file.require_group(f"fold{fold}")
                append(group, "events", Told(torch.from_numpy(events)))
                for name, each in means.items():
                    append(group, name, each)
                check_disk()

            yield keep
    except N3LOError:
        with suppress(OSError):  # there are other files in it
            folder.rmdir()
        raise


def append(group: h5py.Group, name: str, told: Told) -> None:
    values = told.values.cpu().numpy()
    if name not in group:
        dataset = group.create_dataset(name, data=values, maxshape=(None, *values.shape[1:]))
        dataset.attrs.update(told.attributes)
        return
    dataset = group[name]
    dataset.resize(len(dataset) + len(values), axis=0)
    dataset[-len(values) :] = values


if __name__ == "__main__":
    sys.exit(main())
