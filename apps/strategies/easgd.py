"""Elastic averaging SGD (Zhang, Choromanska, LeCun 2015, arXiv:1412.6651)."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch

from apps.strategies.central import Central
from apps.strategies.centre import Op
from apps.strategies.submasters import ElasticBetween


class Easgd(Central):
    """Workers train on their own; a spring pulls each to the centre, and the centre to them.

    With x worker i's weights, theta the central ones, g the gradient at x, and alpha =
    `elastic_force` / number of workers, every tau = `sync_every` batches (Algorithm 1)::

        e = alpha (x - theta);  x -= e;  theta += e

    and in every batch ``x -= lr g(x)``, where g was computed before the exchange; any optimizer of
    torch may take the place of SGD. With { name = "sgd", momentum = d, nesterov = true } it is
    EAMSGD (Algorithm 2)::

        v = d v - lr g(x + d v);  x += v

    Synchronous (equations 5 and 6): all workers exchange with the same theta, and with beta =
    `elastic_force`::

        theta = (1 - beta) theta + beta mean(x)

    For the quadratic x^2 / 2 and workers in turn it is stable for 0 <= alpha <= (4 - 2 lr) /
    (4 - lr) (section 3.3), so that `elastic_force` is at most 1. With `overlap` the exchange runs
    while the gradient is computed; with one network the result is the same.

    Between epochs a sub-master's own weights are those of the top, and workers keep theirs.
    """

    sub_master = ElasticBetween

    def prepare(self) -> None:
        settings = self.training.optimizer
        name, momentum = settings["name"].lower(), settings.get("momentum", 0.0)
        self._looks_ahead = name == "sgd" and bool(settings.get("nesterov"))
        if not self.place.trains:
            return
        self._momentum = float(momentum)
        self._force = self.vector()
        self._own = self.vector()  # x between epochs; with EAMSGD always
        self._has_own = False
        self._velocity = self.vector() if self._looks_ahead else None
        self._on_its_way: dict[str, Future[None] | None] = {}

    @property
    def x(self) -> torch.Tensor:
        return self._own if self._looks_ahead else self.flat.values

    def start_epoch(self) -> None:
        if self._has_own:
            self.flat.values.copy_(self._own)
        else:
            self._own.copy_(self.flat.values)
            self._has_own = True
        for network in self.networks:
            self._look_ahead(self.part(network))

    def before(self, exchanges: bool) -> None:
        self.settle()
        if exchanges and self.exchange.overlap:
            for network in self.networks:
                vectors = self.x, self._force
                self._on_its_way[network] = self.ask_ahead(Op.ELASTIC, network, vectors)

    def move(self, network: str) -> None:
        part = self.part(network)
        if network in self._on_its_way:  # x must not change while it is sent
            self._be_pulled(network)
        if self._looks_ahead:
            velocity = self._velocity[part].mul_(self._momentum)
            velocity.sub_(self.flat.gradient[part], alpha=self.lr(network))
            self._own[part] += velocity
            self._look_ahead(part)
        else:
            optimizer = self.optimizers[network]
            parameters = optimizer.param_groups[0]["params"]
            for parameter, piece in zip(parameters, self.flat.pieces[network], strict=True):
                parameter.grad = self.flat.gradient[piece.where]
            optimizer.step()

    def push(self, network: str, has_moved: bool) -> None:
        if not self.exchange.overlap:
            self.ask(Op.ELASTIC, network, (self.x, self._force))
            self._be_pulled(network)
        if not has_moved:
            self.move(network)

    def settle(self) -> None:
        for network in list(self._on_its_way):
            self._be_pulled(network)

    def end_epoch(self) -> None:
        self.settle()
        if not self._looks_ahead:
            self._own.copy_(self.flat.values)

    def _be_pulled(self, network: str) -> None:
        """Move by the force that an exchange gives."""
        part = self.part(network)
        self.take_up(self._on_its_way.pop(network, None), self._force)
        self.group.share(self._force[part])
        self.x[part].sub_(self._force[part])
        self._look_ahead(part)

    def _look_ahead(self, part: slice) -> None:
        """Put the point where the next gradient is taken before the networks."""
        if self._looks_ahead:
            own, velocity = self._own[part], self._velocity[part]
            torch.add(own, velocity, alpha=self._momentum, out=self.flat.values[part])

    def own_state(self) -> dict[str, Any]:
        state = super().own_state()
        if self.place.trains and self._has_own:
            state["own"] = self._own.cpu().clone()
            if self._velocity is not None:
                state["velocity"] = self._velocity.cpu().clone()
        return state

    def load_own_state(self, state: dict[str, Any]) -> None:
        if "own" in state:
            self._own.copy_(state["own"])
            self._has_own = True
        if "velocity" in state and self._velocity is not None:
            self._velocity.copy_(state["velocity"])
