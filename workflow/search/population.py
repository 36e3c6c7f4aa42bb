"""Population-based training: settings of a training are changed while it runs, by its success.

What comes out is a schedule and the network trained with it (Jaderberg et al. 2017,
arXiv:1711.09846).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from apps.contract import N3LOError, canonical_json
from workflow.search.base import Observation, Problem, Proposal, Search, draw
from workflow.search.sobol import sobol_point
from workflow.space import Choice, Dimension, Integer, Point, Real, Scalar

TUNED = "training."
EPOCHS = "training.epochs"
FACTORS = (0.8, 1.2)  # of a number in a perturbation, as in the paper
NUM_TRIES = 50  # perturbations that are illegal or known before the member leaves it


class PopulationSearch(Search):
    """Population-based training with truncation selection, asynchronous.

    - A member is a chain of `steps` trials. Each goes on from the last state of another; with the
      last one a network has been trained for the study's training.epochs.
    - When a member's trial ends, its next step starts; nothing waits for the others. Those whose
      trial ended first, by number, come first.
    - Exploit: the latest ended trials of all members are ranked, whatever their steps. A member in
      the worst `quantile` goes on from the latest trial of a random one in the best; a failed trial
      has the worst rank and is always replaced. All others go on as they are.
    - Explore: a member that was replaced then changes the values of its dimensions "training.*":
      each is drawn afresh with `resample_probability`, else a number is multiplied by 0.8 or 1.2,
      an integer by one at least, an ordinal goes to a neighbour, and a choice stays. Values are
      kept in their range.
    - Dimensions of "model.", "layout." and "data." are those of the network and come with its
      weights. They differ between members as they were drawn, and are selected but not changed.
    - Steps share the epochs evenly. A member that copied a network ahead of its own has shorter
      ones from then on, and does not copy one that would leave no epoch for a step, so that all end
      with training.epochs.
    - The first trials are of a Sobol sequence. A member that failed starts anew at a random point
      while there is nothing to copy.

    It takes `population` x `steps` trials, of which search.num_trials must have room.

    Options:
        population: 8 by default, at least 4.
        steps: 5 by default, at least 2 and at most training.epochs.
        quantile: 0.25 by default, at most 0.5; of `population` it must be one member or more.
        resample_probability: 0.25 by default.
    """

    name = "population"
    continues = True
    gives_budgets = True
    knows: ClassVar[Mapping[str, type]] = {
        "population": int,
        "steps": int,
        "quantile": float,
        "resample_probability": float,
    }

    def __init__(self, problem: Problem, options: Mapping[str, Any]) -> None:
        super().__init__(problem, options)
        self.population: int = self.option("population", 8, low=4)
        self.steps: int = self.option("steps", 5, low=2)
        self.quantile: float = self.option("quantile", 0.25, low=0.0, high=0.5)
        self.resample: float = self.option("resample_probability", 0.25, low=0.0, high=1.0)
        self.tuned = [path for path in self.space.dimensions if path.startswith(TUNED)]
        self._check()

    def _check(self) -> None:
        """
        Raises:
            N3LOError: the study does not fit.
        """
        num_trials, needed = self.problem.num_trials, self.population * self.steps
        if EPOCHS in self.space.dimensions:
            raise N3LOError(f"search.space: '{EPOCHS}' cannot be searched: population sets it")
        if not self.tuned:
            raise N3LOError(
                "search.space: population changes values of 'training.*' while it trains, and none "
                "is searched; with another method there need not be any"
            )
        if num_trials < needed:
            raise N3LOError(
                f"search.num_trials = {num_trials} is less than population x steps = "
                f"{self.population} x {self.steps} = {needed}"
            )
        if self.steps > self.problem.epochs:
            raise N3LOError(
                f"search.options.steps: {self.steps} is more than training.epochs = "
                f"{self.problem.epochs}"
            )
        if self._num_replaced(self.population) < 1:
            raise N3LOError(
                f"search.options.quantile: quantile x population = {self.quantile} x "
                f"{self.population} is less than one member"
            )

    def _num_replaced(self, num_members: int) -> int:
        return math.floor(self.quantile * num_members + 1e-9)

    def _next(
        self,
        history: Sequence[Observation],
        pending: Sequence[Proposal],
        rng: np.random.Generator,
    ) -> Proposal | None:
        # Rows from before the study's space was narrowed say nothing about this one, nor do those
        # of a warm start about what a member does.
        ended = [seen for seen in history if "member" in seen.proposal.tags]
        ended = [seen for seen in ended if self.space.contains(seen.point)]
        known = [*(seen.proposal for seen in ended), *pending]
        born = {proposal.tags.get("member") for proposal in known}
        unborn = next((m for m in range(self.population) if m not in born), None)
        if unborn is not None:
            taken = self._points(known)
            point = sobol_point(self.space, self.problem.seed, unborn, taken, rng)
            if point is not None:  # else there are fewer points than members
                return self._trial(point, None, unborn, step=0)
        busy = {proposal.tags.get("member") for proposal in pending}
        latest = latest_trials(ended)
        for seen in sorted(latest, key=_number):
            tags = seen.proposal.tags
            if tags["member"] not in busy and tags["step"] + 1 < self.steps:
                proposal = self._step(seen, ended, known, rng)
                if proposal is not None:
                    return proposal
        return None

    def _step(
        self,
        seen: Observation,
        ended: Sequence[Observation],
        known: Sequence[Proposal],
        rng: np.random.Generator,
    ) -> Proposal | None:
        """What a member does after `seen`, its latest; None if it failed and nothing is left."""
        member, step = seen.proposal.tags["member"], seen.proposal.tags["step"] + 1
        has_failed = math.isinf(self.cost(seen))
        ranked = self._ranked(latest_trials(ended))
        num = self._num_replaced(len(ranked))
        if not has_failed and seen not in ranked[len(ranked) - num :]:
            return self._trial(seen.point, seen.proposal, member, step)

        best = [ranked[i] for i in rng.permutation(max(1, num))]
        others = self._ranked(ended) if has_failed else []
        for model in [*best, *others]:
            if math.isfinite(self.cost(model)) and self._has_room(model.proposal, step):
                for _ in range(NUM_TRIES):
                    point = self._explored(model.point, rng)
                    proposal = self._trial(point, model.proposal, member, step)
                    if self._is_new(proposal, model.point, known):
                        return proposal
        if not has_failed:
            return self._trial(seen.point, seen.proposal, member, step)
        fresh = draw(self.space, self._points(known), rng)
        return self._trial(fresh[0], None, member, step) if fresh else None

    def _trial(self, point: Point, parent: Proposal | None, member: int, step: int) -> Proposal:
        """Its share of the epochs that are left, in the steps that are left."""
        trained = 0 if parent is None else epochs_of(parent)
        epochs = trained + round((self.problem.epochs - trained) / (self.steps - step))
        number = None if parent is None else parent.number
        return Proposal(point, {EPOCHS: epochs}, number, {"member": member, "step": step})

    def _has_room(self, parent: Proposal, step: int) -> bool:
        """Whether each step that is left has an epoch."""
        return self.problem.epochs - epochs_of(parent) >= self.steps - step

    def _explored(self, point: Point, rng: np.random.Generator) -> Point:
        """Other values of what is tuned; what its conditions bring in is drawn."""
        values = self._fixed(point)
        for path in self.tuned:
            if path in point and rng.random() >= self.resample:
                values[path] = perturbed(self.space.dimensions[path], point[path], rng)
        return self.space.fill(values, rng)

    def _is_new(self, proposal: Proposal, of: Point, known: Sequence[Proposal]) -> bool:
        """Whether it is another legal training of the same network, and no trial yet."""
        is_other = proposal.point != of and self._fixed(proposal.point) == self._fixed(of)
        keys = (_key(each) for each in known if each.parent == proposal.parent)
        return is_other and self.space.contains(proposal.point) and _key(proposal) not in keys

    def _fixed(self, point: Point) -> Point:
        return {path: value for path, value in point.items() if path not in self.tuned}

    def _points(self, known: Sequence[Proposal]) -> set[str]:
        points = [proposal.point for proposal in known if self.space.contains(proposal.point)]
        return {self.space.identity(point) for point in points}

    def _ranked(self, seen: Sequence[Observation]) -> list[Observation]:
        """The best first; of equals the first of the study."""
        return sorted(seen, key=lambda each: (self.cost(each), _number(each)))


def latest_trials(ended: Sequence[Observation]) -> list[Observation]:
    """Of each member the last step that has ended."""
    latest: dict[int, Observation] = {}
    for seen in ended:
        tags = seen.proposal.tags
        held = latest.get(tags["member"])
        if held is None or held.proposal.tags["step"] < tags["step"]:
            latest[tags["member"]] = seen
    return list(latest.values())


def perturbed(dimension: Dimension, value: Scalar, rng: np.random.Generator) -> Scalar:
    """The value a little changed, in the dimension's range; a choice has no little change."""
    up = bool(rng.random() < 0.5)
    if isinstance(dimension, Choice):
        return value
    if isinstance(dimension, Real):
        return dimension.clip(float(value) * FACTORS[up])
    if isinstance(dimension, Integer):
        moved = round(float(value) * FACTORS[up])
        return dimension.clip(moved if moved != value else int(value) + (1 if up else -1))
    levels = dimension.levels()
    at = dimension.index(value) + (1 if up else -1)
    return levels[min(max(at, 0), len(levels) - 1)]


def epochs_of(proposal: Proposal) -> int:
    epochs: int = proposal.settings[EPOCHS]
    return epochs


def _number(seen: Observation) -> int:
    number = seen.proposal.number
    assert number is not None
    return number


def _key(proposal: Proposal) -> str:
    return canonical_json([proposal.point, dict(proposal.settings)])
