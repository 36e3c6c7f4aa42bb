"""The 3DGAN: a generator of calorimeter showers, and a discriminator that trains it.

Khattak et al. 2022 (arXiv:2109.07388) and its ancestor in mpi_learn and NNLO
(https://github.com/vlimant/NNLO, nnlo/train/GanModel.py), whose architecture, losses and habits
these are: layers and initial values as Keras has them, labels flipped now and then, two moves of
the generator after those of the discriminator on real and on generated showers.

What differs, and why:

- One discriminator, whose weights are fixed in the generator's turns, where NNLO keeps and sends a
  copy that it overwrites in each step.
- BatchNorm layers always normalise with their own batch, which is of real or of generated showers
  and never of both, and of one rank or, with `sync_batchnorm`, of all. A network gathers running
  statistics in its own turns only: showers that are made for the discriminator, and its opinion of
  them in the generator's turn, leave none. In NNLO these run on statistics of earlier batches,
  which lag behind, differ between ranks, and mix real and generated showers. Here they are of the
  last ten steps or so, and used in validation only.
- The discriminator's two heads begin at 0. With Keras' random ones the gradient that reaches a cell
  is noise at first, ten times what has been learned of where showers are (measured, 40 steps).
- Real or generated is told by a logit, not by a sigmoid, which half precision would saturate.
- Showers are made of the energies of the real ones, so that no spectrum needs to be assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from apps.adversarial import Loss
from apps.contract import N3LOError
from apps.experiment import Networks
from apps.models.plane_conv import PlaneConv3d
from apps.models.showers import ShowerModel

ENERGY_UNIT = 100.0  # GeV; the networks see energies in it
NEGATIVE_SLOPE = 0.3  # of Keras' LeakyReLU
SMALLEST = 1e-3  # of what errors are relative to: 0.1 GeV of the particle, 1 MeV of the deposit

LOSS_WEIGHTS = {"real": 2.0, "energy": 0.1, "deposit": 0.1}


class Seen(NamedTuple):
    """What is found in B showers, or wanted of them, (B,) each."""

    real: torch.Tensor  # a logit; wanted: 1 for real, 0 for generated
    energies: torch.Tensor  # of the particles, in 100 GeV
    deposits: torch.Tensor  # in all cells, in GeV


@dataclass(frozen=True)
class Scale:
    """What the networks see of a cell: (its energy / unit_gev) ** power.

    NNLO has GeV. Cells hold 1e-6 to 0.1 GeV: a power below 1 brings weak and strong ones closer
    together, and in MeV they are of order 1, as what a generator gives at first.
    """

    unit_gev: float = 1.0
    power: float = 1.0

    def __post_init__(self) -> None:
        _check(self.unit_gev > 0, f"scale.unit_gev: {self.unit_gev} is not above 0")
        _check(0 < self.power <= 1, f"scale.power: {self.power} is not above 0 and at most 1")

    def to_cells(self, showers: torch.Tensor) -> torch.Tensor:
        return (showers.clamp(min=0) / self.unit_gev) ** self.power

    def to_gev(self, cells: torch.Tensor) -> torch.Tensor:
        return self.unit_gev * cells ** (1 / self.power)


class Generator(nn.Module):
    """Showers from random numbers.

    Args:
        latent_size: random numbers of a shower.
        filters: of the three convolutions before the last.
    """

    def __init__(self, latent_size: int = 200, filters: Sequence[int] = (64, 6, 6)) -> None:
        super().__init__()
        _check(latent_size >= 1, f"generator.latent_size: {latent_size} is not at least 1")
        _check(len(filters) == 3, f"generator.filters: {list(filters)} are not three numbers")
        first, second, third = filters
        self.latent_size = latent_size
        self.layers = nn.Sequential(
            nn.Linear(latent_size, 8 * 7 * 7 * 8),
            nn.Unflatten(1, (8, 7, 7, 8)),
            ChannelsLast(),
            nn.ZeroPad3d((3, 4, 2, 3, 2, 3)),  # "same" of Keras: one more behind, if k is even
            PlaneConv3d(8, first, (6, 6, 8), depth=15),  # to 7 x 7 x 8
            nn.LeakyReLU(NEGATIVE_SLOPE),
            _batch_norm(first),
            # to 13 x 14 x 9
            PlaneConv3d(first, second, (6, 5, 8), depth=8, padding=(2, 2, 0), up=(2, 2, 2)),
            nn.LeakyReLU(NEGATIVE_SLOPE),
            _batch_norm(second),
            # to 26 x 26 x 26
            PlaneConv3d(second, third, (3, 3, 8), depth=9, padding=(1, 0, 3), up=(2, 2, 3)),
            nn.LeakyReLU(NEGATIVE_SLOPE),
            # to 25 x 25 x 25
            PlaneConv3d(third, 1, (2, 2, 2), depth=26, bias=False),
            nn.ReLU(),
        )
        _initialise(self, partial(nn.init.kaiming_uniform_, nonlinearity="relu"))
        for layer in (self.layers[0], self.layers[-2]):
            nn.init.xavier_normal_(layer.weight)

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        """(B, latent_size) -> cells (B, 25, 25, 25) in the networks' scale, none below 0."""
        return self.layers(latent).squeeze(1).float()


class Discriminator(nn.Module):
    """Tells real showers from generated ones, and the energy of both.

    Args:
        filters: of the four convolutions.
        kernel: their size in cells, along each axis; odd.
        dropout: share of the activations that is left out, after each of the four.
    """

    def __init__(
        self, filters: Sequence[int] = (32, 8, 8, 8), kernel: int = 5, dropout: float = 0.2
    ) -> None:
        super().__init__()
        _check(len(filters) == 4, f"discriminator.filters: {list(filters)} are not four numbers")
        _check(kernel % 2 == 1 and kernel >= 3, f"discriminator.kernel: {kernel} is not 3, 5, ...")
        first, second, third, fourth = filters
        half = kernel // 2
        self.layers = nn.Sequential(
            _convolution(1, first, kernel, half),
            ChannelsLast(),  # not before: DDP copies a gradient with other strides than its weight
            nn.LeakyReLU(NEGATIVE_SLOPE),
            nn.Dropout(dropout),
            _convolution(first, second, kernel, half),
            *_normalised(second, dropout),
            _convolution(second, third, kernel, half),
            *_normalised(third, dropout),
            _convolution(third, fourth, kernel, half - 1),  # 23 x 23 x 23
            *_normalised(fourth, dropout),
            Halved(),
            nn.Flatten(),
        )
        self.real = nn.Linear(fourth * 11**3, 1)
        self.energy = nn.Linear(fourth * 11**3, 1)
        _initialise(self, nn.init.xavier_uniform_)
        # What it tells the generator at first would else be random, and hide what it has learned.
        for head in (self.real, self.energy):
            nn.init.zeros_(head.weight)

    def forward(self, cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, 25, 25, 25) in the networks' scale -> logit of being real, energy / 100 GeV; (B,)."""
        features = self.layers(cells.unsqueeze(1))
        return self.real(features).squeeze(1).float(), self.energy(features).squeeze(1).float()


class ChannelsLast(nn.Module):
    """Convolutions of few channels are 1.5 to 2 times faster so, on CPUs and GPUs."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.to(memory_format=torch.channels_last_3d)


class Halved(nn.Module):
    """AvgPool3d(2) with channels last in its gradient too, or BatchNorm takes ten times as long."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(B, C, X, Y, Z) -> (B, C, X // 2, Y // 2, Z // 2)."""
        x, y, z = (size // 2 for size in images.shape[2:])
        cells = images.permute(0, 2, 3, 4, 1)[:, : 2 * x, : 2 * y, : 2 * z]
        means = cells.reshape(-1, x, 2, y, 2, z, 2, images.shape[1]).mean(dim=(2, 4, 6))
        return means.permute(0, 4, 1, 2, 3)


class CalorimeterGan(ShowerModel):
    """The 3DGAN; a batch is `inputs = "ECAL"` and `targets = "energy"` of the CLIC files.

    The loss of each turn is the weighted sum of three: the binary cross-entropy of the
    discriminator's logit, and the mean relative errors, in percent, of the energy that it finds and
    of the deposit. The generator wants to be taken for real, at the energy asked for, with the mean
    deposit of that energy. The deposit is the sum of the cells: it has no weights, and moves the
    generator alone.

    Measured beside the losses: `discriminator_accuracy`, 0.5 where it can only guess, and
    `deposit_error` of generated showers, in percent.

    Args:
        generator: arguments of `Generator`.
        discriminator: arguments of `Discriminator`.
        loss_weights: of the three losses, where they are not `LOSS_WEIGHTS`.
        label_flip: probability that the discriminator is told the contrary of a shower.
        generator_steps: moves of the generator in a step.
        scale: arguments of `Scale`.

    Raises:
        N3LOError: an argument is out of its range.
    """

    metrics = ("discriminator_accuracy", "deposit_error")

    # Mean deposit / energy = a + b ln(E / 100 GeV), fitted to the 2000 Geant4 showers of
    # studies/data, 10 to 100 GeV: 2.15 % at 15 GeV, 1.97 % at 95 GeV. It falls as showers of higher
    # energy reach the last 8 layers, which sample half as much. Other data need other numbers.
    response = (0.01963, -0.00096)

    def __init__(
        self,
        generator: Mapping[str, Any] | None = None,
        discriminator: Mapping[str, Any] | None = None,
        loss_weights: Mapping[str, float] | None = None,
        label_flip: float = 0.05,
        generator_steps: int = 2,
        scale: Mapping[str, float] | None = None,
    ) -> None:
        self.loss_weights = LOSS_WEIGHTS | dict(loss_weights or {})
        _check(
            self.loss_weights.keys() == LOSS_WEIGHTS.keys(),
            f"loss_weights: {', '.join(self.loss_weights)} are not {', '.join(LOSS_WEIGHTS)}",
        )
        _check(0 <= label_flip < 0.5, f"label_flip: {label_flip} is not from 0 to below 0.5")
        _check(generator_steps >= 1, f"generator_steps: {generator_steps} is not at least 1")
        self.networks = {
            "discriminator": Discriminator(**(discriminator or {})),
            "generator": Generator(**(generator or {})),
        }
        self.turns = ("discriminator", "discriminator", *["generator"] * generator_steps)
        self.label_flip = label_flip
        self.scale = Scale(**(scale or {}))

    def loss(self, turn: int, networks: Networks, inputs: Any, targets: Any) -> Loss:
        """Of the discriminator on real showers (0) and on generated ones (1); of the generator.

        Args:
            inputs: showers in GeV, (B, 25, 25, 25).
            targets: energies in GeV, (B,).
        """
        discriminator, generator = networks["discriminator"], networks["generator"]
        energies, deposits = targets / ENERGY_UNIT, self.mean_deposit(targets)
        real, generated = torch.ones_like(energies), torch.zeros_like(energies)
        if turn == 0:
            wanted = Seen(real, energies, inputs.sum(dim=(1, 2, 3)))
            return self._discriminator_loss(discriminator, self.scale.to_cells(inputs), wanted)
        if turn == 1:
            with torch.no_grad(), leaving_statistics(generator):
                cells = self.make(generator, targets)
            wanted = Seen(generated, energies, deposits)
            return self._discriminator_loss(discriminator, cells, wanted)
        cells = self.make(generator, targets)
        with leaving_statistics(discriminator):
            found = self.look(discriminator, cells)
        losses = three_losses(found, Seen(real, energies, deposits))
        return self._weighted(losses), {"deposit_error": losses["deposit"]}

    @torch.no_grad()
    def generate(self, energies: torch.Tensor) -> torch.Tensor:
        return self.scale.to_gev(self.make(self.networks["generator"], energies))

    def make(self, generator: nn.Module, energies: torch.Tensor) -> torch.Tensor:
        """Cells of new showers in the networks' scale, (B, 25, 25, 25); energies in GeV, (B,).

        As in NNLO the energy scales all random numbers of its shower.
        """
        size = self.networks["generator"].latent_size
        latent = torch.randn(len(energies), size, device=energies.device)
        return generator(latent * (energies / ENERGY_UNIT).unsqueeze(1))

    def look(self, discriminator: nn.Module, cells: torch.Tensor) -> Seen:
        return Seen(*discriminator(cells), self.scale.to_gev(cells).sum(dim=(1, 2, 3)))

    def mean_deposit(self, energies: torch.Tensor) -> torch.Tensor:
        """Of all cells of a shower, in GeV, (B,), by `response`; energies in GeV, (B,)."""
        constant, slope = self.response
        return energies * (constant + slope * (energies / ENERGY_UNIT).log())

    def _discriminator_loss(
        self, discriminator: nn.Module, cells: torch.Tensor, wanted: Seen
    ) -> Loss:
        found = self.look(discriminator, cells)
        told = wanted.real
        if discriminator.training:
            told = flip(told, self.label_flip)
        losses = three_losses(found, wanted._replace(real=told))
        right = (found.real > 0) == (wanted.real > 0.5)
        return self._weighted(losses), {"discriminator_accuracy": right.float().mean()}

    def _weighted(self, losses: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return sum(self.loss_weights[name] * value for name, value in losses.items())


def three_losses(found: Seen, wanted: Seen) -> dict[str, torch.Tensor]:
    """Means over the showers: a binary cross-entropy, and two relative errors in percent."""
    return {
        "real": functional.binary_cross_entropy_with_logits(found.real, wanted.real),
        "energy": relative_error(found.energies, wanted.energies),
        "deposit": relative_error(found.deposits, wanted.deposits),
    }


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Mean of 100 |found - wanted| / wanted; what is wanted counts as `SMALLEST` at least."""
    return 100 * ((found - wanted).abs() / wanted.abs().clamp(min=SMALLEST)).mean()


def flip(labels: torch.Tensor, probability: float) -> torch.Tensor:
    """Labels of which each is turned into the other one with a probability."""
    return (labels - torch.bernoulli(torch.full_like(labels, probability))).abs()


@contextmanager
def leaving_statistics(network: nn.Module) -> Iterator[None]:
    """Its BatchNorm layers do as always, and gather no running statistics meanwhile."""
    gathering = [
        layer
        for layer in network.modules()
        if isinstance(layer, _BatchNorm) and layer.track_running_stats
    ]
    for layer in gathering:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in gathering:
            layer.track_running_stats = True


def _convolution(num_in: int, num_out: int, kernel: int, padding: int) -> PlaneConv3d:
    """Of images of 25 layers."""
    return PlaneConv3d(num_in, num_out, (kernel,) * 3, depth=25, padding=(padding,) * 3)


def _normalised(channels: int, dropout: float) -> list[nn.Module]:
    return [nn.LeakyReLU(NEGATIVE_SLOPE), _batch_norm(channels), nn.Dropout(dropout)]


def _batch_norm(num_features: int) -> nn.BatchNorm3d:
    """With Keras' eps, but not its momentum of 0.99 (torch's 0.01).

    Running statistics of the last hundred steps lag behind a generator that learns in so many.
    """
    return nn.BatchNorm3d(num_features, eps=1e-3, momentum=0.1)


def _initialise(network: nn.Module, initialise: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Weights as told, biases 0."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv3d | nn.Linear):
            initialise(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise N3LOError(f"model.args.{message}")
