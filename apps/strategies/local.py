"""One rank trains alone; what follows builds on its step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from apps.data import Batch, Epoch
from apps.strategies.base import Strategy


class Local(Strategy):
    """One update after the other, each by the mean gradient of all that share it."""

    def connect(self) -> None:
        self.prepare_networks()
        self.place_networks()
        self.make_optimizers()

    def make_optimizers(self) -> None:
        self.optimizers = self.experiment.optimizers()
        self.make_scalers()

    def make_scalers(self) -> None:
        self.scalers = {
            name: GradScaler(self.topology.device.type, enabled=self.training.precision == "fp16")
            for name in self.optimizers
        }

    def train(self, epoch: Epoch) -> torch.Tensor:
        sums = self.experiment.no_sums()
        for batch in self.clock.feeding(iter(epoch)):
            sums += self.step(batch)
        return sums

    def step(self, batch: Batch) -> torch.Tensor:
        """Train on one batch; returns what this rank adds to the sums."""
        sums = []
        pieces = batch.cut(self.training.accumulate)
        streams = [self.experiment.updates(self.networks, piece) for piece in pieces]
        while True:  # each round is one update, from all pieces
            for number, (piece, stream) in enumerate(zip(pieces, streams, strict=True)):
                with self.gathering(is_last=number == len(pieces) - 1):
                    update = next(stream, None)
                    if update is None:
                        return reduce(torch.add, sums)
                    if number == 0:
                        self.optimizers[update.network].zero_grad()
                    # Ranks are averaged with equal weights, but batches differ by an event or so.
                    share = piece.num_events * self.num_averaged / batch.num_global
                    self.backward(update.network, update.loss * share)
                sums.append(update.sums)
            self.apply(update.network)

    @property
    def num_averaged(self) -> int:
        """Ranks of which the gradient is the mean."""
        return self.topology.num_ranks

    def gathering(self, is_last: bool) -> AbstractContextManager[Any]:
        """While the gradient of one piece of a batch is added to what there is of the others."""
        return nullcontext()

    def backward(self, network: str, loss: torch.Tensor) -> None:
        self.scalers[network].scale(loss).backward()

    def apply(self, network: str) -> None:
        """Move one network by its gradient."""
        self.reduce(network)
        scaler, optimizer = self.scalers[network], self.optimizers[network]
        scaler.unscale_(optimizer)
        self.clip(network)
        self.move(network)
        self.experiment.moved(network)
        scaler.update()
        if self.training.schedule_per == "update" and self.schedulers:
            self.schedulers[network].step()

    def reduce(self, network: str) -> None:
        """Bring the gradients of all ranks together, where the backward pass has not done so."""

    def clip(self, network: str) -> None:
        if self.training.clip_norm is not None:
            parameters = self.networks[network].parameters()
            nn.utils.clip_grad_norm_(parameters, self.training.clip_norm)

    def move(self, network: str) -> None:
        self.scalers[network].step(self.optimizers[network])

    @property
    def parts(self) -> dict[str, Mapping[str, Any]]:
        return {**super().parts, "scalers": self.scalers}
