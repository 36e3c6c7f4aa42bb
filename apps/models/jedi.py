"""JEDI-net as its paper has it (Moreno et al. 2020, arXiv:1908.05318).

The paper gathers senders and receivers of the N (N - 1) edges by multiplying with matrices of zeros
and ones, R_s and R_r: for 150 particles, 150 x 22350. Here every particle is set against every
other by broadcasting; the sums are the same. `apps.models.jets.InteractionNetwork` is the same idea
for fewer particles, scaled and masked.
"""

from __future__ import annotations

import torch
from torch import nn

from apps.models.layers import mlp


class JediNet(nn.Module):
    """f_R on each ordered pair of particles, f_O on each particle, f_C on their sum.

    With the values that are set here, and 16 features, it has the 8329 parameters of NNLO's
    example. Its hidden layers have `hidden` and hidden / 2 units.

    Args:
        num_features: of a particle, P.
        hidden: width of the first hidden layer of f_R, f_O and f_C.
        effects: numbers in what one particle does to another, D_E.
        outputs: numbers that f_O gives for a particle, D_O.
        num_particles: leading ones that are used; the cost goes with its square. None = all.
        masked: leave out particles whose features are all 0, which the paper does not.
    """

    def __init__(  # noqa: PLR0913  each is a dimension that a study may search
        self,
        num_features: int = 16,
        hidden: int = 50,
        effects: int = 14,
        outputs: int = 10,
        activation: str = "selu",
        num_particles: int | None = None,
        masked: bool = False,
        num_classes: int = 5,
    ) -> None:
        super().__init__()
        self.num_particles, self.masked = num_particles, masked
        half = hidden // 2
        self.f_r = mlp([2 * num_features, hidden, half, effects], activation)
        self.f_o = mlp([num_features + effects, hidden, half, outputs], activation)
        self.f_c = mlp([outputs, hidden, half], activation)
        self.head = nn.Linear(half, num_classes)

    def forward(self, particles: torch.Tensor) -> torch.Tensor:
        """Particles (B, N, num_features) -> logits (B, num_classes)."""
        particles = particles[:, : self.num_particles]
        here = torch.ones_like(particles[..., 0])  # (B, N)
        if self.masked:
            here = (particles != 0).any(dim=-1).to(particles.dtype)
        received = self._received(particles, here)
        outputs = self.f_o(torch.cat([particles, received], dim=-1))  # (B, N, D_O)
        return self.head(self.f_c(torch.einsum("bn,bno->bo", here, outputs)))

    def _received(self, particles: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
        """The sum of what all others do to each particle, (B, N, D_E)."""
        num = particles.shape[1]
        first, *rest = self.f_r
        of_receiver, of_sender = first.weight.chunk(2, dim=1)
        # The first layer is linear: its halves are applied to N particles, and not to N x N pairs.
        receivers = nn.functional.linear(particles, of_receiver, first.bias)
        senders = nn.functional.linear(particles, of_sender)
        effects = receivers.unsqueeze(2) + senders.unsqueeze(1)  # (B, N, N, hidden)
        for layer in rest:
            effects = layer(effects)
        others = 1 - torch.eye(num, dtype=here.dtype, device=here.device)
        return torch.einsum("rs,bs,brse->bre", others, here, effects)
