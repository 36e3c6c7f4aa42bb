"""What `data.transforms` does to a field between the files and the model.

Steps are functions of a batch's values, (B, ...), on the device. Two of them, `normalise` and
`min_max`, take numbers from the data: only from the events that are trained on in this fold, so
that validation tells nothing of itself. Rank 0 finds the numbers; they go with the index to the
others, and to `transforms.json`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from apps.contract import N3LOError, Plain, Steps, read_json
from apps.formats import stacked_names
from apps.hdf5 import Field, Fields, Index, Reader

Kept = Mapping[str, Steps]  # by field, with the numbers of fitted steps

CPU = torch.device("cpu")
MOST_NAMES = 5  # of columns, in a message


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step; its fields are the arguments that a study may give.

    Raises:
        ValueError: an argument is wrong, or the values do not suit the step.
    """

    name: ClassVar[str]

    def __call__(self, values: Tensor) -> Tensor:
        """From (B, ...) to (B, ...), for any number of events."""
        raise NotImplementedError


# -- steps that take numbers from the training events ----------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fitted(Step):
    """(x - shift) / width, with numbers for each feature, each cell, or all values together.

    A feature is a place on the last axis. A number that does not vary gets width 1.
    """

    per: str = "feature"
    ignore: float | None = None  # takes no part, and stays; of rows of features, where all have it
    shift: Any = None  # a number, or nested lists; None = not fitted
    width: Any = None
    _on: dict[torch.device, list[Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        _require(
            self.per in ("feature", "cell", "all"), f"per = {self.per!r}: feature, cell or all"
        )
        if self.ignore is not None:
            _check_number("ignore", self.ignore)

    def __call__(self, values: Tensor) -> Tensor:
        shift, rest, width = self._numbers(values.device)
        if not values.is_floating_point():  # float32 would round what is large before the shift
            values = values.double()
        moved = ((values - shift - rest) / width).float()
        return moved if self.ignore is None else torch.where(self._padding(values), values, moved)

    def fitted(self, batches: Iterable[Tensor]) -> Self:
        """With the numbers of these events.

        Raises:
            NotFinite: some values are.
        """
        found = Statistics()
        for values in batches:
            counts = torch.ones_like(values, dtype=torch.bool)
            if self.ignore is not None:
                counts &= ~self._padding(values)
            found.add(self._in_rows(values), self._in_rows(counts))
        shift, width = self._numbers_of(found)
        width = np.where(found.varies & (width > 0), width, 1.0)
        return dataclasses.replace(self, shift=shift.tolist(), width=width.tolist())

    def _numbers_of(self, found: Statistics) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError

    def _in_rows(self, values: Tensor) -> np.ndarray:
        """What shares a number lies along the first axis."""
        if self.per == "cell":
            return values.numpy()
        together = self.per == "all" or values.ndim == 1
        return (values.flatten() if together else values.flatten(0, -2)).numpy()

    def _padding(self, values: Tensor) -> Tensor:
        """Rows of features that an event lacks, (B, N, F); else, as of (B, F), single values."""
        ignored = values == self.ignore
        return ignored.all(dim=-1, keepdim=True) if self.by_row(values) else ignored

    def is_idle(self, batches: Iterable[Tensor]) -> bool:
        """Whether `ignore` is there and leaves nothing out; read as far as it takes to know."""
        is_there = False
        for values in batches:
            if self._padding(values).any():
                return False
            is_there = is_there or bool((values == self.ignore).any())
        return is_there

    def by_row(self, values: Tensor) -> bool:
        """Whether only whole rows of features are ignored, (B, N, F)."""
        return self.per == "feature" and values.ndim > 2

    def _numbers(self, device: torch.device) -> list[Tensor]:
        """In float32, and what is left of the shift: far from 0 its rounding would be seen."""
        if device not in self._on:  # a copy to a GPU for each batch would have it wait
            exact = (torch.tensor(each, dtype=torch.float64) for each in (self.shift, self.width))
            shift, width = exact
            rest = shift - shift.float().double()
            self._on[device] = [each.float().to(device) for each in (shift, rest, width)]
        return self._on[device]


class Normalise(Fitted):
    """(x - mean) / standard deviation: mean 0 and standard deviation 1 over the training events.

    The standard deviation is that of the population, with 1/n.
    """

    name = "normalise"

    def _numbers_of(self, found: Statistics) -> tuple[np.ndarray, np.ndarray]:
        return found.mean, np.sqrt(found.squares / np.maximum(found.count, 1))


class MinMax(Fitted):
    """(x - min) / (max - min): 0 to 1 over the training events; validation may lie outside."""

    name = "min_max"

    def _numbers_of(self, found: Statistics) -> tuple[np.ndarray, np.ndarray]:
        seen = found.count > 0
        return np.where(seen, found.low, 0.0), np.where(seen, found.high - found.low, 1.0)


class NotFinite(ValueError):
    """Values that numbers are to be taken from are nan or inf."""


class Statistics:
    """Count, mean, sum of squares around it, and extremes, over the first axis, in float64.

    Blocks are merged by Chan, Golub and LeVeque 1983 (doi:10.1080/00031305.1983.10483115): nothing
    cancels, however far the mean is from 0.
    """

    def __init__(self) -> None:
        self.count = self.mean = self.squares = np.zeros(())
        self.low, self.high = np.array(math.inf), np.array(-math.inf)

    @property
    def varies(self) -> np.ndarray:
        return self.high > self.low

    def add(self, values: np.ndarray, counts: np.ndarray) -> None:
        """Values and whether each counts, (n, ...) both.

        Raises:
            NotFinite: some that count are.
        """
        values = values.astype(np.float64)
        if (counts & ~np.isfinite(values)).any():
            raise NotFinite
        count = counts.sum(axis=0)
        mean = np.where(counts, values, 0).sum(axis=0) / np.maximum(count, 1)
        squares = np.where(counts, (values - mean) ** 2, 0).sum(axis=0)
        total, apart = self.count + count, mean - self.mean
        share = count / np.maximum(total, 1)
        self.squares = self.squares + squares + apart**2 * self.count * share
        self.mean = self.mean + apart * share
        self.count = total
        self.low = np.minimum(self.low, np.where(counts, values, math.inf).min(axis=0))
        self.high = np.maximum(self.high, np.where(counts, values, -math.inf).max(axis=0))


# -- steps on each number --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Log(Step):
    """ln(max(x, floor)), with a floor above 0."""

    name = "log"
    floor: float

    def __post_init__(self) -> None:
        _check_number("floor", self.floor)
        _require(self.floor > 0, f"floor = {self.floor} is not above 0")

    def __call__(self, values: Tensor) -> Tensor:
        return values.clamp(min=self.floor).log()


@dataclass(frozen=True, kw_only=True)
class Log1p(Step):
    """ln(1 + x), for x of at least 0; exact where x is small."""

    name = "log1p"

    def __call__(self, values: Tensor) -> Tensor:
        return values.log1p()


@dataclass(frozen=True, kw_only=True)
class Clip(Step):
    """min(max(x, low), high); one of them may be left out."""

    name = "clip"
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        given = {"low": self.low, "high": self.high}
        for name, value in given.items():
            if value is not None:
                _check_number(name, value)
        _require(given != {"low": None, "high": None}, "needs low, high, or both")
        in_order = self.low is None or self.high is None or self.low <= self.high
        _require(in_order, f"low = {self.low} is above high = {self.high}")

    def __call__(self, values: Tensor) -> Tensor:
        return values.clamp(self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class Scale(Step):
    """x * by + offset"""

    name = "scale"
    by: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        _check_number("by", self.by)
        _check_number("offset", self.offset)

    def __call__(self, values: Tensor) -> Tensor:
        return values * float(self.by) + float(self.offset)


@dataclass(frozen=True, kw_only=True)
class Threshold(Step):
    """0 where x < below, else x: cells under the noise of a calorimeter."""

    name = "threshold"
    below: float

    def __post_init__(self) -> None:
        _check_number("below", self.below)

    def __call__(self, values: Tensor) -> Tensor:
        return values.masked_fill(values < self.below, 0)


@dataclass(frozen=True, kw_only=True)
class Replace(Step):
    """`by` where x is `value`; without `value`, where x is not finite (nan or inf)."""

    name = "replace"
    by: float
    value: float | None = None

    def __post_init__(self) -> None:
        _check_number("by", self.by)
        if self.value is not None:
            _check_number("value", self.value)

    def __call__(self, values: Tensor) -> Tensor:
        wrong = ~values.isfinite() if self.value is None else values == self.value
        return torch.where(wrong, self.by, values)


# -- steps on the shape; axes count that of the events, which is 0 ---------------------------------


@dataclass(frozen=True, kw_only=True)
class Crop(Step):
    """The middle `to` places of `axes`, or the `first` ones of one axis.

    Of an axis with s places, those from (s - to) // 2 on are kept. Without `axes` it is the first
    ones after that of the events.
    """

    name = "crop"
    to: list[int] | None = None
    first: int | None = None
    axes: list[int] | None = None

    def __post_init__(self) -> None:
        _require((self.to is None) != (self.first is None), "needs either 'to' or 'first'")
        if self.first is not None:
            _check_counts("first", [self.first])
        _check_axes(self.axes, self._sizes)

    @property
    def _sizes(self) -> list[int]:
        return [self.first] if self.to is None else self.to

    def __call__(self, values: Tensor) -> Tensor:
        for axis, size in _sized_axes(values, self.axes, self._sizes):
            there = values.shape[axis]
            _require(size <= there, f"{size} are more than the {there} of axis {axis}")
            start = 0 if self.to is None else (there - size) // 2
            values = values.narrow(axis, start, size)
        return values.contiguous()


@dataclass(frozen=True, kw_only=True)
class Pad(Step):
    """Put `value` after the last places of `axes`, so that there are `to` of them.

    Without `axes` it is the first ones after that of the events.
    """

    name = "pad"
    to: list[int]
    axes: list[int] | None = None
    value: float = 0.0

    def __post_init__(self) -> None:
        _check_axes(self.axes, self.to)
        _check_number("value", self.value)

    def __call__(self, values: Tensor) -> Tensor:
        missing = [0] * values.ndim
        for axis, size in _sized_axes(values, self.axes, self.to):
            there = values.shape[axis]
            _require(size >= there, f"to {size} are fewer than the {there} of axis {axis}")
            missing[axis] = size - there
        widths = [width for each in reversed(missing) for width in (0, each)]
        return functional.pad(values, widths, value=self.value)


@dataclass(frozen=True, kw_only=True)
class ChannelAxis(Step):
    """An axis of one channel: (B, ...) to (B, 1, ...), or with `at = "last"` to (B, ..., 1)."""

    name = "channel_axis"
    at: str = "first"

    def __post_init__(self) -> None:
        _require(self.at in ("first", "last"), f"at = {self.at!r}: first or last")

    def __call__(self, values: Tensor) -> Tensor:
        return values.unsqueeze(1 if self.at == "first" else -1)


@dataclass(frozen=True, kw_only=True)
class Transpose(Step):
    """The axes of an event in another order: [2, 1] is (B, 150, 16) to (B, 16, 150)."""

    name = "transpose"
    axes: list[int]

    def __post_init__(self) -> None:
        _check_counts("axes", self.axes)
        every = list(range(1, len(self.axes) + 1))
        _require(
            sorted(self.axes) == every,
            f"axes = {self.axes} are not all of {every} (axis 0, that of the events, stays)",
        )

    def __call__(self, values: Tensor) -> Tensor:
        axes = list(range(1, values.ndim))
        _require(len(self.axes) == len(axes), f"axes = {self.axes}, but there are {axes}")
        return values.permute(0, *self.axes).contiguous()


@dataclass(frozen=True, kw_only=True)
class Flatten(Step):
    """(B, ...) to (B, N), the last axis running fastest."""

    name = "flatten"

    def __call__(self, values: Tensor) -> Tensor:
        return values.reshape(len(values), math.prod(values.shape[1:]))


# -- classes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OneHot(Step):
    """The class numbers 0 to classes - 1, (B,) or (B, 1), as (B, classes) of 0 and one 1."""

    name = "one_hot"
    classes: int

    def __post_init__(self) -> None:
        _check_counts("classes", [self.classes])

    def __call__(self, values: Tensor) -> Tensor:
        numbers = _one_each(values)
        is_class = numbers[:, None] == torch.arange(self.classes, device=values.device)
        if values.device == CPU:  # a GPU would have to wait; `apps.check` has seen all events
            wrong = numbers[~is_class.any(dim=1)]
            if len(wrong) > 0:
                raise ValueError(
                    f"{wrong[0].item():g} is none of the classes 0 to {self.classes - 1}"
                )
        return is_class.float()


@dataclass(frozen=True, kw_only=True)
class ClassNumber(Step):
    """The place of the largest of (B, classes), as of one-hot; of (B,) or (B, 1) a whole number."""

    name = "class_number"

    def __call__(self, values: Tensor) -> Tensor:
        if values.ndim == 2 and values.shape[1] > 1:
            return values.argmax(dim=1)
        return _one_each(values).round().long()


STEPS: dict[str, type[Step]] = {
    each.name: each
    for each in (
        *(Normalise, MinMax, Log, Log1p, Clip, Scale, Threshold, Replace),
        *(Crop, Pad, ChannelAxis, Transpose, Flatten, OneHot, ClassNumber),
    )
}


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_number(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    _require(is_number, f"{name} = {value!r} is not a number")


def _check_counts(name: str, values: Any) -> None:
    are_counts = isinstance(values, list) and len(values) > 0
    are_counts = are_counts and all(type(each) is int and each >= 1 for each in values)
    _require(are_counts, f"{name} = {values!r}: whole numbers of at least 1")


def _check_axes(axes: Any, sizes: Any) -> None:
    _check_counts("to", sizes)
    if axes is not None:
        _check_counts("axes", axes)
        paired = len(set(axes)) == len(axes) == len(sizes)
        _require(paired, f"axes = {axes} must be {len(sizes)} different ones, one for each size")


def _sized_axes(
    values: Tensor, axes: list[int] | None, sizes: list[int]
) -> Iterator[tuple[int, int]]:
    axes = axes or list(range(1, len(sizes) + 1))
    there = list(range(1, values.ndim))
    for axis, size in zip(axes, sizes, strict=True):
        _require(axis in there, f"there is no axis {axis}, only {there or 'that of the events'}")
        yield axis, size


def _one_each(values: Tensor) -> Tensor:
    _require(math.prod(values.shape[1:]) == 1, "needs one number an event")
    return values.flatten()


# -- the steps of a study --------------------------------------------------------------------------


def fit(index: Index, transforms: Mapping[str, Steps], is_training: np.ndarray) -> Index:
    """The index with the steps of its fields, fitted to the events that are trained on.

    Args:
        transforms: by field, as in a study.
        is_training: whether an event is trained on in this fold, (events,).

    Raises:
        N3LOError: a field is not in the study, or a step does not suit it.
    """
    _check_names(index, transforms)

    def fitted(name: str, given: Field) -> tuple[Step, ...]:
        done: tuple[Step, ...] = ()
        for step in _parsed(name, transforms[name]):
            so_far = dataclasses.replace(given, steps=done)
            if isinstance(step, Fitted):
                with closing(Reader(index, [given])) as reader:
                    seen = partial(_events_of, reader, so_far, index, is_training)
                    step = _told(name, step, partial(_fitted, step, so_far, index), seen)
            _told(name, step, step, _example(so_far))
            done = (*done, step)
        return done

    return _with_steps(index, {name: fitted for name in transforms})


def idle_ignores(index: Index, is_training: np.ndarray) -> Iterator[str]:
    """Warnings of values that `ignore` leaves in, as only whole rows of features count for it."""
    for name, given in _named(index):
        for place, step in enumerate(given.steps):
            if not isinstance(step, Fitted) or step.ignore is None:
                continue
            so_far = dataclasses.replace(given, steps=given.steps[:place])
            if not step.by_row(_example(so_far)):
                continue
            with closing(Reader(index, [given])) as reader:
                is_idle = step.is_idle(
                    values for _, values in _events_of(reader, so_far, index, is_training)
                )
            if is_idle:
                yield (
                    f"data.transforms: '{name}': {step.name}: {step.ignore:g} is in no whole row "
                    'of features, so that ignore leaves nothing out; per = "cell" takes each value'
                )


def keep(index: Index) -> Kept:
    """The content of `transforms.json`: the steps of each field, with their numbers."""
    return {
        name: [_plain(step) for step in each.steps] for name, each in _named(index) if each.steps
    }


def kept(path: Path, transforms: Mapping[str, Steps]) -> Kept:
    """What `keep` has left of a task; nothing, where the study has no transforms.

    Raises:
        N3LOError: it is not there.
    """
    if not transforms:
        return {}
    try:
        content: Kept = read_json(path)
    except (OSError, ValueError) as error:
        raise N3LOError(
            f"{path}: the numbers of data.transforms cannot be read: {error}"
        ) from error
    return content


def with_kept(index: Index, content: Kept) -> Index:
    """The index with the steps that a task has kept: the numbers of its training, on any files."""
    return _with_steps(index, {name: lambda key, _: _parsed(key, content[key]) for name in content})


def transformed(given: Field, values: Tensor) -> Tensor:
    """What the model gets of a field, (B, ...), from what was read of it.

    Raises:
        N3LOError: the values do not suit a step.
    """
    for step in given.steps:
        values = _told(given.text, step, step, values)
    return values


def tensor_of(given: Field, array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """What was read of a field, on a device, in the type that its first step takes."""
    return torch.as_tensor(array).to(device, non_blocking=True).to(_torch_type(given.dtype))


@cache
def _torch_type(dtype: np.dtype[Any]) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.name)
    return found


def form(given: Field) -> tuple[tuple[int, ...], str]:
    """Shape of one event and type of a field, as the model gets it."""
    if not given.steps:
        return given.shape, given.dtype.name
    example = _example(given)
    return tuple(example.shape[1:]), str(example.dtype).removeprefix("torch.")


def _example(given: Field) -> Tensor:
    """One event of zeros, after the steps."""
    blank = np.zeros((1, *given.shape), given.dtype)
    return transformed(given, tensor_of(given, blank, CPU))


Seen = Callable[[], Iterator[tuple[np.ndarray, Tensor]]]


def _fitted(step: Fitted, given: Field, index: Index, seen: Seen) -> Fitted:
    """
    Raises:
        ValueError: values are not finite; the text says which, and where the first is.
    """
    try:
        return step.fitted(values for _, values in seen())
    except NotFinite:
        raise ValueError(_not_finite(given, index, seen)) from None


def _not_finite(given: Field, index: Index, seen: Seen) -> str:
    """In which columns, how many events, and the first of them."""
    number, first, in_column = 0, -1, np.zeros((), np.int64)
    for events, values in seen():
        number += len(events)
        wrong = ~values.isfinite().numpy()
        by_column = wrong.reshape(len(wrong), -1, wrong.shape[-1] if wrong.ndim > 1 else 1)
        in_column = in_column + by_column.any(axis=1).sum(axis=0)
        if first < 0 and wrong.any():
            first = int(events[wrong.reshape(len(wrong), -1).any(axis=1).argmax()])
    names = _columns(given, len(in_column))
    columns = [f"{names[place]} in {in_column[place]}" for place in np.flatnonzero(in_column)]
    more = f" and {len(columns) - MOST_NAMES} columns more" if len(columns) > MOST_NAMES else ""
    file = int(np.searchsorted(index.file_starts, first, side="right")) - 1
    return (
        f"nan or inf: {', '.join(columns[:MOST_NAMES])}{more} of {number} training events, first "
        f"in event {first - index.file_starts[file]} of '{Path(index.files[file]).name}'; "
        'before it, { name = "replace", by = 0 } puts 0 there'
    )


def _columns(given: Field, number: int) -> Sequence[str]:
    """The names of the places on the last axis, where the field says them."""
    names = np.array(stacked_names(given.dataset) or [given.text])
    if len(given.shape) == 1 and len(names) > 1:
        names = names[given.index]
    if number == names.size:
        return [f"'{name}'" for name in names.flat]
    return [f"place {place} of the last axis" for place in range(number)]


def _events_of(
    reader: Reader, given: Field, index: Index, is_training: np.ndarray
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Those that are trained on, block by block, and their values after the steps so far."""
    for first, end in pairwise(index.block_starts):
        events = first + np.flatnonzero(is_training[first:end])
        if len(events) > 0:
            [array] = reader.gather(events)
            yield events, transformed(given, tensor_of(given, array, CPU))


def _told(name: str, step: Step, do: Any, values: Any) -> Any:
    """Do it; if it fails, say of which field and step."""
    try:
        return do(values)
    except ValueError as error:
        raise N3LOError(f"data.transforms: '{name}': {step.name}: {error}") from error


def _parsed(name: str, steps: Steps) -> tuple[Step, ...]:
    made = []
    for each in steps:
        settings = {"name": each} if isinstance(each, str) else dict(each)
        step = settings.pop("name")
        try:
            made.append(STEPS[step](**settings))
        except ValueError as error:
            raise N3LOError(f"data.transforms: '{name}': {step}: {error}") from error
    return tuple(made)


def _plain(step: Step) -> dict[str, Plain]:
    values = {each.name: getattr(step, each.name) for each in dataclasses.fields(step) if each.init}
    return {"name": step.name, **{key: each for key, each in values.items() if each is not None}}


def _with_steps(index: Index, find: Mapping[str, Any]) -> Index:
    """Each named field gets what its function gives of its name and itself."""

    def changed(fields: Fields) -> Fields:
        members = [
            dataclasses.replace(each, steps=find[name](name, each)) if name in find else each
            for name, each in _names(fields)
        ]
        return dataclasses.replace(fields, members=tuple(members))

    return dataclasses.replace(index, inputs=changed(index.inputs), targets=changed(index.targets))


def _names(fields: Fields) -> Iterator[tuple[str, Field]]:
    """Fields by what the study calls them: in a table by their name there, else by their text."""
    for each in fields.members:
        yield (each.name if fields.kind == "table" else each.text), each


def _named(index: Index) -> Iterator[tuple[str, Field]]:
    yield from _names(index.inputs)
    yield from _names(index.targets)


def _check_names(index: Index, transforms: Mapping[str, Any]) -> None:
    there: dict[str, set[str]] = {}
    for name, each in _named(index):
        there.setdefault(name, set()).add(each.text)
    for name in transforms:
        if name not in there:
            raise N3LOError(
                f"data.transforms: there is no field '{name}' in data.inputs and data.targets, "
                f"only {', '.join(there)}"
            )
        if len(there[name]) > 1:
            raise N3LOError(
                f"data.transforms: '{name}' is {' and '.join(sorted(there[name]))}; give one of "
                "them another name in its table"
            )
