"""A calorimeter's energy and impact point: several inputs and several outputs, each by its name."""

from __future__ import annotations

import torch
from torch import nn

SAMPLING_FRACTION = 0.02  # of an electron's energy is deposited in the silicon
CELL_MM = 5.1


class ShowerRegression(nn.Module):
    """Corrects two simple estimates by what it learns from the profiles of a shower.

    The simple ones: the energy is that of all cells over the sampling fraction, and the electron
    hit the middle of the energy. Both are biased: the last 8 layers have twice the absorber, and
    half of a cell's width is within the core of the shower.

    Args:
        width: of both hidden layers.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(75, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
        )

    def forward(self, cells: torch.Tensor, seen: torch.Tensor) -> dict[str, torch.Tensor]:
        """Cells (B, 25 x, 25 y, 25 layers) in GeV and their sum (B,) in GeV.

        Returns:
            energy: of the electron, (B,) in GeV; impact: x and y in the central cell, (B, 2) in mm.
        """
        shares = cells / seen[:, None, None, None].clamp(min=1e-6)
        along = [shares.sum(dim=axes) for axes in ((2, 3), (1, 3), (1, 2))]  # (B, 25) x, y, layer
        place = torch.arange(25, device=cells.device) - 12.0
        middle = CELL_MM * torch.stack([profile @ place for profile in along[:2]], dim=1)
        found = self.layers(torch.cat(along, dim=1) * 10)
        energy = seen / SAMPLING_FRACTION * (1 + found[:, 0])
        return {"energy": energy, "impact": middle + CELL_MM * found[:, 1:]}
