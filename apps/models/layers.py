"""Small parts that the models share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

ACTIVATIONS = {
    "relu": nn.ReLU,
    "selu": nn.SELU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "leaky_relu": nn.LeakyReLU,
}


def activation(name: str) -> nn.Module:
    """An activation by its name."""
    if name not in ACTIVATIONS:
        raise ValueError(f"there is no activation '{name}', only {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]()


def mlp(sizes: Sequence[int], activation_name: str, dropout: float = 0.0) -> nn.Sequential:
    """Linear layers of the given sizes, each followed by the activation and by dropout."""
    layers: list[nn.Module] = []
    for num_in, num_out in pairwise(sizes):
        layers += [nn.Linear(num_in, num_out), activation(activation_name)]
        if dropout > 0:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)
