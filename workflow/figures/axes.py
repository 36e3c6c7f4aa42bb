"""Dimensions of a search space as axes of figures, and ranges that an outlier does not stretch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workflow.console import short_names, value_text
from workflow.figures.style import escaped, ticks
from workflow.space import Choice, Dimension, Ordinal, Scalar, Space

Array = NDArray[np.float64]

FEW = 10  # values
FENCE = 3.0  # interquartile ranges beyond the quartiles: what is farther out is cut off
PAD = 0.06  # of a range, on both sides
INACTIVE = "–"  # noqa: RUF001 - a dash, as tables have it
LONGEST = 14  # characters of a choice's value, and of a dimension's name twice as many
NUM_TICKS = 5


@dataclass(frozen=True)
class Axis:
    """A dimension as an axis: real and int ones as numbers, listed ones by their place."""

    path: str
    name: str  # short
    dimension: Dimension

    @property
    def label(self) -> str:
        """The name, as figures have it."""
        return escaped(self.name)

    @property
    def is_listed(self) -> bool:
        return isinstance(self.dimension, Choice | Ordinal)

    @property
    def is_log(self) -> bool:
        return not isinstance(self.dimension, Choice | Ordinal) and self.dimension.log

    @property
    def ends(self) -> tuple[float, float]:
        """Of what `places` gives for values of the dimension."""
        if isinstance(self.dimension, Choice | Ordinal):
            return 0.0, float(len(self.dimension.values) - 1)
        return float(self.dimension.low), float(self.dimension.high)

    def places(self, values: Sequence[Scalar | None]) -> Array:
        """Where values stand along the axis; NaN of None."""
        if isinstance(self.dimension, Choice | Ordinal):
            index = self.dimension.index
            return np.array([math.nan if v is None else index(v) for v in values], dtype=float)
        return np.array([math.nan if v is None else float(v) for v in values], dtype=float)

    def texts(self) -> list[str]:
        """The values of a listed dimension, no longer than there is room for."""
        values = self.dimension.values if isinstance(self.dimension, Choice | Ordinal) else []
        return [shortened(value_text(value), LONGEST) for value in values]

    def layout(self) -> dict[str, Any]:
        """What `update_xaxes` takes for it, or `update_yaxes`."""
        low, high = self.ends
        title = {"title_text": self.label}
        if self.is_listed:
            texts = [escaped(text) for text in self.texts()]
            return {
                **title,
                "type": "linear",
                "range": [-0.5, len(texts) - 0.5],
                "tickmode": "array",
                "tickvals": list(range(len(texts))),
                "ticktext": texts,
            }
        if not self.is_log:
            pad = 0.03 * (high - low)
            return {**title, "type": "linear", "range": [low - pad, high + pad], "tickmode": "auto"}
        logs = math.log10(low), math.log10(high)
        pad = 0.03 * (logs[1] - logs[0])
        marks = _ticks_within(*logs)
        return {
            **title,
            "type": "log",
            "range": [logs[0] - pad, logs[1] + pad],
            "tickmode": "array",
            "tickvals": [10.0 ** float(value) for value in marks["tickvals"]],
            "ticktext": marks["ticktext"],
        }

    def parallel(self, values: Sequence[Scalar | None]) -> dict[str, Any]:
        """What `go.Parcoords` takes for it; what is inactive stands below all values.

        It shows the texts of its ticks as they are, and those alone.
        """
        places = self.places(values)
        low, high = self.ends
        marks: dict[str, Any] = {}
        if self.is_listed:
            marks = {"tickvals": list(range(int(high) + 1)), "ticktext": self.texts()}
        elif self.is_log:
            places, low, high = np.log10(places), math.log10(low), math.log10(high)
            marks = _ticks_within(low, high)
        missing = np.isnan(places)
        high = max(high, low + 1) if self.is_listed else high
        if missing.any():
            below = low - 1 if self.is_listed else low - 0.12 * (high - low)
            if not marks:
                at = np.linspace(low, high, NUM_TICKS).tolist()
                marks = {"tickvals": at, "ticktext": [f"{value:g}" for value in at]}
            marks = {
                "tickvals": [below, *marks["tickvals"]],
                "ticktext": [INACTIVE, *marks["ticktext"]],
            }
            places, low = np.where(missing, below, places), below
        return {
            "label": escaped(shortened(self.name, LONGEST)),
            "values": places,
            "range": [low, high],
            **marks,
        }


def _ticks_within(low: float, high: float) -> dict[str, list[Any]]:
    """Of logarithms; parallel coordinates would draw others beyond the axis' ends."""
    marks = ticks((low, high))
    pairs = zip(map(float, marks["tickvals"]), marks["ticktext"], strict=True)
    inside = [pair for pair in pairs if low - 1e-9 <= pair[0] <= high + 1e-9]
    if len(inside) < 2:  # between two ticks, there are the ends
        inside = [(at, f"{10**at:.3g}") for at in (low, high)]
    return {"tickvals": [at for at, _ in inside], "ticktext": [text for _, text in inside]}


def axes_of(space: Space) -> dict[str, Axis]:
    """By path, in the study's order."""
    names = short_names(list(space.dimensions))
    return {
        path: Axis(path, shortened(name, 2 * LONGEST), dimension)
        for name, (path, dimension) in zip(names, space.dimensions.items(), strict=True)
    }


def shortened(text: str, most: int) -> str:
    """Its end if it is a dotted path, its begin else; not longer than `most`."""
    if len(text) <= most:
        return text
    return "…" + text[1 - most :] if "." in text and " " not in text else text[: most - 1] + "…"


def robust_range(values: Array, always: Sequence[float] = ()) -> tuple[float, float]:
    """Where an axis begins and ends so that far outliers do not squash the rest (Tukey 1977).

    Args:
        always: values that are in it wherever they are.
    """
    finite = values[np.isfinite(values)]
    if len(finite) == 0:
        return 0.0, 1.0
    lower, upper = np.quantile(finite, [0.25, 0.75])
    # inf: most are equal, or they are too few to call one of them far out.
    reach = FENCE * (upper - lower) if len(finite) >= FEW else 0.0
    reach = reach or math.inf
    inside = finite[(finite >= lower - reach) & (finite <= upper + reach)]
    ends = [*inside.tolist(), *(value for value in always if math.isfinite(value))]
    low, high = min(ends), max(ends)
    pad = PAD * (high - low) or 0.05 * abs(low) or 1.0
    return low - pad, high + pad
