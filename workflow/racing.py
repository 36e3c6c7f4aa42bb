"""Fold racing: a trial whose first folds make it hopeless is not trained on the others."""

from __future__ import annotations

from workflow.ledger import Ledger
from workflow.study import Racing


def hopeless(trial: int, ledger: Ledger, racing: Racing) -> str | None:
    """Why the trial's other folds need not be trained; None if they should be.

    The test is `FoldModel.chance`, against the best trial that has all folds: paired, on the folds
    that both have.
    """
    state = ledger.trials_by_number[trial]
    if any(task.status == "failed" for task in state.tasks.values()):
        return "a fold failed"
    seen = [fom for fom in state.foms() if fom is not None]
    best = _best(ledger)
    if best is None or len(seen) < racing.min_folds:
        return None
    foms, its = state.foms(), ledger.trials_by_number[best].foms()
    chance = ledger.fold_model().chance(foms, its, ledger.scoring.objective.goal)
    if chance >= racing.alpha:
        return None
    return f"after {len(seen)} of {len(foms)} folds its chance to beat t{best:03d} is {chance:.2g}"


def _best(ledger: Ledger) -> int | None:
    """The number of the best trial that has all folds."""
    scoring = ledger.scoring
    sign = 1 if scoring.objective.goal == "min" else -1
    done = [n for n, trial in ledger.trials_by_number.items() if trial.status == "done"]
    return min(
        done,
        key=lambda n: sign * scoring.score(ledger.trials_by_number[n].facts("fom")),
        default=None,
    )
