"""The exchange by messages, as a worker sees it; `server` is the other side.

A request is a few whole numbers, then the worker's vector piece by piece; the answer likewise. The
master works on a piece while the next one arrives, and its answer leaves at once: on one node the
worker's core copies while the master's core adds.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from apps.strategies.centre import Op
from apps.strategies.dealer import Turn
from apps.strategies.flat import Flat, Piece
from apps.strategies.memory import Memory

REQUEST, REQUESTED, ANSWER, ANSWERED = range(1, 5)  # tags: numbers and vector, each way


class Request(NamedTuple):
    op: int
    network: int
    version: int  # of the weights that the vector was computed with
    events: int  # that the gradient is the mean of
    wants_turn: int = 0


class Answer(NamedTuple):
    version: int
    owner: int  # of the next turn
    first: int
    count: int


class Vectors(NamedTuple):
    """A worker's memory for exchanges; the same vector may be both."""

    outgoing: Memory
    incoming: Memory


class Port(Protocol):
    """How a worker reaches the central weights."""

    def exchange(
        self,
        op: Op,
        network: str,
        vectors: Vectors,
        events: int = 0,
        wants_turn: bool = False,
        known: np.ndarray | None = None,
    ) -> Turn | None:
        """Do one exchange of a network's part; returns the next turn, if it is wanted.

        Args:
            events: that the vector was computed from.
            known: version of the weights that it was computed with, if not the last that came.
        """

    def known(self, network: str) -> np.ndarray:
        """The version of the weights that came last."""

    def finish(self) -> None:
        """Nothing more will come from this worker in this epoch."""


class Link:
    """The way to a master, or to several that each own a part of the weights.

    Args:
        masters: their ranks.
    """

    def __init__(self, comm: MPI.Intracomm, masters: tuple[int, ...], flat: Flat) -> None:
        self._comm, self._masters = comm, masters
        self._networks = list(flat.pieces)
        self.pieces = {
            name: sorted(pieces, key=lambda piece: _round(piece, pieces))
            for name, pieces in flat.pieces.items()
        }
        self.start_epoch()

    def start_epoch(self) -> None:
        """Versions are counted from the weights that all ranks begin an epoch with."""
        shape = (len(self._masters), len(self._networks))
        self.versions = np.zeros(shape, np.int64)  # of the weights that this worker computes with
        self._pulled = np.zeros(shape, np.int64)

    def exchange(
        self,
        op: Op,
        network: str,
        vectors: Vectors,
        events: int = 0,
        wants_turn: bool = False,
        known: np.ndarray | None = None,
    ) -> Turn | None:
        """See `Port`; there is a version of each master."""
        comm, pieces, number = self._comm, self.pieces[network], self._networks.index(network)
        outgoing, incoming = vectors
        if op.sends:
            outgoing.fetch(pieces)
        answers = np.empty((len(self._masters), len(Answer._fields)), np.int64)
        heads, parts, sent = [], [], []
        for at, master in enumerate(self._masters):
            if op.receives:
                heads.append(comm.Irecv(answers[at], master, ANSWER))
            version = int((self.known(network) if known is None else known)[at])
            request = Request(op, number, version, events, int(wants_turn and at == 0))
            sent.append(comm.Isend(np.array(request, np.int64), master, REQUEST))
        if op.receives:
            for piece in pieces:
                master = self._masters[piece.master]
                parts.append(comm.Irecv(incoming.raw(piece), master, ANSWERED))
        # Without an answer, an exchange ends when its vector is taken up.
        send = comm.Isend if op.receives else comm.Issend
        if op.sends:
            for piece in pieces:
                outgoing.ready(piece)
                master = self._masters[piece.master]
                sent.append(send(outgoing.raw(piece), master, REQUESTED))
        for piece, part in zip(pieces, parts, strict=False):
            part.Wait()
            incoming.store(piece)
        MPI.Request.Waitall([*heads, *sent])
        if op is Op.PULL:
            self._pulled[:, number] = answers[:, 0]
        elif op is Op.ADD:  # of what was pulled and this update
            self.versions[:, number] = self._pulled[:, number] + 1
        else:
            self.versions[:, number] = answers[:, 0]
        return Turn(*map(int, answers[0, 1:])) if wants_turn else None

    def known(self, network: str) -> np.ndarray:
        return self.versions[:, self._networks.index(network)].copy()

    def finish(self) -> None:
        for master in self._masters:
            self._comm.Send(np.array(Request(Op.DONE, 0, 0, 0), np.int64), master, REQUEST)


def _round(piece: Piece, pieces: list[Piece]) -> tuple[int, int]:
    """Sorts pieces so that all masters have work at once."""
    first = next(each.number for each in pieces if each.master == piece.master)
    return piece.number - first, piece.master
