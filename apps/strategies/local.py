"""One rank trains alone. The other strategies add how ranks agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from apps.contract import N3LOError, Training
from apps.data import Batch, Epoch
from apps.experiment import Supervised
from apps.topology import Topology


class Local:
    """What every strategy offers to the training loop.

    A strategy knows networks and updates, but not what they are for.
    """

    def __init__(self, experiment: Supervised, topology: Topology, training: Training) -> None:
        self.experiment = experiment
        self.topology = topology
        self.training = training
        self.networks: dict[str, nn.Module] = experiment.networks
        self.optimizers: dict[str, Optimizer] = experiment.optimizers()
        self.connect()

    def connect(self) -> None:
        """Bring all ranks to the same start and wrap what has to communicate; collective."""
        if self.topology.num_ranks > 1:
            raise N3LOError(
                f"training.strategy: 'local' trains on one rank, but the layout has "
                f"{self.topology.num_ranks}; set it to 'allreduce'"
            )

    def train(self, epoch: Epoch) -> torch.Tensor:
        """Train on this rank's part of an epoch, after which all ranks hold the same weights.

        Returns:
            This rank's sum and count of each metric, (metrics, 2).
        """
        sums = self.experiment.no_sums()
        for batch in epoch:
            sums += self.step(batch)
        return sums

    def step(self, batch: Batch) -> torch.Tensor:
        """Train on one batch; returns this rank's sum and count of each metric, (metrics, 2)."""
        sums = []
        # Ranks are averaged with equal weights, but their batches differ by an event or so.
        share = batch.num_events * self.topology.num_ranks / batch.num_global
        for update in self.experiment.updates(self.networks, batch):
            self.optimizers[update.network].zero_grad()
            (update.loss * share).backward()
            self.apply(update.network)
            sums.append(update.sums)
        return torch.stack(sums).sum(dim=0)

    def apply(self, network: str) -> None:
        """Move one network by its gradient."""
        self.clip(network)
        self.optimizers[network].step()

    def clip(self, network: str) -> None:
        if self.training.clip_norm is not None:
            parameters = self.networks[network].parameters()
            nn.utils.clip_grad_norm_(parameters, self.training.clip_norm)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, with the same bits on each of them."""
        return self.topology.sum(tensor)

    def average_buffers(self) -> None:
        """Give all ranks the mean of the BatchNorm statistics, and of other buffers.

        Each rank that trains gathers its own from its part of the data. Whole numbers, such as how
        many batches there were, are those of the first of them.
        """
        topology = self.topology
        buffers = [each for net in self.experiment.networks.values() for each in net.buffers()]
        if not buffers:
            return
        flat = torch.cat([buffer.flatten().double() for buffer in buffers])
        own = topology.part
        nothing = torch.zeros_like(flat)
        means = self.sum(flat if own is not None else nothing) / topology.num_parts
        firsts = self.sum(flat if own == 0 else nothing)
        sizes = [buffer.numel() for buffer in buffers]
        for buffer, mean, first in zip(
            buffers, means.split(sizes), firsts.split(sizes), strict=True
        ):
            buffer.copy_((mean if buffer.is_floating_point() else first).view_as(buffer))

    def facts(self) -> dict[str, float]:
        """What this strategy measures of an epoch, for its row of the history; collective."""
        return {}

    def own_state(self) -> dict[str, Any]:
        """What only this rank knows, and a checkpoint must hold."""
        return {}

    def choose_own(self, states: dict[str, Any], own: dict[str, Any]) -> None:
        """Put what this rank had in place of what rank 0 had, before `states` are loaded.

        Args:
            own: from `own_state`.
        """

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Go on from what `own_state` gave."""

    def close(self) -> None:
        """Leave the other ranks; collective."""
