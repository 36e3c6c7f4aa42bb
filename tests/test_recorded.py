"""A recorded step does what the step itself does. That of a GPU is replaced by one that repeats."""

from __future__ import annotations

import torch
from mpi4py import MPI
from torch import nn

from apps.contract import Layout, Training, from_dict
from apps.data import Batch, Preview
from apps.experiment import Supervised, untouched
from apps.strategies.local import Local
from apps.strategies.recorded import MOST_FORMS, WARM_UP, Recorded, form_of
from apps.topology import Topology


class Repeated(Recorded):
    """As a CUDA graph does, a replay writes what it finds into the memory of the recording."""

    def record(self, compute):
        self.num_recorded = getattr(self, "num_recorded", 0) + 1
        with untouched(self.networks["model"]):  # recording computes nothing
            compute()

        def replay() -> None:
            recording = next(
                each
                for each in self._recordings.values()
                if any(move.replay is replay for move in each.moves)
            )
            (move,) = recording.moves
            (update,) = self.experiment.updates(self.networks, recording.batch)
            parameters = [parameter for parameter, _ in move.gradients]
            new = torch.autograd.grad(update.loss, parameters)
            for (_, gradient), value in zip(move.gradients, new, strict=True):
                gradient.copy_(value)
            move.sums.copy_(update.sums)

        return replay


def strategy_of(kind: type[Local]) -> Local:
    torch.manual_seed(1)
    content = {"loss": "cross_entropy", "metrics": ["accuracy"], "schedule_per": "update",
               "scheduler": {"name": "exponential_lr", "gamma": 0.9}}  # fmt: skip
    training = from_dict(Training, content)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    topology = Topology.start(training, Layout(), MPI.COMM_SELF)
    preview = Preview(lambda n: batch_of(n, 0), num_steps=10, largest_batch=8)
    return kind(Supervised(model, training), topology, training, preview)


def batch_of(size: int, seed: int) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 4, generator=rng)
    return Batch(inputs, torch.randint(3, (size,), generator=rng), size, size)


def test_recorded_steps_train_as_steps_do():
    recorded, plain = strategy_of(Repeated), strategy_of(Local)
    for seed in range(4 * WARM_UP):
        batch = batch_of(8 - seed % 2, seed)  # batches of an epoch differ by one event
        torch.testing.assert_close(recorded.step(batch), plain.step(batch))
    assert recorded.num_recorded == 2 * 2  # of two sizes; each recording ends with an empty one
    states = recorded.states(), plain.states()
    torch.testing.assert_close(*states)


def test_no_more_sizes_are_recorded_than_fit_in_memory():
    strategy = strategy_of(Repeated)
    for size in range(2, 2 * MOST_FORMS):
        for seed in range(WARM_UP + 2):
            strategy.step(batch_of(size, seed))
    assert len(strategy._recordings) == MOST_FORMS


def test_batches_of_one_form_need_the_same_kernels():
    batch = batch_of(8, 0)
    assert form_of(batch) == form_of(batch_of(8, 1))
    assert form_of(batch) != form_of(batch_of(7, 0))
    assert form_of(batch) != form_of(Batch(batch.inputs, batch.targets, 8, 16))
    assert form_of(batch) != form_of(Batch(batch.inputs.double(), batch.targets, 8, 8))
