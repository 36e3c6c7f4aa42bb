"""Vectors as MPI sees them: in the host's memory, or on a GPU with a copy there."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from mpi4py import MPI

from apps.contract import N3LOError
from apps.strategies.flat import Piece


class Memory:
    """A vector in the host's memory, piece by piece as bytes."""

    def __init__(self, vector: torch.Tensor) -> None:
        self.host = vector
        self._bytes = vector.view(torch.uint8).numpy()
        self._size = vector.element_size()

    def raw(self, piece: Piece) -> Any:
        """What mpi4py sends from or receives into."""
        size = self._size
        return [self._bytes[piece.where.start * size : piece.where.stop * size], MPI.BYTE]

    def fetch(self, pieces: list[Piece]) -> None:
        """Begin to bring pieces to where MPI can send them from."""

    def fetch_ahead(self, pieces: list[Piece]) -> None:
        """The same before the exchange, which then need not."""

    def ready(self, piece: Piece) -> None:
        """Wait until a piece is there."""

    def store(self, piece: Piece) -> None:
        """Begin to bring a piece that was received to where the vector is."""

    def take_up(self) -> None:
        """Have what follows wait for the pieces that were stored."""


class PinnedMemory(Memory):
    """A vector on a GPU, which MPI sees as a copy in pinned memory."""

    def __init__(self, vector: torch.Tensor) -> None:
        super().__init__(torch.empty_like(vector, device="cpu", pin_memory=True))
        self._vector = vector
        self._stream = torch.cuda.Stream(vector.device)
        self._copied: dict[int, torch.cuda.Event] = {}
        self._ahead: set[int] = set()  # where pieces start that are on their way already

    def fetch_ahead(self, pieces: list[Piece]) -> None:
        """So that it waits for what was asked of the GPU until now, and not for what follows."""
        self.fetch(pieces)
        self._ahead |= {piece.where.start for piece in pieces}

    def fetch(self, pieces: list[Piece]) -> None:
        asked = {piece.where.start for piece in pieces}
        if asked <= self._ahead:
            self._ahead -= asked
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._vector.device))
        with torch.cuda.stream(self._stream):
            for piece in pieces:
                self.host[piece.where].copy_(self._vector[piece.where], non_blocking=True)
                self._copied[piece.where.start] = self._stream.record_event()

    def ready(self, piece: Piece) -> None:
        self._copied[piece.where.start].synchronize()

    def store(self, piece: Piece) -> None:
        with torch.cuda.stream(self._stream):
            self._vector[piece.where].copy_(self.host[piece.where], non_blocking=True)

    def take_up(self) -> None:
        torch.cuda.current_stream(self._vector.device).wait_stream(self._stream)


class DeviceMemory(Memory):
    """A vector on a GPU that MPI reads and writes itself."""

    def __init__(self, vector: torch.Tensor) -> None:
        self._vector = vector

    def raw(self, piece: Piece) -> Any:
        return [self._vector[piece.where].view(torch.uint8), MPI.BYTE]

    def fetch(self, pieces: list[Piece]) -> None:
        torch.cuda.current_stream(self._vector.device).synchronize()


def memory_of(vector: torch.Tensor, gpu_aware: bool) -> Memory:
    if vector.device.type != "cuda":
        return Memory(vector)
    return DeviceMemory(vector) if gpu_aware else PinnedMemory(vector)


def require_gpu_aware() -> None:
    """See that MPI says that it can read a GPU's memory; asking by sending would crash one that
    cannot.

    Raises:
        N3LOError: it does not say so.
    """
    try:
        # Open MPI and its kin; looked for in what mpi4py is linked with.
        aware = ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support() == 1
    except AttributeError:
        aware = False
    if not aware:
        raise N3LOError(
            "training.exchange.gpu_aware: this MPI does not say that it can read a GPU's memory "
            f"({MPI.Get_library_version().split(',')[0]}); set it to false"
        )
