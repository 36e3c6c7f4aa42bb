"""Look around from a rank: what `sites check` starts on a machine, on each of its nodes.

    srun -n 2 python -P -m apps.probe /path/reports TOKEN

Each rank writes one file, anew before each thing that it tries: MPI and torch may well end or stop
the process, and the file then says in what it was.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from apps.contract import write_json
from apps.scout import LIMIT_S, TOKEN, Report, versions


def main() -> None:
    began = time.time()
    signal.alarm(LIMIT_S)  # ends the process, also one that MPI has stopped
    reports, token = Path(sys.argv[1]), sys.argv[2]
    report = Report(
        # Slurm's nodes need not be named as their hosts are.
        host=os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        began=began,
        cores=len(os.sched_getaffinity(0)),  # before libraries bind threads
        versions=versions(),
        free_gb=free_gb(reports),
    )
    path = reports / f"{report.host}-{os.getpid()}.json"
    parts: dict[str, Callable[[Report], None]] = {
        "token": lambda report: read_token(reports.parent / TOKEN, token),
        "temporary": try_temporary,
        "mpi": start_mpi,  # before torch and Horovod: each would start MPI in its own way
        "sum": add_up,
        "h5py": try_h5py,
        "torch": try_torch,
        "horovod": try_horovod,
    }
    for name, look in parts.items():
        report.errors[name] = "the process ended or hung in it"
        write_json(path, dataclasses.asdict(report))
        try:
            look(report)
        except Exception as error:  # noqa: BLE001  whatever it is, it is what was found
            report.errors[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        else:
            del report.errors[name]
    write_json(path, dataclasses.asdict(report))


def read_token(path: Path, token: str) -> None:
    if path.read_text() != token:
        raise ValueError(f"{path} is not what the driver wrote")


def try_temporary(report: Report) -> None:
    """Not Python's choice, which passes over a folder that cannot be used."""
    folder = os.environ.get("TMPDIR") or tempfile.gettempdir()
    report.temporary, report.temporary_gb = folder, free_gb(Path(folder))
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(1 << 20))
        file.flush()


def start_mpi(report: Report) -> None:
    before = time.perf_counter()
    from mpi4py import MPI

    report.rank, report.size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    report.mpi_library = MPI.Get_library_version().splitlines()[0].split(",")[0].strip("\0 ")
    report.mpi_s = time.perf_counter() - before


def add_up(report: Report) -> None:
    """A first sum over all ranks, in which they find each other."""
    from mpi4py import MPI

    before = time.perf_counter()
    comm = MPI.COMM_WORLD
    total, right = comm.allreduce(comm.rank + 1), comm.size * (comm.size + 1) // 2
    if total != right:
        raise ValueError(f"the numbers of {comm.size} ranks add up to {total}, not {right}")
    report.mpi_s = (report.mpi_s or 0.0) + time.perf_counter() - before


def try_h5py(report: Report) -> None:
    importlib.import_module("h5py")


def try_torch(report: Report) -> None:
    before = time.perf_counter()
    import torch

    report.torch_s = time.perf_counter() - before
    number = torch.cuda.device_count()
    report.gpus = [torch.cuda.get_device_name(gpu) for gpu in range(number)]


def try_horovod(report: Report) -> None:
    """It is not needed; but where it is installed it must load."""
    if importlib.util.find_spec("horovod") is not None:
        importlib.import_module("horovod.torch")


def free_gb(folder: Path) -> float:
    return shutil.disk_usage(folder).free / 1e9


if __name__ == "__main__":
    main()
