"""Parquet: columns of numbers, or of lists of them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from pyarrow import parquet, types

from apps.contract import N3LOError
from apps.formats.source import Source
from apps.rows import Jagged, Rows, Runs


class Parquet(Source):
    """Columns of numbers, or of lists of them; a row group is decoded at once."""

    kind = "Parquet"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.file = parquet.ParquetFile(path)
        self._schema = self.file.schema_arrow
        groups = range(self.file.num_row_groups)
        events = [self.file.metadata.row_group(number).num_rows for number in groups]
        self._starts = np.concatenate([[0], np.cumsum(events)]).astype(np.int64)

    @property
    def names(self) -> list[str]:
        return [name for name in self._schema.names if not name.startswith("__index_level_")]

    @property
    def num_events(self) -> int:
        return int(self._starts[-1])

    def _open(self, name: str) -> Rows | Jagged:
        dtype = _arrow_number(self._schema.field(name).type)
        if dtype is None:
            kind = self._schema.field(name).type
            texts = (
                types.is_string(kind) or types.is_large_string(kind) or types.is_dictionary(kind)
            )
            mend = f"; class numbers are frame['{name}'].astype('category').cat.codes"
            raise N3LOError(
                f"{self.filename}: '{name}' holds {kind}, not numbers{mend if texts else ''}"
            )
        if not hasattr(self._schema.field(name).type, "value_type") and dtype.kind != "f":
            self._check_nulls(name)
        sizes = self._sizes(name)
        if sizes is None:
            return self._jagged(name, dtype)

        def decode(number: int) -> np.ndarray:
            counts, values = self._lists(name, number)
            if not sizes:
                return values
            odd = np.flatnonzero(counts != sizes[0])
            if len(odd):
                raise N3LOError(
                    f"{self.filename}: '{name}' has {counts[odd[0]]} values in event "
                    f"{self._starts[number] + odd[0]}, and {sizes[0]} in the first; write lists "
                    "of one length"
                )
            return values.reshape(len(counts), *sizes)

        return Runs(self._starts, sizes, dtype, decode)

    def _lists_of(self, name: str) -> Jagged | None:
        kind = self._schema.field(name).type
        dtype = _arrow_number(kind)
        of_any_length = hasattr(kind, "value_type") and not hasattr(kind, "list_size")
        if dtype is None or not of_any_length or len(self._starts) == 1:
            return None
        return self._jagged(name, dtype)

    def _jagged(self, name: str, dtype: np.dtype[Any]) -> Jagged:
        inner = self._lists(name, 0)[1].shape[1:]
        return Jagged(self._starts, inner, dtype, lambda number: self._lists(name, number))

    def _sizes(self, name: str) -> tuple[int, ...] | None:
        """The shape of an event: by its first row group, where the type does not say it."""
        kind = self._schema.field(name).type
        if not hasattr(kind, "value_type"):
            return ()
        if len(self._starts) == 1:
            return (getattr(kind, "list_size", 0),)
        counts, values = self._lists(name, 0)
        if len(counts) and (counts == counts[0]).all():
            return (int(counts[0]), *values.shape[1:])
        return None

    def _check_nulls(self, name: str) -> None:
        """By what the file says of itself, where it does; else they are found when it is read."""
        number = self._column_numbers[name]
        groups = (self.file.metadata.row_group(each) for each in range(len(self._starts) - 1))
        said = [group.column(number).statistics for group in groups]
        nulls = sum(each.null_count for each in said if each is not None and each.has_null_count)
        if nulls:
            raise self._lacks(name, nulls)

    @cached_property
    def _column_numbers(self) -> dict[str, int]:
        """Of the columns as they are stored, by path."""
        schema = self.file.schema
        return {schema.column(number).path: number for number in range(len(schema))}

    def _lacks(self, name: str, nulls: int) -> N3LOError:
        return N3LOError(
            f"{self.filename}: '{name}' lacks {nulls} values (null); fill them in, as in "
            f"frame['{name}'].fillna(-1)"
        )

    def _lists(self, name: str, group: int) -> tuple[np.ndarray, np.ndarray]:
        """How many values each event has, and all of them, (V, ...); of no list, one each."""
        table = self.file.read_row_group(group, columns=[name], use_threads=False)
        column = table.column(0).combine_chunks()
        counts = np.ones(len(column), np.int64)
        inner: list[int] = []
        for depth in range(3):
            if column.null_count and not types.is_floating(column.type):
                raise self._lacks(name, column.null_count)
            if not hasattr(column.type, "value_type"):
                break
            lengths = column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
            if depth == 0:
                counts = lengths
            else:
                inner.append(self._one_length(name, lengths))
            column = column.flatten()
        values = column.to_numpy(zero_copy_only=False)
        return counts, values.reshape(-1, *inner)

    def _one_length(self, name: str, lengths: np.ndarray) -> int:
        if len(lengths) and (lengths != lengths[0]).any():
            raise N3LOError(f"{self.filename}: '{name}' holds lists of lists of differing lengths")
        return int(lengths[0]) if len(lengths) else 1

    def close(self) -> None:
        self.file.close()


def _arrow_number(kind: Any) -> np.dtype[Any] | None:
    """The type of the numbers in a column, or in the lists of one."""
    for _ in range(3):
        if types.is_dictionary(kind) or not hasattr(kind, "value_type"):
            break
        kind = kind.value_type
    numeric = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return np.dtype(kind.to_pandas_dtype()) if numeric else None
