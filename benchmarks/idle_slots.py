"""How long slots stand idle between tasks of 0.1 s: what it costs a study to start a task.

    python benchmarks/idle_slots.py                                    # this host, a slot a core
    python benchmarks/idle_slots.py --site slurm --lab --set nodes=1   # as root: the tests' Slurm
    python benchmarks/idle_slots.py --site slurm --set nodes=1 ...     # a cluster

All is as in a study, from the search to the files of a task, but for the MPI job: in its place the
worker waits, so that there may be more slots than cores. A node of the tests' Slurm has two.
Files are where TMPDIR says; on a disk that is busy with others', they take much of a gap.

Counted is the time after the start-up, when all slots have their first task, until the last tasks
begin, one a slot. A gap, from the end of a task to the begin of the next on its slot, is made of
what had to happen one after the other:

    closing   the worker gives the room back and reads the result
    driver    the next task was not submitted yet: search, ledger
    Parsl     it was, and had not come to a worker
    opening   the worker writes the task's file and waits for room
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apps import launch, room
from apps.contract import TaskPaths, TrainResult, TrainTask

HERE = Path(__file__).resolve().parent
JETS = HERE.parent / "studies/data/lhc_jets_pythia8_2000x100x16.h5"
SECONDS = "IDLE_SLOTS_SECONDS"  # in a worker's environment: how long a task takes
LAB = ("cores_per_node=2", "walltime_min=10", "interface=lo", "partition=debug")
PARTS = ("closing", "driver", "Parsl", "opening")
STUDY = f"""\
name = "idle"
seed = 1
model = {{ source = "{HERE.parent}/apps/models/jets.py:DeepSets" }}
layout = {{ walltime_min = 1 }}

[data]
files = ["{JETS}"]
inputs = "jetConstituentList"
targets = "jets[:, -6:-1]"
folds = 2

[training]
strategy = "local"
epochs = 1
batch_size = 32
optimizer = {{ name = "sgd", lr = 0.1 }}

[search]
method = "random"
objective = {{ metric = "val_loss", goal = "min" }}
num_trials = %d
num_parallel = %d
space = {{ "training.optimizer.lr" = {{ type = "real", low = 1e-3, high = 1.0 }} }}
"""


@dataclass
class Pause:
    """What a worker waits for in place of an MPI job; it leaves a result, as rank 0 would."""

    folder: str
    place: room.Place
    begun: float = field(default_factory=time.time)
    ended: float = 0.0
    pid: int = field(default_factory=os.getpid)

    def wait(self, timeout: float) -> int:
        paths = TaskPaths(Path(self.folder))
        task = TrainTask.read(paths.task)
        loss = float(task.training.optimizer["lr"])
        seconds = ("seconds", "training_s", "compute_s", "communication_s", "data_s", "idle_s")
        numbers: dict[str, Any] = dict.fromkeys((*seconds, "samples_per_second"), 0.0)
        numbers |= dict.fromkeys(("num_train", "num_val", "num_parameters", "num_ranks"), 1)
        TrainResult(
            key=task.key(), fom=loss, epoch=1, start_epoch=0, epochs=1, stopped="epochs",
            metrics={"val_loss": loss}, hosts=self.place.hosts, devices=self.place.cores,
            inference_us=0.0, versions={}, **numbers,
        ).write(paths.result)  # fmt: skip
        time.sleep(max(self.begun + float(os.environ[SECONDS]) - time.time(), 0.0))
        self.ended = time.time()
        return 0


def run_without_mpi(
    task: dict[str, Any], how: dict[str, Any], folder: str, attempt: int
) -> dict[str, Any]:
    """`apps.launch.run_training`, with a pause for a job, and its times among the metrics."""
    called = time.time()
    pauses: list[Pause] = []

    @contextlib.contextmanager
    def pause(
        line: list[str], environment: dict[str, str], output: Any, tenant: room.Tenant
    ) -> Iterator[Pause]:
        pauses.append(Pause(folder, tenant.place))
        tenant.holds(os.getpid())
        yield pauses[0]

    launch.job = pause
    result = launch.run_training(task, how, folder, attempt)
    [paused] = pauses
    times = {"called": called, "begun": paused.begun, "ended": paused.ended, "left": time.time()}
    return {**result, "metrics": {**result["metrics"], **times}}


@dataclass(frozen=True, kw_only=True)
class Stay:
    """A task on its slot: when what of it happened, in Unix seconds."""

    submitted: float
    called: float
    begun: float
    ended: float
    left: float

    def gap_after(self, before: Stay) -> list[float]:
        """The seconds since the task before on the same slot ended, in PARTS."""
        parts, until = [], before.ended
        for end in (before.left, self.submitted, self.called, self.begun):
            parts.append(max(min(end, self.begun) - until, 0.0))
            until = max(until, end)
        return parts


def stays_of(runs: Path) -> list[list[Stay]]:
    """What the ledger says of each slot, in the order of time."""
    from workflow.ledger import Ledger

    slots: dict[Any, list[Stay]] = defaultdict(list)
    for trial in Ledger(runs / "idle").trials_by_number.values():
        for state in trial.tasks.values():
            result = dict(state.result)
            names = ("called", "begun", "ended", "left")
            times = {name: result["metrics"][name] for name in names}
            slot = (state.job, *result["hosts"], *result["devices"])
            slots[slot].append(Stay(submitted=state.submitted, **times))
    return [sorted(slot, key=lambda stay: stay.begun) for slot in slots.values()]


def summary(slots: list[list[Stay]]) -> str:
    """From when all slots have a task until the last ones begin: after that, none is left."""
    start = max(slot[0].begun for slot in slots)
    begins = sorted(stay.begun for slot in slots for stay in slot)
    end = begins[-len(slots)]
    busy = sum(
        max(min(stay.ended, end) - max(stay.begun, start), 0.0) for slot in slots for stay in slot
    )
    idle = 1 - busy / (len(slots) * (end - start))
    rate = sum(start <= begun < end for begun in begins) / (end - start)
    gaps = [
        after.gap_after(before)
        for slot in slots
        for before, after in itertools.pairwise(slot)
        if before.ended >= start and after.begun <= end
    ]
    means = [1000 * statistics.mean(parts) for parts in zip(*gaps, strict=True)]
    said = ", ".join(f"{name} {mean:.1f}" for name, mean in zip(PARTS, means, strict=True))
    return (
        f"{len(begins)} tasks on {len(slots)} slots: {idle:.1%} idle, {rate:.2f} tasks/s; "
        f"a gap is {sum(means):.1f} ms in the mean: {said}"
    )


def run(words: list[str], num_tasks: int, num_parallel: int) -> str:
    """A study through the program's own command line."""
    import idle_slots  # by this name the workers find it

    import workflow.tasks
    from workflow import cli

    workflow.tasks.run_training = idle_slots.run_without_mpi
    with tempfile.TemporaryDirectory() as name:
        study, runs = Path(name) / "idle.toml", Path(name) / "runs"
        study.write_text(STUDY % (num_tasks // 2, num_parallel))
        with open(Path(name) / "out.txt", "w") as out, contextlib.redirect_stdout(out):
            status = cli.main([str(study), "--runs", str(runs), *words])
        if status:
            sys.exit((Path(name) / "out.txt").read_text())
        return summary(stays_of(runs))


def run_in_lab(words: list[str]) -> int:
    """This program beside a Slurm of its own."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    from slurm_helpers import Cluster

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # munged wants to be reached
        cluster = Cluster(folder)
        try:
            inside = cluster.start(sys.executable, __file__, *words)
            status = inside.wait()
            print((folder / "out.txt").read_text(), end="")
        finally:
            cluster.down()
    return status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--site", default="local")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--lab", action="store_true", help="start the tests' Slurm first (root)")
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--parallel", type=int, default=4, help="trials at once")
    parser.add_argument("--seconds", type=float, default=0.1, help="of a task")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if given.lab:
        own = [word for word in sys.argv[1:] if word != "--lab"]
        sys.exit(run_in_lab([word for each in LAB for word in ("--set", each)] + own))
    os.environ[SECONDS] = str(given.seconds)
    os.environ["PYTHONPATH"] = str(HERE)
    words = [word for each in given.settings for word in ("--set", each)]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores", flush=True)
    for _ in range(given.rounds):
        load, _, _ = os.getloadavg()
        said = run(["--site", given.site, *words], given.tasks, given.parallel)
        print(f"load {load:.1f} before: {said}", flush=True)


if __name__ == "__main__":
    main()
