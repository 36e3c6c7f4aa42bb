"""A recurrent network that reads a jet one constituent after the other."""

from __future__ import annotations

import torch
from torch import nn

from apps.models.jets import NUM_FEATURES, constituents
from apps.models.layers import mlp

CELLS = {"lstm": nn.LSTM, "gru": nn.GRU}
POOLS = ("mean", "last")


class ParticleRnn(nn.Module):
    """An LSTM or a GRU over the constituents, and a few layers that classify what it has seen.

    The files order constituents by falling pt and fill up with zeros. A state depends on what was
    read before it alone, so only those after a constituent count, and not those after the filling.

    Args:
        cell: "lstm" or "gru".
        hidden: size of its state.
        num_layers: recurrent layers, each of which reads the states of the one before.
        pool: "mean" of the states over the constituents, or the "last" one.
        dense: width of the layers behind it; NNLO's example has four of 100 behind the last state.
        dropout: between recurrent layers, and behind each dense one.
    """

    def __init__(  # noqa: PLR0913  each is a dimension that a study may search
        self,
        cell: str = "lstm",
        hidden: int = 50,
        num_layers: int = 1,
        pool: str = "mean",
        dense: int = 100,
        num_dense: int = 1,
        activation: str = "elu",
        dropout: float = 0.0,
        num_classes: int = 5,
    ) -> None:
        super().__init__()
        if cell not in CELLS:
            raise ValueError(f"there is no cell '{cell}', only {', '.join(CELLS)}")
        if pool not in POOLS:
            raise ValueError(f"there is no pool '{pool}', only {', '.join(POOLS)}")
        between = dropout if num_layers > 1 else 0.0  # torch warns where there is nothing between
        self.pool = pool
        self.rnn = CELLS[cell](NUM_FEATURES, hidden, num_layers, batch_first=True, dropout=between)
        self.dense = mlp([hidden, *[dense] * num_dense], activation, dropout)
        self.head = nn.Linear(dense if num_dense else hidden, num_classes)

    def forward(self, jets: torch.Tensor) -> torch.Tensor:
        """Constituents (B, N, 16) -> logits (B, num_classes)."""
        parts = constituents(jets)
        states, _ = self.rnn(parts.features)  # (B, N, hidden)
        weight = parts.mask if self.pool == "mean" else self._last(parts.mask)
        weight = weight / weight.sum(dim=1, keepdim=True).clamp(min=1)
        return self.head(self.dense(torch.einsum("bn,bnh->bh", weight, states)))

    def _last(self, mask: torch.Tensor) -> torch.Tensor:
        """1 at the last constituent that is there, else 0: (B, N) -> (B, N)."""
        behind = mask.flip(1).cumsum(dim=1).flip(1)  # constituents from here on
        return mask * (behind == 1)
