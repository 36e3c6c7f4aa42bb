"""One rank trains alone. The other strategies add how ranks agree."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from apps.contract import N3LOError
from apps.data import Batch
from apps.experiment import Supervised
from apps.topology import Topology


class Local:
    """What every strategy offers to the training loop.

    A strategy knows networks and updates, but not what they are for.
    """

    def __init__(self, experiment: Supervised, topology: Topology, clip_norm: float | None) -> None:
        self.experiment = experiment
        self.topology = topology
        self.clip_norm = clip_norm
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
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.networks[network].parameters(), self.clip_norm)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, with the same bits on each of them."""
        return self.topology.sum(tensor)

    def average_buffers(self) -> None:
        """Give all ranks the mean of their BatchNorm statistics, and of other buffers.

        Each rank gathers its own from its part of the data.
        """
        buffers = [
            buffer
            for network in self.experiment.networks.values()
            for buffer in network.buffers()
            if buffer.is_floating_point()
        ]
        if not buffers:
            return
        flat = torch.cat([buffer.flatten().double() for buffer in buffers])
        mean = self.sum(flat) / self.topology.num_ranks
        for buffer, values in zip(
            buffers, mean.split([buffer.numel() for buffer in buffers]), strict=True
        ):
            buffer.copy_(values.view_as(buffer))

    def close(self) -> None:
        """Leave the other ranks; collective."""
