"""Is a generator of showers as good as the simulation? One table and the figures that say so.

    python -m apps.physics.validation REAL.h5 GENERATED.h5 --out FOLDER

writes validation.json, validation.md and the figures. Every distance stands beside its floor: what
the same measure finds between two sets of real showers of the same size.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from apps.contract import VERSION, N3LOError, write_json, write_text
from apps.hdf5 import parse_field
from apps.physics.distances import (
    FEATURES,
    classifier_auc,
    features_of,
    fpd_events,
    frechet_distance,
    frechet_physics_distance,
    kernel_physics_distance,
    scaled,
    separation_of_counts,
    separation_power,
    wasserstein,
)
from apps.physics.observables import (
    AXES,
    ENERGY_EDGES,
    Observables,
    ResponsePoint,
    figure_of_merit,
    layer_correlation,
    moments,
    observe,
    observed_sums,
    profiles,
    ratio,
    response_points,
)

HALVES = 10
FEWEST_EVENTS = 100  # of each kind; half of them are compared at a time
CLASSIFIER_FOLDS = 3

SMALLEST_RESPONSE = 1e-3  # a sampling calorimeter sees per cents of the energy
LARGEST_RESPONSE = 1.0
LONGER_THAN_WIDE = 1.5  # in cells; a shower spans ten radiation lengths and one Molière radius


class Measurement(NamedTuple):
    name: str
    unit: str | None
    value: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measure of the distance between generated and real showers."""

    name: str
    unit: str | None
    value: float  # generated against real
    uncertainty: float  # one standard deviation
    floor: float  # real against real, as many events
    floor_uncertainty: float

    @property
    def significance(self) -> float | None:
        """By how many standard deviations the value is above its floor; None if there is none."""
        error = math.hypot(self.uncertainty, self.floor_uncertainty)
        return (self.value - self.floor) / error if error > 0 else None


def validate(
    real: Observables, fake: Observables, seed: int, edges: Sequence[float] = ENERGY_EDGES
) -> list[Row]:
    """Every distance between generated and real showers, beside its real-against-real floor.

    Ten times two sets A and B that share no event are drawn from the real showers and a set C from
    the generated ones, each of half as many events as the smaller of the two samples has. Value and
    floor are the means of d(A, C) and d(A, B), so that both have the same statistics. Their
    uncertainties are the spreads over the ten: of smooth measures, that of random halves is the
    standard error of the whole (McCarthy 1966, Vital and Health Statistics 2, no. 14).

    Args:
        edges: of the bins of energy in GeV, for the figure of merit and the response.

    Raises:
        N3LOError: fewer than 100 showers of a kind, or no bin of energy holds both.
    """
    num_events = min(len(real), len(fake))
    if num_events < FEWEST_EVENTS:
        raise N3LOError(
            f"validation: {len(real)} real and {len(fake)} generated showers; "
            f"at least {FEWEST_EVENTS} of each are needed"
        )
    rng = np.random.default_rng(seed)
    size = num_events // 2
    values, floors = [], []
    for _ in range(HALVES):
        shuffled = rng.permutation(len(real))
        half = real.take(shuffled[:size])
        other = real.take(shuffled[size : 2 * size])
        generated = fake.take(rng.permutation(len(fake))[:size])
        half_seed = int(rng.integers(2**31))
        values.append(measure(half, generated, half_seed, edges))
        floors.append(measure(half, other, half_seed, edges))
    by_name = zip(zip(*values, strict=True), zip(*floors, strict=True), strict=True)
    return [_row(*each) for each in by_name]


def measure(
    real: Observables, fake: Observables, seed: int, edges: Sequence[float] = ENERGY_EDGES
) -> list[Measurement]:
    """Every distance once, without uncertainties.

    The FPD is extrapolated only where the events suffice; else the row is not there.

    Raises:
        N3LOError: no bin of energy holds showers of both kinds.
    """
    merit = figure_of_merit(observed_sums(real, edges), observed_sums(fake, edges))
    correlation = np.abs(layer_correlation(real.layers) - layer_correlation(fake.layers))
    a, b = features_of(real), features_of(fake)
    size = min(len(real), len(fake))
    found: list[tuple[str, float]] = [
        ("figure of merit of 3DGAN", merit.total),
        ("- its moments", merit.moments),
        ("- its profiles", merit.profiles),
        *_response_differences(real, fake, edges),
        ("layer correlation, largest difference", correlation.max()),
        ("layer correlation, mean difference", correlation.mean()),
        ("classifier AUC", classifier_auc(a, b, seed, CLASSIFIER_FOLDS).value),
        ("KPD", kernel_physics_distance(a, b, seed).value),
        (f"FPD, N = {size}", frechet_distance(*scaled(a, b))),
    ]
    if size >= fpd_events(len(FEATURES)):
        found.append(("FPD, N to infinity", frechet_physics_distance(a, b, seed).value))
    counts = real.spectra.sum(axis=0), fake.spectra.sum(axis=0)
    found.append(("separation power, cell energies", separation_of_counts(*counts)))
    found += [
        (f"separation power, {name}", separation_power(a[:, column], b[:, column]))
        for column, name in enumerate(FEATURES)
    ]
    return [
        *(Measurement(name, None, float(value)) for name, value in found),
        *(
            Measurement(f"Wasserstein-1, {name}", unit, float(value))
            for (name, unit), value in zip(FEATURES.items(), wasserstein(a, b), strict=True)
        ),
    ]


def check_showers(showers: np.ndarray, energies: np.ndarray) -> list[str]:
    """What is odd about showers, (events, x, y, layers) in GeV, of energies, (events,) in GeV.

    Returns:
        Warnings, one line each.

    Raises:
        N3LOError: nothing can be measured of them: other shapes, no event, nan or inf, or an
            energy that is not above 0.
    """
    _check_numbers(showers, energies)
    warnings = []
    if negative := np.count_nonzero(showers < 0):
        warnings.append(
            f"{negative} cells are negative (lowest {showers.min():.3g} GeV); taken as 0"
        )
    along = profiles(np.maximum(showers, 0))
    deposit = along[0].sum(axis=1)
    if empty := np.count_nonzero(deposit == 0):
        warnings.append(f"{empty} of {len(showers)} showers deposit nothing")
    if empty == len(showers):
        return warnings
    response = float(np.median((deposit / energies)[deposit > 0]))
    if response < SMALLEST_RESPONSE:
        warnings.append(f"energies look like MeV: the median response S/E is {response:.2g}")
    if response > LARGEST_RESPONSE:
        warnings.append(f"cells look like MeV: the median response S/E is {response:.2g}")
    mean_shower = [profile.sum(axis=0, keepdims=True) for profile in along]
    rms = np.sqrt(moments(mean_shower)[0, :, 1])
    longest = int(rms.argmax())
    if rms[longest] > LONGER_THAN_WIDE * rms[2]:
        warnings.append(
            f"axis {AXES[longest]} looks like the layers: the shower is {rms[longest]:.1f} cells "
            f"long there and {rms[2]:.1f} along the last axis; axes must be (events, x, y, layers)"
        )
    return warnings


def read_showers(
    path: Path, showers: str = "ECAL", energies: str = "energy", events: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The first `events` showers of an HDF5 file, (events, x, y, layers), and their energies.

    Args:
        showers, energies: datasets, or parts of them as "target[:, 1]".
        events: None = all.

    Raises:
        N3LOError: the file cannot be read, or does not hold the datasets.
    """
    if not path.exists():
        raise N3LOError(f"{path}: does not exist")
    try:
        with h5py.File(path, "r", locking=False) as file:
            return _read(file, showers, events), _read(file, energies, events)
    except OSError as error:
        raise N3LOError(f"{path}: is not a readable HDF5 file (truncated?)") from error


def main(words: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(words)
    try:
        _run(options)
    except N3LOError as error:
        print(f"n3lo: {error}", file=sys.stderr)
        sys.exit(2)


def _run(options: argparse.Namespace) -> None:
    # Only here: training imports this file for its checks, and does not need matplotlib.
    from apps.physics.figures import draw_all

    _check_options(options)
    real, real_warnings = _load(options.real, options)
    fake, fake_warnings = _load(options.generated, options)
    warnings = real_warnings + fake_warnings + _unlike_energies(real, fake)
    for warning in warnings:
        print(f"n3lo: warning: {warning}", file=sys.stderr)
    rows = validate(real, fake, options.seed, options.edges)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        facts = _facts(options, len(real), len(fake), warnings)
        write_json(
            options.out / "validation.json", {**facts, "rows": [_plain(row) for row in rows]}
        )
        write_text(options.out / "validation.md", markdown(facts, rows))
        draw_all(real, fake, options.out, tuple(options.labels), options.edges)
    except OSError as error:
        raise N3LOError(f"--out: {options.out}: {error.strerror or error}") from error
    print(markdown(facts, rows), end="")


def _check_options(options: argparse.Namespace) -> None:
    edges = options.edges
    if len(edges) < 2 or any(high <= low for low, high in pairwise(edges)):
        raise N3LOError(f"--edges: {_listed(edges)} do not rise")
    if options.events is not None and options.events < 1:
        raise N3LOError(f"--events: {options.events} is not at least 1")


def markdown(facts: dict[str, Any], rows: Sequence[Row]) -> str:
    """The table, with what one must know to read it."""
    lines = [
        f"# {facts['generated']} against {facts['real']}",
        "",
        f"{facts['generated_events']} generated and {facts['real_events']} real showers, "
        f"{facts['edges_gev'][0]:g} to {facts['edges_gev'][-1]:g} GeV. Means and spreads over "
        f"{facts['halves']} random halves of {facts['events_compared']} showers: generated against "
        "real, and real against real (the floor, below which no number means anything).",
        "",
        *(f"- Warning: {warning}" for warning in facts["warnings"]),
        *([""] if facts["warnings"] else []),
        "| quantity | unit | generated against real | floor | sigmas above it |",
        "|---|---|---|---|---|",
        *(
            f"| {row.name} | {row.unit or ''} | {row.value:.3g} ± {row.uncertainty:.1g} "
            f"| {row.floor:.3g} ± {row.floor_uncertainty:.1g} | {_sigmas(row)} |"
            for row in rows
        ),
    ]
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m apps.physics.validation",
        description="Judge generated calorimeter showers by physics, against simulated ones.",
        epilog="Showers: (events, x, y, layers) in GeV. Energies: (events,) in GeV.",
    )
    parser.add_argument("real", type=Path, help="HDF5 file of simulated showers")
    parser.add_argument("generated", type=Path, help="HDF5 file of generated showers")
    parser.add_argument("--out", type=Path, required=True, help="folder for tables and figures")
    parser.add_argument("--showers", default="ECAL", help="dataset of the cells (ECAL)")
    parser.add_argument(
        "--energies", default="energy", help="dataset of the energies (energy), or 'target[:, 1]'"
    )
    parser.add_argument("--events", type=int, help="read only so many of each file; 60 kB each")
    parser.add_argument(
        "--edges",
        type=float,
        nargs="+",
        default=ENERGY_EDGES,
        metavar="GEV",
        help=f"bins of energy ({_listed(ENERGY_EDGES)})",
    )
    parser.add_argument(
        "--labels",
        nargs=2,
        default=("Geant4", "generated"),
        metavar=("REAL", "GENERATED"),
        help="of the curves in the figures",
    )
    parser.add_argument("--seed", type=int, default=1)
    return parser


def _load(path: Path, options: argparse.Namespace) -> tuple[Observables, list[str]]:
    """The observables of a file, and warnings about it."""
    showers, energies = read_showers(path, options.showers, options.energies, options.events)
    try:
        warnings = check_showers(showers, energies)
        observed = observe(showers, energies)
    except N3LOError as error:
        raise N3LOError(f"{path}: {error}") from error
    low, high = options.edges[0], options.edges[-1]
    if outside := np.count_nonzero((energies < low) | (energies > high)):
        warnings.append(f"{outside} energies are not between {low:g} and {high:g} GeV; see --edges")
    return observed, [f"{path.name}: {warning}" for warning in warnings]


def _read(file: h5py.File, name: str, events: int | None) -> np.ndarray:
    field = parse_field(name)
    if not isinstance(dataset := file.get(field.dataset), h5py.Dataset):
        there = ", ".join(sorted(key for key in file if isinstance(file[key], h5py.Dataset)))
        raise N3LOError(f"{file.filename}: there is no dataset '{field.dataset}', only {there}")
    try:
        return np.asarray(dataset[(slice(events), *field.index)])
    except (ValueError, TypeError) as error:
        raise N3LOError(f"{file.filename}: '{name}' does not fit {dataset.shape}") from error


def _check_numbers(showers: np.ndarray, energies: np.ndarray) -> None:
    if showers.ndim != 4:
        raise N3LOError(f"showers: the shape {showers.shape} is not (events, x, y, layers)")
    if energies.shape != showers.shape[:1]:
        raise N3LOError(f"energies: {energies.shape} for {len(showers)} showers, not one each")
    if len(showers) == 0:
        raise N3LOError("showers: there is none")
    for name, values in (("cells", showers), ("energies", energies)):
        if odd := values.size - np.count_nonzero(np.isfinite(values)):
            raise N3LOError(f"{odd} {name} are not finite (nan or inf)")
    if energies.min() <= 0:
        raise N3LOError(f"energies: {energies.min():g} GeV is not above 0")


def _unlike_energies(real: Observables, fake: Observables) -> list[str]:
    """Distances compare what came of the energies; unlike ones would be seen instead."""
    from scipy.stats import ks_2samp  # as in apps.physics.distances

    chance = ks_2samp(real.energies, fake.energies).pvalue
    if chance > 1e-3:
        return []
    return [
        f"the energies of the two files are not of one distribution (Kolmogorov-Smirnov p = "
        f"{chance:.1g}): generate at the real energies, or the distances show this too"
    ]


def _response_differences(
    real: Observables, fake: Observables, edges: Sequence[float]
) -> list[tuple[str, float]]:
    """Mean over the bins of energy of |fake - real| / real."""
    raw = _paired(
        response_points(real.response, real.energies, edges),
        response_points(fake.response, fake.energies, edges),
    )
    weighted = _paired(
        response_points(real.weighted_response, real.energies, edges),
        response_points(fake.weighted_response, fake.energies, edges),
    )
    return [
        ("response, relative difference", _relative([(a.mean, b.mean) for a, b in raw])),
        (
            "weighted resolution, relative difference",
            _relative([(a.resolution, b.resolution) for a, b in weighted]),
        ),
    ]


def _paired(
    real: Sequence[ResponsePoint], fake: Sequence[ResponsePoint]
) -> list[tuple[ResponsePoint, ResponsePoint]]:
    """The points of the bins that both have."""
    of_bin = {point.low_gev: point for point in fake}
    pairs = [(point, of_bin[point.low_gev]) for point in real if point.low_gev in of_bin]
    if not pairs:
        raise N3LOError("response: no bin of energy holds two real and two generated showers")
    return pairs


def _relative(pairs: Sequence[tuple[float, float]]) -> float:
    real, fake = np.array(pairs).T
    return float(np.mean(np.abs(ratio(fake - real, real))))


def _row(values: Sequence[Measurement], floors: Sequence[Measurement]) -> Row:
    of_value, of_floor = ([each.value for each in those] for those in (values, floors))
    return Row(
        name=values[0].name,
        unit=values[0].unit,
        value=float(np.mean(of_value)),
        uncertainty=float(np.std(of_value, ddof=1)),
        floor=float(np.mean(of_floor)),
        floor_uncertainty=float(np.std(of_floor, ddof=1)),
    )


def _facts(
    options: argparse.Namespace, num_real: int, num_fake: int, warnings: Sequence[str]
) -> dict[str, Any]:
    """What was compared, as validation.json has it."""
    return {
        "real": str(options.real),
        "generated": str(options.generated),
        "real_events": num_real,
        "generated_events": num_fake,
        "halves": HALVES,
        "events_compared": min(num_real, num_fake) // 2,
        "edges_gev": list(options.edges),
        "seed": options.seed,
        "version": VERSION,
        "warnings": list(warnings),
    }


def _plain(row: Row) -> dict[str, Any]:
    return {**dataclasses.asdict(row), "significance": row.significance}


def _sigmas(row: Row) -> str:
    return "" if row.significance is None else f"{row.significance:+.1f}"


def _listed(numbers: Sequence[float]) -> str:
    return " ".join(f"{number:g}" for number in numbers)


if __name__ == "__main__":
    main()
