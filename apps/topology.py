"""The ranks of one task: what each is for, where it runs, and on which device."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from mpi4py import MPI
from mpi4py.util import pkl5

from apps.contract import Layout, N3LOError, Ranks, Training, ranks_of
from apps.rules import check_ranks

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where a rank stands among masters and workers."""

    parents: tuple[int, ...] = ()  # its masters; several, if each owns a part of the weights
    children: tuple[int, ...] = ()  # of a master: sub-masters, or the first rank of each worker
    group: tuple[int, ...] = ()  # of a worker: the ranks that share its batches, itself included
    worker: int = 0  # of a worker: its number

    @property
    def trains(self) -> bool:
        return bool(self.group)


def places_of(layout: Layout, ranks: Ranks) -> list[Place]:
    """The place of each rank: masters from the top down, then the workers.

    The lowest masters take equally many workers each, in order.
    """
    group_of = [
        tuple(range(first, first + ranks.per_worker))
        for first in range(ranks.masters, ranks.total, ranks.per_worker)
    ]
    leaders = tuple(group[0] for group in group_of)
    masters = tuple(range(ranks.masters))
    children: dict[int, tuple[int, ...]] = {}
    level = masters if not layout.sub_masters else masters[:1]
    if ranks.masters:
        below = len(level)
        for fan_out in layout.sub_masters:
            next_level = masters[below : below + len(level) * fan_out]
            children |= _dealt(level, next_level)
            below, level = below + len(next_level), next_level
        # Masters that each own a part of the weights all have all the workers.
        children |= _dealt(level, leaders) if layout.sub_masters else dict.fromkeys(level, leaders)
    parents: dict[int, tuple[int, ...]] = {}
    for master in masters:
        for child in children[master]:
            parents[child] = (*parents.get(child, ()), master)
    places = [Place(parents.get(rank, ()), children[rank]) for rank in masters]
    for number, group in enumerate(group_of):
        places += [Place(parents.get(group[0], ()), (), group, number)] * len(group)
    return places


def _dealt(masters: tuple[int, ...], below: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    each = len(below) // len(masters)
    return {master: below[at * each : (at + 1) * each] for at, master in enumerate(masters)}


@dataclass(kw_only=True)
class Topology:
    """This rank among the ranks of its task."""

    comm: MPI.Intracomm  # of all ranks that are left
    rank: int
    ranks: Ranks
    places: list[Place]
    node_ranks: int  # on this node
    node_cores: int  # that the ranks of this node may use together
    node_trainers: int  # of these ranks, those that read data
    devices: list[torch.device]  # of this rank, the first for what it computes by itself
    hosts: list[str]  # of each rank
    alive: list[int]  # ranks that are left

    @classmethod
    def start(cls, training: Training, layout: Layout, comm: MPI.Intracomm) -> Topology:
        """Find this rank's place; collective.

        Raises:
            N3LOError: other ranks were started than the layout asks for, or GPUs are missing.
        """
        try:
            check_ranks(training, layout)
        except ValueError as error:
            raise N3LOError(str(error)) from None
        ranks = ranks_of(training, layout)
        if comm.size != ranks.total:
            raise N3LOError(f"layout: {ranks}, but {comm.size} were started")
        places = places_of(layout, ranks)
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        trains = places[comm.rank].trains
        trainers = node.Split(0 if trains else MPI.UNDEFINED)
        return cls(
            comm=comm,
            rank=comm.rank,
            ranks=ranks,
            places=places,
            node_ranks=node.size,
            node_cores=len(set().union(*node.allgather(_cores()))),
            node_trainers=node.allreduce(int(trains)),
            devices=_devices(layout, trainers) if trains else [torch.device("cpu")],
            hosts=comm.allgather(socket.gethostname()),
            alive=list(range(comm.size)),
        )

    @property
    def place(self) -> Place:
        return self.places[self.rank]

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    @property
    def is_first(self) -> bool:
        """Rank 0 alone indexes the data, decides, and writes files."""
        return self.rank == 0

    @property
    def num_ranks(self) -> int:
        return len(self.places)

    @property
    def num_trainers(self) -> int:
        return self.ranks.workers * self.ranks.per_worker

    @property
    def trainer(self) -> int | None:
        """This rank's number among those that train; None for a master."""
        return self.rank - self.ranks.masters if self.place.trains else None

    @property
    def reader(self) -> int | None:
        """The number of the batches that this rank trains on; None for a master."""
        if not self.place.trains:
            return None
        return self.place.worker if self.ranks.one_batch else self.trainer

    @property
    def worker_groups(self) -> list[tuple[int, ...]]:
        """The ranks of each worker."""
        leaders = {place.group[0]: place.group for place in self.places if place.trains}
        return list(leaders.values())

    @property
    def part(self) -> int | None:
        """This rank's number among those that train and are left; None for a master."""
        return self._training_ranks.index(self.rank) if self.place.trains else None

    @property
    def num_parts(self) -> int:
        return len(self._training_ranks)

    @property
    def validation_part(self) -> tuple[int | None, int]:
        """Which part of the validation events this rank has, of how many."""
        alike = self.ranks.per_worker if self.ranks.one_batch else 1
        part = None if self.part is None else self.part // alike
        return part, self.num_parts // alike

    @property
    def _training_ranks(self) -> list[int]:
        return [rank for rank in self.alive if self.places[rank].trains]

    def leave_out_the_dead(self) -> None:
        """Make `comm` one of the ranks that are left; collective over them."""
        try:
            self.comm.Agree(1)
            return
        except MPI.Exception as error:  # on all of them alike
            if error.Get_error_class() != MPI.ERR_PROC_FAILED:
                raise
        left = self.comm.Shrink()
        self.alive = left.allgather(self.rank)
        self.comm = left

    def leave(self) -> None:
        """End this process where ranks died: MPI's own end would wait for them now and then."""
        if len(self.alive) < self.num_ranks:
            self.comm.Barrier()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def from_first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on every rank."""
        return self._large.bcast(make() if self.is_first else None)

    def gather(self, value: T) -> dict[int, T]:
        """Everyone's value by rank, on rank 0; elsewhere nothing."""
        return dict(zip(self.alive, self._large.gather(value) or [], strict=False))

    def scatter(self, values: Mapping[int, T] | None, nothing: T) -> T:
        """This rank's value of those that rank 0 has, or `nothing`."""
        values = values or {}
        return self._large.scatter([values.get(rank, nothing) for rank in self.alive])

    @property
    def _large(self) -> MPI.Intracomm:
        """For objects of more than 2 GiB too."""
        return pkl5.Intracomm(self.comm)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, on every rank with the same bits; on the CPU."""
        local = np.ascontiguousarray(tensor.detach().cpu().numpy())
        total = np.empty_like(local)
        # Unlike an all-reduce, this cannot round differently on two ranks.
        self.comm.Reduce(local, total)
        self.comm.Bcast(total)
        return torch.from_numpy(total)


def _cores() -> set[int]:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _devices(layout: Layout, trainers: MPI.Intracomm) -> list[torch.device]:
    """The CPU, or this rank's own GPUs.

    Some launchers show each rank its own GPUs alone, others show all of them to every rank.

    Args:
        trainers: the ranks that train on this node; a master works in the host's memory.
    """
    if layout.gpus_per_rank == 0:
        return [torch.device("cpu")]
    visible = torch.cuda.device_count()
    if visible == 0:
        raise N3LOError(
            f"layout.gpus_per_rank: {layout.gpus_per_rank}, but PyTorch sees no GPU on "
            f"{socket.gethostname()}"
        )
    needed = trainers.size * layout.gpus_per_rank
    first_gpus = trainers.allgather(str(torch.cuda.get_device_properties(0).uuid))
    own_gpus = len(set(first_gpus)) == trainers.size
    if not own_gpus and visible < needed:
        raise N3LOError(
            f"layout.gpus_per_rank: {trainers.size} ranks x {layout.gpus_per_rank} = {needed} "
            f"GPUs, but {socket.gethostname()} shows {visible}"
        )
    first = 0 if own_gpus else trainers.rank * layout.gpus_per_rank
    torch.cuda.set_device(first)
    return [torch.device("cuda", first + number) for number in range(layout.gpus_per_rank)]
