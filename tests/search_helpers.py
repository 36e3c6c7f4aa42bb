"""A study without trainings: what the tests of single search methods run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from workflow.search import Observation, Proposal, Search

Check = Callable[[list[Observation], list[Proposal], Proposal], None]


def rng_of(trial: int, seed: int = 1) -> np.random.Generator:
    """As the driver makes it: fresh for every trial."""
    return np.random.default_rng([seed, trial])


def run_study(
    search: Search,
    value: Callable[[Proposal], float | None],
    parallel: int,
    seed: int = 1,
    num: int | None = None,
    check: Check | None = None,
) -> list[Observation]:
    """Trials, `parallel` at a time, that end in a random order; by number.

    Args:
        num: of trials at most; by default the problem's.
        check: is given history, pending and the new proposal, each time.
    """
    order = np.random.default_rng(seed)
    pending: list[Proposal] = []
    ended: dict[int, Observation] = {}
    number, most = 0, search.problem.num_trials if num is None else num
    while True:
        history = [ended[n] for n in sorted(ended)]
        while len(pending) < parallel and number < most:
            answer = search.propose(history, pending, 1, rng_of(number, seed))
            if not answer:
                break
            if check is not None:
                check(history, pending, answer[0])
            pending.append(replace(answer[0], number=number))
            number += 1
        if not pending:
            return history
        proposal = pending.pop(int(order.integers(len(pending))))
        assert proposal.number is not None
        ended[proposal.number] = Observation(proposal, value(proposal))
