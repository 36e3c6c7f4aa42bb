"""The evolutionary search against its written definition, and NNLO's errors as impossible ones."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from workflow.search import Observation, Problem, Proposal
from workflow.search.evolution import (
    EvolutionSearch,
    choose,
    crossover,
    mutate,
    tournament,
)
from workflow.space import Choice, Integer, Point, Real, Space

SPACE = Space(
    {
        "lr": Real(low=1e-5, high=1e-1, log=True),
        "x": Real(low=-1, high=1),
        "depth": Integer(low=1, high=9),
        "width": Integer(low=1, high=512, log=True),
        "activation": Choice(values=["relu", "selu", "gelu"]),
    }
)
LINE = Space({"x": Real(low=0, high=1)})


def evolution(
    space: Space = LINE, num_trials: int = 100, goal: str = "min", **options: object
) -> EvolutionSearch:
    goals = ("max",) if goal == "max" else ("min",)
    return EvolutionSearch(Problem(space, goals, num_trials=num_trials), options)  # type: ignore[arg-type]


def rng_of(seed: int) -> np.random.Generator:
    return np.random.default_rng([7, seed])


def generation(search: EvolutionSearch, history: Sequence[Observation], seed: int = 0) -> list[int]:
    """Of what it would propose next, asked for more than there can be."""
    answer = search.propose(history, [], 100, rng_of(seed))
    return [proposal.tags["generation"] for proposal in answer]


def members(values: Sequence[float | None], born: int = 0, start: float = 0.0) -> list[Observation]:
    """Trials of one generation at x = start + 0.01, 0.02, ..."""
    return [
        Observation(Proposal({"x": start + 0.01 * (i + 1)}, tags={"generation": born}), value)
        for i, value in enumerate(values)
    ]


def evolve(
    search: EvolutionSearch, value: Callable[[Point], float | None], num: int, seed: int = 0
) -> list[Observation]:
    """A study that trains each generation at once; a steady state one trial after the other."""
    history: list[Observation] = []
    while len(history) < num:
        wanted = 1 if search.steady_state else num - len(history)
        answer = search.propose(history, [], wanted, rng_of(1000 * seed + len(history)))
        history += [Observation(proposal, value(proposal.point)) for proposal in answer]
    return history


# Selection


def test_a_tournament_is_won_by_rank() -> None:
    """Of n, the one with r worse ones than itself wins with probability 2 r / (n (n - 1))."""
    rng = rng_of(0)
    wins = Counter(tournament(5, rng) for _ in range(20_000))
    assert [wins[rank] / 20_000 for rank in range(5)] == pytest.approx(
        [0.4, 0.3, 0.2, 0.1, 0.0], abs=0.015
    )
    assert wins[4] == 0  # the last loses to everyone


def test_parents_are_two_and_distinct() -> None:
    ranked: list[Point] = [{"x": float(i)} for i in range(4)]
    rng = rng_of(0)
    pairs = Counter(
        tuple(float(parent["x"]) for parent in choose(ranked, rng)) for _ in range(5000)
    )
    assert all(first != second for first, second in pairs)
    assert len(pairs) == 6  # of the first three: the last wins no tournament


def test_the_fittest_fifth_is_kept_and_the_others_are_replaced() -> None:
    search = evolution(population=10)
    old = members([5, 9, 1, 7, 8, 6, 4, 3, 2, 10])
    new = members([0.5, 20, 20, 20, 20, 20, 20, 20], born=1, start=0.5)
    assert search.num_elites == 2
    assert search.members([*old, *new], 1)[:4] == [10, 2, 8, 11]
    assert len(search.members([*old, *new], 1)) == 10


def test_elites_live_on_and_are_not_proposed_again() -> None:
    """A generation trains what is new only, and its best is never lost."""
    search = evolution(SPACE, population=10)
    history = evolve(search, lambda point: float(point["x"]) ** 2, 74)
    identities = {SPACE.identity(seen.point) for seen in history}
    born = Counter(seen.proposal.tags["generation"] for seen in history)
    assert len(identities) == 74
    assert born == {0: 10, **dict.fromkeys(range(1, 9), 8)}
    values = [seen.value for seen in history if seen.value is not None]
    best = [values[search.members(history[: 10 + 8 * g], g)[0]] for g in range(9)]
    assert best == [min(values[: 10 + 8 * g]) for g in range(9)]


@pytest.mark.parametrize("population", [4, 5, 7, 9])
def test_small_populations_keep_an_elite(population: int) -> None:
    search = evolution(SPACE, population=population)
    assert 1 <= search.num_elites < population
    assert len(evolve(search, lambda point: float(point["x"]) ** 2, 40)) == 40


def test_the_number_of_generations_follows_from_the_budget() -> None:
    assert evolution(num_trials=10).num_generations == 1
    assert evolution(num_trials=74).num_generations == 9
    assert evolution(num_trials=75).num_generations == 10
    assert evolution(num_trials=74, steady_state=True).num_generations == 8


# Crossover


def test_children_lie_within_the_hull_of_their_parents() -> None:
    rng = rng_of(0)
    for _ in range(500):
        first, second = SPACE.sample(rng), SPACE.sample(rng)
        child = crossover(SPACE, first, second, rng)
        for path in ("lr", "x", "depth", "width"):
            low, high = sorted([float(first[path]), float(second[path])])
            assert low <= float(child[path]) <= high
        assert child["activation"] in (first["activation"], second["activation"])
        assert SPACE.contains(child)


def test_children_of_equals_are_equal() -> None:
    rng = rng_of(0)
    for _ in range(200):
        point = SPACE.sample(rng)
        assert crossover(SPACE, point, dict(point), rng) == point


def test_a_child_is_uniform_between_its_parents_each_gene_for_itself() -> None:
    space = Space({"lr": Real(low=1e-5, high=1e-1, log=True), "x": Real(low=-1, high=1)})
    rng = rng_of(0)
    first: Point = {"lr": 1e-2, "x": -0.5}
    second: Point = {"lr": 1e-4, "x": 0.5}
    unit = np.array([space.encode(crossover(space, first, second, rng)) for _ in range(4000)])
    for column in unit.T:  # lr in its logarithm; both from 1/4 to 3/4
        counts, _ = np.histogram(column, bins=4, range=(0.25, 0.75))
        assert counts.sum() == 4000
        assert counts / 4000 == pytest.approx(0.25, abs=0.03)
    assert abs(np.corrcoef(unit.T)[0, 1]) < 0.05


def test_a_choice_is_of_either_parent() -> None:
    space = Space({"c": Choice(values=["a", "b", "c", True, 1])})
    rng = rng_of(0)
    children = [crossover(space, {"c": "a"}, {"c": 1}, rng)["c"] for _ in range(2000)]
    assert {type(child) for child in children} == {str, int}
    assert children.count("a") == pytest.approx(1000, abs=100)


def test_a_gene_that_one_parent_lacks_is_the_others_and_one_that_both_lack_is_drawn() -> None:
    """As of dimensions whose condition is not met."""
    rng = rng_of(0)
    first: Point = {"lr": 1e-2, "depth": 3}
    second: Point = {"lr": 1e-2, "activation": "gelu"}
    children = [crossover(SPACE, first, second, rng) for _ in range(200)]
    assert {child["depth"] for child in children} == {3}
    assert {child["activation"] for child in children} == {"gelu"}
    assert np.std([float(child["x"]) for child in children]) == pytest.approx(
        2 / math.sqrt(12), abs=0.1
    )


def test_no_end_of_an_integer_range_is_favoured() -> None:
    """NNLO's int(gene) gave the top value to nobody."""
    space = Space({"k": Integer(low=1, high=5)})
    rng = rng_of(0)
    drawn = Counter(
        int(seen.point["k"])
        for seed in range(1000)
        for seen in evolve(evolution(space, population=4), lambda point: 0.0, 1, seed)
    )
    assert [drawn[k] / 1000 for k in range(1, 6)] == pytest.approx([0.2] * 5, abs=0.05)
    bred = Counter(int(crossover(space, {"k": 1}, {"k": 5}, rng)["k"]) for _ in range(4000))
    assert [bred[k] / 4000 for k in range(1, 6)] == pytest.approx(
        [0.125, 0.25, 0.25, 0.25, 0.125], abs=0.03
    )


# Mutation


def test_a_number_moves_by_a_normal_step_in_its_unit_coordinate() -> None:
    rng = rng_of(0)
    genes: Point = {"lr": 1e-3, "x": 0.0, "depth": 5, "width": 20, "activation": "selu"}
    moved = [mutate(SPACE, genes, 0.05, 1.0, rng) for _ in range(4000)]
    unit = np.array([SPACE.encode(point) for point in moved])[:, :2]
    assert unit.mean(axis=0) == pytest.approx([0.5, 0.5], abs=0.005)
    assert unit.std(axis=0) == pytest.approx([0.05, 0.05], abs=0.003)


def test_a_number_is_reflected_at_the_ends() -> None:
    rng = rng_of(0)
    xs = [float(mutate(LINE, {"x": 1.0}, 0.1, 1.0, rng)["x"]) for _ in range(4000)]
    assert max(xs) <= 1
    assert sum(x == 1 for x in xs) == 0  # not clipped, which would pile them up
    assert 1 - np.mean(xs) == pytest.approx(0.1 * math.sqrt(2 / math.pi), abs=0.005)


@pytest.mark.parametrize("depth", [1, 5, 9])
def test_an_integer_that_mutates_always_moves(depth: int) -> None:
    space = Space({"depth": Integer(low=1, high=9)})
    rng = rng_of(0)
    moved = {int(mutate(space, {"depth": depth}, 1e-4, 1.0, rng)["depth"]) for _ in range(50)}
    assert moved == {depth - 1, depth + 1} & set(range(1, 10))


def test_a_choice_changes_in_proportion_to_the_width() -> None:
    space = Space({"c": Choice(values=["a", "b", "c"])})
    rng = rng_of(0)
    for width, changed in ((0.1, 0.5), (0.02, 0.1), (0.5, 1.0)):
        values = Counter(mutate(space, {"c": "a"}, width, 1.0, rng)["c"] for _ in range(4000))
        assert 1 - values["a"] / 4000 == pytest.approx(changed, abs=0.03)
        assert values["b"] == pytest.approx(values["c"], rel=0.3)


def test_the_rate_is_that_of_a_gene() -> None:
    rng = rng_of(0)
    genes = SPACE.sample(rng)
    moved = [mutate(SPACE, genes, 0.1, 0.3, rng) for _ in range(2000)]
    for path in ("lr", "x", "depth", "width"):
        share = sum(point[path] != genes[path] for point in moved) / 2000
        assert share == pytest.approx(0.3, abs=0.04)


def test_mutations_shrink_from_generation_to_generation() -> None:
    search = evolution(num_trials=74, mutation=0.2)
    assert search.width(0) == 0.2
    assert [search.width(g + 1) < search.width(g) for g in range(8)] == [True] * 8
    assert search.width(3) == pytest.approx(0.2 * (1 - 3 / 9))
    assert search.width(100) == pytest.approx(0.02)


# Generations


def test_a_generation_is_proposed_once_and_then_waited_for() -> None:
    """NNLO issued the same population again while it was pending."""
    search = evolution(population=10)
    first = search.propose([], [], 100, rng_of(0))
    assert len(first) == 10
    assert search.propose([], first, 5, rng_of(1)) == []
    ended = [Observation(proposal, 1.0) for proposal in first[:9]]
    assert search.propose(ended, first[9:], 5, rng_of(2)) == []
    ended.append(Observation(first[9], 2.0))
    second = search.propose(ended, [], 100, rng_of(3))
    assert [proposal.tags for proposal in second] == [{"generation": 1}] * 8
    rest = search.propose(ended, second[:3], 100, rng_of(4))
    assert [proposal.tags for proposal in rest] == [{"generation": 1}] * 5


def test_one_asked_at_a_time_is_a_generation_too() -> None:
    search = evolution(population=4)
    pending: list[Proposal] = []
    while answer := search.propose([], pending, 1, rng_of(len(pending))):
        pending += answer
    assert len(pending) == 4


@pytest.mark.parametrize("failed", [math.nan, math.inf, -math.inf, None])
def test_a_failed_member_ends_like_others_and_ranks_last(failed: float | None) -> None:
    """NNLO never told them, so that the generation never ended."""
    search = evolution(population=5)
    history = members([3.0, failed, 1.0, failed, 2.0])
    assert search.members(history, 0) == [2, 4, 0, 1, 3]
    assert generation(search, history) == [1] * 4


def test_a_generation_that_failed_as_a_whole_is_drawn_anew() -> None:
    search = evolution(population=10)
    history = members([None] * 10)  # all at x <= 0.1
    answer = search.propose(history, [], 100, rng_of(0))
    assert len(answer) == 9 - 1
    assert max(float(proposal.point["x"]) for proposal in answer) > 0.5


def test_a_child_depends_on_the_generation_before_and_not_on_its_siblings() -> None:
    search = evolution(SPACE, population=6)
    history = evolve(search, lambda point: float(point["x"]), 6)
    siblings = search.propose(history, [], 4, rng_of(1))
    last = search.propose(history, siblings, 1, rng_of(2))
    assert len(last) == 1
    for ended in ([0], [3], [1, 2], [0, 1, 2, 3]):
        seen = [*history, *(Observation(siblings[i], -9.0) for i in ended)]
        pending = [siblings[i] for i in range(4) if i not in ended]
        assert search.propose(seen, pending, 1, rng_of(2)) == last


# Fitness


@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(lambda loss: loss - 10, id="negative"),
        pytest.param(lambda loss: loss - 0.05, id="around zero"),
        pytest.param(lambda loss: 1e-9 * loss, id="below one"),
        pytest.param(lambda loss: 1e9 + 1e3 * loss, id="huge"),
        pytest.param(lambda loss: math.atan(loss), id="bent"),
    ],
)
def test_only_the_order_of_the_figures_of_merit_counts(
    transform: Callable[[float], float],
) -> None:
    """NNLO's 1/loss is broken by zero and below, its integers by losses that differ by less."""
    search = evolution(SPACE, num_trials=50)
    plain, other = (
        evolve(search, value, 50)
        for value in (
            lambda point: abs(float(point["x"])),
            lambda point: transform(abs(float(point["x"]))),
        )
    )
    assert [seen.point for seen in plain] == [seen.point for seen in other]


def test_a_figure_of_merit_of_zero_or_minus_one_is_one() -> None:
    """To NNLO, -1 said "not evaluated yet"."""
    search = evolution(population=4)
    assert search.members(members([0.0, -1.0, 1.0, None]), 0) == [1, 0, 2, 3]
    assert evolution(population=4, goal="max").members(members([0.0, -1.0, 1.0, None]), 0) == [
        *(2, 0, 1, 3)
    ]


def test_equals_are_ranked_by_their_number() -> None:
    assert evolution(population=5).members(members([1.0, 0.5, 1.0, 0.5, 1.0]), 0) == [1, 3, 0, 2, 4]


# Rows of others, steady state, and whether it works


def test_untagged_rows_are_of_generation_0() -> None:
    search = evolution(population=5)
    rows = [Observation(Proposal({"x": 0.1 * i}), float(i)) for i in range(1, 8)]
    assert generation(search, rows[:3]) == [0, 0]
    assert generation(search, rows) == [1] * 4
    assert search.members(rows, 0) == [0, 1, 2, 3, 4]


def test_a_steady_state_waits_for_nobody() -> None:
    search = evolution(population=5, steady_state=True)
    pending = search.propose([], [], 7, rng_of(0))
    assert [proposal.tags["generation"] for proposal in pending] == [0] * 5 + [1] * 2


def test_a_steady_state_breeds_from_the_best_that_ended() -> None:
    search = evolution(population=4, steady_state=True, mutation=0.001)
    good = [Observation(Proposal({"x": 0.4 + 0.02 * i}), 1.0 + i) for i in range(4)]
    bad = [Observation(Proposal({"x": 0.1 * i}), 50.0) for i in (0, 1, 2, 8, 9, 10)]
    answer = search.propose([*bad, *good], [], 50, rng_of(0))
    assert all(0.39 < float(proposal.point["x"]) < 0.47 for proposal in answer)


@pytest.mark.parametrize("steady_state", [False, True])
def test_it_finds_more_than_random_draws_do(steady_state: bool) -> None:
    def loss(point: Point) -> float:
        unit = SPACE.encode(point)
        return float(np.sum((unit[:4] - 0.3) ** 2)) + (point["activation"] != "gelu")

    best, random = [], []
    for seed in range(5):
        search = evolution(SPACE, num_trials=106, steady_state=steady_state)
        history = evolve(search, loss, 106, seed)
        best.append(min(seen.value for seen in history if seen.value is not None))
        random.append(min(loss(SPACE.sample(rng)) for rng in [rng_of(seed)] for _ in range(106)))
    assert np.median(best) < np.median(random) / 4
