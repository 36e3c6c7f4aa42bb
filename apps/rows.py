"""Arrays with a row per event, of which ranges of rows are read: what all formats give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any, Protocol, TypeVar

import numpy as np

from apps.contract import N3LOError

Axes = tuple[int | slice, ...]

T = TypeVar("T")


class Rows(Protocol):
    """As h5py has it: `rows[2:5, 0]` reads column 0 of three events."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def chunks(self) -> tuple[int, ...] | None:
        """Its first number is that of the events which are decoded together; None if none are."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Axes) -> np.ndarray: ...


class Runs:
    """Rows that are decoded a run at a time, such as a row group of Parquet.

    The last run is kept, as HDF5 keeps a chunk: who reads on, or shuffles within it, decodes once.

    Args:
        starts: first row of each run, and the end of the last: (runs + 1,).
        shape: of one row.
        decode: the number of a run -> its rows.
    """

    def __init__(
        self,
        starts: np.ndarray,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        decode: Callable[[int], np.ndarray],
    ) -> None:
        self.shape = (int(starts[-1]), *shape)
        self.dtype = dtype
        self.chunks = (max(1, int(np.diff(starts).max(initial=1))), *shape)
        self._starts, self._decode = starts, decode
        self._held: tuple[int, np.ndarray] | None = None
        self._lock = Lock()  # a thread may read ahead

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Axes) -> np.ndarray:
        first, end, _ = index[0].indices(len(self))
        if first >= end:
            return np.empty((0, *self.shape[1:]), self.dtype)[index]
        low = int(np.searchsorted(self._starts, first, side="right")) - 1
        high = int(np.searchsorted(self._starts, end, side="left"))
        with self._lock:
            parts = [
                self._run(number)[max(0, first - start) : end - start]
                for number, start in enumerate(self._starts[low:high], start=low)
            ]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return rows[(slice(None), *index[1:])]

    def _run(self, number: int) -> np.ndarray:
        held = self._held
        if held is None or held[0] != number:
            held = self._held = number, decoded(self._decode, number)
        return held[1]


def decoded(decode: Callable[[int], T], number: int) -> T:
    """A run.

    Raises:
        OSError: the file is broken.
    """
    try:
        return decode(number)
    except (N3LOError, MemoryError):
        raise
    except Exception as error:  # libraries do not say what they raise of a broken file
        said = (str(error).splitlines() or [""])[0]
        raise OSError(f"{type(error).__name__}: {said}") from error


@dataclass(frozen=True)
class Jagged:
    """An array whose events have different numbers of values; `padded` makes rows of it."""

    starts: np.ndarray  # as of `Runs`
    inner: tuple[int, ...]  # shape of one value
    dtype: np.dtype[Any]
    decode: Callable[[int], tuple[np.ndarray, np.ndarray]]
    """The number of a run -> how many values each event has, (N,), and all of them, (V, *inner)."""

    def __len__(self) -> int:
        return int(self.starts[-1])

    def padded(self, length: int) -> Runs:
        """The first so many values of each event; zeros where it has fewer."""
        return Runs(
            self.starts,
            (length, *self.inner),
            self.dtype,
            lambda number: pad(*self.decode(number), length),
        )


def pad(counts: np.ndarray, values: np.ndarray, length: int) -> np.ndarray:
    """(N,) and (V, *inner) -> (N, length, *inner)."""
    places = np.arange(length)
    padded = np.zeros((len(counts), length, *values.shape[1:]), values.dtype)
    kept = places < counts[:, None]
    firsts = np.cumsum(counts) - counts
    padded[kept] = values[(firsts[:, None] + places)[kept]]
    return padded


def needed_length(axes: Axes) -> int | None:
    """How many values of an event an index asks for; None if it does not say so.

    Args:
        axes: after that of the events: of "[:, 2:10]" it is (slice(2, 10),).
    """
    if not axes:
        return None
    axis = axes[0]
    if not isinstance(axis, slice):
        return axis + 1 if axis >= 0 else None
    bounded = axis.stop is not None and axis.stop > 0 and (axis.start or 0) >= 0
    return axis.stop if bounded else None


class Same:
    """One number for each event of a file."""

    chunks = None

    def __init__(self, number: np.generic, events: int) -> None:
        self.shape, self.dtype = (events,), number.dtype
        self._number = number

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Axes) -> np.ndarray:
        events = len(range(*index[0].indices(len(self))))
        return np.full(events, self._number)[(slice(None), *index[1:])]


class Stack:
    """Arrays of one shape as one, along a new last axis: F of (N, ...) give (N, ..., F)."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self.shape = (*parts[0].shape, len(parts))

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        return np.result_type(*(part.dtype for part in self._parts))

    @property
    def chunks(self) -> tuple[int, ...] | None:
        chunks = self._parts[0].chunks
        return None if chunks is None else (*chunks, len(self._parts))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Axes) -> np.ndarray:
        rows = np.stack([part[index[:1]] for part in self._parts], axis=-1)
        return rows[(slice(None), *index[1:])].astype(self.dtype, copy=False)


def stack(named: dict[str, Rows | Jagged]) -> Rows | Jagged:
    """
    Raises:
        ValueError: they do not fit each other; one line.
    """
    parts = list(named.values())
    jagged = [part for part in parts if isinstance(part, Jagged)]
    shapes = {
        name: (len(part), "var", *part.inner) if isinstance(part, Jagged) else tuple(part.shape)
        for name, part in named.items()
    }
    if len(set(shapes.values())) > 1:
        raise ValueError(f"arrays of one shape can be stacked, not {_differing(shapes)}")
    if not jagged:
        return Stack(parts)

    def decode(number: int) -> tuple[np.ndarray, np.ndarray]:
        decoded = [part.decode(number) for part in jagged]
        counts = decoded[0][0]
        for name, (others, _) in zip(named, decoded, strict=True):
            if not np.array_equal(counts, others):
                raise N3LOError(
                    f"'{name}' has another number of values than '{next(iter(named))}' in some "
                    "events; only what belongs together can be stacked"
                )
        return counts, np.stack([values for _, values in decoded], axis=-1)

    dtype = np.result_type(*(part.dtype for part in jagged))
    return Jagged(_common(jagged), (*jagged[0].inner, len(jagged)), dtype, decode)


def _common(parts: Sequence[Jagged]) -> np.ndarray:
    if any(not np.array_equal(part.starts, parts[0].starts) for part in parts):
        raise ValueError("jagged arrays that are written in different runs cannot be stacked")
    return parts[0].starts


def _differing(shapes: dict[str, tuple[Any, ...]]) -> str:
    """Two that differ."""
    (first, shape), *others = shapes.items()
    name, other = next(each for each in others if each[1] != shape)
    return f"'{first}' {shape} and '{name}' {other}".replace("'var'", "var")
