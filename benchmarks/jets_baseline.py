"""What the main job's best trial is worth: against a logistic regression on the same folds.

    python benchmarks/jets_baseline.py [RUN_FOLDER]     after `make run`

The regression sees the very constituents that the network sees: six features of each, padded with
zeros, and is scored on the fold split of the run.
"""

from __future__ import annotations

import platform
import sys
import warnings
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from apps.contract import TrainTask
from apps.data import prepare, validates
from workflow.ledger import Ledger


def logistic_regression(task_file: Path) -> list[float]:
    """Validation accuracy in each fold of a task's study."""
    task = TrainTask.read(task_file)
    _, fold_of_event = prepare(task.data, task.split_seed)
    features, labels = _features(task.data.files)
    accuracies = []
    for fold in range(task.data.folds):
        is_val = validates(fold_of_event, fold)
        model = make_pipeline(StandardScaler(), LogisticRegression(C=1e-3, max_iter=200))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(features[~is_val], labels[~is_val])
        accuracies.append(float(model.score(features[is_val], labels[is_val])))
    return accuracies


def _features(files: list[str]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Flattened constituents (events, 600) and classes (events,)."""
    constituents, labels = [], []
    for name in files:
        with h5py.File(name, "r", locking=False) as file:
            constituents.append(file["jetConstituentList"][:])
            labels.append(file["jets"][:, -6:-1].argmax(axis=1))
    jets = np.concatenate(constituents)  # (events, 100, 16)
    pt, erel, ptrel, etarel, phirel, delta_r = (jets[:, :, i] for i in (5, 4, 6, 8, 11, 13))
    is_there = pt > 0
    logs = [np.log(np.where(is_there, part, 1.0)) for part in (ptrel, erel, pt)]
    stacked = np.stack([*logs, etarel, phirel, delta_r], axis=-1) * is_there[..., None]
    return stacked.reshape(len(jets), -1), np.concatenate(labels)


def main() -> None:
    ledger = Ledger(sys.argv[1] if len(sys.argv) > 1 else "runs/jets")
    trials = ledger.trials().dropna(subset=["score"])
    if trials.empty:
        sys.exit(f"no trial has a score in {ledger.folder}: run `make run` first")
    best = trials.loc[trials["score"].idxmax()]
    baseline = logistic_regression(ledger.folder / f"t{best['trial']:03d}-f0" / "task.json")
    seconds = ledger.tasks()["ended"].max() - ledger.tasks()["submitted"].min()
    print(f"machine: {platform.processor() or platform.machine()}, {platform.node()}")
    print(f"trials: {len(trials)}, in {seconds.total_seconds():.0f} s from the first start")
    print(f"best trial t{best['trial']:03d}: {best['score']:.3f} ± {best['spread']:.3f}")
    print(f"logistic regression:   {np.mean(baseline):.3f} ± {np.std(baseline, ddof=1):.3f}")
    print("chance:                0.200")


if __name__ == "__main__":
    main()
