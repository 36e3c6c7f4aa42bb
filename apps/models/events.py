"""A network for tables of events, a row of kinematic quantities each, such as HIGGS."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from apps.models.layers import activation as make_activation


class EventMlp(nn.Module):
    """Tells signal from background (Baldi, Sadowski, Whiteson 2014, arXiv:1402.4735).

    The paper's best network has five layers of 300 tanh units on 28 quantities.

    Args:
        num_features: quantities of an event.
        depth: hidden layers, each of `width` units.
        batch_norm: scale each quantity, and what each hidden layer gives, by its mean and spread;
            without it, quantities should come with a spread of order 1.
        dropout: behind each hidden layer.
    """

    def __init__(
        self,
        num_features: int,
        width: int = 300,
        depth: int = 5,
        activation: str = "tanh",
        batch_norm: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.BatchNorm1d(num_features)] if batch_norm else []
        for num_in, num_out in pairwise([num_features, *[width] * depth]):
            layers.append(nn.Linear(num_in, num_out))
            if batch_norm:
                layers.append(nn.BatchNorm1d(num_out))
            layers.append(make_activation(activation))
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
        self.layers = nn.Sequential(*layers, nn.Linear(width if depth else num_features, 1))

    def forward(self, events: torch.Tensor) -> torch.Tensor:
        """Quantities (B, num_features) -> logit of signal (B,)."""
        return self.layers(events).squeeze(-1)
