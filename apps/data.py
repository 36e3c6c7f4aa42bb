"""From data files to batches: the folds, the order of an epoch, and each rank's part of it."""

from __future__ import annotations

import dataclasses
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from apps.contract import Data, N3LOError, TrainTask
from apps.hdf5 import Index, Reader, index_files
from apps.transforms import Scale, fit, tensor_of, transformed

T = TypeVar("T")

Array = np.ndarray | torch.Tensor

MOST_CLASSES = 100  # integer targets with more distinct values are taken for numbers
MOST_TOLD = 4  # folds that lack a class, in a line
MIXED_EVENTS = 1024  # about so many are shuffled together, and read at once
BATCHES_AHEAD = 16
VALIDATION_FACTOR = 4  # validation batches are larger: they keep no gradient


@dataclass(frozen=True)
class Batch:
    """One rank's part of a step.

    Inputs and targets are a tensor, or a list or table of tensors, as the study names its fields.
    """

    inputs: Any  # (B, ...)
    targets: Any  # (B, ...)
    num_events: int  # B, of this rank
    num_global: int  # of all ranks that share the step
    weights: torch.Tensor | None = None  # (B,), with mean 1 over the training events; None = 1 each

    @property
    def tensors(self) -> list[torch.Tensor]:
        of_weights = () if self.weights is None else (self.weights,)
        return tree_leaves((self.inputs, self.targets, *of_weights))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """The same with each tensor changed."""
        inputs, targets = tree_map(change, (self.inputs, self.targets))
        weights = None if self.weights is None else change(self.weights)
        return dataclasses.replace(self, inputs=inputs, targets=targets, weights=weights)

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        return self.map(lambda each: each.to(device))

    def part(self, first: int, end: int) -> Batch:
        """Some of its events, of the same step."""
        return dataclasses.replace(self.map(lambda each: each[first:end]), num_events=end - first)

    def cut(self, num_pieces: int) -> list[Batch]:
        """Pieces that differ by at most one event and together are the same step."""
        if num_pieces == 1:
            return [self]
        ends = [number * self.num_events // num_pieces for number in range(num_pieces + 1)]
        return [self.part(first, end) for first, end in pairwise(ends)]


def rows_of(values: Any, first: int, end: int) -> Any:
    """Some events of a tensor, or of each tensor in a list or table."""
    if isinstance(values, dict):
        return {name: value[first:end] for name, value in values.items()}
    if isinstance(values, list):
        return [value[first:end] for value in values]
    return values[first:end]


@dataclass(frozen=True)
class Preview:
    """What can be said of the batches of a rank before the first."""

    example: Callable[[int], Batch]  # so many events, on the CPU
    num_steps: int  # updates in an epoch
    largest_batch: int  # events, of what is read at once
    chosen: Mapping[str, Any] = field(default_factory=dict)  # by an earlier attempt: `choices`


# -- folds -----------------------------------------------------------------------------------------


def prepare(data: Data, split_seed: int) -> tuple[Index, np.ndarray]:
    """Index the files and split their events: what rank 0 does for all.

    Returns:
        The index, and the fold of each event, (events,): fold k validates on the events whose
        number is k and trains on the others. Where there is one fold, 1 stands for training.
        An event of fold k that no fold trains on (`train_fraction`) has ~k = -1 - k.
    """
    index = index_files(data)
    rng = np.random.default_rng(split_seed)
    split = _split_files if data.fold_by == "files" else _split_events
    fold, kind = split(data, index, rng)
    return index, np.where(_first_part(kind, data.train_fraction, rng), fold, ~fold)


def prepare_fold(data: Data, split_seed: int, fold: int) -> tuple[Index, np.ndarray]:
    """As `prepare`, with the transforms fitted to the events that are trained on in this fold.

    So are weights: their mean over these events is 1, and the learning rate means the same.
    """
    index, fold_of_event = prepare(data, split_seed)
    index = fit(index, data.transforms, trains(fold_of_event, fold))
    if index.weights is not None:
        mean = mean_weights(index, fold_of_event, data.folds)[fold]
        weights = dataclasses.replace(index.weights, steps=(Scale(by=1 / mean),))
        index = dataclasses.replace(index, weights=weights)
    return index, fold_of_event


def mean_weights(index: Index, fold_of_event: np.ndarray, folds: int) -> list[float]:
    """Of the training events of each fold.

    Raises:
        N3LOError: weights are not finite, or those of one part of a fold do not add up to more
            than 0, so that they have no mean to divide by.
    """
    with closing(Reader(index, [index.weights])) as reader:
        (stored,) = reader.gather(np.arange(index.num_events))
    weights = stored.reshape(-1).astype(np.float64)
    where = f"data.weights: '{index.weights.text}'"
    odd = np.flatnonzero(~np.isfinite(weights))
    if len(odd) > 0:
        raise N3LOError(
            f"{where} holds {len(odd)} values that are not finite (nan or inf), the first in event "
            f"{odd[0]} of all files; leave such events out"
        )
    for fold in range(folds):
        for part, is_in in (("training", trains), ("validation", validates)):
            total = weights[is_in(fold_of_event, fold)].sum()
            if not total > 0:
                raise N3LOError(
                    f"{where} adds up to {total:g} over the {part} events of fold {fold}, which "
                    "must be above 0; take more events, or fewer folds"
                )
    return [float(weights[trains(fold_of_event, fold)].mean()) for fold in range(folds)]


def validates(fold_of_event: np.ndarray, fold: int) -> np.ndarray:
    """Whether an event validates in this fold, (events,)."""
    return (fold_of_event == fold) | (fold_of_event == ~fold)


def trains(fold_of_event: np.ndarray, fold: int) -> np.ndarray:
    """Whether an event is trained on in this fold, (events,)."""
    return (fold_of_event >= 0) & (fold_of_event != fold)


def class_of_event(index: Index) -> np.ndarray | None:
    """The class of each event, (events,), if the targets are classes: integers, or one-hot."""
    field = index.targets.members[0]
    numbered = field.dtype == np.int64
    one_hot = len(field.shape) == 1 and 2 <= field.shape[0] <= MOST_CLASSES
    if index.targets.kind != "one" or not (numbered or one_hot):
        return None
    (values,) = Reader(index, [field]).gather(np.arange(index.num_events))
    if numbered:
        classes, of_event = np.unique(values, return_inverse=True)
        return of_event if len(classes) <= MOST_CLASSES else None
    is_one_hot = np.isin(values, (0, 1)).all() and (values.sum(axis=1) == 1).all()
    return values.argmax(axis=1) if is_one_hot else None


def label_of_event(index: Index) -> np.ndarray | None:
    """The class of each event, (events,), also where two classes are told by any two numbers.

    What is not finite is no class, and stays.
    """
    field = index.targets.members[0]
    if index.targets.kind != "one" or math.prod(field.shape) != 1:
        return class_of_event(index)
    with closing(Reader(index, [field])) as reader:
        labels = reader.gather(np.arange(index.num_events))[0].reshape(-1)
    most = MOST_CLASSES if field.dtype == np.int64 else 2
    return labels if len(_classes(labels)) <= most else None


def _classes(labels: np.ndarray) -> np.ndarray:
    return np.unique(labels[np.isfinite(labels)])


def lacking_classes(data: Data, index: Index, fold_of_event: np.ndarray) -> Iterator[str]:
    """Warnings of folds that lack a class, and of targets that are all the same."""
    labels = label_of_event(index)
    if labels is None:
        return
    classes = _classes(labels)
    if len(classes) == 1:
        yield f"data.targets: all events are {classes[0]:g}, so that there is nothing to learn"
        return
    for purpose, is_in in (("learn from", trains), ("validate on", validates)):
        lacking = [
            f"fold {fold} has none of class {label:g}"
            for fold in range(data.folds)
            for label in np.setdiff1d(classes, labels[is_in(fold_of_event, fold)])
        ]
        if lacking:
            more = f" and {len(lacking) - MOST_TOLD} more" if len(lacking) > MOST_TOLD else ""
            yield f"events to {purpose}: {', '.join(lacking[:MOST_TOLD])}{more}; {_mend(data)}"


def _mend(data: Data) -> str:
    """Of folds that lack a class."""
    if data.fold_by == "files":
        return 'data.fold_by = "events" deals the events of each class to all folds'
    if data.stratify is False:
        return "without data.stratify = false each fold has its share"
    return "take fewer folds, or more events of it"


def _split_events(
    data: Data, index: Index, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Deal the events to the folds: at random, or in equal shares of each class.

    Sorted by class and at random within one, every K-th event goes to the same fold.

    Returns:
        The fold of each event, and a number for its fold and class, (events,) each.
    """
    if data.folds > index.num_events:
        raise N3LOError(f"data.folds: {data.folds} folds are more than {index.num_events} events")
    classes = None if data.stratify is False else class_of_event(index)
    if data.stratify and classes is None:
        raise N3LOError("data.stratify: the targets are not classes (integers, or one-hot)")
    if classes is None:
        classes = np.zeros(index.num_events, np.int64)
    order = np.lexsort((rng.permutation(index.num_events), classes))
    position = np.arange(index.num_events)
    fold = np.empty(index.num_events, np.int32)
    if data.folds > 1:
        fold[order] = position % data.folds
        return fold, classes * data.folds + fold
    # Event i validates where the rounded running sum of the fraction steps up.
    sums = np.floor(np.arange(index.num_events + 1) * data.validation_fraction + 0.5)
    fold[order] = 1 - np.diff(sums)
    if (fold == 1).all():
        raise N3LOError(
            f"data.validation_fraction: {data.validation_fraction} of {index.num_events} events "
            "leaves none to validate on"
        )
    return fold, classes * 2 + fold


def _split_files(
    data: Data, index: Index, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Deal whole files, the largest first, each to the fold with the fewest events.

    Returns:
        The fold of each event, and the number of its file, (events,) each.
    """
    num_files = len(index.files)
    num_folds = (
        data.folds if data.folds > 1 else min(num_files, round(1 / data.validation_fraction))
    )
    if data.stratify:
        raise N3LOError("data.stratify: whole files cannot be split by class; set it to false")
    if not 2 <= num_folds <= num_files:
        raise N3LOError(f"data.folds: {max(2, num_folds)} folds are more than {num_files} files")
    events = np.array(index.file_events)
    fold_of_file = np.empty(num_files, np.int32)
    load = np.zeros(num_folds, np.int64)
    for file in np.lexsort((rng.permutation(num_files), -events)):
        fold_of_file[file] = load.argmin()
        load[fold_of_file[file]] += events[file]
    fold = np.repeat(fold_of_file, events)
    file_of_event = np.repeat(np.arange(num_files), events)
    return fold if data.folds > 1 else np.minimum(fold, 1), file_of_event


def _first_part(kind: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Whether an event is in the first `fraction` of its kind, in a random order, (events,).

    The order does not depend on the fraction, so a larger one takes more and leaves none out.
    """
    _, kind, sizes = np.unique(kind, return_inverse=True, return_counts=True)
    order = np.lexsort((rng.permutation(len(kind)), kind))
    place = np.empty(len(kind))
    place[order] = np.concatenate([np.arange(size) for size in sizes])
    # Kinds round up at different fractions, so that their sum is right where all are small.
    offset = (rng.permutation(len(sizes)) + 0.5) / len(sizes)
    return place + offset[kind] < fraction * sizes[kind]


# -- the order of an epoch -------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Which events each lane trains on in one epoch, in which order, and where batches end."""

    lanes: list[list[np.ndarray]]  # [lane][group]: event numbers; a group is read at once
    ends: np.ndarray  # (lanes, steps): events of the lane up to the end of that step
    _in_order: dict[int, np.ndarray] = field(default_factory=dict)  # lanes that were asked for

    @property
    def num_steps(self) -> int:
        return self.ends.shape[1]

    @cached_property
    def batch_sizes(self) -> np.ndarray:
        """(lanes, steps)"""
        return np.diff(self.ends, axis=1, prepend=0)

    def events(self, lane: int, step: int) -> np.ndarray:
        """Those of one step of a lane, (B,)."""
        first = self.ends[lane, step - 1] if step else 0
        if lane not in self._in_order:
            self._in_order[lane] = np.concatenate(self.lanes[lane])
        return self._in_order[lane][first : self.ends[lane, step]]


def plan_epoch(
    blocks: np.ndarray,
    is_training: np.ndarray,
    num_lanes: int,
    batch_size: int,
    rng: np.random.Generator | None,
    at_least: int = 1,
) -> Plan:
    """The order of one epoch, the same on every rank that asks with the same arguments.

    A lane is what one rank reads; several lanes in one rank reproduce as many ranks. All lanes
    must do the same number of steps, or ranks would wait for each other for ever; no event may be
    lost or used twice to get there; and each rank must know the size of the global batch without
    asking, for the exact mean of the gradient. So the training events are laid in one line, block
    by block, cut into lanes that differ by at most one event, and every lane is cut into the same
    number of batches, which again differ by at most one. That is why batches are slightly smaller
    than `batch_size`, rather than all full but the last.

    Reading stays sequential within a block, so blocks are shuffled, and then the events of about
    `MIXED_EVENTS` in consecutive blocks.

    Args:
        blocks: first event of each block and the end of the last, (blocks + 1,).
        is_training: whether an event is to be trained on, (events,).
        batch_size: the most events of a lane in a step (one more, where it is 1 and lanes differ).
        rng: where the shuffling comes from; None leaves the events in the order of the files.
        at_least: events of a lane in a step.
    """
    runs = [first + np.flatnonzero(is_training[first:end]) for first, end in pairwise(blocks)]
    if rng is not None:
        runs = [runs[block] for block in rng.permutation(len(runs))]
    line = np.concatenate(runs)
    if len(line) < num_lanes * at_least:
        each = f", with {at_least} batches in an update" if at_least > 1 else ""
        raise N3LOError(
            f"data: {len(line)} training events are too few for {num_lanes} ranks{each}"
        )
    mixed_blocks = max(2, MIXED_EVENTS // max(1, int(np.diff(blocks).max())))
    group = np.repeat(np.arange(len(runs)) // mixed_blocks, [len(run) for run in runs])
    cuts = np.arange(num_lanes + 1) * len(line) // num_lanes
    lanes = [_groups(line[first:end], group[first:end], rng) for first, end in pairwise(cuts)]
    sizes = np.diff(cuts)
    num_steps = steps_of(sizes, batch_size, at_least)
    ends = np.arange(1, num_steps + 1) * sizes[:, None] // num_steps
    return Plan(lanes=lanes, ends=ends)


def steps_of(sizes: np.ndarray, batch_size: int, at_least: int) -> int:
    """How many steps lanes of these many events are cut into."""
    return int(min(-(-sizes.max() // batch_size), sizes.min() // at_least))


def plan_of(
    task: TrainTask, index: Index, is_training: np.ndarray, num_ranks: int, epoch: int
) -> Plan:
    """The plan of a task's epoch, from 1.

    Args:
        num_ranks: that read batches of their own.
    """
    training = task.training
    lanes = training.lanes or num_ranks
    if lanes % num_ranks:
        raise N3LOError(f"training.lanes: {lanes} is not a multiple of the {num_ranks} ranks")
    rng = np.random.default_rng((task.seed, epoch)) if task.data.shuffle else None
    size = training.batch_size * training.accumulate
    return plan_epoch(index.block_starts, is_training, lanes, size, rng, training.accumulate)


def _groups(
    events: np.ndarray, group: np.ndarray, rng: np.random.Generator | None
) -> list[np.ndarray]:
    groups = np.split(events, np.flatnonzero(np.diff(group)) + 1)
    return groups if rng is None else [rng.permutation(members) for members in groups]


# -- batches ---------------------------------------------------------------------------------------


class Source(Protocol):
    """Gives events by their numbers, one array a field."""

    def gather(self, events: np.ndarray) -> list[np.ndarray]: ...


class InMemory:
    """All events, read once."""

    def __init__(self, index: Index) -> None:
        reader = Reader(index, index.fields)
        self._arrays = [
            np.empty((index.num_events, *field.shape), field.stored) for field in index.fields
        ]
        for first, end in pairwise(index.block_starts):
            for array, values in zip(
                self._arrays, reader.gather(np.arange(first, end)), strict=True
            ):
                array[first:end] = values
        reader.close()

    def gather(self, events: np.ndarray) -> list[np.ndarray]:
        return [array[events] for array in self._arrays]


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of the data one rank reads."""

    rank: int | None  # among the ranks that train; None reads nothing
    num_ranks: int  # that train
    group_size: int  # ranks that share a step: those of one worker, or all
    node_ranks: int = 1  # that train on this node


class FoldBatches:
    """The batches of one rank for one fold: the same ones from memory and from the files.

    Args:
        fold_of_event: from `prepare`.
    """

    def __init__(
        self,
        task: TrainTask,
        index: Index,
        fold_of_event: np.ndarray,
        share: Share,
        device: torch.device,
    ) -> None:
        self.share = share
        self.device = device
        self.index = index
        self._task = task
        self._is_training = trains(fold_of_event, task.fold)
        self._is_validation = validates(fold_of_event, task.fold)
        self.num_train = int(self._is_training.sum())
        self.num_val = int(self._is_validation.sum())
        if self.num_val < share.num_ranks:
            raise N3LOError(
                f"data: {self.num_val} validation events are too few for {share.num_ranks} ranks"
            )

    @cached_property
    def in_memory(self) -> bool:
        return _fits(self._task.data, self.index, self.share.node_ranks)

    @cached_property
    def source(self) -> Source:
        return InMemory(self.index) if self.in_memory else Reader(self.index, self.index.fields)

    def preview(self, chosen: Mapping[str, Any] | None = None) -> Preview:
        training, readers = self._task.training, self.share.num_ranks
        lanes = training.lanes or readers
        sizes = np.diff(np.arange(lanes + 1) * self.num_train // lanes)
        steps = steps_of(sizes, training.batch_size * training.accumulate, training.accumulate)
        largest = lanes // readers * -(-int(sizes.max()) // steps)
        return Preview(self._example, steps, largest, chosen or {})

    def _example(self, num_events: int) -> Batch:
        """The first events that are trained on, again from the first if there are too few."""
        trained = np.flatnonzero(self._is_training)[:num_events]
        events = np.resize(trained, num_events)
        with closing(Reader(self.index, self.index.fields)) as reader:  # masters read no more
            arrays = reader.gather(events)
        return make_batch(self.index, arrays, len(events), torch.device("cpu"))

    def training(self, epoch: int) -> Epoch:
        """Every event that is trained on once, over all ranks; `epoch` counts from 1."""
        ranks = self.share.num_ranks
        return Epoch(self, plan_of(self._task, self.index, self._is_training, ranks, epoch))

    def validation(self, part: int | None, num_parts: int) -> Iterator[Batch]:
        """Every validation event once, over all parts; a contiguous share in each.

        All parts have as many batches, for strategies whose ranks meet in each.
        """
        if part is None:
            return
        events = np.flatnonzero(self._is_validation)
        first, end = np.arange(part, part + 2) * len(events) // num_parts
        largest = -(-len(events) // num_parts)
        num_batches = -(-largest // (VALIDATION_FACTOR * self._task.training.batch_size))
        shares = np.array_split(events[first:end], num_batches)
        for arrays in self.ahead(self.source.gather(share) for share in shares):
            yield make_batch(self.index, arrays, len(arrays[0]), self.device)

    def ahead(self, items: Iterator[list[np.ndarray]]) -> Iterator[list[Array]]:
        """The same arrays, read beside the training where that takes time.

        For a GPU they lie in pinned memory, so that the process need not wait for the copy.
        """
        if self.device.type == "cuda":
            return read_ahead(map(_pinned, items), BATCHES_AHEAD)
        return items if self.in_memory else read_ahead(items, BATCHES_AHEAD)


class Epoch:
    """The batches of one epoch as one rank reads them: its own in order, or any one asked for.

    A step of a worker is the batches of its ranks, each from the lanes of that rank.
    """

    def __init__(self, data: FoldBatches, plan: Plan) -> None:
        self._data, self._plan = data, plan
        self._served = len(plan.lanes) // data.share.num_ranks  # lanes of a rank
        self._own: Iterator[list[np.ndarray]] | None = None
        self._next = 0

    @property
    def num_steps(self) -> int:
        """Of each worker."""
        return self._plan.num_steps

    def __iter__(self) -> Iterator[Batch]:
        worker = self._data.share.rank // self._data.share.group_size
        for step in range(self.num_steps):
            yield self.batch(worker, step)

    def batch(self, worker: int, step: int) -> Batch:
        """This rank's part of a step of some worker; its own ones in order are read ahead."""
        share = self._data.share
        own, member = divmod(share.rank, share.group_size)
        first = worker * share.group_size * self._served
        group = range(first, first + share.group_size * self._served)
        lanes = group[member * self._served : (member + 1) * self._served]
        if worker == own and step == self._next:
            if self._own is None:
                self._own = self._data.ahead(self._stream(lanes))
            arrays = next(self._own)
            self._next += 1
        else:
            arrays = self._gathered(lanes, step)
        num_global = int(self._plan.batch_sizes[group, step].sum())
        return make_batch(self._data.index, arrays, num_global, self._data.device)

    def _gathered(self, lanes: range, step: int) -> list[np.ndarray]:
        events = [self._plan.events(lane, step) for lane in lanes]
        return self._data.source.gather(np.concatenate(events))

    def _stream(self, lanes: range) -> Iterator[list[np.ndarray]]:
        source, plan = self._data.source, self._plan
        if self._data.in_memory:
            return (self._gathered(lanes, step) for step in range(plan.num_steps))
        streams = [_cut(source, plan.lanes[lane], plan.batch_sizes[lane]) for lane in lanes]
        return (_joined(parts) for parts in zip(*streams, strict=True))


def make_batch(index: Index, arrays: list[Array], num_global: int, device: torch.device) -> Batch:
    """From the arrays of all fields to the tensors of a step, after the transforms."""
    tensors = [
        transformed(field, tensor_of(field, array, device))
        for array, field in zip(arrays, index.fields, strict=True)
    ]
    weights = None if index.weights is None else tensors.pop().flatten()
    num_inputs = len(index.inputs.members)
    return Batch(
        inputs=index.inputs.pack(tensors[:num_inputs]),
        targets=index.targets.pack(tensors[num_inputs:]),
        num_events=len(arrays[0]),
        num_global=num_global,
        weights=weights,
    )


def _pinned(arrays: list[np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(array).pin_memory() for array in arrays]


def read_ahead(items: Iterator[T], depth: int) -> Iterator[T]:
    """The same items, made by a thread that is up to `depth` of them ahead.

    What the thread raises is raised here; it ends with the iterator.
    """
    end = object()
    reader = ThreadPoolExecutor(max_workers=1)
    try:
        pending = deque(reader.submit(next, items, end) for _ in range(depth))
        while (item := pending.popleft().result()) is not end:
            pending.append(reader.submit(next, items, end))
            yield item
    finally:
        reader.shutdown(cancel_futures=True)


def _cut(source: Source, groups: list[np.ndarray], sizes: np.ndarray) -> Iterator[list[np.ndarray]]:
    """The events of a lane, so many at a time, from groups that are read whole."""
    unread = iter(groups)
    held = source.gather(next(unread))
    for size in sizes:
        parts = []
        while size > 0:
            if len(held[0]) == 0:
                held = source.gather(next(unread))
            parts.append([array[:size] for array in held])
            held = [array[size:] for array in held]
            size -= len(parts[-1][0])
        yield _joined(parts)


def _joined(parts: Sequence[list[np.ndarray]]) -> list[np.ndarray]:
    """Field by field, one part after the other."""
    return (
        parts[0]
        if len(parts) == 1
        else [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
    )


def _fits(data: Data, index: Index, node_ranks: int) -> bool:
    needed = index.num_events * sum(field.event_bytes for field in index.fields)
    if data.memory_gb is not None:
        return needed <= data.memory_gb * 1e9
    return needed <= _free_memory_bytes() / 4 / node_ranks


def _free_memory_bytes() -> int:
    """What can be had without swapping; where the system does not tell, all there is."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
