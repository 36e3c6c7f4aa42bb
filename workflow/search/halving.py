"""Successive halving: many trials begin small, and only the best of them go on to a full training.

Asynchronous, so that no trial waits for the slowest of its rung: ASHA (Li et al. 2020,
arXiv:1810.05934, Algorithm 2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from apps.contract import N3LOError
from workflow.search import create
from workflow.search.base import Observation, Problem, Proposal, Search

PROPOSERS = ("bayesian", "random", "sobol")
RESOURCES = {"epochs": "training.epochs", "data": "data.train_fraction"}


class HalvingSearch(Search):
    """Asynchronous successive halving, or Hyperband, over points that another method proposes.

    - Rung k trains `min_epochs` eta^k epochs, k = 0, 1, ..., as long as these are at most the
      study's training.epochs / sqrt(eta); the top rung K trains training.epochs.
    - A promotion is a trial of the same point on the next rung that goes on from the last state of
      the one it promotes. With `resource` = "data" the rungs differ in the fraction of the training
      events instead, eta^(k - K); a promotion trains anew, and its tag "promoted_from" tells of
      what.
    - From the top rung downwards, the best of the best n/eta of the n trials that ended on a rung
      is promoted, if it was not yet; where there is none a new point starts. Failed trials count in
      n and are never promoted; equals are ranked by their number.
    - `brackets` = 1 is ASHA. With more, asynchronous Hyperband: bracket s starts on rung s and
      promotes among its own trials; new points are dealt to the brackets in Hyperband's proportions
      (Li et al. 2018, arXiv:1603.06560), ceil((K + 1) eta^(K - s) / (K - s + 1)).
    - New points come from `proposer`, which is told of the highest rung where at least D + 2 trials
      have succeeded (BOHB: Falkner et al. 2018, arXiv:1807.01774), and of what failed below it. All
      other points count as pending there, so that none comes twice.

    Budget: promotions are trials too. With eta = 3 about 2/3 of the trials are new points: of 300
    on four rungs some 190, 67, 26 and 17. A new point starts only while the budget could still
    carry it to the top; the last K trials promote the best of the highest rung, in its quota or
    not. And until one has succeeded at the top, as many trials are kept as it takes to bring the
    nearest there, waiting for it if need be. A promotion skips rungs where fewer trials are left
    than that. So a study whose last trial succeeds has one that was trained in full.

    Options:
        eta: 3 by default, at least 2.
        min_epochs: of the first rung; by default training.epochs / eta^3, at least 1.
        min_fraction: of the training events in the first rung where `resource` is "data", to the
            next power of eta; eta^-2 by default.
        brackets: 1 by default, at most K + 1.
        proposer: "bayesian", "random" or "sobol"; "bayesian" by default.
        resource: "epochs" or "data"; "epochs" by default.
    """

    name = "halving"
    gives_budgets = True
    knows: ClassVar[Mapping[str, type]] = {
        "eta": int,
        "min_epochs": int,
        "min_fraction": float,
        "brackets": int,
        "proposer": str,
        "resource": str,
    }

    def __init__(self, problem: Problem, options: Mapping[str, Any]) -> None:
        super().__init__(problem, options)
        self.eta: int = self.option("eta", 3, low=2)
        self.proposer: str = self.option("proposer", PROPOSERS[0], among=PROPOSERS)
        self.resource: str = self.option("resource", "epochs", among=RESOURCES)
        self.path = RESOURCES[self.resource]
        self.continues = self.resource == "epochs"
        if self.path in self.space.dimensions:
            raise N3LOError(f"search.space: '{self.path}' cannot be searched: halving sets it")
        self.budgets = self._budgets()
        self.top = len(self.budgets) - 1
        self.brackets: int = self.option("brackets", 1, low=1, high=self.top + 1)

    def _budgets(self) -> list[int] | list[float]:
        """Of the rungs, rising: epochs, or fractions of the training events.

        Raises:
            N3LOError: an option is out of range or not of this resource.
        """
        foreign = "min_fraction" if self.resource == "epochs" else "min_epochs"
        if foreign in self.options:
            raise N3LOError(
                f"search.options.{foreign} has no meaning with resource = '{self.resource}'"
            )
        if self.resource == "data":
            least = self.option("min_fraction", self.eta**-2, low=1e-6, high=1.0)
            top = round(math.log(1 / least, self.eta))
            return [self.eta ** float(k - top) for k in range(top + 1)]
        epochs = self.problem.epochs
        first = max(1, epochs // self.eta**3)
        budgets = [self.option("min_epochs", first, low=1, high=epochs)]
        while budgets[-1] ** 2 * self.eta <= epochs**2:
            budgets.append(budgets[-1] * self.eta)
        return [*budgets[:-1], epochs]

    def _state(self, history: Sequence[Observation], pending: Sequence[Proposal]) -> State:
        num_known = sum(seen.proposal.number is not None for seen in history) + len(pending)
        # Rows without a rung are of a warm start; those from before the study's space was narrowed
        # say nothing about this one.
        ended = [
            seen
            for seen in history
            if "rung" in seen.proposal.tags and self.space.contains(seen.point)
        ]
        promoted = {_origin(each) for each in (*(seen.proposal for seen in ended), *pending)}
        finite = [seen for seen in ended if math.isfinite(self.cost(seen))]
        return State(
            ended=ended,
            climbing=[
                seen
                for seen in finite
                if _rung(seen.proposal) < self.top and seen.proposal.number not in promoted
            ],
            pending=pending,
            num_left=self.problem.num_trials - num_known,
            is_reached=any(_rung(seen.proposal) == self.top for seen in finite),
        )

    def _next(
        self,
        history: Sequence[Observation],
        pending: Sequence[Proposal],
        rng: np.random.Generator,
    ) -> Proposal | None:
        """The next trial; None to wait for a pending one or, with none pending, at the end."""
        state = self._state(history, pending)
        if state.num_left < 1:
            return None
        if state.num_left <= self._num_kept(state):
            return self._last(history, state, rng)
        best = self._best_in_quota(state)
        if best is not None:
            return self._promotion(best, _rung(best.proposal) + 1)
        bracket = self._bracket(state)
        if state.num_left <= self.top - bracket:
            return self._last(history, state, rng)
        new = self._new(history, state, bracket, rng)
        if new is None and not state.is_reached and not state.pending:  # the space is exhausted
            return self._last(history, state, rng)
        return new

    def _num_kept(self, state: State) -> int:
        """How many trials it takes to bring one to the top; none once one has succeeded there."""
        known = [*(seen.proposal for seen in state.climbing), *state.pending]
        highest = max(map(_rung, known), default=-1)
        return 0 if state.is_reached else max(1, self.top - highest)

    def _best_in_quota(self, state: State) -> Observation | None:
        """What ASHA promotes, from the highest rung that has any."""
        climbing = {seen.proposal.number for seen in state.climbing}
        for rung in reversed(range(self.top)):
            found = []
            for bracket in range(rung + 1):
                ended = [seen for seen in state.ended if _place(seen) == (rung, bracket)]
                quota = self._ranked(ended)[: len(ended) // self.eta]
                found += [seen for seen in quota if seen.proposal.number in climbing]
            if found:
                return self._ranked(found)[0]
        return None

    def _bracket(self, state: State) -> int:
        """Of a new point: the one that lags most behind its share."""
        known = [*(seen.proposal for seen in state.ended), *state.pending]
        new = [each.tags.get("bracket") for each in known if _origin(each) is None]

        def lag(bracket: int) -> float:
            above = self.top - bracket
            share: int = math.ceil((self.top + 1) * self.eta**above / (above + 1))
            return share / (new.count(bracket) + 1)

        return max(range(self.brackets), key=lag)  # the first of equals

    def _last(
        self, history: Sequence[Observation], state: State, rng: np.random.Generator
    ) -> Proposal | None:
        """The best of the highest rung, or a wait for what may be better; see "Budget" above."""
        ahead = max(
            (r for r in map(_rung, state.pending) if r < self.top or not state.is_reached),
            default=-1,
        )
        # Skipping rungs, if no more trials are left than it takes to reach the top.
        target = self.top - state.num_left + 1
        if not state.climbing:
            return None if state.pending else self._new(history, state, max(0, target), rng)
        highest = max(_rung(seen.proposal) for seen in state.climbing)
        if ahead >= highest and state.num_left <= max(1, self.top - ahead):
            return None
        best = self._ranked([s for s in state.climbing if _rung(s.proposal) == highest])[0]
        return self._promotion(best, max(highest + 1, target))

    def _ranked(self, seen: Sequence[Observation]) -> list[Observation]:
        """The best first; of equals the first of the study."""
        return sorted(seen, key=lambda each: (self.cost(each), each.proposal.number))

    def _promotion(self, seen: Observation, rung: int) -> Proposal:
        number = seen.proposal.number
        assert number is not None
        tags = {"rung": rung, "bracket": seen.proposal.tags["bracket"]}
        settings = {self.path: self.budgets[rung]}
        if self.resource == "data":
            return Proposal(seen.point, settings, tags=tags | {"promoted_from": number})
        return Proposal(seen.point, settings, parent=number, tags=tags)

    def _new(
        self, history: Sequence[Observation], state: State, rung: int, rng: np.random.Generator
    ) -> Proposal | None:
        """A new point on that rung, its bracket's first; None if the space is exhausted."""
        told = self._told(history)
        known = [*(seen.point for seen in history), *(each.point for each in state.pending)]
        taken = {self.space.identity(p): Proposal(p) for p in known if self.space.contains(p)}
        for seen in told:
            taken.pop(self.space.identity(seen.point), None)
        plain = [replace(seen, proposal=Proposal(seen.point)) for seen in told]
        answer = self._points.propose(plain, list(taken.values()), 1, rng)
        if not answer:
            return None
        tags = {"rung": rung, "bracket": rung}
        return Proposal(answer[0].point, {self.path: self.budgets[rung]}, tags=tags)

    def _told(self, history: Sequence[Observation]) -> list[Observation]:
        """What new points are proposed from: the highest rung that has enough to learn from."""
        known = [
            (o.proposal.tags.get("rung", self.top), math.isfinite(self.cost(o)), o)
            for o in history
            if self.space.contains(o.point)
        ]  # a warm start's trials were trained in full
        for rung in reversed(range(self.top + 1)):
            num_finite = sum(its == rung and is_finite for its, is_finite, _ in known)
            if num_finite >= len(self.space.dimensions) + 2:
                return [o for its, ok, o in known if its == rung or (its < rung and not ok)]
        return []

    @cached_property
    def _points(self) -> Search:
        return create(self.proposer, self.problem, {})


@dataclass(frozen=True)
class State:
    """Where a study stands."""

    ended: Sequence[Observation]  # on any rung
    climbing: Sequence[Observation]  # those that can be promoted: they succeeded and were not yet
    pending: Sequence[Proposal]
    num_left: int  # trials of the budget
    is_reached: bool  # a trial has succeeded on the top rung


def _rung(proposal: Proposal) -> int:
    return proposal.tags.get("rung", 0)


def _place(seen: Observation) -> tuple[int, int]:
    return _rung(seen.proposal), seen.proposal.tags.get("bracket", 0)


def _origin(proposal: Proposal) -> int | None:
    """The trial that it promotes; None for a new point."""
    return proposal.tags.get("promoted_from", proposal.parent)
