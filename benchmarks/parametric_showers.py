"""Parametric showers a second on one core: generated, written, and against a loop over events.

    python benchmarks/parametric_showers.py

The loop is the prototype that apps/physics/parametric.py grew from. Seconds are those of the
processor, not of the clock, so that a busy machine counts less; each figure is the median of
repetitions in turn.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import scipy
from scipy.special import gammainc

from apps.physics.parametric import generate, write

EVENTS = 1000
RANGE_GEV = (10.0, 100.0)
REPETITIONS = 7


def loop(energies: np.ndarray, seed: int) -> np.ndarray:
    """Showers (N, 25, 25, 25) one at a time, each spot drawing whether it is core or tail."""
    rng = np.random.default_rng(seed)
    thickness = np.repeat([0.6484, 1.2593], [17, 8])
    edges = np.concatenate([[0], np.cumsum(thickness)])
    showers = np.zeros((len(energies), 25, 25, 25), np.float32)
    plus, minus = np.sqrt(0.85), np.sqrt(0.15)
    for shower, energy in zip(showers, energies, strict=True):
        log_y, log_e = np.log(energy / 8e-3), np.log(energy)
        normal = rng.standard_normal(2)
        maximum = (log_y - 0.85) * np.exp((normal @ [plus, minus]) / (-2.5 + 1.25 * log_y))
        alpha = (0.9 + 0.475 * log_y) * np.exp((normal @ [plus, -minus]) / (-0.82 + 0.85 * log_y))
        alpha = max(1.2, alpha)
        beta = (alpha - 1) / maximum
        deposited = gammainc(alpha, beta * (edges[1:] + thickness / 2))
        deposited -= gammainc(alpha, beta * (edges[:-1] + thickness / 2))
        seen = 0.0249 * energy * np.repeat([1, 0.5], [17, 8]) * deposited
        counts = rng.poisson((seen + 0.3e-3 * np.exp(-edges[:-1] / 2)) / 0.29e-3)
        layer = np.repeat(np.arange(25), counts)
        tau = (edges[:-1] + thickness / 2)[layer] / maximum
        spots = rng.gamma(1.0, 0.29e-3, len(layer))
        early = (0.532 - tau) / (1.313 - 0.0686 * log_e)
        share = np.clip(2.5 * np.exp(early - np.exp(early)), 0, 1)
        core = 0.0575 + 0.00319 * log_e + 0.09075 * tau
        k4 = 0.3585 + 0.0412 * log_e
        tail = 0.4427 * (np.exp(-2.59 * (tau - 0.645)) + np.exp(k4 * (tau - 0.645)))
        u = rng.random(len(layer))
        is_core = rng.random(len(layer)) < share
        radius = 15.0 / 5.1 * np.where(is_core, core, tail) * np.sqrt(u / (1 - u))
        azimuth = rng.uniform(0, 2 * np.pi, len(layer))
        centre = rng.uniform(-0.5, 0.5, 2) + 12.5
        x = np.floor(radius * np.cos(azimuth) + centre[0]).astype(int)
        y = np.floor(radius * np.sin(azimuth) + centre[1]).astype(int)
        inside = (x >= 0) & (x < 25) & (y >= 0) & (y < 25)
        np.add.at(shower, (x[inside], y[inside], layer[inside]), spots[inside])
    return showers


def rate(run: Callable[[], object]) -> float:
    """Events per second of one core."""
    start = time.process_time()
    run()
    return EVENTS / (time.process_time() - start)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    energies = np.random.default_rng(0).uniform(*RANGE_GEV, EVENTS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "showers.h5"
        cases = {
            "generated": lambda: generate(energies, 1),
            "generated and written": lambda: write(path, EVENTS, RANGE_GEV, 1),
            "loop over events": lambda: loop(energies, 1),
        }
        rounds = [{name: rate(run) for name, run in cases.items()} for _ in range(REPETITIONS)]
        size = path.stat().st_size / EVENTS
    print(f"one core of {processor()}, {os.cpu_count()} in all, load {os.getloadavg()[0]:.1f}")
    print(f"numpy {np.__version__}, scipy {scipy.__version__}, h5py {h5py.__version__}")
    print(f"{EVENTS} electrons of {RANGE_GEV[0]:g} to {RANGE_GEV[1]:g} GeV")
    for name in cases:
        median = statistics.median(each[name] for each in rounds)
        print(f"{name:22} {median:6.0f} events/s")
    ratio = statistics.median(each["generated"] / each["loop over events"] for each in rounds)
    print(f"generated / loop = {ratio:.1f}; file: {size / 1e3:.1f} kB an event")


if __name__ == "__main__":
    main()
