"""Who trains on which batches of an epoch, where workers do not keep step.

Each worker has its own steps, in order. One that has done them takes some off the far end of the
worker that has the most left, so that each batch is trained on exactly once and a slow worker
slows only itself.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np


class Turn(NamedTuple):
    """Consecutive steps, for one worker to do between two exchanges."""

    owner: int  # the worker whose batches they are
    first: int
    count: int  # 0: there is nothing left


class Dealer:
    """Deals the steps of one epoch among some workers.

    Args:
        workers: their numbers.
        num_steps: of each.
        size: the most steps of a turn.
        ahead: turns that every worker takes at the start without asking (`first_turns`).
        absent: workers that died in an earlier epoch; the others do all of their steps.
        bounds: (workers, 2) whole numbers for the steps of each that are left, from and to; may be
            memory that several processes share.
    """

    def __init__(
        self,
        workers: tuple[int, ...],
        num_steps: int,
        size: int,
        ahead: int = 1,
        *,
        absent: Collection[int] = (),
        bounds: np.ndarray | None = None,
    ) -> None:
        self._row = {worker: row for row, worker in enumerate(workers)}
        self._workers = workers
        self._size = size
        self._bounds = np.empty((len(workers), 2), np.int64) if bounds is None else bounds
        self._num_steps, self._ahead = num_steps, ahead
        self._out: dict[int, list[Turn]] = {
            worker: first_turns(worker, num_steps, size, ahead) for worker in workers
        }
        self._returned: list[Turn] = []
        if bounds is None:
            self.reset()
        for worker in absent:
            self.lose(worker)

    def reset(self) -> None:
        """Set the steps that are left after the first turns."""
        self._bounds[:] = min(self._num_steps, self._size * self._ahead), self._num_steps

    def deal(self, worker: int) -> Turn:
        """The next turn of a worker, which has done the earliest of those that it had."""
        held = self._out[worker]
        if held:
            held.pop(0)
        turn = self._next(worker)
        if turn.count:
            held.append(turn)
        return turn

    def lose(self, worker: int) -> None:
        """Take back what a worker that died had to do."""
        self._returned += self._out.pop(worker)

    def _next(self, worker: int) -> Turn:
        first, end = self._bounds[self._row[worker]]
        if first < end:
            count = min(self._size, int(end - first))
            self._bounds[self._row[worker], 0] += count
            return Turn(worker, int(first), count)
        if self._returned:
            return self._returned.pop()
        left = self._bounds[:, 1] - self._bounds[:, 0]
        row = int(left.argmax())
        count = min(self._size, int(left[row]))
        self._bounds[row, 1] -= count
        return Turn(self._workers[row], int(self._bounds[row, 1]), count)


def first_turns(worker: int, num_steps: int, size: int, ahead: int) -> list[Turn]:
    """What a worker begins an epoch with."""
    firsts = range(0, min(num_steps, size * ahead), size)
    return [Turn(worker, first, min(size, num_steps - first)) for first in firsts]
