"""What the generators of calorimeter showers have in common: how validation judges them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from apps.adversarial import Adversaries
from apps.contract import N3LOError
from apps.physics.observables import ENERGY_EDGES, figure_of_merit, shower_sums
from apps.physics.validation import check_showers


class ShowerModel(Adversaries):
    """Networks that learn to make showers, (B, 25, 25, 25) in GeV, of given energies, (B,) in GeV.

    In validation a shower is made for each real one, of the same energy. The verdict is 3DGAN's
    scalar (Khattak et al. 2022, arXiv:2109.07388): `shower_error`, the sum of the mean relative
    errors of the moments (`moment_error`) and of the profiles (`profile_error`).
    """

    verdicts = ("shower_error", "moment_error", "profile_error")
    energy_edges = ENERGY_EDGES

    def generate(self, energies: torch.Tensor) -> torch.Tensor:
        """New showers, without a gradient, by the networks as they are; both on their device."""
        raise NotImplementedError

    def inspect(self, inputs: Any, targets: Any) -> list[str]:
        if not (torch.is_tensor(inputs) and torch.is_tensor(targets)):
            raise N3LOError(
                "data: a model of showers takes one field of cells and one of energies, as inputs "
                '= "ECAL" and targets = "energy"'
            )
        try:
            found = check_showers(inputs.float().numpy(), targets.double().numpy())
        except N3LOError as error:
            raise N3LOError(f"data: {error}") from error
        return [f"data: {line}" for line in found]

    def judge(self, inputs: Any, targets: Any) -> torch.Tensor:
        made = self.generate(targets)
        energies = targets.cpu().numpy()
        sums = [
            shower_sums(showers.float().cpu().numpy(), energies, self.energy_edges)
            for showers in (inputs, made)
        ]
        return torch.from_numpy(np.stack(sums)).flatten()

    @property
    def judged(self) -> int:
        none = np.zeros((0, 25, 25, 25), np.float32)
        return 2 * shower_sums(none, np.zeros(0), self.energy_edges).size

    def verdict(self, total: torch.Tensor) -> dict[str, float]:
        bins = len(self.energy_edges) - 1
        real, made = total.numpy().reshape(2, bins, -1)
        found = figure_of_merit(real, made)
        return dict(zip(self.verdicts, (found.total, found.moments, found.profiles), strict=True))
