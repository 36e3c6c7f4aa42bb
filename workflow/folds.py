"""What folds say about trials: their noise, a fair mean where folds are missing, who is hopeless.

All trials of a study are scored on the same folds, and one fold may be easier than another for all
of them: that is no noise in comparing trials. So the figure of merit of trial t on fold f is taken
as m_t + b_f + e_tf, a two-way layout without interaction (Montgomery 2017, Design and Analysis of
Experiments, sec. 4.1); b_f is the ease of a fold, and e_tf is what is left as noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# A variance from two or three folds is itself very uncertain: it counts as this many degrees of
# freedom of the typical variance (a moderated variance: Smyth 2004, Stat. Appl. Genet. Mol. Biol.).
PRIOR_DOF = 4.0

Scores = Sequence[float | None]  # (K,), in the order of folds; None = not there


@dataclass(frozen=True)
class FoldModel:
    """The folds of a study, from the trials that have all of them."""

    ease: tuple[float, ...]  # b_f of each fold; their mean is 0
    variance: float  # of e_tf in a typical trial; NaN = not known
    dof: int  # degrees of freedom behind it

    @classmethod
    def of(cls, scores: Mapping[int, Scores]) -> FoldModel:
        """From the scores by trial; those with a fold missing are left out."""
        complete = [row for row in scores.values() if None not in row]
        table = np.array(complete, dtype=float)
        table = table[np.isfinite(table).all(axis=1)] if len(table) else table
        if len(table) < 2 or table.shape[1] < 2:
            return cls((), math.nan, 0)
        num_trials, num_folds = table.shape
        centred = table - table.mean(axis=1, keepdims=True)
        # Medians: a trial that learned nothing is bad on all folds, and noisier than the others.
        ease = np.median(centred, axis=0)
        ease -= ease.mean()
        variances = _variances(centred - ease)
        typical = float(np.median(variances)) / _median_factor(num_folds - 1)
        return cls(tuple(ease.tolist()), typical, (num_trials - 1) * (num_folds - 1))

    def mean(self, scores: Scores) -> float:
        """The mean over all folds, as far as those that are there tell it; NaN without any."""
        there = self._compensated(scores)
        return float(there.mean()) if len(there) else math.nan

    def noise(self, scores: Scores) -> float | None:
        """The standard error of `mean`, against other trials; None if nothing is known of it."""
        there = self._compensated(scores)
        dof = len(there) - 1
        if dof < 0 or not np.isfinite(there).all():
            return None
        if math.isnan(self.variance):
            return float(np.std(there, ddof=1) / math.sqrt(len(there))) if dof > 0 else None
        own = float(np.sum((there - there.mean()) ** 2))
        variance = (PRIOR_DOF * self.variance + own) / (PRIOR_DOF + dof)
        return math.sqrt(variance / len(there))

    def chance(self, scores: Scores, best: Scores, goal: str = "min") -> float:
        """The probability that a trial will have a better mean than `best`, once it has all folds.

        The differences on the n shared folds are delta + e, with variance 2 s^2; with nothing
        assumed of delta, the mean difference over all K folds is then a Student t around the mean
        of those seen, of variance 2 s^2 (K - n) / (n K). 1 while s^2 is not known.

        Args:
            scores: of the trial, some missing.
            best: of the trial to beat, all there.
        """
        shared = [
            (value - other) * (1 if goal == "min" else -1)
            for value, other in zip(scores, best, strict=True)
            if value is not None and other is not None
        ]
        num, num_folds = len(shared), len(scores)
        if not shared or self.dof < 1 or math.isnan(self.variance):
            return 1.0
        difference = float(np.mean(shared))
        if num == num_folds or self.variance == 0:
            return float(difference < 0)
        width = math.sqrt(2 * self.variance * (num_folds - num) / (num * num_folds))
        from scipy.special import stdtr  # it takes 0.3 s, and few studies race

        return float(stdtr(self.dof, -difference / width))

    def _compensated(self, scores: Scores) -> np.ndarray:
        """The scores that are there, (n,), without the ease of their folds."""
        ease = self.ease or (0.0,) * len(scores)
        there = [v - e for v, e in zip(scores, ease, strict=True) if v is not None]
        return np.array(there, dtype=float)


def _variances(centred: np.ndarray) -> np.ndarray:
    """Variances over the last axis, of residuals whose mean has been taken away."""
    dof = centred.shape[-1] - 1
    result: np.ndarray = np.sum(centred**2, axis=-1) / dof
    return result


def _median_factor(dof: int) -> float:
    """The median of chi^2 / dof (Wilson and Hilferty's approximation)."""
    return (1 - 2 / (9 * dof)) ** 3
