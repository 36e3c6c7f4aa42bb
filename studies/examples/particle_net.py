"""Jets as graphs of PyTorch Geometric: each constituent with its nearest neighbours."""

from __future__ import annotations

import torch
from torch import nn
from torch_geometric.nn import EdgeConv, global_mean_pool

from apps.models.jets import NUM_FEATURES, constituents

NEIGHBOURS = 8


def graphs(jets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Jets filled up with zeros, (B, N, 16), as one graph of all their constituents.

    Edges come from the `NEIGHBOURS` nearest constituents in eta and phi.

    Returns:
        x (constituents, 7); edge_index (2, edges): from, to; batch (constituents,): their jets.
    """
    parts = constituents(jets)
    there = parts.mask.bool()
    there[:, 0] |= ~there.any(dim=1)  # a jet without constituents is a graph too
    number = there.flatten().cumsum(dim=0).view_as(there) - 1  # of each, among all that are there

    places = jets[..., [8, 11]]  # eta and phi, relative to the jet's axis
    itself = torch.eye(jets.shape[1], dtype=torch.bool, device=jets.device)
    apart = (places.unsqueeze(2) - places.unsqueeze(1)).square().sum(dim=-1)  # (B, N, N)
    apart = apart.masked_fill(~there.unsqueeze(1) | itself, torch.inf)
    distance, nearest = apart.topk(min(NEIGHBOURS, jets.shape[1] - 1), largest=False)
    jet, to, which = (there.unsqueeze(2) & distance.isfinite()).nonzero(as_tuple=True)
    edges = torch.stack([number[jet, nearest[jet, to, which]], number[jet, to]])
    return {"x": parts.features[there], "edge_index": edges, "batch": there.nonzero()[:, 0]}


class ParticleNet(nn.Module):
    """Edge convolutions after Qu and Gouskos 2020, arXiv:1902.08570, on neighbours that stay.

    Args:
        width: of all layers.
        depth: edge convolutions, each with a layer of its own before.
    """

    def __init__(self, width: int = 32, depth: int = 2, num_classes: int = 5) -> None:
        super().__init__()
        sizes = [NUM_FEATURES, *[width] * depth]
        self.convolutions = nn.ModuleList(
            EdgeConv(
                nn.Sequential(nn.Linear(2 * size, width), nn.ReLU(), nn.Linear(width, width)),
                aggr="mean",
            )
            for size in sizes[:-1]
        )
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, num_classes))

    def forward(
        self, x: torch.Tensor, edge_index: torch.Tensor, batch: torch.Tensor
    ) -> torch.Tensor:
        """What `graphs` gives of B jets -> logits (B, num_classes)."""
        for convolution in self.convolutions:
            x = convolution(x, edge_index).relu()
        return self.head(global_mean_pool(x, batch))
