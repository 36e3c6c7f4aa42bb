"""What fold racing and successive halving save on the jets, at which final quality.

    python benchmarks/search_savings.py

Looked up in results/jets_table.json (jets_table.py: real trainings, 3 folds, 12 epochs each). Each
trial sees the folds of one seed; regret is the true error of the trial that is recommended, less
the least of the table. 20 searches each, one trial after the other.
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

from dataclasses import dataclass, replace

import numpy as np
from search_problems import jets_curves

from workflow.folds import FoldModel
from workflow.search import Observation, Problem, create
from workflow.space import Point

NUM_SEARCHES = 20
ALPHAS = 0.01, 0.05


@dataclass
class Spent:
    """What a search used, and how good it was."""

    epochs: int  # of all fold trainings together
    trainings: int
    regret: float


def full(num_trials: int, seed: int, alpha: float = 0.0) -> Spent:
    """`bayesian`, every trial trained in full; with `alpha`, by racing over the folds."""
    jets = jets_curves()
    search = create("bayesian", Problem(jets.space, num_trials=num_trials, seed=seed), {})
    rng = np.random.default_rng([seed, 9])
    points: list = []
    scores: dict[int, list[float | None]] = {}
    for trial in range(num_trials):
        history = _observed(points, scores)
        [proposal] = search.propose(history, [], 1, np.random.default_rng([seed, trial]))
        points.append(replace(proposal, number=trial))
        folds = jets.folds(proposal.point, rng)[:, -1].tolist()
        seen: list[float | None] = [None] * len(folds)
        for fold, value in enumerate(folds):
            seen[fold] = value
            done = {n: row for n, row in scores.items() if None not in row}
            if alpha and done and fold + 1 < len(folds):
                best = min(done, key=lambda n: np.mean(done[n]))
                if FoldModel.of(done).chance(seen, done[best]) < alpha:
                    break
        scores[trial] = seen
    whole = [o for o in _observed(points, scores) if None not in scores[o.proposal.number]]
    trainings = sum(value is not None for row in scores.values() for value in row)
    chosen = search.recommend(whole)
    return Spent(trainings * jets.epochs, trainings, jets.regret(chosen.point))


def _observed(points: list, scores: dict[int, list[float | None]]) -> list[Observation]:
    model = FoldModel.of({n: row for n, row in scores.items() if None not in row})
    return [Observation(points[n], model.mean(row), model.noise(row)) for n, row in scores.items()]


def halving(num_trials: int, seed: int) -> Spent:
    """`halving` with `bayesian` for new points: rungs of 1, 3 and 12 epochs."""
    jets = jets_curves()
    problem = Problem(jets.space, num_trials=num_trials, seed=seed, epochs=jets.epochs)
    search = create("halving", problem, {"min_epochs": 1})
    rng = np.random.default_rng([seed, 9])
    history: list[Observation] = []
    curves: dict[int, np.ndarray] = {}
    epochs = 0
    for trial in range(num_trials):
        [proposal] = search.propose(history, [], 1, np.random.default_rng([seed, trial]))
        budget = proposal.settings["training.epochs"]
        parent = proposal.parent
        if parent is None:
            curves[trial] = jets.folds(proposal.point, rng)  # a promotion goes on with the same
            before = 0
        else:
            curves[trial] = curves[parent]
            before = history[parent].proposal.settings["training.epochs"]
        epochs += (budget - before) * len(curves[trial])
        value = float(curves[trial][:, budget - 1].mean())
        history.append(Observation(replace(proposal, number=trial), value))
    top = [o for o in history if o.proposal.settings["training.epochs"] == jets.epochs]
    best: Point = min(top, key=search.cost).point
    return Spent(epochs, num_trials * 3, jets.regret(best))


def main() -> None:
    print("| search | trials | fold trainings | epochs | median regret [quartiles] |")
    print("|---|---|---|---|---|")
    cases = [
        *(("`bayesian`", n, lambda n, s: full(n, s)) for n in (10, 20, 40)),
        *(
            (f"with racing, alpha = {ALPHAS[0]}", n, lambda n, s: full(n, s, ALPHAS[0]))
            for n in (20, 40)
        ),
        *(
            (f"with racing, alpha = {ALPHAS[1]}", n, lambda n, s: full(n, s, ALPHAS[1]))
            for n in (20, 40)
        ),
        *(("`halving`", n, halving) for n in (20, 40, 80)),
    ]
    for label, num, run in cases:
        spent = [run(num, seed) for seed in range(NUM_SEARCHES)]
        low, middle, high = np.quantile([each.regret for each in spent], [0.25, 0.5, 0.75])
        epochs = np.mean([each.epochs for each in spent])
        trainings = np.mean([each.trainings for each in spent])
        print(
            f"| {label} | {num} | {trainings:.0f} | {epochs:.0f} | "
            f"{middle:.4f} [{low:.4f}, {high:.4f}] |",
            flush=True,
        )


if __name__ == "__main__":
    main()
