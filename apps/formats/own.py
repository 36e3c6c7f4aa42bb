"""Files in a format of the user's own, read by a function of theirs: `data.reader`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from apps.contract import N3LOError
from apps.formats.source import Source
from apps.rows import Axes, Rows
from apps.sources import describe, load_object, shown_source, source_file


class Own(Source):
    """What `reader(path)` gives: a table of arrays by name, or an open file that is one.

    An array is NumPy's, or has `shape`, `dtype` and is sliced as one, so that only what is asked
    for is read. If the table has a method `close`, it is called at the end.
    """

    kind = "your own"

    def __init__(self, path: str, reader: str) -> None:
        """
        Raises:
            N3LOError: the function is not there, fails, or gives something else.
        """
        super().__init__(path)
        shown = f"{shown_source('data.reader', reader)} of '{Path(path).name}'"
        read = load_object("data.reader", reader)
        try:
            self._table = read(path)
        except Exception as error:  # a user's function can raise anything
            raise N3LOError(f"{shown}: {describe(error, source_file(reader))}") from error
        if not isinstance(self._table, Mapping):
            raise N3LOError(
                f"{shown}: gives a {type(self._table).__name__}, not a table of arrays by name, "
                'such as {"x": x, "y": y}'
            )
        for name, values in self._table.items():
            if not _is_array(values):
                raise N3LOError(
                    f"{shown}: '{name}' is a {type(values).__name__}, not an array as NumPy has "
                    "them; numpy.asarray makes one"
                )

    @property
    def names(self) -> list[str]:
        return list(self._table)

    def _open(self, name: str) -> Rows:
        return _Sliced(self._table[name])

    def _check(self, name: str, rows: Rows) -> None:
        if rows.dtype == object and len(rows) > 0 and not isinstance(rows[(slice(1),)][0], str):
            raise N3LOError(
                f"{self.filename}: '{name}' holds Python objects, such as arrays of different "
                "lengths, not numbers; pad them with zeros to one array, (events, most, ...)"
            )
        super()._check(name, rows)

    def close(self) -> None:
        close = getattr(self._table, "close", None)
        if close is not None:
            close()


def _is_array(values: Any) -> bool:
    try:
        np.dtype(values.dtype)
        return isinstance(tuple(values.shape), tuple)
    except (AttributeError, TypeError):  # also of types that NumPy has not, as torch's
        return False


class _Sliced:
    """An array of the user's, as `Rows`."""

    def __init__(self, values: Any) -> None:
        self._values = values
        self.shape, self.dtype = tuple(values.shape), np.dtype(values.dtype)
        self.chunks = getattr(values, "chunks", None)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, index: Axes) -> np.ndarray:
        rows = np.asarray(self._values[index[0]])
        return rows[(slice(None), *index[1:])]
