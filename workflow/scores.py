"""How trials are compared: the score of one, and which of several objectives no other beats."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from apps.contract import Objective


@dataclass(frozen=True)
class Scoring:
    """What a study asks of its trials. Part of each session's row in the ledger."""

    objective: Objective
    spread_penalty: float = 0.0  # how many standard deviations over the folds worsen the mean
    further: tuple[Objective, ...] = ()

    @property
    def goals(self) -> list[str]:
        return [self.objective.goal, *(each.goal for each in self.further)]

    def score(self, foms: Sequence[float]) -> float:
        """The mean over folds, made worse by `spread_penalty` deviations; NaN of none."""
        mean, spread = mean_and_spread(foms)
        if self.spread_penalty == 0:
            return mean
        penalty = self.spread_penalty * spread
        return mean + penalty if self.objective.goal == "min" else mean - penalty

    def __str__(self) -> str:
        parts = [f"{each.metric} ({each.goal})" for each in (self.objective, *self.further)]
        penalty = f" with spread_penalty {self.spread_penalty:g}" if self.spread_penalty else ""
        return " and ".join(parts) + penalty

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def of_plain(cls, facts: Mapping[str, Any] | None) -> Scoring:
        """The inverse of `plain`; of nothing, "less is better"."""
        if facts is None:
            return cls(Objective(goal="min"))
        further = tuple(Objective(**each) for each in facts["further"])
        return cls(Objective(**facts["objective"]), facts["spread_penalty"], further)


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; the latter is NaN of one value, both are of none."""
    if not values:
        return math.nan, math.nan
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def pareto_front(values: Sequence[Sequence[float]], goals: Sequence[str]) -> list[bool]:
    """Which rows no other row beats in one objective without being worse in another.

    Rows with a value that is not finite are not among them.

    Args:
        values: one row a trial, one column an objective.
        goals: "min" or "max" for each column.
    """
    signs = [1 if goal == "min" else -1 for goal in goals]
    costs = np.array(values, dtype=float).reshape(-1, len(signs)) * signs
    left = np.flatnonzero(np.isfinite(costs).all(axis=1))
    rows = costs[left]
    judge = 0
    while judge < len(rows):  # what it beats goes; in the end each has been the judge of all
        stays = (rows < rows[judge]).any(axis=1) | (rows == rows[judge]).all(axis=1)
        rows, left = rows[stays], left[stays]
        judge = int(stays[:judge].sum()) + 1
    on_front = np.zeros(len(costs), dtype=bool)
    on_front[left] = True
    return [bool(each) for each in on_front]
