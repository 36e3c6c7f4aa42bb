"""HDF5: datasets, and the columns of those whose elements are records."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from apps.contract import N3LOError
from apps.formats.source import Source
from apps.rows import Axes, Jagged, Rows


class Hdf5(Source):
    """Without the locks that Lustre, GPFS and NFS often refuse."""

    kind = "HDF5"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.file = h5py.File(path, "r", locking=False)

    @cached_property
    def names(self) -> list[str]:
        names: list[str] = []

        def visit(name: str, item: Any) -> None:
            is_index = any(part.startswith("_i_") for part in name.split("/"))  # PyTables' own
            if isinstance(item, h5py.Dataset) and not is_index:
                names.extend([f"{name}/{column}" for column in item.dtype.names or ()] or [name])

        self.file.visititems(visit)
        return names

    def has(self, name: str) -> bool:
        return self._dataset(name) is not None or self._column(name) is not None

    def _open(self, name: str) -> Rows:
        found = self._dataset(name)
        found = self._column(name) if found is None else found
        assert found is not None
        return found

    def _dataset(self, name: str) -> Any:
        item = self.file.get(name) if name else None
        return item if isinstance(item, h5py.Dataset) and item.dtype.names is None else None

    def _column(self, name: str) -> _Column | None:
        """ "jets/pt" of a dataset "jets" whose elements are records."""
        above, _, column = name.rpartition("/")
        item = self.file.get(above) if above else None
        if isinstance(item, h5py.Dataset) and column in (item.dtype.names or ()):
            return _Column(item, column)
        return None

    def members(self, group: str) -> list[str] | None:
        item = self.file.get(group) if group else None
        if isinstance(item, h5py.Group):
            return sorted(name for name in item if self._dataset(f"{group}/{name}") is not None)
        columns = item.dtype.names if isinstance(item, h5py.Dataset) else None
        return sorted(columns) if columns else None

    @property
    def num_events(self) -> int:
        """Also where there are frames alone, of which fields can be named."""
        if found := super().num_events:
            return found
        lengths = (len(rows) for _, rows in super().usable() if not isinstance(rows, N3LOError))
        return max(lengths, default=0)

    def usable(self) -> Iterator[tuple[str, Rows | Jagged | N3LOError]]:
        """Without what lies in frames, whose arrays are named after the layout of PyTables."""
        frames = tuple(f"{frame}/" for frame in self.frames)
        yield from (each for each in super().usable() if not each[0].startswith(frames))
        for frame in self.frames:
            reason = f"'{frame}' is a frame{self._as_parquet(frame)}"
            yield frame, N3LOError(f"{self.filename}: {reason}")

    @cached_property
    def frames(self) -> list[str]:
        """The groups that pandas wrote."""
        frames: list[str] = []

        def visit(name: str, item: Any) -> None:
            is_inside = frames and name.startswith(f"{frames[-1]}/")
            if "pandas_type" in item.attrs and not is_inside:
                frames.append(name)

        self.file.visititems(visit)
        return frames

    def remedy(self) -> str:
        if not self.frames:
            return ""
        return f"it holds frames{self._as_parquet(self.frames[0])}"

    def _as_parquet(self, frame: str) -> str:
        key = f", '{frame}'" if len(self.frames) > 1 else ""
        return (
            " as pandas' to_hdf writes them: write them as Parquet, "
            f"pandas.read_hdf('{Path(self.filename).name}'{key}).to_parquet('frame.parquet')"
        )

    def close(self) -> None:
        self.file.close()


class _Column:
    """One member of the records in an HDF5 dataset."""

    def __init__(self, dataset: Any, name: str) -> None:
        dtype = dataset.dtype[name]
        self.dtype, self.shape = dtype.base, (*dataset.shape, *dtype.shape)
        self.chunks = dataset.chunks and (*dataset.chunks, *dtype.shape)
        self._fields = dataset.fields(name)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Axes) -> np.ndarray:
        return self._fields[index[:1]][(slice(None), *index[1:])]
