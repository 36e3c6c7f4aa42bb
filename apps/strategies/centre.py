"""The central weights, or a master's part of them, and what an exchange does to them.

All of it works piece by piece, so that it does not matter whether the data come in messages or
lie in memory that is shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch.optim import Optimizer

from apps.strategies.flat import Flat, Piece


class Op(IntEnum):
    """What a worker, or a sub-master, asks of the central weights theta."""

    DONE = 0  # nothing more in this epoch
    PULL = 1  # get theta
    ADD = 2  # theta += d
    MOVE = 3  # theta += d, get theta
    STEP = 4  # the optimizer moves theta by the gradient g, get theta
    ELASTIC = 5  # e = alpha (x - theta), theta += e, get e

    @property
    def sends(self) -> bool:
        """Whether it brings a vector."""
        return self in (Op.ADD, Op.MOVE, Op.STEP, Op.ELASTIC)

    @property
    def receives(self) -> bool:
        """Whether it is answered by a vector."""
        return self in (Op.PULL, Op.MOVE, Op.STEP, Op.ELASTIC)


class Rule(NamedTuple):
    """How strongly an exchange moves the central weights."""

    alpha: float  # of `Op.ELASTIC`
    staleness_lr: bool  # whether the learning rate of an update is divided by its staleness

    def lr_scale(self, staleness: int) -> float:
        return 1 / max(1, staleness) if self.staleness_lr else 1.0


class Centre:
    """Central weights that change with each exchange.

    Args:
        values: theta, (n,), on the CPU.
        optimizers: of each network; its parameters are the pieces of `values`, in order.
        versions: updates of each network so far, (networks,); may be memory that is shared.
    """

    def __init__(
        self,
        values: torch.Tensor,
        optimizers: Mapping[str, Optimizer],
        rule: Rule,
        versions: np.ndarray,
    ) -> None:
        self.values = values
        self.versions = versions
        self.staleness: Counter[int] = Counter()  # updates by their staleness, in this epoch
        self._optimizers = list(optimizers.values())
        self._rule = rule
        self._lr_scale = 1.0

    def begin(self, op: Op, network: int, version: int, events: int) -> None:
        """An exchange begins.

        Its staleness is the number of updates between the version of the weights that its vector
        was computed with, and this moment.

        Args:
            events: that the vector was computed from.
        """
        if op.sends:
            staleness = int(self.versions[network]) - version
            self.staleness[staleness] += 1
            self._lr_scale = self._rule.lr_scale(staleness)

    def apply(
        self, op: Op, network: int, piece: Piece, data: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor | None:
        """Do one piece of an exchange.

        Args:
            data: what the worker sends, if it does.
            out: memory for the answer, if it is not theta itself; may be `data`.

        Returns:
            What the worker shall get, if it gets something: theta's own memory, or `out`.
        """
        theta = self.values[piece.where]
        if op is Op.STEP:
            self._step(network, piece, data)
        elif op is Op.ELASTIC:
            theta.add_(self.force(piece, data, out))
            return out
        elif op.sends:
            theta.add_(data)
        return theta if op.receives else None

    def force(self, piece: Piece, own: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """What pulls a worker's weights towards theta: alpha (x - theta)."""
        return torch.sub(own, self.values[piece.where], out=out).mul_(self._rule.alpha)

    def end(self, op: Op, network: int) -> None:
        """All pieces of an exchange are done."""
        if op.sends:
            self.versions[network] += 1

    def finish(self) -> None:
        """The epoch is over."""

    def _step(self, network: int, piece: Piece, gradient: torch.Tensor) -> None:
        optimizer = self._optimizers[network]
        group = optimizer.param_groups[0]
        parameters, lr = group["params"], group["lr"]
        parameter = parameters[piece.number]
        parameter.grad = gradient
        # The optimizer would look at every piece, and ask each for its gradient.
        group["params"], group["lr"] = [parameter], lr * self._lr_scale
        try:
            optimizer.step()
        finally:
            parameter.grad = None
            group["params"], group["lr"] = parameters, lr


def pieces_as_parameters(flat: Flat) -> dict[str, list[torch.nn.Parameter]]:
    """Parameters of an optimizer that moves each network piece by piece."""
    return {
        name: [torch.nn.Parameter(flat.values[piece.where]) for piece in pieces]
        for name, pieces in flat.pieces.items()
    }
