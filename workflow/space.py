"""The search space: dimensions as a study declares them, and the points in it.

A point is a dict from a study's dotted path to a plain Python value. A dimension whose condition
(`when`) is not met is inactive: it has no key in the point, and the trial has the study's own
value. Search engines that think in numbers see the unit cube, with a coordinate for every
dimension: `encode` and `decode` go between the two.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from apps.contract import N3LOError, canonical_json
from workflow.expression import Expression

Scalar: TypeAlias = bool | int | float | str
Point: TypeAlias = dict[str, Scalar]
Unit: TypeAlias = NDArray[np.float64]  # (D,), in [0, 1): one coordinate a dimension

_Key: TypeAlias = tuple[type, Scalar]  # of a value: True, 1 and 1.0 are different

NUM_DRAWS = 10_000  # points that `sample` draws until one satisfies the constraints
NUM_LISTED = 100_000  # points that a space may have to be looked through for the few that are left


@dataclass(frozen=True, kw_only=True)
class _Dimension:
    """Shared by the dimensions: unknown keys are errors when pydantic reads one."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    when: dict[str, list[Scalar]] | None = None  # active only if those dimensions are one of these


@dataclass(frozen=True, kw_only=True)
class Real(_Dimension):
    """Any number from `low` to `high`; uniform, or uniform in its logarithm."""

    type: Literal["real"] = "real"  # which of the dimensions it is
    low: float  # the smallest value
    high: float  # the largest value
    log: bool = False  # uniform in the logarithm
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

    type: Literal["int"] = "int"  # which of the dimensions it is
    low: int  # the smallest value
    high: int  # the largest value, included
    log: bool = False  # all octaves are equally probable, not all integers
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
class _Listed(_Dimension):
    """One of the values."""

    values: list[Scalar]  # all that it may be

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


@dataclass(frozen=True, kw_only=True)
class Choice(_Listed):
    """One of the values, without an order."""

    type: Literal["choice"] = "choice"  # which of the dimensions it is

    def __post_init__(self) -> None:
        _check_values(self.values, at_least=1)


@dataclass(frozen=True, kw_only=True)
class Ordinal(_Listed):
    """One of the values, in their order: in the unit cube, neighbours are near."""

    type: Literal["ordinal"] = "ordinal"  # which of the dimensions it is

    def __post_init__(self) -> None:
        _check_values(self.values, at_least=2)


Dimension: TypeAlias = Annotated[Real | Integer | Choice | Ordinal, Field(discriminator="type")]


class SpaceError(ValueError):
    """The dimensions do not go together. One line."""

    def __init__(self, message: str, *key: str) -> None:
        super().__init__(f"search.{key[0]}: {message}")
        self.key = ("search", *key)  # of the study's text


@dataclass(frozen=True)
class Space:
    """The dimensions by their dotted path, in the study's order, and what all points satisfy.

    Raises:
        SpaceError: a condition or a constraint names what is not there.
    """

    dimensions: Mapping[str, Dimension]
    constraints: tuple[Expression, ...] = ()

    def __post_init__(self) -> None:
        for path in self.dimensions:
            self._check_when(path)
        _ = self.parents_first  # raises if there is none
        for constraint in self.constraints:
            for name in constraint.names:
                if name not in self.dimensions:
                    message = f"'{constraint.text}': {self._unknown(name)}"
                    raise SpaceError(message, "constraints")

    def check(self) -> None:
        """See that each dimension can be active. Engines may fix some such that others cannot.

        Raises:
            SpaceError: one cannot.
        """
        for path, dimension in self.dimensions.items():
            for name, values in (dimension.when or {}).items():
                for value in values:
                    if not self.dimensions[name].contains(value):
                        raise SpaceError(
                            f"'{path}': when: '{name}' is never {value!r}", "space", path
                        )
            if self.reached(path) is None:
                message = f"'{path}': when: contradictory conditions: it is never active"
                raise SpaceError(message, "space", path)

    @cached_property
    def size(self) -> float:
        """How many different points there are, those that violate constraints too.

        `math.inf` with a real dimension.
        """
        if not self._conditions:
            return math.prod(dimension.size for dimension in self.dimensions.values())
        return math.prod(
            sum(num for _, num in self._settings(group)) for group in self._independent()
        )

    def active(self, values: Mapping[str, Scalar]) -> list[str]:
        """The dimensions that are active with these values, in the study's order.

        Args:
            values: of the active ones at least. One that is missing meets no condition.
        """
        return list(self._walk(values.get))

    def allowed(self, point: Point) -> bool:
        """Whether the constraints hold; those on inactive dimensions do."""
        return all(_holds(constraint, point) for constraint in self.constraints)

    def sample(self, rng: np.random.Generator) -> Point:
        """A random point: uniform in the unit cube, where the constraints hold.

        Raises:
            N3LOError: they never do.
        """
        never = list(self.constraints)
        for _ in range(NUM_DRAWS):
            point = self.decode(rng.random(len(self.dimensions)))
            violated = [each for each in self.constraints if not _holds(each, point)]
            if not violated:
                return point
            never = [each for each in never if each in violated]
        if self._few:
            return dict(self._few[rng.integers(len(self._few))])
        texts = " and ".join(f"'{each.text}'" for each in never or self.constraints)
        raise N3LOError(f"search.constraints: no point of {NUM_DRAWS} satisfies {texts}")

    def decode(self, unit: Unit) -> Point:
        """The point at the coordinates `unit`, of shape (D,); it may violate constraints."""
        coordinates = dict(zip(self.dimensions, unit.tolist(), strict=True))
        return self._walk(lambda path: self.dimensions[path].decode(coordinates[path]))

    def encode(self, point: Point) -> Unit:
        """The coordinates, of shape (D,), that `decode` to the point; 0.5 of what is inactive."""
        return np.array(
            [
                0.5 if path not in point and d.when is not None else d.encode(point[path])
                for path, d in self.dimensions.items()
            ],
            dtype=float,
        )

    def fill(self, values: Mapping[str, Scalar], rng: np.random.Generator) -> Point:
        """A point with these values, as far as they are active, and random ones for the rest.

        It may violate constraints.
        """
        coordinates = dict(zip(self.dimensions, rng.random(len(self.dimensions)), strict=True))
        return self._walk(
            lambda path: (
                values[path] if path in values else self.dimensions[path].decode(coordinates[path])
            )
        )

    def clip(self, point: Point) -> Point:
        """The point with the nearest values, in plain types; it may violate constraints.

        Raises:
            ValueError: a value is none of its choices, which have no nearest.
        """
        return self._walk(lambda path: self.dimensions[path].clip(point[path]))

    def contains(self, point: Point) -> bool:
        return (
            point.keys() == set(self.active(point))
            and all(self.dimensions[path].contains(value) for path, value in point.items())
            and self.allowed(point)
        )

    def why_not(self, values: Mapping[str, Scalar]) -> str | None:
        """Why these cannot be values of a point; None if they can. Others may be left out.

        Not those that decide whether one of these is active.
        """
        for path, value in values.items():
            if path not in self.dimensions:
                return self._unknown(path)
            if not self.dimensions[path].contains(value):
                return f"'{path}' = {value!r} is not {_range(self.dimensions[path])}"
        for path in values:
            for name, keys in self._conditions.get(path, {}).items():
                if name not in values or self._key(name, values[name]) not in keys:
                    wanted = [value for _, value in keys]
                    return f"'{path}' needs '{name}' to be one of {wanted}"
        violated = (each for each in self.constraints if not _holds(each, dict(values)))
        return next((f"'{each.text}' does not hold" for each in violated), None)

    def identity(self, point: Point) -> str:
        """The same text for the same point: an integer's 1.0 is 1, a choice of 1 is not True."""
        return canonical_json(
            [
                None if path not in point and d.when is not None else d.plain(point[path])
                for path, d in self.dimensions.items()
            ]
        )

    def completed(self, point: Point, own: Mapping[str, Scalar]) -> Point | None:
        """A point of an earlier, different space as one of this; None if it is none.

        Args:
            own: the study's own values. A dimension that the point lacks had that value, and what
                is no (active) dimension any more must have had it.
        """
        known = {**own, **point}
        whole = self._walk(known.get)
        dropped = (path for path in point if path not in whole)
        if not self.contains(whole) or not all(_same(point[p], own.get(p)) for p in dropped):
            return None
        return self.clip(whole)

    def grid(self) -> Iterator[Point]:
        """Every combination of each dimension's grid; the last dimension moves fastest.

        Those that violate constraints are left out; a dimension comes after those that it depends
        on.
        """
        return self._product({path: d.grid() for path, d in self.dimensions.items()})

    def points(self) -> Iterator[Point]:
        """Every point of a space without real dimensions, in the order of `grid`."""
        assert self.size < math.inf
        return self._product(
            # One that is real is never active, or the size would not be finite.
            {p: [] if isinstance(d, Real) else d.levels() for p, d in self.dimensions.items()}
        )

    def reached(self, path: str) -> Point | None:
        """Values of the dimensions above `path` with which it is active; None if it never is."""
        above: dict[str, None] = {}
        pending = [path]
        while pending:
            parents = self.dimensions[pending.pop()].when or {}
            pending += [name for name in parents if name not in above]
            above |= dict.fromkeys(parents)
        order = [name for name in self.parents_first if name in above]
        for values, _ in self._settings([*order, path]):
            if path in values:
                return {name: values[name] for name in order}
        return None

    # -- conditions ----------------------------------------------------------------------------

    @cached_property
    def parents_first(self) -> list[str]:
        """The dimensions in the study's order, but each after those that it depends on.

        Raises:
            SpaceError: they depend on each other in a circle.
        """
        order: dict[str, None] = {}

        def visit(path: str, trail: list[str]) -> None:
            if path in trail:
                circle = " -> ".join([*trail[trail.index(path) :], path])
                raise SpaceError(f"'{path}': when: a circle: {circle}", "space", path)
            if path not in order:
                for name in self.dimensions[path].when or {}:
                    visit(name, [*trail, path])
                order[path] = None

        for path in self.dimensions:
            visit(path, [])
        return list(order)

    @cached_property
    def _conditions(self) -> dict[str, dict[str, list[_Key]]]:
        """What `when` asks for: dimension -> the one it depends on -> keys of its values."""
        return {
            path: {
                name: [key for value in values if (key := self._key(name, value)) is not None]
                for name, values in dimension.when.items()
            }
            for path, dimension in self.dimensions.items()
            if dimension.when is not None
        }

    def _key(self, path: str, value: Scalar) -> _Key | None:
        """Tells True, 1 and 1.0 apart, unless an int dimension does not; None: out of range."""
        dimension = self.dimensions[path]
        if not dimension.contains(value):
            return None
        plain = dimension.plain(value)
        return type(plain), plain

    def _is_met(self, path: str, values: Mapping[str, Any]) -> bool:
        """Whether the dimension is active; `values` has those above it that are."""
        conditions = self._conditions.get(path)
        return conditions is None or all(
            name in values and self._key(name, values[name]) in keys
            for name, keys in conditions.items()
        )

    def _walk(self, value_of: Callable[[str], Any]) -> Point:
        """The point of the values of what is active, which are asked for one by one."""
        if not self._conditions:
            return {path: value_of(path) for path in self.dimensions}
        values: Point = {}
        for path in self.parents_first:
            if self._is_met(path, values):
                values[path] = value_of(path)
        return self._ordered(values)

    def _ordered(self, values: Point) -> Point:
        return {path: values[path] for path in self.dimensions if path in values}

    def _product(self, axes: Mapping[str, Sequence[Scalar]]) -> Iterator[Point]:
        partial: Iterator[Point] = iter([{}])
        for path in self.parents_first:
            partial = self._extended(partial, path, axes[path])
        return filter(self.allowed, map(self._ordered, partial))

    def _extended(
        self, partial: Iterator[Point], path: str, axis: Sequence[Scalar]
    ) -> Iterator[Point]:
        for values in partial:
            if self._is_met(path, values):
                for value in axis:
                    yield {**values, path: value}
            else:
                yield values

    @cached_property
    def _few(self) -> list[Point]:
        """All legal points of a small space."""
        return list(self.points()) if self.size <= NUM_LISTED else []

    def _settings(self, paths: Sequence[str]) -> Iterator[tuple[dict[str, Any], float]]:
        """What the active ones among these can be, and how many combinations that stands for.

        All values to which no condition refers are one here: None.

        Args:
            paths: those that a dimension depends on come before it.
        """
        if not paths:
            yield {}, 1
            return
        *before, path = paths
        referred = dict.fromkeys(k for c in self._conditions.values() for k in c.get(path, ()))
        num_others = self.dimensions[path].size - len(referred)
        for values, num in self._settings(before):
            if not self._is_met(path, values):
                yield values, num
                continue
            for _, value in referred:
                yield {**values, path: value}, num
            if num_others > 0:
                yield {**values, path: None}, num * num_others

    def _independent(self) -> list[list[str]]:
        """The dimensions in groups, none of which depends on another; parents first in each."""
        groups: list[list[str]] = []
        for path in self.parents_first:
            parents = self.dimensions[path].when or {}
            joined = [group for group in groups if any(name in group for name in parents)]
            groups = [group for group in groups if group not in joined]
            groups.append([*(name for group in joined for name in group), path])
        return groups

    def _check_when(self, path: str) -> None:
        when = self.dimensions[path].when
        if when is None:
            return
        reason = None if when else "names no dimension"
        for name, values in when.items():
            if name == path:
                reason = f"names '{name}' itself"
            elif name not in self.dimensions:
                reason = self._unknown(name)
            elif isinstance(self.dimensions[name], Real):
                reason = f"'{name}' is real; only a choice, an ordinal or an int can be named"
            elif not values:
                reason = f"lists no value of '{name}'"
        if reason is not None:
            raise SpaceError(f"'{path}': when: {reason}", "space", path)

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, self.dimensions, 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        return f"'{name}' is no dimension of the space{hint}"


def _range(dimension: Dimension) -> str:
    if isinstance(dimension, Choice | Ordinal):
        return f"one of {dimension.values}"
    kind = "a whole number" if isinstance(dimension, Integer) else "a number"
    return f"{kind} from {dimension.low} to {dimension.high}"


def _holds(constraint: Expression, point: Point) -> bool:
    return not all(name in point for name in constraint.names) or constraint.holds(point)


def _same(value: Scalar, other: Scalar | None) -> bool:
    """1.0 is 1, but True is not."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _check_range(low: float, high: float, log: bool, num: int) -> None:
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"low {low} and high {high} have to be finite")
    if low >= high:
        raise ValueError(f"low {low} is not below high {high}")
    if log and low <= 0:
        raise ValueError(f"log needs low above 0, not {low}")
    if num < 2:
        raise ValueError(f"num: {num} is not at least 2")


def _check_values(values: Sequence[Scalar], at_least: int) -> None:
    if len(values) < at_least:
        raise ValueError(f"values: name at least {'one' if at_least == 1 else 'two'}")
    keys = [canonical_json(value) for value in values]
    for value, key in zip(values, keys, strict=True):
        if keys.count(key) > 1:
            raise ValueError(f"values: {value!r} is there twice")


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
