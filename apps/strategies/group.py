"""The ranks of one worker: they share each batch and move by its mean gradient.

Each worker is a world of its own: a master never joins, and the end of one does not end another.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from apps.contract import N3LOError

TIMEOUT = timedelta(seconds=300)  # the first import of a slow file system can take a minute


class Group:
    """A worker of one rank; the others add how its ranks agree."""

    def __init__(self, comm: MPI.Intracomm, device: torch.device) -> None:
        self.comm = comm
        self._device = device
        self.connect()

    @property
    def leads(self) -> bool:
        """Whether this rank exchanges for the whole worker."""
        return self.comm.rank == 0

    def connect(self) -> None:
        """Meet the other ranks; collective."""

    def average(self, vector: torch.Tensor) -> None:
        """Give all ranks the mean of their vectors, in place."""

    def share(self, vector: torch.Tensor) -> None:
        """Give all ranks the vector of the one that leads, in place."""

    def close(self) -> None:
        """Leave the other ranks; collective."""


class HorovodGroup(Group):
    """The ranks agree through Horovod."""

    def connect(self) -> None:
        self._hvd = import_horovod()
        self._hvd.init(comm=self.comm)

    def average(self, vector: torch.Tensor) -> None:
        self._hvd.allreduce_(vector, name="gradient", op=self._hvd.Average)

    def share(self, vector: torch.Tensor) -> None:
        self._hvd.broadcast_(vector, root_rank=0, name="weights")

    def close(self) -> None:
        self.comm.Barrier()  # the first rank to shut down stops Horovod on all of them
        self._hvd.shutdown()


class TorchGroup(Group):
    """The ranks agree through torch.distributed: gloo on CPUs, NCCL on GPUs."""

    def connect(self) -> None:
        start_torch(self.comm, self._device)

    def average(self, vector: torch.Tensor) -> None:
        dist.all_reduce(vector)
        vector /= self.comm.size

    def share(self, vector: torch.Tensor) -> None:
        dist.broadcast(vector, src=0)

    def close(self) -> None:
        self.comm.Barrier()
        dist.destroy_process_group()


def join(comm: MPI.Intracomm, device: torch.device, backend: str) -> Group:
    """The group of a worker's ranks; collective over them."""
    if comm.size == 1:
        return Group(comm, device)
    return {"horovod": HorovodGroup, "ddp": TorchGroup}[backend](comm, device)


def import_horovod() -> Any:
    try:
        return importlib.import_module("horovod.torch")
    except ImportError as error:
        raise N3LOError(
            "Horovod is not installed: run 'make setup', or set training.backend = \"ddp\""
        ) from error


def start_torch(comm: MPI.Intracomm, device: torch.device) -> None:
    """torch.distributed as a world of these ranks."""
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=_meet(comm),
        rank=comm.rank,
        world_size=comm.size,
        timeout=TIMEOUT,
    )


def _meet(comm: MPI.Intracomm) -> dist.TCPStore:
    """A store in the first rank on a port that the system picks, so that tasks never collide."""
    hosts = comm.allgather(socket.gethostname())
    one_host = len(set(hosts)) == 1
    if one_host and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    host = "127.0.0.1" if one_host else hosts[0]
    # Left to itself, the store would listen on all interfaces.
    listener = socket.create_server((host, 0)) if comm.rank == 0 else None
    port = comm.bcast(listener.getsockname()[1] if listener else None)
    return dist.TCPStore(
        host,
        port,
        comm.size,
        listener is not None,
        TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,
    )
