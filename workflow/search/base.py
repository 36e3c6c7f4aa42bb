"""What every search method is: a function from what is known to the next points.

An engine keeps nothing between two proposals. It is rebuilt from the ledger's rows at any time and
then proposes the same.
"""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from apps.contract import N3LOError
from workflow.space import Point, Space

Goal = Literal["min", "max"]


@dataclass(frozen=True)
class Observation:
    """A trial that ended."""

    point: Point
    value: float | None  # mean figure of merit over the folds; None or not finite = it failed
    noise: float | None = None  # the standard error of that mean; None = a single fold


class Search(ABC):
    """Proposes the points of a study's trials."""

    name: ClassVar[str]
    knows: ClassVar[Mapping[str, type]] = {}  # its options and their types

    def __init__(
        self,
        space: Space,
        goal: Goal,
        options: Mapping[str, Any],
        seed: int,
    ) -> None:
        """`seed` is the study's: the same for all of its trials.

        Raises:
            N3LOError: an option is unknown or of the wrong type.
        """
        self._check(options)
        self.space = space
        self.goal = goal
        self.options = options
        self.seed = seed

    def propose(
        self,
        history: Sequence[Observation],
        pending: Sequence[Point],
        num: int,
        rng: np.random.Generator,
    ) -> list[Point]:
        """Up to `num` new points: none in `history` or `pending`; fewer if the space is exhausted.

        Depends on the arguments only. `pending` are proposals whose trials have not ended.
        """
        # Rows from before the study's space was narrowed say nothing about this one.
        history = [seen for seen in history if self.space.contains(seen.point)]
        busy = [point for point in pending if self.space.contains(point)]
        taken = {self.space.identity(point) for point in [*busy, *(o.point for o in history)]}
        points: list[Point] = []
        for _ in range(num):
            point = self._next(history, [*busy, *points], taken, rng)
            if point is None:
                break
            points.append(point)
            taken.add(self.space.identity(point))
        return points

    @abstractmethod
    def _next(
        self,
        history: Sequence[Observation],
        pending: Sequence[Point],
        taken: Set[str],
        rng: np.random.Generator,
    ) -> Point | None:
        """One point whose identity is not in `taken`; None if there is no such point."""

    def cost(self, seen: Observation) -> float:
        """The observed value such that less is better; inf if the trial failed."""
        if seen.value is None or not math.isfinite(seen.value):
            return math.inf
        return seen.value if self.goal == "min" else -seen.value

    def _check(self, options: Mapping[str, Any]) -> None:
        for option, value in options.items():
            if option not in self.knows:
                near = difflib.get_close_matches(option, self.knows, n=1)
                hint = f"; did you mean '{near[0]}'?" if near else ""
                raise N3LOError(
                    f"search.options: unknown option '{option}' of '{self.name}'; "
                    f"it knows: {', '.join(self.knows) or 'none'}{hint}"
                )
            if type(value) is not self.knows[option]:
                raise N3LOError(
                    f"search.options.{option}: {value!r} is not of type "
                    f"{self.knows[option].__name__}"
                )


def draw(space: Space, taken: Set[str], rng: np.random.Generator, num: int = 1) -> list[Point]:
    """Up to `num` different random points that are not taken; fewer only if no more are left."""
    fresh: dict[str, Point] = {}
    for _ in range(100 + 2 * num):
        if len(fresh) == num:
            return list(fresh.values())
        point = space.sample(rng)
        identity = space.identity(point)
        if identity not in taken:
            fresh[identity] = point
    if math.isfinite(space.size):  # nearly exhausted: look for what is left instead of guessing
        left = [p for p in space.points() if space.identity(p) not in taken | fresh.keys()]
        fresh |= {space.identity(left[i]): left[i] for i in rng.permutation(len(left))}
    return list(fresh.values())[:num]
