"""Run by test_central.py on each rank: `central_ranks.py cases.pt out.pt`.

A case is a strategy on toy networks whose gradients are known, in an order of exchanges that a
script fixes. What each rank saw is gathered and saved by rank 0.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from mpi4py import MPI

# isort: split
import torch
from torch import nn

from apps.contract import Exchange, Layout, Training
from apps.data import Batch, Preview
from apps.experiment import Supervised, Update
from apps.strategies import create
from apps.topology import Topology


class Bowl(Supervised):
    """One parameter vector w and the loss sum(scale (w - target)^2) / 2, of a batch's numbers.

    An update begins when the updates that it waits for have been made, and is told to all.
    """

    def __init__(self, case: dict[str, Any], topology: Topology, training: Training) -> None:
        model = nn.Module()
        model.w = nn.Parameter(torch.tensor(case["start"], dtype=torch.float64))
        super().__init__(model, training)
        self._comm = topology.comm.Dup()
        self._waits = case.get("waits", {})
        self._ranks = {place.worker: place.group[0] for place in topology.places if place.trains}
        self._worker = topology.place.worker
        self._leads = topology.place.group[:1] == (topology.rank,)
        self._count = 0
        self.seen: list[torch.Tensor] = []  # the worker's weights after each update

    def updates(self, networks: Any, batch: Batch) -> Iterator[Update]:
        w = networks["model"].w
        scale, target = batch.inputs
        loss = (scale * (w - target).square()).sum() / 2
        self._wait()
        yield Update("model", loss, torch.zeros(2, dtype=torch.float64))
        self._tell()
        self.seen.append(self.x().clone())

    def _wait(self) -> None:
        waits = self._waits.get((self._worker, self._count), []) if self._leads else []
        for worker, count in waits:
            self._comm.recv(source=self._ranks[worker], tag=count)

    def _tell(self) -> None:
        waiting = [
            other for (other, _), needs in self._waits.items()
            for need in needs if need == (self._worker, self._count)
        ]  # fmt: skip
        for other in waiting if self._leads else []:
            self._comm.isend(None, self._ranks[other], self._count)
        self._count += 1


class Duel(Supervised):
    """Two networks that are moved in turn, the second twice, each by the other's weights."""

    def __init__(self, training: Training) -> None:
        super().__init__(nn.Linear(1, 1), training)
        self.networks = {"model": nn.Module(), "rival": nn.Module()}
        for at, network in enumerate(self.networks.values()):
            network.w = nn.Parameter(torch.tensor([1.0 + at, -2.0], dtype=torch.float64))
        self.seen: list[torch.Tensor] = []

    def updates(self, networks: Any, batch: Batch) -> Iterator[Update]:
        first, second = (network.w for network in networks.values())
        target = batch.inputs[1][:2]
        sums = torch.zeros(2, dtype=torch.float64)
        yield Update("model", ((first - second) * target).square().sum(), sums)
        yield Update("rival", (first * second + target).square().sum(), sums)
        yield Update("rival", (first + second - target).square().sum(), sums)
        self.seen.append(torch.cat([first.detach(), second.detach()]))


class Table:
    """An epoch whose batches stand in the case: of each worker and step, or of each worker."""

    def __init__(self, case: dict[str, Any], topology: Topology) -> None:
        self.num_steps = case["steps"]
        self._case, self._topology = case, topology
        self.asked: list[tuple[int, int]] = []

    def batch(self, owner: int, step: int) -> Batch:
        """What a worker gets depends on how many it had, so that the script alone counts."""
        place = self._topology.place
        member = place.group.index(self._topology.rank)
        mine = self._case["batches"][place.worker][len(self.asked)]
        self.asked.append((owner, step))
        scale, target, events = mine[member] if isinstance(mine, list) else mine
        total = sum(each[2] for each in mine) if isinstance(mine, list) else events
        numbers = [torch.as_tensor(each, dtype=torch.float64) for each in (scale, target)]
        return Batch(numbers, None, events, total)


def run(case: dict[str, Any], comm: MPI.Intracomm) -> dict[str, Any]:
    settings = dict(case["training"])
    training = Training(loss="mse", **settings | {"exchange": Exchange(**settings["exchange"])})
    topology = Topology.start(training, Layout(**case["layout"]), comm)
    duel = case.get("networks") == "duel"
    experiment = Duel(training) if duel else Bowl(case, topology, training)
    strategy = create(training, experiment, topology, Preview(None, 1, 1))
    experiment.x = lambda: strategy.x
    table = Table(case, topology)
    strategy.train(table)
    facts = strategy.facts()
    centre = torch.cat([net.w.detach().clone() for net in experiment.networks.values()])
    strategy.close()
    return {
        "centre": centre, "seen": experiment.seen, "asked": table.asked, "facts": facts,
        "staleness": dict(strategy.staleness), "worker": topology.place.worker,
        "trains": topology.place.trains,
    }  # fmt: skip


if __name__ == "__main__":
    world = MPI.COMM_WORLD
    every = [world.gather(run(case, world)) for case in torch.load(sys.argv[1])]
    if world.rank == 0:
        torch.save(every, sys.argv[2])
