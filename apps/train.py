"""Train one task: what every MPI rank runs, from the first line to the last.

    python -P -m apps.train /path/task.json                   # one rank
    mpirun -n 2 python -P -m apps.train /path/task.json       # two ranks of one host
    srun -n 8 python -P -m apps.train /path/task.json         # on a cluster

Beside task.json it leaves history.jsonl, weights.pt and, last of all, result.json; or failure.json
if it fails. Started again after a kill it goes on from checkpoint.pt, to the very same weights
(with DDP on more than two ranks, which groups its sums anew, to rounding). A task may also go on
from the state.pt that another task has left.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.metadata
import json
import platform
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpi4py import MPI  # before torch and Horovod: each would start MPI in its own way

# isort: split
import numpy as np
import torch

from apps import checkpoint, strategies
from apps.contract import (
    VERSION,
    Failure,
    N3LOError,
    TaskPaths,
    TrainResult,
    TrainTask,
    append_json_line,
    write_json,
    write_text,
)
from apps.data import FoldBatches, Share, prepare_fold
from apps.experiment import describe, make_experiment, model_file
from apps.history import (
    Diverged,
    Row,
    check_finite,
    check_metric_names,
    selected_row,
    stop_reason,
)
from apps.staging import stage
from apps.tensorboard import begin_events, scalars, write_events
from apps.topology import Topology
from apps.transforms import keep

PR_SET_PDEATHSIG = 1


def main() -> None:
    die_with_launcher()
    paths = TaskPaths(Path(sys.argv[1]).parent)
    task = None
    try:
        task = TrainTask.read(Path(sys.argv[1]))
        train(task, paths)
    except BaseException as error:  # noqa: BLE001  a rank that is gone leaves the others waiting
        traceback.print_exc()
        sys.stderr.flush()
        try:
            record_failure(paths, error, model_file(task.model) if task else None)
        finally:  # also where the disk is full
            MPI.COMM_WORLD.Abort(1)


def train(task: TrainTask, paths: TaskPaths) -> None:
    training = task.scaled_training
    torch.set_num_threads(task.layout.cores_per_rank)
    torch.set_float32_matmul_precision("high" if training.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = training.precision == "tf32"
    topology = Topology.start(training, task.layout, MPI.COMM_WORLD)
    if topology.is_first:
        write_text(paths.begun, "")

    # data
    files = [str(path) for path in stage(task.data.files, task.data.cache, task.data.copy_command)]
    staged = dataclasses.replace(task.data, files=files)
    index, fold_of_event = topology.from_first(
        lambda: prepare_fold(staged, task.split_seed, task.fold)
    )
    if topology.is_first and task.data.transforms:
        write_json(paths.transforms, keep(index))
    index = dataclasses.replace(index, files=tuple(files))  # this node's own copies
    share = Share(
        rank=topology.reader,
        num_ranks=topology.ranks.readers,
        group_size=strategies.group_size(training, topology),
        node_ranks=topology.node_trainers,
    )
    data = FoldBatches(task, index, fold_of_event, share, topology.device)

    # model, and how the ranks share its training
    seed_torch(task.seed)  # the same weights on every rank
    experiment = make_experiment(
        task.model, training, lambda: data.preview().example(2), task.data.collate
    )
    check_metric_names(task, experiment.measured)
    if index.weights is not None:
        experiment.check_weights()
    saved, own = load(topology, lambda: checkpoint.load_own(task, paths))
    begins = saved is None
    if begins and task.start is not None:
        saved, own = load(topology, lambda: checkpoint.load_start(training, task.start))
    preview = data.preview(saved["chosen"] if saved is not None else None)
    strategy = strategies.create(training, experiment, topology, preview)

    # where an earlier attempt was killed, or where another task ended
    start_epoch, clocks = 0, Clocks()
    rows: list[Row] = []
    if not begins:
        start_epoch, rows, clocks = saved["start_epoch"], saved["rows"], Clocks(**saved["clocks"])
        strategy.choose_own(saved["states"], own)
        strategy.restore(saved["states"])
        strategy.load_own_state(own)
    elif task.start is not None:
        start_epoch = saved["rows"][-1]["epoch"]
        own = own if checkpoint.own_fits(task, saved) else {}
        strategy.choose_own(saved["states"], own)
        checkpoint.go_on(task, saved, strategy)
        strategy.load_own_state(own)
    if topology.is_first:
        write_text(paths.history, "".join(json.dumps(row) + "\n" for row in rows))
        if training.tensorboard:
            events = begin_events(paths.tensorboard, start_epoch + len(rows) + 1)

    stopped = stop_reason(training, rows)
    while stopped is None:
        epoch = start_epoch + len(rows) + 1
        topology.comm.Barrier()  # or others would take rank 0's saving for slow communication
        start = time.perf_counter()
        seed_torch(task.seed, epoch, strategy.seed_key)  # so no generator's state is saved
        lr = next(iter(strategy.optimizers.values())).param_groups[0]["lr"]

        # train: metrics are (sum, count) pairs, so they add up over batches and ranks
        experiment.epoch = epoch
        experiment.train(True)
        sums = strategy.train(data.training(epoch))
        clocks.read(topology.device)  # a GPU may be at work still
        with strategy.clock.waiting("idle"):
            topology.comm.Barrier()  # all ranks have ended the epoch
        sums = strategy.sum(sums)
        spent = spent_on(topology, strategy.clock.read(), time.perf_counter() - start)
        clocks.note(spent)

        # validate
        strategy.average_buffers()
        experiment.train(False)
        val_sums = experiment.no_val_sums()
        seed_torch(task.seed, 0, strategy.seed_key)  # all epochs are judged by the same numbers
        with torch.no_grad():
            for batch in data.validation(*topology.validation_part):
                before = clocks.read(topology.device)
                val_sums += strategy.evaluate(batch)
                clocks.inference_s += clocks.read(topology.device) - before
                clocks.inference_events += batch.num_events
        val_sums = strategy.sum(val_sums)

        # the clock is rank 0's, so that all ranks decide the same
        seconds = (rows[-1]["seconds"] if rows else 0.0) + time.perf_counter() - start
        of_validation = experiment.val_means(val_sums).items()
        measured = experiment.means(sums) | {f"val_{name}": value for name, value in of_validation}
        row = {"epoch": epoch, **measured, "lr": lr, **strategy.facts(), **spent}
        row = topology.comm.bcast(row | {"seconds": seconds})
        check_finite(row)
        strategy.go_on_in_schedule(row["val_loss"])
        rows.append(row)
        stopped = stop_reason(training, rows)

        states = strategy.states()
        own_states = topology.gather(checkpoint.on_host(strategy.own_state()))
        if topology.is_first:
            append_json_line(paths.history, row)
            if training.tensorboard:
                write_events(events, [scalars(row, time.time())])
            if selected_row(task, rows) is row:
                weights = experiment.weights(checkpoint.copied(states["networks"]))
                checkpoint.save(paths.weights, weights)
            content = {
                "key": task.key(),
                "start_epoch": start_epoch,
                "rows": rows,
                "clocks": dataclasses.asdict(clocks),
                "settings": checkpoint.settings_of(task),
                "chosen": strategy.choices(),
                "states": states,
                "own_states": own_states,
            }
            checkpoint.save(paths.checkpoint, content)

    devices = topology.comm.gather(topology.device_name)
    inference_s, inference_events = topology.sum(
        torch.tensor([clocks.inference_s, clocks.inference_events], dtype=torch.float64)
    ).tolist()
    strategy.close()
    if topology.is_first:
        best = selected_row(task, rows)
        result = TrainResult(
            key=task.key(),
            fom=best[task.objective.metric],
            epoch=best["epoch"],
            start_epoch=start_epoch,
            epochs=rows[-1]["epoch"],
            stopped=stopped,
            metrics={name: value for name, value in best.items() if name in experiment.measured},
            seconds=rows[-1]["seconds"],
            samples_per_second=data.num_train * len(rows) / clocks.training_s,
            training_s=clocks.training_s,
            compute_s=clocks.compute_s,
            communication_s=clocks.communication_s,
            data_s=clocks.data_s,
            idle_s=clocks.idle_s,
            inference_us=1e6 * inference_s / max(1, inference_events),
            num_ranks=topology.num_ranks,
            hosts=list(dict.fromkeys(topology.hosts)),
            devices=devices,
            num_train=data.num_train,
            num_val=data.num_val,
            num_parameters=experiment.num_parameters,
            lost_ranks=topology.num_ranks - len(topology.alive),
            **staleness_of(rows),
            versions=versions(),
        )
        if task.keep_state and paths.checkpoint.exists():
            paths.checkpoint.replace(paths.state)  # before the result, which promises it
        result.write(paths.result)
        paths.checkpoint.unlink(missing_ok=True)
    topology.leave()


def load(
    topology: Topology, read: Callable[[], dict[str, Any] | None]
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """A checkpoint that rank 0 reads, if there is one, and what it holds of this rank alone."""
    content = read() if topology.is_first else None
    own = content.pop("own_states") if content else None
    return topology.from_first(lambda: content), topology.scatter(own, {})


@dataclass
class Clocks:
    """What one rank spent its time on, in all attempts at a task."""

    training_s: float = 0.0  # without validation and saving, in the parts that follow
    compute_s: float = 0.0
    communication_s: float = 0.0
    data_s: float = 0.0
    idle_s: float = 0.0
    inference_s: float = 0.0  # forward passes of validation, without reading
    inference_events: int = 0

    def note(self, spent: Mapping[str, float]) -> None:
        """Of one epoch."""
        self.training_s += sum(spent.values())
        for name, seconds in spent.items():
            setattr(self, name, getattr(self, name) + seconds)

    @staticmethod
    def read(device: torch.device) -> float:
        """Seconds, once all that was asked of the device is done."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()


def spent_on(topology: Topology, waited: Mapping[str, float], seconds: float) -> dict[str, float]:
    """What the ranks that train spent an epoch on, in seconds of the mean rank; collective.

    Args:
        waited: by this rank, by what it waited for; the rest is compute.
    """
    counts = topology.place.trains
    own = {"compute": max(0.0, seconds - sum(waited.values())), **waited}
    values = torch.tensor([*own.values(), 1.0], dtype=torch.float64) * counts
    *totals, number = topology.sum(values).tolist()
    return {f"{name}_s": total / number for name, total in zip(own, totals, strict=True)}


def die_with_launcher() -> None:
    """No rank outlives its mpirun or srun step (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def seed_torch(seed: int, *key: int) -> None:
    """Independent random numbers for each (epoch, rank), from the seed of the task.

    Models may also draw from Python's and NumPy's.
    """
    number = int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1)[0])
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def staleness_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Updates of the central weights in all epochs, and their mean staleness."""
    updates = sum(row.get("updates", 0) for row in rows)
    if updates == 0:
        return {}
    total = sum(row["staleness"] * row["updates"] for row in rows)
    return {"updates": updates, "staleness": total / updates}


def versions() -> dict[str, str]:
    found = {"n3lo": VERSION, "python": platform.python_version()}
    for name in ("torch", "numpy", "h5py", "mpi4py", "horovod"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # Horovod is optional
            continue
    found["mpi"] = MPI.Get_library_version().split(",")[0].strip()
    return found


def record_failure(paths: TaskPaths, error: BaseException, file: str | None) -> None:
    """Write failure.json, unless another rank was first: what follows is mostly its echo."""
    text = str(error).lower()
    memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError)
        and ("can't allocate memory" in text or "out of memory" in text)
    )
    plain = isinstance(error, N3LOError | Diverged)
    kinds = {Diverged: "diverged", checkpoint.ParentGone: "parent"}
    failure = Failure(
        reason="oom" if memory else kinds.get(type(error), "exception"),
        message=str(error) if plain else describe(error, file),
        rank=MPI.COMM_WORLD.rank,
    )
    # Unlike a rename, this fails if the name is taken; if a kill tears it, the log has the reason.
    with contextlib.suppress(FileExistsError), open(paths.failure, "x") as file:
        json.dump(dataclasses.asdict(failure), file)


if __name__ == "__main__":
    main()
