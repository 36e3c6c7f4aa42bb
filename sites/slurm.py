"""Any Slurm cluster: pilots by sbatch, tasks as steps by srun."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from sites.base import SiteError
from sites.batch import POLL_S, Batch
from sites.launchers import Shape, srun

COMMAND_S = 60  # a busy controller answers late

# Of the pilot, and not of its steps: srun would take them for its own options.
UNSET = (
    "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_CPUS_PER_TASK", "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Slurm(Batch):
    """`partition`, `qos`, `constraint` as of sbatch; `mpi` as of srun.

    `memory_gb_per_node` is for clusters that give memory away as they do cores: a step would take
    all of its nodes'.
    """

    name = "slurm"

    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    mpi: str = "pmix"
    memory_gb_per_node: int | None = None

    def check(self) -> None:
        for program in ("sbatch", "squeue", "scancel", "srun"):
            if shutil.which(program) is None:
                raise SiteError(
                    f"Slurm is missing: there is no '{program}' on PATH; start the driver on a "
                    f"login node of the cluster"
                )

    def command(self, shape: Shape) -> list[str]:
        nodes = self.nodes_of(shape)
        memory = self.memory_gb_per_node
        share = min(self.node_share(shape), 1.0)
        return srun(
            shape,
            nodes,
            mpi=self.mpi,
            memory_mb=None if memory is None else int(memory * share * 1000),
        )

    def provider(self, mark: str) -> Any:
        from parsl.launchers import SimpleLauncher
        from parsl.providers import SlurmProvider

        class Polled(SlurmProvider):  # type: ignore[misc]
            status_polling_interval = POLL_S

        options = [f"#SBATCH --comment={mark}"]
        if self.gpus_per_node:
            options.append(f"#SBATCH --gres=gpu:{self.gpus_per_node}")
        if self.memory_gb_per_node is not None:
            options.append(f"#SBATCH --mem={self.memory_gb_per_node * 1000}M")
        return Polled(
            partition=self.partition,
            account=self.account,
            qos=self.qos,
            constraint=self.constraint,
            nodes_per_block=self.nodes,
            init_blocks=1,
            min_blocks=0,
            max_blocks=self.pilots,
            walltime=f"{self.walltime_min // 60:02d}:{self.walltime_min % 60:02d}:00",
            scheduler_options="\n".join(options),
            worker_init=f"{self._worker_init()}\nunset {' '.join(UNSET)}",
            cmd_timeout=COMMAND_S,
            exclusive=True,
            launcher=SimpleLauncher(),
        )

    def cancel(self, mark: str) -> int:
        """Take all jobs with this mark out of the queue, and see that they are gone."""
        jobs = [
            job
            for job, comment in (line.split("|", 1) for line in _asked("%i|%k"))
            if comment == mark
        ]
        if jobs:
            subprocess.run(["scancel", *jobs], capture_output=True, timeout=COMMAND_S, check=False)
        return len(jobs)


def _asked(form: str) -> list[str]:
    """A line for each job of this user."""
    line = ["squeue", "--me", "--noheader", "--format", form]
    try:
        answer = subprocess.run(
            line, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise SiteError(f"'{' '.join(line)}' gave no answer in {COMMAND_S} s") from None
    if answer.returncode:
        raise SiteError(f"'{' '.join(line)}': {answer.stderr.strip()}")
    return answer.stdout.splitlines()
