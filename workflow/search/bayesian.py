"""Bayesian optimisation with a Gaussian process of our own: the default method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from workflow.search.base import Observation, PointSearch, Problem, draw
from workflow.search.gaussian import (
    Array,
    Gaussian,
    Groups,
    fit,
    log_expected_improvement,
    log_expected_improvement_slopes,
)
from workflow.search.sobol import sobol_point
from workflow.space import Choice, Point, Real, Space

NUM_FAR, NUM_NEAR = 500, 100  # candidates: anywhere, and around the best points seen
NUM_BEST = 5
NUM_TO_JUDGE = 8  # trials a dimension before a prediction counts more than a score
NUM_STARTS = 4  # of the candidates, from which the acquisition is climbed
# A choice's length-scale is shorter: seeing one value tells little of another, so that none is
# given up early.
CHOICE_LENGTH = 0.35
OTHER_CHOICE = 0.2  # of the proposals take a choice that the best point does not, for the same end
NUM_ROUNDS = 2  # of climbing along real dimensions and hopping along the others
CLIMB_STEPS = 30
MOST_LEVELS = 16  # of a discrete dimension, to try them all in a hop; else steps of 1, 2, 4, ...
FINEST = 4096  # a discrete dimension with more levels is climbed like a real one


class BayesianSearch(PointSearch):
    """A Sobol design, then the largest expected improvement under a Gaussian process.

    - Integers, ordinals and choices are searched as such: every candidate is a point of the space.
    - Each trial brings its own noise, from the spread of its folds, and improvement is asked of the
      best *predicted* value so far: a lucky fold is not chased.
    - Pending trials count as seen at their predicted mean (kriging believer).
    - A failed trial counts as the worst value seen, which keeps the search out of where trainings
      diverge. Values above the median count by their logarithm, so that none flattens the model.
    - With `cost_aware`, improvement per predicted core-second (Snoek, Larochelle, Adams 2012).

    The acquisition is the logarithm of expected improvement (Ament et al. 2023, arXiv:2310.20708).

    Options:
        num_initial: Sobol points before the first model; by default three a dimension, but no
            more than a third of the budget, and at least four.
        cost_aware: whether to prefer cheap trials.
    """

    name = "bayesian"
    knows: ClassVar[Mapping[str, type]] = {"num_initial": int, "cost_aware": bool}

    def __init__(self, problem: Problem, options: Mapping[str, Any]) -> None:
        super().__init__(problem, options)
        usual = max(1, min(3 * len(self.space.dimensions), max(4, problem.num_trials // 3)))
        self.num_initial: int = self.option("num_initial", usual, low=1)
        self.cost_aware: bool = self.option("cost_aware", False)
        self.codec = Codec(self.space)

    def recommend(self, history: Sequence[Observation]) -> Observation | None:
        """The trial with the best predicted value, which forgives luck.

        With few trials a dimension the model knows less than the folds do: the best score then.
        """
        seen = [each for each in history if self.space.contains(each.point)]
        finite = [each for each in seen if math.isfinite(self.cost(each))]
        is_early = len(finite) < NUM_TO_JUDGE * len(self.space.dimensions)
        if is_early or all(each.noise is None for each in finite):
            return super().recommend(history)
        model, _ = self._model(seen, np.random.default_rng(self.problem.seed))
        predicted, _ = model.predict(self.codec.columns(self._unit([o.point for o in finite])))
        return finite[int(np.argmin(predicted))]

    def _point(
        self,
        history: Sequence[Observation],
        pending: Sequence[Point],
        taken: Set[str],
        rng: np.random.Generator,
    ) -> Point | None:
        index = len(history) + len(pending)
        is_early = index < self.num_initial or not self.space.dimensions
        if is_early or not any(math.isfinite(self.cost(each)) for each in history):
            return sobol_point(self.space, self.problem.seed, index, taken, rng)
        model, best = self._model(history, rng)
        seen = self._unit([each.point for each in history])
        predicted, _ = model.predict(model.x)
        if pending:
            model = model.with_points(self.codec.columns(self._unit(pending)))
        prices = self._prices(history, rng) if self.cost_aware else None
        acquisition = Acquisition(self.codec, model, best, prices)
        top = seen[np.argsort(predicted, kind="stable")[:NUM_BEST]]
        rows = _maximised(acquisition, top, rng)
        if rng.random() < OTHER_CHOICE:
            rows = self.codec.others_first(rows, top[0])
        for unit in rows:
            point = self.space.decode(unit)
            if self.space.identity(point) not in taken:
                return point
        return next(iter(draw(self.space, taken, rng)), None)

    def _model(
        self, history: Sequence[Observation], rng: np.random.Generator
    ) -> tuple[Gaussian, float]:
        """The process through what was seen, and the best value that it predicts there."""
        costs = self._costs(history, rng)
        values, scale = _standardised(costs)
        noise = (self._noises(history) / scale) ** 2
        x = self.codec.columns(self._unit([each.point for each in history]))
        model = fit(x, values, noise, self.codec.groups, rng)
        # Without noise the data are exact, and what the model makes of them is not.
        predicted = model.predict(x)[0] if noise.any() else values
        return model, float(predicted[np.isfinite(costs)].min())

    def _costs(self, history: Sequence[Observation], rng: np.random.Generator) -> Array:
        """What is minimised, (n,); inf where the trial failed."""
        return np.array([self.cost(each) for each in history])

    def _noises(self, history: Sequence[Observation]) -> Array:
        """The standard errors of `_costs`, (n,); 0 where none is known."""
        return np.array([each.noise or 0.0 for each in history])

    def _prices(self, history: Sequence[Observation], rng: np.random.Generator) -> Gaussian | None:
        """A process of the logarithm of what a trial costs; None before three are known."""
        known = [each for each in history if each.cost is not None and each.cost > 0]
        if len(known) < 3:
            return None
        prices = np.log([each.cost for each in known if each.cost is not None])
        x = self.codec.columns(self._unit([each.point for each in known]))
        return fit(x, prices - prices.mean(), np.zeros(len(known)), self.codec.groups, rng)

    def _unit(self, points: Sequence[Point]) -> Array:
        return np.array([self.space.encode(point) for point in points])


class Codec:
    """Points as rows of numbers.

    A row of unit coordinates, (D,), is what `Space.encode` gives. The model sees columns, (C,): the
    same, but a choice as one column a value, such that two values are 1 apart.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.is_plain = not space.constraints and all(
            d.when is None for d in space.dimensions.values()
        )
        self.levels = [_levels(d) for d in space.dimensions.values()]
        self.widths = [
            len(d.values) if isinstance(d, Choice) else 1 for d in space.dimensions.values()
        ]
        of_column = np.repeat(np.arange(len(self.widths)), self.widths)
        factor = np.where(np.array(self.widths) > 1, CHOICE_LENGTH, 1.0)
        self.groups = Groups(of_column, factor)
        self.is_smooth = np.array([levels is None for levels in self.levels], dtype=bool)
        starts = np.cumsum([0, *self.widths])[:-1]
        self.smooth_columns = starts[self.is_smooth]

    def columns(self, unit: Array) -> Array:
        """(m, D) -> (m, C)."""
        parts = []
        for place, width in enumerate(self.widths):
            column = unit[:, place]
            if width == 1:
                parts.append(column[:, None])
            else:
                index = np.minimum((column * width).astype(int), width - 1)
                parts.append(np.eye(width)[index] / math.sqrt(2))
        return np.hstack(parts)

    def legal(self, unit: Array) -> tuple[Array, NDArray[np.bool_]]:
        """The rows at the nearest levels, (m, D), and which of them are points of the space."""
        unit = np.clip(unit, 0, 1)
        for place, levels in enumerate(self.levels):
            if levels is not None:
                edges = (levels[1:] + levels[:-1]) / 2
                unit[:, place] = levels[np.searchsorted(edges, unit[:, place])]
        if self.is_plain:
            return unit, np.ones(len(unit), dtype=bool)
        points = [self.space.decode(row) for row in unit]
        allowed = np.array([self.space.contains(point) for point in points], dtype=bool)
        return np.array([self.space.encode(point) for point in points]), allowed

    def others_first(self, unit: Array, best: Array) -> Array:
        """The rows, (m, D), that differ from `best`, (D,), in a choice; then those that do not."""
        is_choice = np.array(self.widths) > 1
        differs = (unit != best)[:, is_choice].any(axis=1)
        return np.vstack([unit[differs], unit[~differs]])


class Acquisition:
    """Log expected improvement over `best`, at legal points; with `prices`, per cost."""

    def __init__(self, codec: Codec, model: Gaussian, best: float, prices: Gaussian | None) -> None:
        self.codec = codec
        self.model = model
        self.best = best
        self.prices = prices

    def __call__(self, unit: Array) -> tuple[Array, Array]:
        """The legal rows next to `unit`, (m, D), and their gain, (m,); -inf where there is none."""
        unit, allowed = self.codec.legal(unit)
        columns = self.codec.columns(unit)
        gain = log_expected_improvement(*self.model.predict(columns), self.best)
        if self.prices is not None:
            gain -= self.prices.predict(columns)[0]
        gain[~allowed] = -np.inf
        return unit, gain

    def climb(self, unit: Array) -> Array:
        """From each row, (m, D), to a maximum along the real dimensions.

        All at once: the sum over rows has its maximum where each of them has.
        """
        smooth = self.codec.is_smooth
        if not smooth.any():
            return unit
        at = self.codec.smooth_columns
        columns = self.codec.columns(unit)

        def loss(flat: Array) -> tuple[float, Array]:
            columns[:, at] = flat.reshape(len(unit), len(at))
            mean, deviation, slope_mean, slope_deviation = self.model.slopes(columns)
            gain, by_mean, by_deviation = log_expected_improvement_slopes(
                mean, deviation, self.best
            )
            slope = by_mean[:, None] * slope_mean + by_deviation[:, None] * slope_deviation
            if self.prices is not None:
                price, _, slope_price, _ = self.prices.slopes(columns)
                gain, slope = gain - price, slope - slope_price
            return -float(gain.sum()), -slope[:, at].ravel()

        found = minimize(
            loss,
            unit[:, smooth].ravel(),
            jac=True,
            method="L-BFGS-B",
            bounds=[(0, 1)] * (len(unit) * len(at)),
            options={"maxiter": CLIMB_STEPS},
        )
        moved = unit.copy()
        moved[:, smooth] = found.x.reshape(len(unit), len(at))
        return moved

    def hop(self, unit: Array) -> Array:
        """From each row, (m, D), to the best one that differs in one discrete dimension at most."""
        neighbours = np.stack([unit, *self._neighbours(unit)])  # (k, m, D)
        legal, gain = self(neighbours.reshape(-1, unit.shape[1]))
        best = gain.reshape(len(neighbours), len(unit)).argmax(axis=0)
        chosen: Array = legal.reshape(neighbours.shape)[best, np.arange(len(unit))]
        return chosen

    def _neighbours(self, unit: Array) -> list[Array]:
        found = []
        for place, levels in enumerate(self.codec.levels):
            if levels is None:
                continue
            here = np.searchsorted(levels, unit[:, place] - 1e-9)
            here = np.minimum(here, len(levels) - 1)
            steps = (
                range(1, len(levels))
                if len(levels) <= MOST_LEVELS
                else [2**k for k in range(int(math.log2(len(levels))))]
            )
            for step in [sign * step for step in steps for sign in (-1, 1)]:
                moved = unit.copy()
                moved[:, place] = levels[np.clip(here + step, 0, len(levels) - 1)]
                found.append(moved)
        return found


def _maximised(acquisition: Acquisition, top: Array, rng: np.random.Generator) -> Array:
    """Rows by falling acquisition, (m, D); the first are at local maxima.

    Args:
        top: the rows of the best points seen, around which candidates are drawn too.
    """
    num_dimensions = top.shape[1]
    near = top[np.arange(NUM_NEAR) % len(top)]
    reach = 10 ** rng.uniform(-3, -0.5, size=(NUM_NEAR, 1))
    moves = rng.random(near.shape) < max(0.3, 1 / num_dimensions)
    near = near + np.where(moves, reach * rng.normal(size=near.shape), 0)
    unit, gain = acquisition(np.vstack([rng.random((NUM_FAR, num_dimensions)), near]))
    starts = unit[np.argsort(-gain, kind="stable")[:NUM_STARTS]]
    for _ in range(NUM_ROUNDS):
        starts = acquisition.climb(starts)
        if acquisition.codec.is_smooth.all():
            break
        hopped = acquisition.hop(starts)
        if np.array_equal(hopped, starts):
            break
        starts = hopped
    refined, its_gain = acquisition(starts)
    unit, gain = np.vstack([refined, unit]), np.concatenate([its_gain, gain])
    order = np.argsort(-gain, kind="stable")
    return unit[order[np.isfinite(gain[order])]]


def _levels(dimension: Any) -> Array | None:
    """The unit coordinates that a discrete dimension takes, rising; None where it is real."""
    if isinstance(dimension, Real) or dimension.size > FINEST:
        return None
    return np.array([dimension.encode(level) for level in dimension.levels()])


def _standardised(costs: Array) -> tuple[Array, float]:
    """The costs as the model sees them, and by how much they were divided.

    Failed ones become the worst finite one. What is above the median m counts as
    m + c ln(1 + (cost - m) / c), with c the distance from the best to the median: what is good
    keeps its scale, and a trial that exploded does not press all others together. Then mean 0 and
    deviation 1.
    """
    finite = costs[np.isfinite(costs)]
    middle = float(np.median(finite))
    reach = middle - float(finite.min()) or 1.0
    above = np.maximum(np.minimum(costs, finite.max()) - middle, 0.0)
    told = np.where(costs > middle, middle + reach * np.log1p(above / reach), costs)
    scale = float(told.std()) or 1.0
    return (told - told.mean()) / scale, scale
