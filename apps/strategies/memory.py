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

    def ready(self, piece: Piece) -> None:
        """Wait until a piece is there."""

    def store(self, piece: Piece) -> None:
        """Bring a piece that was received to where the vector is."""


class PinnedMemory(Memory):
    """A vector on a GPU, which MPI sees as a copy in pinned memory."""

    def __init__(self, vector: torch.Tensor) -> None:
        super().__init__(torch.empty_like(vector, device="cpu", pin_memory=True))
        self._vector = vector
        self._stream = torch.cuda.Stream(vector.device)
        self._copied: dict[int, torch.cuda.Event] = {}

    def fetch(self, pieces: list[Piece]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._vector.device))
        with torch.cuda.stream(self._stream):
            for piece in pieces:
                self.host[piece.where].copy_(self._vector[piece.where], non_blocking=True)
                self._copied[piece.where.start] = self._stream.record_event()

    def ready(self, piece: Piece) -> None:
        self._copied[piece.where.start].synchronize()

    def store(self, piece: Piece) -> None:
        self._vector[piece.where].copy_(self.host[piece.where], non_blocking=True)


class DeviceMemory(Memory):
    """A vector on a GPU that MPI reads and writes itself."""

    def __init__(self, vector: torch.Tensor) -> None:
        require_gpu_aware()
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
        aware = ctypes.CDLL(None).MPIX_Query_cuda_support() == 1  # Open MPI and its kin
    except AttributeError:
        aware = False
    if not aware:
        raise N3LOError(
            "training.exchange.gpu_aware: this MPI does not say that it can read a GPU's memory "
            f"({MPI.Get_library_version().split(',')[0]}); set it to false"
        )
