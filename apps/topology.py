"""The ranks of one task: how many there are, where they run, and on which device."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from mpi4py import MPI

from apps.contract import Layout, N3LOError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """This rank among the ranks of its task."""

    comm: MPI.Intracomm
    rank: int
    num_ranks: int
    node_ranks: int  # on this node
    device: torch.device
    hosts: list[str]  # of each rank

    @classmethod
    def start(cls, layout: Layout, comm: MPI.Intracomm) -> Topology:
        """Find this rank's place; collective.

        Raises:
            N3LOError: other ranks were started than the layout asks for, or GPUs are missing.
        """
        if comm.size != layout.num_ranks:
            raise N3LOError(
                f"layout: num_workers x ranks_per_worker = {layout.num_workers} x "
                f"{layout.ranks_per_worker} = {layout.num_ranks} ranks, "
                f"but {comm.size} were started"
            )
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        return cls(
            comm=comm,
            rank=comm.rank,
            num_ranks=comm.size,
            node_ranks=node.size,
            device=_device(layout, node),
            hosts=comm.allgather(socket.gethostname()),
        )

    @property
    def is_first(self) -> bool:
        """Rank 0 alone indexes the data, decides, and writes files."""
        return self.rank == 0

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def from_first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on every rank."""
        return self.comm.bcast(make() if self.is_first else None)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, on every rank with the same bits; on the CPU."""
        local = np.ascontiguousarray(tensor.detach().cpu().numpy())
        total = np.empty_like(local)
        # Unlike an all-reduce, this cannot round differently on two ranks.
        self.comm.Reduce(local, total)
        self.comm.Bcast(total)
        return torch.from_numpy(total)


def _device(layout: Layout, node: MPI.Intracomm) -> torch.device:
    """The CPU, or this rank's own GPU.

    Some launchers show each rank its own GPUs alone, others show all of them to every rank.
    """
    if layout.gpus_per_rank == 0:
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if visible == 0:
        raise N3LOError(
            f"layout.gpus_per_rank: {layout.gpus_per_rank}, but PyTorch sees no GPU on "
            f"{socket.gethostname()}"
        )
    needed = node.size * layout.gpus_per_rank
    first_gpus = node.allgather(str(torch.cuda.get_device_properties(0).uuid))
    own_gpus = len(set(first_gpus)) == node.size
    if not own_gpus and visible < needed:
        raise N3LOError(
            f"layout.gpus_per_rank: {node.size} ranks x {layout.gpus_per_rank} = {needed} GPUs, "
            f"but {socket.gethostname()} shows {visible}"
        )
    device = torch.device("cuda", 0 if own_gpus else node.rank * layout.gpus_per_rank)
    torch.cuda.set_device(device)
    return device
