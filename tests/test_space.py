"""Dimensions and the points of their spaces, with conditions and constraints."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from apps.contract import N3LOError
from workflow.expression import Expression
from workflow.space import (
    Choice,
    Dimension,
    Integer,
    Ordinal,
    Point,
    Real,
    Scalar,
    Space,
    SpaceError,
)

SPACE = Space(
    {
        "training.optimizer.lr": Real(low=1e-5, high=1e-1, log=True),
        "model.args.dropout": Real(low=0, high=0.5),
        "model.args.width": Integer(low=16, high=256, log=True),
        "model.args.depth": Integer(low=1, high=4),
        "model.args.activation": Choice(values=["relu", "selu"]),
        "data.shuffle": Choice(values=[True, False]),
    }
)

KIND = Choice(values=["cnn", "graph", "mlp"])
# A tree of conditions, the dimension that decides not first.
TREE = Space(
    {
        "kernel": Integer(low=1, high=7, when={"kind": ["cnn"]}),
        "kind": KIND,
        "batch": Ordinal(values=[16, 64, 48]),
        "pool": Choice(values=["max", "mean"], when={"kind": ["cnn", "graph"]}),
        "stride": Integer(low=1, high=3, when={"kernel": [5, 6, 7], "pool": ["max"]}),
        "lr": Real(low=1e-4, high=1, log=True, when={"kind": ["mlp"]}),
    }
)


def constrained(space: Space, *texts: str) -> Space:
    return Space(space.dimensions, tuple(Expression.parse(text) for text in texts))


def only(dimension: Dimension) -> Space:
    return Space({"x": dimension})


def decoded(dimension: Dimension, num: int) -> list[object]:
    """What `num` evenly spaced coordinates decode to."""
    return [dimension.decode(u) for u in (np.arange(num) + 0.5) / num]


def test_dimensions_load_by_their_type() -> None:
    load = TypeAdapter(Dimension).validate_python
    assert load({"type": "real", "low": 1, "high": 2}) == Real(low=1.0, high=2.0)
    assert load({"type": "int", "low": 1, "high": 2}) == Integer(low=1, high=2)
    for kind in (Choice, Ordinal):
        read = load({"type": kind.type, "values": [True, 1, 1.0, "1"], "when": {"k": [1, True]}})
        assert type(read) is kind
        assert [type(value) for value in read.values] == [bool, int, float, str]
        assert [type(value) for value in read.when["k"]] == [int, bool]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"type": "real", "low": 5, "high": 2}, "low 5.0 is not below high 2.0"),
        ({"type": "int", "low": 5, "high": 2}, "low 5 is not below high 2"),
        ({"type": "real", "low": 0, "high": 2, "log": True}, "log needs low above 0, not 0.0"),
        ({"type": "real", "low": 0, "high": math.inf}, "have to be finite"),
        ({"type": "real", "low": 0, "high": 1, "num": 1}, "num: 1 is not at least 2"),
        ({"type": "choice", "values": []}, "values: name at least one"),
        ({"type": "choice", "values": ["a", "b", "a"]}, "values: 'a' is there twice"),
        ({"type": "ordinal", "values": ["a"]}, "values: name at least two"),
        ({"type": "ordinal", "values": [1, 2, 1]}, "values: 1 is there twice"),
        ({"type": "int", "low": 1, "high": 2, "lgo": True}, "lgo"),
        ({"type": "integer", "low": 1, "high": 2}, "'real', 'int', 'choice', 'ordinal'"),
    ],
)
def test_a_wrong_dimension_says_what_is_wrong(table: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(Dimension).validate_python(table)


def test_integers_are_equally_probable_to_both_ends() -> None:
    assert Counter(decoded(Integer(low=-3, high=6), 1000)) == dict.fromkeys(range(-3, 7), 100)


def test_octaves_are_equally_probable_on_a_log_scale() -> None:
    counts = Counter(decoded(Integer(low=1, high=7, log=True), 300))
    assert counts[1] == counts[2] + counts[3] == sum(counts[k] for k in (4, 5, 6, 7)) == 100


def test_choices_are_equally_probable() -> None:
    assert Counter(decoded(Choice(values=["a", "b", "c"]), 300)) == {"a": 100, "b": 100, "c": 100}


def test_log_samples_are_uniform_in_the_logarithm() -> None:
    rng = np.random.default_rng(0)
    space = only(Real(low=1e-5, high=1e-1, log=True))
    decades = Counter(math.floor(math.log10(float(space.sample(rng)["x"]))) for _ in range(4000))
    assert set(decades) == {-5, -4, -3, -2}
    assert sum((n - 1000) ** 2 / 1000 for n in decades.values()) < 11.3  # chi2(3), p = 0.01


def test_samples_are_plain_and_inside() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        point = SPACE.sample(rng)
        assert [type(value) for value in point.values()] == [float, float, int, int, str, bool]
        assert SPACE.contains(point)
        assert SPACE.clip(point) == point


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("low", "high"), [(1e-5, 0.1), (3e-7, 0.7), (0.1, 0.3)])
def test_rounding_never_leaves_the_bounds(low: float, high: float, log: bool) -> None:
    dimension = Real(low=low, high=high, log=log)
    assert dimension.decode(0.0) >= low
    assert dimension.decode(1.0) <= high
    assert 0 <= dimension.encode(low) <= dimension.encode(high) <= 1


def test_decoding_inverts_encoding() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        point = SPACE.sample(rng)
        again = SPACE.decode(SPACE.encode(point))
        for path, value in point.items():
            exact = not isinstance(value, float)
            assert again[path] == (value if exact else pytest.approx(value, rel=1e-12))


@pytest.mark.parametrize("log", [False, True])
def test_every_integer_decodes_to_itself(log: bool) -> None:
    dimension = Integer(low=1, high=2000, log=log)
    assert all(dimension.decode(dimension.encode(k)) == k for k in dimension.levels())


def test_clip_moves_to_the_nearest_legal_value() -> None:
    assert Real(low=1, high=2).clip(3) == 2.0
    assert Integer(low=1, high=5).clip(2.7) == 3
    assert type(Integer(low=1, high=5).clip(np.int64(9))) is int
    with pytest.raises(ValueError, match=r"'gelu' is none of \['relu'\]"):
        Choice(values=["relu"]).clip("gelu")


def test_a_space_contains_only_whole_legal_points() -> None:
    space = Space({"k": Integer(low=1, high=5), "c": Choice(values=[1, "a"])})
    assert space.contains({"k": 3, "c": 1})
    assert space.contains({"k": 3.0, "c": 1})
    for point in ({"k": 6, "c": 1}, {"k": 2.5, "c": 1}, {"k": 3, "c": True}, {"k": 3}):
        assert not space.contains(point)


def test_identity_tells_choices_apart_but_not_the_floats_of_an_integer() -> None:
    assert only(Integer(low=1, high=5)).identity({"x": 1.0}) == "[1]"
    assert only(Real(low=1, high=5)).identity({"x": 1}) == "[1.0]"
    values = [1, 1.0, True, "1"]
    assert len({only(Choice(values=values)).identity({"x": value}) for value in values}) == 4


def test_the_last_dimension_of_a_grid_moves_fastest() -> None:
    space = Space({"k": Integer(low=1, high=2), "c": Choice(values=["a", "b"])})
    assert [tuple(point.values()) for point in space.grid()] == [
        (1, "a"), (1, "b"), (2, "a"), (2, "b"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("dimension", "values"),
    [
        (Real(low=0, high=1, num=3), [0.0, 0.5, 1.0]),
        (Real(low=1e-4, high=1e-2, num=3, log=True), [1e-4, 1e-3, 1e-2]),
        (Integer(low=1, high=3), [1, 2, 3]),
        (Integer(low=0, high=100, num=3), [0, 50, 100]),
        (Integer(low=16, high=256, num=5, log=True), [16, 32, 64, 128, 256]),
        (Integer(low=1, high=10, num=8, log=True), [1, 2, 3, 4, 5, 7, 10]),
    ],
)
def test_a_grid_spans_its_dimension(dimension: Dimension, values: list[float]) -> None:
    assert [point["x"] for point in only(dimension).grid()] == pytest.approx(values)


def test_size_counts_the_different_points() -> None:
    finite = Space({"k": Integer(low=1, high=3), "c": Choice(values=["a", "b"])})
    assert finite.size == len(list(finite.points())) == 6
    assert SPACE.size == math.inf
    assert Space({}).size == 1


# Ordinals


def test_neighbours_of_an_ordinal_are_near_in_the_order_that_was_given() -> None:
    dimension = Ordinal(values=[16, 64, 48, 32])
    assert [dimension.encode(v) for v in dimension.values] == [1 / 8, 3 / 8, 5 / 8, 7 / 8]
    assert [dimension.decode(u) for u in (0.0, 0.3, 0.5, 0.99, 1.0)] == [16, 64, 48, 32, 32]
    assert Counter(decoded(dimension, 400)) == dict.fromkeys(dimension.values, 100)


def test_an_ordinal_tells_its_values_apart_by_type_too() -> None:
    dimension = Ordinal(values=[1, 1.0, True, "1"])
    assert [dimension.index(value) for value in (1, 1.0, True, "1")] == [0, 1, 2, 3]
    assert dimension.size == 4
    assert list(dimension.levels()) == dimension.grid() == dimension.values
    assert not dimension.contains(2)
    assert not Ordinal(values=[1, 2]).contains(True)
    with pytest.raises(ValueError, match=r"3 is none of \[1, 2\]"):
        Ordinal(values=[1, 2]).clip(3)


# Conditions


@pytest.mark.parametrize(
    ("point", "is_in"),
    [
        ({"kind": "mlp", "batch": 64, "lr": 0.1}, True),
        ({"kind": "graph", "batch": 64, "pool": "max"}, True),
        ({"kind": "cnn", "batch": 64, "pool": "max", "kernel": 4}, True),
        ({"kind": "cnn", "batch": 64, "pool": "max", "kernel": 5, "stride": 1}, True),
        ({"kind": "cnn", "batch": 64, "pool": "max", "kernel": 5.0, "stride": 1}, True),
        ({"kind": "cnn", "batch": 64, "pool": "max", "kernel": 5}, False),
        ({"kind": "cnn", "batch": 64, "pool": "mean", "kernel": 5, "stride": 1}, False),
        ({"kind": "mlp", "batch": 64, "lr": 0.1, "kernel": 4}, False),
        ({"kind": "mlp", "batch": 64}, False),
        ({"kind": "none", "batch": 64}, False),
        ({"batch": 64}, False),
        ({}, False),
    ],
)
def test_a_point_has_the_active_dimensions_and_no_others(point: Point, is_in: bool) -> None:
    assert TREE.contains(point) is is_in


def test_what_is_active_depends_on_values_alone_and_comes_in_the_studys_order() -> None:
    values: Point = {"stride": 1, "pool": "max", "kernel": 6, "kind": "cnn", "batch": 16, "lr": 1}
    assert TREE.active(values) == ["kernel", "kind", "batch", "pool", "stride"]
    assert TREE.active({**values, "kind": "graph"}) == ["kind", "batch", "pool"]
    assert TREE.active({"kind": "mlp"}) == ["kind", "batch", "lr"]
    assert SPACE.active({}) == list(SPACE.dimensions)


@pytest.mark.parametrize(("wanted", "given"), [(True, 1), (1, True), (1.0, 1), ("1", 1)])
def test_a_condition_on_a_choice_asks_for_the_type_too(wanted: Scalar, given: Scalar) -> None:
    parent = Choice(values=[wanted, given])
    space = Space({"c": parent, "x": Integer(low=1, high=2, when={"c": [wanted]})})
    assert space.active({"c": wanted}) == ["c", "x"]
    assert space.active({"c": given}) == ["c"]


def test_a_condition_on_an_integer_takes_its_float_but_no_truth() -> None:
    child = Choice(values=["a"], when={"k": [1, 3.0]})
    space = Space({"k": Integer(low=1, high=3), "x": child})
    space.check()
    assert [space.active({"k": k}) == ["k", "x"] for k in (1, 1.0, 2, 3, 3.0, True)] == [
        True, True, False, True, True, False,
    ]  # fmt: skip


def test_the_points_of_a_conditional_space_come_in_order_each_once() -> None:
    space = Space(
        {
            "kind": Choice(values=["a", "b"]),
            "n": Integer(low=1, high=2, when={"kind": ["a"]}),
            "c": Choice(values=["x", "y"]),
        }
    )
    expected = [
        ("a", 1, "x"), ("a", 1, "y"), ("a", 2, "x"), ("a", 2, "y"), ("b", "x"), ("b", "y"),
    ]  # fmt: skip
    assert [tuple(point.values()) for point in space.points()] == expected
    assert list(space.grid()) == list(space.points())


def test_a_grid_takes_a_real_dimension_where_it_is_active() -> None:
    points = list(TREE.grid())
    # kernels 1, 2, 4, 6 and 7 of which 2 have a stride; lr has 5
    cnn = 3 * (5 + 3 + 3 * 2)
    assert len(points) == cnn + 2 * 3 + 5 * 3 == len({TREE.identity(point) for point in points})
    assert all(TREE.contains(point) for point in points)


def test_size_counts_each_active_combination_once() -> None:
    assert TREE.size == math.inf
    finite = Space({path: d for path, d in TREE.dimensions.items() if path != "lr"})
    # times 3 batches: graph has 2 pools; cnn has 7 kernels with mean, 4 + 3 x 3 with max; mlp
    assert finite.size == 3 * (2 + 7 + 4 + 3 * 3 + 1) == len(list(finite.points()))


def test_a_real_dimension_that_is_never_active_does_not_count() -> None:
    fixed = Choice(values=["cnn"])  # as a search method may fix a dimension for a while
    space = Space({"kind": fixed, "lr": TREE.dimensions["lr"]})
    assert space.size == 1
    assert list(space.points()) == [{"kind": "cnn"}]


def test_many_conditions_are_counted_without_trying_all_combinations() -> None:
    dimensions: dict[str, Dimension] = {}
    for i in range(40):
        dimensions[f"is{i}"] = Integer(low=1, high=1000)
        dimensions[f"n{i}"] = Integer(low=1, high=10, when={f"is{i}": [7]})
    assert Space(dimensions).size == (999 + 10) ** 40


def test_identity_tells_points_with_other_dimensions_apart() -> None:
    assert TREE.identity({"kind": "mlp", "batch": 16, "lr": 1}) == '[null,"mlp",16,null,null,1.0]'


def random_space(rng: np.random.Generator) -> Space:
    """Up to seven finite dimensions in any order, with conditions on those made before."""
    dimensions: dict[str, Dimension] = {}
    for i in range(rng.integers(1, 8)):
        when: dict[str, list[Scalar]] = {}
        for name in rng.permutation(list(dimensions))[: rng.integers(0, 3)]:
            levels = list(dimensions[str(name)].levels())
            picked = rng.permutation(len(levels))[: rng.integers(1, len(levels) + 1)]
            when[str(name)] = [levels[place] for place in picked]
        dimensions[f"d{i}"] = [
            Integer(low=-1, high=2, when=when or None),
            Integer(low=1, high=3, log=True, when=when or None),
            Choice(values=[True, 1, "1"], when=when or None),
            Ordinal(values=[8, 2, 4], when=when or None),
        ][rng.integers(4)]
    return Space({str(path): dimensions[str(path)] for path in rng.permutation(list(dimensions))})


def by_hand(space: Space) -> set[str]:
    """The different points: all combinations, without the values whose condition is not met."""

    def is_active(path: str, values: Mapping[str, Scalar]) -> bool:
        return all(
            is_active(name, values) and (type(values[name]), values[name]) in
            [(type(value), value) for value in wanted]
            for name, wanted in (space.dimensions[path].when or {}).items()
        )  # fmt: skip

    found = set()
    for combination in itertools.product(*(d.levels() for d in space.dimensions.values())):
        values = dict(zip(space.dimensions, combination, strict=True))
        found.add(repr({p: v for p, v in values.items() if is_active(p, values)}))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_points_and_size_are_those_that_one_finds_by_hand(seed: int) -> None:
    space = random_space(np.random.default_rng(seed))
    points = [repr(point) for point in space.points()]
    assert len(points) == len(set(points)) == space.size
    assert set(points) == by_hand(space)


@pytest.mark.parametrize("seed", range(60))
def test_any_point_is_contained_and_survives_encoding_and_clipping(seed: int) -> None:
    rng = np.random.default_rng(seed)
    space = random_space(rng)
    for point in [*itertools.islice(space.points(), 200), *(space.sample(rng) for _ in range(50))]:
        assert space.contains(point)
        unit = space.encode(point)
        assert unit.shape == (len(space.dimensions),)
        assert ((unit >= 0) & (unit < 1)).all()
        assert all(unit[i] == 0.5 for i, p in enumerate(space.dimensions) if p not in point)
        assert repr(space.decode(unit)) == repr(point) == repr(space.clip(point))
        assert space.active(point) == list(point)
        assert space.why_not(point) is None
        assert repr(space.completed(point, {})) == repr(point)
    units = rng.random((50, len(space.dimensions)))
    assert all(space.contains(space.decode(unit)) for unit in units)


@pytest.mark.parametrize("seed", range(20))
def test_samples_of_a_finite_space_are_all_its_points_in_the_end(seed: int) -> None:
    rng = np.random.default_rng(seed)
    space = random_space(rng)
    if space.size <= 100:
        drawn = {space.identity(space.sample(rng)) for _ in range(4000)}
        assert drawn == {space.identity(point) for point in space.points()}


def test_a_space_with_real_dimensions_survives_encoding_too() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        point = TREE.sample(rng)
        again = TREE.decode(TREE.encode(point))
        assert TREE.contains(point)
        assert again == {**point, **({"lr": pytest.approx(point["lr"])} if "lr" in point else {})}


def test_clipping_drops_what_is_not_active_after_it() -> None:
    outside: Point = {
        "kind": "cnn",
        "batch": 16,
        "kernel": 9.2,
        "pool": "max",
        "stride": 0,
        "lr": 9,
    }
    assert TREE.clip(outside) == {
        "kernel": 7, "kind": "cnn", "batch": 16, "pool": "max", "stride": 1,
    }  # fmt: skip
    with pytest.raises(KeyError, match="batch"):
        TREE.clip({"kind": "mlp", "lr": 0.1})


def test_what_is_missing_is_filled_in_at_random() -> None:
    rng = np.random.default_rng(0)
    points = [TREE.fill({"kind": "cnn", "lr": 0.1}, rng) for _ in range(200)]
    assert all(TREE.contains(point) and point["kind"] == "cnn" for point in points)
    assert {point["kernel"] for point in points} == set(range(1, 8))
    whole: Point = {"kind": "mlp", "batch": 48, "lr": 0.5}
    assert TREE.fill(whole, rng) == whole


@pytest.mark.parametrize(
    ("dimensions", "said"),
    [
        ({"kind": KIND, "x": Integer(low=1, high=2, when={"knd": ["cnn"]})},
         "'x': when: 'knd' is no dimension of the space; did you mean 'kind'?"),
        ({"kind": KIND, "x": Integer(low=1, high=2, when={"z": ["cnn"]})},
         "'x': when: 'z' is no dimension of the space"),
        ({"x": Integer(low=1, high=2, when={"x": [1]})}, "'x': when: names 'x' itself"),
        ({"lr": Real(low=0, high=1), "x": Integer(low=1, high=2, when={"lr": [1.0]})},
         "'x': when: 'lr' is real; only a choice, an ordinal or an int can be named"),
        ({"kind": KIND, "x": Integer(low=1, high=2, when={"kind": []})},
         "'x': when: lists no value of 'kind'"),
        ({"x": Integer(low=1, high=2, when={})}, "'x': when: names no dimension"),
        ({"kind": KIND, "x": Integer(low=1, high=2, when={"kind": ["cnn", "rnn"]})},
         "'x': when: 'kind' is never 'rnn'"),
        ({"c": Choice(values=[1, 2]), "x": Integer(low=1, high=2, when={"c": [True]})},
         "'x': when: 'c' is never True"),
        ({"k": Integer(low=1, high=2), "x": Integer(low=1, high=2, when={"k": [3]})},
         "'x': when: 'k' is never 3"),
        ({"a": Choice(values=[1], when={"c": [1]}), "b": Choice(values=[1], when={"a": [1]}),
          "c": Choice(values=[1], when={"b": [1]})},
         "'a': when: a circle: a -> c -> b -> a"),
        ({"a": Choice(values=[1], when={"b": [1]}), "b": Choice(values=[1], when={"c": [1]}),
          "c": Choice(values=[1], when={"b": [1]})},
         "'b': when: a circle: b -> c -> b"),
        ({"kind": KIND, "k": Integer(low=1, high=2, when={"kind": ["mlp"]}),
          "x": Integer(low=1, high=2, when={"k": [1], "kind": ["cnn", "graph"]})},
         "'x': when: contradictory conditions: it is never active"),
        ({"kind": KIND, "a": Choice(values=[1], when={"kind": ["mlp"]}),
          "b": Choice(values=[1], when={"kind": ["cnn"]}),
          "x": Real(low=1, high=2, when={"a": [1], "b": [1]})},
         "'x': when: contradictory conditions: it is never active"),
    ],
)  # fmt: skip
def test_conditions_that_make_no_sense_get_one_line(
    dimensions: dict[str, Dimension], said: str
) -> None:
    with pytest.raises(SpaceError) as caught:
        Space(dimensions).check()
    assert str(caught.value) == f"search.space: {said}"
    assert caught.value.key == ("search", "space", said.split("'")[1])


def test_where_a_dimension_is_active_can_be_asked() -> None:
    assert TREE.reached("batch") == {}
    assert TREE.reached("lr") == {"kind": "mlp"}
    assert TREE.reached("stride") == {"kind": "cnn", "kernel": 5, "pool": "max"}
    fixed = Space({"kind": Choice(values=["cnn"]), "lr": TREE.dimensions["lr"]})
    assert fixed.reached("lr") is None


# Constraints


def test_constraints_are_respected_by_all_that_gives_points() -> None:
    space = constrained(SPACE, "model.args.width * model.args.depth <= 128", "data.shuffle == True")
    rng = np.random.default_rng(0)
    for _ in range(300):
        point = space.sample(rng)
        assert SPACE.contains(point)
        assert float(point["model.args.width"]) * float(point["model.args.depth"]) <= 128
        assert point["data.shuffle"] is True
        assert space.contains(point)
    unconstrained = [SPACE.sample(rng) for _ in range(300)]
    legal = [p for p in unconstrained if p["data.shuffle"] and int(p["model.args.width"]) <= 32]
    assert len(legal) > 0
    assert all(space.allowed(point) for point in legal)
    assert sum(space.contains(point) for point in unconstrained) < 150


def test_samples_are_uniform_over_what_the_constraints_leave() -> None:
    plane = Space({"x": Real(low=0, high=1), "y": Real(low=0, high=1)})
    triangle = constrained(plane, "x + y <= 1")
    rng = np.random.default_rng(0)
    xs = np.array([float(triangle.sample(rng)["x"]) for _ in range(4000)])
    assert xs.mean() == pytest.approx(1 / 3, abs=4 * math.sqrt(1 / 18 / 4000))  # var = 1/18


def test_points_and_grid_leave_out_what_the_constraints_do() -> None:
    square = Space({"a": Integer(low=1, high=4), "b": Integer(low=1, high=4)})
    space = constrained(square, "a * b < 4", "a != 3")
    expected = [(1, 1), (1, 2), (1, 3), (2, 1)]
    assert [tuple(point.values()) for point in space.points()] == expected
    assert [tuple(point.values()) for point in space.grid()] == expected
    assert space.size == 16
    assert space.decode(np.array([0.9, 0.9])) == {"a": 4, "b": 4}
    assert not space.contains({"a": 4, "b": 4})


def test_a_constraint_on_what_is_inactive_does_not_apply() -> None:
    space = constrained(TREE, "kernel <= 3", "kernel * stride < 0")
    assert space.contains({"kind": "mlp", "batch": 16, "lr": 0.1})
    assert space.contains({"kind": "cnn", "batch": 16, "pool": "max", "kernel": 3})
    assert not space.contains({"kind": "cnn", "batch": 16, "pool": "mean", "kernel": 4})


@pytest.mark.parametrize("seed", range(20))
def test_constraints_on_conditional_spaces_filter_their_points(seed: int) -> None:
    rng = np.random.default_rng(seed)
    free = random_space(rng)
    texts = [f"{path} in [1, 2, 8]" for path in free.dimensions]
    space = constrained(free, *texts)
    legal = [p for p in free.points() if all(v in (1, 2, 8) for v in p.values())]
    assert list(space.points()) == legal
    if legal:
        assert all(space.sample(rng) in legal for _ in range(20))


def test_a_constraint_that_names_no_dimension_is_told() -> None:
    with pytest.raises(SpaceError) as caught:
        constrained(SPACE, "model.args.widht <= 3")
    assert str(caught.value) == (
        "search.constraints: 'model.args.widht <= 3': 'model.args.widht' is no dimension of the "
        "space; did you mean 'model.args.width'?"
    )
    assert caught.value.key == ("search", "constraints")


def test_constraints_that_nothing_satisfies_are_named() -> None:
    rng = np.random.default_rng(0)
    plane = Space({"x": Real(low=0, high=1), "y": Real(low=0, high=1), "n": Integer(low=1, high=2)})
    for texts, named in (
        (("x < 2", "y > 1"), "'y > 1'"),
        (("x < 0.5", "x > 0.5"), "'x < 0.5' and 'x > 0.5'"),
        (("x < 0", "y < 0.5", "n > 2"), "'x < 0' and 'n > 2'"),
    ):
        with pytest.raises(N3LOError) as caught:
            constrained(plane, *texts).sample(rng)
        assert str(caught.value) == (
            f"search.constraints: no point of 10000 satisfies {named}"
        )  # fmt: skip


def test_a_small_space_is_searched_for_its_few_legal_points() -> None:
    line = Space({"a": Integer(low=1, high=90_000)})
    rng = np.random.default_rng(1)
    rare = constrained(line, "a == 7 or a == 70_000")
    assert {int(rare.sample(rng)["a"]) for _ in range(8)} == {7, 70_000}
    with pytest.raises(N3LOError, match="no point of 10000 satisfies 'a < 1'"):
        constrained(line, "a < 1").sample(rng)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, None),
        ({"kind": "cnn"}, None),
        ({"kind": "cnn", "kernel": 3}, None),
        ({"batch": 48}, None),
        ({"knd": "cnn"}, "'knd' is no dimension of the space; did you mean 'kind'?"),
        ({"kind": "rnn"}, "'kind' = 'rnn' is not one of ['cnn', 'graph', 'mlp']"),
        ({"batch": 17}, "'batch' = 17 is not one of [16, 64, 48]"),
        ({"kind": "cnn", "kernel": 2.5}, "'kernel' = 2.5 is not a whole number from 1 to 7"),
        ({"kind": "mlp", "lr": 2}, "'lr' = 2 is not a number from 0.0001 to 1"),
        ({"kind": "mlp", "kernel": 3}, "'kernel' needs 'kind' to be one of ['cnn']"),
        ({"kernel": 3}, "'kernel' needs 'kind' to be one of ['cnn']"),
        ({"kind": "cnn", "kernel": 7}, "'kernel != 7' does not hold"),
    ],
)
def test_why_values_are_not_those_of_a_point(values: Point, said: str | None) -> None:
    assert constrained(TREE, "kernel != 7").why_not(values) == said


# Rows of earlier spaces

OWN = {"lr": 0.1, "width": 64, "act": "relu", "flag": True}
LR, WIDTH = Real(low=1e-3, high=1), Integer(low=16, high=128)
ACT, FLAG = Choice(values=["relu", "selu"]), Choice(values=[True, False])


@pytest.mark.parametrize(
    ("now", "row", "expected"),
    [
        # as it was, and with the floats that a table makes
        ({"lr": LR, "width": WIDTH}, {"lr": 0.5, "width": 32}, {"lr": 0.5, "width": 32}),
        ({"lr": LR, "width": WIDTH}, {"lr": 1, "width": 32.0}, {"lr": 1.0, "width": 32}),
        # widened, narrowed, of another type
        ({"lr": Real(low=1e-5, high=9)}, {"lr": 0.5}, {"lr": 0.5}),
        ({"lr": Real(low=0.6, high=0.9)}, {"lr": 0.5}, None),
        ({"act": Choice(values=["gelu", "selu"])}, {"act": "selu"}, {"act": "selu"}),
        ({"act": Choice(values=["gelu", "selu"])}, {"act": "relu"}, None),
        ({"width": Ordinal(values=[32, 64])}, {"width": 32}, {"width": 32}),
        ({"width": Ordinal(values=[32, 64])}, {"width": 48}, None),
        # added: it had the study's own value
        ({"lr": LR, "width": WIDTH}, {"lr": 0.5}, {"lr": 0.5, "width": 64}),
        ({"lr": LR, "width": Integer(low=1, high=9)}, {"lr": 0.5}, None),
        ({"lr": LR, "else": WIDTH}, {"lr": 0.5}, None),
        # removed: it must have had the study's own value
        ({"lr": LR}, {"lr": 0.5, "width": 64}, {"lr": 0.5}),
        ({"lr": LR}, {"lr": 0.5, "width": 64.0}, {"lr": 0.5}),
        ({"lr": LR}, {"lr": 0.5, "width": 32}, None),
        ({"lr": LR}, {"lr": 0.5, "flag": True}, {"lr": 0.5}),
        ({"lr": LR}, {"lr": 0.5, "flag": 1}, None),
        ({"lr": LR}, {"lr": 0.5, "else": 1}, None),
        # made conditional, or a condition taken away
        ({"act": ACT, "width": Integer(low=16, high=128, when={"act": ["selu"]})},
         {"act": "relu", "width": 64}, {"act": "relu"}),
        ({"act": ACT, "width": Integer(low=16, high=128, when={"act": ["selu"]})},
         {"act": "relu", "width": 32}, None),
        ({"act": ACT, "width": Integer(low=16, high=128, when={"act": ["relu"]})},
         {"width": 32}, {"act": "relu", "width": 32}),
        ({"act": ACT, "width": WIDTH}, {"act": "selu"}, {"act": "selu", "width": 64}),
    ],
)  # fmt: skip
def test_a_row_of_an_earlier_space_is_brought_into_this_one(
    now: dict[str, Dimension], row: Point, expected: Point | None
) -> None:
    point = Space(now).completed(row, OWN)
    assert point == expected
    if point is not None and expected is not None:
        assert [type(v) for v in point.values()] == [type(v) for v in expected.values()]


def test_a_row_that_a_new_constraint_forbids_is_none_of_this_space() -> None:
    space = constrained(Space({"lr": LR, "width": WIDTH}), "width < 64")
    assert space.completed({"lr": 0.5, "width": 32}, OWN) is not None
    assert space.completed({"lr": 0.5}, OWN) is None


def narrowed(space: Space, rng: np.random.Generator) -> Space:
    """Without some dimensions, values and conditions."""
    kept = [path for path in space.dimensions if rng.random() < 0.7]
    dimensions: dict[str, Dimension] = {}
    for path in kept:
        dimension = space.dimensions[path]
        when = {name: values for name, values in (dimension.when or {}).items() if name in kept}
        if rng.random() < 0.3:
            when = {}
        values = list(dimension.levels())
        if rng.random() < 0.3:
            values = values[1:]
        dimensions[path] = Choice(values=values, when=when or None)
    return Space(dimensions)


@pytest.mark.parametrize("is_widened", [True, False])
def test_a_completed_row_trains_the_same_and_all_that_can_be_kept_is(is_widened: bool) -> None:
    """What is trained is the study's own values and, in them, the row's."""
    num_kept = num_lost = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        wide = random_space(rng)
        narrow = narrowed(wide, rng)
        before, now = (narrow, wide) if is_widened else (wide, narrow)
        own = {path: d.decode(rng.random()) for path, d in wide.dimensions.items()}
        trained = {repr({**own, **point}) for point in now.points()}
        for row in itertools.islice(before.points(), 300):
            point = now.completed(row, own)
            assert (point is not None) is (repr({**own, **row}) in trained)
            if point is None:
                num_lost += 1
            else:
                num_kept += 1
                assert now.contains(point)
                assert repr({**own, **point}) == repr({**own, **row})
    assert min(num_kept, num_lost) > 100
