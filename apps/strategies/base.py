"""What every strategy offers to the training loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from apps.clock import Clock
from apps.contract import Training
from apps.data import Batch, Epoch, Preview
from apps.experiment import Experiment, step_scheduler
from apps.normalise import synchronise
from apps.recompute import recompute
from apps.topology import Topology

States = Mapping[str, Mapping[str, Any]]  # of networks, optimizers, ..., each by name


class Strategy:
    """How ranks share a training. It knows networks and updates, but not what they are for."""

    def __init__(
        self,
        experiment: Experiment,
        topology: Topology,
        training: Training,
        preview: Preview,
    ) -> None:
        self.experiment = experiment
        experiment.device = topology.device
        self.topology = topology
        self.training = training
        self.preview = preview
        self.clock = Clock(topology.device)
        self.networks: dict[str, nn.Module] = experiment.networks
        self.optimizers: dict[str, Optimizer] = {}
        self.connect()
        self.schedulers = experiment.schedulers(self.optimizers, preview.num_steps)

    def connect(self) -> None:
        """Bring all ranks to the same start, and make the optimizers; collective."""
        raise NotImplementedError

    def train(self, epoch: Epoch) -> torch.Tensor:
        """Train on this rank's part of an epoch, after which all ranks hold the same weights.

        Returns:
            What this rank adds to the sums of the experiment.
        """
        raise NotImplementedError

    def go_on_in_schedule(self, val_loss: float) -> None:
        """Go on in the schedule, where it counts epochs."""
        if self.training.schedule_per == "epoch":
            for scheduler in self.schedulers.values():
                step_scheduler(scheduler, val_loss)

    @property
    def seed_key(self) -> int:
        """Ranks with the same number draw the same random numbers in an epoch."""
        return self.topology.trainer or 0

    def prepare_networks(self) -> None:
        """Make the networks what the study wants them to be."""
        networks, training = self.experiment.networks, self.training
        for name, network in networks.items():
            if training.sync_batchnorm:
                networks[name] = synchronise(network, self.sum_in_step)
            if training.recompute:
                recompute(networks[name], training.recompute)

    def place_networks(self) -> None:
        """Put the networks where they compute."""
        devices = self.topology.devices
        for network in self.networks.values():
            if len(devices) > 1:
                from apps.strategies.devices import spread  # torch.fx takes its time

                spread(network, devices, self.preview.example(2).inputs)
            else:
                network.to(self.topology.device)
            if self.training.compile:
                network.compile()

    def same_start(self) -> None:
        """Give all ranks the weights of the first; collective."""
        for network in self.networks.values():
            values = {name: value.cpu() for name, value in network.state_dict().items()}
            network.load_state_dict(self.topology.from_first(lambda: values))  # noqa: B023

    def sum_in_step(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that share a step, on the device, within the step."""
        return tensor

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, with the same bits on each of them."""
        return self.topology.sum(tensor)

    def average_buffers(self) -> None:
        """Give all ranks the mean of the BatchNorm statistics, and of other buffers.

        Each rank that trains gathers its own from its part of the data. Whole numbers, such as how
        many batches there were, are those of the first of them.
        """
        topology = self.topology
        buffers = [each for net in self.experiment.networks.values() for each in kept_buffers(net)]
        if not buffers:
            return
        flat = torch.cat([buffer.flatten().double().cpu() for buffer in buffers])
        own = topology.part
        nothing = torch.zeros_like(flat)
        means = self.sum(flat if own is not None else nothing) / topology.num_parts
        firsts = self.sum(flat if own == 0 else nothing)
        sizes = [buffer.numel() for buffer in buffers]
        for buffer, mean, first in zip(
            buffers, means.split(sizes), firsts.split(sizes), strict=True
        ):
            buffer.copy_((mean if buffer.is_floating_point() else first).view_as(buffer))

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """What a batch adds to the sums of validation."""
        return self.experiment.evaluate(batch)

    def facts(self) -> dict[str, float]:
        """What this strategy measures of an epoch, for its row of the history; collective."""
        return {}

    def choices(self) -> dict[str, Any]:
        """What was measured and chosen at the start, and a later attempt shall not choose anew."""
        return {}

    # -- checkpoints -------------------------------------------------------------------------------

    @property
    def parts(self) -> dict[str, Mapping[str, Any]]:
        """All that has a state."""
        return {
            "networks": self.experiment.networks,
            "optimizers": self.optimizers,
            "schedulers": self.schedulers,
        }

    def states(self) -> dict[str, dict[str, Any]]:
        """The state of all parts, as one process would have it, on the first rank; collective."""
        return {
            kind: {name: each.state_dict() for name, each in members.items()}
            for kind, members in self.parts.items()
        }

    def restore(self, states: States) -> None:
        """Bring all parts, or some kinds of them, to what `states` gave, to the bit; collective."""
        for kind, members in states.items():
            for name, state in members.items():
                self.parts[kind][name].load_state_dict(state)

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


def kept_buffers(network: nn.Module) -> list[torch.Tensor]:
    """Buffers that are part of its state; others are constants."""
    state = network.state_dict()
    return [buffer for name, buffer in network.named_buffers() if name in state]
