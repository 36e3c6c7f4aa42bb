"""A task as a Parsl app: `apps.launch.run_training` on the site, behind the cache."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import parsl
from parsl.errors import ParslError
from parsl.executors.high_throughput.errors import ManagerLost, WorkerLost

from apps.contract import Failure, TaskPaths, TrainTask, from_dict, read_json
from apps.launch import finished_result, run_training
from sites.base import Site, SiteError
from sites.launchers import Shape
from workflow.cache import ResultCache, TaskCache
from workflow.pilots import Watch
from workflow.plan import shape_of

ANSWER_S = 120.0  # that Parsl's interchange may take; without a limit, for ever if it is gone


class EngineError(Exception):
    """The task engine itself broke down: no task can run any more. One line."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an attempt at a task ended: with a result, or with a failure."""

    result: dict[str, Any] | None = None
    failure: Failure | None = None
    cached: bool = False
    folder: Path
    place: dict[str, Any] = field(default_factory=dict)  # its batch job, nodes, and begin


@dataclass(frozen=True)
class Engine:
    """Starts tasks on a site."""

    kernel: Any  # Parsl's DataFlowKernel
    app: Any
    site: Site
    run_folder: Path
    results: ResultCache
    watch: Watch | None = None  # of its pilots, where they are jobs of a batch system

    def is_finished(self, task: TrainTask) -> bool:
        """Whether `submit` will find the task's result and execute nothing."""
        key = task.key()
        own = finished_result(self._paths(task), key)
        return own is not None or self.results.find(key) is not None

    def submit(self, task: TrainTask, attempt: int, avoid: Sequence[str] = ()) -> Future[Any]:
        """Start a task, on other nodes than those to avoid, or take its result from the cache."""
        shape = shape_of(task.training, task.layout)
        if not self.is_finished(task):
            self._paths(task).place.unlink(missing_ok=True)  # that of the attempt before
        future: Future[Any] = self.app(
            task=dataclasses.asdict(task),
            how={
                "command": self.site.command(shape),
                "environment": self.site.environment(shape),
                "need": self.site.need(shape),
                "avoid": list(avoid),
            },
            folder=str(self._paths(task).folder),
            attempt=attempt,
        )
        return future

    def share(self, task: TrainTask) -> Fraction:
        """The part of the site that a task takes."""
        return Fraction(1, self.site.num_slots(shape_of(task.training, task.layout)))

    def epochs(self, task: TrainTask) -> int:
        """How many epochs the attempts at a task have trained so far."""
        try:
            return self._paths(task).history.read_text(errors="replace").count("\n")
        except OSError:
            return 0

    def outcome(self, task: TrainTask, future: Future[Any]) -> Outcome:
        """What came of a future that is done.

        Raises:
            EngineError: Parsl gave up, for a reason that has nothing to do with the task.
        """
        own = self._paths(task).folder
        error = future.exception()
        if error is None:
            result = dict(future.result())
            folder = Path(result.pop("folder", own))
            cached = bool(getattr(future, "task_record", {}).get("from_memo"))
            place = {} if cached else self._place(task)
            return Outcome(result=result, cached=cached, folder=folder, place=place)
        if isinstance(error, ParslError):
            raise EngineError(" ".join(str(error).split()))
        return Outcome(failure=_failure(error), folder=own, place=self._place(task))

    def check(self) -> None:
        """See that tasks can still end: Parsl does not notice if its interchange is gone.

        Raises:
            EngineError: it is.
        """
        error = broken(self.kernel)
        if error is not None:
            raise error

    def foresee(self, least_s: float | None) -> None:
        """How long the least task lasts, for pilots to come (`Site.foresee`)."""
        self.site.foresee(self.run_folder / "parsl", least_s)

    def news(self) -> Iterator[str]:
        """What has become of pilots since the last time, in lines."""
        if self.watch is not None:
            yield from self.watch.news(time.monotonic())

    def _place(self, task: TrainTask) -> dict[str, Any]:
        """Where the last attempt at a task ran; empty where it never did."""
        try:
            place = read_json(self._paths(task).place)
            return {"job": place["job"], "nodes": place["hosts"], "begun": place["begun"]}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _paths(self, task: TrainTask) -> TaskPaths:
        return TaskPaths(self.run_folder / task.id)


@contextmanager
def engine(
    site: Site, shape: Shape, least_s: float | None, run_folder: Path, results: ResultCache
) -> Iterator[Engine]:
    """What starts a study's tasks, from the smallest shape and from the least time on."""
    with loaded(site, shape, run_folder, TaskCache(results), least_s) as kernel:
        app = parsl.python_app(run_training, data_flow_kernel=kernel, cache=True)
        pool = kernel.executors[site.name]
        watch = Watch(pool) if site.has_queue else None
        yield Engine(kernel, app, site, run_folder.resolve(), results, watch)


@contextmanager
def loaded(
    site: Site,
    shape: Shape,
    run_folder: Path,
    memoizer: Any = None,
    least_s: float | None = None,
) -> Iterator[Any]:
    """Parsl on a site; what still runs at the end is stopped.

    Args:
        shape: of the smallest tasks.
        least_s: see `Site.foresee`.
    """
    site.sweep(run_folder)
    site.foresee(run_folder / "parsl", least_s)
    config = site.config(shape, run_folder / "parsl", memoizer)
    try:
        with parsl.load(config) as kernel:
            for executor in _pools(kernel):
                client = executor.command_client
                client.run = partial(client.run, timeout_s=ANSWER_S)
            try:
                yield kernel
            finally:
                broken(kernel)
                # All is given back, and nothing need be asked for it: where a signal went to all
                # processes of a job, the interchange may be ending, and would never answer.
                for executor in _pools(kernel):
                    executor.connected_managers = list
    finally:
        try:
            site.sweep(run_folder)
        except SiteError as error:  # how it went is not to be lost over it
            print(f"n3lo: warning: {error}", file=sys.stderr)


def broken(kernel: Any) -> EngineError | None:
    """What is wrong with Parsl, if anything: it does not notice itself."""
    for executor in _pools(kernel):
        interchange = executor.interchange_proc
        if interchange.poll() is not None:
            error = EngineError(f"Parsl's interchange ended with status {interchange.returncode}")
            # Or Parsl, at its end, would wait for an answer of the interchange for ever.
            if not executor.bad_state_is_set:
                executor.set_bad_state_and_fail_all(error)
            return error
    return None


def _pools(kernel: Any) -> list[Any]:
    """The executors whose workers are other processes; Parsl has one of threads for itself."""
    return [each for each in kernel.executors.values() if hasattr(each, "interchange_proc")]


def _failure(error: BaseException) -> Failure:
    """The reason in an exception that came back from a worker."""
    if isinstance(error, WorkerLost):
        message = "its worker was killed, by hand or for want of memory"
        return Failure(reason="signal", message=message)
    if isinstance(error, ManagerLost):
        message = "its pilot is gone: cancelled or preempted, or its node died"
        return Failure(reason="node_lost", message=message)
    try:
        return from_dict(Failure, json.loads(str(error)))
    except (ValueError, TypeError):
        return Failure(reason="launch_failed", message=f"{type(error).__name__}: {error}")
