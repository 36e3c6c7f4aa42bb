"""Weights and checkpoints: whole or not there, whenever the job is killed.

The last checkpoint of a task can be kept as its state, from which another task goes on.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from apps.contract import (
    CENTRAL,
    N3LOError,
    Plain,
    Start,
    TaskPaths,
    Training,
    TrainTask,
    optimizer_of,
    plain,
)
from apps.experiment import LENGTHS, make_optimizer
from apps.strategies.base import Strategy

# What of a scheduler's state_dict moves with the epochs; all else follows from its arguments.
MOVING = {
    *("last_epoch", "_step_count"),
    *("T_cur", "T_i"),  # CosineAnnealingWarmRestarts
    *("best", "num_bad_epochs", "cooldown_counter"),  # ReduceLROnPlateau
}


class ParentGone(N3LOError):
    """The state that a task was to go on from is not there, or does not fit."""


class Unusable(Exception):
    """A file does not hold the checkpoint that was looked for; the text says why."""


def save(path: Path, content: dict[str, Any]) -> None:
    """Write beside, then rename. Rank 0 is the only writer."""
    beside = path.with_name(f".{path.name}.new")
    with open(beside, "wb") as file:  # given a name, torch would put it into the file's bytes
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def load(path: Path, key: str) -> dict[str, Any] | None:
    """The checkpoint of the task with this key; None if there is none that can be used."""
    if not path.exists():
        return None
    try:
        return _read(path, key)
    except Unusable as error:
        print(f"{path}: starts anew, the checkpoint {error}", file=sys.stderr)
        return None


def load_own(task: TrainTask, paths: TaskPaths) -> dict[str, Any] | None:
    """Where an earlier attempt at this task was killed; None if it starts anew.

    An attempt that was killed while it wrote its result has kept its state already.
    """
    key = task.key()
    found = load(paths.checkpoint, key)
    if found is None and task.keep_state and paths.weights.exists():
        return load(paths.state, key)
    return found


def load_start(training: Training, start: Start) -> dict[str, Any]:
    """The state of the task to go on from.

    Raises:
        ParentGone: it is missing, torn, or of another task.
        N3LOError: no epoch is left to train.
    """
    path = TaskPaths(Path(start.folder)).state
    parent = path.parent.name
    try:
        content = _read(path, start.key)
    except Unusable as error:
        raise ParentGone(f"the state of {parent} is gone ({path}): rerun that trial") from error
    trained = content["rows"][-1]["epoch"]
    if trained >= training.epochs:
        raise N3LOError(
            f"training.epochs = {training.epochs} is not more than the {trained} epochs that "
            f"{parent} has trained"
        )
    return content


def _read(path: Path, key: str) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a torn file raises nearly anything
        raise Unusable(f"cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("key") != key:
        raise Unusable("is of another task")
    return content


# -- going on --------------------------------------------------------------------------------------


def settings_of(task: TrainTask) -> dict[str, Any]:
    """What optimizers and schedulers are made from, to be kept beside their states.

    `form` is how an optimizer sees the weights: as the model has them, or in pieces for masters.
    `own` is what ranks may have of their own.
    """
    training = task.training
    central = training.strategy in CENTRAL
    layout = [task.ranks.total, task.layout.num_masters, task.layout.sub_masters]
    pieces = [training.strategy, training.exchange.transport, *layout] if central else None
    ranks = [task.ranks.workers, task.ranks.per_worker]
    reduction = [training.backend, *dataclasses.astuple(training.reduction), *ranks]
    return {
        "optimizers": [task.scaled_training.optimizer, task.scaled_training.optimizers],
        "schedule": [training.phases, training.schedule_per],
        "precision": training.precision,
        "form": pieces,
        "own": reduction if training.strategy == "allreduce" else pieces,
    }


def own_fits(task: TrainTask, saved: Mapping[str, Any]) -> bool:
    """Whether what ranks of another task had of their own can be that of this task's ranks."""
    return bool(settings_of(task)["own"] == saved["settings"]["own"])


def copied(networks: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, Any]]:
    """The same on the CPU; a file holds all of the memory of which a tensor is a part."""
    return {
        network: {name: value.cpu().clone() for name, value in state.items()}
        for network, state in networks.items()
    }


def on_host(content: Any) -> Any:
    """The same with all tensors on the CPU, as a file and other ranks shall have them."""
    if isinstance(content, torch.Tensor):
        return content.cpu()
    if isinstance(content, dict):
        return {name: on_host(value) for name, value in content.items()}
    return [on_host(value) for value in content] if isinstance(content, list) else content


def go_on(task: TrainTask, saved: Mapping[str, Any], strategy: Strategy) -> None:
    """Bring everything to the state that another task ended in, as far as the settings are alike.

    With the same optimizer and scheduler that is all of it, to the bit. Otherwise this task's
    settings hold, and of the old state stay the weights; the moments, if the optimizer is of the
    same kind; and the place in the schedule, if the scheduler is: a learning rate that had fallen
    to a third of its first value is a third of the new first value. A schedule of another length,
    as one that ends with the epochs of its task, is followed where it would be by now.

    Args:
        saved: from `load_start`.
        strategy: of this task, new.

    Raises:
        ParentGone: the networks have other shapes.
    """
    settings, states = settings_of(task), saved["states"]
    schedule, old_schedule = settings["schedule"], saved["settings"]["schedule"]
    same_schedulers = [plain(each["name"]) for each in schedule[0]] == [
        plain(each["name"]) for each in old_schedule[0]
    ] and schedule[1] == old_schedule[1]
    other_length = same_schedulers and any(
        _length(scheduler.state_dict()) != _length(states["schedulers"][name])
        for name, scheduler in strategy.schedulers.items()
    )
    try:
        strategy.restore({"networks": states["networks"]})
    except (RuntimeError, KeyError) as error:
        reason = (str(error).splitlines()[1:] or [str(error)])[0].strip()
        raise ParentGone(
            f"the networks do not fit the state of {Path(task.start.folder).name}: {reason}"
        ) from error
    if saved["settings"] == settings and not other_length:
        strategy.restore(states)
        return
    same_form = settings["form"] == saved["settings"]["form"]
    for name, optimizer in strategy.optimizers.items():
        old = states["optimizers"][name]
        own, before = (
            optimizer_of(*each["optimizers"], name) for each in (settings, saved["settings"])
        )
        alike = same_form and plain(own["name"]) == plain(before["name"])
        if alike and _needs(optimizer, own) <= next(iter(old["state"].values()), {}).keys():
            groups = optimizer.state_dict()["param_groups"]  # this task's own settings
            moments = {"state": old["state"], "param_groups": groups}
            strategy.restore({"optimizers": {name: moments}})
        if other_length:
            unit = strategy.experiment.unit_of(name, strategy.preview.num_steps)
            _replay(strategy.schedulers[name], saved["rows"][-1]["epoch"] * unit)
        elif same_schedulers and schedule[0]:
            scale = _first_lr(optimizer.state_dict(), own) / _first_lr(old, before)
            lr = old["param_groups"][0]["lr"] * scale
            optimizer.param_groups[0]["lr"] = lr
            scheduler = strategy.schedulers[name]
            state = _moved(scheduler.state_dict(), states["schedulers"][name])
            scheduler.load_state_dict({**state, "_last_lr": [lr]})


def _length(state: Mapping[str, Any]) -> list[Any]:
    """Of a schedule, or of several that follow each other, from its state."""
    own = [state.get(name) for name in (*LENGTHS, "_milestones")]
    return [*own, *(_length(each) for each in state.get("_schedulers", []))]


def _replay(scheduler: LRScheduler, num_steps: int) -> None:
    with warnings.catch_warnings():  # torch misses the optimizer's steps, which were another's
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(num_steps):
            scheduler.step()


def _moved(state: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state, at the place in the schedule where another was."""
    moved = {key: value for key, value in old.items() if key in MOVING}
    if "_schedulers" in state:  # one after the other
        pairs = zip(state["_schedulers"], old["_schedulers"], strict=True)
        moved["_schedulers"] = [_moved(*pair) for pair in pairs]
    return {**state, **moved}


def _first_lr(state: Mapping[str, Any], settings: dict[str, Plain]) -> float:
    """The learning rate before any schedule, of the one group that our optimizers have."""
    alike = make_optimizer(settings, [nn.Parameter(torch.zeros(1, 1))])
    return state["param_groups"][0].get("initial_lr", alike.param_groups[0]["lr"])


def _needs(optimizer: Optimizer, settings: dict[str, Plain]) -> set[str]:
    """What an optimizer keeps of a parameter, seen from a step on one of its own.

    One with amsgrad, for example, cannot go on from the moments of one without.
    """
    parameter = nn.Parameter(
        torch.zeros(1, 1, device=optimizer.param_groups[0]["params"][0].device)
    )
    parameter.grad = torch.zeros_like(parameter)
    alike = make_optimizer(settings, [parameter])
    alike.step()
    return set(alike.state[parameter])
