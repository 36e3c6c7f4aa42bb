"""The rules by which a study ends before its budget of trials does."""

from __future__ import annotations

import math
from collections import Counter

from apps.contract import is_better
from workflow.ledger import Ledger, TrialState
from workflow.study import Stop


def reason_to_stop(stop: Stop, ledger: Ledger, node_share: float) -> str | None:
    """Why no more trials are to be proposed, in words; None if there is no reason.

    Args:
        node_share: the part of a node that one task occupies.
    """
    ended = [trial for _, trial in sorted(ledger.trials_by_number.items()) if _counts(trial)]
    return (
        _all_failed(stop, ended)
        or _good_enough(stop, ledger, ended)
        or _no_improvement(stop, ledger, ended)
        or _used_up(stop, ledger, node_share)
    )


def _counts(trial: TrialState) -> bool:
    return trial.is_ended and not trial.aside


def _all_failed(stop: Stop, ended: list[TrialState]) -> str | None:
    last = ended[-stop.failures :]
    if len(last) < stop.failures or any(trial.status != "failed" for trial in last):
        return None
    reasons = Counter(
        task.reason for trial in last for task in trial.tasks.values() if task.status == "failed"
    )
    said = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    return f"the last {len(last)} all failed ({said}); search.stop.failures = {stop.failures}"


def _scores(ledger: Ledger, ended: list[TrialState]) -> list[float]:
    """Of each trial that ended, NaN of those that have no score."""
    return [
        ledger.scoring.score(trial.facts("fom")) if trial.status == "done" else math.nan
        for trial in ended
    ]


def _good_enough(stop: Stop, ledger: Ledger, ended: list[TrialState]) -> str | None:
    if stop.value is None:
        return None
    goal = ledger.scoring.objective.goal
    for trial, score in zip(ended, _scores(ledger, ended), strict=True):
        if score == stop.value or is_better(score, stop.value, goal):
            number = trial.proposal.number
            return f"t{number:03d} has {score:.4g}; search.stop.value = {stop.value:g}"
    return None


def _no_improvement(stop: Stop, ledger: Ledger, ended: list[TrialState]) -> str | None:
    """Of trials with the largest budget: none of the others could be expected to be the best."""
    if stop.no_improvement is None:
        return None
    in_full = set(ledger.in_full())
    ended = [trial for trial in ended if trial.proposal.number in in_full]
    goal = ledger.scoring.objective.goal
    best, since = None, 0
    for score in _scores(ledger, ended):
        if not math.isnan(score) and is_better(score, best, goal):
            best, since = score, 0
        else:
            since += 1
    if since < stop.no_improvement:
        return None
    return f"none of the last {since} was the best; search.stop.no_improvement"


def _used_up(stop: Stop, ledger: Ledger, node_share: float) -> str | None:
    hours = ledger.hours()
    if stop.hours is not None and hours >= stop.hours:
        return f"{hours:.3g} hours have passed; search.stop.hours = {stop.hours:g}"
    used = node_hours(ledger, node_share)
    if stop.node_hours is not None and used >= stop.node_hours:
        return f"{used:.3g} node-hours are used; search.stop.node_hours = {stop.node_hours:g}"
    return None


def node_hours(ledger: Ledger, node_share: float) -> float:
    """Of all that was started here, also of what failed or was cut off."""
    trials = ledger.trials_by_number.values()
    seconds = sum(task.occupied_s for trial in trials for task in trial.tasks.values())
    return seconds * node_share / 3600
