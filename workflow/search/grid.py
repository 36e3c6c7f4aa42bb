"""Every combination of the values that each dimension's `num` asks for."""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np

from workflow.search.base import Observation, PointSearch
from workflow.space import Point


class GridSearch(PointSearch):
    """The points of the space's grid, in order; it ends when the grid does."""

    name = "grid"

    def _point(
        self,
        history: Sequence[Observation],
        pending: Sequence[Point],
        taken: Set[str],
        rng: np.random.Generator,
    ) -> Point | None:
        fresh = (p for p in self.space.grid() if self.space.identity(p) not in taken)
        return next(fresh, None)
