"""Writing beside and renaming, so that nobody sees half of an export."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from apps.contract import N3LOError

DATABASES = (".sqlite", ".sqlite3", ".db")  # endings of SQLite files
_OURS = b"N3LO"  # in the header of every SQLite file that we write


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name to write at, in the same folder; what is written there becomes `path`."""
    if path.is_dir():
        raise N3LOError(f"export to '{path}': that is a folder; name a file in it")
    beside = _beside(path)
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path, holds: str) -> Iterator[Path]:
    """A folder to write in, which becomes `path`.

    Args:
        holds: a part of the names of the files in it; a folder with others is not replaced.
    """
    path = path.resolve()  # of "." too
    others = (each.is_file() and holds not in each.name for each in path.rglob("*"))
    if path.is_file() or any(others):
        raise N3LOError(f"export to '{path}': that is not an earlier export; name another folder")
    beside = _beside(path)
    before = beside.with_name(f"{beside.name}.before")
    try:
        beside.mkdir()
        yield beside
        if path.exists():
            path.rename(before)
        beside.rename(path)
    finally:
        for left in (beside, before):
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def whole_database(path: Path) -> Iterator[Path]:
    """A name to build an SQLite file at, on this host's own disk; it becomes `path`.

    On network file systems each of the many small writes takes long, and locks may not work.
    """
    if path.suffix not in DATABASES:
        raise N3LOError(f"export to '{path}': the file must end in {', '.join(DATABASES)}")
    if path.is_file() and not _is_ours(path):  # who names it may want to add to it
        raise N3LOError(
            f"export to '{path}': that is not an earlier export, and would be replaced; name "
            f"another file"
        )
    with tempfile.TemporaryDirectory(prefix="n3lo-") as folder:
        built = Path(folder) / "built.db"
        yield built
        with closing(sqlite3.connect(built)) as connection:
            connection.execute(f"PRAGMA application_id = {int.from_bytes(_OURS)}")
        with whole_file(path) as beside:
            shutil.copyfile(built, beside)


def _is_ours(path: Path) -> bool:
    """By the application id: https://sqlite.org/fileformat2.html#application_id."""
    with open(path, "rb") as file:
        return file.read(72)[68:] == _OURS


def _beside(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.{os.getpid()}")
