"""Tasks and launches for the tests of whole trainings whose ranks share every update."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from central_helpers import Trained
from torch import nn
from torch.nn.functional import cross_entropy
from training_helpers import launch_environment, launch_line, make_task, write_task

from apps.contract import TaskPaths, TrainTask
from apps.data import prepare, validates
from apps.hdf5 import Reader

# Trains several tasks one after the other. What a kill in the middle of the second epoch would
# leave of each is copied to a folder "cut NAME"; those whose name begins with "killed" are killed.
TRAIN_AND_CUT = """
import os
import shutil
import signal
import sys
from pathlib import Path

from mpi4py import MPI
from torch.optim.optimizer import register_optimizer_step_post_hook

from apps.contract import TaskPaths, TrainTask
from apps.train import train

WHEN = 2  # steps after the first checkpoint; Horovod's optimizers report each one twice


def cut(folder):
    steps = 0
    copy = folder.with_name("cut " + folder.name)

    def after_step(*_):
        nonlocal steps
        steps += TaskPaths(folder).checkpoint.exists()
        is_copied = TaskPaths(copy).checkpoint.exists()
        if steps == WHEN and MPI.COMM_WORLD.rank == 0 and not is_copied:
            shutil.copytree(folder, copy, dirs_exist_ok=True)
            if folder.name.startswith("killed"):
                os.kill(os.getpid(), signal.SIGKILL)

    return after_step


for path in map(Path, sys.argv[1:]):
    hook = register_optimizer_step_post_hook(cut(path.parent))
    train(TrainTask.read(path), TaskPaths(path.parent))
    hook.remove()
"""

NO_START = "PMIx server's listener thread"  # now and then, where two mpirun start at once


class Tagger(nn.Module):
    """A model that all strategies can divide; 3 numbers -> 3 classes."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        norms = [nn.BatchNorm1d(32)] if norm else []
        dropouts = [nn.Dropout(dropout)] if dropout else []
        self.first = nn.Sequential(nn.Linear(3, 32), *norms, nn.Tanh())
        self.second = nn.Sequential(*dropouts, nn.Linear(32, 32), nn.Tanh())
        self.third = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.third(self.second(self.first(x))))


class Slow(nn.Module):
    """A layer that takes a millisecond if a file is there, or if it is not."""

    def __init__(self, file: str, if_there: bool, num_in: int, num_out: int) -> None:
        super().__init__()
        self.file, self.if_there = Path(file), if_there
        self.linear = nn.Linear(num_in, num_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():  # what decides by its data stays whole in a pipeline, and is timed so
            raise ValueError("not a number")
        if self.file.exists() == self.if_there:
            time.sleep(1e-3)
        return self.linear(x)


class Changing(nn.Module):
    """A model whose first layer is the slow one, and once a file is there its last layer."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.first = Slow(file, False, 3, 32)
        self.middle = nn.Sequential(nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 32), nn.Tanh())
        self.last = Slow(file, True, 32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


def small_task(file: Path, model: type[nn.Module] = Tagger, **sections: Any) -> TrainTask:
    """A task on a `classes_h5` file.

    Args:
        model: of this file.
        sections: as of `make_task`; `args` are those of the model.
    """
    source = {"source": f"{Path(__file__)}:{model.__name__}", "args": sections.pop("args", {})}
    training = {"select": "last", **sections.pop("training", {})}
    return make_task([file], model=source, training=training, **sections)


class Launches:
    """Tasks by name, in groups that each train in one launch, when one of them is asked for.

    Starting four ranks costs more than many of these trainings.

    Args:
        after: groups that must have been launched before, by group.
    """

    def __init__(self, root: Path, after: Mapping[str, Sequence[str]]) -> None:
        self.root = root
        self._after = after
        self._groups: dict[str, dict[str, TrainTask]] = {}
        self._group_of: dict[str, str] = {}
        self._launched: dict[str, subprocess.CompletedProcess[str]] = {}

    def add(self, group: str, name: str, task: TrainTask) -> None:
        self._groups.setdefault(group, {})[name] = task
        self._group_of[name] = group

    def again(self, name: str, new_name: str, group: str | None = None) -> None:
        """Train a task once more, in the folder `new_name` and in its own launch or another."""
        own = self._group_of[name]
        self.add(group or own, new_name, self._groups[own][name])

    def task(self, name: str) -> TrainTask:
        return self._groups[self._group_of[name]][name]

    def paths(self, name: str) -> TaskPaths:
        return TaskPaths(self.root / name)

    def group_of(self, name: str) -> str:
        """The one where it ends."""
        return self._group_of[name]

    @property
    def names(self) -> list[str]:
        return list(self._group_of)

    def is_launched(self, name: str) -> bool:
        return self._group_of[name] in self._launched

    def __getitem__(self, name: str) -> Trained:
        group = self._group_of[name]
        done = self.launched(group)
        trained = Trained(self.task(name), self.paths(name))
        assert trained.paths.result.exists(), done.stderr[-3000:]
        return trained

    def launched(self, group: str) -> subprocess.CompletedProcess[str]:
        if group not in self._launched:
            for other in self._after.get(group, ()):
                self.launched(other)
            self._launched[group] = self._launch(self._groups[group])
        return self._launched[group]

    def _launch(self, tasks: Mapping[str, TrainTask]) -> subprocess.CompletedProcess[str]:
        (num_ranks,) = {task.ranks.total for task in tasks.values()}
        paths = [write_task(self.root / name, task) for name, task in tasks.items()]
        line = launch_line(num_ranks, "-m", "mpi4py", "-c", TRAIN_AND_CUT, *paths)
        done = _run(line)
        return _run(line) if NO_START in done.stderr else done


def _run(line: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        line,
        env=launch_environment(),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def validation_loss(task: TrainTask, weights: dict[str, torch.Tensor]) -> float:
    """The mean over all validation events at once, by plain PyTorch.

    Raises:
        RuntimeError: the weights have other names or shapes than those of the plain model.
    """
    model = Tagger(**task.model.args).eval()
    model.load_state_dict(weights)
    index, fold_of_event = prepare(task.data, task.split_seed)
    events = validates(fold_of_event, task.fold).nonzero()[0]
    x, y = map(torch.from_numpy, Reader(index, index.fields).gather(events))
    with torch.no_grad():
        return cross_entropy(model(x), y.long()).item()
