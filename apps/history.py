"""What the history of a training decides: whether it goes on, and which epoch is kept.

Pure functions of the rows, one an epoch, so a training that goes on after a kill decides as if it
had never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from apps.contract import (
    EarlyStopping,
    Goal,
    N3LOError,
    Target,
    Training,
    TrainTask,
    goal_of,
    is_better,
)

Row = dict[str, Any]  # epoch, loss, val_loss, each metric and its val_, lr, seconds


class Diverged(Exception):
    """A loss or metric is no longer a finite number."""


def check_metric_names(task: TrainTask, there: Sequence[str]) -> None:
    """See that what the study decides by is measured.

    Args:
        there: all that is measured in training and, as val_..., in validation.
    """
    training = task.training
    asked = {"objective.metric": task.objective.metric}
    if training.early_stopping is not None:
        asked["training.early_stopping.metric"] = training.early_stopping.metric
    if training.target is not None:
        asked["training.target.metric"] = training.target.metric
    for key, name in asked.items():
        if name not in there:
            raise N3LOError(f"{key}: there is no '{name}', only {', '.join(there)}")


def check_finite(row: Row) -> None:
    for name, value in row.items():
        if not math.isfinite(value):
            shown = {"loss": "training loss", "val_loss": "validation loss"}.get(name, name)
            raise Diverged(f"{shown} became {value} in epoch {row['epoch']}")


def stop_reason(training: Training, rows: Sequence[Row]) -> str | None:
    """Why the training ends after the last of these epochs; None if it goes on.

    A task that goes on from another's state is judged by its own epochs alone.
    """
    if not rows:
        return None
    target, stopping = training.target, training.early_stopping
    if target is not None and _reaches(rows[-1][target.metric], target):
        return "target"
    if stopping is not None:
        values = [row[stopping.metric] for row in rows]
        best = _best(values, goal_in(stopping), stopping.min_delta)
        if len(rows) - 1 - best >= stopping.patience:
            return "early_stopping"
    if rows[-1]["epoch"] >= training.epochs:
        return "epochs"
    if training.max_minutes is not None and rows[-1]["seconds"] >= 60 * training.max_minutes:
        return "max_minutes"
    return None


def selected_row(task: TrainTask, rows: Sequence[Row]) -> Row:
    """The epoch whose weights and figure of merit are kept."""
    if task.training.select == "last":
        return rows[-1]
    objective = task.objective
    return rows[_best([row[objective.metric] for row in rows], objective.goal)]


def _best(values: Sequence[float], goal: str, min_delta: float = 0.0) -> int:
    """Position of the last value that beat the best one before it."""
    best = 0
    for position, value in enumerate(values):
        if is_better(value, values[best], goal, min_delta):
            best = position
    return best


def goal_in(watched: EarlyStopping | Target) -> Goal:
    """What is better of its metric; a study says so where the metric's name does not."""
    return watched.goal or goal_of(watched.metric) or "min"


def _reaches(value: float, target: Target) -> bool:
    return value >= target.value if goal_in(target) == "max" else value <= target.value
