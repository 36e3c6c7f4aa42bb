"""What physicists measure of calorimeter showers: profiles, moments, response, cells and layers.

`showers` are cell energies in GeV, (events, x, y, layers); `energies` are those of the incoming
particles in GeV, (events,). A shower without any deposit has no place and no shape: its moments,
fractions, centres and widths are given as 0, and nothing here is ever nan for finite showers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from apps.contract import N3LOError

AXES = ("x", "y", "layer")
ENERGY_EDGES = (10.0, 30.0, 60.0, 100.0)  # GeV
CELL_EDGES = np.geomspace(1e-6, 1.0, 61)  # GeV, ten bins a decade

NUM_MOMENTS = 6  # first and second, of three axes


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What must be known of a calorimeter besides the energies of its cells."""

    cell_mm: float  # side of a cell across the shower
    layer_weights: tuple[float, ...]  # absorber in front of each layer, in units of the thinnest
    threshold_gev: float  # cells at or below it are not read out


# 17 layers of 2.4 mm tungsten and 8 of 4.8 mm: key4hep/k4geo, CLIC_o2_v01, ECalBarrel_o1_v01_01.xml
CLIC = Geometry(cell_mm=5.1, layer_weights=(1.0,) * 17 + (2.0,) * 8, threshold_gev=1e-6)


# Of single showers


def read_out(showers: np.ndarray, geometry: Geometry = CLIC) -> np.ndarray:
    """The showers with all cells at or below the threshold set to 0, negative ones too.

    Raises:
        N3LOError: the shape is not (events, x, y, layers).
    """
    if showers.ndim != 4:
        raise N3LOError(f"showers: the shape {showers.shape} is not (events, x, y, layers)")
    return np.where(showers > geometry.threshold_gev, showers, 0)


def profiles(showers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Energy along each axis, summed over the other two, in GeV.

    Returns:
        (events, x), (events, y), (events, layers): the two transverse profiles and the
        longitudinal one.
    """
    along_xz, along_yz = _projections(showers)
    return along_xz.sum(axis=2), along_yz.sum(axis=2), along_xz.sum(axis=1)


def moments(of_profiles: Sequence[np.ndarray]) -> np.ndarray:
    """Barycentre and variance along each axis, (events, 3, 2), in cells and cells squared.

    m1 = Σ k p_k / S and m2 = Σ (k - m1)^2 p_k / S, for cells k = 0, 1, ... of the profile p and
    the total deposit S: `get_moments` of 3DGAN (https://github.com/svalleco/3Dgan).
    """
    return np.stack([_moments_along(profile) for profile in of_profiles], axis=1)


def weighted_deposit(layers: np.ndarray, geometry: Geometry = CLIC) -> np.ndarray:
    """Deposit in GeV, (events,), each layer weighted with the absorber in front of it.

    Args:
        layers: the longitudinal profile, (events, layers), in GeV.

    Raises:
        N3LOError: the geometry has another number of layers.
    """
    if layers.shape[1] != len(geometry.layer_weights):
        raise N3LOError(
            f"showers: {layers.shape[1]} layers, but the geometry has "
            f"{len(geometry.layer_weights)} layer weights; give the Geometry of this calorimeter"
        )
    return layers @ np.asarray(geometry.layer_weights)


def hits(showers: np.ndarray, threshold_gev: float) -> np.ndarray:
    """Number of cells above the threshold, (events,)."""
    return np.count_nonzero(showers > threshold_gev, axis=(1, 2, 3))


def sparsity(showers: np.ndarray, threshold_gev: float) -> np.ndarray:
    """Share of cells at or below the threshold, (events,)."""
    return 1 - hits(showers, threshold_gev) / np.prod(showers.shape[1:])


def hottest_cell_fraction(showers: np.ndarray) -> np.ndarray:
    """Share of the hottest cell in the total deposit, (events,)."""
    return ratio(showers.max(axis=(1, 2, 3)), _deposit(showers))


def layer_centres_and_widths(
    showers: np.ndarray, geometry: Geometry = CLIC
) -> tuple[np.ndarray, np.ndarray]:
    """Centre from the middle of the calorimeter, and rms, of each layer, in mm.

    EC = Σ u E / Σ E and sqrt(Σ u^2 E / Σ E - EC^2) for cells at u: HighLevelFeatures.py of the
    CaloChallenge (https://github.com/CaloChallenge/homepage). 0 for an empty layer.

    Returns:
        Twice (events, 2, layers): along x and y.
    """
    both = []
    for projection in _projections(showers):
        num_cells = projection.shape[1]
        place_mm = (np.arange(num_cells) - (num_cells - 1) / 2) * geometry.cell_mm
        layer = projection.sum(axis=1)
        centre = ratio(np.einsum("k,nkz->nz", place_mm, projection), layer)
        from_centre = place_mm[:, None] - centre[:, None, :]
        both.append((centre, np.sqrt(ratio((from_centre**2 * projection).sum(axis=1), layer))))
    centres, widths = zip(*both, strict=True)
    return np.stack(centres, axis=1), np.stack(widths, axis=1)


def cell_spectra(showers: np.ndarray, edges: np.ndarray = CELL_EDGES) -> np.ndarray:
    """Number of cells in each bin of energy, (events, bins), of those above 0.

    Energies beyond the edges (GeV) are counted in the first or the last bin.
    """
    event, *_ = place = np.nonzero(showers > 0)
    num_bins = len(edges) - 1
    bin_of_cell = np.clip(np.searchsorted(edges, showers[place], side="right") - 1, 0, num_bins - 1)
    counts = np.bincount(event * num_bins + bin_of_cell, minlength=len(showers) * num_bins)
    return counts.reshape(len(showers), num_bins)


# Of many showers


@dataclass(frozen=True, kw_only=True)
class Observables:
    """A few hundred numbers of each shower that stand for its thousands of cells.

    Everything that compares sets of showers starts from here, so that subsets cost nothing.
    """

    geometry: Geometry
    energies: np.ndarray  # (events,) GeV
    profiles: tuple[np.ndarray, ...]  # (events, x), (events, y), (events, layers), GeV
    hits: np.ndarray  # (events,)
    hottest: np.ndarray  # (events,)
    spectra: np.ndarray  # (events, bins of CELL_EDGES)
    widths_mm: np.ndarray  # (events, 2, layers)

    def __len__(self) -> int:
        return len(self.energies)

    def take(self, events: np.ndarray) -> Observables:
        """These events only: their numbers, or a mask."""
        arrays = {
            field.name: getattr(self, field.name)[events]
            for field in fields(self)
            if field.name not in ("geometry", "profiles")
        }
        return replace(self, profiles=tuple(each[events] for each in self.profiles), **arrays)

    @property
    def layers(self) -> np.ndarray:
        """(events, layers) GeV."""
        return self.profiles[2]

    @cached_property
    def deposit(self) -> np.ndarray:
        """(events,) GeV."""
        return self.layers.sum(axis=1)

    @cached_property
    def moments(self) -> np.ndarray:
        """(events, 3, 2), as of `moments`."""
        return moments(self.profiles)

    @property
    def response(self) -> np.ndarray:
        """S/E, (events,): visible over incoming energy."""
        return self.deposit / self.energies

    @property
    def weighted_response(self) -> np.ndarray:
        """(events,), as `response`, each layer weighted with the absorber in front of it."""
        return weighted_deposit(self.layers, self.geometry) / self.energies

    @property
    def mean_log_cell(self) -> np.ndarray:
        """(events,): mean of log10(energy / GeV) of the cells that are hit."""
        centres = (np.log10(CELL_EDGES[:-1]) + np.log10(CELL_EDGES[1:])) / 2
        return ratio(self.spectra @ centres, self.spectra.sum(axis=1))


def observe(showers: np.ndarray, energies: np.ndarray, geometry: Geometry = CLIC) -> Observables:
    """All observables of the showers, as read out.

    Raises:
        N3LOError: the shapes are not (events, x, y, layers) and (events,).
    """
    showers = read_out(showers, geometry)
    if energies.shape != showers.shape[:1]:
        raise N3LOError(f"energies: {energies.shape} for {len(showers)} showers")
    return Observables(
        geometry=geometry,
        energies=energies.astype(np.float64),
        profiles=profiles(showers),
        hits=hits(showers, geometry.threshold_gev),
        hottest=hottest_cell_fraction(showers),
        spectra=cell_spectra(showers),
        widths_mm=layer_centres_and_widths(showers, geometry)[1],
    )


def layer_correlation(layers: np.ndarray) -> np.ndarray:
    """Pearson correlation of the layers' energies, (layers, layers).

    0 with a layer whose energy never varies, its own included.
    """
    deviation = layers - layers.mean(axis=0)
    unit = ratio(deviation, np.sqrt((deviation**2).sum(axis=0)))
    return unit.T @ unit


# Response and resolution


@dataclass(frozen=True, kw_only=True)
class ResponsePoint:
    """The response in one bin of energy. Errors are statistical, one standard deviation."""

    low_gev: float  # edges of the bin
    high_gev: float
    energy_gev: float  # mean of the bin's events
    num_events: int
    mean: float
    mean_error: float
    resolution: float  # σ/mean
    resolution_error: float  # of a Gaussian response


@dataclass(frozen=True, kw_only=True)
class ResolutionFit:
    """σ/E = stochastic/√E ⊕ noise/E ⊕ constant, E in GeV."""

    stochastic: float  # √GeV
    noise: float  # GeV
    constant: float
    stochastic_error: float
    noise_error: float
    constant_error: float

    def at(self, energy_gev: np.ndarray) -> np.ndarray:
        return np.sqrt(
            self.stochastic**2 / energy_gev + (self.noise / energy_gev) ** 2 + self.constant**2
        )


def response_points(
    response: np.ndarray, energies: np.ndarray, edges: Sequence[float] = ENERGY_EDGES
) -> list[ResponsePoint]:
    """Mean and σ/mean of the response, (events,), in each bin of energy.

    Bins with fewer than two events are left out; σ/mean is 0 where nothing is deposited.
    """
    bin_of_event = energy_bins(energies, edges)
    points = []
    for number in range(len(edges) - 1):
        inside = bin_of_event == number
        num_events, values = int(inside.sum()), response[inside]
        if num_events < 2:
            continue
        mean, sigma = values.mean(), values.std(ddof=1)
        resolution = float(ratio(sigma, mean))
        points.append(
            ResponsePoint(
                low_gev=edges[number],
                high_gev=edges[number + 1],
                energy_gev=float(energies[inside].mean()),
                num_events=num_events,
                mean=float(mean),
                mean_error=float(sigma / np.sqrt(num_events)),
                resolution=resolution,
                resolution_error=resolution
                * math.sqrt(0.5 / (num_events - 1) + resolution**2 / num_events),
            )
        )
    return points


def fit_resolution(points: Sequence[ResponsePoint]) -> ResolutionFit:
    """Least squares in (σ/E)^2, which is linear in the squares of the three terms (none below 0).

    An error is the distance to the upper end of the one-sigma interval, so that a term which is
    found to be 0 still says how large it may be.

    Raises:
        N3LOError: fewer than three points with a width.
    """
    from scipy.optimize import nnls  # slow to import, and training measures without it

    points = [point for point in points if point.resolution_error > 0]
    if len(points) < 3:
        raise N3LOError(f"resolution: three terms cannot be fitted to {len(points)} energies")
    energy = np.array([point.energy_gev for point in points])
    resolution = np.array([point.resolution for point in points])
    error = 2 * resolution * np.array([point.resolution_error for point in points])
    design = np.stack([1 / energy, 1 / energy**2, np.ones_like(energy)], axis=1) / error[:, None]
    # Columns of like size: the inverse below loses no digits.
    scale = np.linalg.norm(design, axis=0)
    squares = nnls(design / scale, resolution**2 / error)[0] / scale
    covariance = np.linalg.pinv((design / scale).T @ (design / scale))
    errors = np.sqrt(squares + np.sqrt(np.diag(covariance)) / scale) - np.sqrt(squares)
    stochastic, noise, constant = map(float, np.sqrt(squares))
    return ResolutionFit(
        stochastic=stochastic,
        noise=noise,
        constant=constant,
        stochastic_error=float(errors[0]),
        noise_error=float(errors[1]),
        constant_error=float(errors[2]),
    )


def energy_bins(energies: np.ndarray, edges: Sequence[float]) -> np.ndarray:
    """Number of each event's bin, (events,); -1 outside. The last bin holds its upper edge."""
    number = np.searchsorted(edges, energies, side="right") - 1
    number[energies == edges[-1]] = len(edges) - 2
    number[number == len(edges) - 1] = -1
    return number


# The figure of merit of 3DGAN


@dataclass(frozen=True)
class FigureOfMerit:
    """How far generated showers are from real ones; 0 if their mean shapes are the same."""

    moments: float
    profiles: float

    @property
    def total(self) -> float:
        return self.moments + self.profiles


def shower_sums(
    showers: np.ndarray,
    energies: np.ndarray,
    edges: Sequence[float] = ENERGY_EDGES,
    geometry: Geometry = CLIC,
) -> np.ndarray:
    """All that `figure_of_merit` needs of some showers; sums of batches and ranks may be added.

    Events outside the edges (GeV) are left out; those without a deposit count, with moments of 0.

    Returns:
        (energy bins, 1 + 6 + x + y + layers): number of events, and the sums of their moments and
        of their profiles.
    """
    return _sum_by_energy(profiles(read_out(showers, geometry)), energies, edges)


def observed_sums(observed: Observables, edges: Sequence[float] = ENERGY_EDGES) -> np.ndarray:
    """`shower_sums` of showers whose observables are there."""
    return _sum_by_energy(observed.profiles, observed.energies, edges)


def figure_of_merit(real_sums: np.ndarray, fake_sums: np.ndarray) -> FigureOfMerit:
    """P + Q of 3DGAN, from `shower_sums` of real and of generated showers.

    P is the mean of |m_real - m_fake| / m_real over energy bins, axes, and first and second
    moments; Q that of |p_real - p_fake| / p_real over energy bins, axes, and cells of the mean
    profiles: analysis/TestingObjective.py of 3DGAN (https://github.com/svalleco/3Dgan). A bin of
    energy where either has no event, and a cell or moment that is 0 in the real mean, is left out.
    Finite for all finite float32 showers; 2 for a generator of empty ones.

    Raises:
        N3LOError: no energy bin has both, or the real showers are empty.
    """
    if real_sums.shape != fake_sums.shape:
        raise N3LOError(
            f"figure of merit: sums of {real_sums.shape} and {fake_sums.shape} are of "
            "unlike showers or energy bins"
        )
    filled = (real_sums[:, 0] > 0) & (fake_sums[:, 0] > 0)
    if not filled.any():
        raise N3LOError(
            "figure of merit: no energy bin holds both real and generated showers; choose edges "
            "that cover their energies"
        )
    real, fake = (sums[filled, 1:] / sums[filled, :1] for sums in (real_sums, fake_sums))
    if not real.any():
        raise N3LOError("figure of merit: the real showers hold no energy")
    return FigureOfMerit(
        moments=_mean_difference(real[:, :NUM_MOMENTS], fake[:, :NUM_MOMENTS]),
        profiles=_mean_difference(real[:, NUM_MOMENTS:], fake[:, NUM_MOMENTS:]),
    )


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Quotient in float64; 0 where the denominator is 0."""
    shape = np.broadcast_shapes(np.shape(numerator), np.shape(denominator))
    return np.divide(numerator, denominator, out=np.zeros(shape), where=denominator != 0)


def _projections(showers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(events, x, layers) and (events, y, layers): the two passes over all cells."""
    return showers.sum(axis=2, dtype=np.float64), showers.sum(axis=1, dtype=np.float64)


def _deposit(showers: np.ndarray) -> np.ndarray:
    return showers.sum(axis=(1, 2, 3), dtype=np.float64)


def _moments_along(profile: np.ndarray) -> np.ndarray:
    cell = np.arange(profile.shape[1])
    # Shares first: they are at most 1, whatever the energies.
    share = ratio(profile, profile.sum(axis=1, keepdims=True))
    first = share @ cell
    second = (share * (cell - first[:, None]) ** 2).sum(axis=1)
    return np.stack([first, second], axis=1)


def _sum_by_energy(
    of_profiles: Sequence[np.ndarray], energies: np.ndarray, edges: Sequence[float]
) -> np.ndarray:
    num_events = len(energies)
    rows = np.concatenate(
        [
            np.ones((num_events, 1)),
            moments(of_profiles).reshape(num_events, NUM_MOMENTS),
            *of_profiles,
        ],
        axis=1,
    )
    bin_of_event = energy_bins(energies, edges)
    return np.stack([rows[bin_of_event == number].sum(axis=0) for number in range(len(edges) - 1)])


def _mean_difference(real: np.ndarray, fake: np.ndarray) -> float:
    known = real > 0
    if not known.any():  # as of one-cell showers, whose moments are all 0
        return 0.0
    return float(np.mean(np.abs(real - fake)[known] / real[known]))
