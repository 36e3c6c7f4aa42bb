"""What a process needs to drive a study, and its errors in one line: by command or in Python."""

from __future__ import annotations

import errno
import importlib.metadata
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from apps.contract import N3LOError
from sites.base import SiteError, threads
from workflow import extras

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # to write
NO_WAY = (errno.EACCES, errno.EPERM, errno.ENOTDIR)  # to read or to write

_driving = threading.Lock()
_forked = threading.Event()  # while the parent ran a study, whose lock is never free here


def _note_fork() -> None:
    if _driving.locked():
        _forked.set()


os.register_at_fork(after_in_child=_note_fork)


def prepare() -> None:
    """Once, before numpy is imported, in a process that does nothing else."""
    os.environ.update(_variables())
    logging.raiseExceptions = False  # on a full disk, Parsl's log would fill the screen instead


@contextmanager
def prepared(*names: str) -> Iterator[None]:
    """The same for a time, in a process that has more to do.

    Args:
        names: of variables that are set meanwhile, and are to be as they were afterwards.

    Raises:
        N3LOError: it drives a study already, in another thread.
    """
    if _forked.is_set():
        raise N3LOError(
            "this process was forked from one that runs a study, and cannot run another; start it "
            "by multiprocessing.get_context('spawn')"
        )
    if not _driving.acquire(blocking=False):
        raise N3LOError(
            "this process runs a study already; wait for it, or start the other one by the command"
        )
    before = {name: os.environ.get(name) for name in (*_variables(), *names)}
    raises = logging.raiseExceptions
    try:
        prepare()
        yield
    finally:
        logging.raiseExceptions = raises
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _driving.release()


def _variables() -> dict[str, str]:
    """One thread, or those of the search fight the ranks; and a PATH with Parsl's programs.

    PATH lacks them, and mpirun, where the virtual environment is not activated.
    """
    programs = str(Path(sys.executable).parent)
    return {**threads(1), "PATH": os.pathsep.join([programs, os.environ["PATH"]])}


def line_of(error: Exception, place: str) -> str | None:
    """What to say of an error that the user can mend; None of any other.

    Args:
        place: what was written or read, where the error does not know.
    """
    if isinstance(error, N3LOError | SiteError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return extras.remedy(error)
    if isinstance(error, OSError) and error.errno in (*NO_ROOM, *NO_WAY):
        does = "write" if error.errno in NO_ROOM else "read or write"
        lost = "nothing that finished is lost, and the same command goes on"
        # While writing, the file is not always known.
        return f"cannot {does} '{error.filename or place}': {error.strerror}; {lost}"
    return None


def require_installed() -> None:
    """Workers and ranks import `apps` by its name, from whatever folder they start in.

    Raises:
        N3LOError: they could not.
    """
    try:
        importlib.metadata.distribution("n3lo")
    except importlib.metadata.PackageNotFoundError:
        raise N3LOError(
            f"n3lo is not installed in {sys.prefix}: type 'make setup', or "
            f"'pip install -e \".[run]\"' in an environment of yours"
        ) from None
