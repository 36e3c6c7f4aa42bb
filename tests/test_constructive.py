"""Layer by layer, on networks whose best shape is known."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from search_helpers import rng_of, run_study

from apps.contract import N3LOError
from workflow.expression import Expression
from workflow.search import Observation, Problem, Proposal
from workflow.search.constructive import ConstructiveSearch
from workflow.space import Choice, Integer, Ordinal, Point, Real, Scalar, Space

LR, DEPTH = "training.optimizer.lr", "model.args.depth"
SIZES = ["model.args.width_1", "model.args.width_2", "model.args.width_3", "model.args.width_4"]
SPACE = Space(
    {
        LR: Real(low=1e-4, high=1, log=True),
        DEPTH: Integer(low=1, high=4),
        **{path: Integer(low=4, high=64) for path in SIZES},
        "model.args.activation": Choice(values=["relu", "selu"]),
    }
)
OPTIONS = {"depth": DEPTH, "sizes": SIZES, "proposer": "random"}

Value = Callable[[Point], float | None]


def search_of(space: Space = SPACE, goal: str = "min", **options: Any) -> ConstructiveSearch:
    problem = Problem(space, (goal,), num_trials=100)  # type: ignore[arg-type]
    return ConstructiveSearch(problem, OPTIONS | options)


def depth_of(point: Point) -> int:
    depth = point[DEPTH]
    assert type(depth) is int
    return depth


def two_layers(point: Point) -> float:
    """The best network has two layers of 40 and 20; a third one harms."""
    sizes = [float(point[path]) for path in SIZES[: depth_of(point)]]
    loss = 0.1 * abs(math.log10(float(point[LR])) + 2) + abs(sizes[0] - 40) / 100
    loss += 1 if len(sizes) < 2 else 0.2 + abs(sizes[1] - 20) / 100
    return loss + sum(0.5 + size / 100 for size in sizes[2:])


def simulate(
    search: ConstructiveSearch, value: Value, parallel: int = 1, seed: int = 1, num: int = 100
) -> list[Observation]:
    return run_study(search, lambda proposal: value(proposal.point), parallel, seed, num)


def layers(history: Sequence[Observation]) -> list[int]:
    return [o.proposal.tags["layer"] for o in history]


def best_of(history: Sequence[Observation], *depths: int) -> Observation:
    return min(
        (o for o in history if depth_of(o.point) in depths and o.value is not None),
        key=lambda o: o.value or 0.0,
    )


@pytest.mark.parametrize("parallel", [1, 3, 20])
@pytest.mark.parametrize("proposer", ["random", "sobol"])
def test_a_third_layer_without_a_gain_is_the_last(proposer: str, parallel: int) -> None:
    history = simulate(search_of(proposer=proposer), two_layers, parallel)
    assert layers(history) == [1] * 8 + [2] * 8 + [3] * 8
    assert all(depth_of(o.point) == o.proposal.tags["layer"] for o in history)
    assert all(SPACE.contains(o.point) for o in history)
    assert depth_of(best_of(history, 1, 2, 3).point) == 2


def test_the_first_stage_searches_all_but_further_sizes() -> None:
    history = simulate(search_of(), two_layers)[:8]
    for path in (LR, SIZES[0]):
        assert len({o.point[path] for o in history}) > 4
    assert {o.point["model.args.activation"] for o in history} == {"relu", "selu"}
    assert all(o.point[path] == 4 for o in history for path in SIZES[1:])


@pytest.mark.parametrize("goal", ["min", "max"])
def test_a_further_stage_searches_the_size_of_its_layer_only(goal: str) -> None:
    sign = 1 if goal == "min" else -1
    history = simulate(search_of(goal=goal), lambda p: sign * two_layers(p))
    best = min(history[:8], key=lambda o: sign * (o.value or 0.0)).point
    for seen in history[8:16]:
        assert seen.point | {SIZES[1]: 4, DEPTH: 1} == best
    assert len({seen.point[SIZES[1]] for seen in history[8:16]}) == 8


def test_a_stage_waits_until_the_one_before_has_ended() -> None:
    search = search_of(per_layer=3)
    first = search.propose([], [], 9, rng_of(0))
    assert [p.tags["layer"] for p in first] == [1, 1, 1]
    numbered = [replace(p, number=i) for i, p in enumerate(first)]
    ended = [Observation(p, float(i)) for i, p in enumerate(numbered)]
    assert search.propose(ended[:2], numbered[2:], 9, rng_of(3)) == []
    second = search.propose(ended, [], 9, rng_of(3))
    assert [p.tags["layer"] for p in second] == [2, 2, 2]
    assert all(p.point[LR] == first[0].point[LR] for p in second)


@pytest.mark.parametrize(("min_gain", "last"), [(0.0, 4), (0.05, 4), (0.2, 2)])
def test_a_gain_has_to_be_as_large_as_asked_for(min_gain: float, last: int) -> None:
    history = simulate(search_of(min_gain=min_gain), lambda p: 1 - 0.125 * depth_of(p))
    assert layers(history) == [k for k in range(1, last + 1) for _ in range(8)]


def test_no_better_is_no_gain() -> None:
    assert layers(simulate(search_of(), lambda _: 1.0)) == [1] * 8 + [2] * 8


@pytest.mark.parametrize("parallel", [1, 5])
def test_failures_are_passed_over_and_a_stage_of_them_is_the_last(parallel: int) -> None:
    assert layers(simulate(search_of(), lambda _: None, parallel)) == [1] * 8
    worse = simulate(search_of(), lambda p: None if depth_of(p) == 2 else 1.0, parallel)
    assert layers(worse) == [1] * 8 + [2] * 8
    some = simulate(
        search_of(), lambda p: math.nan if p[SIZES[0]] in range(4, 24) else two_layers(p), parallel
    )
    assert set(layers(some)) == {1, 2, 3}
    assert all(o.point[SIZES[0]] not in range(4, 24) for o in some[8:])


def test_a_stage_with_few_points_ends_when_they_do() -> None:
    few = {DEPTH: Integer(low=1, high=3), **{path: Integer(low=1, high=3) for path in SIZES}}
    for parallel in (1, 4):
        history = simulate(
            search_of(Space(few)), lambda p: -sum(float(p[s]) for s in SIZES[:3]), parallel
        )
        assert layers(history) == [1] * 3 + [2] * 3 + [3] * 3
        assert history[-1].point[SIZES[0]] == history[-1].point[SIZES[1]] == 3


def test_depth_may_begin_above_one() -> None:
    space = Space({DEPTH: Integer(low=2, high=3), **{s: Integer(low=1, high=50) for s in SIZES}})
    history = simulate(search_of(space), lambda p: -depth_of(p))
    assert layers(history) == [2] * 8 + [3] * 8
    assert all(len({o.point[path] for o in history[:8]}) > 3 for path in SIZES[:2])
    assert all(len({o.point[path] for o in history[8:]}) == 1 for path in SIZES[:2])


def test_sizes_beyond_the_depth_are_left_out_where_a_condition_says_so() -> None:
    dimensions = dict(SPACE.dimensions)
    for number, path in enumerate(SIZES[1:], start=2):
        deep: list[Scalar] = list(range(number, 5))
        dimensions[path] = Ordinal(values=[8, 16, 24, 32, 40], when={DEPTH: deep})
    dimensions["model.args.skip"] = Choice(values=[True, False], when={DEPTH: [3, 4]})
    space = Space(dimensions)
    for proposer in ("random", "bayesian"):
        history = simulate(search_of(space, proposer=proposer), lambda p: -depth_of(p), parallel=3)
        assert layers(history) == [1] * 8 + [2] * 5 + [3] * 8 + [4] * 5
        for seen in history:
            assert space.contains(seen.point)
            assert [path in seen.point for path in SIZES] == [
                depth_of(seen.point) > index for index in range(4)
            ]
        assert {o.point["model.args.skip"] for o in history[13:21]} == {True, False}
        assert len({o.point["model.args.skip"] for o in history[21:]}) == 1


def test_constraints_hold_and_may_leave_no_further_layer() -> None:
    widths = " + ".join(SIZES[:3])
    space = Space(
        SPACE.dimensions,
        (Expression.parse(f"{DEPTH} <= 2"), Expression.parse(f"{widths} <= 60")),
    )
    for proposer in ("random", "bayesian"):
        history = simulate(search_of(space, proposer=proposer), lambda p: -depth_of(p))
        assert layers(history) == [1] * 8 + [2] * 8
        assert all(space.contains(o.point) for o in history)


def test_a_warm_start_is_known_to_the_proposer_but_counts_in_no_stage() -> None:
    point = search_of().propose([], [], 1, rng_of(0))[0].point
    warm = [Observation(Proposal(point), -9.0)]
    answer = search_of().propose(warm, [], 9, rng_of(0))
    assert [p.tags["layer"] for p in answer] == [1] * 8
    assert point not in [p.point for p in answer]


def test_rows_from_a_wider_space_are_left_out() -> None:
    wide = Proposal({"model.args.depth": 9}, tags={"layer": 9}, number=0)
    answer = search_of().propose([Observation(wide, 0.1)], [], 1, rng_of(1))
    assert answer[0].tags == {"layer": 1}


@pytest.mark.parametrize("proposer", ["bayesian", "random", "sobol"])
def test_it_keeps_nothing_between_two_proposals(proposer: str) -> None:
    class Rebuilt(ConstructiveSearch):
        def propose(self, *args: Any) -> list[Proposal]:
            return search_of(proposer=proposer).propose(*args)

    kept = simulate(search_of(proposer=proposer), two_layers, parallel=3)
    assert simulate(Rebuilt(search_of().problem, OPTIONS), two_layers, parallel=3) == kept
    assert layers(kept) == [1] * 8 + [2] * 8 + [3] * 8
    kinds = [type(value) for value in kept[-1].point.values()]
    assert kinds == [float, int, int, int, int, int, str]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"depth": "model.args.dept"},
            "search.options.depth: 'model.args.dept' is no dimension of search.space; did you mean "
            "'model.args.depth'?",
        ),
        (
            {"sizes": [*SIZES, "x"]},
            "search.options.sizes: 'x' is no dimension of search.space",
        ),
        ({"sizes": [1]}, "search.options.sizes: 1 is no dimension of search.space"),
        (
            {"depth": LR},
            f"search.options.depth: '{LR}' is not of type 'int' or 'ordinal' with whole numbers",
        ),
        (
            {"sizes": SIZES[:2]},
            "search.options.sizes: has 2 for the up to 4 layers of 'model.args.depth'",
        ),
        (
            {"sizes": [*SIZES, SIZES[0]]},
            "search.options.sizes: 'model.args.width_1' is named twice",
        ),
        ({"sizes": SIZES[0]}, f"search.options.sizes: '{SIZES[0]}' is not of type list"),
        ({"per_layer": 0}, "search.options.per_layer: 0 is not at least 1"),
        ({"min_gain": -1}, "search.options.min_gain: -1.0 is not at least 0"),
        (
            {"proposer": "sobel"},
            "search.options.proposer: unknown proposer 'sobel'; "
            "there are: bayesian, random, sobol; did you mean 'sobol'?",
        ),
    ],
)
def test_what_a_user_got_wrong_is_told_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(N3LOError) as error:
        search_of(**options)
    assert str(error.value) == message


@pytest.mark.parametrize("option", ["depth", "sizes"])
def test_depth_and_sizes_have_to_be_named(option: str) -> None:
    options = {key: value for key, value in OPTIONS.items() if key != option}
    with pytest.raises(N3LOError, match=rf"^search\.options\.{option}: is needed, as in {option} "):
        ConstructiveSearch(Problem(SPACE), options)
