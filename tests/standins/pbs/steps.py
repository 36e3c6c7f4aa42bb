"""What aprun and mpiexec have in common here: a job's nodes, and the start of ranks."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Sequence
from pathlib import Path

NODEFILE = Path(os.environ["PBS_NODEFILE"])


def options_of(words: Sequence[str], needed: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The options, which are `needed` and no others, and the program with its arguments."""
    num = 2 * len(needed)
    options = dict(zip(words[:num:2], words[1:num:2], strict=True))
    if options.keys() != set(needed):
        sys.exit(f"options {sorted(options)} and not {sorted(needed)}")
    return options, list(words[num:])


def claim(host: str, part: str = "") -> None:
    """Take a node of the job, or a part of it, until this process has ended."""
    if host not in NODEFILE.read_text().split():
        sys.exit(f"{host} is not a node of this job")
    lock = os.open(NODEFILE.with_suffix(f".{host}.{part}"), os.O_CREAT | os.O_WRONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"{host} {part} is taken by another task, or twice by this one")
    os.set_inheritable(lock, True)


def start(ranks: int, program: list[str]) -> None:
    """Become an mpirun, which holds what was claimed."""
    mpirun = ["mpirun", "--host", f"localhost:{ranks}", "-n", str(ranks), "--bind-to", "none"]
    quick = ["--mca", "pml", "ob1", "--mca", "btl", "self,sm", "--mca", "osc", "^ucx"]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    os.execvpe("mpirun", [*mpirun, *quick, *program], {**os.environ, **root})
