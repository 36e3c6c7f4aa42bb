"""Machines with a batch system: pilots wait in its queue, and tasks run in them as steps.

A pilot is one job, of whole nodes. Its first node, or the launch node that the machine has for it,
holds a pool of workers; each starts one task at a time by the machine's own launcher, which places
its ranks on cores and GPUs of the pilot that are free.
"""

from __future__ import annotations

import hashlib
import math
import shlex
import subprocess
import sys
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from sites.base import Site, SiteError, threads
from sites.launchers import Shape

POLL_S = 10  # between looks at the queue
COMMAND_S = 60  # a busy batch system answers late
LAST_START_S = 300  # before the end of a pilot


@dataclass(frozen=True, kw_only=True)
class Batch(Site):
    """A pilot, and what its nodes are.

    `setup` is a line of shell that makes the environment of the ranks, such as
    "module load gcc openmpi". `interface` is the network between the nodes and the host of the
    driver, such as "ib0"; where it is not given, the one that this host's name stands for.
    """

    cancels: ClassVar[str]  # the program that takes jobs out of the queue

    nodes: int  # of a pilot
    walltime_min: int  # of a pilot
    cores_per_node: int
    gpus_per_node: int = 0
    pilots: int = 1  # at once
    account: str | None = None
    setup: str = ""
    interface: str | None = None

    def __post_init__(self) -> None:
        for key in ("nodes", "walltime_min", "cores_per_node", "pilots"):
            value = getattr(self, key)
            if value < 1:
                raise SiteError(f"--set {key}={value}: it must be at least 1")
        if self.gpus_per_node < 0:
            raise SiteError(f"--set gpus_per_node={self.gpus_per_node}: it must be at least 0")

    @abstractmethod
    def provider(self, mark: str) -> Any:
        """Parsl's, whose jobs carry a mark in the queue."""

    @abstractmethod
    def queued(self) -> list[tuple[str, str]]:
        """The jobs of this user: their numbers and marks."""

    def sweep(self, folder: Path) -> int:
        jobs = [job for job, mark in self.queued() if mark == mark_of(folder)]
        if jobs:
            ask([self.cancels, *jobs])
        return len(jobs)

    def nodes_of(self, shape: Shape) -> int:
        """Nodes that a task of this shape is spread over.

        Raises:
            SiteError: a rank does not fit on a node.
        """
        by_cores = self.cores_per_node // shape.cores_per_rank
        if by_cores == 0:
            raise SiteError(
                f"a rank needs {shape.cores_per_rank} cores (layout.cores_per_rank) and a node of "
                f"{self.name} has {self.cores_per_node} (cores_per_node)"
            )
        if shape.gpus_per_rank == 0:
            return math.ceil(shape.num_ranks / by_cores)
        by_gpus = self.gpus_per_node // shape.gpus_per_rank
        if by_gpus == 0:
            raise SiteError(
                f"a rank needs {shape.gpus_per_rank} GPUs (layout.gpus_per_rank) and a node of "
                f"{self.name} has {self.gpus_per_node} (gpus_per_node)"
            )
        return math.ceil(shape.num_ranks / min(by_cores, by_gpus))

    def num_slots(self, shape: Shape) -> int:
        return self.pilots * self._slots_of_pilot(shape)

    def node_share(self, shape: Shape) -> float:
        nodes = self.nodes_of(shape)
        return 1 / self._tasks_on_node(shape) if nodes == 1 else nodes

    def environment(self, shape: Shape) -> dict[str, str]:
        return threads(shape.cores_per_rank)

    def config(self, shape: Shape, run_dir: Path, memoizer: Any) -> Any:
        from parsl.config import Config
        from parsl.executors import HighThroughputExecutor
        from parsl.jobs.error_handlers import windowed_error_handler

        return Config(
            executors=[
                HighThroughputExecutor(
                    label=self.name,
                    address=self._address(),
                    loopback_address="127.0.0.1",
                    encrypted=True,
                    interchange_launch_cmd=[
                        *(sys.executable, "-P", "-m", "sites.detached"),
                        *(str(run_dir / "interchange.txt"), "interchange.py"),
                    ],
                    max_workers_per_node=self._slots_of_pilot(shape),
                    cores_per_worker=1e-6,  # the slots are counted here, not by Parsl
                    heartbeat_period=5,  # how soon a killed worker is noticed, in seconds
                    heartbeat_threshold=20,  # and a pilot that ended
                    drain_period=self._drain_s(),
                    block_error_handler=partial(windowed_error_handler, threshold=3),
                    provider=self.provider(mark_of(run_dir.parent)),
                )
            ],
            memoizer=memoizer,
            run_dir=str(run_dir),
            retries=0,  # workflow/campaign.py retries, so that each attempt is a row of the ledger
            strategy_period=1,  # how soon pilots are asked for, in seconds
            usage_tracking=0,
        )

    def _drain_s(self) -> int:
        """Seconds after which a pilot begins no task: it would be cut off soon."""
        walltime_s = 60 * self.walltime_min
        return max(walltime_s - LAST_START_S, walltime_s // 2)

    def _slots_of_pilot(self, shape: Shape) -> int:
        nodes = self.nodes_of(shape)
        if nodes > self.nodes:
            raise SiteError(
                f"a task needs {nodes} nodes ({shape.num_ranks} ranks x {shape.cores_per_rank} "
                f"cores and {shape.gpus_per_rank} GPUs, on nodes of {self.cores_per_node} and "
                f"{self.gpus_per_node}) and a pilot has {self.nodes}: ask for fewer ranks under "
                f"[layout], or --set nodes={nodes}"
            )
        return self.nodes * self._tasks_on_node(shape) if nodes == 1 else self.nodes // nodes

    def _tasks_on_node(self, shape: Shape) -> int:
        by_cores = self.cores_per_node // shape.num_cores
        return min(by_cores, self.gpus_per_node // shape.num_gpus) if shape.num_gpus else by_cores

    def _address(self) -> str:
        """Where workers reach the driver."""
        from parsl.addresses import address_by_hostname, address_by_interface

        try:
            if self.interface is None:
                return str(address_by_hostname())
            return str(address_by_interface(self.interface))
        except OSError as error:
            raise SiteError(
                f"--set interface={self.interface}: this host has no address there "
                f"({error.strerror or error}); 'ip address' lists the interfaces"
            ) from None

    def _worker_init(self) -> str:
        """What the batch script does first: the same programs as here, and what the user wants."""
        end = f"export N3LO_PILOT_END=$(($(date +%s) + {60 * self.walltime_min}))"
        lines = [end, "set -e", *([self.setup] if self.setup else []), "set +e"]
        lines.append(f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH")
        return "\n".join(lines)


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


def mark_of(folder: Path) -> str:
    """What jobs of a run folder are known by in the queue."""
    return "n3lo-" + hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
