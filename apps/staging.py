"""Data files on the node's own disk, which a shared file system would else serve to every rank.

All ranks of a node, and several jobs on it, may ask at once: one of them copies a file, and the
others wait for it. What is copied stays for later jobs, until space is short.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from apps.contract import N3LOError

PREFIX = "n3lo-"  # of all that this module writes, so that it removes nothing else
SPARE_BYTES = 10**9  # of the disk that others may need,
SPARE_SHARE = 0.05  # or this part of a small one

_held: dict[Path, int] = {}  # open files: their locks keep `_remove` of other jobs away


def stage(
    files: Sequence[str], cache: str | None = None, copy_command: str | Sequence[str] | None = None
) -> list[Path]:
    """Copy files to a folder, once on each node, and keep the copies as long as this process lives.

    A local file is copied again when its size or its time has changed; one that cannot be copied is
    used where it is, with a warning. A file is remote if it does not exist here and there is a
    command to fetch it; its copy counts as good from then on.

    Args:
        files: paths, or what the command understands.
        cache: a folder of this node, such as "$TMPDIR/data"; it is made, for you alone, if need be.
            None: the environment's DATA_CACHE; if that is not set either, nothing is copied.
        copy_command: with {} for the source and {} for the target, run without a shell. None: the
            environment's DATA_COPY_COMMAND; if that is not set either, a plain copy.

    Returns:
        Where each file is now, in the same order.

    Raises:
        N3LOError: a wrong setting, or a remote file that cannot be copied.
    """
    key = "data.cache" if cache else "the variable DATA_CACHE"
    cache = cache or os.environ.get("DATA_CACHE")
    if not cache:
        return [Path(file) for file in files]
    folder, command = _folder(cache, key), _command(copy_command)
    return [_staged(file, folder, command) for file in files]


def _folder(cache: str, key: str) -> Path:
    for name in re.findall(r"\$\{?(\w+)", cache):
        if name not in os.environ:
            raise N3LOError(f"{key}: '{cache}': the variable {name} is not set on this node")
    folder = Path(os.path.expandvars(cache)).expanduser().absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise N3LOError(f"{key}: '{folder}' cannot be made: {error.strerror}") from error
    return folder


def _command(setting: str | Sequence[str] | None) -> list[str]:
    """The words of the command; none for a plain copy."""
    key = "data.copy_command" if setting else "the variable DATA_COPY_COMMAND"
    setting = setting or os.environ.get("DATA_COPY_COMMAND") or []
    try:
        words = shlex.split(setting) if isinstance(setting, str) else list(setting)
    except ValueError as error:
        raise N3LOError(f'{key}: "{setting}": a quote is not closed') from error
    if words and sum(word.count("{}") for word in words) != 2:
        raise N3LOError(
            f"{key}: '{shlex.join(words)}': needs {{}} twice, for the source and for the target, "
            "as in 'xrdcp {} {}'"
        )
    return words


def _staged(file: str, folder: Path, command: list[str]) -> Path:
    is_local = os.path.exists(file)
    if not is_local and not command:
        raise N3LOError(
            f"data.files: '{file}' does not exist; set data.copy_command to fetch it from elsewhere"
        )
    source = os.path.abspath(file) if is_local else file
    # Another command may find another file of that name.
    identity = source if is_local else shlex.join([*command, source])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    copy = folder / f"{PREFIX}{digest}-{Path(file).name}"
    try:
        with _lock(copy):
            facts = os.stat(source) if is_local else None
            if not _fits(copy, facts):
                _copy(source, copy, command, facts)
            _hold(copy)
    except (OSError, N3LOError) as error:
        reason = getattr(error, "strerror", None) or error
        if not is_local:
            raise N3LOError(f"data.files: '{file}' cannot be copied: {reason}") from error
        print(f"N3LO: '{file}' is read where it is: {reason}", file=sys.stderr, flush=True)
        return Path(file)
    return copy


@contextmanager
def _lock(copy: Path, wait: bool = True) -> Iterator[None]:
    """Alone with a copy; the system ends the lock of a process that is killed.

    The lock's file is never removed: two processes could else each hold one of that name.
    """
    number = os.open(_beside(copy, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(number)


def _beside(copy: Path, ending: str) -> Path:
    return copy.with_name(f".{copy.name}.{ending}")


def _fits(copy: Path, source: os.stat_result | None) -> bool:
    """Whether there is a copy, and of what a local source is now."""
    if source is None or not copy.exists():
        return copy.exists()
    own = copy.stat()
    return (own.st_size, own.st_mtime_ns) == (source.st_size, source.st_mtime_ns)


def _copy(source: str, copy: Path, command: list[str], facts: os.stat_result | None) -> None:
    """Copy beside, and rename: there is never half a copy. Of a remote file no facts are known."""
    _drop_parts(copy)
    _make_room(copy.parent, facts.st_size if facts else 0)
    part = _beside(copy, f"{os.getpid()}.part")
    try:
        if command:
            _run(command, source, str(part))
        else:
            shutil.copyfile(source, part)
        size = part.stat().st_size
        if size != (facts.st_size if facts else size) or (size == 0 and not facts):
            raise N3LOError(f"the copy has {size} bytes")
        with part.open("rb") as file:
            os.fsync(file.fileno())
        if facts:
            os.utime(part, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        os.replace(part, copy)
    finally:
        part.unlink(missing_ok=True)


def _run(command: list[str], source: str, target: str) -> None:
    names = iter((source, target))
    words = [re.sub(r"\{\}", lambda _: next(names), word) for word in command]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise N3LOError(f"'{words[0]}': {error.strerror}") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise N3LOError(f"{shlex.join(words)}: {lines[-1]}")


def _hold(copy: Path) -> None:
    """Keep a copy from being removed as long as this process lives; its lock is held."""
    number = os.open(copy, os.O_RDONLY)
    fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
    if copy in _held:
        os.close(_held[copy])
    _held[copy] = number
    with suppress(PermissionError):  # the copy of another user
        os.utime(copy, ns=(time.time_ns(), copy.stat().st_mtime_ns))


def _make_room(folder: Path, num_bytes: int) -> None:
    """Have space for so many bytes: the copies that nobody holds go, the longest unused first."""
    locks = folder.glob(f".{PREFIX}*.lock")
    copies = [lock.with_name(lock.name.removeprefix(".").removesuffix(".lock")) for lock in locks]
    for copy in sorted(copies, key=_last_use):
        if _has_room(folder, num_bytes):
            return
        with suppress(OSError):  # somebody holds it, or it is gone
            _remove(copy)
    if not _has_room(folder, num_bytes):
        free = shutil.disk_usage(folder).free
        raise N3LOError(f"only {free / 1e9:.1f} GB are free in '{folder}'")


def _last_use(copy: Path) -> int:
    with suppress(FileNotFoundError):
        return copy.stat().st_atime_ns
    return 0


def _has_room(folder: Path, num_bytes: int) -> bool:
    usage = shutil.disk_usage(folder)
    return usage.free - num_bytes >= min(SPARE_BYTES, SPARE_SHARE * usage.total)


def _remove(copy: Path) -> None:
    with _lock(copy, wait=False):
        _drop_parts(copy)
        with copy.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            copy.unlink()


def _drop_parts(copy: Path) -> None:
    """What a process that was killed has left; the lock is held, so that nobody else copies."""
    for part in copy.parent.glob(escape(_beside(copy, "").name) + "*.part"):
        part.unlink()
