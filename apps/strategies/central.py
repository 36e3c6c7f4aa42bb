"""What the strategies with a central copy of the weights have in common.

Workers train on weights of their own and exchange with the centre: a master's memory, reached by
messages, or memory that all reach. Between epochs every rank holds the central weights, so that
validation, checkpoints and results know nothing of this.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from apps.contract import N3LOError
from apps.data import Batch, Epoch
from apps.strategies.base import Strategy
from apps.strategies.centre import Centre, Op, Rule, pieces_as_parameters
from apps.strategies.dealer import Dealer, Turn, first_turns
from apps.strategies.flat import PIECE_BYTES, WINDOW_BYTES, Flat, zeros
from apps.strategies.group import join
from apps.strategies.memory import Memory, memory_of, require_gpu_aware
from apps.strategies.messages import Link, Port, Vectors
from apps.strategies.server import Manners, Server
from apps.strategies.submasters import SubMaster
from apps.strategies.window import FIRST, RemoteWindow, SharedWindow, Window

Pair = tuple[torch.Tensor, torch.Tensor]

BROADCAST_BYTES = 2**28


class Central(Strategy):
    """An algorithm says what a worker does with a gradient, and what it exchanges.

    The training of one batch is: for each update, a gradient, then `move` (without an exchange) or
    `push` (with one). An exchange comes after every `sync_every` batches, with the update that a
    gradient belongs to, or for all networks at the end of the batch.
    """

    sub_master: type[SubMaster]
    centre_steps = False  # whether the optimizer moves the centre; else it moves workers
    turns_ahead = 1  # turns of a worker before the first answer

    def connect(self) -> None:
        topology, training, self.exchange = self.topology, self.training, self.training.exchange
        if self.exchange.overlap and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise N3LOError(
                "training.exchange.overlap: this MPI allows one thread at a time; set it to false"
            )
        if self.exchange.gpu_aware and topology.device.type == "cuda":
            require_gpu_aware()
        self.prepare_networks()
        self.place_networks()
        self.place = topology.place
        self._comm = topology.comm.Dup()  # messages of exchanges, apart from all others
        self.group = self._join_group()
        self.same_start()
        direct = self.exchange.transport == "messages"
        num_parts = topology.ranks.masters if len(self._roots()) > 1 else 1
        self.flat = Flat(self.networks, num_parts, PIECE_BYTES if direct else WINDOW_BYTES)
        self.optimizers = self.experiment.optimizers(pieces_as_parameters(self.flat))
        self.clip_norm = training.clip_norm
        self._window = None if direct else self._open_window()
        self._memories: dict[int, Memory] = {}
        self._answered: deque[Turn] = deque()
        self._wants_turn = False
        self._thread = ThreadPoolExecutor(max_workers=1) if self.exchange.overlap else None
        self._counts: Counter[int] = Counter()
        self._port: Port | None = self._window
        if direct and self.place.parents and self._leads:
            self._port = Link(self._comm, self.place.parents, self.flat)
        if self.exchange.tolerate_worker_loss:
            self._require_tolerance()
        self.prepare()

    def prepare(self) -> None:
        """Set up the memory that the algorithm needs."""

    # -- an epoch ----------------------------------------------------------------------------------

    def train(self, epoch: Epoch) -> torch.Tensor:
        self.flat.check()
        self._counts.clear()
        self.open(epoch.num_steps)
        sums = self._work(epoch) if self.place.trains else self.experiment.no_sums()
        if not self.place.trains and self._window is None:
            self.serve(epoch.num_steps)
        self._gather()
        return sums

    def open(self, num_steps: int) -> None:
        """Begin an epoch, in which every worker has so many steps; collective."""
        if self._window is not None:
            worker = self.place.worker if self.place.trains else None
            size = self.exchange.sync_every
            self._window.start_epoch(worker, num_steps, size, self.turns_ahead)
        elif isinstance(self._port, Link):
            self._port.start_epoch()

    def _work(self, epoch: Epoch) -> torch.Tensor:
        sums = self.experiment.no_sums()
        self.start_epoch()
        turns = deque(
            first_turns(
                self.place.worker, epoch.num_steps, self.exchange.sync_every, self.turns_ahead
            )
        )
        while turns:
            turn = turns.popleft()
            for step in range(turn.first, turn.first + turn.count):
                is_last = step == turn.first + turn.count - 1
                with self.clock.waiting("data"):
                    batch = epoch.batch(turn.owner, step)
                sums += self._train_batch(batch, is_last)
            turns += self._new_turns()
            if not turns:  # what is on its way may bring more
                self.settle()
                turns += self._new_turns()
        self.end_epoch()
        self.finish()
        return sums

    def _train_batch(self, batch: Batch, exchanges: bool) -> torch.Tensor:
        sums, moved = [], {}
        at_update = exchanges and self.exchange.per == "update"
        self._wants_turn = exchanges and self._leads
        self.before(exchanges)
        # Ranks of a worker are averaged with equal weights, but their batches differ by an event.
        share = batch.num_events * self.group.comm.size / batch.num_global
        for update in self.experiment.updates(self.networks, batch):
            gradient = self.flat.gradient
            gradient.zero_()
            self.flat.attach_gradients()
            (update.loss * share).backward()
            part = gradient[self.flat.parts[update.network]]
            with self.clock.waiting("communication"):
                self.group.average(part)
            if self.clip_norm is not None:
                norm = torch.linalg.vector_norm(part)
                part.mul_(torch.clamp(self.clip_norm / (norm + 1e-6), max=1.0))
            self.gather(update.network, batch.num_global)
            if at_update:
                self.push(update.network, has_moved=False)
            else:
                self.move(update.network)
            moved[update.network] = True
            sums.append(update.sums)
        if exchanges and not at_update:
            for network in moved:
                self.push(network, has_moved=True)
        return torch.stack(sums).sum(dim=0)

    def _gather(self) -> None:
        """Give every rank the central weights, once all have ended the epoch."""
        self.flat.check()
        self._note_steps()
        if self.exchange.tolerate_worker_loss:
            self.topology.leave_out_the_dead()
        if self._window is not None:
            self._window.end_epoch()
            self._counts.update(self._window.staleness)
        if isinstance(self._window, SharedWindow):
            return
        for number, root in enumerate(self._roots()):
            for pieces in self.flat.pieces.values():
                owned = [piece.where for piece in pieces if piece.master == number]
                if owned:
                    self._broadcast(slice(owned[0].start, owned[-1].stop), root)

    def _broadcast(self, part: slice, root: int) -> None:
        step = BROADCAST_BYTES // self.flat.values.element_size()
        for at in range(part.start, part.stop, step):
            piece = self.flat.values[at : min(at + step, part.stop)]
            host = piece.cpu()  # the same memory, unless it is on a GPU
            self.topology.comm.Bcast([host.view(torch.uint8).numpy(), MPI.BYTE], root)
            if host.data_ptr() != piece.data_ptr():
                piece.copy_(host)

    # -- what an algorithm does --------------------------------------------------------------------

    def start_epoch(self) -> None:
        """On a worker, whose networks hold the central weights."""

    def before(self, exchanges: bool) -> None:
        """On a worker, before a batch."""

    def gather(self, network: str, events: int) -> None:
        """There is a new gradient, the mean over so many events."""

    def move(self, network: str) -> None:
        """Move by the gradient alone."""

    def push(self, network: str, has_moved: bool) -> None:
        """Exchange.

        Args:
            has_moved: whether `move` was called for the last gradient.
        """
        raise NotImplementedError

    def settle(self) -> None:
        """Wait for the exchanges that are on their way."""

    def end_epoch(self) -> None:
        """On a worker, after its last exchange."""

    # -- for the algorithms ------------------------------------------------------------------------

    def part(self, network: str) -> slice:
        return self.flat.parts[network]

    @property
    def x(self) -> torch.Tensor:
        """A worker's own weights, (n,)."""
        return self.flat.values

    def lr(self, network: str) -> float:
        return float(self.optimizers[network].param_groups[0]["lr"])

    def vector(self) -> torch.Tensor:
        """A vector of zeros, as long as the weights."""
        values = self.flat.values
        return zeros(len(values), values.dtype, values.device)

    def ask(self, op: Op, network: str, vectors: Pair, events: int = 0) -> None:
        """Exchange a network's part of two vectors, if this rank leads its worker.

        Args:
            vectors: what goes out and what comes in; may be the same.
            events: that the first was computed from.
        """
        if self._leads:
            with self.clock.waiting("communication"):
                self._exchange(op, network, vectors, events, self._wants(op), None)
                self._memory(vectors[1]).take_up()

    def ask_ahead(
        self,
        op: Op,
        network: str,
        vectors: Pair,
        events: int = 0,
        known: np.ndarray | None = None,
    ) -> Future[None] | None:
        """The same in a thread, while this one computes.

        Args:
            known: the version of the weights that the vector was computed with.
        """
        if not self._leads:
            return None
        wants_turn = self._wants(op)
        self._memory(vectors[0]).fetch_ahead(self.flat.pieces[network])
        return self._thread.submit(self._exchange, op, network, vectors, events, wants_turn, known)

    def take_up(self, exchange: Future[None] | None, incoming: torch.Tensor) -> None:
        """Wait for an exchange in the thread, if there is one, and for what it brought."""
        if exchange is not None:
            with self.clock.waiting("communication"):
                exchange.result()
                self._memory(incoming).take_up()

    def finish(self) -> None:
        """On a worker: no exchange follows in this epoch."""
        if self._leads:
            self._port.finish()

    def known(self, network: str) -> np.ndarray | None:
        """The version of the weights that came last, on the rank that leads."""
        return self._port.known(network) if self._leads else None

    def _wants(self, op: Op) -> bool:
        """One of the exchanges of a turn asks for the next one."""
        wants_turn = self._wants_turn and op.receives
        self._wants_turn = self._wants_turn and not wants_turn
        return wants_turn

    def _exchange(
        self,
        op: Op,
        network: str,
        vectors: Pair,
        events: int,
        wants_turn: bool,
        known: np.ndarray | None,
    ) -> None:
        memories = Vectors(*map(self._memory, vectors))
        turn = self._port.exchange(op, network, memories, events, wants_turn, known)
        if turn is not None and turn.count:
            self._answered.append(turn)

    def _memory(self, vector: torch.Tensor) -> Memory:
        key = vector.data_ptr()
        if key not in self._memories:
            self._memories[key] = memory_of(vector, self.exchange.gpu_aware)
        return self._memories[key]

    # -- masters -----------------------------------------------------------------------------------

    def serve(self, num_steps: int) -> None:
        """On a master: answer workers until all have ended their epoch."""
        place, exchange = self.place, self.exchange
        places = self.topology.places
        lowest = places[place.children[0]].trains
        alive = self.topology.alive
        children = {child: places[child].worker for child in place.children if child in alive}
        dealer = None
        if lowest:
            dealer = Dealer(
                tuple(places[child].worker for child in place.children),
                num_steps,
                exchange.sync_every,
                self.turns_ahead,
                absent=[places[child].worker for child in place.children if child not in alive],
            )
        number = self.topology.rank if len(self._roots()) > 1 else 0
        pieces = [
            [piece for piece in each if piece.master == number]
            for each in self.flat.pieces.values()
        ]
        centre = self._centre(len(place.children))
        server = Server(
            self._comm,
            children,
            pieces,
            centre,
            dealer,
            Manners(
                exchange.synchronous,
                exchange.backup_workers if lowest else 0,
                self._shares_core(),
                exchange.tolerate_worker_loss,
            ),
        )
        server.serve()
        if self.topology.is_first:
            self._counts.update(centre.staleness)

    def _centre(self, num_children: int) -> Centre:
        exchange, place = self.exchange, self.place
        versions = np.zeros(len(self.flat.pieces), np.int64)
        common = (self.flat.values, self.optimizers, self._rule(num_children), versions)
        if not place.parents:
            return Centre(*common)
        every = exchange.pass_on_every or num_children
        if exchange.synchronous:
            every = 1
        return self.sub_master(self._port, list(self.flat.pieces), every, *common)

    def _rule(self, num_children: int) -> Rule:
        return Rule(self.exchange.elastic_force / num_children, self.exchange.staleness_lr)

    def _roots(self) -> list[int]:
        """The masters that have no master: of parts of the weights, if they are several."""
        places, masters = self.topology.places, range(self.topology.ranks.masters)
        return [rank for rank in masters if not places[rank].parents] or [FIRST]

    def _shares_core(self) -> bool:
        wait = self.exchange.masters_wait
        if wait != "auto":
            return wait == "sleep"
        return self.topology.node_ranks * torch.get_num_threads() > self.topology.node_cores

    # -- set-up ------------------------------------------------------------------------------------

    @property
    def _leads(self) -> bool:
        return self.group.leads if self.place.trains else True

    def _join_group(self) -> Any:
        topology = self.topology
        color = topology.place.worker if topology.place.trains else MPI.UNDEFINED
        comm = topology.comm.Split(color, topology.rank)
        return None if comm == MPI.COMM_NULL else join(comm, topology.device, self.training.backend)

    def _open_window(self) -> Window:
        topology, training = self.topology, self.training
        num_workers = topology.ranks.workers
        optimizers = self.optimizers if self.centre_steps else {}
        common = (topology.comm, self.flat, num_workers, optimizers)
        rule = self._rule(num_workers)
        if self.exchange.transport == "window":
            settings = {name: training.optimizer_of(name) for name in optimizers}
            return SharedWindow(*common, settings, rule)
        return RemoteWindow(*common, rule)

    def _require_tolerance(self) -> None:
        try:
            self._comm.Get_failed().Free()
        except (NotImplementedError, MPI.Exception) as error:
            raise N3LOError(
                "training.exchange.tolerate_worker_loss: this MPI cannot go on without a rank "
                f"({MPI.Get_library_version().split(',')[0]}, {error}); set it to false"
            ) from error

    # -- small things ------------------------------------------------------------------------------

    def _new_turns(self) -> list[Turn]:
        """Those that came with answers, on all ranks of the worker."""
        turns = []
        while self._answered:  # a thread may add to them
            turns.append(self._answered.popleft())
        return turns if self.group.comm.size == 1 else self.group.comm.bcast(turns)

    def _note_steps(self) -> None:
        """A schedule warns where its optimizer made no step; here another rank's did."""
        for optimizer in self.optimizers.values():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = None
            optimizer.step()

    def facts(self) -> dict[str, float]:
        gathered: Sequence[Counter[int]] = self.topology.comm.allgather(self._counts)
        self.staleness = sum(gathered, Counter())
        updates = self.staleness.total()
        total = sum(staleness * count for staleness, count in self.staleness.items())
        return {
            "updates": updates,
            "staleness": total / max(1, updates),
            "staleness_max": max(self.staleness, default=0),
        }

    def own_state(self) -> dict[str, Any]:
        shared = isinstance(self._window, SharedWindow) and self.centre_steps
        if self.topology.is_first or shared:
            return {}
        optimizers = {name: each.state_dict() for name, each in self.optimizers.items()}
        has_state = any(each["state"] for each in optimizers.values())
        return {"optimizers": optimizers} if has_state else {}

    def choose_own(self, states: dict[str, Any], own: dict[str, Any]) -> None:
        if not self.topology.is_first:
            for name, state in states["optimizers"].items():
                nothing = {**state, "state": {}}
                states["optimizers"][name] = own.get("optimizers", {}).get(name, nothing)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        if self.group is not None:
            self.group.close()
        self.topology.comm.Barrier()
