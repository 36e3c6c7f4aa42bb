"""Population-based training against its definition, on trainings whose course is known."""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from search_helpers import rng_of, run_study

from apps.contract import N3LOError
from workflow.search import Observation, Problem, Proposal
from workflow.search.population import PopulationSearch, latest_trials, perturbed
from workflow.space import Choice, Integer, Ordinal, Real, Space

LR, BATCH, WIDTH = "training.optimizer.lr", "training.batch_size", "model.args.width"
SPACE = Space(
    {
        LR: Real(low=1e-4, high=1, log=True),
        BATCH: Integer(low=8, high=512, log=True),
        "training.loss": Choice(values=["l1", "mse"]),
        WIDTH: Integer(low=8, high=128, log=True),
        "data.shuffle": Choice(values=[True, False]),
    }
)
ONE_LR = Space({LR: Real(low=1e-3, high=1, log=True)})

Value = Callable[[Proposal], float | None]


def search_of(
    num_trials: int = 40, epochs: int = 20, space: Space = SPACE, goal: str = "min", **options: Any
) -> PopulationSearch:
    problem = Problem(space, (goal,), num_trials=num_trials, epochs=epochs)  # type: ignore[arg-type]
    return PopulationSearch(problem, options)


def loss(proposal: Proposal) -> float:
    """Less for a learning rate near 0.01, a wide network, and after more epochs."""
    lr, width = float(proposal.point[LR]), float(proposal.point.get(WIDTH, 8))
    return abs(math.log10(lr) + 2) + 1 / width + 2 / epochs_of(proposal)


def epochs_of(proposal: Proposal) -> int:
    epochs = proposal.settings["training.epochs"]
    assert type(epochs) is int
    return epochs


def member(proposal: Proposal) -> int:
    return proposal.tags["member"]


def step(proposal: Proposal) -> int:
    return proposal.tags["step"]


def simulate(
    search: PopulationSearch, value: Value = loss, parallel: int = 8, seed: int = 1, **more: Any
) -> list[Observation]:
    return run_study(search, value, parallel, seed, **more)


def population(
    values: Sequence[float | None], steps: Sequence[int] = (), epochs: int = 4
) -> list[Observation]:
    """The latest trials of members 0, 1, ..., at the lr 0.01, 0.02, ...

    Args:
        steps: of each; 0 by default.
        epochs: of a step.
    """
    return [
        Observation(
            Proposal(
                {LR: 0.01 * (number + 1)},
                {"training.epochs": epochs * ((steps or [0] * 99)[number] + 1)},
                tags={"member": number, "step": (steps or [0] * 99)[number]},
                number=number,
            ),
            value,
        )
        for number, value in enumerate(values)
    ]


def next_of(history: Sequence[Observation], of: int, seed: int = 0, **options: Any) -> Proposal:
    """What a member does next, all others being busy."""
    search = search_of(space=ONE_LR, **options)
    pending = [
        replace(o.proposal, number=100 + member(o.proposal), tags={**o.proposal.tags, "step": 9})
        for o in history
        if member(o.proposal) != of
    ]
    (proposal,) = search.propose(history, pending, 1, rng_of(seed))
    return proposal


# The course of a study


def test_the_first_step_has_every_member_once_at_its_own_point() -> None:
    answer = search_of().propose([], [], 8, rng_of(0))
    assert [dict(p.tags) for p in answer] == [{"member": m, "step": 0} for m in range(8)]
    assert len({SPACE.identity(p.point) for p in answer}) == 8
    assert all(SPACE.contains(p.point) and p.parent is None for p in answer)
    assert {epochs_of(p) for p in answer} == {4}
    assert search_of().propose([], [replace(p, number=0) for p in answer], 8, rng_of(8)) == []


@pytest.mark.parametrize("parallel", [1, 3, 8])
@pytest.mark.parametrize(("epochs", "steps"), [(20, 5), (23, 5), (5, 5), (9, 4), (100, 3)])
def test_every_member_does_every_step_and_ends_with_all_epochs(
    epochs: int, steps: int, parallel: int
) -> None:
    search = search_of(8 * steps + 5, epochs, steps=steps)
    history = simulate(search, parallel=parallel)
    done = Counter((member(o.proposal), step(o.proposal)) for o in history)
    assert done == Counter((m, s) for m in range(8) for s in range(steps))
    assert all(
        (epochs_of(o.proposal) == epochs) == (step(o.proposal) == steps - 1) for o in history
    )
    assert search.propose(history, [], 1, rng_of(99)) == []


@pytest.mark.parametrize("parallel", [1, 3, 8])
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_parents_have_ended_well_and_have_fewer_epochs(parallel: int, rate: float) -> None:
    dice = np.random.default_rng(5)
    num_copies = 0

    def check(history: list[Observation], pending: list[Proposal], new: Proposal) -> None:
        nonlocal num_copies
        known = {o.proposal.number: o for o in history}
        if new.parent is None:
            return
        parent = known[new.parent]  # it has ended
        assert parent.value is not None
        assert epochs_of(new) > epochs_of(parent.proposal)
        assert new.point[WIDTH] == parent.point[WIDTH]
        assert new.point["data.shuffle"] == parent.point["data.shuffle"]
        own = next(o for o in latest_trials(history) if member(o.proposal) == member(new))
        assert step(own.proposal) + 1 == step(new)
        if parent == own:
            assert new.point == own.point
            return
        num_copies += 1
        assert new.point != parent.point
        if own.value is not None:
            latest = sorted(o.value or math.inf for o in latest_trials(history))
            num = len(latest) // 4
            assert own.value in latest[-num:]
            assert parent.value in latest[:num]

    def value(proposal: Proposal) -> float | None:
        return None if dice.random() < rate else loss(proposal)

    history = simulate(search_of(), value, parallel, check=check)
    assert len(history) == 40
    assert num_copies >= 3
    keys = [json.dumps([o.point, dict(o.proposal.settings), o.proposal.parent]) for o in history]
    assert len(set(keys)) == len(keys)


def test_whose_trial_ended_goes_on_while_the_others_train() -> None:
    history = population([0.1, 0.2, 0.3])
    running = [replace(o.proposal, number=o.proposal.number) for o in population([None] * 8)[3:]]
    answer = search_of(space=ONE_LR).propose(history, running, 9, rng_of(8))
    assert [dict(p.tags) for p in answer] == [{"member": m, "step": 1} for m in range(3)]
    assert [p.parent for p in answer] == [0, 1, 2]


def test_a_member_goes_on_as_it_is_unless_it_is_among_the_worst() -> None:
    history = population([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    for number, seen in enumerate(history[:6]):
        tags = {"member": number, "step": 1}
        assert next_of(history, number) == Proposal(
            seen.point, {"training.epochs": 8}, parent=number, tags=tags
        )


@pytest.mark.parametrize("goal", ["min", "max"])
def test_the_worst_copy_a_random_one_of_the_best_and_explore(goal: str) -> None:
    values = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    history = population(values if goal == "min" else [-value for value in values])
    for number in (6, 7):
        copies = [next_of(history, number, seed, goal=goal) for seed in range(40)]
        assert {p.parent for p in copies} == {0, 1}
        assert {epochs_of(p) for p in copies} == {8}
        assert all(p.tags == {"member": number, "step": 1} for p in copies)
        assert all(p.point != history[p.parent or 0].point for p in copies)


def test_ranks_compare_the_latest_trials_whatever_their_steps() -> None:
    history = population([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], [1, 0, 0, 0, 0, 0, 0, 0])
    early = replace(history[0], value=0.9)
    early = replace(early, proposal=replace(early.proposal, tags={"member": 0, "step": 0}))
    assert next_of([early, *history], 7).parent in (0, 1)


def test_who_copies_a_network_ahead_has_shorter_steps_then() -> None:
    """20 epochs in 5 steps: of 12 trained, 8 are left for 4 steps."""
    history = population([0.1, 0.1, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], [2, 2, 0, 0, 0, 0, 0, 0])
    assert epochs_of(next_of(history, 7)) == 14


def test_a_network_without_an_epoch_for_each_step_is_not_copied() -> None:
    history = population([0.1, 0.1, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], [4, 4, 0, 0, 0, 0, 0, 0])
    assert next_of(history, 7).parent == 7


def test_a_failed_member_is_replaced_at_any_rank() -> None:
    history = population([None, 0.2, 0.3, 0.4, math.nan, 0.6, 0.7, math.inf])
    for number in (0, 4, 7):
        assert {next_of(history, number, seed).parent for seed in range(20)} == {1, 2}


def test_a_failed_member_copies_an_earlier_trial_if_all_have_failed_since() -> None:
    history = population([0.5])
    lost = population([None] * 8, [1] * 8)
    history += [replace(o, proposal=replace(o.proposal, number=9 + i)) for i, o in enumerate(lost)]
    assert next_of(history, 3).parent == 0


def test_a_failed_member_starts_anew_while_there_is_nothing_to_copy() -> None:
    history = population([None] * 8)
    fresh = next_of(history, 3)
    assert (fresh.parent, epochs_of(fresh)) == (None, 5)  # 20 in the 4 steps that are left
    assert fresh.point not in [o.point for o in history]
    assert fresh.tags == {"member": 3, "step": 1}


@pytest.mark.parametrize("parallel", [1, 8])
def test_a_study_whose_trials_all_fail_ends(parallel: int) -> None:
    assert len(simulate(search_of(), lambda _: None, parallel)) == 40


@pytest.mark.parametrize("value", [loss, lambda _: 1.0, lambda _: None])
def test_a_space_with_fewer_points_than_members_ends(value: Value) -> None:
    space = Space({LR: Real(low=0.01, high=0.02), "training.loss": Choice(values=["l1"])})
    tiny = Space({"training.loss": Choice(values=["l1", "mse"])})
    assert len(simulate(search_of(space=space), value)) == 40
    if value is not loss:
        history = simulate(search_of(space=tiny), value)
        assert {member(o.proposal) for o in history} == {0, 1}
        assert all(step(o.proposal) <= 4 for o in history)


# Exploring


def test_numbers_are_multiplied_and_kept_in_their_range() -> None:
    lr = Real(low=1e-3, high=1, log=True)
    found = {perturbed(lr, 0.1, rng_of(s)) for s in range(20)}
    assert found == {0.1 * 0.8, 0.1 * 1.2}
    assert {perturbed(lr, 1.0, rng_of(s)) for s in range(20)} == {0.8, 1.0}


@pytest.mark.parametrize(
    ("value", "moved"), [(100, {80, 120}), (2, {1, 3}), (1, {1, 2}), (128, {102, 128})]
)
def test_integers_move_by_one_at_least(value: int, moved: set[int]) -> None:
    batch = Integer(low=1, high=128)
    found = [perturbed(batch, value, rng_of(s)) for s in range(20)]
    assert set(found) == moved
    assert all(type(each) is int for each in found)


def test_an_ordinal_goes_to_a_neighbour_or_stays_at_its_end() -> None:
    batch = Ordinal(values=[16, 32, 48, 128])
    assert {perturbed(batch, 32, rng_of(s)) for s in range(20)} == {16, 48}
    assert {perturbed(batch, 128, rng_of(s)) for s in range(20)} == {48, 128}


def test_what_an_explored_condition_brings_in_is_drawn_and_the_network_kept() -> None:
    name, momentum = "training.optimizer.name", "training.optimizer.momentum"
    space = Space(
        {
            name: Choice(values=["adam", "sgd"]),
            momentum: Real(low=0.5, high=0.99, when={name: ["sgd"]}),
            LR: Real(low=1e-4, high=1, log=True),
            WIDTH: Integer(low=8, high=128),
        }
    )

    def check(history: list[Observation], pending: list[Proposal], new: Proposal) -> None:
        assert space.contains(new.point)
        if new.parent is not None:
            parent = next(o for o in history if o.proposal.number == new.parent)
            assert new.point[WIDTH] == parent.point[WIDTH]

    history = simulate(search_of(space=space, resample_probability=0.6), check=check)
    assert {o.point[name] for o in history[20:]} == {"adam", "sgd"}


def test_a_change_that_would_change_the_network_is_not_made() -> None:
    """Its width exists for one loss only."""
    space = Space(
        {
            "training.loss": Choice(values=["l1", "mse"]),
            LR: Real(low=1e-4, high=1, log=True),
            WIDTH: Integer(low=8, high=128, when={"training.loss": ["mse"]}),
        }
    )

    def check(history: list[Observation], pending: list[Proposal], new: Proposal) -> None:
        if new.parent is not None:
            parent = next(o for o in history if o.proposal.number == new.parent)
            assert new.point.get(WIDTH) == parent.point.get(WIDTH)

    simulate(search_of(space=space, resample_probability=0.9), check=check)


def test_a_choice_changes_only_when_it_is_drawn_afresh() -> None:
    loss_dimension = Choice(values=["l1", "mse"])
    assert {perturbed(loss_dimension, "mse", rng_of(s)) for s in range(9)} == {"mse"}
    history = [
        replace(o, proposal=replace(o.proposal, point=search_point))
        for o, search_point in zip(
            population([0.1 * i for i in range(8)]),
            [p.point for p in search_of().propose([], [], 8, rng_of(0))],
            strict=True,
        )
    ]

    def share(resample: float) -> float:
        search = search_of(resample_probability=resample)
        changed = 0
        for seed in range(200):
            running = [replace(o.proposal, number=50) for o in history[:7]]
            (copy,) = search.propose(history, running, 1, rng_of(seed))
            parent = next(o for o in history if o.proposal.number == copy.parent)
            changed += copy.point["training.loss"] != parent.point["training.loss"]
            assert copy.point[WIDTH] == parent.point[WIDTH]
        return changed / 200

    assert share(0.0) == 0
    assert share(0.5) == pytest.approx(0.25, abs=0.1)


# What it is for


def test_it_finds_a_schedule_that_beats_every_fixed_learning_rate() -> None:
    """Descent in a noisy bowl, L -> (1 - lr)^2 L + lr^2: the best rate falls like 1/epoch."""

    def train(bowl: float, lr: float, num_epochs: int) -> float:
        for _ in range(num_epochs):
            bowl = (1 - lr) ** 2 * bowl + lr**2
        return bowl

    fixed = min(train(100.0, lr, 40) for lr in np.geomspace(1e-3, 1, 500))
    wins = 0
    for seed in range(8):
        state: dict[int | None, tuple[float, int]] = {None: (100.0, 0)}

        def value(proposal: Proposal, state: dict[int | None, tuple[float, int]] = state) -> float:
            bowl, trained = state[proposal.parent]
            lr = float(proposal.point[LR])
            bowl = train(bowl, lr, epochs_of(proposal) - trained)
            state[proposal.number] = (bowl, epochs_of(proposal))
            return bowl

        search = search_of(160, 40, ONE_LR, population=16, steps=10)
        history = simulate(search, value, parallel=4, seed=seed)
        wins += min(o.value for o in history if o.value is not None) < fixed
    assert wins == 8


# As every method


def test_it_keeps_nothing_between_two_proposals() -> None:
    class Rebuilt(PopulationSearch):
        def propose(self, *args: Any) -> list[Proposal]:
            return search_of().propose(*args)

    kept = simulate(search_of(), parallel=4)
    assert simulate(Rebuilt(search_of().problem, {}), parallel=4) == kept


def test_many_asked_at_once_are_one_step_of_each_member() -> None:
    history = population([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    answer = search_of(space=ONE_LR).propose(history, [], 50, rng_of(8))
    assert [dict(p.tags) for p in answer] == [{"member": m, "step": 1} for m in range(8)]
    keys = [json.dumps([p.point, dict(p.settings), p.parent]) for p in answer]
    assert len(set(keys)) == 8


def test_a_warm_start_is_no_member() -> None:
    warm = [Observation(Proposal({LR: 0.1}), 0.1)]
    (first,) = search_of(space=ONE_LR).propose(warm, [], 1, rng_of(0))
    assert first.tags == {"member": 0, "step": 0}


def test_proposals_are_plain() -> None:
    for o in simulate(search_of()):
        assert [type(value) for value in o.point.values()] == [float, int, str, int, bool]
        assert all(type(value) is int for value in o.proposal.tags.values())
        assert type(epochs_of(o.proposal)) is int


@pytest.mark.parametrize(
    ("study", "options", "message"),
    [
        (
            {"num_trials": 39},
            {},
            "search.num_trials = 39 is less than population x steps = 8 x 5 = 40",
        ),
        (
            {"space": Space({WIDTH: Integer(low=1, high=9)})},
            {},
            "search.space: population changes values of 'training.*' while it trains, and none is "
            "searched; with another method there need not be any",
        ),
        (
            {"space": Space({"training.epochs": Integer(low=1, high=9)})},
            {},
            "search.space: 'training.epochs' cannot be searched: population sets it",
        ),
        ({"epochs": 4}, {}, "search.options.steps: 5 is more than training.epochs = 4"),
        ({}, {"population": 3}, "search.options.population: 3 is not at least 4"),
        ({}, {"quantile": 0.6}, "search.options.quantile: 0.6 is not from 0 to 0.5"),
        (
            {},
            {"quantile": 0.1},
            "search.options.quantile: quantile x population = 0.1 x 8 is less than one member",
        ),
    ],
)
def test_what_a_user_got_wrong_is_told_in_one_line(
    study: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(N3LOError) as error:
        search_of(**study, **options)
    assert str(error.value) == message
