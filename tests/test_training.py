"""A training can be killed and go on to the same weights; one that fails says why."""

from __future__ import annotations

import io
import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from training_helpers import (
    classes_h5,
    launch,
    launch_environment,
    launch_line,
    make_task,
    train_all,
    without_clock,
    write_h5,
    write_task,
)

from apps import checkpoint
from apps.check import check
from apps.contract import (
    EarlyStopping,
    Failure,
    N3LOError,
    Start,
    Target,
    TaskPaths,
    Training,
    TrainResult,
    TrainTask,
    read_json,
    read_json_lines,
)
from apps.data import Preview
from apps.experiment import Supervised, step_scheduler
from apps.history import Diverged, check_finite, selected_row, stop_reason
from apps.strategies.allreduce import AllReduce
from apps.strategies.local import Local

# A model with all that a resumed training could get wrong; it can kill itself in a given step.
MODEL = """\
import os
import signal

import torch

KILL_AT = int(os.environ.get("KILL_AT", 0))


class Tagger(torch.nn.Module):
    def __init__(self, width=8, fault=""):
        super().__init__()
        self.steps = 0
        self.fault = fault
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, width),
            torch.nn.BatchNorm1d(width),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(width, 3),
        )

    def forward(self, x):
        self.steps += self.training
        if self.steps == KILL_AT > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault:
            exec(self.fault)
        return self.layers(x)
"""
FORWARD_FAULT = MODEL.splitlines().index("            exec(self.fault)") + 1
STEPS = 12  # an epoch of 80 or 81 events in batches of at most 7


def tagger_task(folder: Path, fault: str = "", ranks: int = 1, **training: object) -> TrainTask:
    (folder / "my_model.py").write_text(MODEL)
    model = {"source": f"{folder / 'my_model.py'}:Tagger", "args": {"fault": fault}}
    return make_task(
        [classes_h5(folder / "events.h5")],
        model=model,
        training={"strategy": "allreduce" if ranks > 1 else "local", **training},
        layout={"num_workers": ranks},
    )


def train(path: Path, ranks: int = 1, **environment: str) -> subprocess.CompletedProcess[str]:
    return launch(ranks, "-m", "apps.train", path, **environment)


def failure(path: Path, ranks: int = 1) -> Failure:
    done = train(path, ranks)
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert not TaskPaths(path.parent).result.exists()
    return Failure.read(TaskPaths(path.parent).failure)


# -- what a training leaves ------------------------------------------------------------------------


@pytest.mark.mpi
def test_a_finished_training_leaves_history_weights_and_result(tmp_path):
    task = tagger_task(tmp_path, metrics=["accuracy"])
    paths = TaskPaths(tmp_path / "task")
    done = train(write_task(paths.folder, task))
    assert done.returncode == 0, done.stderr
    rows = read_json_lines(paths.history)
    result = TrainResult.read(paths.result)
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert set(rows[0]) == {
        "epoch", "loss", "val_loss", "accuracy", "val_accuracy", "lr", "seconds",
        "compute_s", "communication_s", "data_s", "idle_s",
    }  # fmt: skip
    assert result.fom == min(row["val_loss"] for row in rows)
    assert rows[result.epoch - 1]["val_loss"] == result.fom
    assert (result.num_train, result.num_val) in ((80, 41), (81, 40))
    assert result.num_parameters == (3 * 8 + 8) + 2 * 8 + (8 * 3 + 3)
    assert result.seconds == rows[-1]["seconds"]
    assert (result.key, result.stopped, result.devices) == (task.key(), "epochs", ["cpu"])
    assert (result.start_epoch, result.epochs) == (0, 3)
    assert 0 < result.inference_us * 3 * result.num_val < 1e6 * result.seconds
    assert sorted(each.name for each in paths.folder.iterdir()) == [
        "begun", "history.jsonl", "result.json", "task.json", "weights.pt",
    ]  # fmt: skip


@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "kill_at"), [(1, [STEPS + 3, 2 * STEPS + 1]), (2, [STEPS + 3])])
def test_a_killed_training_ends_with_the_same_bits(tmp_path, ranks, kill_at):
    """One rank is killed in the middle of epoch 2 and at the start of epoch 4; two in epoch 3."""
    settings = {
        "epochs": 5,
        "optimizer": {"name": "adam", "lr": 0.02},
        "scheduler": {"name": "reduce_lr_on_plateau", "patience": 0},
        "early_stopping": {"patience": 4},
    }
    task = tagger_task(tmp_path, ranks=ranks, **settings)
    whole, killed = (write_task(tmp_path / name, task) for name in ("whole", "killed"))
    assert train(whole, ranks).returncode == 0
    for step in kill_at:
        assert train(killed, ranks, KILL_AT=str(step)).returncode != 0
        assert TaskPaths(killed.parent).checkpoint.exists()
    # Too late a step for what is left, but not for a training that starts anew.
    assert train(killed, ranks, KILL_AT=str(4 * STEPS // ranks)).returncode == 0
    one, other = TaskPaths(whole.parent), TaskPaths(killed.parent)
    assert one.weights.read_bytes() == other.weights.read_bytes()
    rows = [read_json_lines(each.history) for each in (one, other)]
    assert without_clock(rows[0]) == without_clock(rows[1])
    assert TrainResult.read(one.result).fom == TrainResult.read(other.result).fom
    assert not other.checkpoint.exists()


@pytest.mark.mpi
def test_schedulers_and_last_epoch_are_kept_as_the_study_asks(tmp_path):
    """The learning rate of each epoch is the one it was trained with."""
    optimizer = {"name": "SGD", "lr": 0.1}
    scheduler = {"name": "ExponentialLR", "gamma": 0.5}
    task = tagger_task(tmp_path, optimizer=optimizer, scheduler=scheduler, select="last")
    path = write_task(tmp_path / "task", task)
    train_all(1, path)
    rows = read_json_lines(TaskPaths(path.parent).history)
    assert [row["lr"] for row in rows] == pytest.approx([0.1, 0.05, 0.025])
    assert TrainResult.read(TaskPaths(path.parent).result).epoch == 3


# -- going on from another task --------------------------------------------------------------------


def promoted(folder: Path, parent: TrainTask, **training: object) -> TrainTask:
    """The task that goes on from `parent` in this folder, with other settings."""
    start = Start(key=parent.key(), folder=str(folder))
    return replace(parent, training=replace(parent.training, **training), start=start)


ADAM = {
    "optimizer": {"name": "adam", "lr": 0.02, "weight_decay": 0.01},
    "scheduler": {"name": "exponential_lr", "gamma": 0.7},
}
SGD = {
    "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
    "scheduler": {"name": "cosine_annealing_lr", "T_max": 5},
}


@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "settings"), [(1, ADAM), (1, SGD), (2, ADAM)])
def test_a_training_in_two_tasks_ends_with_the_bits_of_one(tmp_path, ranks, settings):
    """Two epochs, then one more, then two more; with Horovod where there are two ranks."""
    whole = tagger_task(tmp_path, ranks=ranks, epochs=5, select="last", **settings)
    two = replace(whole, training=replace(whole.training, epochs=2), keep_state=True)
    three = replace(promoted(tmp_path / "two", two, epochs=3), trial=1)
    five = replace(promoted(tmp_path / "three", three, epochs=5), keep_state=False)
    tasks = {"whole": whole, "two": two, "three": three, "five": five}
    train_all(ranks, *(write_task(tmp_path / name, task) for name, task in tasks.items()))
    at = {name: TaskPaths(tmp_path / name) for name in tasks}
    assert at["whole"].weights.read_bytes() == at["five"].weights.read_bytes()
    rows = {name: read_json_lines(each.history) for name, each in at.items()}
    assert [len(each) for each in rows.values()] == [5, 2, 1, 2]
    assert without_clock(rows["whole"]) == [
        row for name in ("two", "three", "five") for row in without_clock(rows[name])
    ]
    results = [TrainResult.read(each.result) for each in at.values()]
    assert [(each.start_epoch, each.epochs) for each in results] == [(0, 5), (0, 2), (2, 3), (3, 5)]
    assert [each.seconds for each in results] == [each[-1]["seconds"] for each in rows.values()]
    assert [name for name, each in at.items() if each.state.exists()] == ["two", "three"]
    assert not [name for name, each in at.items() if each.checkpoint.exists()]


@pytest.mark.mpi
def test_a_killed_training_needs_the_state_that_it_began_with_no_more(tmp_path):
    parent = replace(tagger_task(tmp_path, epochs=2, **ADAM), keep_state=True)
    child = promoted(tmp_path / "parent", parent, epochs=5)
    paths = [
        write_task(tmp_path / name, task)
        for name, task in (("parent", parent), ("whole", child), ("killed", child))
    ]
    train_all(1, *paths[:2])
    assert train(paths[2], KILL_AT=str(STEPS + 3)).returncode != 0
    TaskPaths(tmp_path / "parent").state.unlink()
    assert train(paths[2]).returncode == 0
    whole, killed = TaskPaths(tmp_path / "whole"), TaskPaths(tmp_path / "killed")
    assert whole.weights.read_bytes() == killed.weights.read_bytes()
    assert TrainResult.read(killed.result).start_epoch == 2
    assert [row["epoch"] for row in read_json_lines(killed.history)] == [3, 4, 5]


@pytest.mark.mpi
def test_a_kill_between_state_and_result_costs_no_epoch(tmp_path):
    task = replace(tagger_task(tmp_path), keep_state=True)
    path = write_task(tmp_path / "task", task)
    paths = TaskPaths(path.parent)
    train_all(1, path)
    before, state = TrainResult.read(paths.result), paths.state.read_bytes()
    paths.result.unlink()
    assert train(path, KILL_AT="1").returncode == 0
    assert TrainResult.read(paths.result) == before
    assert paths.state.read_bytes() == state


@pytest.mark.mpi
def test_there_is_no_result_without_the_state_that_it_promises(tmp_path):
    path = write_task(tmp_path / "task", replace(tagger_task(tmp_path), keep_state=True))
    TaskPaths(path.parent).state.mkdir()  # where a file cannot be put
    assert failure(path).message.startswith("IsADirectoryError")


@pytest.mark.mpi
def test_another_learning_rate_goes_on_from_the_same_weights(tmp_path):
    """With a vanishing rate the child ends where its parent did."""
    parent = replace(tagger_task(tmp_path, epochs=2, select="last"), keep_state=True)
    optimizer = {"name": "sgd", "lr": 1e-30}
    child = promoted(tmp_path / "parent", parent, epochs=3, optimizer=optimizer)
    train_all(1, write_task(tmp_path / "parent", parent), write_task(tmp_path / "child", child))
    (row,) = read_json_lines(TaskPaths(tmp_path / "child").history)
    assert (row["epoch"], row["lr"]) == (3, 1e-30)
    old, new = (torch.load(TaskPaths(tmp_path / name).weights) for name in ("parent", "child"))
    assert torch.equal(old["layers.0.weight"], new["layers.0.weight"])


@pytest.mark.mpi
def test_a_state_that_is_gone_is_a_reason_of_its_own(tmp_path):
    parent = replace(tagger_task(tmp_path), keep_state=True)
    child = promoted(tmp_path / "t001-f0", parent, epochs=5)
    state = TaskPaths(tmp_path / "t001-f0").state
    assert failure(write_task(tmp_path / "t002-f0", child)) == Failure(
        reason="parent",
        message=f"the state of t001-f0 is gone ({state}): rerun that trial",
        rank=0,
    )


def test_a_torn_state_or_one_of_another_task_counts_as_gone(tmp_path):
    path = TaskPaths(tmp_path).state
    start = Start(key="mine", folder=str(tmp_path))
    checkpoint.save(path, {"key": "mine", "rows": [{"epoch": 2}]})
    assert checkpoint.load_start(Training(epochs=3), start)["rows"] == [{"epoch": 2}]
    with pytest.raises(checkpoint.ParentGone, match="is gone"):
        checkpoint.load_start(Training(epochs=3), replace(start, key="other"))
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(checkpoint.ParentGone, match="is gone"):
        checkpoint.load_start(Training(epochs=3), start)


def test_a_task_must_train_longer_than_the_one_that_it_goes_on_from(tmp_path):
    folder = tmp_path / "t001-f0"
    folder.mkdir()
    checkpoint.save(TaskPaths(folder).state, {"key": "k", "rows": [{"epoch": 3}]})
    message = "training.epochs = 3 is not more than the 3 epochs that t001-f0 has trained"
    with pytest.raises(N3LOError, match=message) as error:
        checkpoint.load_start(Training(epochs=3), Start(key="k", folder=str(folder)))
    assert type(error.value) is N3LOError


class Going:
    """A small network that is trained epoch after epoch, with its optimizer and scheduler."""

    def __init__(
        self, optimizer: dict, scheduler: dict | None = None, width: int = 4, **training
    ) -> None:
        self.training = Training(loss="mse", optimizer=optimizer, scheduler=scheduler, **training)
        self.trained = 0
        torch.manual_seed(width)
        layers = [torch.nn.Linear(3, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)]
        experiment = Supervised(torch.nn.Sequential(*layers), self.training)
        cpu = torch.device("cpu")
        alone = SimpleNamespace(num_ranks=1, device=cpu, devices=[cpu])
        self.strategy = Local(experiment, alone, self.training, Preview(None, 1, 1))
        self.parts = self.strategy.parts

    @property
    def lr(self) -> float:
        return self.parts["optimizers"]["model"].param_groups[0]["lr"]

    def train(self, epochs: int) -> list[float]:
        """The learning rate of each epoch."""
        network, optimizer = (self.parts[kind]["model"] for kind in ("networks", "optimizers"))
        x = torch.linspace(-1, 1, 15).reshape(5, 3)
        used = []
        for _ in range(epochs):
            used.append(self.lr)
            optimizer.zero_grad()
            network(x).square().mean().backward()
            optimizer.step()
            for scheduler in self.parts["schedulers"].values():
                step_scheduler(scheduler, 1.0)  # never better: a plateau
            self.trained += 1
        return used

    def go_on(self, other: Going, folder: Path) -> None:
        """From the state of another, through a file."""
        content = {
            "key": "k",
            "rows": [{"epoch": other.trained}],
            "settings": checkpoint.settings_of(other.task()),
            "states": other.strategy.states(),
        }
        checkpoint.save(TaskPaths(folder).state, content)
        start = Start(key="k", folder=str(folder))
        saved = checkpoint.load_start(self.training, start)
        checkpoint.go_on(self.task(start), saved, self.strategy)

    def task(self, start: Start | None = None) -> TrainTask:
        return replace(make_task([Path("a.h5")]), training=self.training, start=start)

    def same_as(self, other: Going, kind: str) -> bool:
        """Whether two are in the same state, to the bit; networks, optimizers or schedulers."""
        pair = [each.parts[kind]["model"].state_dict() for each in (self, other)]
        return pickled(pair[0]) == pickled(pair[1])


def pickled(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


MOMENTUM = {"name": "sgd", "lr": 0.1, "momentum": 0.9}


@pytest.mark.parametrize(("optimizer", "scheduler"), [
    (MOMENTUM, None),
    ({"name": "adam", "lr": 0.01}, {"name": "exponential_lr", "gamma": 0.7}),
    ({"name": "rmsprop", "lr": 0.01}, {"name": "cosine_annealing_lr", "T_max": 7}),
    (MOMENTUM, {"name": "one_cycle_lr", "max_lr": 0.5, "total_steps": 9}),  # momentum moves too
    (MOMENTUM, {"name": "reduce_lr_on_plateau", "patience": 0}),
])  # fmt: skip
def test_with_the_same_settings_all_goes_on_to_the_bit(tmp_path, optimizer, scheduler):
    old, new = Going(optimizer, scheduler), Going(optimizer, scheduler)
    old.train(3)
    new.go_on(old, tmp_path)
    assert old.train(4) == new.train(4)
    for kind in ("networks", "optimizers", *(["schedulers"] if scheduler else [])):
        assert new.same_as(old, kind), kind


def test_hyper_parameters_are_the_tasks_own_and_the_momentum_stays(tmp_path):
    old, new = Going(MOMENTUM), Going({**MOMENTUM, "lr": 0.3, "weight_decay": 0.2})
    old.train(3)
    new.go_on(old, tmp_path)
    group = new.parts["optimizers"]["model"].param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.3, 0.9, 0.2)
    states = [each.parts["optimizers"]["model"].state_dict()["state"] for each in (old, new)]
    assert pickled(states[0]) == pickled(states[1])
    assert new.same_as(old, "networks")


@pytest.mark.parametrize(("settings", "curve"), [
    ({"name": "exponential_lr", "gamma": 0.7}, lambda epoch: 0.7**epoch),
    ({"name": "cosine_annealing_lr", "T_max": 8},
     lambda epoch: (1 + math.cos(math.pi * epoch / 8)) / 2),
    ({"name": "step_lr", "step_size": 2, "gamma": 0.1}, lambda epoch: 0.1 ** (epoch // 2)),
    ({"name": "reduce_lr_on_plateau", "patience": 0, "factor": 0.5},
     lambda epoch: 0.5 ** max(0, epoch - 1)),  # the first loss is the best, all others are not
])  # fmt: skip
def test_another_learning_rate_goes_on_along_its_own_schedule(tmp_path, settings, curve):
    """As if it had been there from the first epoch."""
    old, new = Going(MOMENTUM, settings), Going({**MOMENTUM, "lr": 0.4}, settings)
    old.train(3)
    new.go_on(old, tmp_path)
    assert new.parts["schedulers"]["model"].get_last_lr() == [new.lr]
    assert new.train(4) == pytest.approx([0.4 * curve(epoch) for epoch in (3, 4, 5, 6)])


@pytest.mark.parametrize("settings", [
    {"name": "cosine_annealing_lr"},
    {"name": "one_cycle_lr", "max_lr": 0.5},  # momentum moves too
    [{"name": "linear_lr", "epochs": 2}, {"name": "polynomial_lr"}],
])  # fmt: skip
@pytest.mark.parametrize("per", ["epoch", "update"])
def test_a_schedule_that_ends_with_its_task_ends_with_the_longer_one(tmp_path, settings, per):
    """As if the longer training had been one: of a state that was promoted by halving."""
    old, new, whole = (
        Going(MOMENTUM, settings, epochs=epochs, schedule_per=per) for epochs in (3, 9, 9)
    )
    old.train(3)
    new.go_on(old, tmp_path)
    assert new.train(6) == pytest.approx(whole.train(9)[3:])
    groups = [each.parts["optimizers"]["model"].param_groups[0] for each in (new, whole)]
    assert groups[0]["momentum"] == pytest.approx(groups[1]["momentum"])


def test_another_schedule_of_the_same_kind_goes_on_from_where_the_rate_is(tmp_path):
    old = Going(MOMENTUM, {"name": "exponential_lr", "gamma": 0.5})
    new = Going(MOMENTUM, {"name": "exponential_lr", "gamma": 0.9})
    old.train(2)
    new.go_on(old, tmp_path)
    assert new.train(2) == pytest.approx([0.1 * 0.5**2, 0.1 * 0.5**2 * 0.9])


@pytest.mark.parametrize(("before", "after"), [
    (None, {"name": "exponential_lr", "gamma": 0.5}),
    ({"name": "step_lr", "step_size": 1}, {"name": "exponential_lr", "gamma": 0.5}),
])  # fmt: skip
def test_a_schedule_of_another_kind_begins_anew(tmp_path, before, after):
    old, new = Going(MOMENTUM, before), Going(MOMENTUM, after)
    old.train(3)
    new.go_on(old, tmp_path)
    assert new.train(3) == pytest.approx([0.1, 0.05, 0.025])


def test_without_a_schedule_the_rate_is_the_tasks_own(tmp_path):
    old, new = Going(MOMENTUM, {"name": "exponential_lr", "gamma": 0.5}), Going(MOMENTUM)
    old.train(3)
    new.go_on(old, tmp_path)
    assert new.train(2) == [0.1, 0.1]
    assert new.parts["optimizers"]["model"].state_dict()["state"] != {}


@pytest.mark.parametrize(("before", "after"), [
    (MOMENTUM, {"name": "adam", "lr": 0.02}),
    ({"name": "adam", "lr": 0.02}, {"name": "nadam", "lr": 0.02}),
    ({"name": "adam", "lr": 0.02}, {"name": "adam", "lr": 0.02, "amsgrad": True}),
    ({"name": "sgd", "lr": 0.02}, {"name": "sgd", "lr": 0.02, "momentum": 0.9}),
])  # fmt: skip
def test_an_optimizer_that_cannot_use_the_old_moments_begins_anew(tmp_path, before, after):
    old, new, fresh = Going(before), Going(after), Going(after)
    old.train(3)
    new.go_on(old, tmp_path)
    assert new.same_as(old, "networks")
    assert new.same_as(fresh, "optimizers")
    new.train(2)


@pytest.mark.parametrize(("layout", "reduction", "fits"), [
    ({"num_workers": 2, "ranks_per_worker": 2}, {"average_every": 4}, True),
    ({"num_workers": 4}, {"average_every": 4}, False),
    ({"num_workers": 2, "ranks_per_worker": 2}, {}, False),
])  # fmt: skip
def test_what_ranks_had_of_their_own_stays_with_ranks_that_share_alike(layout, reduction, fits):
    """Moments of one local SGD are no other ranks' moments: their weights would part."""

    def task(layout: dict, reduction: dict) -> TrainTask:
        training = {"strategy": "allreduce", "reduction": reduction}
        return make_task([Path("a.h5")], training=training, layout=layout)

    old = task({"num_workers": 2, "ranks_per_worker": 2}, {"average_every": 4})
    saved = {"settings": checkpoint.settings_of(old)}
    assert checkpoint.own_fits(task(layout, reduction), saved) is fits


def test_allreduce_goes_on_from_a_strategy_that_scales_no_loss():
    """The state of a training with masters has no loss scales, and its moments do not fit."""
    states = {"networks": {}, "optimizers": {"model": {"state": {}}}, "schedulers": {}}
    kept = {kind: dict(members) for kind, members in states.items()}
    AllReduce.choose_own(SimpleNamespace(), states, {})
    assert states == kept


def test_networks_of_another_shape_do_not_fit_the_state(tmp_path):
    old, new = Going(MOMENTUM), Going(MOMENTUM, width=5)
    old.train(1)
    with pytest.raises(checkpoint.ParentGone) as error:
        new.go_on(old, tmp_path)
    assert str(error.value).startswith(
        f"the networks do not fit the state of {tmp_path.name}: size mismatch for 0.weight: "
    )
    assert "\n" not in str(error.value)


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.mpi
def test_a_training_that_diverges_says_in_which_epoch(tmp_path):
    task = tagger_task(tmp_path)
    (tmp_path / "my_model.py").write_text(
        MODEL.replace("exec(self.fault)", "pass").replace(
            "self.layers(x)", "self.layers(x) * (torch.nan if self.steps > 20 else 1)"
        )
    )
    found = failure(write_task(tmp_path / "task", task))
    assert found == Failure(
        reason="diverged", message="training loss became nan in epoch 2", rank=0
    )


@pytest.mark.mpi
def test_an_exception_names_the_line_of_the_users_model(tmp_path):
    task = tagger_task(tmp_path, fault="torch.zeros(2) @ torch.zeros(3)")
    found = failure(write_task(tmp_path / "task", task))
    assert found.reason == "exception"
    assert found.message.startswith("RuntimeError: ")
    assert found.message.endswith(f"(my_model.py line {FORWARD_FAULT})")


@pytest.mark.mpi
def test_too_little_memory_is_told_apart(tmp_path):
    task = tagger_task(tmp_path, fault="torch.empty(1 << 50)")
    assert failure(write_task(tmp_path / "task", task)).reason == "oom"


@pytest.mark.mpi
def test_a_failing_rank_ends_the_others(tmp_path):
    fault = "import os; 1 / (int(os.environ.get('OMPI_COMM_WORLD_RANK', 0)) != 1)"
    task = tagger_task(tmp_path, fault=fault, ranks=2)
    found = failure(write_task(tmp_path / "task", task), ranks=2)
    assert found.rank == 1
    assert (
        found.message == f"ZeroDivisionError: division by zero (my_model.py line {FORWARD_FAULT})"
    )


@pytest.mark.mpi
def test_ranks_that_do_not_fit_the_layout_give_the_equation(tmp_path):
    task = tagger_task(tmp_path, ranks=3)
    found = failure(write_task(tmp_path / "task", task))
    assert "3 workers x 1 rank = 3 ranks, but 1 were started" in found.message


@pytest.mark.mpi
@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
def test_no_rank_outlives_a_killed_mpirun(tmp_path):
    fault = f"open('{tmp_path}/' + str(os.getpid()), 'w').close(); import time; time.sleep(60)"
    path = write_task(
        tmp_path / "task", tagger_task(tmp_path, fault=f"import os; {fault}", ranks=2)
    )
    line = launch_line(2, "-m", "apps.train", path)
    with subprocess.Popen(line, env=launch_environment(), stderr=subprocess.DEVNULL) as mpirun:
        pids = wait_for(lambda: [int(each.name) for each in tmp_path.glob("[0-9]*")], 2)
        mpirun.send_signal(signal.SIGKILL)
    wait_for(lambda: [pid for pid in pids if not alive(pid)], 2)


def wait_for(make, number: int) -> list[int]:
    for _ in range(300):
        if len(found := make()) == number:
            return found
        time.sleep(0.1)
    raise AssertionError(f"still {found} after 30 s")


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


# -- decisions -------------------------------------------------------------------------------------


def rows_of(metric: str, values: list[float]) -> list[dict]:
    return [
        {"epoch": epoch, metric: value, "seconds": 30.0 * epoch}
        for epoch, value in enumerate(values, start=1)
    ]


def stopped_after(metric: str, values: list[float], **settings: object) -> tuple[int, str] | None:
    """The epoch after which a training with these values stops, and why."""
    training = Training(epochs=len(values), **settings)
    rows = rows_of(metric, values)
    for epoch in range(1, len(rows) + 1):
        if (reason := stop_reason(training, rows[:epoch])) is not None:
            return epoch, reason
    return None


def test_early_stopping_waits_for_its_patience():
    values = [5.0, 4.0, 4.5, 4.1, 4.2, 1.0, 1.0]
    stopping = EarlyStopping(patience=3)
    assert stopped_after("val_loss", values, early_stopping=stopping) == (5, "early_stopping")
    stopping = EarlyStopping(patience=4)
    assert stopped_after("val_loss", values, early_stopping=stopping) == (7, "epochs")


def test_a_task_that_goes_on_is_judged_by_its_own_epochs():
    """Three were trained before; of its own, the patience of two is over after the third."""
    stopping = EarlyStopping(patience=2)
    training = Training(epochs=9, early_stopping=stopping)
    rows = [{"epoch": 3 + n, "val_loss": 0.5 + n / 10, "seconds": 1.0} for n in (1, 2, 3)]
    assert stop_reason(training, []) is None
    assert stop_reason(training, rows[:2]) is None
    assert stop_reason(training, rows) == "early_stopping"
    assert stop_reason(Training(epochs=6), rows) == "epochs"
    assert stop_reason(Training(epochs=7), rows) is None
    assert selected_row(make_task([Path("a.h5")]), rows)["epoch"] == 4


def test_an_improvement_within_min_delta_is_none():
    values = [5.0, 4.95, 4.9, 4.85, 4.8]
    stopping = EarlyStopping(patience=3, min_delta=0.5)
    assert stopped_after("val_loss", values, early_stopping=stopping) == (4, "early_stopping")


def test_a_target_ends_the_training_in_the_direction_of_its_metric():
    target = Target(metric="val_accuracy", value=0.8)
    assert stopped_after("val_accuracy", [0.5, 0.8, 0.9], target=target) == (2, "target")
    target = Target(metric="val_loss", value=0.8)
    assert stopped_after("val_loss", [1.0, 0.9, 0.7, 0.6], target=target) == (3, "target")


def test_a_training_ends_with_the_epoch_that_passes_its_time():
    assert stopped_after("val_loss", [1.0] * 9, max_minutes=1.2) == (3, "max_minutes")


@pytest.mark.parametrize(("goal", "select", "epoch"), [
    ("min", "best", 2), ("max", "best", 3), ("min", "last", 4),
])  # fmt: skip
def test_the_kept_epoch_is_the_first_best_or_the_last(goal, select, epoch):
    task = make_task(
        [Path("a.h5")], training={"select": select}, objective={"metric": "m", "goal": goal}
    )
    assert selected_row(task, rows_of("m", [2.0, 1.0, 3.0, 1.0]))["epoch"] == epoch


def test_a_value_that_is_not_finite_is_a_divergence():
    check_finite({"epoch": 3, "loss": 1.0, "val_loss": 2.0})
    with pytest.raises(Diverged, match="validation loss became inf in epoch 3"):
        check_finite({"epoch": 3, "loss": 1.0, "val_loss": float("inf")})


# -- checkpoints -----------------------------------------------------------------------------------


def test_a_checkpoint_comes_back_for_its_own_task_only(tmp_path, capsys):
    path = tmp_path / "checkpoint.pt"
    assert checkpoint.load(path, "mine") is None
    checkpoint.save(path, {"key": "mine", "w": torch.ones(2)})
    assert torch.equal(checkpoint.load(path, "mine")["w"], torch.ones(2))
    assert capsys.readouterr().err == ""
    assert checkpoint.load(path, "other") is None
    assert "is of another task" in capsys.readouterr().err


def test_a_torn_checkpoint_is_ignored_with_a_line(tmp_path, capsys):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, {"key": "mine", "w": torch.ones(200)})
    for content in (path.read_bytes()[:300], b"", b"no checkpoint"):
        path.write_bytes(content)
        assert checkpoint.load(path, "mine") is None
        assert "cannot be read" in capsys.readouterr().err


def test_a_failed_save_leaves_the_checkpoint_before_it(tmp_path):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, {"key": "mine", "epoch": 1})
    with pytest.raises(AttributeError):
        checkpoint.save(path, {"key": "mine", "epoch": lambda: 2})
    assert checkpoint.load(path, "mine")["epoch"] == 1


# -- the check before a campaign -------------------------------------------------------------------


def test_the_check_runs_without_mpi_and_leaves_its_report(tmp_path):
    path = write_task(tmp_path / "task", tagger_task(tmp_path))
    program = (
        "import sys; sys.modules['mpi4py'] = None; from apps.check import main;"
        "sys.argv = ['check', *sys.argv[1:]]; main()"
    )
    report = tmp_path / "report.json"
    assert launch(1, "-c", program, path, report).returncode == 0
    assert read_json(report) == {
        "events": 121,
        "inputs": {"x": {"shape": [3], "dtype": "float32"}},
        "targets": {"y": {"shape": [], "dtype": "int64"}},
        "non_finite": {"x": 0, "y": 0},
        "classes": read_json(report)["classes"],
        "train_events": [80, 81, 81],
        "val_events": [41, 40, 40],
        "num_parameters": 75,
        "measured": ["loss", "val_loss"],
        "steps_per_epoch": 12,
        "warnings": [],
    }
    assert sum(read_json(report)["classes"]) == 121
    path.write_text(path.read_text().replace('"x"', '"xx"'))
    assert launch(1, "-c", program, path, report).returncode == 2
    assert "there is no 'xx'" in read_json(report)["error"]


def test_the_check_counts_the_part_of_the_events_that_is_trained_on(tmp_path):
    task = make_task([classes_h5(tmp_path / "events.h5")], data={"train_fraction": 0.5})
    report = check(task)
    assert report["val_events"] == [41, 40, 40]
    assert report["train_events"] == pytest.approx([40, 40, 40], abs=4)
    assert report["steps_per_epoch"] == -(-report["train_events"][0] // 7)


def test_the_check_counts_numbers_that_are_not_finite(tmp_path):
    x = np.ones((30, 3), np.float32)
    x[[3, 4, 29], [0, 1, 2]] = [np.nan, np.inf, -np.inf]
    path = write_h5(tmp_path / "a.h5", x=x, y=np.arange(30) % 3)
    report = check(make_task([path]))
    assert report["non_finite"] == {"x": 3, "y": 0}
    assert report["warnings"] == ["x holds 3 values that are not finite (nan or inf)"]
    assert report["classes"] == [10, 10, 10]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("import torch\n", "import torch\nfoo\n",
         "'my_model.py:Tagger': NameError: name 'foo' is not defined (my_model.py line 5)"),
        ("import torch\n", "import torch\nif\n", "SyntaxError: invalid syntax (my_model.py"),
        ("class Tagger", "class Other", "there is no 'Tagger', only Other"),
        ("width=8, fault", "size=8, flaw", "it takes size, flaw"),
        ("Linear(3, width)", "Linear(4, width)",
         "layer 'layers.0' (Linear) takes 4 features, and input 'x' gives (B, 3): set its in_feat"),
        ("(torch.nn.Module)", "", "gives a Tagger, not a torch.nn.Module"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_model_is_one_line_that_names_it(tmp_path, old, new, message):
    task = tagger_task(tmp_path)
    text = MODEL.replace(old, new)
    if new == "":
        text = text.replace("super().__init__()", "self.training = False")
    (tmp_path / "my_model.py").write_text(text)
    with pytest.raises(N3LOError) as error:
        check(task)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"objective": {"metric": "val_acc"}},
         "objective.metric: there is no 'val_acc', only loss, accuracy, val_loss, val_accuracy"),
        ({"training": {"early_stopping": {"metric": "auc"}}}, "early_stopping.metric: there is"),
        ({"training": {"target": {"metric": "auc", "value": 1}}}, "target.metric: there is"),
        ({"training": {"loss": "hinge"}}, "training.loss: there is no 'hinge', only bce, "),
        ({"training": {"metrics": ["auc"]}}, "training.metrics: there is no 'auc', only "),
        ({"training": {"optimizer": {"name": "adamm"}}}, "optimizer: there is no 'adamm'"),
        ({"training": {"optimizer": {"name": "sgd", "momentun": 0.9}}}, "it takes lr, momentum, "),
        ({"training": {"optimizer": {"name": "sgd", "lr": -1.0}}}, "Invalid learning rate: -1.0"),
        ({"training": {"scheduler": {"name": "step_lr", "gama": 0.9}}}, "it takes step_size"),
        ({"training": {"loss": "mse"}}, "the model gives (B, 3), but the targets are (B,)"),
        ({"training": {"lanes": 3}, "layout": {"num_workers": 2}}, "not a multiple of the 2 ranks"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_study_is_one_line_that_names_it(tmp_path, sections, message):
    task = make_task(
        [classes_h5(tmp_path / "events.h5")],
        **{**sections, "training": {"metrics": ["accuracy"], **sections.get("training", {})}},
    )
    with pytest.raises(N3LOError) as error:
        check(task)
    assert message in str(error.value)


def test_a_model_imports_the_files_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_parts.py").write_text("WIDTH = 5\n")
    task = tagger_task(tmp_path)
    (tmp_path / "my_model.py").write_text(
        "from my_parts import WIDTH\n" + MODEL.replace("width=8", "width=WIDTH")
    )
    assert check(task)["num_parameters"] == (3 * 5 + 5) + 2 * 5 + (5 * 3 + 3)
