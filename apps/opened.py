"""Which files a user's code reads. Python tells of each (PEP 578); libraries in C may not."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SYSTEM = tuple(
    Path(folder).resolve()
    for folder in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *(sys.prefix, sys.base_prefix, Path(__file__).parent),
        *("/proc", "/sys", "/dev", "/etc", "/usr"),
    )
)
_CODE = (".py", ".pyc", ".so")  # has its own way into a task's key
_ABOUT_PACKAGES = (".egg-info", ".dist-info")
_listening: list[set[str]] = []


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _listening and not isinstance(arguments[0], int):
        path, _, flags = arguments
        if not flags & (os.O_WRONLY | os.O_RDWR):
            _listening[-1].add(os.fsdecode(path))


@contextmanager
def files_read() -> Iterator[set[Path]]:
    """What is read within: files that are no code, nor of the system, of Python or of a library.

    The set is filled when this is left. Files in hidden folders, such as ~/.cache, are left out:
    libraries keep there what they download.
    """
    if not _listening:
        sys.addaudithook(_hear)  # cannot be taken back; without a listener it does nothing
    found: set[Path] = set()
    _listening.append(set())
    try:
        yield found
    finally:
        for path in map(Path, _listening.pop()):
            place = path.resolve()
            hidden = any(
                part.startswith(".") or part.endswith(_ABOUT_PACKAGES) for part in place.parts
            )
            system = any(map(place.is_relative_to, _SYSTEM))
            if place.is_file() and place.suffix not in _CODE and not hidden and not system:
                found.add(place)
