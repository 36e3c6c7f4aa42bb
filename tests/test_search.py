"""One suite of behaviours that every search method has to show, then what only one of them does."""

import itertools
import logging
import math
import subprocess
import sys
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from apps.contract import N3LOError
from workflow.search import METHODS, Observation, Search, create
from workflow.space import Choice, Integer, Point, Real, Space

SPACE = Space(
    {
        "lr": Real(low=1e-5, high=1e-1, log=True, num=4),
        "width": Integer(low=16, high=256, log=True, num=3),
        "depth": Integer(low=1, high=6, num=3),
        "activation": Choice(values=["relu", "selu", "gelu"]),
        "shuffle": Choice(values=[True, False]),
    }
)
NINE = Space({"k": Integer(low=1, high=3), "c": Choice(values=["a", "b", "c"])})
SQUARE = Space({"x": Real(low=-1, high=1), "y": Real(low=-1, high=1)})

each_method = pytest.mark.parametrize("method", list(METHODS))


def build(method: str, space: Space = SPACE, seed: int = 1) -> Search:
    return create(method, space, "min", {}, seed)


def rng_of(trial: int, seed: int = 1) -> np.random.Generator:
    """As the driver makes it: fresh for every trial."""
    return np.random.default_rng([seed, trial])


def loss(point: Point) -> float:
    return abs(math.log10(float(point["lr"])) + 3) + 0.1 * float(point["depth"])


def run(
    search: Search, value: Callable[[int, Point], float | None], num: int, seed: int = 1
) -> list[Observation]:
    """A study of trials one after the other."""
    history: list[Observation] = []
    for trial in range(num):
        for point in search.propose(history, [], 1, rng_of(trial, seed)):
            history.append(Observation(point, value(trial, point)))
    return history


def distinct(space: Space, points: Sequence[Point]) -> int:
    return len({space.identity(point) for point in points})


@each_method
def test_a_hundred_proposals_are_legal_plain_and_different(method: str) -> None:
    search = build(method)
    points = [seen.point for seen in run(search, lambda _, point: loss(point), 100)]
    assert distinct(SPACE, points) == 100
    for point in points:
        assert SPACE.contains(point)
        assert [type(value) for value in point.values()] == [float, int, int, str, bool]


@each_method
def test_the_same_seed_gives_the_same_points(method: str) -> None:
    first, second = (run(build(method), lambda _, point: loss(point), 12) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("method", [name for name in METHODS if name != "grid"])
def test_another_seed_gives_other_points(method: str) -> None:
    first, second = (
        run(build(method, seed=seed), lambda _, point: loss(point), 12, seed) for seed in (1, 2)
    )
    assert all(a.point != b.point for a, b in zip(first, second, strict=True))


@each_method
def test_a_rebuilt_engine_goes_on_with_the_same_point(method: str) -> None:
    search = build(method)
    history = run(search, lambda _, point: loss(point), 12)
    assert search.propose(history, [], 1, rng_of(12)) == build(method).propose(
        history, [], 1, rng_of(12)
    )


@each_method
def test_pending_points_are_not_proposed_again(method: str) -> None:
    search = build(method)
    history = run(search, lambda _, point: loss(point), 10)
    pending: list[Point] = []
    for _ in range(5):  # the same generator state each time: only `pending` differs
        pending += search.propose(history, pending, 1, rng_of(10))
    assert distinct(SPACE, [*pending, *(seen.point for seen in history)]) == 15


@each_method
def test_one_answer_has_no_point_twice(method: str) -> None:
    search = build(method)
    history = run(search, lambda _, point: loss(point), 10)
    points = search.propose(history, [], 4, rng_of(10))
    assert distinct(SPACE, [*points, *(seen.point for seen in history)]) == 14


@each_method
@pytest.mark.parametrize(
    "value",
    [
        pytest.param(lambda trial, point: math.nan, id="all fail"),
        pytest.param(lambda trial, point: None, id="all lost"),
        pytest.param(lambda trial, point: None if trial == 0 else loss(point), id="first fails"),
        pytest.param(
            lambda trial, point: math.inf if trial % 3 == 2 else loss(point), id="every third fails"
        ),
        pytest.param(lambda trial, point: 0.1, id="all equal"),
        pytest.param(lambda trial, point: 10.0 ** (trial * 2), id="exploding"),
    ],
)
def test_a_search_survives(method: str, value: Callable[[int, Point], float | None]) -> None:
    assert distinct(SPACE, [seen.point for seen in run(build(method), value, 16)]) == 16


@each_method
@pytest.mark.parametrize("goal", ["min", "max"])
def test_a_finite_space_gives_all_its_points_then_none(method: str, goal: str) -> None:
    search = create(method, NINE, "max" if goal == "max" else "min", {}, 1)
    history = run(search, lambda _, point: float(point["k"]), 20)
    assert distinct(NINE, [seen.point for seen in history]) == len(history) == 9
    assert search.propose([], [seen.point for seen in history], 3, rng_of(0)) == []


@each_method
def test_many_asked_of_a_finite_space_are_all_its_points(method: str) -> None:
    assert distinct(NINE, build(method, NINE).propose([], [], 20, rng_of(0))) == 9


@each_method
def test_a_study_without_a_space_is_one_trial(method: str) -> None:
    assert [seen.point for seen in run(build(method, Space({})), lambda *_: 1.0, 3)] == [{}]


@each_method
def test_rows_from_a_wider_space_are_left_out(method: str) -> None:
    history = [Observation({"k": 7, "c": "z"}, 0.0), Observation({"k": 1, "c": "a"}, 1.0)]
    points = build(method, NINE).propose(history, [{"k": 9, "c": "a"}], 20, rng_of(0))
    assert distinct(NINE, points) == 8


def test_random_draws_follow_the_scale_of_a_dimension() -> None:
    space = Space({"lr": Real(low=1e-4, high=1, log=True)})
    points = build("random", space).propose([], [], 400, rng_of(0))
    assert sum(float(point["lr"]) < 1e-2 for point in points) == pytest.approx(200, abs=30)


def test_a_grid_is_walked_in_its_order_and_fills_gaps() -> None:
    points = list(NINE.grid())
    history = [Observation(point, 0.0) for point in (points[0], points[2])]
    assert build("grid", NINE).propose(history, [], 3, rng_of(0)) == [points[1], *points[3:5]]


def test_bayesian_starts_with_the_sobol_design_of_its_seed() -> None:
    """Four points of a Sobol sequence fall one into each quarter of every dimension."""
    points = build("bayesian", SQUARE).propose([], [], 4, rng_of(0))
    for path in SQUARE.dimensions:
        assert sorted(math.floor(2 * (float(point[path]) + 1)) for point in points) == [0, 1, 2, 3]


def test_bayesian_beats_random_on_a_quadratic() -> None:
    def bowl(trial: int, point: Point) -> float:
        return (float(point["x"]) - 0.3) ** 2 + (float(point["y"]) + 0.4) ** 2

    best = {
        method: [
            min(seen.value or 0.0 for seen in run(build(method, SQUARE, seed), bowl, 25, seed))
            for seed in range(5)
        ]
        for method in ("random", "bayesian")
    }
    assert max(best["bayesian"]) < min(best["random"]) / 5


def test_bayesian_climbs_where_more_is_better() -> None:
    search = create("bayesian", SQUARE, "max", {}, 1)
    history = run(search, lambda _, point: -(float(point["x"]) ** 2) - float(point["y"]) ** 2, 20)
    assert max(seen.value for seen in history if seen.value is not None) > -1e-3


def test_bayesian_keeps_away_from_where_trials_fail() -> None:
    """Losses fall towards x = 1, but beyond 0.2 every training diverges."""

    def cliff(trial: int, point: Point) -> float:
        return math.nan if float(point["x"]) > 0.2 else -float(point["x"])

    history = run(build("bayesian", SQUARE), cliff, 30)
    late = [seen.value for seen in history[10:] if seen.value is not None]
    assert sum(math.isnan(value) for value in late) < 0.35 * len(late)


def test_bayesian_spreads_parallel_trials() -> None:
    search = build("bayesian", SQUARE)
    history = run(search, lambda _, point: float(point["x"]) ** 2 + float(point["y"]) ** 2, 8)
    points = search.propose(history, [], 4, rng_of(8))
    gaps = [
        math.dist(SQUARE.encode(a), SQUARE.encode(b)) for a, b in itertools.combinations(points, 2)
    ]
    assert min(gaps) > 0.02


def test_bayesian_goes_on_when_the_model_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    search = build("bayesian", SQUARE)
    history = run(search, lambda _, point: float(point["x"]), 8)

    def singular(*args: object) -> None:
        raise np.linalg.LinAlgError("not positive definite")

    monkeypatch.setattr("skopt.Optimizer.tell", singular)
    with caplog.at_level(logging.WARNING):
        assert len(search.propose(history, [], 1, rng_of(8))) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "no model after 8 trials, a Sobol point instead: not positive definite"
    ]


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (
            "bayesien",
            {},
            "search.method: unknown method 'bayesien'; there are: random, grid, bayesian; "
            "did you mean 'bayesian'?",
        ),
        (
            "bayesian",
            {"num_inital": 3},
            "search.options: unknown option 'num_inital' of 'bayesian'; it knows: num_initial; "
            "did you mean 'num_initial'?",
        ),
        ("grid", {"x": 1}, "search.options: unknown option 'x' of 'grid'; it knows: none"),
        (
            "bayesian",
            {"num_initial": "5"},
            "search.options.num_initial: '5' is not of type int",
        ),
        ("bayesian", {"num_initial": 0}, "search.options.num_initial: 0 is not at least 1"),
    ],
)
def test_what_a_user_got_wrong_is_told_in_one_line(
    method: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(N3LOError) as error:
        create(method, NINE, "min", options, 1)
    assert str(error.value) == message


def test_scikit_learn_is_imported_only_for_what_needs_it() -> None:
    code = (
        "import sys; from workflow.search import create; from workflow.space import Space;"
        "create('random', Space({}), 'min', {}, 1); sys.exit('sklearn' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
