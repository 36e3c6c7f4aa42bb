"""An HDF5 file that is there when it is complete, and leaves nothing behind when it cannot be."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import h5py

from apps.contract import N3LOError


@contextmanager
def new_h5(path: Path) -> Iterator[tuple[h5py.File, Callable[[], None]]]:
    """Write beside, then rename. An existing file is replaced then, and not before.

    Yields:
        The file, and what to call now and then: it raises the first error of writing.

    Raises:
        N3LOError: the file cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with _Disk(beside, "w+") as disk:
            with h5py.File(disk, "w") as file:
                yield file, disk.check
            disk.check()
            os.fsync(disk.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise N3LOError(f"'{path}' cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # renamed, or never made
            beside.unlink()


class _Disk(io.FileIO):
    """Keeps the first error of writing, as of a full disk, and says nothing of it to HDF5.

    HDF5 2.0 crashes the process where it cannot write what it has cached.
    """

    error: OSError | None = None

    def check(self) -> None:
        if self.error:
            raise self.error

    def write(self, data: memoryview) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while left:
                left = left[super().write(left) :]
        except OSError as error:
            self.error = self.error or error
        return size

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self.error = self.error or error
            return self.tell()
