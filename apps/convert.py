"""Write data files anew as well-chunked HDF5, from any format that is read.

python -P -m apps.convert FILE ... --to OUT.h5 [--fields "x=(pt, eta, phi)" y=label]
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from apps.contract import VERSION, N3LOError
from apps.formats import Source, open_file
from apps.hdf5 import Field, parse_field
from apps.new_h5 import new_h5
from apps.rows import Jagged, Rows

CHUNK_BYTES = 2**20
MOST_EVENTS = 1024  # of a chunk: about so many are shuffled together
COPIED_BYTES = 16e6  # at once
PROGRESS_S = 5.0
COMPRESSION: dict[str, dict[str, Any]] = {
    "lzf": {"compression": "lzf", "shuffle": True},
    "gzip": {"compression": "gzip", "compression_opts": 4, "shuffle": True},
    "none": {},
}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="apps.convert", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--to", type=Path, required=True, metavar="OUT.h5")
    parser.add_argument("--fields", nargs="+", default=[], metavar="NAME=FIELD")
    parser.add_argument("--compression", choices=list(COMPRESSION), default="lzf")
    parser.add_argument("--events-per-file", type=int, metavar="N")
    options = parser.parse_args(words)
    try:
        for path in convert(options):
            print(path, flush=True)
    except N3LOError as error:
        print(str(error).removeprefix("data.files: "), file=sys.stderr)
        return 2
    return 0


def convert(options: argparse.Namespace) -> list[Path]:
    """Write all events of some files, in their order; return what was written.

    Raises:
        N3LOError: a file cannot be read or written, or what is asked for does not go together.
    """
    if options.to.suffix not in (".h5", ".hdf5", ".hdf"):
        raise N3LOError(f"--to '{options.to}': what is written is HDF5; name a file in .h5")
    if options.events_per_file is not None and options.events_per_file < 1:
        raise N3LOError(f"--events-per-file {options.events_per_file}: is not at least 1")
    columns, file_events = look(options.files, options.fields)
    num_events = sum(file_events)
    if num_events == 0:
        raise N3LOError(f"there is no event in {', '.join(options.files)}")
    ends = [*range(0, num_events, options.events_per_file or num_events), num_events]
    paths = _paths(options.to, len(ends) - 1, options.events_per_file is not None)
    for path in paths:
        if path.exists():
            raise N3LOError(f"--to: '{path}' is there already; remove it, or name another file")
    progress = Progress(num_events)
    inputs = Inputs(options.files, file_events)
    for path, (first, end) in zip(paths, pairwise(ends), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_h5(path) as (file, check_disk):
            names = [Path(each).name for each in options.files]
            file.attrs["converted_from"] = json.dumps(names)  # a list has to be below 64 KB
            file.attrs["versions"] = f"n3lo {VERSION}"
            for column in columns:
                _create(file, column, end - first, options.compression)
            for piece in _pieces(columns, first, end):
                inputs.copy(file, columns, piece, first)
                check_disk()
                progress.at(piece.stop)
    return paths


def _paths(to: Path, number: int, several: bool) -> list[Path]:
    """One, or out_000.h5, out_001.h5, ..."""
    if not several:
        return [to]
    digits = max(3, len(str(number - 1)))
    return [to.with_name(f"{to.stem}_{part:0{digits}}{to.suffix}") for part in range(number)]


# -- what is read ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Column:
    """A dataset to be written."""

    field: Field  # its name is that of the dataset
    shape: tuple[int, ...]  # of one event
    dtype: np.dtype[Any]
    attributes: dict[str, Any]

    @property
    def event_bytes(self) -> int:
        return max(1, math.prod(self.shape) * self.dtype.itemsize)


def look(files: Sequence[str], asked: Sequence[str]) -> tuple[list[Column], list[int]]:
    """What is to be written, and the events of each file.

    Raises:
        N3LOError: a field is not there, or is not the same in all files.
    """
    with open_file(files[0]) as source:
        fields = _named(asked, source) if asked else list(_all(source))
        source.count_by(field.dataset for field in fields)
        columns = [_column(source, field) for field in fields]
    file_events = []
    for place, path in enumerate(files):
        with open_file(path, number=np.int64(place)) as source:
            source.count_by(column.field.dataset for column in columns)
            here = [_column(source, column.field) for column in columns]
            file_events.append(_num_events(source, columns))
        for number, (column, other) in enumerate(zip(columns, here, strict=True)):
            if column.shape != other.shape:
                raise N3LOError(
                    f"{path}: '{column.field.text}' is {other.shape} an event, but {column.shape} "
                    f"in '{files[0]}'"
                )
            columns[number] = replace(column, dtype=np.result_type(column.dtype, other.dtype))
    return columns, file_events


def _named(asked: Sequence[str], source: Source) -> list[Field]:
    """ "x=(pt, eta)" or "label"; a group stands for all that is in it."""
    fields = []
    for text in asked:
        name, equals, of = text.partition("=")
        if not equals:
            of = text
            name = parse_field(of).dataset
        name = name.strip()
        members = source.members(of.strip())
        if members is not None and not source.has(of.strip()):
            fields += [parse_field(f"{of.strip()}/{each}", f"{name}/{each}") for each in members]
            continue
        if not re.fullmatch(r"[^\s()*?,/]+(/[^\s()*?,/]+)*", name):
            raise N3LOError(f"--fields: '{text}' needs a name for what is written: 'x={of}'")
        fields.append(parse_field(of.strip(), name))
    names = [field.name for field in fields]
    if twice := [name for name in names if names.count(name) > 1]:
        raise N3LOError(f"--fields: '{twice[0]}' is written twice; name one of them: 'other=...'")
    return fields


def _all(source: Source) -> Iterator[Field]:
    """Every array of numbers; of the others it is said why not."""
    found = False
    for name, rows in source.usable():
        if isinstance(rows, N3LOError):
            print(f"left out: {str(rows).removeprefix(f'{source.filename}: ')}", flush=True)
        elif isinstance(rows, Jagged):
            print(
                f"left out: '{name}' has events of different lengths; ask for so many values, as "
                f"in --fields '{name}[:, :10]'"
            )
        else:
            found = True
            yield Field(text=name, name=name, dataset=name, index=())
    if not found:
        raise N3LOError(f"{source.filename}: {source.remedy() or 'holds no array of numbers'}")


def _column(source: Source, field: Field) -> Column:
    field = replace(field, dataset=source.expand(field.dataset))
    where = f"{source.filename}: '{field.text}'"
    rows = _rows(source, field)
    try:
        shape = np.broadcast_to(0, rows.shape[1:])[field.index].shape
    except IndexError as error:
        raise N3LOError(f"{where} does not fit the shape {rows.shape}: {error}") from error
    attributes = dict(rows.attrs) if isinstance(rows, h5py.Dataset) else {}
    return Column(
        field=field, shape=shape, dtype=rows.dtype.newbyteorder("="), attributes=attributes
    )


def _rows(source: Source, field: Field) -> Rows:
    try:
        return source.find(field.dataset, field.index)
    except KeyError as error:
        names = ", ".join(sorted(source.names))
        raise N3LOError(
            f"{source.filename}: there is no '{error.args[0]}', only {names}{source.missing()}"
        ) from None


def _num_events(source: Source, columns: Sequence[Column]) -> int:
    lengths = {column.field.text: len(_rows(source, column.field)) for column in columns}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"'{text}' has {length}" for text, length in lengths.items())
        raise N3LOError(
            f"{source.filename}: arrays differ in their number of events: {counts}; choose by "
            "--fields"
        )
    return next(iter(lengths.values()))


class Inputs:
    """The files one after the other, of which one is open at a time."""

    def __init__(self, files: Sequence[str], file_events: Sequence[int]) -> None:
        self._files = files
        self._starts = np.concatenate([[0], np.cumsum(file_events)])
        self._open: tuple[int, Source, dict[str, Rows]] | None = None

    def copy(self, file: h5py.File, columns: Sequence[Column], piece: slice, origin: int) -> None:
        """Events of all files, to a file whose first is `origin`."""
        first = piece.start
        while first < piece.stop:
            number = int(np.searchsorted(self._starts, first, side="right")) - 1
            end = min(piece.stop, int(self._starts[number + 1]))
            rows = self._rows(number, columns)
            there = slice(first - self._starts[number], end - self._starts[number])
            for column in columns:
                try:
                    values = rows[column.field.name][(there, *column.field.index)]
                except OSError as error:
                    raise N3LOError(
                        f"{self._files[number]}: '{column.field.text}' cannot be read: {error}"
                    ) from error
                file[column.field.name][first - origin : end - origin] = values
            first = end

    def _rows(self, number: int, columns: Sequence[Column]) -> dict[str, Rows]:
        if self._open is None or self._open[0] != number:
            if self._open is not None:
                self._open[1].close()
            source = open_file(self._files[number], number=np.int64(number))
            source.count_by(column.field.dataset for column in columns)
            rows = {column.field.name: _rows(source, column.field) for column in columns}
            self._open = number, source, rows
        return self._open[2]


# -- what is written -------------------------------------------------------------------------------


def chunk_events(event_bytes: int) -> int:
    """Events of a chunk: a power of two, about 1 MiB of them, 1 to MOST_EVENTS.

    A chunk is what is decoded to read one event, and what HDF5's cache must hold.
    """
    fitting = max(1, CHUNK_BYTES // event_bytes)
    return min(MOST_EVENTS, 2 ** int(math.log2(fitting)))


def _create(file: h5py.File, column: Column, num_events: int, compression: str) -> None:
    events = min(num_events, chunk_events(column.event_bytes))
    dataset = file.create_dataset(
        column.field.name,
        (num_events, *column.shape),
        column.dtype,
        chunks=(events, *(max(1, length) for length in column.shape)),
        **COMPRESSION[compression],
    )
    dataset.attrs.update(column.attributes)


def _pieces(columns: Sequence[Column], first: int, end: int) -> Iterator[slice]:
    """Runs of whole chunks of all columns, as their events are powers of two."""
    widest = sum(column.event_bytes for column in columns)
    chunk = max(chunk_events(column.event_bytes) for column in columns)
    events = max(1, int(COPIED_BYTES / widest) // chunk) * chunk
    for start in range(first, end, events):
        yield slice(start, min(start + events, end))


class Progress:
    """A line now and then, where it takes long."""

    def __init__(self, num_events: int) -> None:
        self._num_events = num_events
        self._last = time.monotonic()

    def at(self, events: int) -> None:
        now = time.monotonic()
        if now - self._last > PROGRESS_S:
            self._last = now
            print(
                f"{events} of {self._num_events} events ({events / self._num_events:.0%})",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
