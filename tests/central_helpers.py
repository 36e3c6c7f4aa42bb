"""Tasks and launches for the tests of trainings with a central copy of the weights."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from training_helpers import (
    TRAIN_ALL,
    classes_h5,
    launch_environment,
    launch_of,
    make_task,
    pilot,
    write_task,
)

from apps.contract import (
    Failure,
    TaskPaths,
    TrainResult,
    TrainTask,
    from_dict,
    read_json_lines,
)
from apps.data import prepare, trains, validates
from apps.hdf5 import Reader
from apps.launch import run_training
from sites.launchers import Shape, mpirun

# It writes down what it is trained on, and runs pieces of code that a test gives it.
MODEL = """\
import json
import os
import shutil
import signal
import time
from pathlib import Path

import torch
from mpi4py import MPI

RANK = MPI.COMM_WORLD.rank


class Tagger(torch.nn.Module):
    def __init__(self, folder, on_step="", on_epoch=""):
        super().__init__()
        self.folder = Path(folder)
        self.on_step, self.on_epoch = on_step, on_epoch
        self.epoch = self.step = 0  # of this attempt; of this rank and epoch
        self.steps = 0
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(8, 3),
        )

    def train(self, mode=True):
        self.epoch, self.step = self.epoch + mode, 0
        exec(self.on_epoch)
        return super().train(mode)

    def forward(self, x, number):
        if self.training:
            self.step, self.steps = self.step + 1, self.steps + 1
            exec(self.on_step)
            self.note("trained", number)
        return self.layers(x)

    def note(self, what, number):
        row = {"what": what, "rank": RANK, "epoch": self.epoch, "events": number.int().tolist()}
        with open(self.folder / f"{RANK}.jsonl", "a") as file:
            file.write(json.dumps(row) + "\\n")
"""

NO_START = "PMIx server's listener thread"  # now and then, where two mpirun start at once

UNEVEN = 121  # events, of which 80 or 81 are trained on


def tagger_task(folder: Path, strategy: str, *, events: int = UNEVEN, **sections: Any) -> TrainTask:
    """A task with dropout and BatchNorm whose model writes down its events in `folder`.

    Args:
        sections: as of `make_task`; `model` is what `Tagger` takes, beside the folder.
    """
    folder.mkdir(parents=True)
    (folder / "my_model.py").write_text(MODEL)
    args = {"folder": str(folder), **sections.pop("model", {})}
    training = {"strategy": strategy, "select": "last", **sections.pop("training", {})}
    layout = {"walltime_min": 1.5, **sections.pop("layout", {})}
    return make_task(
        [classes_h5(folder / "events.h5", events)],
        model={"source": f"{folder / 'my_model.py'}:Tagger", "args": args},
        data={"inputs": ["x", "number"]},
        training=training,
        layout=layout,
        **sections,
    )


def notes(folder: Path) -> list[dict[str, Any]]:
    """What the models of all ranks wrote down."""
    return [row for path in sorted(folder.glob("*.jsonl")) for row in read_json_lines(path)]


def trained_events(folder: Path, epoch: int) -> list[int]:
    """The events of all batches of an epoch, sorted; twice those that were trained on twice."""
    rows = [row for row in notes(folder) if (row["what"], row["epoch"]) == ("trained", epoch)]
    return sorted(event for row in rows for event in row["events"])


def training_events(task: TrainTask) -> list[int]:
    _, fold_of_event = prepare(task.data, task.split_seed)
    return trains(fold_of_event, task.fold).nonzero()[0].tolist()


def validation_loss(task: TrainTask, weights: dict[str, torch.Tensor]) -> float:
    """The mean over all validation events at once, by plain PyTorch."""
    index, fold_of_event = prepare(task.data, task.split_seed)
    events = validates(fold_of_event, task.fold).nonzero()[0]
    x, _, y = map(torch.from_numpy, Reader(index, index.fields).gather(events))
    layers = torch.nn.Sequential(
        torch.nn.Linear(3, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(8, 3),
    ).eval()
    layers.load_state_dict({name.removeprefix("layers."): each for name, each in weights.items()})
    with torch.no_grad():
        return cross_entropy(layers(x), y.long()).item()


# -- launches --------------------------------------------------------------------------------------


def command(num_ranks: int, outlives_ranks: bool = False) -> list[str]:
    """The launch line of the site "local"; one rank needs none."""
    line = mpirun(Shape(num_ranks=num_ranks, outlives_ranks=outlives_ranks))
    return [str(Path(sys.executable).with_name(line[0])), *line[1:]] if num_ranks > 1 else []


def run(
    task: TrainTask, folder: Path, num_ranks: int | None = None, outlives_ranks: bool = False
) -> TrainResult | Failure:
    """Train as a study does; one that hangs fails with the reason "time_limit"."""
    line = command(num_ranks or task.ranks.total, outlives_ranks)
    outcome = _outcome(task, folder, line)
    started = isinstance(outcome, TrainResult) or outcome.reason != "launch_failed"
    return outcome if started else _outcome(task, folder, line)


def _outcome(task: TrainTask, folder: Path, line: list[str]) -> TrainResult | Failure:
    content = dataclasses.asdict(task)
    how = launch_of(line, launch_environment())
    try:
        with pilot(folder.parent):
            result = run_training(content, how, str(folder), 1)
    except RuntimeError as error:
        return from_dict(Failure, json.loads(str(error)))
    return from_dict(TrainResult, result)


@dataclass(frozen=True)
class Trained:
    """A training that has ended."""

    task: TrainTask
    paths: TaskPaths

    @property
    def result(self) -> TrainResult:
        return TrainResult.read(self.paths.result)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_json_lines(self.paths.history)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return torch.load(self.paths.weights)


class Trainings:
    """Tasks by name; all that need as many ranks are trained in one launch, when one is asked for.

    Starting seven ranks costs more than any of these trainings.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._tasks: dict[str, TrainTask] = {}
        self._launches: dict[int, subprocess.CompletedProcess[str]] = {}

    def add(self, name: str, task: TrainTask) -> None:
        self._tasks[name] = task

    def __getitem__(self, name: str) -> Trained:
        task = self._tasks[name]
        num_ranks = task.ranks.total
        if num_ranks not in self._launches:
            self._launches[num_ranks] = self._launch(num_ranks)
        done = self._launches[num_ranks]
        assert done.returncode == 0, done.stderr[-3000:]
        return Trained(task, TaskPaths(self.root / name))

    def _launch(self, num_ranks: int) -> subprocess.CompletedProcess[str]:
        return launch_all(num_ranks, {
            self.root / name: task
            for name, task in self._tasks.items()
            if task.ranks.total == num_ranks
        })  # fmt: skip


def launch_all(num_ranks: int, tasks: dict[Path, TrainTask]) -> subprocess.CompletedProcess[str]:
    """Train tasks one after the other, each in its folder."""
    paths = [write_task(folder, task) for folder, task in tasks.items()]
    done = _launched(num_ranks, paths)
    return _launched(num_ranks, paths) if NO_START in done.stderr else done


def _launched(num_ranks: int, paths: list[Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command(num_ranks), sys.executable, "-P", "-c", TRAIN_ALL, *map(str, paths)],
        env=launch_environment(),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


# -- kills -----------------------------------------------------------------------------------------


def copies_itself(of: Path, to: Path, step: int) -> str:
    """For `on_step`: keep what a kill at this moment would leave."""
    return (
        f"if self.steps == {step} and not os.path.exists('{to}'):\n"
        f"    shutil.copytree('{of}', '{to}')"
    )


def dies_once(flag: Path, step: int) -> str:
    """For `on_step`: kill this rank, but not again in the next attempt."""
    return (
        f"if self.steps == {step} and not os.path.exists('{flag}'):\n"
        f"    open('{flag}', 'w').close()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
