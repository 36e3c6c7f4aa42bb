"""Points that fill the space evenly: the baseline that random search has to beat."""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
from scipy.stats import qmc

from workflow.search.base import Observation, PointSearch, draw
from workflow.space import Point, Space

NUM_SKIPPED = 64  # points of the sequence that may be taken or illegal before one is drawn


class SobolSearch(PointSearch):
    """The scrambled Sobol sequence of the study's seed, in order."""

    name = "sobol"

    def _point(
        self,
        history: Sequence[Observation],
        pending: Sequence[Point],
        taken: Set[str],
        rng: np.random.Generator,
    ) -> Point | None:
        index = len(history) + len(pending)
        return sobol_point(self.space, self.problem.seed, index, taken, rng)


def sobol_point(
    space: Space, seed: int, index: int, taken: Set[str], rng: np.random.Generator
) -> Point | None:
    """The first point of the seed's Sobol sequence, from `index` on, that is legal and not taken.

    After `NUM_SKIPPED` that are not, as in a small discrete space, a random one; None if the space
    has no more.
    """
    num_dimensions = len(space.dimensions)
    sequence = qmc.Sobol(max(1, num_dimensions), seed=seed)
    if index > 0:  # scipy cannot go forward by none
        sequence.fast_forward(index)
    for _ in range(NUM_SKIPPED):
        point = space.decode(sequence.random()[0, :num_dimensions])
        if space.contains(point) and space.identity(point) not in taken:
            return point
    return next(iter(draw(space, taken, rng)), None)
