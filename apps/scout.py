"""The app of `sites check`: start one small program on a machine, and bring back what it found.

Like `apps.launch` it runs in a Parsl worker: standard library only, plain types in and out, and
nothing raised but RuntimeError(text).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apps import room
from apps.contract import VERSION, from_dict, read_json
from apps.launch import PILOT_END, Launch, job

LIMIT_S = 240  # for all that the ranks do; to import torch alone can take minutes
GRACE_S = 10.0  # for files of other nodes to be seen

# In the folder of a check. The token is written by the driver, the rest where the ranks are.
TOKEN, REPORTS, STDOUT, STDERR = "token.txt", "reports", "stdout.txt", "stderr.txt"


@dataclass(kw_only=True)
class Report:
    """What one rank found; `errors` says of each part that failed why it did.

    Parts are "token", "temporary", "mpi", "sum", "h5py", "torch" and "horovod".
    """

    host: str
    began: float  # as of time()
    cores: int
    versions: dict[str, str]
    errors: dict[str, str] = field(default_factory=dict)
    free_gb: float | None = None  # in the folder of the check
    temporary: str | None = None  # its folder for temporary files
    temporary_gb: float | None = None  # free there
    rank: int | None = None
    size: int | None = None  # as MPI says
    mpi_library: str | None = None
    mpi_s: float | None = None  # until MPI had started
    torch_s: float | None = None  # to import it
    gpus: list[str] | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How it went to start the ranks."""

    host: str  # of the worker
    launched: float  # as of time()
    seconds: float
    exit_code: int | None  # of the launcher; None: it ran too long
    line: list[str]
    reports: list[Report]
    pilot_end: float | None  # as of time(); None where there is no batch job

    @classmethod
    def of(cls, content: dict[str, Any]) -> Answer:
        """From what `run_probe` returns."""
        reports = [from_dict(Report, each) for each in content["reports"]]
        return from_dict(cls, {**content, "reports": reports})


def run_probe(how: dict[str, Any], folder: str, token: str, num_ranks: int) -> dict[str, Any]:
    """Run `apps.probe` by a launch line, and return an Answer as a dict.

    Args:
        how: a Launch as a dict.
        folder: of the check.
        token: what the driver wrote into its file in that folder.
        num_ranks: how many ranks the line starts.

    Raises:
        RuntimeError: the line could not be started.
    """
    try:
        return dataclasses.asdict(_run(Launch.of_plain(how), Path(folder), token, num_ranks))
    except Exception as error:  # noqa: BLE001  nothing foreign may cross to the driver
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def _run(how: Launch, folder: Path, token: str, num_ranks: int) -> Answer:
    reports = folder / REPORTS
    reports.mkdir(exist_ok=True)
    pilot_end = float(os.environ.get(PILOT_END, "inf"))
    with room.Room.of_pilot().taken("probe", how.need, how.avoid, pilot_end) as tenant:
        if tenant is None:
            raise TimeoutError("the pilot has no room for the ranks")
        command, environment = how.placed(tenant.place)
        line = [*command, sys.executable, "-P", "-m", "apps.probe", str(reports), token]
        launched, exit_code = time.time(), None
        with (
            open(folder / STDOUT, "wb") as stdout,
            open(folder / STDERR, "wb") as stderr,
            job(line, environment, (stdout, stderr), tenant) as process,
            contextlib.suppress(subprocess.TimeoutExpired),
        ):
            exit_code = process.wait(LIMIT_S)
        seconds = time.time() - launched
    deadline = time.monotonic() + GRACE_S
    while len(found := sorted(reports.glob("*.json"))) < num_ranks and exit_code == 0:
        if time.monotonic() > deadline:
            break
        time.sleep(0.5)
    return Answer(
        host=socket.gethostname(),
        launched=launched,
        seconds=seconds,
        exit_code=exit_code,
        line=line,
        reports=[from_dict(Report, read_json(path)) for path in found],
        pilot_end=pilot_end if pilot_end < float("inf") else None,
    )


def versions() -> dict[str, str]:
    """What is installed, without importing any of it."""
    found = {"python": platform.python_version(), "n3lo": VERSION}
    for name in ("torch", "mpi4py", "h5py", "horovod"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
