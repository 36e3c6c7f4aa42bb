"""The figures that physicists compare showers with, as PNG and PDF.

Errors are statistical, one standard deviation. The only file that needs matplotlib.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apps.physics.distances import FEATURES, features_of
from apps.physics.observables import (
    CELL_EDGES,
    ENERGY_EDGES,
    Observables,
    ResponsePoint,
    energy_bins,
    fit_resolution,
    layer_correlation,
    response_points,
)

# Told apart also by those who do not see red and green alike: Okabe & Ito 2008.
COLOURS = ("#000000", "#D55E00")
MARKERS = ("o", "s")

STYLE = {
    "font.family": "serif",
    "font.serif": ["STIXGeneral"],
    "mathtext.fontset": "stix",
    "font.size": 12,
    "axes.linewidth": 0.8,
    "legend.frameon": False,
    "xtick.direction": "in",
    "ytick.direction": "in",
    "xtick.top": True,
    "ytick.right": True,
    "xtick.minor.visible": True,
    "ytick.minor.visible": True,
    "savefig.dpi": 200,
}

RESPONSE_BINS = 8  # of energy: a resolution has three terms
RATIO_LIMITS = (0.5, 1.5)


@dataclass(frozen=True)
class Curve:
    """A value and its error in each bin, (bins,)."""

    value: np.ndarray
    error: np.ndarray

    def over(self, other: Curve) -> Curve:
        """The ratio to `other`, with the error of this one only; nan where `other` is 0."""
        bottom = np.where(other.value > 0, other.value, np.nan)
        return Curve(self.value / bottom, self.error / bottom)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Real and generated showers, and what the figures call them."""

    real: Observables
    fake: Observables
    labels: tuple[str, str]
    edges: Sequence[float]  # of the bins of energy, GeV

    def __iter__(self) -> Iterator[Observables]:
        return iter((self.real, self.fake))

    def in_bin(self, number: int) -> Pair:
        """The events of one bin of energy."""
        inside = [each.take(energy_bins(each.energies, self.edges) == number) for each in self]
        return dataclasses.replace(self, real=inside[0], fake=inside[1])

    @property
    def bin_labels(self) -> list[str]:
        bins = zip(self.edges[:-1], self.edges[1:], strict=True)
        return [f"{low:g} to {high:g} GeV" for low, high in bins]


def draw_all(
    real: Observables,
    fake: Observables,
    folder: Path,
    labels: tuple[str, str] = ("Geant4", "generated"),
    edges: Sequence[float] = ENERGY_EDGES,
) -> list[Path]:
    """Write every figure of this file into the folder, which is made where it is not there.

    Args:
        labels: of the real showers, and of the generated ones.
        edges: of the bins of energy in GeV.

    Returns:
        The files, a PNG and a PDF a figure.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pair = Pair(real=real, fake=fake, labels=labels, edges=edges)
    written = []
    with matplotlib.rc_context(STYLE):
        for name, draw in FIGURES.items():
            figure = draw(pair)
            png, pdf = folder / f"{name}.png", folder / f"{name}.pdf"
            figure.savefig(png)
            figure.set_layout_engine("none")  # as laid out for the PNG, in half the time
            figure.savefig(pdf, metadata={"CreationDate": None})  # the same bytes every time
            written += [png, pdf]
    return written


def longitudinal_profile(pair: Pair) -> Figure:
    """Mean energy of each layer, a panel a bin of energy, with ratios."""
    num_bins = len(pair.edges) - 1
    figure, axes = _with_ratios(1, num_bins)
    for column, label in enumerate(pair.bin_labels):
        inside = pair.in_bin(column)
        upper, lower = axes[:, column]
        _steps(upper, lower, [_mean(each.layers) for each in inside], pair.labels)
        upper.set_title(label, fontsize="medium")
        upper.set_ylim(bottom=0)
        lower.set_xlabel("layer")
    axes[0, 0].set_ylabel("mean energy per layer [GeV]")
    axes[0, -1].legend()
    return figure


def transverse_profiles(pair: Pair) -> Figure:
    """Mean energy of each row of cells along x and y, linear and logarithmic, with ratios."""
    figure, axes = _with_ratios(2, 2)
    for column, name in enumerate("xy"):
        curves = [_mean(each.profiles[column]) for each in pair]
        linear, logarithmic, lower = axes[:, column]
        _steps(linear, lower, curves, pair.labels)
        _draw_steps(logarithmic, curves, pair.labels)
        linear.set_ylim(bottom=0)
        logarithmic.set_yscale("log")
        lower.set_xlabel(f"{name} cell ({pair.real.geometry.cell_mm:g} mm)")
    for axis in axes[:2, 0]:
        axis.set_ylabel("mean energy [GeV]")
    axes[0, 1].legend()
    return figure


def response_and_resolution(pair: Pair) -> Figure:
    """Mean response, and resolution of weighted layers with its fit, in eight bins of energy."""
    edges = np.linspace(pair.edges[0], pair.edges[-1], RESPONSE_BINS + 1)
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for observed, label, colour, marker in zip(pair, pair.labels, COLOURS, MARKERS, strict=True):
        style = {"color": colour, "marker": marker, "label": label}
        raw = response_points(observed.response, observed.energies, edges)
        _points(left, raw, [p.mean for p in raw], [p.mean_error for p in raw], style)
        weighted = response_points(observed.weighted_response, observed.energies, edges)
        style["label"] = _fit(right, weighted, label, colour)
        percent = [100 * p.resolution for p in weighted]
        errors = [100 * p.resolution_error for p in weighted]
        _points(right, weighted, percent, errors, style)
    left.set_ylabel(r"mean response $S/E$")
    right.set_ylabel(r"weighted resolution $\sigma/\mathrm{mean}$ [%]")
    right.set_ylim(0, 1.4 * right.get_ylim()[1])  # room for the terms of the fits
    for axis in (left, right):
        axis.set_xlabel("particle energy $E$ [GeV]")
        axis.legend(fontsize="small")
    return figure


def cell_energies(pair: Pair) -> Figure:
    """How many cells of each energy a shower has."""
    figure, axes = _with_ratios(1, 1)
    upper, lower = axes[:, 0]
    _steps(upper, lower, [_mean(each.spectra) for each in pair], pair.labels, CELL_EDGES)
    upper.set_yscale("log")
    upper.set_xscale("log")
    filled = np.flatnonzero(sum(each.spectra.sum(axis=0) for each in pair))
    if len(filled):
        upper.set_xlim(CELL_EDGES[filled[0]], CELL_EDGES[filled[-1] + 1])
    upper.set_ylabel("cells per shower and bin")
    lower.set_xlabel("cell energy [GeV]")
    upper.legend()
    return figure


def hits(pair: Pair) -> Figure:
    """How many cells of a shower are hit."""
    figure, axes = _with_ratios(1, 1)
    upper, lower = axes[:, 0]
    edges = np.linspace(0, pair.real.hits.max() * 1.15 + 1, 31)
    _steps(upper, lower, [_density(each.hits, edges) for each in pair], pair.labels, edges)
    upper.set_ylim(bottom=0)
    upper.set_ylabel("share of showers")
    lower.set_xlabel(f"cells above {pair.real.geometry.threshold_gev * 1e6:g} keV")
    upper.legend()
    return figure


def shower_shapes(pair: Pair) -> Figure:
    """Centre and rms of each shower along each axis."""
    return _feature_panels(
        pair, ("x centre", "y centre", "layer centre", "x rms", "y rms", "layer rms")
    )


def cell_features(pair: Pair) -> Figure:
    """What else the classifier and the FPD look at."""
    return _feature_panels(
        pair,
        (
            "weighted response",
            "hottest cell fraction",
            "mean log10 cell energy",
            "first 5 layers fraction",
            "last 5 layers fraction",
            "response",
        ),
    )


def layer_widths(pair: Pair) -> Figure:
    """How wide the shower is in each layer: its mean rms along x and y."""
    figure, axes = _with_ratios(1, 2)
    for column, name in enumerate("xy"):
        upper, lower = axes[:, column]
        _steps(upper, lower, [_mean(each.widths_mm[:, column]) for each in pair], pair.labels)
        upper.set_ylim(bottom=0)
        upper.set_ylabel(f"mean rms of a layer along {name} [mm]")
        lower.set_xlabel("layer")
    axes[0, 0].legend()
    return figure


def layer_correlations(pair: Pair) -> Figure:
    """Pearson correlation of the layers' energies: real, generated, and their difference."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    matrices = [layer_correlation(each.layers) for each in pair]
    shown = [*matrices, matrices[1] - matrices[0]]
    limit = max(0.1, float(np.abs(shown[2]).max()))
    titles = [*pair.labels, rf"{pair.labels[1]} $-$ {pair.labels[0]}"]
    limits = (1.0, 1.0, limit)
    for axis, matrix, title, largest in zip(panels, shown, titles, limits, strict=True):
        image = axis.imshow(matrix, cmap="RdBu_r", vmin=-largest, vmax=largest, origin="lower")
        axis.set_title(title, fontsize="medium")
        axis.set_xlabel("layer")
        figure.colorbar(image, ax=axis, shrink=0.9, label="correlation of energies")
        axis.tick_params(which="both", color="grey")
    panels[0].set_ylabel("layer")
    return figure


FIGURES: dict[str, Callable[[Pair], Figure]] = {
    "longitudinal_profile": longitudinal_profile,
    "transverse_profiles": transverse_profiles,
    "response_and_resolution": response_and_resolution,
    "cell_energies": cell_energies,
    "hits": hits,
    "shower_shapes": shower_shapes,
    "cell_features": cell_features,
    "layer_widths": layer_widths,
    "layer_correlations": layer_correlations,
}


def _with_ratios(num_rows: int, num_columns: int) -> tuple[Figure, np.ndarray]:
    """Panels (rows + 1, columns), the last row for ratios, that share x down a column."""
    figure = Figure(
        figsize=(max(5.5, 4.2 * num_columns), 2.9 * num_rows + 1.6), layout="constrained"
    )
    axes = figure.subplots(
        num_rows + 1,
        num_columns,
        sharex="col",
        squeeze=False,
        height_ratios=[3] * num_rows + [1],
    )
    return figure, axes


def _steps(
    upper: Axes,
    lower: Axes,
    curves: Sequence[Curve],
    labels: Sequence[str],
    edges: np.ndarray | None = None,
) -> None:
    """Two step histograms with error bands, and the second over the first below."""
    _draw_steps(upper, curves, labels, edges)
    real, fake = curves
    _draw_steps(lower, [real.over(real), fake.over(real)], labels, edges)
    lower.set_ylim(*RATIO_LIMITS)
    if lower.get_subplotspec().is_first_col():
        lower.set_ylabel(f"ratio to\n{labels[0]}")


def _draw_steps(
    axis: Axes, curves: Sequence[Curve], labels: Sequence[str], edges: np.ndarray | None = None
) -> None:
    edges = np.arange(len(curves[0].value) + 1) - 0.5 if edges is None else edges
    for curve, label, colour in zip(curves, labels, COLOURS, strict=True):
        low, high = (np.append(band, band[-1]) for band in _band(curve))
        axis.fill_between(edges, low, high, step="post", color=colour, alpha=0.25, lw=0)
        axis.stairs(curve.value, edges, color=colour, label=label, lw=1.4, baseline=None)
    axis.set_xlim(edges[0], edges[-1])


def _band(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    return curve.value - curve.error, curve.value + curve.error


def _points(
    axis: Axes,
    points: Sequence[ResponsePoint],
    values: Sequence[float],
    errors: Sequence[float],
    style: dict[str, str],
) -> None:
    energy = [point.energy_gev for point in points]
    axis.errorbar(energy, values, errors, linestyle="none", markersize=4.5, capsize=2, **style)


def _fit(axis: Axes, points: Sequence[ResponsePoint], label: str, colour: str) -> str:
    """Draw the fitted resolution, if it can be fitted; the label with its terms."""
    if sum(point.resolution_error > 0 for point in points) < 3:
        return label
    fit = fit_resolution(points)
    energy = np.linspace(points[0].energy_gev, points[-1].energy_gev, 100)
    axis.plot(energy, 100 * fit.at(energy), color=colour, lw=1)
    return (
        f"{label}\n"
        rf"$({100 * fit.stochastic:.1f}\pm{100 * fit.stochastic_error:.1f})\,\%/\sqrt{{E}}"
        rf"\oplus ({fit.noise:.2f}\pm{fit.noise_error:.2f})\,\mathrm{{GeV}}/E"
        rf"\oplus ({100 * fit.constant:.1f}\pm{100 * fit.constant_error:.1f})\,\%$"
    )


def _feature_panels(pair: Pair, names: Sequence[str]) -> Figure:
    """Histograms of six features."""
    figure = Figure(figsize=(12, 6.6), layout="constrained")
    columns = [list(FEATURES).index(name) for name in names]
    features = [features_of(each) for each in pair]
    for axis, column, name in zip(figure.subplots(2, 3).flat, columns, names, strict=True):
        values = [each[:, column] for each in features]
        edges = _edges(*values)
        _draw_steps(axis, [_density(each, edges) for each in values], pair.labels, edges)
        unit = FEATURES[name]
        axis.set_xlabel(f"{name} [{unit}]" if unit else name)
        axis.set_ylim(bottom=0)
        axis.set_ylabel("share of showers")
    figure.axes[0].legend()
    return figure


def _edges(real: np.ndarray, fake: np.ndarray) -> np.ndarray:
    """Of 40 bins over both, but no further from the real values than these are from each other."""
    low, high = real.min(), real.max()
    span = high - low if high > low else 1.0
    first, last = np.clip(fake.min(), low - span, low), np.clip(fake.max(), high, high + span)
    return np.linspace(first, last if last > first else first + span, 41)


def _mean(rows: np.ndarray) -> Curve:
    """Mean and its standard error over events, (events, bins) -> (bins,); 0 for no event."""
    num_events = max(1, len(rows))
    mean = rows.sum(axis=0) / num_events
    variance = ((rows - mean) ** 2).sum(axis=0) / max(1, num_events - 1)
    return Curve(mean, np.sqrt(variance / num_events))


def _density(values: np.ndarray, edges: np.ndarray) -> Curve:
    """Share of the events in each bin, with Poisson errors; those outside are in the end bins."""
    counts = np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0]
    return Curve(counts / len(values), np.sqrt(counts) / len(values))
