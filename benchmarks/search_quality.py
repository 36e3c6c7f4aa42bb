"""How good the search methods are: simple regret after 60 trials, four at once, and CPU seconds.

    python benchmarks/search_quality.py run --engine bayesian --problem branin --seeds 20
    python benchmarks/search_quality.py table

Trials take random times, so that they end in another order than they began. Every run appends a
row to results/search_quality.jsonl; rows that are there are not run again. The regret is that of
the trial with the best mean, at its true value ("regret"), or of the one that our methods
recommend ("chosen"; the same where there is no noise). CPU is that of ask and tell, without
imports.
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import argparse
import heapq
import json
import logging
import math
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from search_problems import Bench, problem

from workflow.folds import FoldModel
from workflow.search import Observation, Problem, Proposal, create
from workflow.space import Choice, Integer, Point

RESULTS = Path(__file__).parent / "results" / "search_quality.jsonl"
NUM_TRIALS, AT_ONCE = 60, 4
PROBLEMS = ["branin", "hartmann6", "mixed", "ackley5", "levy4", "jets", "diverging"]


class Ours:
    """A method of workflow.search, as the driver calls it."""

    def __init__(self, name: str, bench: Bench, seed: int) -> None:
        problem = Problem(bench.space, ("min",), seed, NUM_TRIALS)
        self.search = create(name, problem, {})
        self.seed = seed
        self.pending: dict[int, Proposal] = {}
        self.ended: dict[int, tuple[Proposal, list[float]]] = {}

    def history(self) -> list[Observation]:
        values = {trial: folds for trial, (_, folds) in sorted(self.ended.items())}
        model = FoldModel.of(values)
        return [
            Observation(self.ended[trial][0], float(np.mean(folds)), model.noise(folds))
            for trial, folds in values.items()
        ]

    def ask(self, trial: int) -> Point:
        history = self.history()
        pending = [self.pending[number] for number in sorted(self.pending)]
        rng = np.random.default_rng([self.seed, trial])
        [proposal] = self.search.propose(history, pending, 1, rng)
        self.pending[trial] = proposal
        return proposal.point

    def tell(self, trial: int, folds: list[float]) -> None:
        self.ended[trial] = (self.pending.pop(trial), folds)

    def choice(self) -> Point | None:
        """What the tool recommends in the end."""
        recommended = self.search.recommend(self.history())
        return None if recommended is None else recommended.point


class Optuna:
    """Optuna's own loop, as its documentation has it; a NaN is told as a failed trial."""

    def __init__(self, name: str, bench: Bench, seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.simplefilter("ignore")
        samplers = optuna.samplers
        sampler = {
            "optuna-gp": samplers.GPSampler,
            "optuna-tpe": samplers.TPESampler,
        }[name](seed=seed)
        self.study = optuna.create_study(sampler=sampler)
        self.failed = optuna.trial.TrialState.FAIL
        self.distributions = {
            path: optuna.distributions.CategoricalDistribution(d.values)
            if isinstance(d, Choice)
            else optuna.distributions.IntDistribution(d.low, d.high, log=d.log)
            if isinstance(d, Integer)
            else optuna.distributions.FloatDistribution(d.low, d.high, log=d.log)
            for path, d in bench.space.dimensions.items()
        }
        self.trials: dict[int, Any] = {}

    def ask(self, trial: int) -> Point:
        self.trials[trial] = self.study.ask(self.distributions)
        return dict(self.trials[trial].params)

    def tell(self, trial: int, folds: list[float]) -> None:
        value = float(np.mean(folds))
        if math.isfinite(value):
            self.study.tell(self.trials[trial], value)
        else:
            self.study.tell(self.trials[trial], state=self.failed)


class Skopt:
    """scikit-optimize's own loop; it has no pending points, and a NaN is told as the worst."""

    def __init__(self, name: str, bench: Bench, seed: int) -> None:
        import skopt

        warnings.simplefilter("ignore")
        self.space = bench.space
        dimensions = [
            skopt.space.Categorical(d.values)
            if isinstance(d, Choice)
            else skopt.space.Integer(d.low, d.high, "log-uniform" if d.log else "uniform")
            if isinstance(d, Integer)
            else skopt.space.Real(d.low, d.high, "log-uniform" if d.log else "uniform")
            for d in bench.space.dimensions.values()
        ]
        self.optimizer = skopt.Optimizer(dimensions, random_state=seed)
        self.points: dict[int, list[Any]] = {}
        self.worst = 0.0

    def ask(self, trial: int) -> Point:
        self.points[trial] = self.optimizer.ask()
        return dict(zip(self.space.dimensions, self.points[trial], strict=True))

    def tell(self, trial: int, folds: list[float]) -> None:
        value = float(np.mean(folds))
        self.worst = max(self.worst, value) if math.isfinite(value) else self.worst
        self.optimizer.tell(self.points[trial], value if math.isfinite(value) else self.worst)


def engine(name: str, bench: Bench, seed: int) -> Ours | Optuna | Skopt:
    if name.startswith("optuna-"):
        return Optuna(name, bench, seed)
    return Skopt(name, bench, seed) if name == "skopt-own" else Ours(name, bench, seed)


def search(name: str, bench: Bench, seed: int) -> dict[str, Any]:
    """One search of NUM_TRIALS trials; its row."""
    asked = engine(name, bench, seed)
    durations = np.random.default_rng([seed, 1]).uniform(0.5, 1.5, NUM_TRIALS)
    errors = np.random.default_rng([seed, 2])
    running: list[tuple[float, int, Point]] = []
    values = np.full(NUM_TRIALS, np.nan)
    truths = np.full(NUM_TRIALS, np.nan)
    clock, cpu = 0.0, 0.0

    def end_one() -> None:
        nonlocal clock, cpu
        clock, trial, point = heapq.heappop(running)
        folds = bench.folds(point, errors)
        truths[trial], values[trial] = bench.function(point), np.mean(folds)
        start = time.process_time()
        asked.tell(trial, folds)
        cpu += time.process_time() - start

    for trial in range(NUM_TRIALS):
        if len(running) == AT_ONCE:
            end_one()
        start = time.process_time()
        point = asked.ask(trial)
        cpu += time.process_time() - start
        heapq.heappush(running, (clock + durations[trial], trial, point))
    while running:
        end_one()
    best = int(np.nanargmin(values))
    return {
        "engine": name,
        "problem": bench.name,
        "seed": seed,
        "regret": float(truths[best] - bench.minimum),
        "cpu": round(cpu, 3),
        "chosen": _regret_of_choice(asked, bench),
        "wasted": float(np.isnan(values[12:]).mean()),
    }


def _regret_of_choice(asked: Any, bench: Bench) -> float | None:
    point = asked.choice() if isinstance(asked, Ours) else None
    return None if point is None else float(bench.function(point) - bench.minimum)


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def run(engines: list[str], problems: list[str], seeds: int) -> None:
    RESULTS.touch()
    known = {(row["engine"], row["problem"], row["seed"]) for row in rows()}
    for seed in range(seeds):
        for name in engines:
            for problem_name in problems:
                if (name, problem_name, seed) in known:
                    continue
                row = search(name, problem(problem_name), seed)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row, flush=True)


ENGINES = {
    "bayesian": "N3LO `bayesian`",
    "optuna-gp": "Optuna GPSampler",
    "optuna-tpe": "Optuna TPE",
    "skopt-own": "scikit-optimize GP",
    "random": "random",
}


def print_tables() -> None:
    """Median and quartiles of the regret, and what it costs, as Markdown."""
    known = rows()
    for prefix, key in (("", "regret"), ("noisy-", "chosen")):
        print("| problem | " + " | ".join(ENGINES.values()) + " |")
        print("|---" * (len(ENGINES) + 1) + "|")
        for name in [f"{prefix}{problem_name}" for problem_name in PROBLEMS]:
            cells = []
            for engine_name in ENGINES:
                of = [r for r in known if (r["engine"], r["problem"]) == (engine_name, name)]
                values = [row[key] if row.get(key) is not None else row["regret"] for row in of]
                cells.append(_cell(values))
            print(f"| {name} | " + " | ".join(cells) + " |")
        print()
    print("| | " + " | ".join(ENGINES.values()) + " |")
    print("|---" * (len(ENGINES) + 1) + "|")
    for label, key, some in (
        ("CPU seconds of a search", "cpu", lambda row: True),
        ("`diverging`: failed after the 12th", "wasted", lambda row: row["problem"] == "diverging"),
    ):
        means = [
            [row[key] for row in known if row["engine"] == name and some(row)] for name in ENGINES
        ]
        cells = [f"{np.mean(values):.2g}" if values else "-" for values in means]
        print(f"| {label} | " + " | ".join(cells) + " |")


def _cell(values: list[float]) -> str:
    if not values:
        return "-"
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return f"{middle:.2g} [{low:.1g}, {high:.1g}]" + (
        "" if len(values) >= 20 else f" n={len(values)}"
    )


def main() -> None:
    logging.getLogger("workflow").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("--engine", action="append", default=[])
    parser.add_argument("--problem", action="append", default=[])
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    every = [*PROBLEMS, *(f"noisy-{name}" for name in PROBLEMS)]
    if options.command == "table":
        print_tables()
    else:
        engine("optuna-gp", problem("branin"), 0).ask(0)  # imports are not counted
        run(options.engine, options.problem or every, options.seeds)


if __name__ == "__main__":
    main()
