"""Bayesian optimisation: scikit-optimize's Gaussian process, made safe for parallel trials.

What scikit-optimize leaves to its user is done here: it keeps no pending points, raises on a failed
trial, and may suggest a point again.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar

import numpy as np
import skopt
from numpy.typing import NDArray
from scipy.stats import qmc
from skopt.acquisition import gaussian_ei

from apps.contract import N3LOError
from workflow.search.base import Goal, Observation, Search, draw
from workflow.space import Choice, Point, Space

logger = logging.getLogger(__name__)

NUM_CANDIDATES = 2000  # where expected improvement is looked for before its best points are refined
NUM_REFINED = 3


class BayesianSearch(Search):
    """A Sobol design, then the largest expected improvement under a Gaussian process.

    Pending trials count as if they had returned the best value so far ("constant liar", CL-min:
    Ginsbourger, Le Riche, Carraro 2008, hal-00260579; 2010, Computational Intelligence in Expensive
    Optimization Problems, ch. 6), which keeps parallel trials apart. Failed ones count as the worst
    value so far, which keeps the search out of where trainings diverge.

    The model fits one noise level to all trials: scikit-optimize has none per point, so that
    `Observation.noise` is not used.

    Options:
        num_initial: Sobol points before the first model; by default one more than dimensions.
    """

    name = "bayesian"
    knows: ClassVar[Mapping[str, type]] = {"num_initial": int}

    def __init__(
        self,
        space: Space,
        goal: Goal,
        options: Mapping[str, Any],
        seed: int,
    ) -> None:
        super().__init__(space, goal, options, seed)
        self.num_initial: int = options.get("num_initial", len(space.dimensions) + 1)
        if self.num_initial < 1:
            raise N3LOError(f"search.options.num_initial: {self.num_initial} is not at least 1")

    def _next(
        self,
        history: Sequence[Observation],
        pending: Sequence[Point],
        taken: Set[str],
        rng: np.random.Generator,
    ) -> Point | None:
        index = len(history) + len(pending)
        if index >= self.num_initial and any(math.isfinite(self.cost(o)) for o in history):
            try:
                return self._improve(history, pending, taken, rng)
            except (ValueError, ArithmeticError, RuntimeError) as error:  # what a fit can raise
                logger.warning("no model after %d trials, a Sobol point instead: %s", index, error)
        return self._sobol(index, taken, rng)

    def _sobol(self, index: int, taken: Set[str], rng: np.random.Generator) -> Point | None:
        """The first point not taken of the study's Sobol sequence, from `index` on."""
        sequence = qmc.Sobol(max(1, len(self.space.dimensions)), seed=self.seed)
        if index > 0:  # scipy cannot go forward by none
            sequence.fast_forward(index)
        for _ in range(32):  # a small discrete space decodes many to the same point
            point = self.space.decode(sequence.random()[0, : len(self.space.dimensions)])
            if self.space.identity(point) not in taken:
                return point
        return next(iter(draw(self.space, taken, rng)), None)

    def _improve(
        self,
        history: Sequence[Observation],
        pending: Sequence[Point],
        taken: Set[str],
        rng: np.random.Generator,
    ) -> Point | None:
        points = [*(seen.point for seen in history), *pending]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a fit that did not converge is still a fit
            told = _told([self.cost(seen) for seen in history], len(pending))
            optimizer = self._optimizer(rng)
            optimizer.tell([self._to_skopt(point) for point in points], told.tolist())
            best = self._from_skopt(optimizer.ask())
            if self.space.identity(best) not in taken:
                return best
            candidates = draw(self.space, taken, rng, num=500)
            if not candidates:
                return None
            unit = optimizer.space.transform([self._to_skopt(point) for point in candidates])
            gain = gaussian_ei(unit, optimizer.models[-1], y_opt=told.min(), xi=0.0)
        return candidates[int(np.argmax(gain))]

    def _optimizer(self, rng: np.random.Generator) -> Any:
        dimensions = [
            skopt.space.Categorical(range(len(dimension.values)))
            if isinstance(dimension, Choice)
            else skopt.space.Real(0.0, 1.0)
            for dimension in self.space.dimensions.values()
        ]
        return skopt.Optimizer(
            dimensions,
            "GP",
            n_initial_points=0,
            acq_func="EI",
            acq_func_kwargs={"xi": 0.0},  # its 0.01 asks too much of losses that differ by less
            acq_optimizer_kwargs={
                "n_points": NUM_CANDIDATES,
                "n_restarts_optimizer": NUM_REFINED,
            },
            random_state=int(rng.integers(2**31)),
        )

    def _to_skopt(self, point: Point) -> list[float]:
        """Numbers as coordinates, choices as their index (a choice has no order to keep)."""
        return [
            d.index(point[path]) if isinstance(d, Choice) else d.encode(point[path])
            for path, d in self.space.dimensions.items()
        ]

    def _from_skopt(self, values: Sequence[Any]) -> Point:
        pairs = zip(self.space.dimensions.items(), values, strict=True)
        return {
            path: d.values[int(value)] if isinstance(d, Choice) else d.decode(float(value))
            for (path, d), value in pairs
        }


def _told(costs: Sequence[float], num_pending: int) -> NDArray[np.float64]:
    """The costs as the model sees them, then the lies; mean 0 and deviation 1."""
    finite = [cost for cost in costs if math.isfinite(cost)]
    told = np.array([*np.minimum(costs, max(finite)), *[min(finite)] * num_pending])
    scaled: NDArray[np.float64] = (told - told.mean()) / (told.std() or 1.0)
    return scaled
