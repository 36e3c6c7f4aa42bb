"""Run by test_strategies.py on each rank: `strategy_ranks.py cases.pt out.pt`.

Every case is a strategy, a model, and the batches of each reader; what each rank holds after the
steps is gathered and saved by rank 0.
"""

from __future__ import annotations

import sys
import traceback
from dataclasses import replace
from typing import Any

from mpi4py import MPI

# isort: split
import torch

from apps.contract import Layout, Training, from_dict
from apps.data import Batch, Preview
from apps.experiment import Supervised
from apps.strategies import create, group_size
from apps.topology import Topology


class Borrowing(torch.nn.Module):
    """Reads weights of a layer outside of it, and has one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.head = torch.nn.Linear(4, 3)
        self.unused = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.first(x))) + x @ self.first.weight[:3]


def model(kind: str, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    if kind == "borrowing":
        return Borrowing()
    hidden = torch.nn.BatchNorm1d(4) if "batch_norm" in kind else torch.nn.Tanh()
    return torch.nn.Sequential(torch.nn.Linear(3, 4), hidden, torch.nn.Linear(4, 3))


def batch_of(x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor | None = None) -> Batch:
    return Batch(x, y, len(x), len(x), weights)


def run(case: dict[str, Any], comm: MPI.Intracomm) -> dict[str, Any]:
    training = from_dict(Training, case["training"])
    topology = Topology.start(training, Layout(**case["layout"]), comm)
    # Each rank starts elsewhere: the strategy must bring them together.
    experiment = Supervised(model(case["name"], seed=topology.rank), training)
    batches = case["batches"]
    most = max(len(x) for x, *_ in batches)

    def example(number: int) -> Batch:
        rows = torch.arange(number) % len(batches[0][0])
        return batch_of(*(values[rows] for values in batches[0]))

    strategy = create(training, experiment, topology, Preview(example, case["steps"], most))
    together = group_size(training, topology)  # readers that share a step
    first = topology.reader // together * together
    num_global = sum(len(x) for x, *_ in batches[first : first + together])
    batch = batch_of(*batches[topology.reader])
    sums = strategy.train([replace(batch, num_global=num_global)] * case["steps"])
    buffers = experiment.networks["model"].named_buffers()
    before = {name: value.clone() for name, value in buffers}
    strategy.average_buffers()
    total = strategy.sum(sums)
    with torch.no_grad():
        experiment.train(False)
        evaluated = strategy.sum(strategy.evaluate(batch))
    after = strategy.states()["networks"]["model"]
    facts = strategy.facts()
    strategy.close()
    return {
        "before": before, "after": after, "total": total, "facts": facts, "evaluated": evaluated,
    }  # fmt: skip


if __name__ == "__main__":
    world = MPI.COMM_WORLD
    try:
        every = [world.gather(run(case, world)) for case in torch.load(sys.argv[1])]
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        world.Abort(1)  # the others would wait
    if world.rank == 0:
        torch.save(every, sys.argv[2])
