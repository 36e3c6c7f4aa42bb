"""The algorithms of the strategies with a central copy of the weights, as their papers write them.

Plain NumPy in double precision, one worker after the other in the order of a script; written from
the formulas and from nothing in `apps`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

Gradient = Callable[[np.ndarray, int, int], np.ndarray]  # of x, worker, how many it had before


@dataclass
class Run:
    """What came of a script."""

    centre: np.ndarray
    seen: list[list[np.ndarray]]  # of each worker: its weights after each update
    staleness: list[int] = field(default_factory=list)  # of each exchange, in order


def downpour(  # noqa: PLR0913  the symbols of the paper
    script: list[int],
    gradient: Gradient,
    start: np.ndarray,
    lr: float,
    *,
    tau: int = 1,
    staleness_lr: bool = False,
    mu: float = 0.0,
) -> Run:
    """Dean et al. 2012, algorithm 7.1, with momentum SGD at the master; a script of batches."""
    momentum = np.zeros_like(start)
    workers = max(script) + 1
    theta, clock = start.copy(), 0
    x, v = [start.copy() for _ in range(workers)], [0] * workers
    sums, counts = [np.zeros_like(start) for _ in range(workers)], [0] * workers
    run = Run(theta, [[] for _ in range(workers)])
    for i in script:
        g = gradient(x[i], i, counts[i])
        counts[i] += 1
        sums[i] = sums[i] + g
        if counts[i] % tau == 0:
            age = clock - v[i]
            rate = lr / max(1, age) if staleness_lr else lr
            momentum = mu * momentum + sums[i]
            theta = theta - rate * momentum
            clock += 1
            x[i], v[i], sums[i] = theta.copy(), clock, np.zeros_like(start)
            run.staleness.append(age)
        else:
            x[i] = x[i] - lr * g
        run.seen[i].append(x[i].copy())
    run.centre = theta
    return run


def easgd(  # noqa: PLR0913  the symbols of the paper
    script: list[int],
    gradient: Gradient,
    start: np.ndarray,
    lr: float,
    alpha: float,
    *,
    tau: int = 1,
    delta: float | None = None,
) -> Run:
    """Zhang et al. 2015, algorithm 1; with `delta`, algorithm 2 (EAMSGD).

    The exchange is in the last batch of every tau. The papers' first exchange, at t = 0, moves
    nothing, as all weights are still the same.
    """
    workers = max(script) + 1
    theta = start.copy()
    x = [start.copy() for _ in range(workers)]
    v = [np.zeros_like(start) for _ in range(workers)]
    counts = [0] * workers
    run = Run(theta, [[] for _ in range(workers)])
    for i in script:
        before = x[i].copy()
        g = gradient(before + (delta or 0.0) * v[i], i, counts[i])
        counts[i] += 1
        if counts[i] % tau == 0:
            pull = alpha * (before - theta)
            x[i] = x[i] - pull
            theta = theta + pull
        if delta is None:
            x[i] = x[i] - lr * g
        else:
            v[i] = delta * v[i] - lr * g
            x[i] = x[i] + v[i]
        run.seen[i].append(x[i].copy())
    run.centre = theta
    return run


def synchronous_easgd(
    workers: int, steps: int, gradient: Gradient, start: np.ndarray, lr: float, beta: float
) -> Run:
    """Zhang et al. 2015, equations 5 and 6, with alpha = beta / p."""
    theta = start.copy()
    x = [start.copy() for _ in range(workers)]
    run = Run(theta, [[] for _ in range(workers)])
    for step in range(steps):
        mean = sum(x) / workers
        moved = [
            x[i] - lr * gradient(x[i], i, step) - beta / workers * (x[i] - theta)
            for i in range(workers)
        ]
        theta = (1 - beta) * theta + beta * mean
        x = moved
        for i in range(workers):
            run.seen[i].append(x[i].copy())
    run.centre = theta
    return run


def gem(
    script: list[int],
    gradient: Gradient,
    start: np.ndarray,
    lr: float,
    mu: float,
    kappa: float,
) -> Run:
    """Gradient energy matching, from the definition in the authors' own code.

    Each worker pulls once before its first gradient, so that the centre's move is known then.
    """
    workers = max(script) + 1
    theta = start.copy()
    x = [start.copy() for _ in range(workers)]
    old = [start.copy() for _ in range(workers)]
    m = [np.zeros_like(start) for _ in range(workers)]
    counts = [0] * workers
    run = Run(theta, [[] for _ in range(workers)])
    for i in script:
        u = -lr * gradient(x[i], i, counts[i])
        counts[i] += 1
        m[i] = mu * m[i] + u
        central = theta - old[i]
        old[i] = theta.copy()
        pi = (kappa * np.abs(m[i]) - np.abs(central)) / np.abs(u + 1e-12)
        push = np.clip(pi, 0, 5) * u
        theta = theta + push
        x[i] = old[i] + push
        run.seen[i].append(x[i].copy())
    run.centre = theta
    return run
