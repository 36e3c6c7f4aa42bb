"""Writing beside and renaming, so that nobody sees half of a report or an export."""

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
_MARKER = "written_by_n3lo.txt"  # in every folder that we write, with the names of its files


def check_file(path: Path) -> None:
    """
    Raises:
        N3LOError: no file can be written there, as far as that is seen without trying.
    """
    if path.is_dir():
        raise N3LOError(f"cannot write '{path}': that is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise N3LOError(f"cannot write '{path}': that is a device; name a file")
    _check_room(path.parent, path)


def check_folder(path: Path) -> None:
    """
    Raises:
        N3LOError: no file can be written in a folder of that name, as far as that is seen.
    """
    if path.exists() and not path.is_dir():
        raise N3LOError(f"cannot write '{path}': that is a file; name a folder")
    _check_room(path, path)


def _check_room(folder: Path, path: Path) -> None:
    """Whether the folder in which `path` is to be is open to us, or can be made."""
    folder = folder.absolute()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir():
        raise N3LOError(f"cannot write '{path}': '{there}' is a file; name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise N3LOError(f"cannot write '{path}': '{there}' cannot be written to")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name to write at, in the same folder; what is written there becomes `path`.

    Raises:
        N3LOError: it cannot be written.
    """
    check_file(path)
    try:
        beside = _beside(path)
        try:
            yield beside
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:  # while writing, it does not always know the file
        if error.strerror is None:  # of a library, about something else
            raise
        raise N3LOError(f"cannot write '{path}': {error.strerror}") from None


def write_whole(path: Path, text: str) -> None:
    """Write a text file.

    Raises:
        N3LOError: it cannot be written.
    """
    with whole_file(path) as beside:
        beside.write_text(text, encoding="utf-8")


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to write in, which becomes `path`.

    Raises:
        N3LOError: there is a folder with files that are not of an earlier export.
    """
    path = path.resolve()  # of "." too
    check_folder(path)
    _check_room(path.parent, path)
    others = _files(path) - _files_by_marker(path)
    if others:
        raise N3LOError(
            f"export to '{path}': '{min(others)}' in it is of no earlier export; name another"
        )
    beside = _beside(path)
    before = beside.with_name(f"{beside.name}.before")
    try:
        beside.mkdir()
        yield beside
        names = sorted({*_files(beside), _MARKER})
        (beside / _MARKER).write_text("\n".join(names) + "\n", encoding="utf-8")
        if path.exists():
            path.rename(before)
        beside.rename(path)
    finally:
        for left in (beside, before):
            shutil.rmtree(left, ignore_errors=True)


def _files(folder: Path) -> set[str]:
    """All in it that is no folder, by the names within it."""
    return {str(each.relative_to(folder)) for each in folder.rglob("*") if not each.is_dir()}


def _files_by_marker(folder: Path) -> set[str]:
    """Those that we have written there."""
    marker = folder / _MARKER
    return set(marker.read_text(encoding="utf-8").splitlines()) if marker.is_file() else set()


@contextmanager
def whole_database(path: Path) -> Iterator[Path]:
    """A name to build an SQLite file at, on this host's own disk; it becomes `path`.

    On network file systems each of the many small writes takes long, and locks may not work.
    """
    if path.suffix not in DATABASES:
        raise N3LOError(f"export to '{path}': the file must end in {', '.join(DATABASES)}")
    check_file(path)
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
