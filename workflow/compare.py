"""Several runs beside each other: which came how far, and at what cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from apps.contract import N3LOError
from workflow.stop import node_hours
from workflow.view import View


@dataclass(frozen=True)
class Course:
    """How the best score of a run came down, or up, trial by trial in the order of their ends."""

    trials: np.ndarray  # (n,), how many had ended
    node_hours: np.ndarray  # (n,), used by then, by what had failed too
    best: np.ndarray  # (n,), NaN before the first score


def check_same_goal(views: Sequence[View]) -> None:
    """
    Raises:
        N3LOError: their scores are not of the same metric and goal.
    """
    first = views[0].ledger.scoring
    for view in views[1:]:
        if (other := view.ledger.scoring) != first:
            raise N3LOError(
                f"'{view.folder}' is scored by {other}, and '{views[0].folder}' by {first}; only "
                f"runs with the same can be compared"
            )


def labels(views: Sequence[View]) -> list[str]:
    """Their names; the folders of those that have the same."""
    names = Counter(view.name for view in views)
    return [view.name if names[view.name] == 1 else str(view.folder) for view in views]


def table(views: Sequence[View]) -> pd.DataFrame:
    """One row a run."""
    return pd.DataFrame([_row(name, view) for name, view in zip(labels(views), views, strict=True)])


def _row(name: str, view: View) -> dict[str, object]:
    best = view.best_first.head(1).to_dict("records")
    counts = Counter(view.trials["status"])
    method = view.ledger.sessions[-1].get("method", view.file.study.search.method)
    return {
        "run": name,
        "method": method,
        "trials": len(view.trials),
        "done": counts["done"],
        "failed": counts["failed"],
        "best": f"t{best[0]['trial']:03d}" if best else "-",
        "score": best[0]["score"] if best else np.nan,
        "spread": best[0]["spread"] if best else np.nan,
        "node_hours": node_hours(view.ledger, view.node_share),
        "hours": view.ledger.hours(),
    }


def course(view: View) -> Course:
    """Of trials of the largest budget; what others cost counts too."""
    tasks = view.tasks.dropna(subset=["ended"])
    used = view.ledger.trials_by_number
    ends = tasks.groupby("trial")["ended"].max().sort_values(kind="stable")
    ended = [int(number) for number in ends.index if used[int(number)].is_ended]
    scores = view.best_first.set_index("trial")["score"].to_dict()
    values = [scores.get(number, np.nan) for number in ended]
    seconds = [sum(task.occupied_s for task in used[number].tasks.values()) for number in ended]
    better = np.fmin if view.goal == "min" else np.fmax
    return Course(
        trials=np.arange(1, len(ended) + 1),
        node_hours=np.cumsum(seconds) * view.node_share / 3600,
        best=better.accumulate(np.array(values, dtype=float)) if values else np.empty(0),
    )
