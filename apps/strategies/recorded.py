"""One rank with a GPU, which is given each update as one list of kernels and not one by one.

Where a step is of many small kernels, a processor core takes longer to ask for them than the GPU
takes to compute. A CUDA graph holds what was asked for once, and is asked for as a whole.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import nn

from apps.contract import N3LOError
from apps.data import Batch
from apps.experiment import describe
from apps.strategies.local import Local

WARM_UP = 3  # steps of a form, in which libraries choose their kernels
MOST_FORMS = 4  # that are recorded: batches of an epoch differ by one event at most

Form = tuple[Any, ...]
Replay = Callable[[], None]


@dataclass(frozen=True)
class Move:
    """One update of one network, up to its gradient."""

    network: str
    replay: Replay
    gradients: list[tuple[nn.Parameter, torch.Tensor]]
    sums: torch.Tensor


@dataclass(frozen=True)
class Recording:
    """The moves of a step; each reads and writes the same memory whenever it is replayed."""

    batch: Batch
    moves: list[Move]


class Recorded(Local):
    """The step of `Local`, recorded for each size of batches, and replayed.

    Optimizers are not recorded, so that their rates may change. What else a model decides in Python
    is as it was when the step was recorded.
    """

    def connect(self) -> None:
        super().connect()
        self._seen: Counter[Form] = Counter()
        self._recordings: dict[Form, Recording] = {}
        self._memory: Any = None  # of all recordings, which never compute at the same time

    def step(self, batch: Batch) -> torch.Tensor:
        form = form_of(batch)
        recording = self._recordings.get(form)
        if recording is None:
            self._seen[form] += 1
            if self._seen[form] <= WARM_UP or len(self._recordings) == MOST_FORMS:
                return super().step(batch)
            recording = self._recordings[form] = self._record(batch)
        for kept, new in zip(recording.batch.tensors, batch.tensors, strict=True):
            kept.copy_(new)
        sums = []
        for move in recording.moves:
            move.replay()
            for parameter, gradient in move.gradients:
                parameter.grad = gradient
            sums.append(move.sums)
            self.apply(move.network)
        return reduce(torch.add, sums, torch.zeros_like(sums[0]))

    def _record(self, batch: Batch) -> Recording:
        """Nothing is computed meanwhile."""
        kept = batch.map(torch.clone)
        stream = self.experiment.updates(self.networks, kept)
        moves = []

        def move() -> None:
            update = next(stream, None)
            if update is None:
                return
            optimizer = self.optimizers[update.network]
            optimizer.zero_grad()
            self.backward(update.network, update.loss)
            gradients = [
                (parameter, parameter.grad)
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.grad is not None
            ]
            moves.append((update.network, gradients, update.sums))

        replays = []
        try:
            while len(replays) == len(moves):
                replays.append(self.record(move))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise N3LOError(
                f"training.cuda_graphs: a step of this model cannot be recorded "
                f"({describe(error)}); nothing in it may wait for the GPU, as .item() does; or set "
                "it to false"
            ) from error
        return Recording(
            kept,
            [
                Move(network, replay, gradients, sums)
                for (network, gradients, sums), replay in zip(moves, replays, strict=False)
            ],
        )

    def record(self, compute: Callable[[], None]) -> Replay:
        """What asks for all that `compute` would do."""
        graph = torch.cuda.CUDAGraph()
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        with warnings.catch_warnings():
            # The last one finds that the updates have ended.
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            # Other threads may read ahead meanwhile.
            with torch.cuda.graph(graph, self._memory, capture_error_mode="thread_local"):
                compute()
        return graph.replay


def form_of(batch: Batch) -> Form:
    """Of batches for which the same kernels do the same."""
    shapes = tuple((tuple(each.shape), each.dtype) for each in batch.tensors)
    return (*shapes, batch.num_events, batch.num_global)
