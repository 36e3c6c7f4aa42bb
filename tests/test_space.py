import math
from collections import Counter

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from workflow.space import Choice, Dimension, Integer, Real, Space

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


def only(dimension: Dimension) -> Space:
    return Space({"x": dimension})


def decoded(dimension: Dimension, num: int) -> list[object]:
    """What `num` evenly spaced coordinates decode to."""
    return [dimension.decode(u) for u in (np.arange(num) + 0.5) / num]


def test_dimensions_load_by_their_type() -> None:
    load = TypeAdapter(Dimension).validate_python
    assert load({"type": "real", "low": 1, "high": 2}) == Real(low=1.0, high=2.0)
    assert load({"type": "int", "low": 1, "high": 2}) == Integer(low=1, high=2)
    values = load({"type": "choice", "values": [True, 1, 1.0, "1"]}).values
    assert [type(value) for value in values] == [bool, int, float, str]


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
        ({"type": "int", "low": 1, "high": 2, "lgo": True}, "lgo"),
        ({"type": "integer", "low": 1, "high": 2}, "'real', 'int', 'choice'"),
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
