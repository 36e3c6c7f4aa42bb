"""Convolutions of planes give what `Upsample`, zeros and Conv3d give, and so do their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from apps.models.plane_conv import PlaneConv3d

CASES = {
    "nothing": {},
    "padding": {"padding": (1, 2, 3)},
    "enlarged": {"up": (2, 2, 3), "padding": (1, 0, 3)},
    "enlarged by other factors": {"up": (2, 1, 3), "padding": (2, 1, 2)},
    "without biases": {"padding": (1, 1, 1), "bias": False},
}
PADDED = {"depth": 10, "padding": (2, 2, 2)}


def plain(layer: PlaneConv3d) -> nn.Sequential:
    """The same with the layers of torch, and the same weights."""
    x, y, z = layer.padding
    bias = layer.bias is not None
    conv = nn.Conv3d(layer.in_channels, layer.out_channels, layer.kernel_size, bias=bias)
    conv.to(layer.weight).load_state_dict(layer.state_dict())
    return nn.Sequential(nn.Upsample(scale_factor=layer.up), nn.ZeroPad3d((z, z, y, y, x, x)), conv)


@pytest.mark.parametrize("planes", [True, False])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("kernel", [(3, 3, 5), (2, 4, 5)])
@pytest.mark.parametrize("case", CASES)
def test_planes_give_what_the_layers_of_torch_give(case, kernel, memory_format, planes):
    torch.manual_seed(1)
    layer = PlaneConv3d(3, 2, kernel, depth=10, planes=planes, **CASES[case]).double()
    layers = plain(layer)
    images = torch.randn(2, 3, 7, 6, 10, dtype=torch.float64).to(memory_format=memory_format)
    ours, theirs = (images.clone().requires_grad_() for _ in range(2))
    found, expected = layer(ours), layers(theirs)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(expected)
    found.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(ours.grad, theirs.grad)
    for own, other in zip(layer.parameters(), layers.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_the_weights_are_those_of_a_convolution():
    layer = PlaneConv3d(1, 4, (5, 5, 5), **PADDED)
    assert set(layer.state_dict()) == {"weight", "bias"}
    assert layer.weight.shape == (4, 1, 5, 5, 5)


@pytest.mark.parametrize("planes", [True, False])
def test_channels_that_come_last_stay_there(planes):
    layer = PlaneConv3d(4, 8, (5, 5, 5), planes=planes, **PADDED)
    images = torch.randn(2, 4, 9, 9, 10).to(memory_format=torch.channels_last_3d)
    assert layer(images).is_contiguous(memory_format=torch.channels_last_3d)
