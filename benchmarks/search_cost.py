"""CPU seconds of one proposal at 50 to 1000 points in 8 dimensions, with 4 pending.

    python benchmarks/search_cost.py

The median of three proposals; imports, and telling the points, are not counted.
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import platform
import time
import warnings
from collections.abc import Callable

import numpy as np

from workflow.search import Observation, Problem, Proposal, create
from workflow.space import Point, Real, Space

SPACE = Space({f"x{i}": Real(low=0.0, high=1.0) for i in range(8)})
SIZES = (50, 200, 500, 1000)
REPEATS = 3


def ours(method: str, options: dict) -> Callable[[list[Point], list[float], int], None]:
    search = create(method, Problem(SPACE), options)

    def propose(points: list[Point], values: list[float], seed: int) -> Callable[[], object]:
        pairs = zip(points[4:], values[4:], strict=True)
        history = [Observation(Proposal(point), value, 0.01) for point, value in pairs]
        pending = [Proposal(point) for point in points[:4]]
        return lambda: search.propose(history, pending, 1, np.random.default_rng(seed))

    return propose


def optuna_gp(points: list[Point], values: list[float], seed: int) -> Callable[[], object]:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    floats = {path: optuna.distributions.FloatDistribution(0, 1) for path in SPACE.dimensions}
    study = optuna.create_study(sampler=optuna.samplers.GPSampler(seed=seed))
    for point, value in zip(points[4:], values[4:], strict=True):
        study.add_trial(optuna.trial.create_trial(params=point, distributions=floats, value=value))
    for point in points[:4]:
        study.enqueue_trial(point)
        study.ask(floats)
    return lambda: study.ask(floats)


ENGINES = {
    "bayesian": ours("bayesian", {}),
    "Optuna GPSampler": optuna_gp,
    "skopt (our adapter)": ours("skopt", {}),
    "evolution": ours("evolution", {}),
}
MOST = {"skopt (our adapter)": 500}  # minutes at 1000


def main() -> None:
    warnings.simplefilter("ignore")
    print(f"{platform.processor() or platform.machine()}, one thread")
    print("| engine | " + " | ".join(f"n = {size}" for size in SIZES) + " |")
    print("|---" * (len(SIZES) + 1) + "|")
    for name, engine in ENGINES.items():
        cells = []
        for size in SIZES:
            if size > MOST.get(name, size):
                cells.append("-")
                continue
            rng = np.random.default_rng(size)
            points = [SPACE.sample(rng) for _ in range(size + 4)]
            values = [sum((float(v) - 0.4) ** 2 for v in point.values()) for point in points]
            spent = []
            for seed in range(REPEATS + 1):
                propose = engine(points, values, seed)
                start = time.process_time()
                propose()
                spent.append(time.process_time() - start)
            cells.append(f"{np.median(spent[1:]):.2g} s")  # the first one imports
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
