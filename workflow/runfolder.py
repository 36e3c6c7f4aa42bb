"""The folder of a run: whose it is, who writes to it, and what an earlier driver left running."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import psutil

from apps.contract import N3LOError, write_text
from workflow.ledger import LOCK, Ledger
from workflow.study import StudyFile, load

# What may change between two starts of a study: its search, and what no result depends on.
MAY_CHANGE = (
    "search.",
    "layout.walltime_min",
    "training.tensorboard",
    "data.memory_gb",
    *("data.files", "model.files"),  # their contents are compared by fingerprint
)
# The study as it began, which says whose folder it is; and as a later start changed it.
FIRST, LATEST = "study.toml", "latest.toml"
# Set for all that a driver starts, so that the next one finds what a killed one left.
MARK = "N3LO_RUN"


@contextmanager
def opened(folder: Path, file: StudyFile) -> Iterator[None]:
    """Take possession of a run folder, new or of an earlier start of this study.

    Raises:
        N3LOError: another study's folder, or another driver is at work in it.
    """
    check(folder, file)
    first, copy = folder / FIRST, file.copy  # which may fail, before there is a folder
    with taken(folder):
        if not first.exists():
            write_text(first, copy)
        elif _latest(folder).read_text(encoding="utf-8") != copy:
            write_text(folder / LATEST, copy)
        yield


def check(folder: Path, file: StudyFile) -> None:
    """See that a study may run in a folder, which need not be there.

    Raises:
        N3LOError: it is another study's, or Parsl cannot work in one of that name.
    """
    _check_name(folder)
    if (folder / FIRST).exists():
        _check_same_study(folder / FIRST, file)


def read(folder: Path) -> tuple[Ledger, StudyFile]:
    """The ledger of a run folder, and its study as the last start had it.

    Needs neither the study's data nor its model, and the folder may have any name.

    Raises:
        N3LOError: it is no run folder.
    """
    ledger = Ledger(folder)
    if not ledger.sessions:
        runs = sorted(path.parent.name for path in folder.glob(f"*/{ledger.path.name}"))
        near = f", such as {', '.join(runs)} in it" if runs else ", or a study file"
        raise N3LOError(f"there is no ledger in '{folder}': name a run folder{near}")
    return ledger, study_of(folder, ledger)


def study_of(folder: Path, ledger: Ledger | None = None) -> StudyFile:
    """The study of a run folder, as the last start had it.

    Args:
        ledger: of the folder; with the budget of that start, which the command line may have set.
    """
    last = ledger.sessions[-1] if ledger is not None else {}
    names = ("num_trials", "num_parallel")
    return load(_latest(folder), {f"search.{name}": last[name] for name in names if name in last})


def _latest(folder: Path) -> Path:
    return folder / LATEST if (folder / LATEST).exists() else folder / FIRST


@contextmanager
def taken(folder: Path) -> Iterator[None]:
    """Be the one driver at work in a folder; what an earlier one left running is killed.

    Raises:
        N3LOError: another driver is at work in it, or Parsl cannot be.
    """
    _check_name(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder):
        sweep(folder)
        os.environ[MARK] = _mark(folder)
        try:
            yield
        finally:
            sweep(folder)


def _check_name(folder: Path) -> None:
    """Parsl writes the folder's name into shell scripts without quotes."""
    strange = sorted(set(re.sub(r"[\w/.,:=@%+-]", "", str(folder.resolve()))))
    if strange:
        raise N3LOError(
            f"--runs: Parsl cannot work in '{folder.resolve()}', whose name holds {strange}; "
            f"choose another folder by --runs"
        )


def _check_same_study(copy: Path, file: StudyFile) -> None:
    there = dict(flat(dataclasses.asdict(load(copy).study)))  # with defaults, spelt out or not
    here = dict(flat(dataclasses.asdict(file.study)))
    searched = {*file.study.search.space, *load(copy).study.search.space}  # trials have their own
    for key in [*here, *there]:
        may_change = key.startswith(MAY_CHANGE) or key in searched
        fixed = key.startswith("search.objective") or not may_change
        if fixed and here.get(key) != there.get(key):
            is_set = any(f"{key}.".startswith(f"{name}.") for name in file.replaced)
            where = f"as it was set over {file.path}" if is_set else f"in {file.path}"
            raise N3LOError(
                f"{copy.parent} belongs to another study: {key} is {there.get(key, 'not set')!r} "
                f"there and {here.get(key, 'not set')!r} {where}; give this one another name"
            )


def flat(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a study, by their dotted paths."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One driver a folder: two would write one ledger. The kernel frees it when a driver dies."""
    with open(folder / LOCK, "a+") as file:
        try:
            _take(file)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                file.seek(0)
                owner = file.read().strip() or "unknown"
                raise N3LOError(
                    f"another driver is at work in {folder} ({owner}); wait for it or stop it"
                ) from None
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):  # some parallel file systems
                raise
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def _take(file: TextIO, patience_s: float = 1.0) -> None:
    """Lock a file; a `status` that just looks whether it is locked does not count."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def sweep(folder: Path) -> int:
    """Kill what a driver of this folder left running on this host; return how many there were.

    Parsl's interchange and workers outlive a driver that is killed, and would go on training.
    They are known by a variable that they inherited, because numbers of processes are used again.
    """
    left = [process for process in psutil.process_iter() if _is_marked(process, _mark(folder))]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=10)
    return len(left)


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        # The driver's own environment, as the kernel shows it, is that of its start: without mark.
        return process.pid != os.getpid() and process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False


def _mark(folder: Path) -> str:
    return str(folder.resolve())
