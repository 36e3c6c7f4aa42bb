"""What all formats have in common: arrays by name, of which several can be read as one."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import numpy as np

from apps.contract import FILE, N3LOError
from apps.rows import Axes, Jagged, Rows, Same, needed_length, stack

# What a column of texts can become.
CLASS_NUMBERS = "class numbers are numpy.unique(texts, return_inverse=True)[1]"


class Source(ABC):
    """An open file. Its arrays are named "array" or "group/array"."""

    kind: ClassVar[str]  # as messages name the format

    def __init__(self, path: str) -> None:
        self.filename = path
        self.compressed: Sequence[str] = ()  # arrays that are unpacked whole to read a part
        self.trees: Sequence[str] = ()  # of ROOT
        self.number: np.generic = np.int64(0)  # what the field "@file" is for its events
        self._counted: str | None = None  # the array that says how many events there are

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Of all arrays, in the order of the file."""

    @abstractmethod
    def _open(self, name: str) -> Rows | Jagged:
        """One of them."""

    def _lists_of(self, name: str) -> Jagged | None:
        """An array whose events may have different numbers of values, though they happen not to."""
        return None

    @abstractmethod
    def close(self) -> None: ...

    def count_by(self, datasets: Iterable[str]) -> None:
        """Let "@file" be as long as the fields that it is read with: a file may hold other arrays.

        Args:
            datasets: of the fields, of which the first array counts.
        """
        expanded = [self.expand(each) for each in datasets]
        names = [name for each in expanded for name in stacked_names(each) or [each]]
        self._counted = next(filter(self.has, names), self._counted)

    @property
    def num_events(self) -> int:
        """The length of the array that counts; else that of most arrays."""
        if self._counted is not None:
            return len(self.rows(self._counted))
        lengths = [len(rows) for _, rows in self.usable() if not isinstance(rows, N3LOError)]
        return max(lengths, key=lengths.count, default=0)

    def has(self, name: str) -> bool:
        return name in self.names

    def members(self, group: str) -> list[str] | None:
        """The names of the arrays in a group, without it; None if there is no such group."""
        prefix = f"{group}/"
        below = [name.removeprefix(prefix) for name in self.names if name.startswith(prefix)]
        return sorted(name for name in below if "/" not in name) if below else None

    def find(self, text: str, axes: Axes = ()) -> Rows:
        """An array, or "(pt, eta, phi)": several as one (see `apps.rows.Stack`).

        Args:
            axes: which part of an event will be asked for; where events have different numbers of
                values, it says how many to make of them.

        Raises:
            KeyError: there is none of that name.
            N3LOError: it cannot be read as numbers.
        """
        length = needed_length(axes)
        rows = self._rows(text, as_lists=length is not None)
        if not isinstance(rows, Jagged):
            return rows
        if length is None:
            raise N3LOError(
                f"{self.filename}: '{text}' has a different number of values in each event; say "
                f"how many to take, as in '{text}[:, :10]' (zeros fill what an event lacks)"
            )
        return rows.padded(length)

    def rows(self, text: str) -> Rows | Jagged:
        """The same, before events get one length."""
        return self._rows(text, as_lists=False)

    def _rows(self, text: str, as_lists: bool) -> Rows | Jagged:
        if self.has(text):
            rows = self._lists_of(text) if as_lists else None
            rows = self._open(text) if rows is None else rows
            if not isinstance(rows, Jagged):
                self._check(text, rows)
            return rows
        names = stacked_names(text)
        if text == FILE:
            return Same(self.number, self.num_events)
        if names is None:
            raise KeyError(text)
        try:
            return stack({name: self._rows(name, as_lists) for name in names})
        except ValueError as error:
            raise N3LOError(f"{self.filename}: '{text}': {error}") from None

    def _check(self, name: str, rows: Rows) -> None:
        where = f"{self.filename}: '{name}'"
        if rows.dtype.kind not in "fiub":
            mend = f"; {CLASS_NUMBERS}" if rows.dtype.kind in "OSU" else ""
            raise N3LOError(f"{where} holds {rows.dtype}, not numbers{mend}")
        if len(rows.shape) == 0:
            raise N3LOError(f"{where} is a single number, not one row an event")

    def usable(self) -> Iterator[tuple[str, Rows | Jagged | N3LOError]]:
        """All arrays by name, or why one cannot be used."""
        for name in self.names:
            try:
                yield name, self.rows(name)
            except N3LOError as error:
                yield name, error

    def expand(self, text: str) -> str:
        """With the names in place of a pattern: "feature_*" -> "(feature_1, feature_2)"."""
        if self.has(text):
            return text
        parts = stacked_names(text) or [text]
        found = [name for part in parts for name in self._matches(part)]
        return text if found == [text] else f"({', '.join(found)})"

    def _matches(self, part: str) -> list[str]:
        if self.has(part) or not set("*?") & set(part):
            return [part]
        found = [name for name in self.names if fnmatchcase(name, part)]
        return sorted(found, key=_natural) or [part]

    def remedy(self) -> str:
        """What to do first, where arrays are not what a user calls them; or nothing."""
        return ""

    def missing(self) -> str:
        """What to add where a name is not found."""
        remedy = self.remedy()
        return f"; {remedy}" if remedy else ""


def stacked_names(text: str) -> list[str] | None:
    """ "(pt, eta)" -> ["pt", "eta"]; None of what is no stack."""
    if not (text.startswith("(") and text.endswith(")")):
        return None
    names = [name.strip() for name in text[1:-1].split(",")]
    return names[:-1] if len(names) > 1 and not names[-1] else names


def _natural(name: str) -> list[Any]:
    """For sorting: feature_2 before feature_10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]
