"""Points at random: the baseline, and a fair choice where trials are many and cheap."""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np

from workflow.search.base import Observation, PointSearch, draw
from workflow.space import Point


class RandomSearch(PointSearch):
    """Independent draws from the space."""

    name = "random"

    def _point(
        self,
        history: Sequence[Observation],
        pending: Sequence[Point],
        taken: Set[str],
        rng: np.random.Generator,
    ) -> Point | None:
        return next(iter(draw(self.space, taken, rng)), None)
