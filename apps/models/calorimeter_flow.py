"""Showers by conditional flow matching: noise that a learned velocity field carries to showers.

Flow matching is of Lipman et al. 2023, arXiv:2210.02747. Two networks train independently, as in
CaloDREAM (Favaro et al. 2024, arXiv:2405.09629): "layers" makes the energies of the 25 layers,
given the energy of the electron, and "cells" shares them out over the cells, given both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from apps.adversarial import Loss
from apps.contract import N3LOError
from apps.experiment import Networks
from apps.models.showers import ShowerModel

NUM_LAYERS = 25
THRESHOLD_GEV = 1e-6  # of a cell: Geant4's files hold none below, and all that we make is cut here

# Means and spreads of what is transformed, over Geant4 electrons of 10 to 100 GeV. They only bring
# numbers to order 1, and are rounded so far that nothing of a single shower is in them.
LOG_ENERGY = (3.9, 0.6)  # of ln(E / GeV)
RESPONSE = (0.0203, 0.0014)  # of S / E, the deposit over the energy
LAYER_RATIO_MEANS = (
    *(-7.1, -6.0, -5.1, -4.4, -3.8, -3.4, -3.0, -2.7, -2.5, -2.2, -2.1, -1.9),
    *(-1.7, -1.6, -1.4, -1.2, -1.0, -0.9, -0.8, -0.7, -0.6, -0.4, -0.2, 0.4),
)
LAYER_RATIO_SPREADS = (
    *(0.9, 0.8, 0.7, 0.6, 0.5, 0.5, 0.5, 0.4, 0.4, 0.4, 0.3, 0.3),
    *(0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.4, 0.5, 0.6, 0.8),
)
LOG_LAYER = (-3.5, 1.2)  # of ln(energy of a layer / GeV)
LAYER_FLOOR_GEV = 3e-5  # added to layers, so that an empty one has a logarithm: a tenth of a MIP
CELL = (-1.0, 1.5)  # of log10(energy of a cell / threshold), empty ones at -1
HIT = (-3.0, 2.4, math.log(0.7))  # of encoded cells: logit of the 4 % hit, their mean, ln(spread)

Velocity = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class CalorimeterFlow(ShowerModel):
    """Two velocity fields, and the showers that come of following them.

    Args:
        layers_width: of the hidden layers of the network "layers".
        layers_depth: its number of residual blocks.
        cells_width: channels of the network "cells" at full resolution.
        draws: noises and times drawn for each shower of a batch, which cost as much as showers.
        layers_updates: how often "layers", which is small, moves in a training step.
        num_steps: of the solver, each of two evaluations of a network, in validation.
    """

    def __init__(
        self,
        layers_width: int = 128,
        layers_depth: int = 3,
        cells_width: int = 64,
        draws: int = 1,
        layers_updates: int = 1,
        num_steps: int = 10,
    ) -> None:
        _check_counts(cells_width=cells_width, draws=draws, num_steps=num_steps)
        _check_counts(layers_updates=layers_updates, layers_depth=layers_depth)
        if cells_width % ConvBlock.NUM_GROUPS:
            raise ValueError(f"cells_width = {cells_width} is not a multiple of 8")
        self.networks = {
            "layers": LayersVelocity(layers_width, layers_depth),
            "cells": CellsVelocity(cells_width),
        }
        self.turns = ("layers",) * layers_updates + ("cells",)
        self.draws = draws
        self.num_steps = num_steps

    def loss(
        self, turn: int, networks: Networks, inputs: torch.Tensor, targets: torch.Tensor
    ) -> Loss:
        if inputs.shape[1:] != (25, 25, NUM_LAYERS) or targets.ndim != 1:
            raise N3LOError(
                f"data: inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)} are not "
                "showers (B, 25, 25, 25) and energies (B,); set inputs = 'ECAL', targets = 'energy'"
            )
        showers = inputs.repeat_interleave(self.draws, dim=0)
        energies = targets.repeat_interleave(self.draws)
        layers = showers.sum(dim=(1, 2))
        if self.turns[turn] == "layers":
            data, condition = encode_layers(layers, energies), encode_energies(energies)
        else:
            data = encode_cells(turned(showers))
            condition = encode_condition(layers, energies)
        return matching_loss(networks[self.turns[turn]], data, condition), {}

    def generate(self, energies: torch.Tensor) -> torch.Tensor:
        """New showers, (B, 25, 25, 25) in GeV, of electrons of these energies, (B,) in GeV."""
        with torch.no_grad():
            layers = self.generate_layers(energies)
            condition = encode_condition(layers, energies)
            velocity = partial(self._velocity, "cells", condition)
            noise = torch.randn(len(energies), 25, 25, NUM_LAYERS, device=energies.device)
            cells = decode_cells(midpoint(velocity, noise, self.num_steps))
            return share_out(cells, layers)

    def generate_layers(self, energies: torch.Tensor) -> torch.Tensor:
        """New energies of layers, (B, 25) in GeV, for electrons of these energies, (B,) in GeV."""
        velocity = partial(self._velocity, "layers", encode_energies(energies))
        noise = torch.randn(len(energies), NUM_LAYERS, device=energies.device)
        return decode_layers(midpoint(velocity, noise, self.num_steps), energies)

    def _velocity(
        self, network: str, condition: torch.Tensor, place: torch.Tensor, time: torch.Tensor
    ) -> torch.Tensor:
        return self.networks[network](place, time, condition)


# -- flow matching ---------------------------------------------------------------------------------


def matching_loss(network: nn.Module, data: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
    """Mean squared error of a velocity field at a random time on the way to each event.

    The way is straight, from noise x0 at t = 0 to data x1 at t = 1: x_t = (1 - t) x0 + t x1, with
    the velocity x1 - x0 (Lipman et al. 2023, equation 23, sigma_min = 0).

    Args:
        network: gives velocities (B, ...) of places (B, ...) at times (B,), given the condition.
        data: (B, ...), of order 1.
        condition: (B, C).
    """
    noise = torch.randn_like(data)
    time = torch.rand(len(data), device=data.device)
    at = time.view(-1, *[1] * (data.ndim - 1))
    velocity = network((1 - at) * noise + at * data, time, condition)
    return functional.mse_loss(velocity.float(), data - noise)


def midpoint(velocity: Velocity, start: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Follow a velocity field from t = 0 to 1 by the explicit midpoint rule, of second order.

    Args:
        velocity: of places (B, ...) at times (B,).
        start: (B, ...).
    """
    step = 1 / num_steps
    place = start
    for number in range(num_steps):
        time = torch.full((len(start),), number * step, device=start.device)
        half_way = place + step / 2 * velocity(place, time)
        place = place + step * velocity(half_way, time + step / 2)
    return place


class Gaussian(NamedTuple):
    """Numbers that are independent and normal."""

    mean: torch.Tensor | float
    spread: torch.Tensor | float

    def velocity(self, place: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """The field that carries N(0, 1) to this distribution, at times (B, 1, ...).

        With m and s, x_t is N(t m, t^2 s^2 + (1 - t)^2), and
        E[x1 - x0 | x_t] = m + (t s^2 - (1 - t)) / (t^2 s^2 + (1 - t)^2) (x_t - t m).
        """
        variance = self.spread**2
        gain = (time * variance - (1 - time)) / self.variance_on_the_way(time)
        return self.mean + gain * (place - time * self.mean)

    def log_density(self, place: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Of x_t, without the constant."""
        variance = self.variance_on_the_way(time)
        return -((place - time * self.mean).square() / variance + variance.log()) / 2

    def variance_on_the_way(self, time: torch.Tensor) -> torch.Tensor:
        return time**2 * self.spread**2 + (1 - time) ** 2


EMPTY = Gaussian(0.0, 0.19)  # encoded cells without a hit: evenly within 1/2 decade, over 1.5


def mixture_velocity(
    place: torch.Tensor, time: torch.Tensor, logit: torch.Tensor, hit: Gaussian
) -> torch.Tensor:
    """The field that carries N(0, 1) to encoded cells that are either empty or hit.

    It is the mean of the two fields with the probabilities at time t: to the logit of a hit adds
    the logarithm of the ratio of the two densities of x_t (Bayes). So a network that gives the
    arguments need not learn how a cell decides. After Chen et al. 2025, arXiv:2504.05304, who let
    a network give mixtures of Gaussians; here it learns them by the same squared error as any.

    Args:
        place: encoded cells on their way, (B, ...).
        time: (B,).
        logit: of the probability to be hit, (B, ...).
        hit: what a hit would be, (B, ...).
    """
    at = time.view(-1, *[1] * (place.ndim - 1))
    grown = logit + hit.log_density(place, at) - EMPTY.log_density(place, at)
    return torch.lerp(EMPTY.velocity(place, at), hit.velocity(place, at), grown.sigmoid())


# -- between GeV and numbers of order 1 ------------------------------------------------------------


def encode_energies(energies: torch.Tensor) -> torch.Tensor:
    """(B,) in GeV -> (B, 1)."""
    mean, spread = LOG_ENERGY
    return (energies.log().unsqueeze(1) - mean) / spread


def encode_condition(layers: torch.Tensor, energies: torch.Tensor) -> torch.Tensor:
    """What the cells depend on: layers (B, 25) and energies (B,), both in GeV -> (B, 26)."""
    mean, spread = LOG_LAYER
    logs = ((layers + LAYER_FLOOR_GEV).log() - mean) / spread
    return torch.cat([encode_energies(energies), logs], dim=1)


def encode_layers(layers: torch.Tensor, energies: torch.Tensor) -> torch.Tensor:
    """Layers (B, 25) and energies (B,) in GeV -> (B, 25): response, and 24 ratios of layers.

    A ratio is ln((E_l + f) / (E_l+1 + ... + E_25 + f)): a layer against all behind it, the logit of
    its share in what is left of the shower; f is `LAYER_FLOOR_GEV`.
    """
    mean, spread = RESPONSE
    response = (layers.sum(dim=1) / energies - mean) / spread
    left = layers.flip(1).cumsum(dim=1).flip(1)  # (B, 25), from each layer on
    ratios = ((layers[:, :-1] + LAYER_FLOOR_GEV) / (left[:, 1:] + LAYER_FLOOR_GEV)).log()
    means, spreads = _ratio_scales(layers)
    return torch.cat([response.unsqueeze(1), (ratios - means) / spreads], dim=1)


def decode_layers(encoded: torch.Tensor, energies: torch.Tensor) -> torch.Tensor:
    """The inverse of `encode_layers`; layers that come out below 0 are empty."""
    mean, spread = RESPONSE
    left = ((encoded[:, 0] * spread + mean) * energies).clamp(min=0)
    means, spreads = _ratio_scales(encoded)
    shares = torch.sigmoid(encoded[:, 1:] * spreads + means)
    layers = []
    for share in shares.unbind(dim=1):
        layer = ((left + 2 * LAYER_FLOOR_GEV) * share - LAYER_FLOOR_GEV).clamp(min=0)
        layer = torch.minimum(layer, left)
        layers.append(layer)
        left = left - layer
    return torch.stack([*layers, left], dim=1)


def encode_cells(showers: torch.Tensor) -> torch.Tensor:
    """Cells in GeV -> log10 of their energy over the threshold, scaled.

    Not of their share in the layer: the threshold, and what a single particle leaves in a cell, are
    energies. A cell at or below the threshold becomes a random number between -1.5 and -0.5
    decades, well apart from those above, so that no field has to become infinitely narrow.
    """
    mean, spread = CELL
    decades = (showers / THRESHOLD_GEV).clamp(min=1).log10()
    empty = -0.5 - torch.rand_like(showers)
    return (torch.where(decades > 0, decades, empty) - mean) / spread


def decode_cells(encoded: torch.Tensor) -> torch.Tensor:
    """The inverse of `encode_cells`: energies in GeV, 0 at or below the threshold."""
    mean, spread = CELL
    decades = encoded * spread + mean
    return torch.where(decades > 0, THRESHOLD_GEV * 10**decades, 0)


def share_out(cells: torch.Tensor, layers: torch.Tensor) -> torch.Tensor:
    """Scale the cells (B, 25, 25, 25) of each layer so that they sum to its energy, (B, 25).

    Cells that come out at or below the threshold are empty, and what they had goes to the others;
    a layer without any other gives its energy to the cell in its middle.
    """
    kept = _read_out(_scaled(cells, layers))
    alone = kept.sum(dim=(1, 2)) == 0
    middle = kept.shape[1] // 2
    kept[:, middle, middle] = torch.where(alone, layers, kept[:, middle, middle])
    return _read_out(_scaled(kept, layers))


def _scaled(cells: torch.Tensor, layers: torch.Tensor) -> torch.Tensor:
    sums = cells.sum(dim=(1, 2))
    return cells * torch.where(sums > 0, layers / sums, 0)[:, None, None]


def _read_out(cells: torch.Tensor) -> torch.Tensor:
    return torch.where(cells > THRESHOLD_GEV, cells, 0)


def turned(showers: torch.Tensor) -> torch.Tensor:
    """Each shower (B, X, Y, 25) in one of the 8 ways that a square can lie, at random."""
    for change in (
        lambda each: each.flip(1),
        lambda each: each.flip(2),
        lambda each: each.transpose(1, 2),
    ):
        chosen = torch.rand(len(showers), 1, 1, 1, device=showers.device) < 0.5
        showers = torch.where(chosen, change(showers), showers)
    return showers


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} = {value} is not at least 1")


def _ratio_scales(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return like.new_tensor(LAYER_RATIO_MEANS), like.new_tensor(LAYER_RATIO_SPREADS)


# -- the networks ----------------------------------------------------------------------------------


class Embedding(nn.Module):
    """Time and condition, (B,) and (B, C) -> (B, width)."""

    NUM_FREQUENCIES = 8

    def __init__(self, num_conditions: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(num_conditions + 2 * self.NUM_FREQUENCIES, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
        )

    def forward(self, time: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        octaves = torch.arange(self.NUM_FREQUENCIES, device=time.device)
        phases = math.pi / 2 * time.unsqueeze(1) * 2.0**octaves
        return self.layers(torch.cat([condition, phases.sin(), phases.cos()], dim=1))


class LayersVelocity(nn.Module):
    """The velocity of encoded layers (B, 25) at times (B,), given a condition (B, 1)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = Embedding(1, width)
        self.first = nn.Linear(NUM_LAYERS, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
            for _ in range(depth)
        )
        self.last = _silent(nn.Linear(width, NUM_LAYERS))

    def forward(
        self, place: torch.Tensor, time: torch.Tensor, condition: torch.Tensor
    ) -> torch.Tensor:
        embedded = self.embedding(time, condition)
        hidden = self.first(place)
        for block in self.blocks:
            hidden = hidden + block(hidden + embedded)
        at = time.unsqueeze(1)
        return Gaussian(0.0, 1.0).velocity(place, at) + self.last(hidden)


class CellsVelocity(nn.Module):
    """The velocity of encoded cells (B, 25, 25, 25) at times (B,), given a condition (B, 26).

    A U-Net over x and y (Ronneberger et al. 2015, arXiv:1505.04597) gives three numbers for each
    cell: logit of a hit, its mean and the logarithm of its spread. Its channels are at first the
    layers: that costs a CPU less than a convolution along the shower, and no two layers are alike.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = Embedding(1 + NUM_LAYERS, 2 * width)
        self.register_buffer("maps", _radius_maps(), persistent=False)  # (2, 25, 25)
        self.first = nn.Conv2d(NUM_LAYERS + len(self.maps), width, 3, padding=1)
        wide = 2 * width
        self.fine = ConvBlock(width, width, wide)
        self.down = nn.Conv2d(width, wide, 3, stride=2, padding=1)  # 25 -> 13
        self.coarse = ConvBlock(wide, wide, wide)
        self.down_again = nn.Conv2d(wide, wide, 3, stride=2, padding=1)  # 13 -> 7
        self.coarsest = ConvBlock(wide, wide, wide)
        self.coarse_up = ConvBlock(2 * wide, wide, wide)
        self.fine_up = ConvBlock(wide + width, width, wide)
        self.last = _silent(nn.Conv2d(width, 3 * NUM_LAYERS, 3, padding=1))

    def forward(
        self, place: torch.Tensor, time: torch.Tensor, condition: torch.Tensor
    ) -> torch.Tensor:
        embedded = self.embedding(time, condition)
        image = place.permute(0, 3, 1, 2)  # (B, 25 layers, x, y)
        maps = self.maps.expand(len(place), -1, -1, -1)
        fine = self.fine(self.first(torch.cat([image, maps], dim=1)), embedded)
        coarse = self.coarse(self.down(fine), embedded)
        coarsest = self.coarsest(self.down_again(coarse), embedded)
        coarse = self.coarse_up(_join(coarsest, coarse), embedded)
        fine = self.fine_up(_join(coarse, fine), embedded)
        found = self.last(fine).float().permute(0, 2, 3, 1).chunk(3, dim=-1)
        logit, mean, log_spread = (found + known for found, known in zip(found, HIT, strict=True))
        return mixture_velocity(place, time, logit, Gaussian(mean, log_spread.exp()))


class ConvBlock(nn.Module):
    """Two convolutions beside a shortcut; the embedding scales and shifts the channels between."""

    NUM_GROUPS = 8

    def __init__(self, num_in: int, num_out: int, num_embedded: int) -> None:
        super().__init__()
        self.norm_in = nn.GroupNorm(self.NUM_GROUPS, num_in)
        self.conv_in = nn.Conv2d(num_in, num_out, 3, padding=1)
        self.modulation = nn.Linear(num_embedded, 2 * num_out)
        self.norm_out = nn.GroupNorm(self.NUM_GROUPS, num_out)
        self.conv_out = _silent(nn.Conv2d(num_out, num_out, 3, padding=1))
        self.shortcut = nn.Conv2d(num_in, num_out, 1) if num_in != num_out else nn.Identity()

    def forward(self, image: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        hidden = self.conv_in(functional.silu(self.norm_in(image)))
        scale, shift = self.modulation(embedded)[:, :, None, None].chunk(2, dim=1)
        hidden = functional.silu(self.norm_out(hidden) * (1 + scale) + shift)
        return self.shortcut(image) + self.conv_out(hidden)


def _join(coarse: torch.Tensor, fine: torch.Tensor) -> torch.Tensor:
    grown = functional.interpolate(coarse, size=fine.shape[-2:], mode="nearest")
    return torch.cat([grown, fine], dim=1)


def _radius_maps() -> torch.Tensor:
    """Distance from the axis, linear and as its logarithm, (2, 25, 25), of order 1."""
    place = torch.arange(25) - 12.0
    radius = torch.hypot(place[:, None], place[None, :])
    return torch.stack([radius / 6 - 1.5, (radius + 0.5).log() - 2])


def _silent(layer: nn.Module) -> nn.Module:
    """Gives 0 before it has learned anything."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer
