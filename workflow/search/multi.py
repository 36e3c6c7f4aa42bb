"""Several objectives at once: Bayesian optimisation along random directions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from apps.contract import N3LOError
from workflow.search.base import Observation, Problem
from workflow.search.bayesian import BayesianSearch
from workflow.search.gaussian import Array

SLOPE = 0.05  # of the sum beside the maximum, so that no weakly beaten point is taken


class MultiObjectiveSearch(BayesianSearch):
    """ParEGO (Knowles 2006, IEEE Trans. Evol. Comput. 10, 50): each proposal draws its own weights.

    The objectives, each scaled to [0, 1] over what was seen, become one number by the augmented
    Chebyshev function max_k w_k z_k + 0.05 sum_k w_k z_k; so proposals spread over the front.

    Options: those of "bayesian".
    """

    name = "multi"

    def __init__(self, problem: Problem, options: Mapping[str, Any]) -> None:
        super().__init__(problem, options)
        if len(problem.goals) < 2:
            raise N3LOError(
                "search.method: 'multi' needs a second objective: add search.further_objectives"
            )

    def _costs(self, history: Sequence[Observation], rng: np.random.Generator) -> Array:
        signs = np.array([1.0 if goal == "min" else -1.0 for goal in self.problem.goals])
        rows = np.array(
            [
                [each.value, *each.further] if self._is_whole(each) else [math.inf] * len(signs)
                for each in history
            ]
        )
        finite = np.isfinite(rows).all(axis=1)
        costs = rows[finite] * signs
        low, high = costs.min(axis=0), costs.max(axis=0)
        scaled = (costs - low) / np.where(high > low, high - low, 1.0)
        weighted = scaled * rng.dirichlet(np.ones(len(signs)))
        result = np.full(len(history), math.inf)
        result[finite] = weighted.max(axis=1) + SLOPE * weighted.sum(axis=1)
        return result

    def _noises(self, history: Sequence[Observation]) -> Array:
        return np.zeros(len(history))  # what is known is that of the first objective alone

    def recommend(self, history: Sequence[Observation]) -> None:
        """None: all of the Pareto front is as good."""

    def cost(self, seen: Observation) -> float:
        return super().cost(seen) if self._is_whole(seen) else math.inf

    def _is_whole(self, seen: Observation) -> bool:
        values = [seen.value, *seen.further]
        return len(values) == len(self.problem.goals) and all(
            value is not None and math.isfinite(value) for value in values
        )
