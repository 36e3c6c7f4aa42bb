"""Run folders of a few trials whose points and scores are told, for tests of looking."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workflow.view import View

BEGIN = 1_790_000_000.0  # Unix seconds

_STUDY = """\
name = "told"

[model]
source = "no_such_model.py:Net"
args = {{ a = 0.5, b = 0.5, kind = "x" }}

[data]
files = ["no_such_file.h5"]
inputs = "x"
targets = "y"
folds = {num_folds}

[training]
epochs = 9
metrics = ["accuracy"]
optimizer = {{ name = "adam", lr = 1e-3 }}

[search]
method = "random"
objective = {{ metric = "{metric}", goal = "{goal}" }}
num_trials = 100
constraints = {constraints}

[search.space]
{space}
"""
REAL = '"model.args.a" = { type = "real", low = 0.0, high = 1.0 }\n'
TWO = REAL + '"model.args.b" = { type = "real", low = 0.01, high = 1.0, log = true }\n'
# Of values of several types, with a dimension of one of them alone.
MIXED = (
    '"model.args.kind" = { type = "choice", values = ["x", 1, 1.5, true] }\n'
    '"model.args.b" = { type = "real", low = 0.0, high = 1.0, '
    'when = { "model.args.kind" = ["x"] } }\n' + REAL
)


@dataclass(frozen=True, kw_only=True)
class Told:
    """A trial: its values by the last part of their path, and its folds' figures of merit."""

    point: dict[str, Any]
    foms: Sequence[float] = (0.5, 0.5)
    status: str = "done"  # or failed, running, dropped (but for the first fold)
    seconds: float = 1.0  # another objective
    settings: dict[str, Any] = field(default_factory=dict)
    parent: int | None = None


def write_run(
    folder: Path,
    trials: Sequence[Told],
    space: str = REAL,
    *,
    goal: str = "min",
    further: Sequence[str] = (),
    constraints: Sequence[str] = (),
) -> View:
    """Write a run folder, and look at it. Its trials end in the order in which they are told."""
    folder.mkdir(parents=True)
    num_folds = max((len(trial.foms) for trial in trials), default=2)
    metric = "val_loss" if goal == "min" else "val_accuracy"
    text = _STUDY.format(
        num_folds=num_folds,
        metric=metric,
        goal=goal,
        space=space,
        constraints=json.dumps(list(constraints)),
    )
    (folder / "study.toml").write_text(text)
    scoring = {
        "objective": {"metric": metric, "goal": goal},
        "spread_penalty": 0.0,
        "further": [{"metric": name, "goal": "min"} for name in further],
    }
    session = {
        **{"event": "session", "time": BEGIN, "fingerprint": {}, "scoring": scoring},
        **{"num_trials": 100, "node_share": 1.0, "num_slots": 1, "method": "random"},
    }
    rows = [session, *(row for number, trial in enumerate(trials) for row in _rows(number, trial))]
    (folder / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return View(folder)


def _rows(number: int, trial: Told) -> list[dict[str, Any]]:
    begin = BEGIN + 10 * number
    point = {f"model.args.{name}": value for name, value in trial.point.items()}
    rows: list[dict[str, Any]] = [
        {
            **{"event": "trial", "time": begin, "trial": number, "point": point},
            **{"num_folds": len(trial.foms), "settings": trial.settings, "parent": trial.parent},
        }
    ]
    if trial.status == "dropped":
        folds = list(range(1, len(trial.foms)))
        rows.append(
            {"event": "drop", "time": begin, "trial": number, "folds": folds, "message": "no"}
        )
    for fold, fom in enumerate(trial.foms):
        task = {"trial": number, "fold": fold, "key": f"{number}-{fold}"}
        rows.append({"event": "start", "time": begin, "attempt": 1, **task})
        end = {"event": "end", "time": begin + 5 + fold, "folder": f"t{number:03d}-f{fold}", **task}
        if trial.status == "running":
            continue
        if trial.status == "failed":
            rows.append({**end, "status": "failed", "reason": "diverged", "message": "loss is nan"})
            continue
        result = {
            **{"fom": fom, "metrics": {"loss": fom}, "seconds": trial.seconds},
            **{"epoch": 9, "epochs": 9, "num_ranks": 1, "num_parameters": 100 + number},
        }
        rows.append({**end, "status": "done", "cached": False, "result": result})
        if trial.status == "dropped":
            break
    return rows
