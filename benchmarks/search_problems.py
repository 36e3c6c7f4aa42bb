"""Test problems for search methods: a space, a function to minimise, and its least value.

Branin, Hartmann-6, Ackley and Levy as in Surjanovic and Bingham's Virtual Library of Simulation
Experiments (sfu.ca/~ssurjano). `mixed` imitates the validation loss of a small network over
learning rate, width, depth and optimizer, with a cliff where the learning rate is too high.
`diverging` is Hartmann-6 that gives NaN in 40 % of its space. `jets` looks up real trainings
(jets_table.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from workflow.space import Choice, Integer, Point, Real, Space

TABLE = Path(__file__).parent / "results" / "jets_table.json"
NUM_FOLDS = 3


@dataclass(frozen=True)
class Bench:
    """A problem. Of noisy ones, `folds` gives what each fold of a trial reports."""

    name: str
    space: Space
    function: Callable[[Point], float]  # the truth
    minimum: float
    noise: Callable[[Point, np.random.Generator], list[float]] | None = None

    def folds(self, point: Point, rng: np.random.Generator) -> list[float]:
        return [self.function(point)] if self.noise is None else self.noise(point, rng)


def branin(p: Point) -> float:
    x, y = float(p["x1"]), float(p["x2"])
    bowl = y - 5.1 / (4 * math.pi**2) * x * x + 5 / math.pi * x - 6
    return bowl**2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10


_H6_A = np.array(
    [
        [10, 3, 17, 3.5, 1.7, 8],
        [0.05, 10, 17, 0.1, 8, 14],
        [3, 3.5, 1.7, 10, 17, 8],
        [17, 8, 0.05, 10, 0.1, 14],
    ]
)
_H6_P = 1e-4 * np.array(
    [
        [1312, 1696, 5569, 124, 8283, 5886],
        [2329, 4135, 8307, 3736, 1004, 9991],
        [2348, 1451, 3522, 2883, 3047, 6650],
        [4047, 8828, 8732, 5743, 1091, 381],
    ]
)
_H6_ALPHA = np.array([1, 1.2, 3, 3.2])


def hartmann6(p: Point) -> float:
    x = np.array([p[f"x{i}"] for i in range(1, 7)])
    return float(-np.sum(_H6_ALPHA * np.exp(-np.sum(_H6_A * (x - _H6_P) ** 2, axis=1))))


def diverging(p: Point) -> float:
    return math.nan if float(p["x4"]) + float(p["x5"]) > 1.1 else hartmann6(p)


def ackley5(p: Point) -> float:
    x = np.array([p[f"x{i}"] for i in range(5)])
    far = -20 * np.exp(-0.2 * np.sqrt((x * x).mean()))
    return float(far - np.exp(np.cos(2 * np.pi * x).mean()) + 20 + np.e)


def levy4(p: Point) -> float:
    w = 1 + (np.array([p[f"x{i}"] for i in range(4)]) - 1) / 4
    inner = (w[:-1] - 1) ** 2 * (1 + 10 * np.sin(np.pi * w[:-1] + 1) ** 2)
    last = (w[-1] - 1) ** 2 * (1 + np.sin(2 * np.pi * w[-1]) ** 2)
    return float(np.sin(np.pi * w[0]) ** 2 + inner.sum() + last)


# optimizer -> log10 of its best learning rate, offset of the loss, best depth, best log2 of width
_MIXED = {
    "sgd": (-1.6, 0.06, 5, 7.2),
    "adam": (-3.1, 0.0, 4, 7.7),
    "rmsprop": (-3.4, 0.03, 3, 6.6),
    "lamb": (-2.4, 0.015, 6, 8.1),
}


def mixed(p: Point) -> float:
    depth, width = float(p["depth"]), math.log2(float(p["width"]))
    best_lr, offset, best_depth, best_width = _MIXED[str(p["opt"])]
    u = math.log10(float(p["lr"])) - best_lr + 0.12 * (depth - best_depth)
    u += 0.15 * (width - best_width)  # the best learning rate moves with the size
    loss = 0.25 + offset + 0.08 * u * u / (1 + 0.25 * abs(u)) + 0.01 * math.sin(5 * u)
    loss += 0.25 / (1 + math.exp(-8 * (u - 0.9)))  # the cliff
    return loss + 0.012 * abs(depth - best_depth) ** 1.5 + 0.02 * (width - best_width) ** 2


def _cube(names: list[str], low: float, high: float) -> Space:
    return Space({name: Real(low=low, high=high) for name in names})


_H6 = _cube([f"x{i}" for i in range(1, 7)], 0.0, 1.0)
# The least value of `mixed` is that of a grid over (lr 4001, width, depth, opt), to 1e-9.
NOISELESS = {
    each.name: each
    for each in (
        Bench(
            "branin",
            Space({"x1": Real(low=-5.0, high=10.0), "x2": Real(low=0.0, high=15.0)}),
            branin,
            0.39788735772973816,
        ),
        Bench("hartmann6", _H6, hartmann6, -3.322368011415515),
        Bench(
            "mixed",
            Space(
                {
                    "lr": Real(low=1e-5, high=1.0, log=True),
                    "width": Integer(low=16, high=512, log=True),
                    "depth": Integer(low=1, high=8),
                    "opt": Choice(values=list(_MIXED)),
                }
            ),
            mixed,
            0.24466217966744222,
        ),
        Bench("ackley5", _cube([f"x{i}" for i in range(5)], -4.0, 6.0), ackley5, 0.0),
        Bench("levy4", _cube([f"x{i}" for i in range(4)], -10.0, 10.0), levy4, 0.0),
        Bench("diverging", _H6, diverging, -3.322368011415515),
    )
}
# Standard deviation of a fold: 2 % of the way from the least value to the median of random points.
_FOLD_SD = {
    "branin": 0.65,
    "hartmann6": 0.064,
    "mixed": 0.0066,
    "ackley5": 0.21,
    "levy4": 0.72,
    "diverging": 0.064,
}


def problem(name: str) -> Bench:
    """By name; "noisy-" in front gives each of three folds its own error."""
    plain_name = name.removeprefix("noisy-")
    plain = _jets() if plain_name == "jets" else NOISELESS[plain_name]
    if name == plain_name:
        return replace(plain, noise=None)
    if plain.noise is not None:
        return replace(plain, name=name)

    def noise(point: Point, rng: np.random.Generator) -> list[float]:
        sd = _FOLD_SD[plain_name]
        # A fold may be easier than another for all trials alike: that is no noise in comparisons.
        ease = np.random.default_rng(7).normal(0, 2 * sd, NUM_FOLDS)
        errors = ease - ease.mean() + rng.normal(0, sd, NUM_FOLDS)
        return (plain.function(point) + errors).tolist()

    return replace(plain, name=name, noise=noise)


@dataclass(frozen=True)
class JetsCurves:
    """Real trainings, looked up: the error of each fold after each epoch."""

    space: Space
    curves: Mapping[str, np.ndarray]  # by identity: (seeds, folds, epochs)

    @property
    def epochs(self) -> int:
        return int(next(iter(self.curves.values())).shape[2])

    def folds(self, point: Point, rng: np.random.Generator) -> np.ndarray:
        """(folds, epochs) of one of the seeds: what a study would see."""
        curves = self.curves[self.space.identity(point)]
        chosen: np.ndarray = curves[int(rng.integers(len(curves)))]
        return chosen

    def truth(self, point: Point) -> float:
        """The error after the last epoch, over all seeds and folds."""
        return float(self.curves[self.space.identity(point)][:, :, -1].mean())

    @property
    def minimum(self) -> float:
        return min(float(curves[:, :, -1].mean()) for curves in self.curves.values())

    def regret(self, point: Point) -> float:
        return self.truth(point) - self.minimum


@cache
def jets_curves() -> JetsCurves:
    content = json.loads(TABLE.read_text())
    axes = content["axes"]
    space = Space(
        {
            **{name: Integer(low=0, high=len(axes[name]) - 1) for name in ("lr", "width", "depth")},
            "activation": Choice(values=axes["activation"]),
        }
    )
    curves = {space.identity(row["point"]): np.array(row["curves"]) for row in content["rows"]}
    return JetsCurves(space, curves)


def _jets() -> Bench:
    jets = jets_curves()

    def noise(point: Point, rng: np.random.Generator) -> list[float]:
        last: list[float] = jets.folds(point, rng)[:, -1].tolist()
        return last

    return Bench("jets", jets.space, jets.truth, jets.minimum, noise)
