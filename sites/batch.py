"""Machines with a batch system: pilots wait in its queue, and tasks run in them as steps.

A pilot is one job, of whole nodes. Its first node, or the launch node that the machine has for it,
holds a pool of workers; each starts one task at a time by the machine's own launcher, which places
its ranks on cores and GPUs of the pilot that are free.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from sites import executor
from sites.base import SettingError, Site, SiteError, threads
from sites.launchers import Shape
from sites.script import Pilots, script_of

POLL_S = 10  # between looks at the queue
COMMAND_S = 60  # a busy batch system answers late
LEAVE_S = 300  # for a job to leave the queue, its epilogue included
JOBS = "jobs"  # in a run folder: scripts and output of its drivers that are jobs
LAST_START_FILE = "last_start_s"  # in Parsl's folder: as long before its end a pilot begins no task
LAST_START_S = 300.0  # as long as nothing is known of the tasks
END_S = 45.0  # at the end of a pilot, for what runs to be stopped (apps.launch.PILOT_GRACE_S)


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A job around this process, of whole nodes. What its batch system does not say is None."""

    number: str
    nodes: int
    cores_per_node: int | None = None
    gpus_per_node: int | None = None
    end: float | None = None  # as of time.time()
    is_ours: bool = False  # `Batch.submit` asked for it


@dataclass(frozen=True, kw_only=True)
class Batch(Site):
    """A pilot, and what its nodes are."""

    has_queue = True
    system: ClassVar[str]  # the batch system's name
    cancels: ClassVar[str]  # the program that takes jobs out of the queue
    hosts_of_job: ClassVar[str]  # shell words that print the names of a job's nodes
    job_number: ClassVar[str]  # a shell variable
    whole_nodes: ClassVar[bool] = False  # a node runs one step at a time
    unset: ClassVar[tuple[str, ...]] = ()  # variables of a job that its launcher stumbles over

    nodes: Annotated[int, "nodes of a pilot, which is one job"]
    walltime_min: Annotated[int, "minutes that a pilot may last"]
    cores_per_node: Annotated[int, "cores that ranks may use on each node"]
    gpus_per_node: Annotated[int, "GPUs that ranks may use on each node"] = 0
    pilots: Annotated[int, "pilots at once; one that ends is followed by another"] = 1
    steps: Annotated[int | None, "tasks at once in a pilot; none: as many as fit"] = None
    account: Annotated[str | None, "account or project whose time is used"] = None
    setup: Annotated[
        str, "line of shell for the environment of the ranks, such as module load gcc openmpi"
    ] = ""
    interface: Annotated[
        str | None,
        "network between the nodes and this host, such as ib0; none: the one of this host's name",
    ] = None

    def __post_init__(self) -> None:
        for key in ("nodes", "walltime_min", "cores_per_node", "pilots", "steps"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise SettingError(key, value, "it must be at least 1")
        if self.gpus_per_node < 0:
            raise SettingError("gpus_per_node", self.gpus_per_node, "it must be at least 0")

    def check(self) -> None:
        for program in self.programs:
            if shutil.which(program) is None:
                raise SiteError(
                    f"{self.system} is missing: there is no '{program}' on PATH; start the driver "
                    f"on a login node of the cluster"
                )

    @classmethod
    def allocation(cls) -> Allocation | None:
        """The job of this batch system around this process, if any."""
        job = os.environ.get(cls.job_number.removeprefix("$"))
        if not job:
            return None
        nodes = len(ask(["bash", "-c", cls.hosts_of_job]))
        if nodes == 0:
            raise SiteError(f"job {job} has no nodes: '{cls.hosts_of_job}' names none")
        try:
            found = cls.job_facts(job)
        except (SiteError, OSError, ValueError):  # not on every node, or in other words
            found = {}
        if os.environ.get("N3LO_JOB") == job:  # a script of ours knows by itself
            found |= {"end": float(os.environ["N3LO_PILOT_END"]), "is_ours": True}
        return Allocation(number=job, nodes=nodes, **found)

    @classmethod
    def job_facts(cls, job: str) -> dict[str, Any]:
        """What the batch system says of the job around this process, of an `Allocation`.

        Raises:
            SiteError, OSError: it cannot be asked here.
        """
        return {}

    @abstractmethod
    def provider(self, mark: str) -> Any:
        """Parsl's, whose jobs carry a mark in the queue."""

    @abstractmethod
    def queued(self) -> list[tuple[str, str]]:
        """The jobs of this user: their numbers and marks."""

    def submit(self, folder: Path, command: list[str]) -> str:
        """Have a job, as large as a pilot, run a command for a run folder.

        Returns:
            Its number.

        Raises:
            SiteError: the batch system does not take it.
        """
        from parsl.providers.errors import SubmitException

        scripts = folder.resolve() / JOBS
        scripts.mkdir(exist_ok=True)
        provider = self.provider(mark_of(folder))
        provider.script_dir = str(scripts)
        said = ""
        try:
            job = provider.submit(shlex.join(command), 1)
        except SubmitException as error:
            job, said = None, " ".join(str(error.stderr).split())
        if job is None:
            raise SiteError(f"{self.system} did not take the job{said and ': '}{said}")
        return str(job)

    def sweep(self, folder: Path) -> int:
        jobs = self._surely_left(folder)
        if jobs:
            ask([self.cancels, *jobs])
        deadline = time.monotonic() + LEAVE_S
        while left := self._surely_left(folder):  # its ranks may be at work still
            if time.monotonic() > deadline:
                raise SiteError(
                    f"job {', '.join(left)} of an earlier start does not leave the queue; see to "
                    f"it by hand: {self.cancels} {' '.join(left)}"
                )
            time.sleep(1)
        return len(jobs)

    def _surely_left(self, folder: Path) -> list[str]:
        """`left`, asked again where a busy batch system does not answer."""
        deadline = time.monotonic() + COMMAND_S
        while True:
            try:
                return self.left(folder)
            except SiteError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)

    def left(self, folder: Path) -> list[str]:
        """The jobs of a run folder in the queue, by their numbers."""
        return [job for job, mark in self.queued() if mark == mark_of(folder)]

    def nodes_of(self, shape: Shape) -> int:
        """Nodes that a task of this shape is spread over, as evenly as can be.

        Raises:
            SiteError: a rank does not fit on a node.
        """
        by_cores = self.cores_per_node // shape.cores_per_rank
        if by_cores == 0:
            raise SiteError(
                f"a rank needs {shape.cores_per_rank} cores (layout.cores_per_rank) and a node of "
                f"{self.name} has {self.cores_per_node} (cores_per_node)"
            )
        if shape.gpus_per_rank > self.gpus_per_node:
            raise SiteError(
                f"a rank needs {shape.gpus_per_rank} GPUs (layout.gpus_per_rank) and a node of "
                f"{self.name} has {self.gpus_per_node} (gpus_per_node)"
            )
        if shape.outlives_ranks:
            raise SiteError(
                f"training.exchange.tolerate_worker_loss needs Open MPI's mpirun, which is that of "
                f"site 'local'; set it to false on {self.name}"
            )
        return next(
            nodes
            for nodes in itertools.count(1)
            if shape.ranks_on(nodes) <= by_cores and shape.gpus_on(nodes) <= self.gpus_per_node
        )

    def num_slots(self, shape: Shape) -> int:
        return self.pilots * self._slots_of_pilot(shape)

    def node_share(self, shape: Shape) -> float:
        nodes = self.nodes_of(shape)
        return 1 / self._tasks_on_node(shape) if nodes == 1 else nodes

    def need(self, shape: Shape) -> dict[str, int]:
        nodes = self.nodes_of(shape)
        ranks, cores, gpus = shape.ranks_on(nodes), shape.cores_per_rank, shape.gpus_on(nodes)
        if self.whole_nodes:
            ranks, cores, gpus = 1, self.cores_per_node, self.gpus_per_node
        return {"nodes": nodes, "ranks": ranks, "cores_per_rank": cores, "gpus": gpus}

    def environment(self, shape: Shape) -> dict[str, str]:
        return threads(shape.cores_per_rank)

    def config(self, shape: Shape, run_dir: Path, memoizer: Any) -> Any:
        return self._config(shape, run_dir, memoizer, self._address())

    def foresee(self, run_dir: Path, least_s: float | None) -> None:
        lasts_s = LAST_START_S if least_s is None else 1.25 * least_s + END_S
        run_dir.mkdir(parents=True, exist_ok=True)
        beside = run_dir / f".{LAST_START_FILE}"
        # Not all of it, or tasks that need more would never begin.
        beside.write_text(f"{min(lasts_s, 40 * self.walltime_min):.0f}\n")
        os.replace(beside, run_dir / LAST_START_FILE)

    def pilots_of(self, shape: Shape, run_dir: Path) -> Pilots | None:
        [pool] = self._config(shape, run_dir, None, "<address>").executors
        return Pilots(number=self.pilots, script=script_of(pool, run_dir))

    def _config(self, shape: Shape, run_dir: Path, memoizer: Any, address: str) -> Any:
        return executor.config(
            self.name,
            self.provider(mark_of(run_dir.parent)),
            run_dir,
            memoizer,
            address=address,
            max_workers_per_node=self._slots_of_pilot(shape),
            heartbeat_period=5,  # how soon a killed worker is noticed, in seconds
            heartbeat_threshold=20,  # and a pilot that ended
            strategy_period=1,
            **self._pool(run_dir),
        )

    def _pool(self, run_dir: Path) -> dict[str, Any]:
        """What else the pool of workers in a pilot is told."""
        return {"last_start": run_dir.absolute() / LAST_START_FILE}

    @property
    def blocks(self) -> dict[str, Any]:
        """What every provider of Parsl is told of pilots."""
        from parsl.launchers import SimpleLauncher

        return {
            "nodes_per_block": self.nodes,
            "init_blocks": 1,
            "min_blocks": 0,
            "max_blocks": self.pilots,
            # Parsl takes the workers of a pilot for those of each of its nodes.
            "parallelism": self.nodes,
            "walltime": f"{self.walltime_min // 60:02d}:{self.walltime_min % 60:02d}:00",
            "cmd_timeout": COMMAND_S,
            "launcher": SimpleLauncher(),
        }

    def _slots_of_pilot(self, shape: Shape) -> int:
        nodes = self.nodes_of(shape)
        if nodes > self.nodes:
            raise SiteError(
                f"a task needs {nodes} nodes ({shape.num_ranks} ranks x {shape.cores_per_rank} "
                f"cores and {shape.gpus_per_rank} GPUs, on nodes of {self.cores_per_node} and "
                f"{self.gpus_per_node}) and a pilot has {self.nodes}: ask for fewer ranks under "
                f"[layout], or --set nodes={nodes}"
            )
        fit = self.nodes * self._tasks_on_node(shape) if nodes == 1 else self.nodes // nodes
        return fit if self.steps is None else min(fit, self.steps)

    def _tasks_on_node(self, shape: Shape) -> int:
        if self.whole_nodes:
            return 1
        by_cores = self.cores_per_node // shape.num_cores
        return min(by_cores, self.gpus_per_node // shape.num_gpus) if shape.num_gpus else by_cores

    def _address(self) -> str:
        """Where workers reach the driver."""
        from parsl.addresses import address_by_interface

        if self.interface is not None:
            try:
                return str(address_by_interface(self.interface))
            except OSError as error:
                raise SiteError(
                    f"--set interface={self.interface}: this host has no address there "
                    f"({error.strerror or error}); 'ip address' lists the interfaces"
                ) from None
        name, lacks = socket.gethostname(), ""
        try:
            address = socket.gethostbyname(name)
        except OSError as error:
            lacks = f"is not known here ({error.strerror or error})"
        else:
            if not address.startswith("127."):
                return address
            lacks = f"stands for {address}, which no other node reaches"
        raise SiteError(
            f"this host's name, {name}, {lacks}; add --set interface=..., the network that the "
            f"nodes share: 'ip address' lists them"
        )

    def _worker_init(self) -> str:
        """What the batch script does first: the same programs as here, and what the user wants."""
        lines = [
            f"export N3LO_PILOT_END={self._end()}",
            f"export N3LO_JOB={self.job_number}",
            executor.room(self.hosts_of_job, self._node()),
            f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH",
        ]
        if self.setup:  # last, so that what it puts on PATH comes first
            lines += [self.setup, "[ $? -eq 0 ] || exit 1"]
        if self.unset:
            lines.append(f"unset {' '.join(self.unset)}")
        return "\n".join(lines)

    def _end(self) -> str:
        """When a pilot ends, as a shell word."""
        return f"$(($(date +%s) + {60 * self.walltime_min}))"

    def _node(self) -> dict[str, Any]:
        """Each of a pilot's nodes as an `apps.room.Node`."""
        return {
            "cores": [str(core) for core in range(self.cores_per_node)],
            "gpus": [str(gpu) for gpu in range(self.gpus_per_node)],
        }


def ask(line: list[str], nothing: str | None = None) -> list[str]:
    """What a program of the batch system answers, in lines.

    Args:
        nothing: what it complains of where there are no jobs.

    Raises:
        SiteError: it fails, or does not answer.
    """
    try:
        answer = subprocess.run(
            line, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise SiteError(f"'{shlex.join(line)}' gave no answer in {COMMAND_S} s") from None
    if answer.returncode and not (nothing and nothing in answer.stderr):
        raise SiteError(f"'{shlex.join(line)}': {' '.join(answer.stderr.split())}")
    return answer.stdout.splitlines()


def seconds_of(text: str) -> int | None:
    """Of "2-04:30:00" or "30:00", as batch systems print times; None of such as UNLIMITED."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+)+)", text)
    if found is None:
        return None
    seconds = 0
    for part in found[2].split(":"):
        seconds = 60 * seconds + int(part)
    return 86400 * int(found[1] or 0) + seconds


def mark_of(folder: Path) -> str:
    """What jobs of a run folder are known by in the queue."""
    return "n3lo-" + hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
