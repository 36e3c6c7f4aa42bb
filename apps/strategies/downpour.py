"""Downpour SGD (Dean et al. 2012, "Large scale distributed deep networks", section 4.1)."""

from __future__ import annotations

from concurrent.futures import Future

from apps.strategies.central import Central
from apps.strategies.centre import Op
from apps.strategies.submasters import GradientSum


class Downpour(Central):
    """Workers send gradients, the master's optimizer moves the weights, workers take them over.

    With theta_t the central weights after t updates, and g_i worker i's gradient at the weights
    theta_v that it took over last::

        theta_{t+1} = optimizer(theta_t, g_i(theta_v)),        staleness = t - v

    With `sync_every` = tau > 1 a worker moves its own x by plain SGD with the same learning rate
    and sends the sum of its tau gradients, as in the paper's Algorithm 7.1::

        x -= lr g;  a += g;  every tau batches: theta = optimizer(theta, a), x = theta, a = 0

    Synchronous: the optimizer moves by the mean over the events of all workers, which is one large
    batch; of all but the last `backup_workers` of them, whose gradients are dropped, in Chen et
    al. 2016 (arXiv:1604.00981). `staleness_lr` divides the learning rate of an update by its
    staleness (Zhang et al. 2016, arXiv:1511.05950). With `overlap` a gradient is sent while the
    next one is computed, which adds one to the staleness.

    Gradients are clipped by the worker. With sub-masters, each sends up the mean gradient of
    `pass_on_every` exchanges.
    """

    sub_master = GradientSum
    centre_steps = True

    def prepare(self) -> None:
        exchange = self.exchange
        self.turns_ahead = 2 if exchange.overlap else 1
        if not self.place.trains:
            return
        self._accumulates = exchange.sync_every > 1 or exchange.per == "batch"
        self._sum = self.vector() if self._accumulates else self.flat.gradient
        self._events = dict.fromkeys(self.networks, 0)
        if exchange.overlap:
            self._outbox, self._inbox = self.vector(), self.vector()
        self._on_its_way: dict[str, Future[None] | None] = {}

    def start_epoch(self) -> None:
        self._known = {network: self.known(network) for network in self.networks}

    def gather(self, network: str, events: int) -> None:
        self._events[network] += events
        if self._accumulates:
            part = self.part(network)
            self._sum[part] += self.flat.gradient[part]

    def move(self, network: str) -> None:
        part = self.part(network)
        self.flat.values[part].sub_(self.flat.gradient[part], alpha=self.lr(network))

    def push(self, network: str, has_moved: bool) -> None:
        part, events = self.part(network), self._events[network]
        if self.exchange.overlap:
            known = self._known[network]
            self._receive(network)
            self._outbox[part] = self._sum[part]
            vectors = self._outbox, self._inbox
            self._on_its_way[network] = self.ask_ahead(Op.STEP, network, vectors, events, known)
        else:
            self.ask(Op.STEP, network, (self._sum, self.flat.values), events)
            self.group.share(self.flat.values[part])
        if self._accumulates:
            self._sum[part].zero_()
        self._events[network] = 0

    def settle(self) -> None:
        for network in list(self._on_its_way):
            self._receive(network)

    def end_epoch(self) -> None:
        self.settle()

    def _receive(self, network: str) -> None:
        """Take over what the last exchange brought."""
        if network in self._on_its_way:
            part, exchange = self.part(network), self._on_its_way.pop(network)
            self.take_up(exchange, self._inbox)
            self.flat.values[part] = self._inbox[part]
            self._known[network] = self.known(network)
            self.group.share(self.flat.values[part])
