"""Updates per second of a parameter server's exchange over MPI, against what memory allows.

    python benchmarks/parameter_exchange.py run [--methods flat ...] [--payloads 1000000 ...]
    python benchmarks/parameter_exchange.py table [--of serial] [--windows median]

Workers compute nothing: each pushes n float32 and pulls n, again and again; that is an update. All
methods of a payload and a number of workers take turns, so that a noisy minute meets them all.
`run` writes every window to results/parameter_exchange.json, `table` prints them as Markdown.

Every gradient is -2 and lr is 0.5: each update adds exactly 1 to every parameter, so the pulled
parameters tell at the end whether an update was lost.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import datetime
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import mpi4py

mpi4py.rc.initialize = False  # the parent only launches; its children call MPI.Init

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from apps.contract import Exchange, Layout, Training, write_json
from apps.data import Preview
from apps.experiment import Supervised
from apps.strategies import create
from apps.strategies.centre import Op
from apps.topology import Topology
from sites.launchers import Shape, mpirun

RESULTS = Path(__file__).parent / "results" / "parameter_exchange.json"
PAYLOADS = {100_000: [1], 1_000_000: [1, 2, 3], 10_000_000: [1, 2, 3], 50_000_000: [1, 2, 3]}
ROUNDS, WINDOWS, SECONDS = 3, 2, 0.25  # a round starts each method anew, for a few windows
LR, GRADIENT = 0.5, -2.0
PUSH, STOP = 1, 2  # tags


class Method:
    """One way to exchange. Each rank of a job makes one; the first `num_masters` serve.

    To add one: subclass it, write `serve`, `exchange` and `stop`, name it in METHODS. A method
    without a master rank has `num_masters = 0` and no `serve`; constructors may be collective. At
    the end of `stop`, no message of a worker may be on its way: the next window follows.
    """

    num_masters = 1
    most_workers = sys.maxsize
    params: torch.Tensor  # (n,), the weights: a master's own, a worker's as it last pulled them

    def __init__(self, comm: MPI.Comm, n: int) -> None:
        self.comm, self.n = comm, n
        self.num_workers = comm.size - self.num_masters
        self.params = torch.zeros(n)
        self.gradient = torch.full((n,), GRADIENT)

    def serve(self) -> None:
        """On a master: answer until every worker has stopped."""
        raise NotImplementedError

    def exchange(self) -> None:
        """On a worker: push the gradient once, pull the weights once."""
        raise NotImplementedError

    def stop(self) -> None:
        """On a worker: no exchange follows in this window."""

    def ends(self) -> list[float]:
        """The first and the last of the weights that this worker pulled last."""
        return [float(self.params[0]), float(self.params[-1])]


class Limit(Method):
    """The memory limit: one process adds, and copies the weights to where a worker wants them."""

    num_masters, most_workers = 0, 1

    def __init__(self, comm: MPI.Comm, n: int) -> None:
        super().__init__(comm, n)
        self.weights, self.received = torch.zeros(n), torch.zeros(n)

    def exchange(self) -> None:
        self.weights.add_(self.gradient, alpha=-LR)
        self.params.copy_(self.weights)


class Add(Limit):
    """The update alone, for workers that share its memory."""

    def exchange(self) -> None:
        self.params.add_(self.gradient, alpha=-LR)


class Serial(Limit):
    """The bound of whole messages, where nothing overlaps: copy, add, copy."""

    def exchange(self) -> None:
        self.received.copy_(self.gradient)
        self.weights.add_(self.received, alpha=-LR)
        self.params.copy_(self.weights)


class Flat(Method):
    """The plain baseline: one vector in one message each way, and the update in place."""

    def serve(self) -> None:
        status, num_left = MPI.Status(), self.num_workers
        while num_left:
            self.comm.Recv(self.gradient, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            if status.tag == STOP:
                num_left -= 1
                continue
            self.params.add_(self.gradient, alpha=-LR)
            self.comm.Send(self.params, status.source, PUSH)

    def exchange(self) -> None:
        self.comm.Send(self.gradient, 0, PUSH)
        self.comm.Recv(self.params, 0, PUSH)

    def stop(self) -> None:
        self.comm.Send(self.gradient[:0], 0, STOP)


class Pickled(Method):
    """Lists of arrays by mpi4py's lowercase send and recv; the update is torch's, in place."""

    def __init__(self, comm: MPI.Comm, n: int) -> None:
        self.comm = comm
        self.num_workers = comm.size - self.num_masters
        self.weights = [np.zeros(size, np.float32) for size in tensor_sizes(n)]
        self.gradients = [np.full(size, GRADIENT, np.float32) for size in tensor_sizes(n)]

    def serve(self) -> None:
        status, num_left = MPI.Status(), self.num_workers
        while num_left:
            gradients = self.comm.recv(None, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            if status.tag == STOP:
                num_left -= 1
                continue
            for weight, gradient in zip(self.weights, gradients, strict=True):
                torch.from_numpy(weight).add_(torch.from_numpy(gradient), alpha=-LR)
            self.comm.send(self.weights, status.source, PUSH)

    def exchange(self) -> None:
        self.comm.send(self.gradients, 0, PUSH)
        self.weights = self.comm.recv(None, 0, PUSH)

    def stop(self) -> None:
        self.comm.send(None, 0, STOP)

    def ends(self) -> list[float]:
        return [float(self.weights[0][0]), float(self.weights[-1][-1])]


class Nnlo(Pickled):
    """NNLO's protocol: a message a tensor, pickled handshakes, new numpy arrays at each receive.

    Its SGD is `weight - lr * gradient` in numpy; its tags are kept as well.
    """

    EXIT, BEGIN_WEIGHTS, BEGIN_UPDATE, TIME, BOOL, WEIGHTS = 1, 2, 3, 4, 5, 12

    def serve(self) -> None:
        status, num_left, num_updates = MPI.Status(), self.num_workers, 0
        while num_left:
            self.comm.recv(None, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            worker = status.source
            if status.tag == self.EXIT:
                num_left -= 1
                continue
            self.comm.recv(None, worker, self.TIME)
            self.comm.send(True, worker, self.BOOL)  # the update is not too old
            gradients = self._receive(worker)
            self.weights = [w - LR * g for w, g in zip(self.weights, gradients, strict=True)]
            num_updates += 1
            self.comm.send(num_updates, worker, self.TIME)
            self.comm.send(None, worker, self.BEGIN_WEIGHTS)
            self._send(self.weights, worker)

    def exchange(self) -> None:
        self.comm.send(None, 0, self.BEGIN_UPDATE)
        self.comm.send(0, 0, self.TIME)
        self.comm.recv(None, 0, self.BOOL)
        self._send(self.gradients, 0)
        self.comm.recv(None, 0, self.TIME)
        self.comm.recv(None, 0, self.BEGIN_WEIGHTS)
        self.weights = self._receive(0)

    def stop(self) -> None:
        self.comm.send(None, 0, self.EXIT)

    def _send(self, tensors: list[NDArray[np.float32]], rank: int) -> None:
        for tensor in tensors:
            self.comm.Send(tensor, rank, self.WEIGHTS)

    def _receive(self, rank: int) -> list[NDArray[np.float32]]:
        tensors = [np.empty_like(weight) for weight in self.weights]
        for tensor in tensors:
            self.comm.Recv(tensor, rank, self.WEIGHTS)
        return tensors


class Ours(Method):
    """N3LO's downpour with plain SGD, in the layout that `exchange` and `layout` name.

    The gradient is written into the strategy's own memory, as the backward pass does.
    """

    exchange_settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, comm: MPI.Comm, n: int) -> None:
        self.comm, self.num_workers = comm, comm.size - self.num_masters
        training = Training(
            strategy="downpour",
            loss="mse",
            optimizer={"name": "sgd", "lr": LR},
            exchange=Exchange(**self.exchange_settings),
        )
        layout = Layout(num_workers=self.num_workers, num_masters=max(1, self.num_masters))
        topology = Topology.start(training, layout, comm)
        model = torch.nn.Module()
        model.weights = torch.nn.Parameter(torch.zeros(n))
        preview = Preview(None, num_steps=1, largest_batch=1)
        self.strategy = create(training, Supervised(model, training), topology, preview)
        flat = self.strategy.flat
        self.params, self.gradient = flat.values, flat.gradient
        self.gradient.fill_(GRADIENT)
        self.strategy.open(num_steps=1)

    def serve(self) -> None:
        self.strategy.serve(num_steps=1)

    def exchange(self) -> None:
        self.strategy.ask(Op.STEP, "model", (self.gradient, self.params), events=1)

    def stop(self) -> None:
        self.strategy.finish()


class Sharded(Ours):
    """Two masters, each of one half."""

    num_masters = 2


class FourMasters(Ours):
    num_masters = 4


class Window(Ours):
    num_masters = 0
    exchange_settings: ClassVar[dict[str, Any]] = {"transport": "window"}


class OneSided(Ours):
    exchange_settings: ClassVar[dict[str, Any]] = {"transport": "one_sided"}

    def serve(self) -> None:
        """The memory serves itself."""


METHODS: dict[str, type[Method]] = {
    "limit": Limit,
    "add": Add,
    "serial": Serial,
    "pickled": Pickled,
    "nnlo": Nnlo,
    "flat": Flat,
    "messages": Ours,
    "sharded": Sharded,
    "four masters": FourMasters,
    "window": Window,
    "one_sided": OneSided,
}


# Four masters and a worker want more than the two cores of a small machine.
DEFAULT = [name for name in METHODS if name != "four masters"]


def tensor_sizes(n: int, num_tensors: int = 10) -> list[int]:
    """Sizes of a network's tensors: each half as large as the one before, n together."""
    halves = [n >> place for place in range(1, num_tensors)]
    return [*halves, n - sum(halves)]


def child(names: list[str], n: int) -> None:
    """In each rank of a job: measure the methods in turn."""
    MPI.Init()
    torch.set_num_threads(1)
    for name in names:
        measure(name, MPI.COMM_WORLD, n)
    MPI.Finalize()


def measure(name: str, comm: MPI.Comm, n: int) -> None:
    """Warm a method up, then measure it; rank 0 prints a JSON line for each window."""
    method = METHODS[name](comm, n)
    num_updates, _ = window(method, comm, SECONDS / 3)  # page faults, connections
    for _ in range(WINDOWS):
        num_more, line = window(method, comm, SECONDS)
        num_updates += num_more
        if comm.rank == 0:
            print(json.dumps({"method": name} | line), flush=True)
    ends = comm.gather(method.ends())
    if ends is not None:
        newest = [max(each) for each in zip(*ends, strict=True)]
        assert newest == [num_updates] * 2, f"{name}: {num_updates} updates, {newest} arrived"


def window(method: Method, comm: MPI.Comm, seconds: float) -> tuple[int, dict[str, float]]:
    """Updates of all workers, and their rate (both on rank 0 only)."""
    num_updates, elapsed, cpu_seconds = 0, 0.0, 0.0
    comm.Barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    if comm.rank < method.num_masters:
        method.serve()
        cpu_seconds = time.process_time() - cpu_start
    else:
        while elapsed < seconds:
            method.exchange()
            num_updates += 1
            elapsed = time.perf_counter() - start
        method.stop()
    num_updates = comm.reduce(num_updates) or 0
    elapsed = comm.reduce(elapsed, MPI.MAX) or 1.0
    cpu_seconds = comm.reduce(cpu_seconds) or 0.0
    return num_updates, {
        "updates_per_second": num_updates / elapsed,
        "master_cpu_seconds": cpu_seconds / max(num_updates, 1),
    }


def num_ranks(name: str, num_workers: int) -> int:
    method = METHODS[name]
    return method.num_masters + min(num_workers, method.most_workers)


def launch(names: list[str], n: int, ranks: int) -> list[dict]:
    """One MPI job; a line for each of its windows."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    command = [*mpirun(Shape(num_ranks=ranks)), sys.executable, __file__, "child", str(n), *names]
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    if job.returncode == 213:  # PMIx's listener thread failed: a race when two jobs start at once
        time.sleep(1)
        job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    if job.returncode:
        raise SystemExit(f"{names}, {n} floats, {ranks} ranks failed:\n{job.stderr[-2000:]}")
    return [json.loads(line) for line in job.stdout.splitlines()]


def run(given: argparse.Namespace) -> None:
    windows = []
    methods, rounds = given.methods, given.rounds
    for n in given.payloads:
        for num_workers in given.workers or PAYLOADS.get(n, [1]):
            case = {"n": n, "workers": num_workers}
            for number in range(rounds):
                # neighbours of equal size share a job: to start costs more than to measure
                for ranks, names in groupby(methods, partial(num_ranks, num_workers=num_workers)):
                    lines = launch(list(names), n, ranks)
                    windows += [case | {"round": number} | line for line in lines]
            write_json(given.results, {"machine": machine(), "windows": windows})
            print(f"{n} floats, {num_workers} workers: done", file=sys.stderr)


def machine() -> dict[str, str | int | None]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "mpi": MPI.Get_library_version().split(",")[0],
        "mpi4py": importlib.metadata.version("mpi4py"),
        "torch": torch.__version__,
        "huge_pages": os.environ.get("THP_MEM_ALLOC_ENABLE", "0"),  # torch's, of 2 MiB
        "date": datetime.date.today().isoformat(),
    }


def table(results: Path, reference: str, which: str) -> None:
    """Markdown: updates/s in the best or the median window, and the share of the reference's."""
    record = json.loads(results.read_text())
    rates, cpu = summary(record["windows"], max if which == "best" else statistics.median)
    cases = sorted({(n, workers) for _, n, workers in rates})
    heads = [f"{n / 1e6:g}M, {workers}" for n, workers in cases]
    names = list(dict.fromkeys(name for name, _, _ in rates))
    smallest = min(cases)
    print(", ".join(f"{key} {value}" for key, value in record["machine"].items()))
    print(f"\nUpdates/s, {which} window (share of {reference}); columns: float32, workers\n")
    print(f"| method | {' | '.join(heads)} | master's CPU at {smallest[0] / 1e6:g}M |")
    print("|---" * (len(cases) + 2) + "|")
    for name in names:
        cells = [_cell(rates.get((name, *case)), rates.get((reference, *case))) for case in cases]
        seconds = cpu.get((name, *smallest))
        print(f"| {name} | {' | '.join(cells)} | {f'{seconds * 1e6:.0f} µs' if seconds else '-'} |")


def summary(windows: list[dict], choose: Callable[[list[float]], float]) -> tuple[dict, dict]:
    """Updates/s, and CPU seconds of the masters per update, of each (method, n, workers)."""
    grouped: dict[tuple, list[dict]] = {}
    for line in windows:
        grouped.setdefault((line["method"], line["n"], line["workers"]), []).append(line)
    rates = {k: choose([w["updates_per_second"] for w in v]) for k, v in grouped.items()}
    cpu = {k: statistics.median(w["master_cpu_seconds"] for w in v) for k, v in grouped.items()}
    return rates, cpu


def _cell(rate: float | None, reference: float | None) -> str:
    if rate is None:
        return "-"
    number = f"{rate:.3g}" if rate < 100 else f"{rate:.0f}"
    return f"{number} ({rate / reference:.0%})" if reference else number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    actions = parser.add_subparsers(dest="action", required=True)
    options = actions.add_parser("run")
    options.add_argument("--methods", nargs="+", choices=METHODS, default=DEFAULT)
    options.add_argument("--payloads", nargs="+", type=int, default=list(PAYLOADS))
    options.add_argument(
        "--workers", nargs="+", type=int, help="as PAYLOADS has them, if not given"
    )
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options = actions.add_parser("table")
    options.add_argument("--of", choices=["limit", "serial"], default="limit")
    options.add_argument("--windows", choices=["best", "median"], default="best")
    options = actions.add_parser("child")
    options.add_argument("n", type=int)
    options.add_argument("methods", nargs="+")
    given = parser.parse_args()
    if given.action == "run":
        run(given)
    elif given.action == "table":
        table(given.results, given.of, given.windows)
    else:
        child(given.methods, given.n)


if __name__ == "__main__":
    main()
