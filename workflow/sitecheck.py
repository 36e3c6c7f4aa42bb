"""`sites check`: try a machine with a small pilot, and say what is to be mended before a study."""

from __future__ import annotations

import dataclasses
import secrets
import shlex
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import parsl
from rich.console import Console as Terminal

from apps.contract import write_text
from apps.scout import LIMIT_S, REPORTS, STDERR, TOKEN, Answer, Report, run_probe, versions
from sites.base import Site, SiteError
from sites.batch import Batch
from sites.launchers import Shape
from workflow import runfolder
from workflow.console import terminal
from workflow.findings import Expected, findings, plural
from workflow.tasks import broken, loaded

NODES, WALLTIME_MIN = 2, 10  # of the pilot, at most
WORKER_S = 180  # from the start of a pilot until its worker must be here
ANSWER_S = LIMIT_S + 60  # from then on until the ranks' answer must be
LOOK_S = 0.5
TAIL = 8  # lines of a job's error file


def check(site: Site, runs: Path) -> int:
    """Run one small program on a site, as tasks are run; say what was found, and what to mend.

    Returns:
        The exit status: 1 if something is to be mended.

    Raises:
        N3LOError, SiteError: it could not even be tried.
    """
    out = terminal()
    began = time.monotonic()
    site.check()
    small, shape, num_nodes = smallest(site)
    asked = Expected(
        num_ranks=shape.num_ranks,
        num_nodes=num_nodes,
        cores=shape.cores_per_rank,
        gpus=shape.gpus_on(num_nodes),
        settings=frozenset(each.name for each in dataclasses.fields(site)),
    )
    small.num_slots(shape)
    out.print(f"site {site.name}: the programs that it needs are on PATH")
    folder = runs / "sites" / site.name
    with runfolder.taken(folder):
        to_mend = _tried(small, shape, asked, folder.resolve(), out)
    out.print(f"the check took {time.monotonic() - began:.0f} s; its files are in {folder}")
    if not to_mend:
        out.print("all is well")
        return 0
    out.print("to mend:")
    for line in to_mend:
        out.print(f"  {line}", soft_wrap=True)
    return 1


def smallest(site: Site) -> tuple[Site, Shape, int]:
    """A site whose pilot is small, ranks that fill it, and how many nodes they fill.

    One rank a node; on one node two, where it can be: one alone would not need MPI.
    """
    if isinstance(site, Batch):
        nodes = min(site.nodes, NODES)
        walltime_min = min(site.walltime_min, WALLTIME_MIN)
        site = dataclasses.replace(site, nodes=nodes, walltime_min=walltime_min, pilots=1)
        cores, gpus = site.cores_per_node, site.gpus_per_node
        if nodes > 1:
            shape = Shape(num_ranks=nodes, cores_per_rank=cores, gpus_per_rank=gpus)
            return site, shape, nodes
    else:
        cores, gpus = site.num_slots(Shape(num_ranks=1)), _num_gpus(site)
    ranks = min(cores, 2)
    shape = Shape(
        num_ranks=ranks,
        cores_per_rank=cores // ranks,
        gpus_per_rank=gpus // ranks or gpus,
        num_masters=1 if gpus == 1 and ranks == 2 else 0,  # they use none
    )
    return site, shape, 1


def _num_gpus(site: Site) -> int:
    """As many as a task could ask for."""
    number = 0
    while True:
        try:
            site.num_slots(Shape(num_ranks=1, gpus_per_rank=number + 1))
        except SiteError:
            return number
        number += 1


def _tried(site: Site, shape: Shape, asked: Expected, folder: Path, out: Terminal) -> list[str]:
    """Run the program; what is to be mended."""
    shutil.rmtree(folder / REPORTS, ignore_errors=True)
    shutil.rmtree(folder / "parsl", ignore_errors=True)  # of the last check
    token = secrets.token_hex(8)
    write_text(folder / TOKEN, token)
    how = {
        "command": site.command(shape),
        "environment": site.environment(shape),
        "need": site.need(shape),
        "avoid": [],
    }
    with loaded(site, shape, folder) as kernel:
        pilot = _Pilot(kernel.executors[site.name], out, site.has_queue)
        out.print(_headline(asked, pilot.executor.address))
        app = parsl.python_app(run_probe, data_flow_kernel=kernel)
        future = app(how=how, folder=str(folder), token=token, num_ranks=shape.num_ranks)
        reason = _waited(future, kernel, pilot)
    if reason is not None:
        _show_job_errors(folder, out)
        return [reason]
    if (error := future.exception()) is not None:
        return [f"the worker could not start the ranks: {_in_short(error)}"]
    answer = Answer.of(future.result())
    _show(answer, site, pilot, out)
    return [*_of_launcher(answer, folder), *findings(answer.reports, versions(), asked)]


# -- waiting ---------------------------------------------------------------------------------------


def _waited(future: Future[Any], kernel: Any, pilot: _Pilot) -> str | None:
    """Why there will be no answer; None once there is one."""
    while not future.done():
        reason = broken(kernel) or pilot.look()
        if reason is not None:
            return str(reason)
        time.sleep(LOOK_S)
    return None


@dataclass
class _Pilot:
    """The job of a check, as it is seen from here; says what becomes of it."""

    executor: Any
    out: Terminal
    is_batch: bool
    began: float = field(default_factory=time.time)
    state: str = ""
    running_since: float | None = None
    worker_since: float | None = None

    def look(self) -> str | None:
        """Say what is new; why it is of no use to wait longer, or None."""
        from parsl.jobs.states import JobState

        status = self.executor.status_facade.get("0")
        if status is None:
            return None
        job = self.executor.blocks_to_job_id.get("0")
        self._say_state(job, status.state.name)
        if self.worker_since is None and self.executor.connected_managers():
            self.worker_since = time.time()
            self.out.print(f"a worker came after {self.worker_since - self.began:.0f} s")
        if job is None:
            said = _in_short(status.message)
            return f"no job could be submitted: {said.rpartition('stderr=')[2] or said}"
        if status.terminal:
            return self._ended(job, status.state.name)
        if status.state == JobState.RUNNING and self.running_since is None:
            self.running_since = time.time()
        return self._too_late(job)

    def _say_state(self, job: str | None, state: str) -> None:
        said = {"PENDING": "is in the queue (Ctrl-C takes it out)", "RUNNING": "runs"}
        if self.is_batch and job is not None and self.worker_since is None:
            if state != self.state and state in said:
                self.out.print(f"job {job} {said[state]}")
            self.state = state

    def _ended(self, job: str, state: str) -> str:
        if self.worker_since is not None:
            return (
                f"{self._name(job)} ended ({state}) before its ranks did: is walltime_min enough?"
            )
        return f"{self._name(job)} ended before a worker came; {self._way_out()}"

    def _too_late(self, job: str) -> str | None:
        now = time.time()
        if self.worker_since is not None:
            if now - self.worker_since > ANSWER_S:
                return f"the worker did not answer in {ANSWER_S} s, though the ranks have a limit"
        elif self.running_since is not None and now - self.running_since > WORKER_S:
            return f"{self._name(job)} runs, and in {WORKER_S} s no worker came; {self._way_out()}"
        return None

    def _name(self, job: str) -> str:
        return f"job {job}" if self.is_batch else "the pool of workers"

    def _way_out(self) -> str:
        address = self.executor.address
        way_out = "see what it wrote, above"
        if self.is_batch:
            way_out += (
                f"; nodes must reach this host at {address} (else --set interface=...), and see "
                f"--runs and this Python environment on a file system that they share"
            )
        return way_out


# -- what is said ----------------------------------------------------------------------------------


def _headline(asked: Expected, address: str) -> str:
    return (
        f"asked for: {plural(asked.num_ranks, 'rank')} on {plural(asked.num_nodes, 'node')}, "
        f"{plural(asked.cores, 'core')} each, {plural(asked.gpus, 'GPU')} a node; workers reach "
        f"this host at {address}"
    )


def _show(answer: Answer, site: Site, pilot: _Pilot, out: Terminal) -> None:
    if answer.pilot_end is not None and isinstance(site, Batch) and site.has_queue:
        queued_s = max(0.0, answer.pilot_end - 60 * site.walltime_min - pilot.began)
        out.print(f"of these it waited {queued_s:.0f} s in the queue")
    out.print(f"launched on {answer.host}: {shlex.join(answer.line)}", soft_wrap=True)
    if answer.reports:
        start_s = max(report.began for report in answer.reports) - answer.launched
        out.print(
            f"{plural(len(answer.reports), 'rank')} began after {max(0.0, start_s):.1f} s, and all "
            f"took {answer.seconds:.1f} s"
        )
    for report in sorted(answer.reports, key=lambda each: (each.host, each.rank or 0)):
        for line in _of_rank(report):
            out.print(line, soft_wrap=True)


def _of_rank(report: Report) -> Iterator[str]:
    programs = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    gpus = _counted(report.gpus) if report.gpus else "no GPU"
    number = "?" if report.rank is None else report.rank
    yield f"rank {number} on {report.host}: {plural(report.cores, 'core')}, {gpus}; {programs}"
    parts = []
    if report.mpi_s is not None:
        ranks = plural(report.size or 0, "rank")
        parts.append(f"{report.mpi_library}, {ranks}, ready in {report.mpi_s:.2f} s")
    if report.torch_s is not None:
        parts.append(f"torch imported in {report.torch_s:.1f} s")
    if report.free_gb is not None:
        parts.append(f"{report.free_gb:.0f} GB free in --runs")
    if report.temporary is not None and report.temporary_gb is not None:
        parts.append(f"{report.temporary_gb:.0f} GB in {report.temporary}")
    yield f"  {'; '.join(parts)}"


def _counted(names: list[str]) -> str:
    """4 x A100."""
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _of_launcher(answer: Answer, folder: Path) -> list[str]:
    path = folder / STDERR
    if answer.exit_code is None:
        return [f"the ranks did not end in {LIMIT_S} s, and were stopped: see {path}"]
    if answer.exit_code != 0:
        last = _tail(path, 1) or ["nothing"]
        return [
            f"'{answer.line[0]}' ended with status {answer.exit_code}, and said last: "
            f"{last[0]} (all of it is in {path})"
        ]
    return []


def _show_job_errors(folder: Path, out: Terminal) -> None:
    """Show the end of what a job wrote; Parsl has its files beside its scripts."""
    for path in folder.glob("parsl/*/submit_scripts/*block-0.*err"):
        lines = _tail(path, TAIL)
        out.print(f"{path}{':' if lines else ' is empty'}", soft_wrap=True)
        for line in lines:
            out.print(f"  | {line}", soft_wrap=True)


def _tail(path: Path, number: int) -> list[str]:
    text = path.read_text(errors="replace") if path.exists() else ""
    return [line.rstrip()[:300] for line in text.splitlines() if line.strip(" -=*\t\0")][-number:]


def _in_short(error: object) -> str:
    return " ".join(str(error).split())[:400]
