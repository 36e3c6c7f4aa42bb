"""Each algorithm with a central copy of the weights does what its paper says, number by number.

Real MPI jobs on a loss whose gradient is known, in scripted orders of exchanges, against the NumPy
of central_reference.py.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import central_reference as reference
import numpy as np
import pytest
import torch
from training_helpers import launch

from apps.strategies.gem import energy_scale

pytestmark = pytest.mark.mpi

START = [3.0, -2.0, 0.5, 4.0]
TRANSPORTS = ["messages", "window", "one_sided"]

# Orders in which three workers exchange. In the end each has one turn left, in any order.
SCRIPTS = {
    "in turn": [0, 1, 2] * 4,
    "one is fast": [0, 0, 0, 1, 0, 0, 2, 0, 1, 0, 2, 1],
    "one is late": [0, 1, 0, 1, 0, 1, 0, 1, 0, 2, 1, 0],
    "the last begins": [2, 1, 2, 0, 2, 1, 0, 0, 1, 1, 2, 0],
}


def scale_and_target(worker: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Of a worker's batch: curvatures in 0.5 .. 1.5, and where the loss is least."""
    rng = np.random.default_rng([worker, count])
    return 0.5 + rng.random(len(START)), rng.normal(size=len(START))


def gradient(x: np.ndarray, worker: int, count: int) -> np.ndarray:
    scale, target = scale_and_target(worker, count)
    return scale * (x - target)


def batch(worker: int, count: int, events: int = 8) -> tuple:
    scale, target = scale_and_target(worker, count)
    return scale.tolist(), target.tolist(), events


def batches(counts: list[int]) -> list[list[tuple]]:
    return [[batch(worker, count) for count in range(num)] for worker, num in enumerate(counts)]


def waits_of(script: list[int]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """What each update waits for: the one before it in the script."""
    counts: dict[int, int] = {}
    order = []
    for worker in script:
        order.append((worker, counts.get(worker, 0)))
        counts[worker] = counts.get(worker, 0) + 1
    return {later: [before] for before, later in itertools.pairwise(order) if before[0] != later[0]}


def case(strategy: str, script: list[int], tau: int = 1, **more: Any) -> dict[str, Any]:
    workers = max(script) + 1
    training = {"strategy": strategy, "optimizer": {"name": "sgd", "lr": 0.1}}
    training |= {key: more.pop(key) for key in ("optimizer", "clip_norm") if key in more}
    return {
        "training": training | {"exchange": {"sync_every": tau, **more.pop("exchange", {})}},
        "layout": {"num_workers": workers, **more.pop("layout", {})},
        "start": START,
        "steps": len(script) // workers,
        "batches": batches([script.count(worker) for worker in range(workers)]),
        "waits": waits_of(script),
        **more,
    }


def run(folder: Path, num_ranks: int, cases: dict[Any, dict]) -> dict[Any, list[dict]]:
    """Of each case what each rank saw; one launch for all."""
    torch.save(list(cases.values()), folder / "cases.pt")
    program = Path(__file__).with_name("central_ranks.py")
    words = ("-m", "mpi4py", program)  # which ends all ranks if one raises
    done = launch(num_ranks, *words, folder / "cases.pt", folder / "out.pt")
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, torch.load(folder / "out.pt"), strict=True))


def assert_equal(ranks: list[dict], expected: reference.Run) -> None:
    """The weights of each worker after each batch, and the centre, which all ranks hold."""
    for rank in ranks:
        np.testing.assert_allclose(rank["centre"].numpy(), expected.centre, rtol=1e-12)
    for rank in (each for each in ranks if each["trains"]):
        seen = np.array([each.numpy() for each in rank["seen"]])
        np.testing.assert_allclose(seen, expected.seen[rank["worker"]], rtol=1e-12)


# -- scripted orders -------------------------------------------------------------------------------

ALGORITHMS = {
    "downpour": (
        {},
        lambda script, start: reference.downpour(script, gradient, start, 0.1),
    ),
    "downpour, momentum": (
        {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.5}},
        lambda script, start: reference.downpour(script, gradient, start, 0.1, mu=0.5),
    ),
    "downpour, staleness_lr": (
        {"exchange": {"staleness_lr": True}},
        lambda script, start: reference.downpour(script, gradient, start, 0.1, staleness_lr=True),
    ),
    "easgd": (
        {},
        lambda script, start: reference.easgd(script, gradient, start, 0.1, 0.3),
    ),
    "easgd, momentum variant": (
        {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.8, "nesterov": True}},
        lambda script, start: reference.easgd(script, gradient, start, 0.1, 0.3, delta=0.8),
    ),
    "gem": (
        {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
        lambda script, start: reference.gem(script, gradient, start, 0.1, 0.9, 1.0),
    ),
    "gem, kappa 2": (
        {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.5}, "exchange": {"kappa": 2.0}},
        lambda script, start: reference.gem(script, gradient, start, 0.1, 0.5, 2.0),
    ),
}
IN_MEMORY = ["window", "one_sided"]
SCRIPTED = [
    *itertools.product(ALGORITHMS, SCRIPTS, ["messages"]),
    *itertools.product(ALGORITHMS, ["the last begins"], IN_MEMORY),
]
SCRIPTED.remove(("downpour, momentum", "the last begins", "one_sided"))  # MPI can only add


@pytest.fixture(scope="module")
def scripted(tmp_path_factory) -> dict[tuple, list[dict]]:
    found = {}
    for num_ranks, transports in ((4, ["messages", "one_sided"]), (3, ["window"])):
        cases = {}
        for name, order, transport in SCRIPTED:
            if transport in transports:
                more = dict(ALGORITHMS[name][0])
                more["exchange"] = {**more.get("exchange", {}), "transport": transport}
                strategy = name.partition(",")[0]
                cases[name, order, transport] = case(strategy, SCRIPTS[order], **more)
        found |= run(tmp_path_factory.mktemp("scripted"), num_ranks, cases)
    return found


@pytest.mark.parametrize("key", SCRIPTED, ids=", ".join)
def test_workers_and_centre_move_as_the_formula_says(scripted, key):
    name, order, _ = key
    expected = ALGORITHMS[name][1](SCRIPTS[order], np.array(START))
    assert_equal(scripted[key], expected)


@pytest.mark.parametrize("key", [key for key in SCRIPTED if key[0] == "downpour"], ids=", ".join)
def test_the_staleness_that_is_counted_is_the_one_of_the_script(scripted, key):
    expected = reference.downpour(SCRIPTS[key[1]], gradient, np.array(START), 0.1).staleness
    counted = {age: expected.count(age) for age in set(expected)}
    first = scripted[key][0]
    assert first["staleness"] == counted
    assert first["facts"] == {
        "updates": len(expected),
        "staleness": pytest.approx(sum(expected) / len(expected)),
        "staleness_max": max(expected),
    }


def test_two_workers_from_the_same_weights_move_as_equation_8_of_the_review(scripted):
    """theta_2 = theta_1 - lr g(b_2, theta_0): the second gradient is not of theta_1."""
    first = scripted["downpour", "in turn", "messages"]
    start = np.array(START)
    theta_1 = start - 0.1 * gradient(start, 0, 0)
    theta_2 = theta_1 - 0.1 * gradient(start, 1, 0)
    seen = {rank["worker"]: rank["seen"] for rank in first if rank["trains"]}
    np.testing.assert_allclose(seen[0][0].numpy(), theta_1, rtol=1e-14)
    np.testing.assert_allclose(seen[1][0].numpy(), theta_2, rtol=1e-14)


# -- several batches between exchanges, overlap ----------------------------------------------------


@pytest.fixture(scope="module")
def spaced(tmp_path_factory) -> dict[str, list[dict]]:
    turns = [0, 0, 1, 1] * 3
    sgd = {"name": "sgd", "lr": 0.1}
    cases = {
        "downpour": case("downpour", turns, tau=2),
        "easgd": case("easgd", turns, tau=2),
        "easgd, overlap": case("easgd", turns, tau=2, exchange={"overlap": True}),
        "clip": case("downpour", [0, 1] * 3, optimizer=sgd, clip_norm=0.5),
    }
    return run(tmp_path_factory.mktemp("spaced"), 3, cases)


def test_downpour_moves_alone_between_exchanges_and_sends_the_sum(spaced):
    expected = reference.downpour([0, 0, 1, 1] * 3, gradient, np.array(START), 0.1, tau=2)
    assert_equal(spaced["downpour"], expected)


@pytest.mark.parametrize("name", ["easgd", "easgd, overlap"])
def test_easgd_is_pulled_in_every_second_batch_only(spaced, name):
    expected = reference.easgd([0, 0, 1, 1] * 3, gradient, np.array(START), 0.1, 0.45, tau=2)
    assert_equal(spaced[name], expected)


def test_a_worker_clips_the_gradient_that_it_sends(spaced):
    def clipped(x: np.ndarray, worker: int, count: int) -> np.ndarray:
        whole = gradient(x, worker, count)
        return whole * min(1.0, 0.5 / (np.linalg.norm(whole) + 1e-6))

    expected = reference.downpour([0, 1] * 3, clipped, np.array(START), 0.1)
    assert_equal(spaced["clip"], expected)


# -- one worker ------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01},
    "sgd nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "adam": {"lr": 0.1, "amsgrad": True},
    "adamw": {"lr": 0.1},
    "adamax": {"lr": 0.1},
    "nadam": {"lr": 0.1},
    "radam": {"lr": 0.1},
    "adagrad": {"lr": 0.1, "initial_accumulator_value": 0.3},
    "adadelta": {"lr": 0.1},
    "rmsprop": {"lr": 0.1, "centered": True, "momentum": 0.5},
    "rprop": {"lr": 0.1},
    "asgd": {"lr": 0.1},
}
ALONE = [0] * 6


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[tuple, list[dict]]:
    """One worker, every optimizer of torch, by one master, by two, and in a window."""
    found = {}
    for num_ranks, transport, layout in (
        (2, "messages", {}),
        (3, "messages", {"num_masters": 2}),
        (1, "window", {}),
    ):
        cases = {
            (name, num_ranks): case(
                "downpour", ALONE, layout=layout, exchange={"transport": transport},
                optimizer={"name": name.partition(" ")[0], **settings},
            )
            for name, settings in OPTIMIZERS.items()
        }  # fmt: skip
        found |= run(tmp_path_factory.mktemp("alone"), num_ranks, cases)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_is_sequential_training_bit_for_bit(alone, name, num_ranks):
    w = torch.nn.Parameter(torch.tensor(START, dtype=torch.float64))
    classes = {each.lower(): value for each, value in vars(torch.optim).items()}
    optimizer = classes[name.partition(" ")[0]]([w], **OPTIMIZERS[name])
    expected = []
    for count in range(len(ALONE)):
        scale, target = map(torch.from_numpy, scale_and_target(0, count))
        optimizer.zero_grad()
        ((scale * (w - target).square()).sum() / 2).backward()
        optimizer.step()
        expected.append(w.detach().clone())
    ranks = alone[name, num_ranks]
    worker = next(rank for rank in ranks if rank["trains"])
    assert all(map(torch.equal, worker["seen"], expected))
    assert all(torch.equal(rank["centre"], expected[-1]) for rank in ranks)


# -- all workers at once ---------------------------------------------------------------------------

UNEQUAL = [[batch(worker, step, 5 + worker) for step in range(4)] for worker in range(4)]


def large_batch_sgd(workers: int, steps: int, lr: float) -> np.ndarray:
    """SGD on the mean over the events of all workers."""
    x = np.array(START)
    for step in range(steps):
        events = [UNEQUAL[worker][step][2] for worker in range(workers)]
        gradients = [gradient(x, worker, step) for worker in range(workers)]
        x = x - lr * np.average(gradients, axis=0, weights=events)
    return x


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        (4, {"num_workers": 3}),
        (5, {"num_workers": 3, "num_masters": 2}),
        (7, {"num_workers": 2, "sub_masters": [2]}),
    ],
    ids=["one master", "two masters", "two sub-masters"],
)
def test_synchronous_downpour_is_sgd_on_one_large_batch(tmp_path, num_ranks, layout):
    workers = 4 if "sub_masters" in layout else 3
    one = {
        **case("downpour", [*range(workers)] * 4, layout=layout),
        "waits": {}, "batches": UNEQUAL,
    }  # fmt: skip
    one["training"]["exchange"] = {"synchronous": True}
    [ranks] = run(tmp_path, num_ranks, {"sync": one}).values()
    expected = large_batch_sgd(workers, 4, 0.1)
    for rank in ranks:
        np.testing.assert_allclose(rank["centre"].numpy(), expected, rtol=1e-12)
    assert ranks[0]["staleness"] == {0: 4}


@pytest.fixture(scope="module")
def together(tmp_path_factory) -> dict[str, list[dict]]:
    # Workers 0 and 1 make an update, then worker 2 comes too late, then again.
    late = {(2, 0): [(0, 0), (1, 0)], (0, 1): [(2, 0)], (1, 1): [(2, 0)],
            (2, 1): [(0, 1), (1, 1)]}  # fmt: skip
    backup = case("downpour", [0, 1, 2] * 2, exchange={"synchronous": True, "backup_workers": 1})
    easgd = case("easgd", [0, 1, 2] * 4, exchange={"synchronous": True})
    cases = {"backup": {**backup, "waits": late}, "easgd": {**easgd, "waits": {}}}
    return run(tmp_path_factory.mktemp("together"), 4, cases)


def test_with_a_backup_worker_the_last_gradient_is_dropped(together):
    """Chen et al. 2016: of three workers the first two count."""
    theta_1 = np.array(START)
    theta_1 = theta_1 - 0.1 * (gradient(theta_1, 0, 0) + gradient(theta_1, 1, 0)) / 2
    theta_2 = theta_1 - 0.1 * (gradient(theta_1, 0, 1) + gradient(theta_1, 1, 1)) / 2
    seen = {rank["worker"]: rank["seen"] for rank in together["backup"] if rank["trains"]}
    for worker in range(3):
        np.testing.assert_allclose(seen[worker][0].numpy(), theta_1, rtol=1e-12)
        np.testing.assert_allclose(seen[worker][1].numpy(), theta_2, rtol=1e-12)
    np.testing.assert_allclose(together["backup"][0]["centre"].numpy(), theta_2, rtol=1e-12)


def test_synchronous_easgd_follows_equations_5_and_6(together):
    expected = reference.synchronous_easgd(3, 4, gradient, np.array(START), 0.1, 0.9)
    assert_equal(together["easgd"], expected)


# -- groups and trees ------------------------------------------------------------------------------


def test_the_ranks_of_a_worker_move_by_the_mean_gradient_of_their_shares(tmp_path):
    """Two workers of two ranks; each rank has other events, and other numbers of them."""
    script = [0, 1] * 3
    shares = [
        [[batch(10 * worker + rank, step, 3 + 2 * rank) for rank in range(2)] for step in range(3)]
        for worker in range(2)
    ]

    def mean(x: np.ndarray, worker: int, step: int) -> np.ndarray:
        return sum(
            events / 8 * np.array(scale) * (x - np.array(target))
            for scale, target, events in shares[worker][step]
        )

    groups = {"num_workers": 2, "ranks_per_worker": 2}
    cases = {}
    for strategy in ("downpour", "easgd"):
        for backend in ("horovod", "ddp"):
            one = {**case(strategy, script, layout=groups), "batches": shares}
            one["training"]["backend"] = backend
            cases[strategy, backend] = one
    found = run(tmp_path, 5, cases)
    start = np.array(START)
    for (strategy, _), ranks in found.items():
        if strategy == "downpour":
            assert_equal(ranks, reference.downpour(script, mean, start, 0.1))
        else:
            assert_equal(ranks, reference.easgd(script, mean, start, 0.1, 0.45))


@pytest.fixture(scope="module")
def trees(tmp_path_factory) -> dict[str, list[dict]]:
    """Four workers under two sub-masters, in any order."""
    steps, workers = 60, 4
    script = [*range(workers)] * steps
    layout = {"num_workers": 2, "sub_masters": [2]}
    momentum = {"name": "sgd", "lr": 0.02, "momentum": 0.9}
    cases = {}
    for strategy, optimizer in (
        ("downpour", {"name": "sgd", "lr": 0.1}),
        ("easgd", {"name": "sgd", "lr": 0.4}),
        ("gem", momentum),
    ):
        one = case(strategy, script, layout=layout, optimizer=optimizer)
        # All batches have the same optimum, so that noise does not hide where a tree converges.
        same = [[([1.0, 0.5, 2.0, 1.0], [1.0, -1.0, 2.0, 0.0], 8)] * steps * 2] * workers
        cases[strategy] = {**one, "waits": {}, "batches": same}
    return run(tmp_path_factory.mktemp("trees"), 7, cases)


@pytest.mark.parametrize("strategy", ["downpour", "easgd", "gem"])
def test_the_top_master_of_a_tree_moves_and_converges(trees, strategy):
    for rank in trees[strategy]:
        np.testing.assert_allclose(rank["centre"].numpy(), [1.0, -1.0, 2.0, 0.0], atol=0.1)


@pytest.mark.parametrize("strategy", ["downpour", "easgd", "gem"])
def test_every_batch_of_a_tree_is_trained_on_once(trees, strategy):
    asked = [each for rank in trees[strategy] for each in rank["asked"]]
    assert sorted(asked) == [(worker, step) for worker in range(4) for step in range(60)]


# -- several networks ------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_networks_that_move_in_turn_are_exchanged_per_update_or_per_batch(tmp_path, transport):
    """With one worker both are the training of a single process; a batch makes three updates."""
    steps = [0] * 3
    cases = {
        per: {
            **case("downpour", steps, exchange={"per": per, "transport": transport},
                   optimizer={"name": "sgd", "lr": 0.01}),
            "networks": "duel",
        }
        for per in ("update", "batch")
    }  # fmt: skip
    found = run(tmp_path, 1 if transport == "window" else 2, cases)
    first = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    second = torch.tensor([2.0, -2.0], dtype=torch.float64, requires_grad=True)
    for count in range(3):
        target = torch.from_numpy(scale_and_target(0, count)[1][:2])
        for moved, distance in (
            (first, lambda a, b, t: (a - b) * t),
            (second, lambda a, b, t: a * b + t),
            (second, lambda a, b, t: a + b - t),
        ):
            loss = distance(first, second, target).square().sum()
            [slope] = torch.autograd.grad(loss, [moved])
            with torch.no_grad():
                moved -= 0.01 * slope
    expected = torch.cat([first.detach(), second.detach()])
    for per, ranks in found.items():
        for rank in ranks:
            torch.testing.assert_close(rank["centre"], expected, rtol=1e-12, atol=0)
        assert ranks[0]["facts"]["updates"] == (9 if per == "update" else 6)


# -- the formulas themselves -----------------------------------------------------------------------


@pytest.mark.parametrize(("force", "stable"), [(0.39, True), (0.41, False)])
def test_the_elastic_force_is_stable_up_to_the_bound_of_the_paper(tmp_path, force, stable):
    """Zhang et al. 2015, section 3.3: alpha <= (4 - 2 lr) / (4 - lr) = 0.4 at lr = 1.5."""
    one = case(
        "easgd", [0] * 600, optimizer={"name": "sgd", "lr": 1.5},
        exchange={"elastic_force": force, "transport": "window"},
    )  # fmt: skip
    one["batches"] = [[([1.0] * 4, [0.0] * 4, 8)] * 600]
    [ranks] = run(tmp_path, 1, {"bowl": one}).values()
    largest = ranks[0]["centre"].abs().max().item()
    assert largest < 0.1 if stable else largest > 100


def test_the_energy_of_a_push_and_of_the_others_is_at_most_that_of_the_proxy():
    """|s u| + |c| <= kappa |m|, where the others left room; equal where nothing was clipped."""
    generator = torch.Generator().manual_seed(2)
    u, m, c = torch.randn(3, 1000, generator=generator, dtype=torch.float64)
    scale = energy_scale(u, m, c, 1.5)
    assert ((scale >= 0) & (scale <= 5)).all()
    push, room = (scale * u).abs(), 1.5 * m.abs() - c.abs()
    assert (push <= room.clamp(min=0) + 1e-9).all()
    free = (scale > 0) & (scale < 5)
    assert free.sum() > 100
    torch.testing.assert_close(push[free], room[free], rtol=1e-9, atol=1e-9)


def test_a_zero_gradient_and_a_zero_move_give_a_finite_push():
    zero = torch.zeros(3)
    assert torch.equal(energy_scale(zero, zero, zero, 1.0) * zero, zero)
