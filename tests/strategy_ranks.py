"""Run by test_strategies.py on each rank: `strategy_ranks.py cases.pt out.pt`.

Every case is a strategy, a model, and the batches of each rank; what each rank holds after the
steps is gathered and saved by rank 0.
"""

from __future__ import annotations

import sys

from mpi4py import MPI

# isort: split
import torch

from apps.contract import Layout, Training
from apps.data import Batch
from apps.experiment import Supervised
from apps.strategies import create
from apps.topology import Topology


def model(kind: str, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    hidden = torch.nn.BatchNorm1d(4) if kind == "batch_norm" else torch.nn.Tanh()
    return torch.nn.Sequential(torch.nn.Linear(3, 4), hidden, torch.nn.Linear(4, 3))


def run(case: dict, comm: MPI.Intracomm) -> dict:
    training = Training(**case["training"])
    topology = Topology.start(training, Layout(num_workers=comm.size), comm)
    # Each rank starts elsewhere: the strategy must bring them together.
    experiment = Supervised(model(case["model"], seed=topology.rank), training)
    strategy = create(training, experiment, topology)
    sums = torch.zeros(1, 2, dtype=torch.float64)
    num_global = sum(len(x) for x, _ in case["batches"])
    for _ in range(case["steps"]):
        x, y = case["batches"][topology.rank]
        sums += strategy.step(Batch(x, y, len(x), num_global))
    network = experiment.networks["model"]
    before = {name: value.clone() for name, value in network.state_dict().items()}
    strategy.average_buffers()
    total = strategy.sum(sums)
    strategy.close()
    return {"before": before, "after": network.state_dict(), "total": total}


if __name__ == "__main__":
    world = MPI.COMM_WORLD
    every = [world.gather(run(case, world)) for case in torch.load(sys.argv[1])]
    if world.rank == 0:
        torch.save(every, sys.argv[2])
