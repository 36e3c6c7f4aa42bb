"""scikit-optimize, made safe for parallel trials.

What it leaves to its user is done here: it keeps no pending points, raises on a failed trial, may
suggest a point again, and knows no conditions or constraints.
"""

from __future__ import annotations

import importlib.metadata
import math
import warnings
from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from apps.contract import N3LOError
from workflow.search.base import Observation, PointSearch, Problem, draw
from workflow.search.sobol import sobol_point
from workflow.space import Choice, Point

ENGINES = ("GP", "ET", "RF")
BROKEN = ("GBRT", "dummy")  # scikit-optimize 0.10.2 under scikit-learn >= 1.6
NUM_CANDIDATES = 2000  # where expected improvement is looked for before its best points are refined
NUM_REFINED = 3


class ScikitSearch(PointSearch):
    """A Sobol design, then the largest expected improvement under a model of scikit-optimize.

    Pending trials count as if they had returned the best value so far ("constant liar", CL-min:
    Ginsbourger, Le Riche, Carraro 2008, hal-00260579; 2010, Computational Intelligence in Expensive
    Optimization Problems, ch. 6), which keeps parallel trials apart. Failed ones count as the worst
    value so far, which keeps the search out of where trainings diverge. A dimension whose condition
    is not met counts as the middle of its range.

    The model fits one noise level to all trials: scikit-optimize has none per point, so that
    `Observation.noise` is not used.

    Options:
        engine: "GP", a Gaussian process, by default; "ET", extra trees; "RF", a random forest.
        num_initial: Sobol points before the first model; by default one more than dimensions.
    """

    name = "skopt"
    knows: ClassVar[Mapping[str, type]] = {"engine": str, "num_initial": int}

    def __init__(self, problem: Problem, options: Mapping[str, Any]) -> None:
        super().__init__(problem, options)
        if self.options.get("engine") in BROKEN:
            raise N3LOError(
                f"search.options.engine: '{self.options['engine']}' of scikit-optimize is broken "
                f"with scikit-learn >= 1.6; there are: {', '.join(ENGINES)}"
            )
        self.engine: str = self.option("engine", ENGINES[0], among=ENGINES)
        self.num_initial: int = self.option("num_initial", len(self.space.dimensions) + 1, low=1)
        self._skopt = _skopt()

    def _point(
        self,
        history: Sequence[Observation],
        pending: Sequence[Point],
        taken: Set[str],
        rng: np.random.Generator,
    ) -> Point | None:
        index = len(history) + len(pending)
        if index < self.num_initial or not any(math.isfinite(self.cost(o)) for o in history):
            return sobol_point(self.space, self.problem.seed, index, taken, rng)
        candidates = draw(self.space, taken, rng, num=500)
        if not candidates:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a fit that did not converge is still a fit
            return self._improve(history, pending, taken, candidates, rng)

    def _improve(
        self,
        history: Sequence[Observation],
        pending: Sequence[Point],
        taken: Set[str],
        candidates: Sequence[Point],
        rng: np.random.Generator,
    ) -> Point:
        """The point that the model likes best; of the candidates, if that one may not be."""
        points = [*(seen.point for seen in history), *pending]
        told = _told([self.cost(seen) for seen in history], len(pending))
        optimizer = self._optimizer(rng)
        optimizer.tell([self._to_skopt(point) for point in points], told.tolist())
        best = self._from_skopt(optimizer.ask())
        if self.space.contains(best) and self.space.identity(best) not in taken:
            return best
        unit = optimizer.space.transform([self._to_skopt(point) for point in candidates])
        gain = self._skopt.acquisition.gaussian_ei(
            unit, optimizer.models[-1], y_opt=told.min(), xi=0.0
        )
        return candidates[int(np.argmax(gain))]

    def _optimizer(self, rng: np.random.Generator) -> Any:
        dimensions = [
            self._skopt.space.Categorical(range(len(dimension.values)))
            if isinstance(dimension, Choice)
            else self._skopt.space.Real(0.0, 1.0)
            for dimension in self.space.dimensions.values()
        ]
        return self._skopt.Optimizer(
            dimensions,
            self.engine,
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
        """Coordinates; of a choice, which has no order to keep, the index."""
        pairs = zip(self.space.dimensions.values(), self.space.encode(point).tolist(), strict=True)
        return [int(u * len(d.values)) if isinstance(d, Choice) else u for d, u in pairs]

    def _from_skopt(self, values: Sequence[Any]) -> Point:
        pairs = zip(self.space.dimensions.values(), values, strict=True)
        unit = [
            (int(value) + 0.5) / len(d.values) if isinstance(d, Choice) else float(value)
            for d, value in pairs
        ]
        return self.space.decode(np.array(unit))


def _skopt() -> Any:
    """The library, imported when a study asks for it: it is slow to load and fragile.

    Raises:
        N3LOError: it is not there, or does not work with what else is installed.
    """
    try:
        import skopt
        import skopt.acquisition
    except Exception as error:  # of numpy's or scikit-learn's making, it can be any
        versions = ", ".join(map(_version, ("scikit-optimize", "numpy", "scikit-learn")))
        raise N3LOError(
            f"search.method: 'skopt' does not work with what is installed ({versions}): "
            f"{type(error).__name__}: {' '.join(str(error).split())}; "
            "method = 'bayesian' needs neither scikit-optimize nor scikit-learn"
        ) from error
    return skopt


def _version(distribution: str) -> str:
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {distribution}"


def _told(costs: Sequence[float], num_pending: int) -> NDArray[np.float64]:
    """The costs as the model sees them, then the lies; mean 0 and deviation 1."""
    finite = [cost for cost in costs if math.isfinite(cost)]
    told = np.array([*np.minimum(costs, max(finite)), *[min(finite)] * num_pending])
    scaled: NDArray[np.float64] = (told - told.mean()) / (told.std() or 1.0)
    return scaled
