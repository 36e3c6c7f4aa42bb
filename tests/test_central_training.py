"""Whole trainings with a central copy of the weights: how good, how exact, and how they end."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from central_helpers import (
    Trained,
    Trainings,
    copies_itself,
    dies_once,
    notes,
    run,
    tagger_task,
    trained_events,
    training_events,
    validation_loss,
)
from training_helpers import JETS, make_task, without_clock

from apps.contract import Failure, Start, TaskPaths, TrainResult, TrainTask, read_json_lines

pytestmark = pytest.mark.mpi

ALGORITHMS = ("downpour", "easgd", "gem")
ADAM = {"name": "adam", "lr": 0.02}
MOMENTUM = {"name": "sgd", "lr": 0.05, "momentum": 0.9}
NESTEROV = {**MOMENTUM, "nesterov": True}

# -- jets ------------------------------------------------------------------------------------------

EPOCHS = 12
JETS_BATCH = 32
MOST_WORKERS = 4
JETS_SEEDS = (11, 12, 13)
# Asynchronous workers add to the momentum, so that downpour needs smaller steps (Mitliagkas et
# al. 2016, arXiv:1605.09774). One-sided MPI can do no more than plain SGD.
JETS_OPTIMIZERS = {
    "downpour": {"name": "adam", "lr": 0.006},
    "one_sided downpour": {"name": "sgd", "lr": 0.2},
    "easgd": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
}
LAYOUTS = {  # what differs from a study's defaults, and the number of ranks
    "1 + 1": ({"num_workers": 1}, {}, 2),
    "1 + 3": ({"num_workers": 3}, {}, 4),
    "2 sub-masters": ({"num_workers": 2, "sub_masters": [2]}, {}, 7),
    "workers of 2 ranks": ({"num_workers": 2, "ranks_per_worker": 2}, {}, 5),
    "2 masters": ({"num_workers": 2, "num_masters": 2}, {}, 4),
    "window": ({"num_workers": 2}, {"transport": "window"}, 2),
    "one_sided": ({"num_workers": 3}, {"transport": "one_sided"}, 4),
}
JETS_CASES = [
    *(("downpour", layout) for layout in LAYOUTS),
    *((other, layout) for other in ALGORITHMS[1:] for layout in ("1 + 3", "workers of 2 ranks")),
]


def jets_optimizer(algorithm: str, layout: str) -> str:
    """Its name in `JETS_OPTIMIZERS`."""
    if algorithm != "downpour":
        return "easgd"
    return "one_sided downpour" if layout == "one_sided" else "downpour"


def jets_task(strategy: str, optimizer: str, *, seed: int = JETS_SEEDS[0], **sections: Any):
    layout = sections.pop("layout", {})
    settings = {"epochs": EPOCHS, "batch_size": JETS_BATCH, "optimizer": JETS_OPTIMIZERS[optimizer]}
    return make_task(
        [JETS],
        model={"source": "apps.models.jets:JetMlp", "args": {"width_1": 32}},
        data={"inputs": "jetConstituentList", "targets": "jets[:, -6:-1]", "folds": 1},
        training={"strategy": strategy, **settings, **sections},
        layout=layout,
        seed=seed,
    )


def add_jets(trainings: Trainings) -> None:
    for optimizer in JETS_OPTIMIZERS:
        for seed in JETS_SEEDS:
            for batch in (JETS_BATCH, MOST_WORKERS * JETS_BATCH):
                task = jets_task("local", optimizer, seed=seed, batch_size=batch)
                trainings.add(f"local {optimizer} {batch} {seed}", task)
    for algorithm, name in JETS_CASES:
        layout, exchange, ranks = LAYOUTS[name]
        sections: dict[str, Any] = {"layout": layout, "exchange": exchange}
        if name == "workers of 2 ranks":  # so that a worker's batch is as large as the others'
            sections |= {"batch_size": JETS_BATCH // 2}
            sections |= {"backend": "ddp" if algorithm == "easgd" else "horovod"}
        task = jets_task(algorithm, jets_optimizer(algorithm, name), **sections)
        assert task.ranks.total == ranks
        trainings.add(f"{algorithm} {name}", task)


@pytest.mark.parametrize(("algorithm", "layout"), JETS_CASES)
def test_jets_are_learned_as_well_as_by_one_rank(trained, algorithm, layout):
    """At equal samples, within the noise of one rank's own trainings.

    The noise is their spread over seeds and over the number of moves: a worker among W makes only
    1 / W of the moves of one rank alone, as many as one rank with batches W times as large.
    """
    optimizer = jets_optimizer(algorithm, layout)
    alone = [
        trained[f"local {optimizer} {batch} {seed}"].result.fom
        for seed in JETS_SEEDS
        for batch in (JETS_BATCH, MOST_WORKERS * JETS_BATCH)
    ]
    noise = max(alone) - min(alone)
    assert max(alone) + noise < 1.3  # chance is ln 5 = 1.609
    training = trained[f"{algorithm} {layout}"]
    assert len(training.rows) == EPOCHS
    assert training.result.num_train == 1600
    assert training.result.fom < max(alone) + noise


# -- small trainings, for all the rest -------------------------------------------------------------

EXACT = {  # exchanges of one worker with which it trains as one rank alone, bit by bit
    "messages": ({}, {}),
    "2 masters": ({"num_masters": 2}, {}),
    "window": ({}, {"transport": "window"}),
    "synchronous": ({}, {"synchronous": True}),
}
EXACT_OPTIMIZERS = {
    "adam": ADAM,
    "momentum": MOMENTUM,
    "decay": {**ADAM, "weight_decay": 0.1, "amsgrad": True},
}
EXACT_CASES = [(way, optimizer) for way in EXACT for optimizer in EXACT_OPTIMIZERS]
SCHEDULE = {"scheduler": {"name": "exponential_lr", "gamma": 0.7}}

UNEVEN_LAYOUTS = {
    **LAYOUTS,
    "narrow tree": ({"num_workers": 2, "sub_masters": [1]}, {}, 4),
}
UNEVEN_CASES = [(algorithm, layout) for algorithm in ALGORITHMS for layout in UNEVEN_LAYOUTS]
OF_ANY_WAY = {"downpour": {"name": "sgd", "lr": 0.05}, "easgd": MOMENTUM, "gem": MOMENTUM}

RESUMED = {  # strategy, optimizer, layout, exchange of one worker
    "downpour": ("downpour", ADAM, {}, {}),
    "downpour overlap": ("downpour", ADAM, {}, {"overlap": True}),
    "downpour every 3": ("downpour", ADAM, {}, {"sync_every": 3}),
    "easgd momentum": ("easgd", MOMENTUM, {}, {}),
    "easgd nesterov": ("easgd", NESTEROV, {}, {"sync_every": 3}),
    "easgd adam": ("easgd", ADAM, {}, {"overlap": True}),
    "gem": ("gem", MOMENTUM, {}, {}),
    "one_sided easgd": ("easgd", MOMENTUM, {}, {"transport": "one_sided"}),
    "2 masters downpour": ("downpour", ADAM, {"num_masters": 2}, {}),
    "2 masters easgd": ("easgd", MOMENTUM, {"num_masters": 2}, {}),
    "window downpour": ("downpour", ADAM, {}, {"transport": "window"}),
    "window easgd": ("easgd", NESTEROV, {}, {"transport": "window"}),
    "window gem": ("gem", MOMENTUM, {}, {"transport": "window"}),
}
RESUMED_EPOCHS = 4
STEPS = 12  # of an epoch, with one worker
PROMOTED = ["downpour", "easgd momentum", "easgd nesterov", "gem", "window downpour"]


def add_small(trainings: Trainings) -> None:
    root = trainings.root.parent

    def add(name: str, strategy: str, optimizer: dict[str, Any], **sections: Any) -> TrainTask:
        training = {"optimizer": optimizer, **sections.pop("training", {})}
        task = tagger_task(root / name, strategy, training=training, **sections)
        trainings.add(name, task)
        return task

    for name, optimizer in EXACT_OPTIMIZERS.items():
        add(f"exact local {name}", "local", optimizer, training=SCHEDULE)
    for way, name in EXACT_CASES:
        layout, exchange = EXACT[way]
        training = {"exchange": exchange, **SCHEDULE}
        optimizer = EXACT_OPTIMIZERS[name]
        add(f"exact {way} {name}", "downpour", optimizer, training=training, layout=layout)

    for algorithm, name in UNEVEN_CASES:
        layout, exchange, _ = UNEVEN_LAYOUTS[name]
        training = {"exchange": exchange}
        optimizer = OF_ANY_WAY[algorithm]
        add(f"uneven {algorithm} {name}", algorithm, optimizer, training=training, layout=layout)
    for algorithm in ("downpour", "easgd"):
        training = {"exchange": {"sync_every": 5}}
        layout = {"num_workers": 3}
        optimizer = OF_ANY_WAY[algorithm]
        add(f"tau {algorithm}", algorithm, optimizer, training=training, layout=layout)
        training = {"exchange": {"synchronous": True}}
        add(f"synchronous {algorithm}", algorithm, optimizer, training=training, layout=layout)
        training = {"exchange": {"overlap": True}}
        add(f"overlap {algorithm}", algorithm, optimizer, training=training, layout=layout)

    stops = {
        "early_stopping": {"early_stopping": {"patience": 2, "min_delta": 100.0}},
        "target": {"target": {"metric": "val_loss", "value": 100.0}},
    }
    for algorithm in ALGORITHMS:
        for why, training in stops.items():
            for name in ("1 + 3", "2 sub-masters", "workers of 2 ranks", "window"):
                layout, exchange, _ = LAYOUTS[name]
                training = {**training, "epochs": 5, "exchange": exchange}
                add(f"{why} {algorithm} {name}", algorithm, OF_ANY_WAY[algorithm],
                    training=training, layout=layout)  # fmt: skip

    for name, (strategy, optimizer, layout, exchange) in RESUMED.items():
        whole = f"whole {name}"
        copy = copies_itself(trainings.root / whole, trainings.root / f"copy {name}", STEPS + 5)
        training = {"exchange": exchange, "epochs": RESUMED_EPOCHS, **SCHEDULE}
        task = add(whole, strategy, optimizer, training=training, layout=layout,
                   model={"on_step": copy})  # fmt: skip
        if name in PROMOTED:
            two = replace(task, training=replace(task.training, epochs=2), keep_state=True)
            start = Start(key=two.key(), folder=str(trainings.root / f"two {name}"))
            trainings.add(f"two {name}", two)
            trainings.add(f"four {name}", replace(task, start=start))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trainings:
    """All that end well: jets and small ones together, as starting ranks costs the most."""
    trainings = Trainings(tmp_path_factory.mktemp("central") / "tasks")
    add_jets(trainings)
    add_small(trainings)
    return trainings


def alike(training: Trained) -> list[dict[str, Any]]:
    """Its history without the clock, and without what masters count."""
    own = ("updates", "staleness", "staleness_max")
    rows = without_clock(training.rows)
    return [{name: row[name] for name in row if name not in own} for row in rows]


@pytest.mark.parametrize(("way", "optimizer"), EXACT_CASES)
def test_one_downpour_worker_trains_as_one_rank_bit_by_bit(trained, way, optimizer):
    """With dropout, BatchNorm and a schedule."""
    alone, central = trained[f"exact local {optimizer}"], trained[f"exact {way} {optimizer}"]
    assert alone.weights.keys() == central.weights.keys()
    for key, value in alone.weights.items():
        assert torch.equal(central.weights[key], value), key
    assert alike(alone) == alike(central)
    assert [(row["updates"], row["staleness_max"]) for row in central.rows] == [(STEPS, 0)] * 3


@pytest.mark.parametrize(
    "name",
    [f"uneven {algorithm} {layout}" for algorithm, layout in UNEVEN_CASES]
    + [f"{way} {name}" for way in ("tau", "synchronous", "overlap") for name in ALGORITHMS[:2]],
)
def test_each_event_is_trained_on_once_an_epoch(trained, name):
    """80 or 81 events among 1 to 4 workers, in batches of at most 7: nothing divides."""
    training = trained[name]
    expected = training_events(training.task)
    assert len(expected) in (80, 81)
    for epoch in (1, 2, 3):
        assert trained_events(trained.root.parent / name, epoch) == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", ["1 + 3", "2 sub-masters", "workers of 2 ranks", "window"])
@pytest.mark.parametrize(("why", "epochs"), [("early_stopping", 3), ("target", 1)])
def test_all_ranks_stop_in_the_same_epoch(trained, algorithm, layout, why, epochs):
    result = trained[f"{why} {algorithm} {layout}"].result
    assert (result.stopped, result.epochs, result.lost_ranks) == (why, epochs, 0)


@pytest.mark.parametrize(
    "name",
    [f"uneven {algorithm} {layout}" for algorithm, layout in UNEVEN_CASES],
)
def test_the_validation_loss_is_that_of_the_weights_that_are_left(trained, name):
    """Also with BatchNorm, whose statistics no master gathers: the mean of the workers'."""
    training = trained[name]
    expected = validation_loss(training.task, training.weights)
    assert training.rows[-1]["val_loss"] == pytest.approx(expected, rel=1e-5)
    assert training.weights["layers.1.num_batches_tracked"] > 0
    assert training.result.num_val in (40, 41)


# -- going on --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resumed(trained) -> Trainings:
    """Trainings that were stopped in epoch 2, and have gone on in new processes."""
    names = {name: f"whole {name}" for name in RESUMED}
    trainings = Trainings(trained.root)
    for name, whole in names.items():
        folder = trained.root / f"copy {name}"
        assert trained[whole].paths.result.exists()
        assert TaskPaths(folder).checkpoint.exists()
        shutil.copytree(folder, trained.root / f"before {name}")
        trainings.add(f"copy {name}", trained[whole].task)
    return trainings


def same_end(one: Trained, other: Trained) -> None:
    assert one.paths.weights.read_bytes() == other.paths.weights.read_bytes()
    rows = [without_clock(each.rows) for each in (one, other)]
    assert rows[0] == rows[1]
    assert one.result.fom == other.result.fom


@pytest.mark.parametrize("name", RESUMED)
def test_a_training_that_was_stopped_ends_with_the_same_bits(trained, resumed, name):
    """One worker is deterministic: Adam's moments, momenta, a worker's own weights come back."""
    whole, other = trained[f"whole {name}"], resumed[f"copy {name}"]
    same_end(whole, other)
    assert len(other.rows) == RESUMED_EPOCHS
    assert not other.paths.checkpoint.exists()
    before = read_json_lines(TaskPaths(trained.root / f"before {name}").history)
    assert other.rows[:1] == before  # with its clock: that epoch was not trained again


@pytest.mark.parametrize(
    "name",
    ["downpour", pytest.param("2 masters easgd", marks=pytest.mark.long), "window downpour"],
)
def test_a_killed_worker_goes_on_to_the_same_bits(trained, tmp_path, name):
    whole = trained[f"whole {name}"]
    strategy, optimizer, layout, exchange = RESUMED[name]
    training = {"exchange": exchange, "epochs": RESUMED_EPOCHS, "optimizer": optimizer, **SCHEDULE}
    dies = {"on_step": dies_once(tmp_path / "died", 2 * STEPS + 5)}
    task = tagger_task(tmp_path / "m", strategy, training=training, layout=layout, model=dies)
    folder = tmp_path / "task"
    assert run(task, folder).name == "signal 9"
    assert isinstance(run(task, folder), TrainResult)
    same_end(whole, Trained(task, TaskPaths(folder)))


@pytest.mark.parametrize("name", PROMOTED)
def test_a_training_in_two_tasks_ends_with_the_bits_of_one(trained, name):
    whole, two, four = (trained[f"{part} {name}"] for part in ("whole", "two", "four"))
    assert whole.paths.weights.read_bytes() == four.paths.weights.read_bytes()
    clockless = [without_clock(each.rows) for each in (whole, two, four)]
    assert clockless[0] == clockless[1] + clockless[2]
    assert (four.result.start_epoch, four.result.epochs) == (2, RESUMED_EPOCHS)
    assert two.paths.state.exists()


# -- failures --------------------------------------------------------------------------------------

TWO_WORKERS = {"num_workers": 2}  # ranks 1 and 2; rank 0 is the master
ON_RANK_2 = "if RANK == 2 and self.epoch == 2: "  # in its first batch, which nobody takes from it
DIES = "os.kill(os.getpid(), signal.SIGKILL)"
RAISES = "raise ValueError(f'rank {RANK} has had enough')"
SLOW = 0.005  # seconds of a step, so that no worker has ended when one dies


def small_task(folder: Path, strategy: str = "downpour", **sections: Any) -> TrainTask:
    layout = {**TWO_WORKERS, **sections.pop("layout", {})}
    training = {"optimizer": OF_ANY_WAY[strategy], **sections.pop("training", {})}
    return tagger_task(folder / "model", strategy, training=training, layout=layout, **sections)


@pytest.mark.parametrize(
    ("strategy", "exchange"),
    [
        ("downpour", {}),
        pytest.param("easgd", {"synchronous": True}, marks=pytest.mark.long),
        ("gem", {"transport": "window"}),
    ],
)
def test_a_worker_that_raises_ends_the_task_with_its_message(tmp_path, strategy, exchange):
    rank = 1 if exchange.get("transport") == "window" else 2
    on_step = ON_RANK_2.replace("== 2", f"== {rank}", 1) + RAISES
    task = small_task(tmp_path, strategy, training={"exchange": exchange},
                      model={"on_step": on_step})  # fmt: skip
    found = run(task, tmp_path / "task")
    line = 1 + next(
        number
        for number, text in enumerate((tmp_path / "model/my_model.py").read_text().splitlines())
        if "exec(self.on_step)" in text
    )
    assert found == Failure(
        reason="exception",
        message=f"ValueError: rank {rank} has had enough (my_model.py line {line})",
        rank=rank,
    )


def test_a_master_that_raises_ends_the_task_with_its_message(tmp_path):
    """Its workers are in the middle of the next epoch."""
    model = {"on_epoch": "if RANK == 0 and self.epoch == 2: " + RAISES}
    found = run(small_task(tmp_path, model=model), tmp_path / "task")
    assert (found.reason, found.rank) == ("exception", 0)
    assert found.message.startswith("ValueError: rank 0 has had enough (my_model.py line ")


def kills(rank: int) -> dict[str, str]:
    """For the model: rank 2 kills a master in mid-training."""
    return {
        "on_epoch": f"if RANK == {rank} and self.epoch == 1:\n"
        f"    (self.folder / 'pid').write_text(str(os.getpid()))",
        "on_step": "if RANK == 2 and self.epoch == 2:\n"
        "    os.kill(int((self.folder / 'pid').read_text()), signal.SIGKILL)",
    }


@pytest.mark.parametrize(
    ("model", "sections"),
    [
        ({"on_step": ON_RANK_2 + DIES}, {}),
        (kills(0), {}),
        pytest.param(
            {"on_step": ON_RANK_2 + DIES}, {"layout": {"num_masters": 2}}, marks=pytest.mark.long
        ),
        pytest.param(
            {"on_step": ON_RANK_2.replace("== 2", "== 1", 1) + DIES},
            {"training": {"exchange": {"transport": "window"}}}, marks=pytest.mark.long,
        ),
        pytest.param(
            kills(1), {"layout": {"num_workers": 1, "sub_masters": [1]}}, marks=pytest.mark.long
        ),
    ],
    ids=["worker", "master", "worker of two masters", "worker with a window", "sub-master"],
)  # fmt: skip
def test_a_killed_rank_ends_the_task(tmp_path, model, sections):
    found = run(small_task(tmp_path, model=model, **sections), tmp_path / "task")
    assert found.name == "signal 9"


@pytest.mark.parametrize(
    ("strategy", "layout", "started", "equation"),
    [
        ("downpour", {"num_workers": 3}, 3, "1 master + 3 workers x 1 rank = 4 ranks, but 3"),
        ("gem", {"num_workers": 2, "sub_masters": [2]}, 3,
         "3 masters + 4 workers x 1 rank = 7 ranks, but 3"),
    ],
)  # fmt: skip
def test_a_wrong_number_of_ranks_gives_the_equation(tmp_path, strategy, layout, started, equation):
    task = small_task(tmp_path, strategy, layout=layout)
    found = run(task, tmp_path / "task", num_ranks=started)
    assert (found.reason, found.message) == (
        "exception", f"layout: {equation} were started",
    )  # fmt: skip


# -- a worker that is lost, and one that is slow ---------------------------------------------------

MANY = 1200  # events: 40 steps an epoch for each of three workers
TOLERANT = {"exchange": {"tolerate_worker_loss": True}}


@pytest.mark.parametrize(
    ("strategy", "layout", "rank"),
    [
        ("downpour", {"num_workers": 3}, 2),
        pytest.param("easgd", {"num_workers": 3}, 3, marks=pytest.mark.long),
        ("gem", {"num_workers": 2, "sub_masters": [1]}, 2),
    ],
)
def test_the_others_go_on_without_a_worker_that_was_killed(tmp_path, strategy, layout, rank):
    """All batches of that epoch are trained on, but perhaps the one that it had begun."""
    on_step = (
        f"time.sleep({SLOW})\n"
        f"if RANK == {rank} and self.epoch == 2 and self.step == 3:\n"
        f"    self.note('begun', number)\n    {DIES}"
    )
    task = small_task(tmp_path, strategy, layout=layout, training=TOLERANT,
                      events=MANY, model={"on_step": on_step})  # fmt: skip
    result = run(task, tmp_path / "task", outlives_ranks=True)
    assert isinstance(result, TrainResult), result
    assert (result.lost_ranks, result.num_ranks, result.epochs) == (1, 4, 3)
    expected = training_events(task)
    assert trained_events(tmp_path / "model", 1) == expected
    (begun,) = (row["events"] for row in notes(tmp_path / "model") if row["what"] == "begun")
    second = trained_events(tmp_path / "model", 2)
    assert len(second) == len(set(second))
    assert set(expected) - set(second) <= set(begun)
    assert trained_events(tmp_path / "model", 3) == expected
    training = Trained(task, TaskPaths(tmp_path / "task"))
    assert training.rows[-1]["val_loss"] == pytest.approx(
        validation_loss(task, training.weights), rel=1e-5
    )


@pytest.mark.parametrize(
    "rank", [0, pytest.param(1, marks=pytest.mark.long)], ids=["master", "sub-master"]
)
def test_a_task_that_can_lose_workers_cannot_lose_a_master(tmp_path, rank):
    layout = {"num_workers": 1, "sub_masters": [1]} if rank else TWO_WORKERS
    task = small_task(tmp_path, layout=layout, training=TOLERANT, model=kills(rank))
    found = run(task, tmp_path / "task", outlives_ranks=True)
    assert isinstance(found, Failure)
    assert found.name in ("exception", "signal 9"), found


def test_a_slow_worker_slows_only_itself(tmp_path):
    """It needs ten times as long for a batch; the others do what it cannot.

    In the time of one of its steps the two others do 20, so that of the 120 steps of an epoch
    it does about 6. With a fixed share of 40 it would take as long as 40 of its steps.
    """
    on_step = "time.sleep(0.1 if RANK == 2 else 0.01)"
    task = small_task(tmp_path, layout={"num_workers": 3}, events=MANY,
                      model={"on_step": on_step}, training={"epochs": 2})  # fmt: skip
    result = run(task, tmp_path / "task")
    assert isinstance(result, TrainResult), result
    expected = training_events(task)
    for epoch in (1, 2):
        assert trained_events(tmp_path / "model", epoch) == expected
        rows = [row for row in notes(tmp_path / "model") if row["epoch"] == epoch]
        steps = {rank: sum(row["rank"] == rank for row in rows) for rank in (1, 2, 3)}
        assert sum(steps.values()) == pytest.approx(120, abs=6)
        assert steps[2] < 40 / 2
    assert result.seconds < 2 * 40 * 0.1 / 2
