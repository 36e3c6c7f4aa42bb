"""The trials as the figures of the search show them: their scores, and what the mouse reads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from workflow import tables
from workflow.console import score_text, short_names, value_text
from workflow.figures.style import escaped
from workflow.surrogate import todays_points
from workflow.view import View

MOST_LINES = 12  # of a point, where the mouse is


def ended(view: View) -> pd.DataFrame:
    """One row a trial, in the order in which they ended: trial, kind, score, spread, best, text.

    kind: done, less (done with less than the largest budget), dropped (its score is the mean as
    far as its folds tell it), failed (a score that is not finite, too). best: the best score so
    far of those that are done; NaN before the first. Trials outside of the space are left out.
    """
    trials = view.ledger.trials_by_number
    ends = view.tasks.groupby("trial")["ended"].max().dropna().sort_values(kind="stable")
    numbers = [int(n) for n in ends.index if trials[int(n)].is_ended and not trials[int(n)].aside]
    rows = view.trials.set_index("trial").loc[numbers, ["status", "score", "spread"]]
    kinds = rows["status"].to_numpy(dtype=object, copy=True)
    scores = rows["score"].to_numpy(dtype=float, copy=True)
    is_dropped = kinds == "dropped"
    if is_dropped.any():
        known = {each.proposal.number: each.value for each in view.ledger.known()[0]}
        scores[is_dropped] = [known[n] for n, at in zip(numbers, is_dropped, strict=True) if at]
    scores[~np.isfinite(scores)] = math.nan
    in_full = np.isin(np.array(numbers, dtype=int), view.ledger.compared())
    kinds[(kinds == "done") & ~in_full] = "less"
    kinds[np.isnan(scores)] = "failed"
    better = np.fmin if view.goal == "min" else np.fmax
    best = better.accumulate(np.where(kinds == "done", scores, math.nan)) if numbers else scores
    spreads = rows["spread"].to_numpy(dtype=float)
    return pd.DataFrame(
        {
            "trial": numbers,
            "kind": kinds,
            "score": scores,
            "spread": spreads,
            "best": best,
            "text": _with_points(view, numbers, _said(view, numbers, scores, spreads)),
        }
    )


def scored(view: View) -> pd.DataFrame:
    """One row a trial of largest budget with a score, by number: trial, score, spread, text, point.

    The point is as today's space has it; trials outside of it are left out.
    """
    points = todays_points(view)
    trials = view.best_first[["trial", "score", "spread"]].sort_values("trial")
    rows: pd.DataFrame = trials[trials["trial"].isin(list(points))].reset_index(drop=True)
    numbers = [int(number) for number in rows["trial"]]
    scores, spreads = (rows[name].to_numpy(dtype=float) for name in ("score", "spread"))
    rows["text"] = _said(view, numbers, scores, spreads)
    rows["point"] = pd.Series([points[number] for number in numbers], dtype=object)
    return rows


def best_of(rows: pd.DataFrame, goal: str) -> pd.Series[Any]:
    """The row with the best score; of several the first."""
    scores = rows["score"].to_numpy(dtype=float)
    row: pd.Series[Any] = rows.iloc[int(np.argmin(scores if goal == "min" else -scores))]
    return row


def _with_points(view: View, numbers: list[int], texts: list[str]) -> list[str]:
    return [
        f"{text}<br>{point}" for text, point in zip(texts, point_texts(view, numbers), strict=True)
    ]


def _said(view: View, numbers: list[int], scores: np.ndarray, spreads: np.ndarray) -> list[str]:
    """What became of each trial."""
    trials = view.ledger.trials_by_number
    texts = []
    for number, score, spread in zip(numbers, scores, spreads, strict=True):
        if trials[number].status == "failed":
            reasons = {task.reason for task in trials[number].tasks.values() if task.reason}
            said = f"failed: {', '.join(sorted(reasons))}"
        elif math.isnan(score):
            said = "its score is not finite"
        else:
            said = f"{view.metric} {score_text(score, spread)}"
        texts.append(f"<b>t{number:03d}</b> {escaped(said)}")
    return texts


def point_texts(view: View, numbers: list[int]) -> list[str]:
    """The values of each trial, one a line."""
    trials = view.ledger.trials_by_number
    paths = tables.parameters(trials)
    names = dict(zip(paths, short_names(paths), strict=True))
    texts = []
    for number in numbers:
        point = trials[number].point
        lines = [f"{names[p]} = {value_text(v)}" for p, v in list(point.items())[:MOST_LINES]]
        more = ["…"] if len(point) > MOST_LINES else []
        texts.append("<br>".join([*map(escaped, lines), *more]))
    return texts
