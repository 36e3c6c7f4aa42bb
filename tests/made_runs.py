"""Run folders of any size, as a driver would have left them: for tests and benchmarks of looking.

The score has a formula (`true_score`), so that what a figure says of it can be checked.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workflow.space import Space
from workflow.study import load

BEGIN = 1_790_000_000.0  # Unix seconds
EPOCH_S = 2.0

_HEAD = """\
name = "{name}"

[model]
source = "no_such_model.py:Net"  # nobody who looks needs it
args = {{ {args} }}

[data]
files = ["no_such_file.h5"]
inputs = "x"
targets = "y"
folds = {num_folds}

[training]
epochs = {epochs}
metrics = ["accuracy"]
optimizer = {{ name = "adam", lr = 1e-3 }}

[search]
method = "random"
objective = {{ metric = "val_loss", goal = "min" }}
num_trials = {num_trials}

[search.space]
"""
_KINDS = (
    '"training.optimizer.lr" = { type = "real", low = 1e-4, high = 1e-1, log = true }',
    '"model.args.width" = { type = "int", low = 8, high = 256, log = true }',
    '"model.args.activation" = { type = "choice", values = ["relu", "selu", "gelu"] }',
    '"model.args.dropout" = { type = "real", low = 0.0, high = 0.5 }',
    '"training.batch_size" = { type = "ordinal", values = [16, 32, 64, 128] }',
)


@dataclass(frozen=True, kw_only=True)
class Made:
    """What a run folder is to hold."""

    name: str = "made"
    num_trials: int = 12
    num_folds: int = 3
    num_dimensions: int = 5
    epochs: int = 10
    num_slots: int = 4
    failed: tuple[int, ...] = ()  # trials whose folds all failed
    running: tuple[int, ...] = ()  # trials whose folds all run, in their middle
    seed: int = 1


def true_score(unit: np.ndarray) -> float:
    """Of coordinates (D,) in the unit cube: the first dimension counts 16 times the third."""
    weights = np.array([4.0, 2.0, 1.0, *[0.0] * max(0, len(unit) - 3)])[: len(unit)]
    return 0.2 + float(weights @ (unit - 0.3) ** 2)


def make_run(folder: Path, made: Made) -> Path:
    """Write a run folder; return it."""
    folder.mkdir(parents=True)
    more = (
        f'"model.args.x{number:02d}" = {{ type = "real", low = 0.0, high = 1.0 }}'
        for number in range(made.num_dimensions - len(_KINDS))
    )
    args = {"width": 16, "activation": '"relu"', "dropout": 0.0}
    args |= {f"x{number:02d}": 0.5 for number in range(made.num_dimensions - len(_KINDS))}
    said = ", ".join(f"{name} = {value}" for name, value in args.items())
    text = (
        _HEAD.format(**vars(made), args=said)
        + "\n".join([*_KINDS[: made.num_dimensions], *more])
        + "\n"
    )
    (folder / "study.toml").write_text(text)
    space = load(folder / "study.toml").space
    with open(folder / "ledger.jsonl", "w") as ledger:
        for row in _rows(folder, made, space):
            ledger.write(json.dumps(row) + "\n")
    return folder


def _rows(folder: Path, made: Made, space: Space) -> Any:
    rng = np.random.default_rng(made.seed)
    fingerprint = {"data": "d", "model": "m", "code": "c"}
    scoring = {
        "objective": {"metric": "val_loss", "goal": "min"},
        "spread_penalty": 0.0,
        "further": [],
    }
    yield {
        **{"event": "session", "time": BEGIN, "fingerprint": fingerprint, "version": "0.1.0"},
        **{"host": "login1", "pid": 1, "site": "local", "node_share": 0.25, "scoring": scoring},
        **{"num_slots": made.num_slots, "num_trials": made.num_trials, "method": "random"},
    }
    free = [BEGIN] * made.num_slots
    for trial in range(made.num_trials):
        unit = rng.random(made.num_dimensions)
        point = space.decode(unit)
        at = space.encode(point)
        begin = min(free)
        yield {
            **{"event": "trial", "time": begin, "trial": trial, "point": point},
            **{"num_folds": made.num_folds, "search_seconds": 0.01},
        }
        for fold in range(made.num_folds):
            yield from _task(folder, made, (trial, fold), true_score(at), free, rng)


def _task(
    folder: Path,
    made: Made,
    task: tuple[int, int],
    score: float,
    free: list[float],
    rng: np.random.Generator,
) -> Any:
    trial, fold = task
    slot = free.index(min(free))
    begin, key = free[slot], f"{trial:016d}{fold:016d}"
    name = f"t{trial:03d}-f{fold}"
    common = {"trial": trial, "fold": fold, "key": key}
    place = {"job": "", "nodes": [f"node{slot % 2}"], "begun": begin + 1.0}
    yield {"event": "start", "time": begin, "attempt": 1, **common}
    (folder / name).mkdir()
    fom = score + 0.02 * rng.normal()
    num_epochs = made.epochs // 2 if trial in made.running else made.epochs
    rows = [_epoch(epoch, made.epochs, fom) for epoch in range(1, num_epochs + 1)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / name / "history.jsonl").write_text(lines)
    end = begin + 1.0 + EPOCH_S * made.epochs * (0.5 + rng.random())
    free[slot] = end
    if trial in made.running:
        where = {"job": "", "hosts": place["nodes"], "begun": place["begun"]}
        (folder / name / "place.json").write_text(json.dumps(where))
        return
    facts = {"event": "end", "time": end, "folder": name, **common, **place}
    if trial in made.failed:
        (folder / name / "stderr.txt").write_text("Traceback\nloss is not finite\n")
        yield {**facts, "status": "failed", "reason": "diverged", "message": "loss is nan"}
        return
    yield {
        **facts,
        "status": "done",
        "cached": False,
        "result": _result(made, rows[-1], end - begin),
    }


def _epoch(epoch: int, epochs: int, fom: float) -> dict[str, float]:
    """Losses fall to their last value by an exponential."""
    above = math.exp(-5.0 * epoch / epochs) - math.exp(-5.0)
    return {
        **{"epoch": epoch, "loss": 0.9 * fom + above, "val_loss": fom + above},
        **{"accuracy": 1 - 0.3 * above, "val_accuracy": 0.9 - 0.3 * above, "lr": 1e-3},
        **{"seconds": EPOCH_S * epoch, "compute_s": 1.4, "communication_s": 0.3},
        **{"data_s": 0.2, "idle_s": 0.1},
    }


def _result(made: Made, last: dict[str, float], seconds: float) -> dict[str, Any]:
    names = ("loss", "val_loss", "accuracy", "val_accuracy")
    return {
        **{"fom": last["val_loss"], "metrics": {name: last[name] for name in names}},
        **{"epoch": made.epochs, "epochs": made.epochs, "start_epoch": 0, "stopped": "epochs"},
        **{"seconds": seconds, "samples_per_second": 1000.0, "inference_us": 3.0},
        **{"compute_s": 14.0, "communication_s": 3.0, "data_s": 2.0, "idle_s": 1.0},
        **{"num_parameters": 1234, "num_ranks": 1, "lost_ranks": 0, "hosts": ["node0"]},
    }
