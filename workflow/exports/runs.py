"""The tasks as runs of an experiment tracker: parameters, and numbers that have a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from apps.contract import Plain
from workflow.ledger import Ledger, TaskState, TrialState
from workflow.runfolder import flat
from workflow.study import StudyFile

# Numbers of a result that say something of the whole training.
FACTS = (
    *("seconds", "samples_per_second", "inference_us", "num_parameters", "num_ranks"),
    *("compute_s", "communication_s", "data_s", "idle_s", "epochs"),
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One task that was started, or taken from the cache."""

    trial: int
    fold: int
    state: TaskState
    parameters: dict[str, Plain]  # of its layout, and its point
    rows: list[dict[str, float]]  # of its history, one an epoch

    @property
    def name(self) -> str:
        return f"t{self.trial:03d}-f{self.fold}"

    @property
    def begin(self) -> float:
        """When its training began, Unix seconds; all attempts count as one without a pause."""
        state = self.state
        if self.rows and math.isfinite(state.ended):
            return state.ended - self.rows[-1]["seconds"]
        return next(filter(math.isfinite, (state.begun, state.submitted, state.ended)))

    @property
    def end(self) -> float:
        """When it ended, or was last heard of, Unix seconds."""
        if math.isfinite(self.state.ended):
            return self.state.ended
        return self.time_of(self.rows[-1]) if self.rows else self.begin

    def time_of(self, row: dict[str, float]) -> float:
        """When an epoch ended, Unix seconds."""
        return self.begin + row["seconds"]


def runs(ledger: Ledger, file: StudyFile) -> Iterator[Run]:
    """In the order of trials and folds. What waits to be started, or was dropped, is none."""
    rows = _rows(ledger)
    layout = dict(flat(dataclasses.asdict(file.study.layout), "layout."))
    for number, trial in sorted(ledger.trials_by_number.items()):
        for fold, state in sorted(trial.tasks.items()):
            if math.isfinite(state.submitted) or math.isfinite(state.ended):
                yield Run(
                    trial=number,
                    fold=fold,
                    state=state,
                    parameters={**layout, **parameters(trial)},
                    rows=rows.get((number, fold), []),
                )


def parameters(trial: TrialState) -> dict[str, Plain]:
    """What a trial replaces in its study."""
    return {**trial.proposal.settings, **trial.point}


def _rows(ledger: Ledger) -> dict[tuple[int, int], list[dict[str, float]]]:
    """The histories by task, without what is missing."""
    found: dict[tuple[int, int], list[dict[str, float]]] = {}
    for row in ledger.history().to_dict("records"):
        task = int(row.pop("trial")), int(row.pop("fold"))
        numbers = {str(name): value for name, value in row.items() if pd.notna(value)}
        if {"epoch", "seconds"} <= numbers.keys():
            found.setdefault(task, []).append(numbers)
    return found
