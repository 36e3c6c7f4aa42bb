"""Convolutions of few channels in three dimensions, with the same result in fewer and larger sums.

Matrix units multiply blocks of 16 to 256 channels. The convolutions of calorimeter images have 1 to
8, and leave most of each block empty. `BlockConv3d` takes neighbouring voxels as channels: a block
of g voxels of the input gives a block of g of the output, with a kernel of as many taps as blocks
are reached, most of whose weights are those of the original and some 0.

Where an image is enlarged before it is convolved (nearest neighbour, as `nn.Upsample`), all voxels
of a cell are alike: their weights are added up before, and the enlarged image is never made. For a
factor 2 along each axis and a kernel of (6, 5, 8) that is a quarter of the work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

Axes = Sequence[int]  # a number for each of the three axes


class BlockConv3d(nn.Conv3d):
    """What `Upsample(up)`, zeros of `padding` around it, and Conv3d give together.

    It has the weights of that Conv3d, under the same names.

    Args:
        kernel_size, padding: in voxels of the enlarged image; padding on both sides.
        up: by how much each axis is enlarged before.
        block: cells along each axis that are taken as channels; 1 changes nothing.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Axes,
        padding: Axes = (0, 0, 0),
        up: Axes = (1, 1, 1),
        block: Axes = (1, 1, 1),
    ) -> None:
        super().__init__(in_channels, out_channels, tuple(kernel_size), padding=tuple(padding))
        self.up, self.block = tuple(up), tuple(block)
        axes = zip(kernel_size, padding, up, block, strict=True)
        for name, axis in zip("xyz", axes, strict=True):
            self.register_buffer(f"places_{name}", places(*axis), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(B, in_channels, X, Y, Z) -> (B, out_channels, X', Y', Z')."""
        sizes = images.shape[2:]
        enlarged = [size * up for size, up in zip(sizes, self.up, strict=True)]
        wanted = [
            size + 2 * padding - kernel + 1
            for size, padding, kernel in zip(enlarged, self.padding, self.kernel_size, strict=True)
        ]
        cells, surround = self._in_blocks(images, wanted)
        with torch.autocast(images.device.type, enabled=False):  # weights are added up in float32
            weight, bias = self._of_blocks()
        if all(before == after >= 0 for before, after in surround):
            padding = [before for before, _ in surround]
        else:
            cells = functional.pad(cells, [each for pair in reversed(surround) for each in pair])
            padding = [0, 0, 0]
        found = functional.conv3d(cells, weight, bias, padding=padding)
        return self._from_blocks(found, wanted)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, up={self.up}, block={self.block}"

    def _in_blocks(
        self, images: torch.Tensor, wanted: Axes
    ) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """Cells of a block as channels, the last axis fastest; and blocks of zeros around them.

        Where only the last axis has blocks and channels come last in memory, nothing is moved.
        """
        num_blocks = [math.ceil(n / g) for n, g in zip(images.shape[2:], self.block, strict=True)]
        values = images.permute(0, 2, 3, 4, 1)
        missing = [
            blocks * g - n
            for blocks, g, n in zip(num_blocks, self.block, images.shape[2:], strict=True)
        ]
        if any(missing):
            values = functional.pad(values, [0, 0, *(v for m in reversed(missing) for v in (0, m))])
        (x, y, z), (p, q, r) = num_blocks, self.block
        values = values.reshape(-1, x, p, y, q, z, r, self.in_channels)
        values = values.permute(0, 1, 3, 5, 2, 4, 6, 7).reshape(images.shape[0], x, y, z, -1)
        surround = []
        for axis, (blocks, size) in enumerate(zip(num_blocks, wanted, strict=True)):
            places_ = self._places[axis]
            before = math.ceil(self.padding[axis] / len(places_))
            after = math.ceil(size / len(places_)) + places_.shape[2] - 1 - before - blocks
            surround.append((before, after))
        return values.permute(0, 4, 1, 2, 3), surround

    def _of_blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights of blocks: (offsets x out_channels, offsets x in_channels, taps)."""
        x, y, z = self._places
        weight = torch.einsum("oixyz,crnz->oixycrn", self.weight, z)
        weight = torch.einsum("oixycrn,bqmy->oixbqmcrn", weight, y)
        weight = torch.einsum("oixbqmcrn,aplx->abcopqrilmn", weight, x)
        taps = weight.shape[-3:]
        num_out, num_in = math.prod(weight.shape[:4]), math.prod(weight.shape[4:8])
        bias = self.bias.repeat(num_out // self.out_channels)
        return weight.reshape(num_out, num_in, *taps), bias

    def _from_blocks(self, found: torch.Tensor, wanted: Axes) -> torch.Tensor:
        (a, b, c), (x, y, z) = (len(each) for each in self._places), found.shape[2:]
        values = found.permute(0, 2, 3, 4, 1).reshape(-1, x, y, z, a, b, c, self.out_channels)
        values = values.permute(0, 1, 4, 2, 5, 3, 6, 7)
        values = values.reshape(found.shape[0], x * a, y * b, z * c, self.out_channels)
        nx, ny, nz = wanted
        return values[:, :nx, :ny, :nz].permute(0, 4, 1, 2, 3)

    @property
    def _places(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.places_x, self.places_y, self.places_z


def places(kernel: int, padding: int, up: int, block: int) -> torch.Tensor:
    """Which weights of a kernel connect which cells, along one axis: 0 or 1.

    Voxel j of a block of the output takes weight k times the enlarged image at j + k - padding,
    which is cell floor((j + k - padding) / up) of the image.

    Returns:
        (voxels of a block of the output, cells of one of the input, blocks reached, kernel).
    """
    num_out = up * block
    before = math.ceil(padding / num_out)
    reached = before + (num_out - 2 + kernel - padding) // num_out + 1
    voxel, cell, tap, k = (torch.arange(n) for n in (num_out, block, reached, kernel))
    found = (voxel[:, None, None, None] + k - padding).div(up, rounding_mode="floor")
    asked = (tap[:, None] - before) * block + cell[:, None, None]
    return (found == asked).float()
