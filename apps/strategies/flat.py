"""All trained parameters as views of one vector, and all gradients as views of another.

An exchange then sends memory as it lies, without a copy, and one operation moves all weights.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from apps.contract import N3LOError

PIECE_BYTES = 2**21  # of a message: a piece is in flight while the one before is worked on
WINDOW_BYTES = 2**28  # of shared memory, where nothing is in flight
HUGE_PAGE = 2**21  # bytes


class Piece(NamedTuple):
    """What an exchange moves at once."""

    number: int  # within its network
    where: slice
    master: int  # the number of the master that owns it


class Flat:
    """The trained parameters of some networks.

    Args:
        num_masters: that each own an equal share of every network.
        piece_bytes: the most of a piece.
    """

    values: torch.Tensor  # (n,)
    gradient: torch.Tensor  # (n,)
    parts: dict[str, slice]  # of each network
    pieces: dict[str, list[Piece]]  # of each network

    def __init__(
        self,
        networks: Mapping[str, nn.Module],
        num_masters: int = 1,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._parameters = [
            parameter
            for network in networks.values()
            for parameter in network.parameters()
            if parameter.requires_grad
        ]
        kinds = {parameter.dtype for parameter in self._parameters}
        if len(kinds) != 1:
            raise N3LOError(
                f"the model's parameters are of the types {', '.join(sorted(map(str, kinds)))}; "
                "a strategy with a central copy of the weights needs one type"
                if kinds
                else "the model has no parameters to train"
            )
        if len(set(map(id, self._parameters))) < len(self._parameters):
            raise N3LOError(
                "two networks share parameters; a strategy with a central copy of the weights "
                "needs each in one network"
            )
        first = self._parameters[0]
        size = sum(each.numel() for each in self._parameters)
        self.values = zeros(size, first.dtype, first.device)
        torch.cat([each.detach().flatten() for each in self._parameters], out=self.values)
        self.gradient = zeros(size, first.dtype, first.device)
        self._gradients: list[torch.Tensor] = []
        at = 0
        for parameter in self._parameters:
            end = at + parameter.numel()
            parameter.data = self.values[at:end].view_as(parameter)
            self._gradients.append(self.gradient[at:end].view_as(parameter))
            at = end
        self.parts, at = {}, 0
        for name, network in networks.items():
            size = sum(each.numel() for each in network.parameters() if each.requires_grad)
            self.parts[name], at = slice(at, at + size), at + size
        size = piece_bytes // self.values.element_size()
        self.pieces = {
            name: pieces_of(part, num_masters, size) for name, part in self.parts.items()
        }

    def __len__(self) -> int:
        return self.values.numel()

    def attach_gradients(self) -> None:
        """Have the next backward pass write into the vector, whatever the model did to `grad`."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def check(self) -> None:
        """See that the model has not moved its parameters to other memory.

        Raises:
            N3LOError: it has.
        """
        at = 0
        for parameter in self._parameters:
            if parameter.data_ptr() != self.values.data_ptr() + at * self.values.element_size():
                raise N3LOError(
                    "the model gave its parameters new memory during training "
                    "(flatten_parameters() or .to() in forward); a strategy with a central copy "
                    "of the weights cannot follow it"
                )
            at += parameter.numel()


def zeros(size: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A vector of zeros, on the host in huge pages where the system has them.

    MPI copies between the processes of a node page by page, and with huge pages in half the time.
    """
    num_bytes = size * dtype.itemsize
    if torch.device(device).type != "cpu" or num_bytes < HUGE_PAGE or sys.platform != "linux":
        return torch.zeros(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, -(-num_bytes // HUGE_PAGE) * HUGE_PAGE, mmap.MAP_PRIVATE)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=size)


def pieces_of(part: slice, num_masters: int, size: int) -> list[Piece]:
    """Equal shares for the masters, to an element, in pieces of at most `size` elements."""
    length = part.stop - part.start
    ends = [part.start + length * at // num_masters for at in range(num_masters + 1)]
    cuts = [
        (slice(at, min(at + size, end)), master)
        for master, (first, end) in enumerate(pairwise(ends))
        for at in range(first, end, size)
    ]
    return [Piece(number, where, master) for number, (where, master) in enumerate(cuts)]
