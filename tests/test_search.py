"""One suite of behaviours that every search method has to show, then what only one of them does."""

import itertools
import json
import logging
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from search_helpers import rng_of

from apps.contract import N3LOError
from workflow.expression import Expression
from workflow.search import METHODS, Goal, Observation, Problem, Proposal, Search, create
from workflow.search.base import PointSearch
from workflow.search.optuna_engine import OptunaSearch
from workflow.search.sobol import sobol_point
from workflow.space import Choice, Integer, Ordinal, Point, Real, Space

LR = "training.lr"  # population-based training moves what is under training
SPACE = Space(
    {
        LR: Real(low=1e-5, high=1e-1, log=True, num=4),
        "depth": Integer(low=1, high=2),
        "width_1": Integer(low=16, high=256, log=True, num=3),
        "width_2": Integer(low=16, high=256, log=True, num=3),
        "activation": Choice(values=["relu", "selu", "gelu"]),
        "shuffle": Choice(values=[True, False]),
    }
)
CONDITIONAL = Space(
    {
        "kernel": Ordinal(values=[1, 3, 5], when={"kind": ["cnn"]}),  # before what it depends on
        LR: Real(low=1e-5, high=1e-1, log=True, num=4),
        "depth": Integer(low=1, high=2),
        "width_1": Integer(low=16, high=256, log=True, num=3),
        "width_2": Integer(low=16, high=256, log=True, num=3, when={"depth": [2]}),
        "kind": Choice(values=["cnn", "mlp"]),
        "dropout": Real(low=0.0, high=0.5, num=2, when={"kind": ["mlp"], "depth": [2]}),
    },
    (
        Expression.parse("width_1 * depth <= 300"),
        Expression.parse("width_2 <= width_1 or depth == 1"),
    ),
)
NINE = Space({"k": Integer(low=1, high=3), "c": Choice(values=["a", "b", "c"])})
SPACES = {"mixed": SPACE, "conditional": CONDITIONAL}
SQUARE = Space({"x": Real(low=-1, high=1), "y": Real(low=-1, high=1)})

Value = Callable[[int, Point], float | None]
Propose = Callable[
    [Sequence[Observation], Sequence[Proposal], int, np.random.Generator], list[Proposal]
]


@dataclass(frozen=True)
class Case:
    """A method as the suite builds it."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    goals: tuple[Goal, ...] = ("min",)
    num: int = 60  # trials of the longer tests: few for engines that take long to think
    is_points: bool = True  # its trials are points: no budgets, parents, stages
    is_seeded: bool = True


CASES = {
    "bayesian": Case("bayesian", num=20),
    "multi": Case("multi", goals=("min", "min"), num=20),
    "skopt": Case("skopt", {"num_initial": 10}, num=14),
    "skopt-ET": Case("skopt", {"engine": "ET", "num_initial": 12}, num=16),
    "optuna": Case("optuna", num=30),
    "optuna-cmaes": Case("optuna", {"sampler": "cmaes"}, num=30),
    "optuna-nsga2": Case("optuna", {"sampler": "nsga2"}, goals=("min", "max"), num=30),
    "evolution": Case("evolution"),
    "evolution-steady": Case("evolution", {"steady_state": True}),
    "population": Case("population", {"population": 8, "steps": 5}, num=40, is_points=False),
    "halving": Case("halving", is_points=False),
    "hyperband": Case("halving", {"brackets": 3, "proposer": "random"}, is_points=False),
    "halving-data": Case("halving", {"resource": "data"}, is_points=False),
    "constructive": Case(
        "constructive", {"depth": "depth", "sizes": ["width_1", "width_2"]}, is_points=False
    ),
    "grid": Case("grid", is_seeded=False),
    "random": Case("random"),
    "sobol": Case("sobol"),
}

each = pytest.mark.parametrize("case", [pytest.param(CASES[name], id=name) for name in CASES])
each_of_points = pytest.mark.parametrize(
    "case", [pytest.param(case, id=name) for name, case in CASES.items() if case.is_points]
)


def build(case: Case, space: Space = SPACE, seed: int = 1, flip: bool = False) -> Search:
    goals = tuple(("max" if goal == "min" else "min") if flip else goal for goal in case.goals)
    problem = Problem(space, goals, seed=seed, num_trials=case.num, epochs=9)
    return create(case.method, problem, case.options)


def loss(point: Point) -> float:
    return abs(math.log10(float(point[LR])) + 3) + 0.1 * float(point["depth"])


def simulate(
    propose: Propose, value: Value, num: int, parallel: int = 1, seed: int = 1, further: int = 0
) -> list[Observation]:
    """A study of up to `num` trials, `parallel` at a time, that end in a random order.

    It ends before if the search has nothing more to propose while nothing is pending. No proposal
    may be one that is done or pending.
    """
    order = np.random.default_rng(seed)
    pending: list[Proposal] = []
    ended: dict[int, Observation] = {}
    number = 0
    while True:
        history = [ended[n] for n in sorted(ended)]
        has_more = True
        while has_more and len(pending) < parallel and number < num:
            answer = propose(history, pending, 1, rng_of(number, seed))
            assert len(answer) <= 1
            has_more = bool(answer)
            for proposal in answer:
                known = [*(seen.proposal for seen in history), *pending]
                assert identity(proposal) not in map(identity, known)
                pending.append(replace(proposal, number=number))
                number += 1
        if not pending:
            return history
        proposal = pending.pop(int(order.integers(len(pending))))
        assert proposal.number is not None
        result = value(proposal.number, proposal.point)
        others = () if result is None else (-result,) * further
        ended[proposal.number] = Observation(proposal, result, further=others)


def identity(proposal: Proposal) -> str:
    return json.dumps([proposal.point, dict(proposal.settings), proposal.parent], sort_keys=True)


def run(
    case: Case, value: Value, num: int | None = None, parallel: int = 1, space: Space = SPACE
) -> list[Observation]:
    search = build(case, space)
    further = len(case.goals) - 1
    return simulate(search.propose, value, num or case.num, parallel, further=further)


def points_of(history: Sequence[Observation]) -> list[Point]:
    return [seen.point for seen in history]


def distinct(space: Space, points: Sequence[Point]) -> int:
    return len({space.identity(point) for point in points})


def by_point(function: Callable[[Point], float]) -> Value:
    return lambda _, point: function(point)


# Every method


def test_every_method_has_a_case() -> None:
    assert {case.method for case in CASES.values()} == set(METHODS)


@each
@pytest.mark.parametrize("parallel", [1, 4])
@pytest.mark.parametrize("space", [pytest.param(space, id=name) for name, space in SPACES.items()])
def test_proposals_are_legal_and_plain_and_new(case: Case, parallel: int, space: Space) -> None:
    history = run(case, by_point(loss), parallel=parallel, space=space)
    assert len(history) == case.num or (history and not case.is_points)
    for seen in history:
        assert space.contains(seen.point)
        for path, value in seen.point.items():
            assert type(value) is type(space.dimensions[path].clip(value))
        assert json.dumps([seen.point, dict(seen.proposal.settings), dict(seen.proposal.tags)])


@each
def test_the_same_seed_gives_the_same_proposals(case: Case) -> None:
    first, second = (run(case, by_point(loss), 14, parallel=4) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name) for name, case in CASES.items() if case.is_seeded]
)
def test_another_seed_gives_other_points(case: Case) -> None:
    first, second = (build(case, seed=s).propose([], [], 4, rng_of(0, s)) for s in (1, 2))
    assert all(a.point != b.point for a, b in zip(first, second, strict=False))


@each
def test_an_engine_rebuilt_for_each_trial_goes_the_same_way(case: Case) -> None:
    def rebuilt(*args: Any) -> list[Proposal]:
        return build(case).propose(*args)

    further = len(case.goals) - 1
    again = simulate(rebuilt, by_point(loss), 14, parallel=4, further=further)
    assert again == run(case, by_point(loss), 14, parallel=4)


@each
def test_more_is_better_where_the_goal_is_max(case: Case) -> None:
    """A search for the most of -f goes the way of a search for the least of f."""
    further = len(case.goals) - 1
    down = simulate(build(case).propose, by_point(loss), 14, 2, further=further)
    search = build(case, flip=True)
    up = simulate(search.propose, by_point(lambda p: -loss(p)), 14, 2, further=further)
    assert points_of(down) == points_of(up)


@each
def test_one_answer_has_nothing_twice(case: Case) -> None:
    search = build(case)
    history = run(case, by_point(loss), 10)
    answer = search.propose(history, [], 4, rng_of(10))
    known = [*(seen.proposal for seen in history), *answer]
    assert answer
    assert len(set(map(identity, known))) == len(known)


@each
@pytest.mark.parametrize("parallel", [1, 3])
@pytest.mark.parametrize(
    "value",
    [
        pytest.param(lambda trial, point: math.nan, id="all fail"),
        pytest.param(lambda trial, point: None, id="all lost"),
        pytest.param(lambda trial, point: None if trial == 0 else loss(point), id="first fails"),
        pytest.param(
            lambda trial, point: math.inf if trial % 3 == 2 else loss(point), id="every third fails"
        ),
        pytest.param(
            lambda trial, point: -math.inf if trial % 3 == 0 else loss(point), id="minus infinity"
        ),
        pytest.param(lambda trial, point: 0.1, id="all equal"),
        pytest.param(lambda trial, point: 10.0 ** (trial * 2), id="exploding"),
    ],
)
def test_a_search_survives(
    case: Case, value: Value, parallel: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        history = run(case, value, 14, parallel)
    assert len(history) == 14 or (history and not case.is_points)
    assert not caplog.records


@each_of_points
@pytest.mark.parametrize("parallel", [1, 4])
def test_a_finite_space_gives_all_its_points_then_none(case: Case, parallel: int) -> None:
    history = run(case, by_point(lambda p: float(p["k"])), 20, parallel, NINE)
    assert distinct(NINE, points_of(history)) == len(history) == 9
    assert build(case, NINE).propose([], [seen.proposal for seen in history], 3, rng_of(0)) == []


@each_of_points
def test_many_asked_of_a_finite_space_are_all_its_points(case: Case) -> None:
    answer = build(case, NINE).propose([], [], 20, rng_of(0))
    assert distinct(NINE, [proposal.point for proposal in answer]) == 9


@each_of_points
def test_a_study_without_a_space_is_one_trial(case: Case) -> None:
    assert points_of(run(case, lambda *_: 1.0, 3, space=Space({}))) == [{}]


@each_of_points
def test_rows_from_a_wider_space_are_left_out(case: Case) -> None:
    further = (1.0,) * (len(case.goals) - 1)
    history = [
        Observation(Proposal({"k": 7, "c": "z"}), 0.0, further=further),
        Observation(Proposal({"k": 1, "c": "a"}), 1.0, further=further),
    ]
    pending = [Proposal({"k": 9, "c": "a"})]
    answer = build(case, NINE).propose(history, pending, 20, rng_of(0))
    assert distinct(NINE, [proposal.point for proposal in answer]) == 8


class Broken(PointSearch):
    name = "broken"

    def _point(
        self,
        history: Sequence[Observation],
        pending: Sequence[Point],
        taken: Set[str],
        rng: np.random.Generator,
    ) -> Point | None:
        raise ZeroDivisionError("no\n  model")


def test_an_engine_that_raises_costs_one_warning_and_no_trial(
    caplog: pytest.LogCaptureFixture,
) -> None:
    search = Broken(Problem(NINE), {})
    with caplog.at_level(logging.WARNING):
        history = simulate(search.propose, by_point(lambda p: 1.0), 20)
    assert distinct(NINE, points_of(history)) == 9
    assert [record.getMessage() for record in caplog.records] == [
        "the broken search failed after 0 trials; a random point instead: "
        "ZeroDivisionError: no model"
    ]


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (
            "bayesien",
            {},
            "search.method: unknown method 'bayesien'; there are: "
            f"{', '.join(METHODS)}; did you mean 'bayesian'?",
        ),
        (
            "skopt",
            {"num_inital": 3},
            "search.options: unknown option 'num_inital' of 'skopt'; it knows: engine, "
            "num_initial; did you mean 'num_initial'?",
        ),
        ("grid", {"x": 1}, "search.options: unknown option 'x' of 'grid'; it knows: none"),
        ("skopt", {"num_initial": "5"}, "search.options.num_initial: '5' is not of type int"),
        ("skopt", {"num_initial": 0}, "search.options.num_initial: 0 is not at least 1"),
        (
            "skopt",
            {"engine": "GBRT"},
            "search.options.engine: 'GBRT' of scikit-optimize is broken with scikit-learn >= 1.6; "
            "there are: GP, ET, RF",
        ),
        (
            "skopt",
            {"engine": "gp"},
            "search.options.engine: unknown engine 'gp'; there are: GP, ET, RF; did you mean 'GP'?",
        ),
        (
            "optuna",
            {"sampler": "nsga"},
            "search.options.sampler: unknown sampler 'nsga'; there are: tpe, gp, cmaes, nsga2, "
            "random; did you mean 'nsga2'?",
        ),
        ("evolution", {"population": 3}, "search.options.population: 3 is not at least 4"),
        (
            "evolution",
            {"elite_fraction": 1.5},
            "search.options.elite_fraction: 1.5 is not from 0 to 1",
        ),
        ("evolution", {"mutation": 2}, "search.options.mutation: 2.0 is not from 0 to 1"),
    ],
)
def test_what_a_user_got_wrong_is_told_in_one_line(
    method: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(N3LOError) as error:
        create(method, Problem(NINE), options)
    assert str(error.value) == message


def test_engines_are_imported_only_for_what_needs_them() -> None:
    code = (
        "import sys; from workflow.search import Problem, create; from workflow.space import Space;"
        "[create(name, Problem(Space({})), {}) for name in ('random', 'sobol', 'evolution')];"
        "sys.exit(bool({'sklearn', 'skopt', 'optuna', 'torch'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# random, grid, sobol


def test_random_draws_follow_the_scale_of_a_dimension() -> None:
    space = Space({LR: Real(low=1e-4, high=1, log=True)})
    answer = build(CASES["random"], space).propose([], [], 400, rng_of(0))
    few = sum(float(proposal.point[LR]) < 1e-2 for proposal in answer)
    assert few == pytest.approx(200, abs=30)


def test_a_grid_is_walked_in_its_order_and_fills_gaps() -> None:
    points = list(NINE.grid())
    history = [Observation(Proposal(point), 0.0) for point in (points[0], points[2])]
    answer = build(CASES["grid"], NINE).propose(history, [], 3, rng_of(0))
    assert [proposal.point for proposal in answer] == [points[1], *points[3:5]]


@pytest.mark.parametrize("method", ["sobol", "bayesian", "skopt"])
def test_a_sobol_design_fills_every_half_and_quarter(method: str) -> None:
    """Four points of a Sobol sequence fall one into each quarter of every dimension."""
    search = create(method, Problem(SQUARE), {"num_initial": 4} if method != "sobol" else {})
    points = [proposal.point for proposal in search.propose([], [], 4, rng_of(0))]
    for path in SQUARE.dimensions:
        assert sorted(math.floor(2 * (float(point[path]) + 1)) for point in points) == [0, 1, 2, 3]


def test_a_sobol_point_is_the_first_that_is_free() -> None:
    rng = np.random.default_rng(0)
    first = sobol_point(SQUARE, 1, 0, set(), rng)
    second = sobol_point(SQUARE, 1, 1, set(), rng)
    assert first is not None
    assert sobol_point(SQUARE, 1, 0, {SQUARE.identity(first)}, rng) == second
    assert sobol_point(SQUARE, 2, 0, set(), rng) != first


def test_a_sobol_point_of_an_exhausted_space_is_none() -> None:
    taken = {NINE.identity(point) for point in NINE.points()}
    assert sobol_point(NINE, 1, 0, taken, np.random.default_rng(0)) is None


# bayesian


def bowl(point: Point) -> float:
    return (float(point["x"]) - 0.3) ** 2 + (float(point["y"]) + 0.4) ** 2


def least(case: Case, function: Callable[[Point], float], num: int, seed: int) -> float:
    propose = build(case, SQUARE, seed).propose
    history = simulate(propose, by_point(function), num, seed=seed)
    return min(seen.value for seen in history if seen.value is not None)


def test_bayesian_beats_random_on_a_quadratic() -> None:
    random = [least(CASES["random"], bowl, 25, seed) for seed in range(5)]
    assert max(least(CASES["bayesian"], bowl, 25, seed) for seed in range(5)) < min(random) / 5


def test_bayesian_climbs_where_more_is_better() -> None:
    search = create("bayesian", Problem(SQUARE, ("max",)), {})
    history = simulate(search.propose, by_point(lambda p: -bowl(p)), 20)
    assert max(seen.value for seen in history if seen.value is not None) > -1e-3


def test_bayesian_keeps_away_from_where_trials_fail() -> None:
    """Losses fall towards x = 1, but beyond 0.2 every training diverges."""

    def cliff(point: Point) -> float:
        return math.nan if float(point["x"]) > 0.2 else -float(point["x"])

    history = run(CASES["bayesian"], by_point(cliff), 30, space=SQUARE)
    late = [seen.value for seen in history[10:] if seen.value is not None]
    assert sum(math.isnan(value) for value in late) < 0.35 * len(late)


def test_bayesian_spreads_parallel_trials() -> None:
    search = build(CASES["bayesian"], SQUARE)
    history = simulate(search.propose, by_point(bowl), 8)
    points = [proposal.point for proposal in search.propose(history, [], 4, rng_of(8))]
    gaps = [
        math.dist(SQUARE.encode(a), SQUARE.encode(b)) for a, b in itertools.combinations(points, 2)
    ]
    assert min(gaps) > 1e-3


LINE = Space({"x": Real(low=0, high=1)})


def parabola_with_luck(num: int, noise: float | None) -> list[Observation]:
    """Trials of (x - 0.3)^2, of which the one at 0.9 had luck: it has the best value by 0.1."""
    xs = [0.9, *np.linspace(0, 1, num - 1).tolist()]
    values = [-0.1, *((x - 0.3) ** 2 for x in xs[1:])]
    return [
        Observation(Proposal({"x": x}), value, noise) for x, value in zip(xs, values, strict=True)
    ]


def test_bayesian_recommends_no_trial_for_its_luck() -> None:
    search = create("bayesian", Problem(LINE), {})
    chosen = search.recommend(parabola_with_luck(16, noise=0.2))
    assert chosen is not None
    assert abs(float(chosen.point["x"]) - 0.3) < 0.15


@pytest.mark.parametrize(("num", "noise"), [(16, None), (7, 0.2)], ids=["no noise", "few trials"])
def test_bayesian_recommends_the_best_score_where_it_cannot_tell(
    num: int, noise: float | None
) -> None:
    history = parabola_with_luck(num, noise)
    assert create("bayesian", Problem(LINE), {}).recommend(history) is history[0]


def test_a_cost_aware_search_prefers_what_is_cheap() -> None:
    """The value depends on y alone; what a trial costs rises with x, from 1 to 1000."""

    def mean_x(is_aware: bool) -> float:
        search = create("bayesian", Problem(SQUARE), {"cost_aware": is_aware, "num_initial": 6})
        history: list[Observation] = []
        for number in range(20):
            [proposal] = search.propose(history, [], 1, rng_of(number))
            x, y = (float(proposal.point[path]) for path in ("x", "y"))
            seen = replace(proposal, number=number)
            history.append(Observation(seen, (y - 0.2) ** 2, cost=10 ** (1.5 * (x + 1))))
        return float(np.mean([float(seen.point["x"]) for seen in history[6:]]))

    assert mean_x(True) < -0.6 < mean_x(False)


# skopt, optuna


@pytest.mark.parametrize(
    ("case", "gain"),
    [
        pytest.param(Case("skopt", {"engine": "GP"}, num=30), 100, id="GP"),
        pytest.param(Case("skopt", {"engine": "ET"}, num=30), 5, id="ET"),
        pytest.param(Case("skopt", {"engine": "RF"}, num=30), 5, id="RF"),
        pytest.param(Case("optuna", num=60), 2, id="tpe"),
        pytest.param(Case("optuna", {"sampler": "cmaes"}, num=60), 10, id="cmaes"),
    ],
)
def test_an_engine_learns_though_it_is_rebuilt_for_each_trial(case: Case, gain: float) -> None:
    def rebuilt(*args: Any) -> list[Proposal]:
        return build(case, SQUARE).propose(*args)

    history = simulate(rebuilt, by_point(bowl), case.num)
    values = [seen.value for seen in history if seen.value is not None]
    assert np.median(values[-10:]) < np.median(values[:10]) / gain


@pytest.mark.parametrize(("sampler", "num_asked"), [("gp", 2), ("nsga2", 40)])
def test_optuna_goes_to_where_trials_were_good(sampler: str, num_asked: int) -> None:
    rng = np.random.default_rng(1)
    points = [SQUARE.sample(rng) for _ in range(60)]
    history = [Observation(Proposal(point), bowl(point)) for point in points]
    search = create("optuna", Problem(SQUARE, num_trials=60), {"sampler": sampler})
    asked = [search.propose(history, [], 1, rng_of(seed))[0].point for seed in range(num_asked)]
    assert np.median(list(map(bowl, asked))) < np.median(list(map(bowl, points))) / 3


@pytest.mark.parametrize("sampler", ["tpe", "cmaes", "nsga2"])
def test_optuna_is_told_of_failures_as_the_worst_and_of_pending_trials_as_running(
    sampler: str,
) -> None:
    goals: tuple[Goal, ...] = ("max",) if sampler == "cmaes" else ("max", "max")
    search = OptunaSearch(Problem(NINE, goals), {"sampler": sampler})
    points = list(NINE.points())
    values = [2.0, None, 5.0, math.inf]
    history = [
        Observation(Proposal(point), value, further=() if value is None else (value + 1,))
        for point, value in zip(points, values, strict=False)
    ]
    trials = search._study(history, points[4:6], rng_of(0)).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 4 + ["RUNNING"] * 2
    told = [trial.values for trial in trials[:4]]
    assert told == [[-v, -v - 1][: len(goals)] for v in (2.0, 2.0, 5.0, 2.0)]
    assert [trial.params["k"] for trial in trials] == [point["k"] for point in points[:6]]


def test_optuna_sees_every_goal() -> None:
    """The least of x and the most of y: one corner."""
    search = create("optuna", Problem(SQUARE, ("min", "max"), num_trials=80), {})
    history: list[Observation] = []
    for trial in range(80):
        (proposal,) = search.propose(history, [], 1, rng_of(trial))
        x, y = (float(proposal.point[path]) for path in ("x", "y"))
        history.append(Observation(proposal, x, further=(y,)))
    late = [seen.point for seen in history[40:]]
    assert np.mean([float(point["x"]) for point in late]) < -0.4
    assert np.mean([float(point["y"]) for point in late]) > 0.4


def test_cmaes_refuses_several_goals() -> None:
    with pytest.raises(N3LOError) as error:
        create("optuna", Problem(NINE, ("min", "min")), {"sampler": "cmaes"})
    assert str(error.value) == (
        "search.options.sampler: 'cmaes' has one goal; for more take 'nsga2'"
    )


@pytest.mark.parametrize(("sampler", "library"), [("tpe", "optuna"), ("cmaes", "cmaes")])
def test_a_missing_optuna_is_told_with_the_way_to_it(
    sampler: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(N3LOError) as error:
        create("optuna", Problem(NINE), {"sampler": sampler})
    assert str(error.value) == (
        f"search.method: 'optuna' needs {library}; pip install 'n3lo[optuna]'"
    )


def test_a_broken_skopt_is_told_with_its_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skopt", None)
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"1.{len(name)}")
    with pytest.raises(N3LOError) as error:
        create("skopt", Problem(NINE), {})
    assert str(error.value) == (
        "search.method: 'skopt' does not work with what is installed (scikit-optimize 1.15, "
        "numpy 1.5, scikit-learn 1.12): ModuleNotFoundError: import of skopt halted; None in "
        "sys.modules; method = 'bayesian' needs neither scikit-optimize nor scikit-learn"
    )


def test_a_huge_space_with_few_legal_points_is_not_listed() -> None:
    big = Integer(low=1, high=4096, log=True)
    space = Space({"a": big, "b": big, "c": big}, (Expression.parse("a + b + c <= 4"),))
    history = simulate(create("random", Problem(space), {}).propose, by_point(lambda p: 1.0), 9)
    assert distinct(space, points_of(history)) == len(history) <= 4
