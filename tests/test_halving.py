"""Successive halving against its definition, on trainings whose learning curves are known."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from search_helpers import rng_of, run_study

from apps.contract import N3LOError
from workflow.search import Observation, Problem, Proposal, halving
from workflow.search.halving import HalvingSearch
from workflow.space import Choice, Integer, Point, Real, Space

SPACE = Space({"lr": Real(low=1e-4, high=1, log=True), "width": Integer(low=8, high=128, log=True)})
NINE = Space({"k": Integer(low=1, high=3), "c": Choice(values=["a", "b", "c"])})

Value = Callable[[Proposal], float | None]


def search_of(
    num_trials: int = 60, epochs: int = 27, space: Space = SPACE, goal: str = "min", **options: Any
) -> HalvingSearch:
    problem = Problem(space, (goal,), num_trials=num_trials, epochs=epochs)  # type: ignore[arg-type]
    return HalvingSearch(problem, {"proposer": "random"} | options)


def loss(point: Point) -> float:
    return abs(math.log10(float(point.get("lr", 1e-2))) + 2) + 0.01 * float(point.get("width", 8))


def curve(proposal: Proposal) -> float:
    """Falls with the epochs, to the same order of points as at its end."""
    return loss(proposal.point) + 2 / epochs_of(proposal)


def epochs_of(proposal: Proposal) -> int:
    epochs = proposal.settings["training.epochs"]
    assert type(epochs) is int
    return epochs


def rung(proposal: Proposal) -> int:
    return proposal.tags["rung"]


def simulate(
    search: HalvingSearch, value: Value = curve, parallel: int = 1, seed: int = 1, **more: Any
) -> list[Observation]:
    return run_study(search, value, parallel, seed, **more)


def at_top(history: Sequence[Observation], epochs: int = 27) -> list[Observation]:
    return [o for o in history if o.value is not None and epochs_of(o.proposal) == epochs]


def ended_on(
    values: Sequence[float | None], on: int = 0, start: int = 0, bracket: int = 0
) -> list[Observation]:
    """Trials `start`, `start` + 1, ... that ended on a rung."""
    return [
        Observation(
            Proposal(
                {"lr": 1e-3, "width": 8 + number},
                {"training.epochs": 3**on},
                tags={"rung": on, "bracket": bracket},
                number=number,
            ),
            value,
        )
        for number, value in enumerate(values, start)
    ]


# Rungs


@pytest.mark.parametrize(
    ("epochs", "options", "budgets"),
    [
        (27, {}, [1, 3, 9, 27]),
        (100, {}, [3, 9, 27, 100]),
        (10, {}, [1, 3, 10]),
        (16, {}, [1, 3, 9, 16]),
        (15, {}, [1, 3, 15]),
        (8, {"eta": 2}, [1, 2, 4, 8]),
        (9, {"min_epochs": 3}, [3, 9]),
        (9, {"min_epochs": 9}, [9]),
        (1, {}, [1]),
        (27, {"resource": "data"}, [1 / 9, 1 / 3, 1.0]),
        (1, {"resource": "data", "min_fraction": 0.1, "eta": 2}, [1 / 8, 1 / 4, 1 / 2, 1.0]),
    ],
)
def test_rungs_are_powers_of_eta_up_to_the_studys_own(
    epochs: int, options: dict[str, Any], budgets: list[float]
) -> None:
    found = search_of(epochs=epochs, **options).budgets
    assert found == pytest.approx(budgets, rel=1e-15)
    assert found[-1] == budgets[-1]


def test_a_new_point_starts_on_the_first_rung() -> None:
    (new,) = search_of().propose([], [], 1, rng_of(0))
    assert new.settings == {"training.epochs": 1}
    assert new.parent is None
    assert new.tags == {"rung": 0, "bracket": 0}


def test_a_promotion_is_the_same_point_with_more_epochs_from_the_last_state() -> None:
    history = ended_on([0.3, 0.1, 0.2])
    (promotion,) = search_of().propose(history, [], 1, rng_of(3))
    assert promotion == Proposal(
        history[1].point, {"training.epochs": 3}, parent=1, tags={"rung": 1, "bracket": 0}
    )


def test_with_more_data_a_promotion_trains_anew() -> None:
    history = ended_on([0.3, 0.1, 0.2])
    (promotion,) = search_of(resource="data").propose(history, [], 1, rng_of(3))
    tags = {"rung": 1, "bracket": 0, "promoted_from": 1}
    assert promotion == Proposal(history[1].point, {"data.train_fraction": 1 / 3}, tags=tags)
    pending = [replace(promotion, number=3)]
    (new,) = search_of(resource="data").propose(history, pending, 1, rng_of(4))
    assert new.tags == {"rung": 0, "bracket": 0}
    assert new.settings == {"data.train_fraction": 1 / 9}


# ASHA


def test_two_of_eta_three_are_not_enough_for_a_promotion() -> None:
    (new,) = search_of().propose(ended_on([0.3, 0.1]), [], 1, rng_of(2))
    assert rung(new) == 0


def test_a_trial_is_promoted_once_and_the_next_best_only_in_its_quota() -> None:
    history = ended_on([0.3, 0.1, 0.2, 0.4, 0.5, 0.6])
    answer = search_of().propose(history, [], 3, rng_of(6))
    assert [proposal.parent for proposal in answer] == [1, 2, None]


def test_the_highest_rung_comes_first() -> None:
    history = [*ended_on([0.5] * 6), *ended_on([0.3, 0.1, 0.2], on=1, start=6)]
    (promotion,) = search_of().propose(history, [], 1, rng_of(9))
    assert (promotion.parent, rung(promotion)) == (7, 2)


def test_equals_are_promoted_by_number_and_failed_ones_never() -> None:
    history = ended_on([None, math.nan, 0.5, 0.5, -math.inf, 0.5])
    answer = search_of().propose(history, [], 3, rng_of(6))
    assert [proposal.parent for proposal in answer] == [2, 3, None]
    failed = ended_on([None] * 9)
    assert [p.parent for p in search_of().propose(failed, [], 2, rng_of(9))] == [None, None]


def test_more_is_better_where_the_goal_is_max() -> None:
    (promotion,) = search_of(goal="max").propose(ended_on([0.1, 0.3, 0.2]), [], 1, rng_of(3))
    assert promotion.parent == 1


@pytest.mark.parametrize("brackets", [1, 3])
@pytest.mark.parametrize("parallel", [1, 5])
@pytest.mark.parametrize("eta", [2, 3])
def test_every_promotion_is_in_the_top_fraction_of_its_rung_at_that_time(
    eta: int, parallel: int, brackets: int
) -> None:
    search = search_of(num_trials=150, eta=eta, brackets=brackets)
    num_checked = 0

    def check(history: list[Observation], pending: list[Proposal], new: Proposal) -> None:
        nonlocal num_checked
        num_left = search.problem.num_trials - len(history) - len(pending)
        if num_left <= search.top:  # the last trials are promoted beyond their quota
            return
        if new.parent is None:
            assert rung(new) == new.tags["bracket"]
            return
        parent = next(o for o in history if o.proposal.number == new.parent)
        assert rung(new) == rung(parent.proposal) + 1
        assert new.point == parent.point
        rivals = [
            o.value
            for o in history
            if o.value is not None and o.proposal.tags == parent.proposal.tags
        ]
        assert parent.value in sorted(rivals)[: len(rivals) // eta]
        assert new.parent not in [p.parent for p in (*pending, *(o.proposal for o in history))]
        num_checked += 1

    simulate(search, parallel=parallel, check=check)
    assert num_checked > 25


def test_a_third_of_each_rung_reaches_the_next() -> None:
    """And a few more: what was promoted early may not be in the best third later."""
    on = Counter(rung(o.proposal) for o in simulate(search_of(num_trials=300))[:-3])
    for k in range(3):
        assert on[k] // 3 <= on[k + 1] <= on[k] / 3 + 2 * math.sqrt(on[k])
    assert on[0] > 180


def test_it_finds_as_good_a_point_as_full_trainings_at_a_fraction_of_the_epochs() -> None:
    ratios = []
    for seed in range(5):
        history = simulate(search_of(num_trials=90), parallel=4, seed=seed)
        points = [o.point for o in history if o.proposal.parent is None]
        by_number = {o.proposal.number: epochs_of(o.proposal) for o in history}
        spent = sum(epochs_of(o.proposal) - by_number.get(o.proposal.parent, 0) for o in history)
        best = min(loss(o.point) for o in at_top(history))
        assert best <= sorted(map(loss, points))[2]
        ratios.append(spent / (27 * len(points)))
    assert max(ratios) < 0.25


# Hyperband


def test_new_points_are_dealt_to_brackets_in_hyperbands_proportions() -> None:
    """With K = 3 and eta = 3 Hyperband starts 27, 12, 6 and 4 points in its brackets."""
    history = simulate(search_of(num_trials=200, brackets=4), parallel=4)
    new = [o.proposal for o in history[:-3] if o.proposal.parent is None]
    share = Counter(proposal.tags["bracket"] for proposal in new)
    for bracket, num in enumerate((27, 12, 6, 4)):
        assert share[bracket] == pytest.approx(len(new) * num / 49, abs=1)
    assert all(rung(proposal) == proposal.tags["bracket"] for proposal in new)


def test_brackets_promote_among_their_own() -> None:
    history = [*ended_on([0.1, 0.2], on=1), *ended_on([0.3, 0.4], on=1, start=2, bracket=1)]
    (new,) = search_of(brackets=2).propose(history, [], 1, rng_of(4))
    assert new.parent is None
    history += ended_on([0.5], on=1, start=4, bracket=1)
    (promotion,) = search_of(brackets=2).propose(history, [], 1, rng_of(5))
    assert promotion.parent == 2
    assert promotion.tags == {"rung": 2, "bracket": 1}


# The end


@pytest.mark.parametrize("parallel", [1, 4, 30])
@pytest.mark.parametrize("num_trials", [1, 2, 3, 4, 5, 7, 12, 20, 33])
@pytest.mark.parametrize("brackets", [1, 4])
def test_every_study_trains_one_in_full(num_trials: int, parallel: int, brackets: int) -> None:
    for seed in range(3):
        search = search_of(num_trials=num_trials, brackets=brackets)
        history = simulate(search, parallel=parallel, seed=seed)
        assert len(history) == num_trials
        assert at_top(history)


@pytest.mark.parametrize("parallel", [1, 4])
@pytest.mark.parametrize("rate", [0.2, 0.7])
def test_a_study_whose_trials_fail_trains_one_in_full_if_the_last_succeeds(
    parallel: int, rate: float
) -> None:
    for seed in range(20):
        dice = np.random.default_rng(seed)
        search = search_of(num_trials=12)

        def value(p: Proposal, dice: np.random.Generator = dice) -> float | None:
            return curve(p) if p.number == 11 or dice.random() > rate else None

        history = simulate(search, value, parallel, seed)
        assert len(history) == 12
        assert at_top(history)


def test_the_last_trials_carry_the_best_to_the_top_without_a_quota() -> None:
    history = ended_on([0.3, 0.1])
    search = search_of(num_trials=5)
    for number, (on, parent) in enumerate([(1, 1), (2, 2), (3, 3)], start=2):
        (promotion,) = search.propose(history, [], 1, rng_of(number))
        assert (rung(promotion), promotion.parent) == (on, parent)
        assert search.propose(history, [replace(promotion, number=number)], 1, rng_of(9)) == []
        history.append(Observation(replace(promotion, number=number), 0.1))
    assert search.propose(history, [], 1, rng_of(9)) == []


def test_it_waits_for_the_rivals_of_the_one_that_it_carries() -> None:
    history = ended_on([0.3])
    running = [o.proposal for o in ended_on([None], start=1)]
    assert search_of(num_trials=5).propose(history, running, 1, rng_of(2)) == []


def test_a_promotion_skips_rungs_where_too_few_trials_are_left() -> None:
    history = [*ended_on([0.3, 0.1]), *ended_on([None], on=1, start=2)]
    history[2] = replace(history[2], proposal=replace(history[2].proposal, parent=1))
    (promotion,) = search_of(num_trials=5).propose(history, [], 1, rng_of(3))
    assert (promotion.parent, epochs_of(promotion)) == (0, 9)


def test_all_that_fails_ends_with_a_full_training_from_scratch() -> None:
    history = simulate(search_of(num_trials=12), lambda _: None, parallel=4)
    assert [epochs_of(o.proposal) for o in history] == [1] * 9 + [3, 9, 27]


def test_no_new_point_starts_that_could_not_reach_the_top() -> None:
    for parallel in (1, 4):
        history = simulate(search_of(num_trials=60), parallel=parallel)
        assert at_top(history[:-3])  # so that none had to be kept for the first one
        assert all(o.proposal.parent is not None for o in history[-3:])


def test_an_exhausted_space_ends_the_study_with_one_at_the_top() -> None:
    for parallel in (1, 4):
        for space, most in ((NINE, 9), (Space({"k": Integer(low=1, high=2)}), 2)):
            history = simulate(search_of(100, space=space), lambda p: float(p.point["k"]), parallel)
            new = [o.point for o in history if o.proposal.parent is None]
            assert len({space.identity(point) for point in new}) == len(new) == most
            assert len(at_top(history)) == 1


# Proposers


class Recorder:
    """Proposes like random search and keeps what it was told."""

    def __init__(self, problem: Problem) -> None:
        self.space = problem.space
        self.told: list[Observation] = []
        self.pending: list[Proposal] = []

    def propose(
        self,
        history: Sequence[Observation],
        pending: Sequence[Proposal],
        num: int,
        rng: np.random.Generator,
    ) -> list[Proposal]:
        assert num == 1
        self.told, self.pending = list(history), list(pending)
        return [Proposal(self.space.sample(rng))]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder(Problem(SPACE))

    def create(name: str, problem: Problem, options: Mapping[str, Any]) -> Recorder:
        assert (name, problem.space, options) == ("bayesian", SPACE, {})
        return made

    monkeypatch.setattr(halving, "create", create)
    return made


def told_values(recorder: Recorder) -> list[float | None]:
    assert all(o.proposal == Proposal(o.point) for o in recorder.told)
    return [o.value for o in recorder.told]


def test_the_proposer_learns_from_the_highest_rung_that_has_enough(recorder: Recorder) -> None:
    """D + 2 = 4 here."""
    search = search_of(proposer="bayesian")
    few = ended_on([0.1, None])
    search.propose(few, [], 1, rng_of(0))
    assert told_values(recorder) == []
    assert [p.point for p in recorder.pending] == [o.point for o in few]

    history = ended_on([0.1, 0.2, None, 0.3, 0.4])
    promotion = replace(history[0].proposal, tags={"rung": 1, "bracket": 0}, parent=0, number=5)
    history.append(Observation(promotion, 0.05))
    running = [Proposal({"lr": 0.5, "width": 99}, tags={"rung": 0, "bracket": 0}, number=6)]
    search.propose(history, running, 1, rng_of(0))
    assert told_values(recorder) == [0.1, 0.2, None, 0.3, 0.4]
    assert [p.point for p in recorder.pending] == [running[0].point]


def test_the_proposer_knows_what_failed_below_its_rung(recorder: Recorder) -> None:
    search = search_of(proposer="bayesian")
    history = [*ended_on([0.5, None]), *ended_on([0.1, 0.2, 0.3, 0.4], on=3, start=2)]
    search.propose(history, [], 1, rng_of(0))
    assert told_values(recorder) == [None, 0.1, 0.2, 0.3, 0.4]
    assert [p.point for p in recorder.pending] == [history[0].point]


def test_a_warm_start_is_told_as_trained_in_full_and_never_promoted(recorder: Recorder) -> None:
    search = search_of(proposer="bayesian", num_trials=5)
    warm = [Observation(Proposal({"lr": 0.1, "width": 8 + i}), 0.1 * i) for i in range(9)]
    (new,) = search.propose(warm, [], 1, rng_of(0))
    assert (rung(new), new.parent) == (0, None)
    assert told_values(recorder) == [o.value for o in warm]


@pytest.mark.parametrize("proposer", ["bayesian", "random", "sobol"])
def test_every_proposer_gives_new_legal_points(proposer: str) -> None:
    history = simulate(search_of(num_trials=25, epochs=9, proposer=proposer), parallel=3)
    new = [o.point for o in history if o.proposal.parent is None]
    assert len({SPACE.identity(point) for point in new}) == len(new) >= 14
    assert all(SPACE.contains(point) for point in new)


# As every method


@pytest.mark.parametrize("options", [{}, {"brackets": 3}, {"resource": "data"}])
def test_it_keeps_nothing_between_two_proposals(options: dict[str, Any]) -> None:
    def value(proposal: Proposal) -> float:
        return loss(proposal.point) - rung(proposal)

    class Rebuilt(HalvingSearch):
        def propose(self, *args: Any) -> list[Proposal]:
            return search_of(40, **options).propose(*args)

    kept = simulate(search_of(40, **options), value, parallel=4)
    rebuilt = Rebuilt(search_of(40).problem, {"proposer": "random"})
    assert simulate(rebuilt, value, parallel=4) == kept


def test_many_asked_at_once_are_different_trials_and_as_many_as_the_budget_has() -> None:
    history = ended_on([0.1, 0.2, 0.3])
    answer = search_of(num_trials=20).propose(history, [], 50, rng_of(3))
    keys = [json.dumps([p.point, dict(p.settings), p.parent]) for p in answer]
    assert len(set(keys)) == len(keys)
    assert len(answer) == 20 - 3 - 2  # two are kept to bring the promoted one to the top


def test_proposals_are_plain() -> None:
    for resource, kind in (("epochs", int), ("data", float)):
        for o in simulate(search_of(30, resource=resource), lambda p: loss(p.point)):
            assert [type(v) for v in o.proposal.settings.values()] == [kind]
            assert all(type(v) is int for v in o.proposal.tags.values())


def test_rows_from_a_wider_space_are_not_promoted() -> None:
    history = ended_on([0.1, 0.2, 0.3])
    history[0] = replace(history[0], proposal=replace(history[0].proposal, point={"lr": 9.0}))
    (new,) = search_of().propose(history, [], 1, rng_of(3))
    assert new.parent is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eta": 1}, "search.options.eta: 1 is not at least 2"),
        ({"min_epochs": 30}, "search.options.min_epochs: 30 is not from 1 to 27"),
        ({"brackets": 5}, "search.options.brackets: 5 is not from 1 to 4"),
        (
            {"proposer": "bayes"},
            "search.options.proposer: unknown proposer 'bayes'; "
            "there are: bayesian, random, sobol; did you mean 'bayesian'?",
        ),
        (
            {"resource": "time"},
            "search.options.resource: unknown resource 'time'; there are: epochs, data",
        ),
        (
            {"resource": "data", "min_epochs": 1},
            "search.options.min_epochs has no meaning with resource = 'data'",
        ),
        (
            {"min_fraction": 0.1},
            "search.options.min_fraction has no meaning with resource = 'epochs'",
        ),
    ],
)
def test_what_a_user_got_wrong_is_told_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(N3LOError) as error:
        search_of(**options)
    assert str(error.value) == message


def test_what_halving_sets_cannot_be_searched() -> None:
    space = Space({"training.epochs": Integer(low=1, high=9)})
    with pytest.raises(N3LOError, match=r"^search\.space: 'training\.epochs' cannot be searched"):
        search_of(space=space)
