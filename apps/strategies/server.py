"""What a master does: it answers its workers, or its sub-masters, until an epoch is over."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from apps.contract import N3LOError
from apps.strategies.centre import Centre, Op
from apps.strategies.dealer import Dealer, Turn
from apps.strategies.flat import PIECE_BYTES, Piece, zeros
from apps.strategies.memory import Memory
from apps.strategies.messages import ANSWER, ANSWERED, REQUEST, REQUESTED, Answer, Request

SPIN_S = 1e-4  # a master that shares its core looks so long without a pause
PAUSE_S = 1e-4


class Manners(NamedTuple):
    """How a master treats its children."""

    synchronous: bool  # waits for all of them but `backup` before the weights move
    backup: int
    sleeps: bool  # pauses between looks, because its core is shared
    survives: bool  # leaves out one that died; else its death is raised


class Server:
    """A master during one epoch: it serves its children until each has said that it is done.

    None of them is served twice while another waits.

    Args:
        children: ranks of workers, with the number of each, or of sub-masters.
        pieces: of each network, those that this master owns.
        dealer: of the workers' turns; None where the children are sub-masters.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        children: dict[int, int],
        pieces: list[list[Piece]],
        centre: Centre,
        dealer: Dealer | None,
        manners: Manners,
    ) -> None:
        self._comm = comm
        self._pieces = pieces
        self._centre, self._dealer, self._workers = centre, dealer, children
        self._synchronous, self._backup, self._sleeps, self._survives = manners
        self._memory = Memory(centre.values)
        self._staging = _Staging(centre.values.dtype)
        self._requests = {child: np.empty(len(Request._fields), np.int64) for child in children}
        self._expected = {child: self._expect(child) for child in children}
        self._waiting: dict[int, Request] = {}  # children of a synchronous master, in order
        self._answers: list[MPI.Request] = []

    def serve(self) -> None:
        """Until the epoch is over."""
        while self._expected:
            for child in self._asking():
                request = Request(*map(int, self._requests[child]))
                if request.op == Op.DONE:
                    del self._expected[child]
                    self._waiting.pop(child, None)
                elif self._synchronous and Op(request.op) in (Op.STEP, Op.ELASTIC):
                    self._take_part(child, request)
                else:
                    self._try_to_serve(child, request)
                self._serve_waiting()
        self._centre.finish()

    def _expect(self, child: int) -> MPI.Request:
        return self._comm.Irecv(self._requests[child], child, REQUEST)

    def _asking(self) -> Iterator[int]:
        """Children whose request is there; each once, then a new look from the first on."""
        since = time.perf_counter()
        while True:
            found = [child for child in list(self._expected) if self._has_asked(child)]
            if found or not self._expected:
                break
            if self._sleeps and time.perf_counter() - since > SPIN_S:
                time.sleep(PAUSE_S)
        yield from found

    def _has_asked(self, child: int) -> bool:
        if child in self._waiting:
            return False
        try:
            return self._expected[child].Test()
        except MPI.Exception as error:
            self._lose(child, error)
            return False

    # -- one child ---------------------------------------------------------------------------------

    def _serve(self, child: int, request: Request) -> None:
        op, network = Op(request.op), request.network
        centre = self._centre
        centre.begin(op, network, request.version, request.events)
        pieces = self._pieces[network]
        data = self._received(child, pieces) if op.sends else ((piece, None) for piece in pieces)
        answered = False
        for piece, vector in data:
            answer = centre.apply(op, network, piece, vector, vector)
            if answer is not None:
                self._answer(child, piece, answer, vector)
                answered = True
        centre.end(op, network)
        if op.receives:
            self._conclude(child, request, None if answered else pieces)
        self._complete()
        self._expected[child] = self._expect(child)

    # -- all children at once ----------------------------------------------------------------------

    def _take_part(self, child: int, request: Request) -> None:
        """Let a child wait for the others; one that is late gets the weights, for nothing."""
        others = (each.network for each in self._waiting.values())
        late = request.version < self._centre.versions[request.network]
        if late or any(network != request.network for network in others):
            for _ in self._received(child, self._pieces[request.network]):
                pass
            self._conclude(child, request, self._pieces[request.network])
            self._complete()
            self._expected[child] = self._expect(child)
        else:
            self._waiting[child] = request

    def _serve_waiting(self) -> None:
        """Also after a child is done: the others may have waited for it alone."""
        needed = max(1, len(self._expected) - self._backup)
        if not self._waiting or len(self._waiting) < needed:
            return
        taking_part = dict(sorted(self._waiting.items()))
        self._waiting.clear()
        request = next(iter(taking_part.values()))
        op, network, pieces = Op(request.op), request.network, self._pieces[request.network]
        events = sum(each.events for each in taking_part.values())
        self._centre.begin(op, network, request.version, events)
        together = self._step if op is Op.STEP else self._pull_together
        answered = [together(taking_part, network, piece) for piece in pieces]
        self._centre.end(op, network)
        for child, each in taking_part.items():
            self._conclude(child, each, None if all(answered) else pieces)
        self._complete()
        for child in taking_part:
            self._expected[child] = self._expect(child)

    def _step(self, children: dict[int, Request], network: int, piece: Piece) -> bool:
        """Move by the mean gradient of all events; returns whether that was the answer."""
        events = sum(request.events for request in children.values())
        mean = self._staging.sum(piece)
        for child, request in children.items():
            for _, gradient in self._received(child, [piece]):
                mean.add_(gradient, alpha=request.events / events)
        answer = self._centre.apply(Op.STEP, network, piece, mean, mean)
        if answer is None:
            return False
        for child in children:
            self._answer(child, piece, answer)
        return True

    def _pull_together(self, children: dict[int, Request], network: int, piece: Piece) -> bool:
        """All elastic forces are of the same theta."""
        total = self._staging.sum(piece)
        for child in children:
            for _, own in self._received(child, [piece]):
                total.add_(self._centre.force(piece, own, own))
                self._answer(child, piece, own, own)
        self._centre.apply(Op.ADD, network, piece, total, total)
        return True

    # -- messages ----------------------------------------------------------------------------------

    def _received(self, child: int, pieces: list[Piece]) -> Iterator[tuple[Piece, torch.Tensor]]:
        """A child's vector, piece by piece, in memory that is reused.

        One piece stays in the cache between arriving and being worked on.
        """
        for piece in pieces:
            memory = self._staging.next(piece)
            self._comm.Recv(memory.raw(self._staging.as_piece(piece)), child, REQUESTED)
            yield piece, memory.host[: piece.where.stop - piece.where.start]

    def _answer(
        self, child: int, piece: Piece, vector: torch.Tensor, staged: torch.Tensor | None = None
    ) -> None:
        """Send a piece of theta, or of what lies in the staging memory."""
        if vector is staged:
            memory = self._staging.current
            sent = self._comm.Isend(memory.raw(self._staging.as_piece(piece)), child, ANSWERED)
            self._staging.sending(sent)
        else:
            self._answers.append(self._comm.Isend(self._memory.raw(piece), child, ANSWERED))

    def _conclude(self, child: int, request: Request, pieces: list[Piece] | None) -> None:
        """Send the numbers of an answer, and pieces of theta that were not sent yet."""
        turn = Turn(0, 0, 0)
        if request.wants_turn and self._dealer is not None:
            turn = self._dealer.deal(self._workers[child])
        answer = Answer(int(self._centre.versions[request.network]), *turn)
        self._answers.append(self._comm.Isend(np.array(answer, np.int64), child, ANSWER))
        for piece in pieces or []:
            self._answer(child, piece, self._centre.values)

    def _complete(self) -> None:
        """Before theta may move again, all of it that was sent must have arrived."""
        for answer in self._answers:  # one by one, so that an error is that of a child
            answer.Wait()
        self._answers.clear()
        self._staging.complete()

    # -- children that die -------------------------------------------------------------------------

    def _try_to_serve(self, child: int, request: Request) -> None:
        try:
            self._serve(child, request)
        except MPI.Exception as error:
            self._lose(child, error)

    def _lose(self, child: int, error: MPI.Exception) -> None:
        if not (self._survives and error.Get_error_class() == MPI.ERR_PROC_FAILED):
            raise error
        self._answers.clear()
        self._staging.drop()
        self._expected.pop(child, None)
        self._waiting.pop(child, None)
        if self._dealer is not None:
            self._dealer.lose(self._workers[child])
        if not self._expected:
            raise N3LOError("all workers of a master died") from error


class _Staging:
    """Memory for one piece at a time; a second, because an answer may still be on its way."""

    def __init__(self, dtype: torch.dtype) -> None:
        size = PIECE_BYTES // dtype.itemsize
        self._memories = deque(Memory(zeros(size, dtype)) for _ in range(2))
        self._sends: deque[MPI.Request | None] = deque([None, None])
        self._sum = zeros(size, dtype)

    @property
    def current(self) -> Memory:
        return self._memories[0]

    def next(self, piece: Piece) -> Memory:
        """Where a piece is received."""
        if self._sends[0] is not None:  # it is not free yet
            self._memories.rotate()
            self._sends.rotate()
        if self._sends[0] is not None:
            self._sends[0].Wait()
            self._sends[0] = None
        return self._memories[0]

    def sum(self, piece: Piece) -> torch.Tensor:
        return self._sum[: piece.where.stop - piece.where.start].zero_()

    @staticmethod
    def as_piece(piece: Piece) -> Piece:
        """The same piece, at the start of the memory."""
        return piece._replace(where=slice(0, piece.where.stop - piece.where.start))

    def sending(self, request: MPI.Request) -> None:
        self._sends[0] = request

    def complete(self) -> None:
        for each in self._sends:
            if each is not None:
                each.Wait()
        self.drop()

    def drop(self) -> None:
        self._sends = deque([None, None])
