"""Optuna's samplers, for those who know them and for comparison."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar

import numpy as np

from apps.contract import N3LOError
from workflow.search.base import Observation, PointSearch, Problem, draw
from workflow.space import Choice, Dimension, Integer, Point, Real, Scalar

SAMPLERS = {
    "tpe": "TPESampler",
    "gp": "GPSampler",
    "cmaes": "CmaEsSampler",
    "nsga2": "NSGAIISampler",
    "random": "RandomSampler",
}
KEEPING = ("cmaes", "nsga2")  # a state, in the trials that they were asked for
NUM_TRIES = 5  # suggestions that are taken or illegal before a point is drawn instead


class OptunaSearch(PointSearch):
    """One suggestion of a sampler at a time, in a study in memory that is rebuilt from the rows.

    Pending trials are running ones there. Failed ones count as the worst value so far, not as
    Optuna's state FAIL, which its samplers do not look at: they would try there again. A parameter
    whose condition is not met is not suggested. Several goals are its several directions.

    Options:
        sampler: "tpe", "gp", "cmaes" (one goal only), "nsga2" or "random"; "tpe" by default.
    """

    name = "optuna"
    knows: ClassVar[Mapping[str, type]] = {"sampler": str}

    def __init__(self, problem: Problem, options: Mapping[str, Any]) -> None:
        super().__init__(problem, options)
        self.sampler: str = self.option("sampler", "tpe", among=SAMPLERS)
        if self.sampler == "cmaes" and len(problem.goals) > 1:
            raise N3LOError("search.options.sampler: 'cmaes' has one goal; for more take 'nsga2'")
        self._optuna = _optuna(self.sampler)

    def _point(
        self,
        history: Sequence[Observation],
        pending: Sequence[Point],
        taken: Set[str],
        rng: np.random.Generator,
    ) -> Point | None:
        spare = next(iter(draw(self.space, taken, rng)), None)
        if spare is None:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna calls half of itself experimental
            study = self._study(history, pending, rng)
            for _ in range(NUM_TRIES):
                study.sampler = self._sampler(rng)
                trial = study.ask()
                point = self._suggested(trial)
                if self.space.contains(point) and self.space.identity(point) not in taken:
                    return point
                study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        return spare

    def _study(
        self, history: Sequence[Observation], pending: Sequence[Point], rng: np.random.Generator
    ) -> Any:
        """With a trial for each row, asked for and told as if Optuna had run it."""
        quick = self._optuna.samplers.RandomSampler(seed=0)
        study = self._optuna.create_study(
            directions=["minimize"] * len(self.problem.goals),
            sampler=self._sampler(rng) if self.sampler in KEEPING else quick,
        )
        states = self._optuna.trial.TrialState
        for seen, values in zip(history, self._values(history), strict=True):
            trial = self._asked(study, seen.point)
            study.tell(trial, values, state=states.FAIL if values is None else states.COMPLETE)
        for point in pending:
            self._asked(study, point)
        return study

    def _sampler(self, rng: np.random.Generator) -> Any:
        seed = int(rng.integers(2**31))
        if self.sampler == "nsga2":  # its own 50 would be the whole of a usual study
            population = min(50, max(10, self.problem.num_trials // 5))
            return self._optuna.samplers.NSGAIISampler(seed=seed, population_size=population)
        return getattr(self._optuna.samplers, SAMPLERS[self.sampler])(seed=seed)

    def _asked(self, study: Any, point: Point) -> Any:
        """A running trial at that point."""
        dimensions = self.space.dimensions
        study.enqueue_trial({path: _to_optuna(dimensions[path], v) for path, v in point.items()})
        trial = study.ask()
        trial.relative_params  # noqa: B018  the sampler notes its state when first asked for these
        self._suggested(trial)
        return trial

    def _values(self, history: Sequence[Observation]) -> list[tuple[float, ...] | None]:
        """Such that less is better, for each goal; None until anything has succeeded."""
        costs = [self._costs(seen) for seen in history]
        finite = [[c for c in column if math.isfinite(c)] for column in zip(*costs, strict=True)]
        if not finite or not all(finite):
            return [None for _ in history]
        worst = [max(column) for column in finite]
        return [tuple(map(min, row, worst)) for row in costs]

    def _costs(self, seen: Observation) -> list[float]:
        first = self.cost(seen)
        further = [
            value if goal == "min" else -value
            for goal, value in zip(self.problem.goals[1:], seen.further, strict=False)
        ]
        missing = [math.inf] * (len(self.problem.goals) - 1 - len(further))
        costs = [first, *further, *missing]
        return [c if math.isfinite(first) and math.isfinite(c) else math.inf for c in costs]

    def _suggested(self, trial: Any) -> Point:
        """The trial's parameters, asked for one by one: which there are depends on the others."""
        point: Point = {}
        for path in self.space.parents_first:
            if path in self.space.active(point):
                point[path] = _suggest(trial, path, self.space.dimensions[path])
        return {path: point[path] for path in self.space.dimensions if path in point}


def _suggest(trial: Any, path: str, dimension: Dimension) -> Scalar:
    if isinstance(dimension, Real):
        low, high = dimension.low, dimension.high
        return dimension.clip(trial.suggest_float(path, low, high, log=dimension.log))
    if isinstance(dimension, Integer):
        return int(trial.suggest_int(path, dimension.low, dimension.high, log=dimension.log))
    num = len(dimension.values)
    if isinstance(dimension, Choice):
        return dimension.values[int(trial.suggest_categorical(path, range(num)))]
    return dimension.values[int(trial.suggest_int(path, 0, num - 1))]


def _to_optuna(dimension: Dimension, value: Scalar) -> Scalar:
    """A choice or ordered value as its index: to Optuna, True and 1 would be the same choice."""
    if isinstance(dimension, Real | Integer):
        return dimension.plain(value)
    return dimension.index(value)


def _optuna(sampler: str) -> Any:
    """The library, imported when a study asks for it.

    Raises:
        N3LOError: it is not there.
    """
    try:
        import optuna

        if sampler == "cmaes":
            import cmaes  # noqa: F401
    except ImportError as error:
        raise N3LOError(
            f"search.method: 'optuna' needs {error.name}; pip install 'n3lo[optuna]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # it warns of every independent parameter
    return optuna
