"""Slurm with srun, and machines of known shape that have it."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

from sites.base import SettingError
from sites.batch import POLL_S, Batch, ask, seconds_of
from sites.launchers import Shape, srun

# Of the pilot, and not of its steps: srun would take them for its own options.
UNSET = (
    "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_CPUS_PER_TASK", "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_GPU", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU",
    "SLURM_MEM_PER_GPU", "SLURM_CPUS_PER_GPU", "SLURM_TRES_PER_TASK",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Slurm(Batch):
    """Any Slurm cluster: pilots by sbatch, tasks as steps by srun."""

    name = "slurm"
    programs = ("sbatch", "squeue", "scancel", "srun")
    system = "Slurm"
    cancels = "scancel"
    hosts_of_job = 'scontrol show hostnames "$SLURM_JOB_NODELIST"'
    job_number = "$SLURM_JOB_ID"
    unset = UNSET

    partition: Annotated[str | None, "partition, as of sbatch"] = None
    qos: Annotated[str | None, "quality of service, as of sbatch"] = None
    constraint: Annotated[str | None, "kind of nodes, as of sbatch"] = None
    mpi: Annotated[str | None, "how ranks find each other, as of srun; none: the site's own"] = (
        "pmix"
    )
    memory_gb_per_node: Annotated[
        int | None, "GB that a pilot asks for; each task has its share, and else what it needs"
    ] = None
    threads_per_core: Annotated[
        int | None,
        "hardware threads that ranks use of a core, where Slurm counts each as a CPU; none: all",
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("memory_gb_per_node", "threads_per_core"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise SettingError(key, value, "it must be at least 1")

    @classmethod
    def job_facts(cls, job: str) -> dict[str, Any]:
        # "4(x2),8" and "a100:4", with or without what is in parentheses and before the colon.
        cores = re.findall(r"(?:^|,)(\d+)", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        gpus = os.environ.get("SLURM_GPUS_ON_NODE") or os.environ.get("SLURM_GPUS_PER_NODE") or "0"
        facts: dict[str, Any] = {"gpus_per_node": int(gpus.rpartition(":")[2])}
        if cores:
            facts["cores_per_node"] = min(map(int, cores))
        if end := os.environ.get("SLURM_JOB_END_TIME"):
            return {**facts, "end": float(end)}
        [left] = ask(["squeue", "--noheader", "--job", job, "--format", "%L"])
        left_s = seconds_of(left)
        return facts if left_s is None else {**facts, "end": time.time() + left_s}

    def command(self, shape: Shape) -> list[str]:
        return srun(
            shape,
            self.nodes_of(shape),
            mpi=self.mpi,
            threads_per_core=self.threads_per_core,
            memory_mb=int(1000 * (self.memory_gb_per_node or 0) * self._share_of_node(shape)),
            has_gpus=self.gpus_per_node > 0,
        )

    def _share_of_node(self, shape: Shape) -> float:
        """Of cores or GPUs, whichever is more: so much memory leaves room for what fits beside."""
        if self.nodes_of(shape) > 1:  # has them whole
            return 1.0
        cores = shape.num_cores / self.cores_per_node
        return max(cores, shape.num_gpus / self.gpus_per_node) if shape.num_gpus else cores

    def provider(self, mark: str) -> Any:
        from parsl.providers import SlurmProvider

        class Polled(SlurmProvider):  # type: ignore[misc]
            status_polling_interval = POLL_S

        # Requeued after the loss of a node it would wait for minutes; another is submitted at once.
        options = [f"#SBATCH --comment={mark}", "#SBATCH --no-requeue"]
        if self.gpus_per_node:
            options.append(f"#SBATCH --gres=gpu:{self.gpus_per_node}")
        if self.memory_gb_per_node is not None:
            options.append(f"#SBATCH --mem={self.memory_gb_per_node * 1000}M")
        return Polled(
            partition=self.partition,
            account=self.account,
            qos=self.qos,
            constraint=self.constraint,
            scheduler_options="\n".join(options),
            worker_init=self._worker_init(),
            exclusive=True,
            **self.blocks,
        )

    def queued(self) -> list[tuple[str, str]]:
        lines = ask(["squeue", "--me", "--noheader", "--format", "%i|%k"])
        return [(job, mark) for job, _, mark in (line.partition("|") for line in lines)]


# Machines of known shape. What is not here, such as the account, is the user's to say.


@dataclass(frozen=True, kw_only=True)
class PizDaint(Slurm):
    """CSCS's Cray XC50, retired in late 2024: 1 P100 and 12 cores a node."""

    name = "piz_daint"

    account: str = field()  # required, unlike that of the class above
    constraint: str | None = "gpu"
    mpi: str | None = None
    threads_per_core: int | None = 1
    cores_per_node: int = 12
    gpus_per_node: int = 1


@dataclass(frozen=True, kw_only=True)
class DaintAlps(Slurm):
    """CSCS's Daint on Alps: 4 GH200 and 4 x 72 cores a node, of whose memory 450 GB are usable.

    Source: https://docs.cscs.ch, clusters/daint and running/slurm (2025).
    """

    name = "daint_alps"

    account: str = field()  # required, unlike that of the class above
    mpi: str | None = None
    cores_per_node: int = 288
    gpus_per_node: int = 4
    memory_gb_per_node: int | None = 450
    interface: str | None = "hsn0"


@dataclass(frozen=True, kw_only=True)
class Frontier(Slurm):
    """OLCF's: 4 MI250X, which are 8 GPUs, and 56 usable cores a node.

    More than some 100 steps at once load the controller.
    Source: https://docs.olcf.ornl.gov/systems/frontier_user_guide.html (2025).
    """

    name = "frontier"

    account: str = field()  # required, unlike that of the class above
    mpi: str | None = None
    steps: int | None = 100
    cores_per_node: int = 56
    gpus_per_node: int = 8
    interface: str | None = "hsn0"


@dataclass(frozen=True, kw_only=True)
class Perlmutter(Slurm):
    """NERSC's GPU nodes: 4 A100 and 64 cores.

    Source: https://docs.nersc.gov/systems/perlmutter/architecture (2025).
    """

    name = "perlmutter"

    account: str = field()  # required, unlike that of the class above
    constraint: str | None = "gpu"
    qos: str | None = "regular"
    mpi: str | None = None
    threads_per_core: int | None = 1
    cores_per_node: int = 64
    gpus_per_node: int = 4
    interface: str | None = "hsn0"
