"""What a study's files hold: its fields, how many events there are, and how to read them.

The files are of any format of `apps.formats`, of which HDF5 is the first.
"""

from __future__ import annotations

import ast
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from apps.contract import Data, N3LOError
from apps.formats import Source, open_file
from apps.rows import Rows

FLOAT32 = np.dtype(np.float32)
MOST_NAMES = 30  # of the arrays of a file, in a message
SMALLEST_BLOCK = 64  # events; below, the cost of a read call outweighs the read


@dataclass(frozen=True, kw_only=True)
class Field:
    """One array with a row per event."""

    text: str  # as the study names it: "jets[:, -6:-1]"
    name: str  # of the model's keyword argument, where there is one
    dataset: str  # "jets", or several as one: "(pt, eta, phi)"
    index: tuple[int | slice, ...]  # of the axes after that of the events
    shape: tuple[int, ...] = ()  # of one event, after the index
    stored: np.dtype[Any] = FLOAT32  # in memory
    dtype: np.dtype[Any] = FLOAT32  # as the model and the loss get it, or the first of the steps
    steps: tuple[Any, ...] = ()  # of `apps.transforms`, between what is read and the model

    @property
    def event_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.stored.itemsize


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The inputs or the targets: one array, a list of them, or a table by name."""

    kind: Literal["one", "list", "table"]
    members: tuple[Field, ...]

    def pack(self, values: Sequence[Any]) -> Any:
        """One value a member -> what the model or the loss is called with."""
        if self.kind == "table":
            return {field.name: value for field, value in zip(self.members, values, strict=True)}
        return values[0] if self.kind == "one" else list(values)


@dataclass(frozen=True, kw_only=True)
class Index:
    """All that the ranks must know of the files; made once, by rank 0.

    Events are numbered through all files, in the order of the study. A block is a run of
    consecutive events of one file that is read at once.
    """

    files: tuple[str, ...]
    file_events: tuple[int, ...]
    inputs: Fields
    targets: Fields
    block_events: int
    weights: Field | None = None  # one number an event
    file_numbers: np.ndarray  # what "@file" is in each file: (files,)
    reader: str | None = None  # `data.reader`

    @property
    def fields(self) -> tuple[Field, ...]:
        of_weights = () if self.weights is None else (self.weights,)
        return self.inputs.members + self.targets.members + of_weights

    @property
    def num_events(self) -> int:
        return sum(self.file_events)

    @cached_property
    def file_starts(self) -> np.ndarray:
        """First event of each file, and the end of the last: (files + 1,)."""
        return np.concatenate([[0], np.cumsum(self.file_events)])

    @cached_property
    def block_starts(self) -> np.ndarray:
        """First event of each block, and the end of the last: (blocks + 1,)."""
        runs = [
            np.arange(start, start + events, self.block_events)
            for start, events in zip(self.file_starts, self.file_events, strict=False)
        ]
        return np.concatenate([*runs, [self.num_events]])


class Reader:
    """Reads fields of events by their numbers.

    Opens each file when first asked for, and keeps it open: a chunk of HDF5, or a row group of
    Parquet, is kept as long as the dataset is open; opening per read is a hundred times slower.
    """

    def __init__(self, index: Index, fields: Sequence[Field]) -> None:
        self._index = index
        self._fields = fields
        self._files: dict[str, Source] = {}
        self._datasets: dict[tuple[str, str], Rows] = {}

    def gather(self, events: np.ndarray) -> list[np.ndarray]:
        """The given events in the given order, one array a field; one read call a block."""
        order = np.argsort(events)
        wanted = events[order]
        block = np.searchsorted(self._index.block_starts, wanted, side="right")
        runs = np.split(wanted, np.flatnonzero(np.diff(block)) + 1)
        back = np.argsort(order)
        return [
            np.concatenate([self._read(field, run) for run in runs])[back] for field in self._fields
        ]

    def _read(self, field: Field, run: np.ndarray) -> np.ndarray:
        """Sorted events of one block."""
        if len(run) == 0:
            return np.empty((0, *field.shape), field.stored)
        file = int(np.searchsorted(self._index.file_starts, run[0], side="right")) - 1
        path = self._index.files[file]
        first, last = run[[0, -1]] - self._index.file_starts[file]
        try:
            values = self._dataset(file, field)[(slice(first, last + 1), *field.index)]
        except OSError as error:
            raise N3LOError(f"{path}: '{field.text}' cannot be read: {error}") from error
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf, which is reported
            return values[run - run[0]].astype(field.stored, copy=False)

    def _dataset(self, file: int, field: Field) -> Rows:
        path = self._index.files[file]
        if (path, field.text) not in self._datasets:
            if path not in self._files:
                number = self._index.file_numbers[file]
                self._files[path] = open_file(path, self._index.reader, number)
                self._files[path].count_by(each.dataset for each in self._index.fields)
            self._datasets[path, field.text] = self._files[path].find(field.dataset, field.index)
        return self._datasets[path, field.text]

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._datasets.clear()


def index_files(data: Data, with_targets: bool = True) -> Index:
    """Look into every file of the study.

    Args:
        with_targets: False of events that are only predicted, which need have none, nor weights.

    Raises:
        N3LOError: a file or field is missing or unreadable, or they do not fit each other.
    """
    reader, numbers = data.reader, _file_numbers(data)
    with open_file(data.files[0], reader, numbers[0]) as file:
        inputs = _fields(data.inputs, file, role="inputs")
        targets = Fields(kind="list", members=())
        weights = None
        if with_targets:
            targets = _fields(data.targets, file, role="targets")
            if data.weights is not None:
                weights = _weights(data.weights, file)
        chunks = _find(file, inputs.members[0]).chunks
    by_role = {"inputs": inputs.members, "targets": targets.members}
    if weights is not None:
        by_role["weights"] = (weights,)
    index = Index(
        files=tuple(data.files),
        file_events=tuple(
            _num_events(path, reader, number, by_role)
            for path, number in zip(data.files, numbers, strict=True)
        ),
        inputs=inputs,
        targets=targets,
        block_events=data.block_events or _block_events(chunks[0] if chunks else 1),
        weights=weights,
        file_numbers=numbers,
        reader=reader,
    )
    if index.num_events == 0:
        raise N3LOError(f"data.files: there is no event in {', '.join(data.files)}")
    return index


def _file_numbers(data: Data) -> np.ndarray:
    """(files,); whole ones are class numbers."""
    given = data.file_numbers
    if given is None:
        return np.arange(len(data.files))
    if len(given) != len(data.files):
        raise N3LOError(
            f"data.file_numbers: {len(given)} numbers are not one for each of {len(data.files)} "
            "files"
        )
    numbers = np.array(given)
    return numbers.astype(np.int64) if (numbers == np.round(numbers)).all() else numbers


def parse_field(text: str, name: str = "") -> Field:
    """ "group/dataset" or "dataset[:, 0, -6:-1]"; integers and slices only, all events.

    Instead of a dataset: "(pt, eta, phi)", several of one shape along a new last axis, or a pattern
    for their names, "feature_*".
    """
    dataset, bracket, _ = text.partition("[")
    if dataset.startswith("(") and not dataset.rstrip().endswith(")"):
        raise N3LOError(
            f"data: '{text}' is not of the form (first, second)[:, ...]: names, separated by "
            "commas, and an index for all of them behind the parenthesis"
        )
    index: tuple[int | slice, ...] = ()
    if bracket:
        try:
            tree = ast.parse("_" + text[len(dataset) :], mode="eval").body
            index = _parse_index(tree)
        except (SyntaxError, ValueError) as error:
            raise N3LOError(
                f"data: '{text}' is not of the form dataset[:, ...] with integers and slices"
            ) from error
        if index[0] != slice(None):
            raise N3LOError(f"data: '{text}': the first axis counts the events and must be ':'")
    return Field(text=text, name=name or dataset, dataset=dataset.strip(), index=index[1:])


def _parse_index(tree: ast.expr) -> tuple[int | slice, ...]:
    if not isinstance(tree, ast.Subscript) or not isinstance(tree.value, ast.Name):
        raise ValueError
    axes = tree.slice.elts if isinstance(tree.slice, ast.Tuple) else [tree.slice]
    return tuple(_parse_axis(axis) for axis in axes)


def _parse_axis(axis: ast.expr) -> int | slice:
    if not isinstance(axis, ast.Slice):
        return _parse_integer(axis)
    bounds = [part and _parse_integer(part) for part in (axis.lower, axis.upper, axis.step)]
    if bounds[2] is not None and bounds[2] < 1:  # HDF5 reads forwards only
        raise ValueError
    return slice(*bounds)


def _parse_integer(part: ast.expr) -> int:
    value = ast.literal_eval(part)
    if type(value) is not int:
        raise ValueError
    return value


def _fields(
    named: str | Sequence[str] | Mapping[str, str],
    file: Source,
    role: Literal["inputs", "targets"],
) -> Fields:
    kind: Literal["one", "list", "table"]
    if isinstance(named, str):
        field = parse_field(named)
        members = None if field.index else file.members(field.dataset)
        if members is not None:
            kind = "table"
            parsed = [parse_field(f"{field.dataset}/{key}", key) for key in members]
        else:
            kind, parsed = "one", [field]
    elif isinstance(named, Mapping):
        kind, parsed = "table", [parse_field(text, name) for name, text in named.items()]
    else:
        kind, parsed = "list", [parse_field(text) for text in named]
    if not parsed:
        raise N3LOError(f"{file.filename}: data.{role} = {named!r} names no dataset")
    file.count_by(field.dataset for field in parsed)
    return Fields(kind=kind, members=tuple(_looked_up(file, field, role) for field in parsed))


def _weights(named: str, file: Source) -> Field:
    field = _looked_up(file, parse_field(named), "weights")
    if math.prod(field.shape) != 1:
        raise N3LOError(
            f"{file.filename}: data.weights: '{named}' is {field.shape} an event, and a weight is "
            "one number"
        )
    return field


def _looked_up(file: Source, field: Field, role: str) -> Field:
    """The field with its shape and types, and names in place of a pattern, as this file has them.

    In later files the names are the same, and not what the pattern would find there.
    """
    field = replace(field, dataset=file.expand(field.dataset))
    dataset = _find(file, field)
    where = f"{file.filename}: '{field.text}'"
    try:  # no memory is taken by the broadcast zero
        shape = np.broadcast_to(0, dataset.shape[1:])[field.index].shape
    except IndexError as error:
        raise N3LOError(f"{where} does not fit the shape {dataset.shape}: {error}") from error
    dtype = _dtype(dataset.dtype, shape, role)
    stored = dataset.dtype if dataset.dtype == np.uint8 else dtype  # images stay small
    return replace(field, shape=shape, stored=stored, dtype=dtype)


def _dtype(raw: np.dtype[Any], shape: tuple[int, ...], role: str) -> np.dtype[Any]:
    """Numbers are float32; class numbers and indices (for an embedding) are int64."""
    if role == "weights":
        return FLOAT32
    kinds = "iub" if role == "targets" else "iu"  # yes or no are classes
    counts = raw.kind in kinds and (shape == () if role == "targets" else raw != np.uint8)
    return np.dtype(np.int64) if counts else FLOAT32


def _find(file: Source, field: Field) -> Rows:
    try:
        return file.find(field.dataset, field.index)
    except OSError as error:
        raise N3LOError(f"{file.filename}: '{field.text}' cannot be read: {error}") from error
    except KeyError as error:
        name = error.args[0]
    if file.members(name) is not None:
        raise N3LOError(
            f"{file.filename}: '{field.text}' is a group; name its datasets, or the group alone"
        )
    names = sorted(file.names)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else file.missing()
    shown = ", ".join(names[:MOST_NAMES])
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    raise N3LOError(f"{file.filename}: there is no '{name}', only {shown}{more}{hint}")


def _num_events(
    path: str, reader: str | None, number: np.generic, by_role: Mapping[str, tuple[Field, ...]]
) -> int:
    """The events of one file, after checking that it is like the first."""
    lengths: dict[str, int] = {}
    with open_file(path, reader, number) as file:
        file.count_by(field.dataset for fields in by_role.values() for field in fields)
        for role, fields in by_role.items():
            for field in fields:
                here = _looked_up(file, field, role)
                if (here.shape, here.dtype) != (field.shape, field.dtype):
                    raise N3LOError(
                        f"{path}: '{field.text}' is {here.shape} {here.dtype} an event, "
                        f"but {field.shape} {field.dtype} in the first file"
                    )
                lengths[field.text] = len(_find(file, field))
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"'{text}' has {length}" for text, length in lengths.items())
        raise N3LOError(f"{path}: fields differ in their number of events: {counts}")
    return next(iter(lengths.values()))


def _block_events(chunk: int) -> int:
    """The smallest multiple of the chunk that is worth a read call."""
    return chunk * max(1, -(-SMALLEST_BLOCK // chunk))
