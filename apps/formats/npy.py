"""NumPy: .npz and .npy, mapped into memory where they are stored uncompressed."""

from __future__ import annotations

import zipfile
from typing import Any

import numpy as np

from apps.contract import N3LOError
from apps.formats.source import Source
from apps.rows import Axes, Rows, Runs


class _Mapped:
    """An array that is mapped into memory: only what is read is fetched."""

    chunks = None

    def __init__(self, values: np.ndarray) -> None:
        self._values = values
        self.shape, self.dtype = values.shape, values.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Axes) -> np.ndarray:
        return np.array(self._values[index])


class _Arrays(Source):
    """Arrays that are found when the file is opened."""

    kind = "NumPy"
    _arrays: dict[str, Rows]

    @property
    def names(self) -> list[str]:
        return list(self._arrays)

    def _open(self, name: str) -> Rows:
        return _of_numbers(self._arrays[name], self.filename, name)

    def close(self) -> None:
        self._arrays = {}


class Npy(_Arrays):
    """One array, named "data"; of records, each of their columns."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        with open(path, "rb") as file:
            arrays = _mapped("data", *_header(file), path, file.tell())
        self._arrays = {name.removeprefix("data/"): rows for name, rows in arrays.items()}


class Npz(_Arrays):
    """Arrays by their names. One that is stored compressed is unpacked whole when it is read."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.compressed = []
        self._arrays: dict[str, Rows] = {}
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            for info in archive.infolist():
                if info.filename.endswith(".npy"):
                    self._arrays |= self._members(archive, info, file)

    def _members(
        self, archive: zipfile.ZipFile, info: zipfile.ZipInfo, file: Any
    ) -> dict[str, Rows]:
        name = info.filename.removesuffix(".npy")
        with archive.open(info) as member:
            dtype, shape, fortran = _header(member)
            header = member.tell()
        if info.compress_type == zipfile.ZIP_STORED:
            offset = _content_offset(file, info) + header
            return _mapped(name, dtype, shape, fortran, self.filename, offset)
        self.compressed.append(name)
        if not shape or dtype.names:
            return {name: _empty(dtype, shape)}

        def unpack(_: int) -> np.ndarray:
            with np.load(self.filename, allow_pickle=False) as arrays:
                return arrays[name]

        rows = Runs(np.array([0, shape[0]]), shape[1:], dtype, unpack)
        rows.chunks = None  # nothing is gained by blocks of all events
        return {name: rows}


def _of_numbers(rows: Rows, path: str, name: str) -> Rows:
    if rows.dtype.hasobject:
        raise N3LOError(
            f"{path}: '{name}' holds Python objects, which are not read, as they may run code; "
            "save an array of numbers, with events padded to one length"
        )
    return rows


def _header(file: Any) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """Type, shape, and whether the first axis runs fastest; leaves `file` where values begin."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0
    if version != (1, 0):
        read = np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    return dtype, shape, fortran


def _content_offset(file: Any, info: zipfile.ZipInfo) -> int:
    """Where a member's content begins: after a header of 30 bytes, its name and what is extra."""
    file.seek(info.header_offset + 26)
    lengths = np.frombuffer(file.read(4), "<u2")
    return info.header_offset + 30 + int(lengths.sum())


def _mapped(
    name: str, dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool, path: str, offset: int
) -> dict[str, Rows]:
    if dtype.hasobject or not all(shape):  # there is nothing to map
        return {name: _empty(dtype, shape)}
    order = "F" if fortran else "C"
    values = np.memmap(path, dtype, "r", offset, shape, order) if shape else np.zeros((), dtype)
    if dtype.names:
        return {f"{name}/{column}": _Mapped(values[column]) for column in dtype.names}
    return {name: _Mapped(values)}


def _empty(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Rows:
    """That there is such an array, without its values."""
    return _Mapped(np.broadcast_to(np.empty((), dtype), shape))
