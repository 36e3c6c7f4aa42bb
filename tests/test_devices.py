"""A network whose layers are divided over the GPUs of one process; here they are CPUs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from apps.contract import N3LOError
from apps.experiment import call
from apps.models.jets import DeepSets
from apps.strategies.devices import spread

CPUS = [torch.device("cpu")] * 2


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)).relu()) * weight


def inputs_of(kind: str) -> torch.Tensor | list[torch.Tensor] | dict[str, torch.Tensor]:
    x, weight = torch.rand(5, 3), torch.rand(5, 1)
    return {"jets": torch.rand(5, 7, 16), "list": [x, weight], "table": {"weight": weight, "x": x}}[
        kind
    ]


@pytest.mark.parametrize("kind", ["jets", "list", "table"])
def test_a_divided_network_trains_as_the_whole_one(kind):
    torch.manual_seed(1)
    whole = DeepSets(width=8) if kind == "jets" else TwoInputs()
    divided, inputs = copy.deepcopy(whole), inputs_of(kind)
    spread(divided, CPUS, inputs)
    assert list(divided.state_dict()) == list(whole.state_dict())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (whole, divided)]
    for mode in (True, True, False):
        outputs = []
        for network, optimizer in zip((whole, divided), optimizers, strict=True):
            outputs.append(call(network.train(mode), inputs))
            optimizer.zero_grad()
            outputs[-1].square().mean().backward()
            optimizer.step()
        torch.testing.assert_close(*outputs)
    for name, value in whole.state_dict().items():  # statistics of BatchNorm, too
        torch.testing.assert_close(divided.state_dict()[name], value)


def test_a_network_with_too_few_layers_says_how_many_parts_there_can_be():
    with pytest.raises(N3LOError, match="at most 1"):
        spread(nn.Linear(3, 2), CPUS, torch.rand(2, 3))
