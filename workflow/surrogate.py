"""What the trials of a study say about its space: a smooth function through their scores.

For looking, which wants an answer everywhere. The search has a model of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from workflow.search.base import Observation
from workflow.search.bayesian import Codec
from workflow.search.gaussian import Array, Gaussian, fit
from workflow.space import Choice, Dimension, Ordinal, Point, Scalar, Space
from workflow.view import View

FEWEST, MOST = 4, 500  # trials that a process is put through; its cost is cubic
LOG_FROM = 30.0  # largest value by smallest, above which logarithms are modelled
FENCE = 3.0  # interquartile ranges above the upper quartile: worse values count as this one
JITTER = 1e-6  # of the variance: points that coincide, without noise, would make K singular
NUM_PREDICTIONS = 2**14  # for the indices of all dimensions together
Z_95 = 1.959964  # half the width of a 95 % band, in deviations
SEED = 0  # the same figure whenever it is drawn


@dataclass(frozen=True)
class Grid:
    """A prediction over two dimensions, the others at the best trial's values."""

    x: list[Scalar]  # (X,)
    y: list[Scalar]  # (Y,)
    mean: Array  # (Y, X); NaN where a constraint does not hold
    deviation: Array  # (Y, X), of the mean, in units of the metric


@dataclass(frozen=True)
class Surrogate:
    """A Gaussian process through the scores of the trials of largest budget."""

    space: Space
    codec: Codec  # of the space without its conditions, which `_legal` minds
    model: Gaussian
    scale: Scale
    best: Array  # (D,), coordinates of the trial with the best score
    skill: float  # R^2 of each trial as predicted from the others; NaN where all are equal

    @classmethod
    def of(cls, view: View) -> Surrogate | None:
        """None where there are too few trials with a score, or where they all have one point."""
        space = view.file.space
        seen = _seen(view)
        if len(seen) < FEWEST or not space.dimensions:
            return None
        points, values, errors = zip(*seen, strict=True)
        unit = np.array([space.encode(point) for point in points])
        if not np.ptp(unit, axis=0).any():
            return None
        scale = Scale.of(np.array(values), view.goal)
        told = scale.told(np.array(values))
        noise = scale.variances(np.array(values), np.array(errors)) + JITTER
        codec = Codec(Space({p: _always(d) for p, d in space.dimensions.items()}))
        rng = np.random.default_rng(SEED)
        model = fit(codec.columns(unit), told, noise, codec.groups, rng)
        skill = _left_out_r2(model, told)
        return cls(space, codec, model, scale, unit[np.argmin(told)], skill)

    @property
    def num_trials(self) -> int:
        return len(self.model.x)

    def importances(self) -> pd.DataFrame:
        """path, first_order, total: Sobol' indices of the predicted mean, most important first.

        Of its logarithm where that is modelled. They are of a space whose dimensions are drawn
        independently: constraints do not count, and what is inactive has no effect.
        """
        return self._importances.copy()

    @cached_property
    def _importances(self) -> pd.DataFrame:
        num_dimensions = len(self.best)
        num = 2 ** int(math.log2(NUM_PREDICTIONS / (num_dimensions + 2)))
        first, total = sobol_indices(self._told_mean, num_dimensions, num)
        table = pd.DataFrame(
            {
                "path": list(self.space.dimensions),
                "first_order": np.clip(first, 0, 1),  # estimates of little may be below nothing
                "total": np.clip(total, 0, None),
            }
        )
        return table.sort_values("total", ascending=False, kind="stable", ignore_index=True)

    def most_important(self, num: int) -> list[str]:
        return list(self._importances["path"].head(num))

    def slice(self, path: str, num: int = 41) -> pd.DataFrame:
        """Along one dimension, the others at the best trial's values: value, mean, low, high.

        The mean with its 95 % band, one row a level where the dimension has levels. Where a
        constraint does not hold, NaN.
        """
        unit, [values] = self._lattice([path], num)
        mean, deviation = self._told(unit)
        ends = [self.scale.said(mean + z * deviation) for z in (-Z_95, Z_95)]
        return pd.DataFrame(
            {
                "value": pd.Series(values, dtype=object),
                "mean": self.scale.said(mean),
                "low": np.minimum(*ends),
                "high": np.maximum(*ends),
            }
        )

    def contour(self, path_x: str, path_y: str, num: int = 25) -> Grid:
        """Over two dimensions, the others at the best trial's values.

        The deviation is half the width of the band that holds 68 %.
        """
        unit, [y, x] = self._lattice([path_y, path_x], num)
        mean, deviation = self._told(unit)
        ends = [self.scale.said(mean + sign * deviation) for sign in (-1, 1)]
        shape = len(y), len(x)
        half = np.abs(ends[1] - ends[0]) / 2
        return Grid(x, y, self.scale.said(mean).reshape(shape), half.reshape(shape))

    # -- points ----------------------------------------------------------------------------------

    def _lattice(self, paths: list[str], num: int) -> tuple[Array, list[list[Scalar]]]:
        """Coordinates, (m, D), of all combinations of values of `paths`, and those values."""
        places = [list(self.space.dimensions).index(path) for path in paths]
        axes = [_values(self.space, path, num) for path in paths]
        coordinates = [
            [self.space.dimensions[path].encode(value) for value in values]
            for path, values in zip(paths, axes, strict=True)
        ]
        mesh = np.meshgrid(*coordinates, indexing="ij")
        unit = np.tile(self._where_active(paths), (mesh[0].size, 1))
        for place, along in zip(places, mesh, strict=True):
            unit[:, place] = along.ravel()
        return unit, axes

    def _where_active(self, paths: list[str]) -> Array:
        """The best trial's coordinates, (D,); conditions of `paths` that it fails are met."""
        row = self.best.copy()
        names = list(self.space.dimensions)
        for path in paths:
            if path not in self.space.decode(row):
                for name, value in (self.space.reached(path) or {}).items():
                    row[names.index(name)] = self.space.dimensions[name].encode(value)
        return row

    def _legal(self, unit: Array) -> Array:
        """The rows, (m, D), at the nearest levels, with 0.5 for what is inactive there."""
        unit, _ = self.codec.legal(unit)
        names = list(self.space.dimensions)
        above = {name for d in self.space.dimensions.values() for name in d.when or {}}
        if not above:
            return unit
        _, first, which = np.unique(
            unit[:, [names.index(name) for name in sorted(above)]],
            axis=0,
            return_index=True,
            return_inverse=True,
        )
        points = [self.space.decode(row) for row in unit[first]]
        active = np.array([[name in point for name in names] for point in points])
        unit[~active[which.ravel()]] = 0.5
        return unit

    def _told(self, unit: Array) -> tuple[Array, Array]:
        """Mean and deviation, (m,) each, as the process has them; NaN where it is illegal."""
        legal = self._legal(unit)
        mean, deviation = self.model.predict(self.codec.columns(legal))
        if self.space.constraints:
            allowed = np.array([self.space.allowed(self.space.decode(row)) for row in legal])
            mean[~allowed] = deviation[~allowed] = np.nan
        return mean, deviation

    def _told_mean(self, unit: Array) -> Array:
        return self.model.predict(self.codec.columns(self._legal(unit)))[0]


@dataclass(frozen=True)
class Scale:
    """Between values of the metric and what the process sees: less is better, deviation 1."""

    sign: int
    is_log: bool
    worst: float  # what is above, after sign and logarithm, counts as this
    middle: float
    width: float

    @classmethod
    def of(cls, values: Array, goal: str) -> Scale:
        sign = 1 if goal == "min" else -1
        is_log = bool(values.min() > 0 and values.max() > LOG_FROM * values.min())
        raw = sign * (np.log(values) if is_log else values)
        lower, upper = np.quantile(raw, [0.25, 0.75])
        # One training that exploded would press all others together (Tukey 1977, outer fences).
        worst = float(upper + FENCE * (upper - lower)) if upper > lower else math.inf
        raw = np.minimum(raw, worst)
        middle, width = float(raw.mean()), float(raw.std())
        are_equal = width <= 1e-12 * abs(middle)
        return cls(sign, is_log, worst, middle, 1.0 if are_equal else width)

    def told(self, values: Array) -> Array:
        raw = self.sign * (np.log(values) if self.is_log else values)
        told: Array = (np.minimum(raw, self.worst) - self.middle) / self.width
        return told

    def variances(self, values: Array, errors: Array) -> Array:
        """Of `told` values, from standard errors: d ln v = dv / v."""
        relative = errors / values if self.is_log else errors
        variances: Array = (relative / self.width) ** 2
        return variances

    def said(self, told: Array) -> Array:
        """The inverse of `told`. Of the mean of a logarithm, this is the median."""
        raw = self.sign * (told * self.width + self.middle)
        said: Array = np.exp(raw) if self.is_log else raw
        return said


def sobol_indices(
    function: Callable[[Array], Array], num_dimensions: int, num: int
) -> tuple[Array, Array]:
    """First-order and total indices, (D,) each, of a function on the unit cube; 0 of a constant.

    By the estimators (b) and (f) of Saltelli et al. 2010, Comput. Phys. Commun. 181, 259, Table 2,
    on a scrambled Sobol' sequence.

    Args:
        function: (m, D) -> (m,).
        num: rows of the sample, a power of two; the function is asked D + 2 times as many.
    """
    from scipy.stats import qmc  # it takes 0.9 s, and few look at this

    sample = qmc.Sobol(2 * num_dimensions, seed=SEED).random(num)
    a, b = sample[:, :num_dimensions], sample[:, num_dimensions:]
    f_a, f_b = function(a), function(b)
    both = np.concatenate([f_a, f_b])
    variance = both.var()
    if variance <= 1e-18 * max(1.0, float(np.mean(both**2))):
        return np.zeros(num_dimensions), np.zeros(num_dimensions)
    first, total = np.empty(num_dimensions), np.empty(num_dimensions)
    for place in range(num_dimensions):
        mixed = a.copy()  # A_B^(i)
        mixed[:, place] = b[:, place]
        f_mixed = function(mixed)
        first[place] = np.mean((f_b - both.mean()) * (f_mixed - f_a)) / variance
        total[place] = np.mean((f_a - f_mixed) ** 2) / (2 * variance)
    return first, total


def todays_points(view: View) -> dict[int, Point]:
    """The points of the trials of largest budget, by number, as today's space has them.

    Without those that are outside of it.
    """
    space, own = view.file.space, view.file.own_values()
    trials = view.ledger.trials_by_number
    found = {
        number: space.completed(trials[number].point, own)
        for number in view.ledger.compared()
        if not trials[number].aside
    }
    return {number: point for number, point in found.items() if point is not None}


def _seen(view: View) -> list[tuple[Point, float, float]]:
    """Point, value and its standard error of the trials that a process is put through.

    Of more than `MOST`: the best half, where the model has to be good, and any of the rest.
    """
    in_full = set(view.ledger.compared())
    history, _ = view.ledger.known()
    scored = [(each, value) for each in history if (value := _value(each, in_full)) is not None]
    if len(scored) > MOST:
        sign = 1 if view.goal == "min" else -1
        scored.sort(key=lambda pair: sign * pair[1])
        rest = np.random.default_rng(SEED).permutation(np.arange(MOST // 2, len(scored)))
        scored = [scored[i] for i in [*range(MOST // 2), *sorted(rest[: MOST - MOST // 2])]]
    space, own = view.file.space, view.file.own_values()
    points = [space.completed(each.point, own) for each, _ in scored]
    return [
        (point, value, each.noise or 0.0)
        for point, (each, value) in zip(points, scored, strict=True)
        if point is not None
    ]


def _value(seen: Observation, in_full: set[int]) -> float | None:
    """The value of a trial of largest budget that has one."""
    is_scored = seen.value is not None and math.isfinite(seen.value)
    return seen.value if is_scored and seen.proposal.number in in_full else None


def _values(space: Space, path: str, num: int) -> list[Scalar]:
    """Up to `num` values along a dimension, evenly over its scale; all of what is listed."""
    dimension = space.dimensions[path]
    if isinstance(dimension, Choice | Ordinal):
        return list(dimension.values)
    return list(dict.fromkeys(dimension.decode(u) for u in np.linspace(0, 1, num).tolist()))


def _always(dimension: Dimension) -> Dimension:
    return dataclasses.replace(dimension, when=None)


def _left_out_r2(model: Gaussian, told: Array) -> float:
    """R^2 of predictions of each observation from all others (R&W 2006, eq. 5.12)."""
    residuals = model.alpha / np.diag(model.inverse)
    spread = float(np.sum((told - told.mean()) ** 2))
    return 1 - float(np.sum(residuals**2)) / spread if spread > 0 else math.nan
