"""The search space: dimensions as a study declares them, and the points in it.

A point is a dict from a study's dotted path to a plain Python value. Search engines that think in
numbers see the unit cube: `encode` and `decode` go between the two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from apps.contract import canonical_json

Scalar: TypeAlias = bool | int | float | str
Point: TypeAlias = dict[str, Scalar]
Unit: TypeAlias = NDArray[np.float64]  # (D,), in [0, 1): one coordinate a dimension


class _Dimension:
    """Shared by the dimensions: unknown keys are errors when pydantic reads one."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class Real(_Dimension):
    """Any number from `low` to `high`; uniform, or uniform in its logarithm."""

    type: Literal["real"] = "real"
    low: float
    high: float
    log: bool = False
    num: int = 5  # points that a grid takes along it

    def __post_init__(self) -> None:
        _check_range(self.low, self.high, self.log, self.num)

    @property
    def size(self) -> float:
        return math.inf

    def decode(self, u: float) -> float:
        return self.clip(_between(self.low, self.high, u, self.log))

    def encode(self, value: Scalar) -> float:
        return _fraction(self.low, self.high, float(value), self.log)

    def plain(self, value: Scalar) -> float:
        return float(value)

    def clip(self, value: Scalar) -> float:
        return float(min(max(float(value), self.low), self.high))

    def contains(self, value: Scalar) -> bool:
        return _is_number(value) and self.low <= float(value) <= self.high

    def grid(self) -> list[float]:
        return [self.decode(u) for u in np.linspace(0, 1, self.num)]


@dataclass(frozen=True, kw_only=True)
class Integer(_Dimension):
    """Any integer from `low` to `high`, both included.

    Integer k owns the bin [k, k + 1) of the scale, so that all are equally probable, or, with
    `log`, all octaves are: of 1 to 7 a third each falls to 1, to 2-3 and to 4-7.
    """

    type: Literal["int"] = "int"
    low: int
    high: int
    log: bool = False
    num: int = 5  # points that a grid takes along it; all where there are fewer

    def __post_init__(self) -> None:
        _check_range(self.low, self.high, self.log, self.num)

    @property
    def size(self) -> float:
        return self.high - self.low + 1

    def decode(self, u: float) -> int:
        scaled = math.floor(_between(self.low, self.high + 1, u, self.log))
        return min(max(scaled, self.low), self.high)  # exp(log(low)) may be a little less than low

    def encode(self, value: Scalar) -> float:
        """The middle of the value's bin."""
        ends = [
            _fraction(self.low, self.high + 1, end, self.log)
            for end in (int(value), int(value) + 1)
        ]
        return sum(ends) / 2

    def plain(self, value: Scalar) -> int:
        return round(float(value)) if isinstance(value, float) else int(value)

    def clip(self, value: Scalar) -> int:
        return min(max(self.plain(value), self.low), self.high)

    def contains(self, value: Scalar) -> bool:
        """3.0 counts as 3: a table may have made floats of all integers."""
        return _is_number(value) and self.low <= float(value) <= self.high and value == int(value)

    def levels(self) -> Sequence[int]:
        return range(self.low, self.high + 1)

    def grid(self) -> list[int]:
        if self.size <= self.num:
            return list(self.levels())
        steps = np.linspace(0, 1, self.num)
        points = [self.clip(_between(self.low, self.high, u, self.log)) for u in steps]
        return list(dict.fromkeys(points))  # small numbers of a log scale round to the same


@dataclass(frozen=True, kw_only=True)
class Choice(_Dimension):
    """One of the values, without an order."""

    type: Literal["choice"] = "choice"
    values: list[Scalar]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("values: name at least one")
        keys = [canonical_json(value) for value in self.values]
        for value, key in zip(self.values, keys, strict=True):
            if keys.count(key) > 1:
                raise ValueError(f"values: {value!r} is there twice")

    @property
    def size(self) -> float:
        return len(self.values)

    def index(self, value: Scalar) -> int:
        """Where the value stands; unlike in `list.index`, True, 1 and 1.0 are different.

        Raises:
            ValueError: it is none of the values.
        """
        for index, known in enumerate(self.values):
            if type(known) is type(value) and known == value:
                return index
        raise ValueError(f"{value!r} is none of {self.values}")

    def decode(self, u: float) -> Scalar:
        return self.values[min(int(u * len(self.values)), len(self.values) - 1)]

    def encode(self, value: Scalar) -> float:
        """The middle of the value's bin; all bins are equal."""
        return (self.index(value) + 0.5) / len(self.values)

    def plain(self, value: Scalar) -> Scalar:
        return value

    def clip(self, value: Scalar) -> Scalar:
        return self.values[self.index(value)]

    def contains(self, value: Scalar) -> bool:
        return any(type(known) is type(value) and known == value for known in self.values)

    def levels(self) -> Sequence[Scalar]:
        return self.values

    def grid(self) -> list[Scalar]:
        return self.values


Dimension: TypeAlias = Annotated[Real | Integer | Choice, Field(discriminator="type")]


@dataclass(frozen=True)
class Space:
    """The dimensions by their dotted path, in the study's order."""

    dimensions: Mapping[str, Dimension]

    @property
    def size(self) -> float:
        """How many different points there are; `math.inf` with a real dimension."""
        return math.prod(dimension.size for dimension in self.dimensions.values())

    def sample(self, rng: np.random.Generator) -> Point:
        return self.decode(rng.random(len(self.dimensions)))

    def decode(self, unit: Unit) -> Point:
        """The point at the coordinates `unit`, of shape (D,)."""
        pairs = zip(self.dimensions.items(), unit.tolist(), strict=True)
        return {path: dimension.decode(u) for (path, dimension), u in pairs}

    def encode(self, point: Point) -> Unit:
        """The coordinates, of shape (D,), that `decode` to the point."""
        return np.array([d.encode(point[path]) for path, d in self.dimensions.items()], dtype=float)

    def clip(self, point: Point) -> Point:
        """The nearest point of the space, in plain types.

        Raises:
            ValueError: a value is none of its choices, which have no nearest.
        """
        return {path: d.clip(point[path]) for path, d in self.dimensions.items()}

    def contains(self, point: Point) -> bool:
        return point.keys() == self.dimensions.keys() and all(
            d.contains(point[path]) for path, d in self.dimensions.items()
        )

    def identity(self, point: Point) -> str:
        """The same text for the same point: an integer's 1.0 is 1, a choice of 1 is not True."""
        return canonical_json([d.plain(point[path]) for path, d in self.dimensions.items()])

    def grid(self) -> Iterator[Point]:
        """Every combination of each dimension's grid; the last dimension moves fastest."""
        return self._product(dimension.grid() for dimension in self.dimensions.values())

    def points(self) -> Iterator[Point]:
        """Every point of a space without real dimensions."""
        assert self.size < math.inf
        return self._product(
            d.levels() for d in self.dimensions.values() if not isinstance(d, Real)
        )

    def _product(self, axes: Iterable[Sequence[Scalar]]) -> Iterator[Point]:
        for values in itertools.product(*axes):
            yield dict(zip(self.dimensions, values, strict=True))


def _check_range(low: float, high: float, log: bool, num: int) -> None:
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"low {low} and high {high} have to be finite")
    if low >= high:
        raise ValueError(f"low {low} is not below high {high}")
    if log and low <= 0:
        raise ValueError(f"log needs low above 0, not {low}")
    if num < 2:
        raise ValueError(f"num: {num} is not at least 2")


def _between(low: float, high: float, u: float, log: bool) -> float:
    """What lies at the fraction `u` of the way from `low` to `high`."""
    if log:
        return math.exp(_between(math.log(low), math.log(high), u, log=False))
    return low * (1 - u) + high * u


def _fraction(low: float, high: float, value: float, log: bool) -> float:
    """The inverse of `_between`, kept in [0, 1] against rounding."""
    if log:
        return _fraction(math.log(low), math.log(high), math.log(value), log=False)
    return min(max((value - low) / (high - low), 0.0), 1.0)


def _is_number(value: Scalar) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
