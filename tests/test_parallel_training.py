"""Whole trainings whose ranks share every update: as one rank trains, and on after a kill."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_helpers import Changing, Launches, Tagger, Trained, small_task, validation_loss
from torch.nn.functional import cross_entropy
from training_helpers import JETS, classes_h5, make_task, without_clock

from apps.contract import Start, TrainTask
from apps.data import plan_of, prepare, trains
from apps.hdf5 import Reader
from apps.train import seed_torch

pytestmark = pytest.mark.mpi

# -- the trainings ---------------------------------------------------------------------------------

SMALL_UNITS = {"unit_parameters": 10}
TWO_WORKERS = {"num_workers": 2}
ONE_WORKER = {"ranks_per_worker": 2}
TWO_BY_TWO = {"num_workers": 2, "ranks_per_worker": 2}
HOROVOD = {"strategy": "allreduce", "backend": "horovod"}
DDP = {"strategy": "allreduce", "backend": "ddp"}
SHARDED = {"strategy": "sharded", "split": SMALL_UNITS}
TENSOR = {"strategy": "tensor"}
PIPELINE = {"strategy": "pipeline", "split": {"micro_batches": 3, "stages": ["third"]}}
GPIPE = {
    "strategy": "pipeline",
    "split": {"micro_batches": 4, "schedule": "gpipe", "stages": ["second"]},
}
FOUR_STAGES = {
    "strategy": "pipeline",
    "split": {"micro_batches": 4, "stages": ["second", "third", "head"]},
}
Way = tuple[str, dict[str, Any], dict[str, Any]]

# How ranks share a training: the launch that it is part of, the layout, what [training] asks for.
# DTensor remembers groups of ranks, so that each way to divide layers has a launch of its own.
WAYS: dict[str, Way] = {
    "local": ("1", {}, {}),
    "horovod": ("2", TWO_WORKERS, HOROVOD),
    "ddp": ("2", TWO_WORKERS, DDP),
    "sharded": ("2", ONE_WORKER, SHARDED),
    "pipeline": ("2", ONE_WORKER, PIPELINE),
    "gpipe": ("2", ONE_WORKER, GPIPE),
    "tensor": ("2 tensor", ONE_WORKER, TENSOR),
    "horovod 4": ("4", {"num_workers": 4}, HOROVOD),
    "hierarchical": ("4", TWO_BY_TWO, {**DDP, "reduction": {"hierarchical": True}}),
    "data x sharded": ("4", TWO_BY_TWO, SHARDED),
    "data x pipeline": ("4", TWO_BY_TWO, PIPELINE),
    "4 stages": ("4", {"ranks_per_worker": 4}, FOUR_STAGES),
    "data x tensor": ("4 tensor", TWO_BY_TWO, TENSOR),
    "pipeline x tensor": ("4 stages", {"ranks_per_worker": 4, "ranks_per_stage": 2}, PIPELINE),
}
AFTER = {  # what was cut goes on in new processes; a state is there before it is needed
    "1 again": ["1"],
    "2 tensor": ["2"],
    "4 tensor": ["2"],
    "2 again": ["2", "2 tensor"],
    "2 after 4": ["4 tensor"],
    "2 tensor again": ["2 tensor"],
}

ADAM = {"name": "adam", "lr": 0.02}
MOMENTUM = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
EPOCHS = 3
BY_EPOCH = {
    "optimizer": ADAM,
    "clip_norm": 0.5,
    "scheduler": {"name": "exponential_lr", "gamma": 0.8},
}
PLATEAU = {"name": "reduce_lr_on_plateau", "patience": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "epochs": BY_EPOCH,
    "updates": {
        "optimizer": MOMENTUM,
        "schedule_per": "update",
        "scheduler": [
            {"name": "linear_lr", "start_factor": 0.1, "epochs": 1},
            {"name": "cosine_annealing_lr"},
        ],
    },
    "accumulate": {
        "optimizer": {**ADAM, "weight_decay": 0.01},
        "accumulate": 2,
        "scheduler": [
            {"name": "constant_lr", "factor": 0.5, "epochs": 1},
            {"name": "exponential_lr", "gamma": 0.8},
        ],
    },
    "dropout": {"optimizer": ADAM, "scheduler": PLATEAU},
    "recompute": {"optimizer": ADAM, "scheduler": PLATEAU, "recompute": ["*"]},
    "norm": {"optimizer": MOMENTUM},
    "sync norm": {"optimizer": MOMENTUM, "sync_batchnorm": True},
    "bf16": {**BY_EPOCH, "precision": "bf16"},
}
MODELS: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.2},
    "recompute": {"dropout": 0.2},
    "norm": {"norm": True},
    "sync norm": {"norm": True},
}
SHARED = [way for way in WAYS if way != "local"]
OF_TWO = [way for way in SHARED if WAYS[way][0].startswith("2")]
NO_PIPELINE = ["horovod", "ddp", "sharded", "tensor"]
NO_PIPELINE_OF_4 = ["hierarchical", "data x sharded", "data x tensor"]
OF_SETTING = {
    "epochs": SHARED,
    "updates": [*OF_TWO, "data x pipeline", "pipeline x tensor"],
    "accumulate": [*NO_PIPELINE, *NO_PIPELINE_OF_4],
    "dropout": list(WAYS),
    "recompute": ["local", *NO_PIPELINE],
    "norm": [*NO_PIPELINE, "pipeline"],
    "sync norm": [*NO_PIPELINE, *NO_PIPELINE_OF_4],
    "bf16": ["local", *OF_TWO, "data x tensor"],
}
CASES = [(way, setting) for setting, ways in OF_SETTING.items() for way in ways]


def marked(cases: Iterable[Any]) -> list[Any]:
    """Four ranks on two cores take minutes, and test_strategies.py has their arithmetic."""

    def way_of(case: Any) -> str:
        text = " ".join(case) if isinstance(case, tuple) else case
        return max((way for way in WAYS if text.startswith(way)), key=len, default="local")

    of_four = [WAYS[way_of(case)][0].startswith("4") for case in cases]
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        if is_of_four
        else case
        for case, is_of_four in zip(cases, of_four, strict=True)
    ]


EXACT = [case for case in CASES if case[1] in ("epochs", "updates", "accumulate", "sync norm")]

# Where not all of a gradient is sent, or workers train apart.
ALLREDUCE: dict[str, dict[str, Any]] = {
    "horovod fp16": {**HOROVOD, "reduction": {"compression": "fp16"}},
    "ddp fp16": {**DDP, "reduction": {"compression": "fp16"}},
    "ddp powersgd": {**DDP, "reduction": {"compression": "powersgd"}},
    "ddp topk": {**DDP, "reduction": {"compression": "topk"}},
    "horovod local sgd": {**HOROVOD, "reduction": {"average_every": 4}},
    "ddp local sgd": {**DDP, "reduction": {"average_every": 4}},
    "adasum": {**HOROVOD, "reduction": {"operation": "adasum"}},
}
KILLED = {"killed powersgd": "ddp powersgd", "killed tensor": "tensor epochs"}
CUT = [
    *("1 lanes updates", "1 lanes accumulate", *ALLREDUCE),
    *(f"{way} {setting}" for way, setting in CASES if setting not in ("recompute", "bf16")),
]
COMPILED = ["local", "ddp", "sharded"]
SEEDS = (11, 12, 13)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Launches:
    """All trainings of this file; each launch begins when one of its trainings is asked for."""
    launches = Launches(tmp_path_factory.mktemp("parallel") / "tasks", AFTER)
    file = classes_h5(launches.root.parent / "events.h5")
    add_ways(launches, file)
    add_chains(launches, file)
    add_rates(launches, file)
    add_jets(launches)
    add_again(launches)
    return launches


def task_of(file: Path, setting: str, layout: dict[str, Any], **training: Any) -> TrainTask:
    training = {"epochs": EPOCHS, **SETTINGS[setting], **training}
    return small_task(file, args=MODELS.get(setting, {}), training=training, layout=layout)


def add_ways(launches: Launches, file: Path) -> None:
    for lanes in (1, 2, 4):
        for setting in ("epochs", "updates", "accumulate", "norm"):
            launches.add("1", f"{lanes} lanes {setting}", task_of(file, setting, {}, lanes=lanes))
    for seed in SEEDS:
        launches.add("1", f"seed {seed}", replace(task_of(file, "epochs", {}), seed=seed))
    for way, setting in CASES:
        group, layout, choices = WAYS[way]
        launches.add(group, f"{way} {setting}", task_of(file, setting, layout, **choices))
    for way in COMPILED:
        group, layout, choices = WAYS[way]
        task = task_of(file, "epochs", layout, **choices, lanes=2, compile=True)
        launches.add(group, f"{way} compiled", task)
    args = {"file": str(launches.paths("measured").result)}
    training = {"epochs": EPOCHS, "strategy": "pipeline"}
    task = small_task(file, Changing, args=args, training=training, layout=ONE_WORKER)
    launches.add("2", "measured", task)
    for name, choices in ALLREDUCE.items():
        launches.add("2", name, task_of(file, "epochs", TWO_WORKERS, **choices))


CHAINS = ["sharded", "pipeline", "tensor", "data x tensor"]


def add_chains(launches: Launches, file: Path) -> None:
    """Two epochs with DDP, one in another way, one with Horovod; and four by one rank."""

    def add(group: str, name: str, way: str, epochs: int, parent: str = "") -> None:
        _, layout, choices = WAYS[way]
        task = task_of(file, "epochs", layout, **choices, epochs=epochs, lanes=2)
        start = None
        if parent:
            start = Start(key=launches.task(parent).key(), folder=str(launches.root / parent))
        launches.add(group, name, replace(task, start=start, keep_state=True))

    add("1", "four", "local", 4)
    add("2", "two", "ddp", 2)
    for way in CHAINS:
        add(WAYS[way][0], f"three {way}", way, 3, "two")
        last = "2 after 4" if WAYS[way][0].startswith("4") else "2 again"
        add(last, f"four {way}", "horovod", 4, f"three {way}")


PLAIN = {"name": "sgd", "lr": 0.01}
LOCAL_SGD = {"average_every": 3}
# launch, layout, training, how the learning rate is scaled, and by how much
SCALED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str, float]] = {
    "horovod linear": ("2", TWO_WORKERS, {**HOROVOD, "accumulate": 2}, "linear", 4),
    "horovod sqrt": ("2", TWO_WORKERS, {**HOROVOD, "accumulate": 2}, "sqrt", 2),
    "ddp linear": ("2", TWO_WORKERS, {**DDP, "accumulate": 2}, "linear", 4),
    "local sgd": ("2", TWO_WORKERS, {**DDP, "reduction": LOCAL_SGD, "accumulate": 2}, "linear", 2),
    "local sgd of pairs": ("4", TWO_BY_TWO, {**HOROVOD, "reduction": LOCAL_SGD}, "linear", 2),
    "data x sharded": ("4", TWO_BY_TWO, SHARDED, "linear", 4),
    "pipeline": ("2", ONE_WORKER, PIPELINE, "linear", 1),
    "data x pipeline": ("4", TWO_BY_TWO, PIPELINE, "sqrt", math.sqrt(2)),
    "tensor": ("2 tensor", ONE_WORKER, TENSOR, "linear", 1),
    "data x tensor": ("4 tensor", TWO_BY_TWO, TENSOR, "linear", 2),
    "synchronous": (
        "4", {"num_workers": 3},
        {"strategy": "downpour", "exchange": {"synchronous": True}}, "linear", 3,
    ),
    "asynchronous worker": ("4", {"ranks_per_worker": 3}, {"strategy": "downpour"}, "linear", 3),
    "asynchronous": ("4", {"num_workers": 3}, {"strategy": "downpour"}, "linear", 1),
}  # fmt: skip


def add_rates(launches: Launches, file: Path) -> None:
    """Each with a scaled learning rate, and with the same one given."""
    for name, (group, layout, choices, scaling, factor) in SCALED.items():
        common = {"epochs": 2, **choices}
        scaled = {**common, "optimizer": PLAIN, "lr_scaling": scaling}
        given = {**common, "optimizer": {**PLAIN, "lr": PLAIN["lr"] * factor}}
        for kind, training in (("scaled", scaled), ("given", given)):
            task = small_task(file, training=training, layout=layout)
            launches.add(group, f"{kind} {name}", task)
    once = {**HOROVOD, "epochs": 1, "batch_size": 64, "optimizer": PLAIN,
            "reduction": {"operation": "adasum"}}  # fmt: skip
    launches.add("2", "adasum step", small_task(file, fold=FOLD_OF_80, training=once,
                                                 layout=TWO_WORKERS))  # fmt: skip


FOLD_OF_80 = 0  # with equally many events for each of two ranks
JETS_EPOCHS = 12
JETS_STEPS = 25  # of an epoch: 1600 jets in batches of 2 x 32
WIDTH = 64
COMPRESSIONS: dict[str, dict[str, Any]] = {
    "horovod fp16": {**HOROVOD, "reduction": {"compression": "fp16"}},
    "fp16": {**DDP, "reduction": {"compression": "fp16"}},
    "bf16": {**DDP, "reduction": {"compression": "bf16"}},
    "powersgd": {**DDP, "reduction": {"compression": "powersgd", "powersgd_rank": 2}},
    "topk": {**DDP, "reduction": {"compression": "topk", "topk_density": 0.1}},
}


def add_jets(launches: Launches) -> None:
    def add(name: str, choices: dict[str, Any], seed: int = SEEDS[0]) -> None:
        args = {"width_1": WIDTH, "width_2": WIDTH, "depth": 2}
        settings = {"epochs": JETS_EPOCHS, "batch_size": 32, "optimizer": {**ADAM, "lr": 0.005}}
        task = make_task(
            [JETS],
            model={"source": "apps.models.jets:JetMlp", "args": args},
            data={"inputs": "jetConstituentList", "targets": "jets[:, -6:-1]", "folds": 1},
            training={**settings, **choices},
            layout=TWO_WORKERS,
            seed=seed,
        )
        launches.add("2", f"jets {name}", task)

    for seed in SEEDS:
        add(f"none {seed}", DDP, seed)
    for name, choices in COMPRESSIONS.items():
        add(name, choices)


def add_again(launches: Launches) -> None:
    """Go on with what was cut: two ranks in new processes, four in the same, as to start them
    costs ten seconds."""
    for name in [*CUT, "measured"]:
        group = launches.group_of(name)
        launches.again(name, f"cut {name}", group if group.startswith("4") else f"{group} again")
    for name, like in KILLED.items():
        launches.again(like, name)  # the last one of its launch
        launches.again(name, name, f"{launches.group_of(like)} again")


# -- one rank's arithmetic -------------------------------------------------------------------------


def reference(trained: Launches, way: str, setting: str) -> Trained:
    """One rank that reads in as many lanes as there are batches in a step."""
    lanes = trained.task(f"{way} {setting}").ranks.readers
    return trained[f"{lanes} lanes {setting.removeprefix('sync ')}"]


def assert_same_training(one: Trained, other: Trained) -> None:
    """Up to rounding."""
    for row, expected in zip(one.rows, other.rows, strict=True):
        for name in ("loss", "val_loss", "lr"):
            assert row[name] == pytest.approx(expected[name], rel=1e-4), name
    assert_same_weights(one, other)


def assert_same_weights(one: Trained, other: Trained) -> None:
    assert list(one.weights) == list(other.weights)
    for name, value in other.weights.items():
        torch.testing.assert_close(one.weights[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("way", "setting"), marked(EXACT))
def test_ranks_train_as_one_rank_that_reads_in_as_many_lanes(trained, way, setting):
    """121 events leave 80 or 81 to train on, and 40 or 41 to validate on: nothing divides.

    One rank with twice the batch reads in another order: lanes cut the events of an epoch into as
    many parts as there are ranks, and a step takes some of each.
    """
    assert_same_training(trained[f"{way} {setting}"], reference(trained, way, setting))


@pytest.mark.parametrize("way", ["horovod", "ddp", "sharded"])
def test_batch_norm_of_each_ranks_part_is_another_training(trained, way):
    apart, whole = trained[f"{way} norm"], reference(trained, way, "norm")
    assert apart.rows[-1]["loss"] != pytest.approx(whole.rows[-1]["loss"], rel=1e-3)
    assert trained[f"{way} sync norm"].rows[-1]["loss"] == pytest.approx(
        whole.rows[-1]["loss"], rel=1e-4
    )


def test_ranks_that_divide_layers_see_the_same_batch_and_drop_the_same(trained):
    assert_same_training(trained["tensor dropout"], trained["local dropout"])
    assert_same_training(trained["tensor norm"], trained["1 lanes norm"])


@pytest.mark.parametrize("way", marked(WAYS))
def test_a_model_with_dropout_learns(trained, way):
    """Chance is ln 3."""
    rows = trained[f"{way} dropout"].rows
    assert len(rows) == EPOCHS
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert rows[-1]["val_loss"] < 0.5 * math.log(3)


@pytest.mark.parametrize(
    "name",
    marked([*(f"{way} {setting}" for way, setting in CASES if setting != "bf16"), *ALLREDUCE]),
)
def test_the_plain_model_has_the_weights_and_their_validation_loss(trained, name):
    training = trained[name]
    result = training.result
    assert result.num_parameters == sum(
        each.numel() for each in Tagger(**training.task.model.args).parameters()
    )
    assert result.metrics["val_loss"] == pytest.approx(
        validation_loss(training.task, training.weights), rel=1e-5
    )


# -- going on --------------------------------------------------------------------------------------


def assert_same_bits(one: Trained, other: Trained) -> None:
    assert without_clock(one.rows) == without_clock(other.rows)
    assert one.paths.weights.read_bytes() == other.paths.weights.read_bytes()
    assert one.result.fom == other.result.fom


@pytest.mark.parametrize("name", marked(CUT))
def test_a_training_that_was_cut_ends_as_one_that_was_not(trained, name):
    """In its second epoch, after two steps.

    To the bit with two ranks. A sum over four depends on how it is cut into messages, which DDP
    changes after its first step.
    """
    whole, other = trained[name], trained[f"cut {name}"]
    if whole.result.num_ranks > 2:
        assert_same_training(other, whole)
    else:
        assert_same_bits(other, whole)
    assert other.rows[0] == whole.rows[0]  # with its clock: this epoch was not trained again
    assert not other.paths.checkpoint.exists()


def test_a_pipeline_goes_on_with_the_same_stages_where_their_costs_have_changed(trained):
    """Its dropout is in the second stage when it begins, and would else be in the first."""
    assert_same_bits(trained["cut measured"], trained["measured"])


@pytest.mark.parametrize("name", KILLED)
def test_a_killed_training_ends_as_one_that_was_not(trained, name):
    like = trained[KILLED[name]]
    assert trained.launched(trained.group_of(KILLED[name])).returncode != 0
    assert_same_bits(trained[name], like)
    assert trained[name].rows[0] != like.rows[0]
    assert trained[name].rows[0] == Trained(like.task, trained.paths(f"cut {name}")).rows[0]


@pytest.mark.parametrize("way", marked(CHAINS))
def test_weights_and_moments_survive_a_change_of_strategy(trained, way):
    """Under Adam: DDP for two epochs, another way for one, and Horovod for the last one."""
    whole, *parts = (trained[name] for name in ("four", "two", f"three {way}", f"four {way}"))
    rows = [row for part in parts for row in part.rows]
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4]
    for name in ("lr", "loss", "val_loss"):
        expected = [row[name] for row in whole.rows]
        assert [row[name] for row in rows] == pytest.approx(expected, rel=1e-4), name
    assert_same_weights(parts[-1], whole)


# -- compression -----------------------------------------------------------------------------------

SIZES = [(WIDTH, 7), (WIDTH,), (WIDTH, WIDTH), (WIDTH,), (5, WIDTH), (5,)]  # of JetMlp's weights


def message_bytes(compression: str) -> int:
    """What a rank sends in a step."""
    numbers = [math.prod(size) for size in SIZES]
    if compression == "powersgd":  # two factors of rank 2, where they are smaller
        numbers = [min(2 * sum(size), math.prod(size)) if size[1:] else size[0] for size in SIZES]
    if compression == "topk":  # value and place, of layers of at least 1024
        numbers = [2 * math.ceil(0.1 * each) if each >= 1024 else each for each in numbers]
    return (2 if compression.endswith("16") else 4) * sum(numbers)


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_jets_are_learned_as_well_from_compressed_gradients(trained, name):
    """Within the noise of one training, which is the spread of three without compression."""
    plain = [trained[f"jets none {seed}"].result.fom for seed in SEEDS]
    noise = max(plain) - min(plain)
    assert max(plain) + noise < 1.2  # chance is ln 5 = 1.609
    assert abs(trained[f"jets {name}"].result.fom - plain[0]) < noise


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_an_epoch_sends_what_the_compression_leaves(trained, name):
    plain = {row["sent_bytes"] for row in trained[f"jets none {SEEDS[0]}"].rows}
    assert plain == {JETS_STEPS * message_bytes("none")}
    expected = JETS_STEPS * message_bytes(name)
    assert expected < min(plain)
    assert [row["sent_bytes"] for row in trained[f"jets {name}"].rows] == [expected] * JETS_EPOCHS


# -- precision and memory --------------------------------------------------------------------------


@pytest.mark.parametrize("way", marked(OF_SETTING["bf16"]))
def test_bf16_learns_as_well_as_fp32(trained, way):
    """Rounding to 8 bits, by 0.2% in each of some ten layers there and back, is 2% or so of noise;
    the seed of one rank alone makes a larger difference."""
    alone = [trained[f"seed {seed}"].result.fom for seed in SEEDS]
    half = trained[f"{way} bf16"]
    single = trained[f"seed {SEEDS[0]}" if way == "local" else f"{way} epochs"]
    noise = 0.05 * single.result.fom
    assert noise < max(alone) - min(alone)
    assert 0 < abs(half.result.fom - single.result.fom) < noise
    assert {value.dtype for value in half.weights.values()} == {torch.float32}


@pytest.mark.parametrize("way", COMPILED)
def test_a_compiled_model_trains_as_one_that_is_not(trained, way):
    compiled, plain = trained[f"{way} compiled"], trained["2 lanes epochs"]
    losses, expected = ([row["loss"] for row in each.rows] for each in (compiled, plain))
    assert losses == pytest.approx(expected, rel=1e-3)
    assert losses != expected  # its own kernels round in their own way
    assert list(compiled.weights) == list(plain.weights)


@pytest.mark.parametrize("way", OF_SETTING["recompute"])
def test_layers_that_are_computed_twice_give_the_same_bits(trained, way):
    assert_same_bits(trained[f"{way} recompute"], trained[f"{way} dropout"])


# -- the learning rate -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if case[0].startswith("4") else name
        for name, case in SCALED.items()
    ],
)
def test_the_learning_rate_is_scaled_once_by_the_batches_of_an_update(trained, name):
    scaled, given = trained[f"scaled {name}"], trained[f"given {name}"]
    rate = PLAIN["lr"] * SCALED[name][-1]
    assert [row["lr"] for row in scaled.rows] == pytest.approx([rate] * 2)
    if name != "asynchronous":  # where no two trainings are the same
        assert_same_training(scaled, given)


def test_adasum_adds_what_is_orthogonal_and_averages_what_is_alike(trained):
    """(1 - a.b / 2|a|²) a + (1 - a.b / 2|b|²) b, layer by layer."""
    training = trained["adasum step"]
    task = training.task
    index, fold_of_event = prepare(task.data, task.split_seed)
    is_training = trains(fold_of_event, task.fold)
    assert is_training.sum() == 80
    plan = plan_of(task, index, is_training, num_ranks=2, epoch=1)
    assert plan.num_steps == 1
    seed_torch(task.seed)
    model = Tagger()
    gradients = []
    for lane in (0, 1):
        x, y = map(torch.from_numpy, Reader(index, index.fields).gather(plan.events(lane, step=0)))
        loss = cross_entropy(model(x), y.long())
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for (name, before), a, b in zip(model.named_parameters(), *gradients, strict=True):
        dot, aa, bb = ((left * right).sum() for left, right in ((a, b), (a, a), (b, b)))
        step = (1 - dot / (2 * aa)) * a + (1 - dot / (2 * bb)) * b
        expected = before.detach() - PLAIN["lr"] * step
        torch.testing.assert_close(training.weights[name], expected, rtol=1e-5, atol=1e-7)


# -- time ------------------------------------------------------------------------------------------


def test_the_parts_of_the_time_are_the_whole(trained):
    parts = ("compute_s", "communication_s", "data_s", "idle_s")
    for name in trained.names:
        if not trained.is_launched(name):
            continue
        training = trained[name]
        result, rows = training.result, training.rows
        for part in parts:
            spent = sum(row[part] for row in rows)
            assert getattr(result, part) == pytest.approx(spent, rel=1e-6), (name, part)
        total = sum(getattr(result, part) for part in parts)
        assert result.training_s == pytest.approx(total, rel=1e-6), name
        speed = result.num_train * len(rows) / result.training_s
        assert result.samples_per_second == pytest.approx(speed, rel=1e-6), name
