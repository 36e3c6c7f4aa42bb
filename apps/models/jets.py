"""Networks that tell the origin of a jet (gluon, quark, W, Z, top) from its constituents."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from apps.models.layers import mlp


class Constituents(NamedTuple):
    """What the networks see of a jet's constituents, from the 16 columns of the hls4ml files.

    B jets, N constituents; zero where there is none.
    """

    features: torch.Tensor  # (B, N, 7), each of order 1
    momentum: torch.Tensor  # (B, N, 4): px, py, pz, energy as fractions of the jet's energy
    pt_fraction: torch.Tensor  # (B, N)
    mask: torch.Tensor  # (B, N), 1 where there is a constituent


NUM_FEATURES = 7
NUM_JET_FEATURES = 7
TYPICAL_PT = 10.0  # GeV


def constituents(jets: torch.Tensor) -> Constituents:
    """Scale the columns of interest; `jets` is (B, N, 16).

    px py pz e erel pt ptrel eta etarel etarot phi phirel phirot deltaR costheta costhetarel
    """
    px, py, pz, energy, energy_fraction, pt, pt_fraction = jets[..., :7].unbind(-1)
    eta, phi, delta_r = jets[..., 8], jets[..., 11], jets[..., 13]  # relative to the jet's axis
    mask = (pt > 0).to(jets.dtype)
    logs = [_log(pt / TYPICAL_PT), 2 + _log(pt_fraction) / 2, 2 + _log(energy_fraction) / 2]
    rest = [4 * eta, 4 * phi, 4 * delta_r, _log(delta_r) / 2]
    features = torch.stack([*logs, *rest], dim=-1) * mask.unsqueeze(-1)
    jet_energy = energy.sum(dim=1)[:, None, None].clamp(min=1e-6)
    momentum = torch.stack([px, py, pz, energy], dim=-1) / jet_energy
    return Constituents(features, momentum, pt_fraction * mask, mask)


def jet_features(jets: torch.Tensor) -> torch.Tensor:
    """Quantities of the whole jet, from its constituents: (B, N, 16) -> (B, 7), of order 1.

    Mass over pt, multiplicity, width, dispersion of pt, and the three invariants of the
    pt-weighted spread around the axis: trace, determinant and third moment.
    """
    parts = constituents(jets)
    weight = parts.pt_fraction / parts.pt_fraction.sum(dim=1, keepdim=True).clamp(min=1e-6)
    px, py, pz, energy = parts.momentum.sum(dim=1).unbind(-1)  # (B,) each
    mass = (energy**2 - px**2 - py**2 - pz**2).clamp(min=1e-8).sqrt()
    pt = (px**2 + py**2).sqrt().clamp(min=1e-6)
    eta, phi, delta_r = jets[..., 8], jets[..., 11], jets[..., 13]
    eta = eta - (weight * eta).sum(dim=1, keepdim=True)
    phi = phi - (weight * phi).sum(dim=1, keepdim=True)
    spread_ee = (weight * eta**2).sum(dim=1)
    spread_pp = (weight * phi**2).sum(dim=1)
    spread_ep = (weight * eta * phi).sum(dim=1)
    determinant = (spread_ee * spread_pp - spread_ep**2).clamp(min=1e-10)
    return torch.stack(
        [
            10 * mass / pt,
            parts.mask.sum(dim=1) / 50,
            10 * (weight * delta_r).sum(dim=1),
            3 * weight.square().sum(dim=1).sqrt(),
            4 + _log(spread_ee + spread_pp),
            4 + _log(determinant) / 2,
            3 * (weight * delta_r**2).sum(dim=1).clamp(min=1e-8).sqrt(),
        ],
        dim=-1,
    )


def _log(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(min=1e-6).log()


class DeepSets(nn.Module):
    """A sum over constituents that the network learns (Zaheer et al., arXiv:1703.06114).

    phi embeds each constituent; the embeddings are averaged, with equal weights and by pt; rho
    reads the averages together with a few quantities of the whole jet.

    Args:
        width: of all hidden layers.
        depth: hidden layers of phi, and of rho.
    """

    def __init__(
        self,
        width: int = 64,
        depth: int = 2,
        activation: str = "relu",
        dropout: float = 0.0,
        num_classes: int = 5,
    ) -> None:
        super().__init__()
        hidden = [width] * depth
        self.phi = mlp([NUM_FEATURES, *hidden], activation)
        self.rho = mlp([2 * width + NUM_JET_FEATURES, *hidden], activation, dropout)
        self.head = nn.Linear(width, num_classes)

    def forward(self, jets: torch.Tensor) -> torch.Tensor:
        """Constituents (B, N, 16) -> logits (B, num_classes)."""
        parts = constituents(jets)
        embedded = self.phi(parts.features)  # (B, N, width)
        equal = parts.mask / parts.mask.sum(dim=1, keepdim=True).clamp(min=1)
        pooled = [torch.einsum("bn,bnw->bw", w, embedded) for w in (equal, parts.pt_fraction)]
        return self.head(self.rho(torch.cat([*pooled, jet_features(jets)], dim=-1)))


class JetMlp(nn.Module):
    """Hidden layers one after the other on a few quantities of the whole jet.

    Each layer has a width of its own, so that a search can build the network layer by layer.

    Args:
        width_1: of the first hidden layer; width_2 and width_3 of those after it.
        depth: hidden layers that are used, 1 to 3; the widths of the others do not matter.
    """

    def __init__(
        self,
        width_1: int = 32,
        width_2: int = 0,
        width_3: int = 0,
        depth: int = 1,
        activation: str = "relu",
        num_classes: int = 5,
    ) -> None:
        super().__init__()
        if not 1 <= depth <= 3:
            raise ValueError(f"depth = {depth} is not 1, 2 or 3")
        widths = [width_1, width_2, width_3][:depth]
        if min(widths) < 1:
            raise ValueError(f"depth = {depth}, but the widths of these layers are {widths}")
        self.hidden = mlp([NUM_JET_FEATURES, *widths], activation)
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, jets: torch.Tensor) -> torch.Tensor:
        """Constituents (B, N, 16) -> logits (B, num_classes)."""
        return self.head(self.hidden(jet_features(jets)))


class InteractionNetwork(nn.Module):
    """JEDI-net (Moreno et al., arXiv:1908.05318): constituents that act on each other in pairs.

    f_R gives the effect of a sender on a receiver; f_O reads a constituent with the sum of the
    effects on it; f_C classifies the sum over constituents.

    Args:
        hidden: width of the two hidden layers of f_R, f_O and f_C.
        effects: numbers in an effect, D_E.
        outputs: numbers that f_O gives for a constituent, D_O.
        num_constituents: leading ones that are used; the cost goes with its square. None = all.
    """

    def __init__(
        self,
        hidden: int = 50,
        effects: int = 14,
        outputs: int = 10,
        activation: str = "relu",
        num_constituents: int | None = 30,
        num_classes: int = 5,
    ) -> None:
        super().__init__()
        self.num_constituents = num_constituents
        self.f_r = mlp([2 * NUM_FEATURES, hidden, hidden, effects], activation)
        self.f_o = mlp([NUM_FEATURES + effects, hidden, hidden, outputs], activation)
        self.f_c = mlp([outputs, hidden, hidden], activation)
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, jets: torch.Tensor) -> torch.Tensor:
        """Constituents (B, N, 16) -> logits (B, num_classes)."""
        jets = jets[:, : self.num_constituents]
        parts = constituents(jets)
        num = jets.shape[1]
        receiver = parts.features.unsqueeze(2).expand(-1, num, num, -1)  # (B, N, N, F)
        sender = parts.features.unsqueeze(1).expand(-1, num, num, -1)
        # A pair counts if both are there and differ: the dense R_r and R_s of the paper.
        pairs = parts.mask.unsqueeze(2) * parts.mask.unsqueeze(1)  # (B, N, N)
        pairs = pairs * (1 - torch.eye(num, dtype=pairs.dtype, device=pairs.device))
        effects = self.f_r(torch.cat([receiver, sender], dim=-1))  # (B, N, N, D_E)
        received = torch.einsum("brs,brse->bre", pairs, effects) / num
        outputs = self.f_o(torch.cat([parts.features, received], dim=-1))  # (B, N, D_O)
        summed = torch.einsum("bn,bno->bo", parts.mask, outputs) / num
        return self.head(self.f_c(summed))
