"""The best trials: their table, the best against the second; and the headline facts of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from workflow import look, tables
from workflow.timeline import timeline
from workflow.view import View


def best_table(view: View, num: int = 10) -> pd.DataFrame:
    """The best trials, the best first.

    Returns:
        trial, score, spread, fold_0, fold_1, ..., which are the objective's metric on each fold,
        and the parameters by their dotted paths.
    """
    best = view.best_first.head(num).reset_index(drop=True)
    foms = _foms(view, best["trial"].tolist())
    parameters = tables.parameters(view.ledger.trials_by_number)
    return pd.concat([best[["trial", "score", "spread"]], foms, best[parameters]], axis=1)


def _foms(view: View, trials: Sequence[int]) -> pd.DataFrame:
    """The metric on each fold, one row a trial; NaN where there is none."""
    rows = [view.ledger.trials_by_number[trial].foms() for trial in trials]
    names = [f"fold_{fold}" for fold in range(max(map(len, rows), default=0))]
    return pd.DataFrame(
        [[*row, *[None] * (len(names) - len(row))] for row in rows], columns=names, dtype=float
    )


@dataclass(frozen=True)
class Comparison:
    """The best trial against the second, on the folds that both have."""

    best: int | None = None  # None: no trial has a score
    second: int | None = None  # None: no other has one
    num_trials: int = 0  # of which the best was picked: with a score, or dropped by racing
    kin: int = 0  # of these, which it goes on from, or which go on from it: compared with none
    folds: int = 0  # that both have
    difference: float = math.nan  # mean over folds; more than 0 where the best is better
    error: float = math.nan  # its standard error; NaN of one fold
    t: float = math.nan
    p: float = math.nan  # two-sided

    def __str__(self) -> str:
        if self.best is None:
            return "no trial has a score yet"
        if self.second is None:
            but = ", but for what it goes on from and what goes on from it" if self.kin else ""
            return f"t{self.best:03d} is the only trial with a score{but}"
        pair = f"t{self.best:03d}", f"t{self.second:03d}"
        if not self.folds:
            return f"{pair[0]} and {pair[1]} have no fold in common; {self._picked()}"
        folds = f"{self.folds} shared fold" + ("s" if self.folds > 1 else "")
        if self.difference == 0 and not self.error > 0:
            return f"{pair[0]} and {pair[1]} are equally good on {folds}"
        how = "better" if self.difference >= 0 else "worse on average"
        much = f"{abs(self.difference):.2g}"
        if math.isnan(self.error):
            return (
                f"{pair[0]} is {how} than {pair[1]} by {much} on {folds}, which does not tell "
                f"how much of it is chance; {self._picked()}"
            )
        return (
            f"{pair[0]} is {how} than {pair[1]} by {much} ± {self.error:.2g} on {folds} "
            f"({_p_text(self.p)}, corrected for shared training data; {self._picked()})"
        )

    def _picked(self) -> str:
        """The winner's curse, in words."""
        return f"the best of {self.num_trials} is flattered by having been picked"


def against_runner_up(view: View) -> Comparison:
    """How sure it is that the best trial is better than the second.

    The folds' training sets overlap, so that their differences are not independent: the variance of
    the mean is taken as s^2 (1/J + 1/(K - 1)) on J shared ones of K folds, where 1/(K - 1) is the
    ratio of test to training data (Nadeau and Bengio 2003, Machine Learning 52:239). It does not
    know that the best was picked afterwards. Trials that it goes on from, or that go on from it,
    share their training with it, and are passed over.
    """
    scored = view.best_first["trial"].tolist()
    if not scored:
        return Comparison()
    best, others = scored[0], [each for each in scored[1:] if not _are_kin(view, each, scored[0])]
    dropped = view.trials.loc[view.trials["status"] == "dropped", "trial"]
    picked = Comparison(
        best,
        num_trials=len(scored) + int(dropped.isin(view.ledger.compared()).sum()),
        kin=len(scored) - 1 - len(others),
    )
    if not others:
        return picked
    foms = _foms(view, [best, others[0]]).to_numpy()
    differences = (foms[1] - foms[0]) * (1 if view.goal == "min" else -1)
    shared = differences[np.isfinite(differences)]
    mean, error, t, p = corrected_t(shared, foms.shape[1])
    found = replace(picked, second=others[0], folds=len(shared))
    return replace(found, difference=mean, error=error, t=t, p=p)


def _are_kin(view: View, one: int, other: int) -> bool:
    """Whether one of two trials goes on from the other, if need be over several others."""
    return one in _line(view, other) or other in _line(view, one)


def _line(view: View, trial: int) -> list[int]:
    """A trial, and those that it goes on from."""
    line = [trial]
    while (parent := view.ledger.trials_by_number[line[-1]].proposal.parent) is not None:
        line.append(parent)
    return line


def corrected_t(differences: np.ndarray, num_folds: int) -> tuple[float, float, float, float]:
    """The mean of differences (J,) on folds, its standard error, t, and the two-sided p.

    See `against_runner_up`. Of one fold there is only the mean, of none not even that.
    """
    number = len(differences)
    mean = float(differences.mean()) if number else math.nan
    if number < 2:
        return mean, math.nan, math.nan, math.nan
    variance = float(differences.var(ddof=1))
    error = math.sqrt(variance * (1 / number + 1 / (num_folds - 1)))
    if error == 0:  # the same on all folds
        return mean, 0.0, math.copysign(math.inf, mean) if mean else 0.0, float(mean == 0)
    from scipy.special import stdtr  # it takes 0.3 s, and few look at this

    t = mean / error
    return mean, error, t, float(2 * stdtr(number - 1, -abs(t)))


def _p_text(p: float) -> str:
    return f"p = {p:.2g}" if p >= 0.001 else "p < 0.001"


def summary(view: View) -> dict[str, Any]:
    """The headline facts, as plain values; None where there is nothing yet."""
    utilisation = timeline(view).utilisation
    return {
        "name": view.name,
        "folder": str(view.folder),
        "metric": view.metric,
        "goal": view.goal,
        "running": view.is_running,
        "num_trials": view.num_trials,
        **look.headline(view.ledger, view.tasks, view.trials, view.best_first),
        "utilisation": None if math.isnan(utilisation) else utilisation,
        "site": view.ledger.sessions[-1].get("site"),
        "started": view.ledger.sessions[0]["time"],  # Unix seconds
    }
