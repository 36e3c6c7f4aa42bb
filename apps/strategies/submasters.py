"""The middle of a tree: masters that are themselves below a master.

What a sub-master passes on, and when its own weights move, is the algorithm's. It passes on after
every so many exchanges with its children, and at the end of an epoch what is left.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from apps.strategies.centre import Centre, Op
from apps.strategies.flat import Piece, zeros
from apps.strategies.memory import Memory
from apps.strategies.messages import Link, Vectors


class SubMaster(Centre):
    """Weights below a master.

    Args:
        link: the way to that master.
        networks: their names, in order.
        every: exchanges with children between two with that master.
    """

    moves_alone = True  # whether an exchange with a child moves its weights

    def __init__(self, link: Link, networks: list[str], every: int, *args: Any) -> None:
        super().__init__(*args)
        self._link, self._networks, self._every = link, networks, every
        self._parts = {name: slice(*_ends(link, name)) for name in networks}
        self._count = [0] * len(networks)
        self._values = Memory(self.values)
        self.prepare()

    def prepare(self) -> None:
        """Set up the memory that the algorithm needs."""

    def end(self, op: Op, network: int) -> None:
        if self.moves_alone:
            super().end(op, network)
        if op.sends:
            self._count[network] += 1
            if self._count[network] >= self._every:
                self._pass_on(network)

    def finish(self) -> None:
        for network, count in enumerate(self._count):
            if count:
                self._pass_on(network)
        self._link.finish()

    def _pass_on(self, network: int) -> None:
        self._count[network] = 0
        self.pass_on(network, self._networks[network])

    def pass_on(self, network: int, name: str) -> None:
        """Exchange with the master above."""
        raise NotImplementedError


class GradientSum(SubMaster):
    """Downpour: the mean gradient of several exchanges goes up, and the weights come down.

    Only the top master has an optimizer. Versions here are the top master's.
    """

    moves_alone = False

    def prepare(self) -> None:
        self._sum = zeros(len(self.values), self.values.dtype)
        self._outgoing = Memory(self._sum)
        self._events = [0] * len(self._networks)
        self._oldest: list[int | None] = [None] * len(self._networks)

    def begin(self, op: Op, network: int, version: int, events: int) -> None:
        oldest = self._oldest[network]
        self._oldest[network] = version if oldest is None else min(oldest, version)
        self._events[network] += events
        self._weight = events

    def apply(
        self, op: Op, network: int, piece: Piece, data: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor | None:
        self._sum[piece.where].add_(data, alpha=self._weight)
        return None  # the answer is what comes down, or the weights as they are

    def pass_on(self, network: int, name: str) -> None:
        part, events = self._parts[name], self._events[network]
        self._sum[part].div_(events)
        vectors, oldest = Vectors(self._outgoing, self._values), self._oldest[network]
        self._link.exchange(Op.STEP, name, vectors, events, known=np.array([oldest]))
        self._sum[part].zero_()
        self._events[network], self._oldest[network] = 0, None
        self.versions[network] = self._link.versions[0, network]


class ElasticBetween(SubMaster):
    """EASGD: this centre is to the one above as a worker is to this one."""

    def prepare(self) -> None:
        self._force = zeros(len(self.values), self.values.dtype)
        self._incoming = Memory(self._force)

    def pass_on(self, network: int, name: str) -> None:
        self._link.exchange(Op.ELASTIC, name, Vectors(self._values, self._incoming))
        part = self._parts[name]
        self.values[part].sub_(self._force[part])


class SumOfMoves(SubMaster):
    """GEM: all that the children moved goes up, and the weights come down."""

    def prepare(self) -> None:
        self._known = self.values.clone()  # the weights above, when they last came down
        self._moved = zeros(len(self.values), self.values.dtype)
        self._outgoing = Memory(self._moved)

    def pass_on(self, network: int, name: str) -> None:
        part = self._parts[name]
        torch.sub(self.values[part], self._known[part], out=self._moved[part])
        self._link.exchange(Op.MOVE, name, Vectors(self._outgoing, self._values))
        self._known[part] = self.values[part]


def _ends(link: Link, name: str) -> tuple[int, int]:
    pieces = link.pieces[name]
    return min(each.where.start for each in pieces), max(each.where.stop for each in pieces)
