"""The central weights in memory that workers reach by themselves: no master serves them.

`SharedWindow` is memory of one node: a worker locks it, moves the weights and copies them at the
speed of memory. `RemoteWindow` is one-sided MPI to the memory of the first rank, wherever that is.
MPI can only add there, so it is for what adds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from mpi4py import MPI
from torch import nn
from torch.optim import Optimizer

from apps.contract import N3LOError, Plain
from apps.experiment import make_optimizer
from apps.strategies.centre import Centre, Op, Rule
from apps.strategies.dealer import Dealer, Turn
from apps.strategies.flat import Flat
from apps.strategies.messages import Vectors

FIRST = 0  # the rank that the memory belongs to
LINE_BYTES = 64  # what lies in a window begins at a line of the cache


class Window(ABC):
    """Central weights that a worker changes while it alone holds the lock.

    Beside them lie, as whole numbers, the version of each network and the deal of the epoch.
    """

    def __init__(self, comm: MPI.Intracomm, flat: Flat, num_workers: int) -> None:
        self._comm, self._flat, self._num_workers = comm, flat, num_workers
        self._networks = list(flat.pieces)
        self._num_words = len(self._networks) + 2 * num_workers
        self.staleness: Counter[int] = Counter()  # of this worker's updates, in this epoch

    def start_epoch(self, worker: int | None, num_steps: int, size: int, ahead: int) -> None:
        """Fill the memory from the weights that all ranks hold; collective.

        Args:
            worker: this rank's number; None for a rank that only lends its memory.
            num_steps, size, ahead: of the `Dealer`.
        """
        self.staleness.clear()
        self._words = np.zeros(self._num_words, np.int64)
        bounds = self._words[len(self._networks) :].reshape(self._num_workers, 2)
        workers = tuple(range(self._num_workers))
        self._dealer = Dealer(workers, num_steps, size, ahead, bounds=bounds)
        self._dealer.reset()
        self._worker = worker
        self._versions = np.zeros(len(self._networks), np.int64)
        self._pulled = np.zeros(len(self._networks), np.int64)
        if self._comm.rank == FIRST:
            with self._lock():
                self._fill()
        self._comm.Barrier()
        self._attach()

    def exchange(
        self,
        op: Op,
        network: str,
        vectors: Vectors,
        events: int = 0,
        wants_turn: bool = False,
        known: np.ndarray | None = None,
    ) -> Turn | None:
        """See `messages.Port`."""
        number, pieces = self._networks.index(network), self._flat.pieces[network]
        if op.sends:
            vectors.outgoing.fetch(pieces)
            for piece in pieces:
                vectors.outgoing.ready(piece)
        with self._lock():
            self._read_words()
            version = int(self._words[number])
            of_vector = int((self.known(network) if known is None else known)[0])
            if op.sends:
                self.staleness[version - of_vector] += 1
            self._do(op, number, vectors, of_vector)
            self._words[number] += op.sends
            turn = self._dealer.deal(self._worker) if wants_turn else None
            self._write_words()
        if op is Op.PULL:
            self._pulled[number] = version
        else:  # what was pulled and this update; otherwise nobody else came between
            before = self._pulled[number] if op is Op.ADD else version
            self._versions[number] = before + 1
        if op.receives:
            for piece in pieces:
                vectors.incoming.store(piece)
        return turn

    def finish(self) -> None:  # noqa: B027  there is nobody to tell
        """See `messages.Port`."""

    def known(self, network: str) -> np.ndarray:
        return self._versions[[self._networks.index(network)]]

    @abstractmethod
    def end_epoch(self) -> None:
        """Give the central weights to all ranks; collective, when all have ended the epoch."""

    def _attach(self) -> None:  # noqa: B027  only some have a state
        """Give this rank what all share beside the weights."""

    @abstractmethod
    def _lock(self) -> Iterator[None]: ...

    @abstractmethod
    def _fill(self) -> None: ...

    @abstractmethod
    def _read_words(self) -> None: ...

    @abstractmethod
    def _write_words(self) -> None: ...

    @abstractmethod
    def _do(self, op: Op, number: int, vectors: Vectors, version: int) -> None:
        """Exchange, with the lock held.

        Args:
            version: of the weights that the vector was computed with.
        """


class SharedWindow(Window):
    """Memory of one node. The optimizer's state lies in it too, so that all workers share one.

    Args:
        comm: of all ranks, which must be on one node.
        optimizers: this rank's own, of the pieces of `flat`; they are set to the shared memory.
            None of them, if the centre has none.
        settings: that they were made from, by network.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        flat: Flat,
        num_workers: int,
        optimizers: Mapping[str, Optimizer],
        settings: Mapping[str, dict[str, Plain]],
        rule: Rule,
    ) -> None:
        super().__init__(comm, flat, num_workers)
        if comm.Split_type(MPI.COMM_TYPE_SHARED).size != comm.size:
            raise N3LOError(
                "training.exchange.transport: 'window' is the memory of one node, and the ranks "
                "are on several; use 'messages'"
            )
        self._optimizers = optimizers
        self._kinds = {name: state_kinds(settings[name], flat.values.dtype) for name in optimizers}
        self._window = MPI.Win.Allocate_shared(self._num_bytes(comm.rank == FIRST), comm=comm)
        self._memory, _ = self._window.Shared_query(FIRST)
        if comm.rank == FIRST:
            np.frombuffer(self._memory, np.uint8)[:] = 0
        comm.Barrier()
        self._used = 0
        self._shared_words = self._take(self._num_words, torch.int64).numpy()
        self._theta = self._take(len(flat), flat.values.dtype)
        self._started = self._take(self._num_pieces, torch.int64)
        self._states = {
            name: [self._take_state(name, piece.where) for piece in pieces]
            for name, pieces in flat.pieces.items()
        }
        self._move_parameters()
        versions = self._shared_words[: len(self._networks)]
        self._centre = Centre(self._theta, optimizers, rule, versions)

    def end_epoch(self) -> None:
        self._comm.Barrier()
        self._flat.values.copy_(self._theta)
        self._attach()

    # -- what lies where ---------------------------------------------------------------------------

    @property
    def _num_pieces(self) -> int:
        return sum(map(len, self._flat.pieces.values()))

    def _num_bytes(self, has_all: bool) -> int:
        if not has_all:
            return 0
        item = self._flat.values.element_size()
        sizes = [8 * self._num_words, item * len(self._flat), 8 * self._num_pieces]
        for name, pieces in self._flat.pieces.items():
            for piece in pieces:
                length = piece.where.stop - piece.where.start
                sizes += [
                    dtype.itemsize * (length if whole else 1)
                    for dtype, whole in self._kinds.get(name, {}).values()
                ]
        return sum(-(-size // LINE_BYTES) * LINE_BYTES for size in sizes)

    def _take(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """The next part of the memory; each is a storage of its own, so that it can be saved."""
        size = length * dtype.itemsize
        taken = self._memory[self._used : self._used + size]
        self._used += -(-size // LINE_BYTES) * LINE_BYTES
        return torch.frombuffer(taken, dtype=dtype)

    def _take_state(self, name: str, where: slice) -> dict[str, torch.Tensor]:
        length = where.stop - where.start
        return {
            key: self._take(length, dtype) if whole else self._take(1, dtype).reshape(())
            for key, (dtype, whole) in self._kinds.get(name, {}).items()
        }

    def _move_parameters(self) -> None:
        """The optimizers move theta in the shared memory, and not this rank's weights."""
        for name, optimizer in self._optimizers.items():
            parameters = optimizer.param_groups[0]["params"]
            for parameter, piece in zip(parameters, self._flat.pieces[name], strict=True):
                parameter.data = self._theta[piece.where]

    def _attach(self) -> None:
        """Give the optimizers the state in the shared memory, where it has begun."""
        first = 0
        for name, optimizer in self._optimizers.items():
            states = self._states[name]
            parameters = optimizer.param_groups[0]["params"]
            for number, (parameter, state) in enumerate(zip(parameters, states, strict=True)):
                optimizer.state.pop(parameter, None)  # a copy of its own, from a file
                if state and self._started[first + number]:
                    optimizer.state[parameter] = state
            first += len(states)

    def _publish(self, network: int, number: int) -> None:
        """The first step of a piece made its state; from now on it lies in the shared memory."""
        name = self._networks[network]
        optimizer = self._optimizers[name]
        parameter = optimizer.param_groups[0]["params"][number]
        for key, shared in self._states[name][number].items():
            shared.copy_(optimizer.state[parameter][key])
        optimizer.state[parameter] = self._states[name][number]

    # -- an exchange -------------------------------------------------------------------------------

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self._window.Lock(FIRST, MPI.LOCK_EXCLUSIVE)
        try:
            yield
        finally:
            self._window.Unlock(FIRST)

    def _fill(self) -> None:
        self._shared_words[:] = self._words
        self._theta.copy_(self._flat.values)
        first = 0
        for network, (name, optimizer) in enumerate(self._optimizers.items()):
            for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
                # A state that was loaded from a file, or is there from the epoch before.
                if self._states[name][number] and optimizer.state.get(parameter):
                    self._publish(network, number)
                    self._started[first + number] = 1
            first += len(self._states[name])

    def _read_words(self) -> None:
        self._words[:] = self._shared_words

    def _write_words(self) -> None:
        self._shared_words[:] = self._words

    def _do(self, op: Op, number: int, vectors: Vectors, version: int) -> None:
        name = self._networks[number]
        first = sum(len(self._flat.pieces[each]) for each in self._networks[:number])
        self._centre.begin(op, number, version, events=1)
        outgoing, incoming = vectors.outgoing.host, vectors.incoming.host
        for piece in self._flat.pieces[name]:
            steps = op is Op.STEP and bool(self._states[name][piece.number])
            begun = bool(self._started[first + piece.number])
            if steps and begun:
                self._use(name, piece.number)
            out = incoming[piece.where]
            answer = self._centre.apply(op, number, piece, outgoing[piece.where], out)
            if steps and not begun:
                self._publish(number, piece.number)
                self._started[first + piece.number] = 1
            if answer is not None and answer is not out:
                out.copy_(answer)  # while it is in the cache

    def _use(self, name: str, number: int) -> None:
        optimizer = self._optimizers[name]
        parameter = optimizer.param_groups[0]["params"][number]
        optimizer.state[parameter] = self._states[name][number]


class RemoteWindow(Window):
    """Memory of the first rank, which workers read and add to by one-sided MPI.

    Args:
        optimizers: of plain SGD, if the gradient shall be applied by `Op.STEP`.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        flat: Flat,
        num_workers: int,
        optimizers: Mapping[str, Optimizer],
        rule: Rule,
    ) -> None:
        super().__init__(comm, flat, num_workers)
        if flat.values.dtype not in (torch.float32, torch.float64):
            raise N3LOError(
                f"training.exchange.transport: 'one_sided' MPI cannot add {flat.values.dtype}; use "
                "'messages'"
            )
        self._optimizers = list(optimizers.values())
        self._rule = rule
        own = comm.rank == FIRST
        item = flat.values.element_size()
        self._data = MPI.Win.Allocate(item * len(flat) if own else 0, item, comm=comm)
        self._control = MPI.Win.Allocate(8 * self._num_words if own else 0, 8, comm=comm)

    def end_epoch(self) -> None:
        self._comm.Barrier()
        if self._comm.rank == FIRST:
            with self._lock():
                whole = torch.frombuffer(self._data.tomemory(), dtype=self._flat.values.dtype)
                self._flat.values.copy_(whole)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self._control.Lock(FIRST, MPI.LOCK_EXCLUSIVE)
        self._data.Lock(FIRST, MPI.LOCK_EXCLUSIVE)
        try:
            yield
        finally:
            self._data.Unlock(FIRST)
            self._control.Unlock(FIRST)

    def _fill(self) -> None:
        whole = torch.frombuffer(self._data.tomemory(), dtype=self._flat.values.dtype)
        whole.copy_(self._flat.values)
        np.frombuffer(self._control.tomemory(), np.int64)[:] = self._words

    def _read_words(self) -> None:
        self._control.Get(self._words, FIRST)
        self._control.Flush(FIRST)

    def _write_words(self) -> None:
        self._control.Put(self._words, FIRST)
        self._control.Flush(FIRST)

    def _do(self, op: Op, number: int, vectors: Vectors, version: int) -> None:
        outgoing, incoming = vectors.outgoing.host, vectors.incoming.host
        for piece in self._flat.pieces[self._networks[number]]:
            own, out = outgoing[piece.where], incoming[piece.where]
            if op is Op.STEP:
                lr = self._optimizers[number].param_groups[0]["lr"]
                scale = self._rule.lr_scale(int(self._words[number]) - version)
                own = torch.mul(own, -lr * scale, out=out)
            elif op is Op.ELASTIC:
                self._get(out, piece.where.start)
                own = torch.sub(own, out, out=out).mul_(self._rule.alpha)
            if op.sends:
                place = [piece.where.start, own.numel()]
                self._data.Accumulate(own.numpy(), FIRST, place, MPI.SUM)
                self._data.Flush(FIRST)
            if op.receives and op is not Op.ELASTIC:
                self._get(out, piece.where.start)

    def _get(self, out: torch.Tensor, first: int) -> None:
        self._data.Get(out.numpy(), FIRST, [first, out.numel()])
        self._data.Flush(FIRST)


def state_kinds(
    settings: dict[str, Plain], dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, bool]]:
    """What an optimizer keeps of a parameter: the type of each value, and if it has its shape.

    Seen from a step on a parameter of its own.
    """
    parameter = nn.Parameter(torch.zeros(2, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    alike = make_optimizer(settings, [parameter])
    alike.step()
    kinds = {}
    for key, value in alike.state[parameter].items():
        if isinstance(value, torch.Tensor):
            kinds[key] = value.dtype, value.shape == parameter.shape
        elif value is not None:
            raise N3LOError(
                f"training.exchange.transport: optimizer '{settings['name']}' keeps "
                f"{key}, which shared memory cannot hold; use 'messages'"
            )
    return kinds
