"""Gradient energy matching (Hermans, Louppe 2018, arXiv:1805.08469)."""

from __future__ import annotations

from typing import Any

import torch

from apps.strategies.central import Central
from apps.strategies.centre import Op
from apps.strategies.submasters import SumOfMoves

EPSILON = 1e-12
LARGEST_SCALE = 5.0


class Gem(Central):
    """All workers together move the centre with the energy of one optimizer with momentum.

    After each gradient g, parameter by parameter, as in the authors' own code (gem.py of
    montefiore-institute/gradient-energy-matching)::

        u = -lr g;  m = mu m + u                        # the proxy: momentum SGD on its own
        pull theta;  c = theta - theta_before           # what moved since this worker's last pull
        s = clip((kappa |m| - |c|) / |u + eps|, 0, 5)
        push s u:  theta += s u;  the worker goes on from theta + s u

    so that |s u| + |c| <= kappa |m| where |c| <= kappa |m|; where the others have moved the centre
    by more than that, s = 0 and a worker adds nothing. `lr` and `momentum` (mu) are those of
    { name = "sgd" }; kappa = `exchange.kappa`.
    """

    sub_master = SumOfMoves

    def prepare(self) -> None:
        settings = self.training.optimizer
        self._mu = float(settings.get("momentum", 0.0))
        if self.place.trains:
            self._momentum = self.vector()
            self._known = self.vector()  # theta at this worker's last pull
            self._pulled = self.vector()
            self._update = self.vector()  # of a batch

    def start_epoch(self) -> None:
        self._known.copy_(self.flat.values)

    def gather(self, network: str, events: int) -> None:
        part, lr = self.part(network), self.lr(network)
        gradient = self.flat.gradient[part]
        self._update[part].sub_(gradient, alpha=lr)
        self._momentum[part].mul_(self._mu).sub_(gradient, alpha=lr)

    def move(self, network: str) -> None:
        part = self.part(network)
        self.flat.values[part].sub_(self.flat.gradient[part], alpha=self.lr(network))

    def push(self, network: str, has_moved: bool) -> None:
        part = self.part(network)
        self.ask(Op.PULL, network, (self._pulled, self._pulled))
        self.group.share(self._pulled[part])
        pulled, known, update = self._pulled[part], self._known[part], self._update[part]
        scale = energy_scale(update, self._momentum[part], pulled - known, self.exchange.kappa)
        known.copy_(pulled)
        update.mul_(scale)
        self.ask(Op.ADD, network, (self._update, self._update))
        torch.add(pulled, update, out=self.flat.values[part])
        update.zero_()

    def own_state(self) -> dict[str, Any]:
        state = super().own_state()
        if self.place.trains:
            state["momentum"] = self._momentum.cpu().clone()
        return state

    def load_own_state(self, state: dict[str, Any]) -> None:
        if "momentum" in state:
            self._momentum.copy_(state["momentum"])


def energy_scale(
    update: torch.Tensor, momentum: torch.Tensor, moved: torch.Tensor, kappa: float
) -> torch.Tensor:
    """s of the formula, (n,)."""
    energy = momentum.abs().mul_(kappa).sub_(moved.abs())
    return energy.div_((update + EPSILON).abs()).clamp_(0, LARGEST_SCALE)
