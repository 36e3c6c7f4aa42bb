"""What every search method is: a function from what is known to the next proposals.

A method keeps nothing between two proposals. It is rebuilt from the ledger's rows at any time and
then proposes the same.
"""

from __future__ import annotations

import difflib
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from apps.contract import N3LOError, Plain
from workflow.space import NUM_LISTED, Point, Space

logger = logging.getLogger(__name__)

Goal = Literal["min", "max"]


@dataclass(frozen=True)
class Problem:
    """What is searched; the same for all proposals of a study."""

    space: Space
    goals: tuple[Goal, ...] = ("min",)  # of the objective, then of the further ones
    seed: int = 1
    num_trials: int = 100
    epochs: int = 10  # of the study's training

    @property
    def goal(self) -> Goal:
        return self.goals[0]


@dataclass(frozen=True)
class Proposal:
    """A trial to be run."""

    point: Point
    settings: Mapping[str, Plain] = field(default_factory=dict)  # other values that it replaces
    parent: int | None = None  # the trial from whose last state its folds go on
    tags: Mapping[str, int] = field(default_factory=dict)  # the method's own: rung, generation, ...
    number: int | None = None  # of the trial; the driver gives it

    @property
    def is_new(self) -> bool:
        """Whether its point is the search's free choice, not that of a trial that it promotes."""
        return self.parent is None and "promoted_from" not in self.tags


@dataclass(frozen=True)
class Observation:
    """A trial that ended. Of another study (a warm start) it has neither number nor tags."""

    proposal: Proposal
    value: float | None  # mean figure of merit over the folds; None or not finite = it failed
    noise: float | None = None  # the standard error of that mean; None = not known
    further: tuple[float, ...] = ()  # of the further objectives, means over the folds
    cost: float | None = None  # what it took, in rank-seconds

    @property
    def point(self) -> Point:
        return self.proposal.point


class Search(ABC):
    """Proposes the trials of a study."""

    name: ClassVar[str]
    knows: ClassVar[Mapping[str, type]] = {}  # its options and their types
    continues: bool = False  # whether its proposals may have a parent
    gives_budgets: ClassVar[bool] = False  # its options say how far a trial with its tags trains

    def __init__(self, problem: Problem, options: Mapping[str, Any]) -> None:
        """
        Raises:
            N3LOError: an option is unknown or of the wrong type, or the method cannot do this.
        """
        self.problem = problem
        self.space = problem.space
        self.options = {name: self._checked(name, value) for name, value in options.items()}

    def propose(
        self,
        history: Sequence[Observation],
        pending: Sequence[Proposal],
        num: int,
        rng: np.random.Generator,
    ) -> list[Proposal]:
        """Up to `num` new proposals. Depends on the arguments only.

        Fewer, or none, while trials are pending means "ask again when one has ended"; none with
        nothing pending means that there is no more to propose.

        Args:
            history: the trials that ended, by number.
            pending: the trials that have not.
        """
        proposals: list[Proposal] = []
        for _ in range(num):
            proposal = self._next(history, [*pending, *proposals], rng)
            if proposal is None:
                break
            proposals.append(proposal)
        return proposals

    @abstractmethod
    def _next(
        self,
        history: Sequence[Observation],
        pending: Sequence[Proposal],
        rng: np.random.Generator,
    ) -> Proposal | None:
        """One proposal; None if there is none now."""

    def recommend(self, history: Sequence[Observation]) -> Observation | None:
        """The trial to take in the end; None if none succeeded."""
        best = min(history, key=self.cost, default=None)
        return best if best is not None and math.isfinite(self.cost(best)) else None

    def cost(self, seen: Observation) -> float:
        """The observed value such that less is better; inf if the trial failed."""
        if seen.value is None or not math.isfinite(seen.value):
            return math.inf
        return seen.value if self.problem.goal == "min" else -seen.value

    def option(
        self,
        name: str,
        default: Any,
        *,
        low: float = -math.inf,
        high: float = math.inf,
        among: Collection[str] = (),
    ) -> Any:
        """An option's value.

        Raises:
            N3LOError: it is not in [low, high], or none of the words in `among`.
        """
        value = self.options.get(name, default)
        if among and value not in among:
            raise N3LOError(
                f"search.options.{name}: unknown {name} '{value}'; there are: "
                f"{', '.join(among)}{_did_you_mean(value, among)}"
            )
        if isinstance(value, int | float) and not low <= value <= high:
            wanted = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            raise N3LOError(f"search.options.{name}: {value} is not {wanted}")
        return value

    def _checked(self, option: str, value: Any) -> Any:
        if option not in self.knows:
            raise N3LOError(
                f"search.options: unknown option '{option}' of '{self.name}'; it knows: "
                f"{', '.join(self.knows) or 'none'}{_did_you_mean(option, self.knows)}"
            )
        kind = self.knows[option]
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise N3LOError(f"search.options.{option}: {value!r} is not of type {kind.__name__}")
        return value


class PointSearch(Search):
    """A method whose trials are points and no more: no point twice, no budget, no parent."""

    _warned = False

    def _next(
        self,
        history: Sequence[Observation],
        pending: Sequence[Proposal],
        rng: np.random.Generator,
    ) -> Proposal | None:
        # Rows from before the study's space was narrowed say nothing about this one.
        history = [seen for seen in history if self.space.contains(seen.point)]
        busy = [each.point for each in pending if self.space.contains(each.point)]
        taken = {self.space.identity(point) for point in [*busy, *(o.point for o in history)]}
        point = self._safely(history, busy, taken, rng)
        return None if point is None else Proposal(point)

    def _safely(
        self,
        history: Sequence[Observation],
        pending: Sequence[Point],
        taken: Set[str],
        rng: np.random.Generator,
    ) -> Point | None:
        """What `_point` gives, or a random one if it raises: an engine's fault ends no study."""
        try:
            return self._point(history, pending, taken, rng)
        except Exception as error:  # noqa: BLE001  libraries raise what they like
            if not self._warned:
                logger.warning(
                    "the %s search failed after %d trials; a random point instead: %s: %s",
                    self.name,
                    len(history),
                    type(error).__name__,
                    " ".join(str(error).split()),
                )
            self._warned = True
            return next(iter(draw(self.space, taken, rng)), None)

    @abstractmethod
    def _point(
        self,
        history: Sequence[Observation],
        pending: Sequence[Point],
        taken: Set[str],
        rng: np.random.Generator,
    ) -> Point | None:
        """One point of the space whose identity is not in `taken`; None if there is none."""


def _did_you_mean(word: str, known: Collection[str]) -> str:
    """The end of a line about a word that is not known; the case of letters does not matter."""
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f"; did you mean '{by_lower[near[0]]}'?" if near else ""


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
    if space.size <= NUM_LISTED:  # nearly exhausted: look for what is left instead of guessing
        left = [p for p in space.points() if space.identity(p) not in taken | fresh.keys()]
        fresh |= {space.identity(left[i]): left[i] for i in rng.permutation(len(left))}
    return list(fresh.values())[:num]
