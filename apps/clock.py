"""Where the time of a training goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

import torch

T = TypeVar("T")

Mark = float | torch.cuda.Event
Part = Literal["data", "communication", "idle"]
PARTS: tuple[Part, ...] = ("data", "communication", "idle")


class Clock:
    """Seconds that one rank could not compute in, by what it waited for.

    data: the next batch was not there yet. communication: what the network did while there was
    nothing to compute; what it does beside a backward pass costs nothing and is not counted. idle:
    the slowest rank had not ended the epoch. On a GPU these are gaps in its own stream of work, and
    not in that of the process that feeds it.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._gaps: list[tuple[Part, Mark, Mark]] = []

    def mark(self) -> Mark:
        """Now; on a GPU, when it gets there."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def note(self, part: Part, start: Mark) -> None:
        """What has passed since `start` was spent on this."""
        self._gaps.append((part, start, self.mark()))

    @contextmanager
    def waiting(self, part: Part) -> Iterator[None]:
        start = self.mark()
        yield
        self.note(part, start)

    def feeding(self, items: Iterator[T]) -> Iterator[T]:
        """The same items; the time that each takes to come is data's."""
        end = object()
        while True:
            with self.waiting("data"):
                item = next(items, end)
            if item is end:
                return
            yield item

    def read(self) -> dict[str, float]:
        """Seconds of each part since the last reading; waits for the GPU."""
        if self._on_gpu:
            torch.cuda.synchronize()
        seconds = dict.fromkeys(PARTS, 0.0)
        for part, start, end in self._gaps:
            seconds[part] += _seconds(start, end)
        self._gaps.clear()
        return seconds


def _seconds(start: Mark, end: Mark) -> float:
    if isinstance(start, torch.cuda.Event):
        return start.elapsed_time(end) / 1000
    return end - start
