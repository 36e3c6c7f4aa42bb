"""Look at a task before any job is started: its data, its model, and whether they fit each other.

    python -P -m apps.check task.json report.json

Needs no MPI, so it runs on a login node. Exit status 2 and {"error": ...} if the user has to mend
something.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from apps import mistakes, suited
from apps.contract import CENTRAL, N3LOError, TrainTask, averages_weights, write_json
from apps.data import (
    Batch,
    FoldBatches,
    Share,
    class_of_event,
    lacking_classes,
    make_batch,
    plan_of,
    prepare_fold,
    trains,
    validates,
)
from apps.experiment import Experiment, Supervised, describe, make_experiment, model_file
from apps.hdf5 import Fields, Index, Reader
from apps.history import check_metric_names
from apps.normalise import synchronise
from apps.opened import files_read
from apps.recompute import recompute
from apps.transforms import form, idle_ignores, tensor_of, transformed

CPU = torch.device("cpu")
BUILD_S = 300.0  # seconds that the model's file and constructor may take
INSPECTED = 500  # events of which a model may say that they look odd


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
    index, fold_of_event = prepare_fold(task.data, task.split_seed, task.fold)
    with (
        mistakes.limited(
            BUILD_S,
            f"model.source was not imported and built after {BUILD_S:g} s; does its file train, "
            "download or wait for input when it is imported? Put that under if __name__ == "
            "'__main__'",
        ),
        files_read() as read,
    ):
        experiment = make_experiment(
            task.model, task.training, lambda: first_events(index), task.data.collate
        )
    of_names: list[str] = []
    if isinstance(experiment, Supervised):
        mistakes.check_weights(experiment.networks["model"], name_of(task))
        of_names = list(mistakes.of_names(experiment.networks["model"]))
    check_metric_names(task, experiment.measured)
    if index.weights is not None:
        experiment.check_weights()
    experiment.schedulers(experiment.optimizers(), updates_per_epoch=1)
    is_training = trains(fold_of_event, task.fold)
    plan = plan_of(task, index, is_training, task.ranks.readers, epoch=1)
    share = Share(rank=0, num_ranks=task.ranks.readers, group_size=1)
    largest_batch = FoldBatches(task, index, fold_of_event, share, CPU).preview().largest_batch
    warnings = experiment.inspect(first_events(index, INSPECTED))
    batch = first_events(index)
    of_the_loss = try_model(task, experiment, index, batch)
    change_layers(task, experiment)
    divide(task, experiment, batch, largest_batch)

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
        "measured": experiment.measured,
        "steps_per_epoch": plan.num_steps,
        "warnings": [
            *(
                f"{name} holds {count} values that are not finite (nan or inf)"
                for name, count in non_finite.items()
                if count > 0
            ),
            *lacking_classes(task.data, index, fold_of_event),
            *idle_ignores(index, is_training),
            *of_files(task, read),
            *warnings,
            *of_names,
            *of_the_loss,
            *of_the_schedule(task),
            *of_the_ranks(task, largest_batch),
            *of_batch_norm(task, experiment),
        ],
    }


def of_files(task: TrainTask, read: set[Path]) -> list[str]:
    """A changed file that nobody knows of would leave the results of the old one in the cache."""
    known = {Path(path) for path in (*task.model.files, *task.data.files)}
    unknown = sorted(str(path.resolve()) for path in read if path.resolve() not in known)
    if not unknown:
        return []
    return [
        f"the model's code reads {', '.join(unknown)}; name it in model.files, or what is trained "
        "will not be trained again when it changes"
    ]


def first_events(index: Index, number: int = 2) -> Batch:
    """As a batch; BatchNorm needs two."""
    first = np.arange(min(number, index.num_events))
    return make_batch(index, Reader(index, index.fields).gather(first), len(first), CPU)


@contextmanager
def on_first_batch(task: TrainTask, index: Index) -> Iterator[None]:
    """Say of what is raised that it is of the first batch, and what that is."""
    try:
        yield
    except (Exception, SystemExit) as error:  # a user's model can raise anything
        plain = isinstance(error, N3LOError)
        if plain and str(error).startswith(("training.", "data.")):  # it names the key
            raise
        reason = str(error) if plain else describe(error, model_file(task.model))
        raise N3LOError(
            f"model '{name_of(task)}' fails on the first batch: {reason}; "
            f"inputs are {shapes(index.inputs)}, targets are {shapes(index.targets)}"
        ) from error


def try_model(task: TrainTask, experiment: Experiment, index: Index, batch: Batch) -> list[str]:
    """Model, loss and metrics on the first events, and the targets of all; warnings about them.

    Raises:
        N3LOError: they fail, or do not suit each other.
    """
    warnings: list[str] = []
    if isinstance(experiment, Supervised):
        network, losses = experiment.networks["model"], experiment.losses
        with on_first_batch(task, index):
            outputs = call_model(task, experiment, index, batch)
            suited.check_no_weights(outputs, index)
            suited.check_outputs(losses, outputs, batch.targets, batch.num_events)
            suited.check_mean(losses, outputs, batch)
        own_names = [
            each["name"] if isinstance(each, dict) else each for each in task.training.metrics
        ]
        warnings += suited.check_values(losses, own_names, outputs, index)
        if type(experiment) is Supervised:  # other frameworks say it in their words
            warnings += suited.of_outputs(losses, outputs, batch.targets)
        with on_first_batch(task, index):
            warnings += mistakes.of_gradient(network, experiment.loss(outputs, batch))
    with on_first_batch(task, index):
        with torch.no_grad():
            experiment.try_validation(batch)
        updates = experiment.updates(experiment.networks, batch)  # with gradients, as in a training
        experiment.means(sum((each.sums for each in updates), experiment.no_sums()))
    return warnings


def call_model(task: TrainTask, experiment: Supervised, index: Index, batch: Batch) -> Any:
    """What the model gives, as in a training; if it fails, with what the failing layer got."""
    network = experiment.networks["model"]
    with mistakes.Watch(network).watching() as watch:
        try:
            outputs = experiment.forward(network, batch.inputs)
        except N3LOError:
            raise
        except Exception as error:  # a user's model can raise anything
            reason = mistakes.explain(watch, mistakes.names_of(index.inputs), batch.inputs)
            if reason is None:
                raise
            raise N3LOError(reason) from error
    if task.layout.gpus_per_rank > 0 and type(experiment) is Supervised:
        mistakes.check_device(watch, model_file(task.model))
    return outputs


def name_of(task: TrainTask) -> str:
    return task.model.source.rpartition(":")[2]


# -- whether ranks can share the model -------------------------------------------------------------


def change_layers(task: TrainTask, experiment: Experiment) -> None:
    """What strategies change in the layers of a network, on a copy."""
    training = task.training
    for network in experiment.networks.values():
        if training.sync_batchnorm:
            synchronise(copy.deepcopy(network), lambda vector: vector)
        if training.recompute:
            recompute(copy.deepcopy(network), training.recompute)


def divide(task: TrainTask, experiment: Experiment, batch: Batch, largest_batch: int) -> None:
    """See that the model can be divided as the strategy will do it.

    Raises:
        N3LOError: it cannot; the text says what would work.
    """
    strategy = task.training.strategy
    if strategy not in DIVIDE:
        return
    size = -(-largest_batch // task.training.split.micro_batches)
    if strategy == "pipeline":
        batch = batch.part(0, size)
    if len(experiment.networks) > 1 and DIVIDE[strategy] is not in_units:
        one_network(task)
    try:
        DIVIDE[strategy](task, experiment, batch)
    except N3LOError:
        raise
    except Exception as error:  # a user's model can raise anything
        raise N3LOError(
            f"training.strategy: '{strategy}' cannot divide this model: "
            f"{describe(error, model_file(task.model))}; use 'sharded' or 'allreduce'"
        ) from error


# What follows is imported only where it is needed: it takes its time.


def one_network(task: TrainTask) -> None:
    """Only layers of a network that is called with the inputs are divided."""
    model, strategy = task.model.source.rpartition(":")[2], task.training.strategy
    if strategy in ("tensor", "pipeline"):
        raise N3LOError(
            f"training.strategy: '{strategy}' divides one network, and '{model}' has several; use "
            "'sharded' or 'allreduce'"
        )
    if task.layout.gpus_per_rank > 1:
        raise N3LOError(
            f"layout.gpus_per_rank: several GPUs divide one network, and '{model}' has several; "
            "use 'sharded' or 'allreduce' with one GPU for each rank"
        )


def over_gpus(task: TrainTask, experiment: Experiment, batch: Batch) -> None:
    """Consecutive layers on each of several GPUs of a rank."""
    if task.layout.gpus_per_rank > 1:
        from apps.strategies import stages

        traced = stages.trace(experiment.networks["model"], batch.inputs, stages.GPUS)
        stages.cut(traced, _no_costs(traced), task.layout.gpus_per_rank, "layout.gpus_per_rank")


def in_layers(task: TrainTask, experiment: Experiment, batch: Batch) -> None:
    """Columns or rows of layers on each rank of a worker."""
    _plan(task, experiment, batch.inputs, task.ranks.per_worker)


def in_stages(task: TrainTask, experiment: Experiment, batch: Batch) -> None:
    """Consecutive layers on each rank, or on ranks that divide them again.

    Whether there are enough places to cut does not depend on what the layers cost.
    """
    from apps.strategies import stages

    ranks, names = task.ranks, task.training.split.stages
    num_stages = ranks.per_worker // ranks.per_stage
    with experiment.autocast(CPU):
        traced = stages.trace(experiment.networks["model"], batch.inputs)
    if names:
        stages.cut_at(traced, names, num_stages)
    else:
        stages.cut(traced, _no_costs(traced), num_stages)
    if ranks.per_stage > 1:
        _plan(task, experiment, batch.inputs, ranks.per_stage, asked_by="layout.ranks_per_stage")


def in_units(task: TrainTask, experiment: Experiment, batch: Batch) -> None:
    """Every rank of a worker keeps a part of each weight."""
    from apps.strategies.sharded import check_parameters, units

    def rehearse() -> None:
        experiment.rehearse(batch)

    for network in experiment.networks.values():
        check_parameters(network, units(network, rehearse, task.training.split.unit_parameters))


DIVIDE = {
    "local": over_gpus,
    "allreduce": over_gpus,
    "tensor": in_layers,
    "pipeline": in_stages,
    "sharded": in_units,
}


def _plan(
    task: TrainTask, experiment: Experiment, inputs: Any, num_ranks: int, **asked_by: str
) -> None:
    from apps.strategies import tensor_plan

    for network in experiment.networks.values():
        tensor_plan.plan_of(network, inputs, num_ranks, task.training.split.tensor, **asked_by)


def _no_costs(traced: Any) -> list[float]:
    return [0.0] * len(traced.nodes)


# -- what is allowed, but seldom meant -------------------------------------------------------------


def of_the_schedule(task: TrainTask) -> Iterator[str]:
    *before, last = task.training.phases or [{}]
    epochs = sum(phase["epochs"] for phase in before)
    if epochs >= task.training.epochs:
        yield (
            f"training.scheduler: '{last['name']}' never begins: there are {task.training.epochs} "
            f"epochs, and {epochs} before it"
        )


def of_the_ranks(task: TrainTask, largest_batch: int) -> Iterator[str]:
    training, ranks = task.training, task.ranks
    if averages_weights(training) and ranks.workers == 1 and ranks.per_worker > 1:
        yield (
            "training.reduction.average_every changes nothing: workers average their weights, and "
            f"there is one; to let {ranks.per_worker} train apart set layout.num_workers = "
            f"{ranks.per_worker} and ranks_per_worker = 1"
        )
    micro_batches = training.split.micro_batches
    if training.strategy == "pipeline" and micro_batches > largest_batch:
        yield (
            f"training.split.micro_batches: of {micro_batches} some are empty, as batches have "
            f"{largest_batch} events; set it to at most {largest_batch}"
        )


def of_batch_norm(task: TrainTask, experiment: Experiment) -> Iterator[str]:
    """BatchNorm takes its statistics from the events that pass a layer together."""
    training, ranks = task.training, task.ranks
    layers = [each for network in experiment.networks.values() for each in network.modules()]
    plain = [isinstance(each, _BatchNorm) and type(each) is not nn.SyncBatchNorm for each in layers]
    if not any(plain):
        if training.sync_batchnorm:
            yield "training.sync_batchnorm changes nothing: the model has no BatchNorm"
        return
    apart = training.strategy in CENTRAL or averages_weights(training)
    together = ranks.per_worker if apart else ranks.readers
    own = "BatchNorm takes its mean and variance from"
    if training.strategy == "pipeline":
        yield (
            f"{own} each of {training.split.micro_batches} micro-batches alone; fewer of them, or "
            "'sharded' with sync_batchnorm, take more events together; LayerNorm and GroupNorm do "
            "not depend on it"
        )
    elif together > 1 and not training.sync_batchnorm:
        way_out = "" if training.strategy in CENTRAL else "training.sync_batchnorm = true, or "
        yield (
            f"{own} the {training.batch_size} events of each of {together} ranks alone; {way_out}"
            "LayerNorm or GroupNorm would avoid it"
        )
    if training.accumulate > 1:
        yield (
            f"{own} one of the {training.accumulate} batches of an update at a time; LayerNorm or "
            "GroupNorm would avoid it"
        )


# -- the data --------------------------------------------------------------------------------------


def count_non_finite(index: Index) -> dict[str, int]:
    """How many numbers of each field are nan or inf, as the model gets them.

    Reads everything once, block by block.

    Raises:
        N3LOError: values do not suit a step of `data.transforms`.
    """
    counts = dict.fromkeys((field.text for field in index.fields), 0)
    reader = Reader(index, index.fields)
    for first, end in pairwise(index.block_starts):
        arrays = reader.gather(np.arange(first, end))
        for field, array in zip(index.fields, arrays, strict=True):
            if field.steps:
                array = transformed(field, tensor_of(field, array, CPU)).numpy()
            counts[field.text] += int(array.size - np.isfinite(array).sum())
    return counts


def describe_fields(fields: Fields) -> dict[str, dict[str, Any]]:
    """Shape of one event, and type in the model."""
    forms = [(field.text, *form(field)) for field in fields.members]
    return {text: {"shape": list(shape), "dtype": dtype} for text, shape, dtype in forms}


def shapes(fields: Fields) -> str:
    """Of a batch of B events, as a person writes them."""
    of_events = [form(field)[0] for field in fields.members]
    written = [
        f"({', '.join(['B', *map(str, shape)])}{'' if shape else ','})" for shape in of_events
    ]
    if fields.kind == "one":
        return written[0]
    names = [field.name for field in fields.members]
    return ", ".join(f"{name} {shape}" for name, shape in zip(names, written, strict=True))


if __name__ == "__main__":
    main()
