"""What data files hold, and what is odd about them or slow to read.

    python -P -m apps.datacheck [--json] [--study data.json] ... [FILE] ...

Reads all values once, block by block. Exit status 2 and one line if a file cannot be read.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from apps.contract import Data, N3LOError, from_dict, read_json
from apps.formats import Source, open_file
from apps.hdf5 import Field, index_files
from apps.rows import Jagged, Rows, Same, decoded

READ_BYTES = 16e6  # at once
MOST_CLASSES = 100  # as `apps.data` has it
SHOWN_CLASSES = 12
MOST_NAMES = 10  # in a line
SMALL_CHUNK_BYTES = 16e3
LARGE_GROUP_BYTES = 256e6  # of a row group, decoded
WORTH_COMPRESSING_BYTES = 10e6
FEW_EVENTS = 64  # of a chunk
NOT_MEASURED = (-99, -999, -9999, -99999)  # as many write what an event lacks


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="apps.datacheck", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--study", action="append", default=[], type=Path, metavar="DATA.json")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(words)
    try:
        reports = [of_study(from_dict(Data, read_json(path))) for path in options.study]
        reports += [of_files(options.files)] if options.files else []
    except N3LOError as error:
        print(str(error).removeprefix("data.files: "), file=sys.stderr)
        return 2
    files = [each for report in reports for each in report]
    of_all = [together(report) for report in reports if len(report) > 1]
    if options.json:
        print(json.dumps({"files": files, "together": of_all}, indent=1, allow_nan=False))
    else:
        print("\n\n".join([*map(written, files), *map(written_together, of_all)]))
    return 0


def of_study(data: Data) -> list[dict[str, Any]]:
    """What the fields of a study hold in each of its files.

    Raises:
        N3LOError: a file or a field cannot be read, or they do not fit each other.
    """
    index = index_files(data)
    files = [
        of_file(path, index.fields, data.reader, number)
        for path, number in zip(data.files, index.file_numbers, strict=True)
    ]
    return alone([{**each, "weights": data.weights} for each in files])


def of_files(paths: Sequence[str]) -> list[dict[str, Any]]:
    """What all arrays of some files hold; the first is what the others are compared with.

    Raises:
        N3LOError: a file cannot be read.
    """
    files = [of_file(path) for path in paths]
    for other in files[1:]:
        other["advice"][:0] = differences(files[0], other)
    return alone(files)


def alone(files: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the values of one file say is said with it; of several, they say it `together`."""
    if len(files) == 1:
        files[0]["advice"] += together(files)["advice"]
    return files


def together(files: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Classes of all files as one, and what is odd about their values."""
    named: dict[str, list[dict[str, Any]]] = {}
    for each in (each for file in files for each in file["arrays"]):
        if "error" not in each and each["events"] > 0:
            named.setdefault(each["name"], []).append(each)
    classes = {name: _sum([each["classes"] for each in parts]) for name, parts in named.items()}
    advice = grouped((name, list(of_values(parts, classes[name]))) for name, parts in named.items())
    return {"files": [file["file"] for file in files], "classes": classes, "advice": advice}


def _sum(parts: Sequence[dict[int, int] | None]) -> dict[int, int] | None:
    """Events of each class in all parts; None where one has no classes, or all have too many."""
    total: Counter[int] = Counter()
    for part in parts:
        if part is None:
            return None
        total.update(part)
    return dict(sorted(total.items())) if len(total) <= MOST_CLASSES else None


def of_values(parts: Sequence[dict[str, Any]], classes: dict[int, int] | None) -> Iterator[str]:
    """Of an array, in all files that have it."""
    ends = {each[key] for each in parts for key in ("min", "max")}
    if len(ends) == 1 and None not in ends and sum(each["events"] for each in parts) > 1:
        yield f"all values are {ends.pop():g}"
    if classes and len(classes) > 1:
        number, events = min(classes.items(), key=lambda each: each[1])
        share = events / sum(classes.values())
        if share < 0.1 / len(classes):
            yield f"class {number} is rare: {events} events, {share:.2%}"


def of_file(
    path: str,
    fields: Sequence[Field] | None = None,
    reader: str | None = None,
    number: np.generic | None = None,
) -> dict[str, Any]:
    """What a file holds.

    Args:
        fields: its arrays as a study uses them; None = all that there are.
        reader: `data.reader`.
        number: what "@file" is in it.
    """
    with open_file(path, reader, number) as source:
        asked = fields or [_whole(name) for name in source.names]
        source.count_by(field.dataset for field in asked)
        arrays = [of_array(source, field) for field in asked]
        lengths = {each["name"]: each["events"] for each in arrays if "error" not in each}
        advice = grouped((each["name"], each.pop("advice")) for each in arrays)
        if lengths and not any(lengths.values()):
            advice.insert(0, "no events")
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            advice.insert(0, f"arrays differ in their number of events: {counts}")
        if source.kind == "Parquet" and (group := group_bytes(source)) > LARGE_GROUP_BYTES:
            advice.append(
                f"a row group decodes to {size(group)}, and all of it is read for one event; write "
                "smaller ones: to_parquet(..., row_group_size=10000)"
            )
        if source.remedy():
            advice.append(source.remedy())
        return {
            "file": path,
            "format": source.kind,
            "trees": list(source.trees),
            "bytes": Path(path).stat().st_size,
            "arrays": arrays,
            "advice": advice,
        }


def group_bytes(source: Source) -> int:
    """Of the largest row group of a Parquet file, without its lists of differing lengths."""
    arrays = [rows for _, rows in source.usable() if not isinstance(rows, N3LOError | Jagged)]
    return sum(math.prod(rows.chunks) * rows.dtype.itemsize for rows in arrays)


def grouped(advice: Iterable[tuple[str, list[str]]]) -> list[str]:
    """One line for all arrays of which the same can be said."""
    names: dict[str, list[str]] = {}
    for name, lines in advice:
        for line in lines:
            names.setdefault(line, []).append(name)
    return [f"{some(of)}: {line}" for line, of in names.items()]


def _whole(name: str) -> Field:
    return Field(text=name, name=name, dataset=name, index=())


def of_array(source: Source, field: Field) -> dict[str, Any]:
    """Facts of one array, or why it cannot be used."""
    facts: dict[str, Any] = {"name": field.text, "advice": []}
    try:
        rows = source.rows(field.dataset)
        if isinstance(rows, Jagged) and field.index:
            rows = source.find(field.dataset, field.index)
        return facts | (of_jagged if isinstance(rows, Jagged) else of_rows)(source, field, rows)
    except N3LOError as error:  # also of values that are found to be no numbers
        return {**facts, "error": str(error).removeprefix(f"{source.filename}: ")}
    except OSError as error:
        where = f"{source.filename}: '{field.text}'"
        raise N3LOError(f"{where} cannot be read: {error}") from error


def of_rows(source: Source, field: Field, rows: Rows) -> dict[str, Any]:
    statistics = Statistics()
    for values in blocks(rows, field.index):
        statistics.add(values)
        shape = values.shape[1:]
    if len(rows) == 0:
        shape = np.broadcast_to(0, rows.shape[1:])[field.index].shape
    facts = {"events": len(rows), "shape": list(shape), "dtype": rows.dtype.name}
    facts |= statistics.facts()
    facts["stored"] = stored(source, field.dataset, rows)
    facts["advice"] = [
        *statistics.advice(),
        *storage_advice(source, field.dataset, rows, facts),
    ]
    return facts


def of_jagged(source: Source, field: Field, rows: Jagged) -> dict[str, Any]:
    name, counts, statistics = field.text, [], Statistics()
    for number in range(len(rows.starts) - 1):
        of_events, values = decoded(rows.decode, number)
        statistics.add(values)
        counts.append(of_events)
    lengths = np.concatenate([*counts, np.zeros(0 if len(rows) else 1, np.int64)])
    enough = max(1, int(np.quantile(lengths, 0.99, method="higher")))
    keeps = (
        f"events have {lengths.min()} to {lengths.max()} values; '{name}[:, :{enough}]' keeps all "
        "of 99 % of them, and pads with zeros"
    )
    return {
        **{"events": len(rows), "shape": ["var", *rows.inner], "dtype": rows.dtype.name},
        **statistics.facts(),
        "lengths": [int(lengths.min()), float(lengths.mean()), int(lengths.max())],
        "stored": "lists",
        "advice": [
            *([keeps] if len(rows) else []),
            *statistics.advice(),
        ],
    }


def blocks(rows: Rows, index: tuple[int | slice, ...] = ()) -> Iterator[np.ndarray]:
    """All events in their order, in whole chunks where these are not too large."""
    event_bytes = max(1, math.prod(rows.shape[1:]) * rows.dtype.itemsize)
    chunk = rows.chunks[0] if rows.chunks else 1
    events = max(1, int(READ_BYTES / event_bytes) // chunk) * chunk
    for first in range(0, len(rows), events):
        yield rows[(slice(first, min(first + events, len(rows))), *index)]


class Statistics:
    """Of the values of an array, which come in parts."""

    def __init__(self) -> None:
        self.count = self.zeros = self.negative = self.finite = self.at_low = 0
        self.sum, self.low, self.high = 0.0, math.inf, -math.inf
        self.classes: dict[int, int] | None = {}  # None: these are no classes

    def add(self, values: np.ndarray) -> None:
        """(B, ...)"""
        numbers = values.astype(np.float64)
        finite = numbers[np.isfinite(numbers)]
        self.count += numbers.size
        self.finite += finite.size
        self.zeros += int(numbers.size - np.count_nonzero(numbers))
        self.negative += int((finite < 0).sum())
        if finite.size:
            self.sum += float(finite.sum())
            low = float(finite.min())
            if low < self.low:
                self.low, self.at_low = low, 0
            self.at_low += int((finite == self.low).sum())
            self.high = max(self.high, float(finite.max()))
        if self.classes is not None:
            self._add_classes(values)

    def _add_classes(self, values: np.ndarray) -> None:
        of_event = classes_in(values)
        if of_event is None or self.classes is None:
            self.classes = None
            return
        for number, events in zip(*np.unique(of_event, return_counts=True), strict=True):
            self.classes[int(number)] = self.classes.get(int(number), 0) + int(events)
        if len(self.classes) > MOST_CLASSES:
            self.classes = None

    def facts(self) -> dict[str, Any]:
        any_finite = self.finite > 0
        return {
            "min": self.low if any_finite else None,
            "mean": self.sum / self.finite if any_finite else None,
            "max": self.high if any_finite else None,
            "zeros": self.zeros / self.count if self.count else None,
            "negative": self.negative / self.finite if any_finite else None,
            "non_finite": self.count - self.finite,
            "classes": dict(sorted(self.classes.items())) if self.classes else None,
        }

    def advice(self) -> Iterator[str]:
        if odd := self.count - self.finite:
            yield f"{odd} of {self.count} values are not finite (nan or inf)"
        if self.low in NOT_MEASURED and 1 < self.at_low < self.finite:
            yield (
                f"{self.low:g} is {self.at_low} of {self.count} values, and the smallest: where "
                "it stands for what was not measured, see 'Values that are missing' in docs/data.md"
            )


def classes_in(values: np.ndarray) -> np.ndarray | None:
    """The class of each event, (B,), where these are integers, (B,), or one-hot, (B, C)."""
    if values.ndim == 1 and values.dtype.kind in "iub":
        return values
    if values.ndim != 2 or not 2 <= values.shape[1] <= MOST_CLASSES:
        return None
    one_hot = np.isin(values, (0, 1)).all() and (values.sum(axis=1) == 1).all()
    return values.argmax(axis=1) if one_hot else None


# -- how it is stored ------------------------------------------------------------------------------


def stored(source: Source, name: str, rows: Rows) -> str:
    """In a few words."""
    if isinstance(rows, h5py.Dataset):
        if rows.chunks is None:
            return "in one piece"
        level = "" if rows.compression_opts is None else f" {rows.compression_opts}"
        packed = f", {rows.compression}{level}" if rows.compression else ""
        return f"chunks of {' x '.join(map(str, rows.chunks))}{packed}"
    if isinstance(rows, Same):
        return "the file"
    if name in source.compressed:
        return "compressed"
    if rows.chunks is None:
        return "in one piece"
    return f"{'row groups of' if source.kind == 'Parquet' else 'read by'} {rows.chunks[0]}"


def storage_advice(source: Source, name: str, rows: Rows, facts: dict[str, Any]) -> Iterator[str]:
    event_bytes = math.prod(rows.shape[1:]) * rows.dtype.itemsize
    whole = event_bytes * len(rows)
    if name in source.compressed and whole > WORTH_COMPRESSING_BYTES:
        yield (
            f"compressed in a .npz: each rank unpacks all {size(whole)} to read an event; "
            "'n3lo data convert' writes HDF5, of which a part can be read"
        )
    if isinstance(rows, h5py.Dataset):
        yield from hdf5_advice(rows, event_bytes, facts)


def hdf5_advice(dataset: Any, event_bytes: int, facts: dict[str, Any]) -> Iterator[str]:
    whole = event_bytes * len(dataset)
    if dataset.chunks is None:
        if whole > WORTH_COMPRESSING_BYTES and facts["zeros"] > 0.5:
            yield (
                f"{facts['zeros']:.0%} zeros, not compressed ({size(whole)}): 'n3lo data convert' "
                "makes it several times smaller"
            )
        return
    chunk_bytes = math.prod(dataset.chunks) * dataset.dtype.itemsize
    _, cache_bytes, _ = dataset.id.get_access_plist().get_chunk_cache()
    if chunk_bytes > cache_bytes and dataset.compression:
        yield (
            f"a chunk of {dataset.chunks[0]} events decodes to {size(chunk_bytes)}, more than the "
            f"{size(cache_bytes)} that HDF5 keeps, so it is decoded again for each part that is "
            "read; 'n3lo data convert' writes chunks of about 1 MB"
        )
    if dataset.chunks[0] < min(FEW_EVENTS, len(dataset)) and chunk_bytes < SMALL_CHUNK_BYTES:
        yield (
            f"chunks of {dataset.chunks[0]} events hold {size(chunk_bytes)}: finding one takes "
            f"longer than reading it; take {FEW_EVENTS} or more ('n3lo data convert')"
        )
    parts = math.prod(
        -(-length // part)
        for length, part in zip(dataset.shape[1:], dataset.chunks[1:], strict=True)
    )
    if parts > 1:
        yield (
            f"each event is spread over {parts} chunks; chunks should hold whole events "
            "('n3lo data convert')"
        )
    if dataset.compression == "gzip" and dataset.compression_opts > 4:
        yield (
            f"gzip {dataset.compression_opts} is slow to write and hardly smaller than gzip 4; "
            "lzf is read fastest"
        )


def differences(first: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    """In what a file is not as the first one."""
    there, here = (
        {each["name"]: each for each in file["arrays"] if "error" not in each}
        for file in (first, other)
    )
    if lacking := [name for name in there if name not in here]:
        yield f"lacks {some(lacking)}, which '{first['file']}' has"
    if added := [name for name in here if name not in there]:
        yield f"has {some(added)}, which '{first['file']}' lacks"
    if first["trees"] != other["trees"]:
        yield (
            f"its trees are {some(other['trees'])}, and {some(first['trees'])} in "
            f"'{first['file']}'; where each file has one tree, names without it are found in all"
        )
    for name in [name for name in here if name in there]:
        forms = [(tuple(each["shape"]), each["dtype"]) for each in (here[name], there[name])]
        if forms[0] != forms[1]:
            (shape, dtype), (its_shape, its_dtype) = forms
            yield (
                f"{name}: {shape} {dtype} an event, but {its_shape} {its_dtype} in "
                f"'{first['file']}'"
            )


def some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


# -- for people ------------------------------------------------------------------------------------

HEADINGS = ("array", "events", "an event", "type", "min", "mean", "max", "zeros", "nan/inf")


def written(file: dict[str, Any]) -> str:
    """A table of the arrays, their classes, and advice."""
    usable = [each for each in file["arrays"] if "error" not in each]
    tree = f", tree {some(file['trees'])}" if file["trees"] else ""
    lines = [f"{file['file']}: {file['format']}{tree}, {size(file['bytes'])}"]
    if usable:
        lines += ["  " + line for line in _table([(*HEADINGS, "stored"), *map(_row, usable)])]
    lines += [
        f"  {each['name']}: {_balance(each['classes'])}"
        for each in usable
        if len(each["classes"] or ()) > 1
    ]
    lines += [
        f"  {each['name']}: weights from {each['min']:.4g} to {each['max']:.4g}, "
        f"{each['negative']:.1%} negative"
        for each in usable
        if each["name"] == file.get("weights") and each["negative"] is not None
    ]
    lines += [f"  not usable: {each['error']}" for each in file["arrays"] if "error" in each]
    lines += [f"  ! {line}" for line in file["advice"]]
    return "\n".join(lines)


def written_together(report: dict[str, Any]) -> str:
    lines = [f"all {len(report['files'])} files together:"]
    lines += [
        f"  {name}: {_balance(classes)}"
        for name, classes in report["classes"].items()
        if len(classes or ()) > 1
    ]
    lines += [f"  ! {line}" for line in report["advice"]]
    return "\n".join(lines)


def _row(array: dict[str, Any]) -> tuple[str, ...]:
    low, mean, high = ("-" if array[key] is None else f"{array[key]:.4g}" for key in HEADINGS[4:7])
    shape = ", ".join(map(str, array["shape"]))
    zeros = "-" if array["zeros"] is None else f"{array['zeros']:.1%}"
    return (
        *(array["name"], str(array["events"]), f"({shape})", array["dtype"]),
        *(low, mean, high, zeros, str(array["non_finite"]), array["stored"]),
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Texts to the left; numbers, which are in the middle, to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = {1, 4, 5, 6, 7, 8}
    return [
        "  ".join(
            text.rjust(width) if number in right else text.ljust(width)
            for number, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _balance(classes: dict[int, int]) -> str:
    total = sum(classes.values())
    shown = [f"{number}: {events / total:.1%}" for number, events in classes.items()]
    more = f", and {len(shown) - SHOWN_CLASSES} more" if len(shown) > SHOWN_CLASSES else ""
    return f"{len(shown)} classes, {', '.join(shown[:SHOWN_CLASSES])}{more}"


def size(num_bytes: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes:.0f} bytes"


if __name__ == "__main__":
    sys.exit(main())
