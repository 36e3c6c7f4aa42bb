"""A job that the driver is in already: tasks start there, and no pilot waits in a queue."""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from sites import executor, find
from sites.base import Site, SiteError
from sites.batch import Allocation, Batch
from sites.lsf import Lsf
from sites.pbs import Alps, Pbs
from sites.script import Pilots
from sites.settings import build, said_by_user
from sites.slurm import Slurm

# Settings that are for a queue alone, or that the job has by itself.
OF_QUEUE = (
    *("nodes", "pilots", "account", "interface"),
    *("partition", "qos", "constraint", "queue", "select"),
)
DRIVER_END_S = 60  # before the job's end: to end Parsl, and to have another job submitted


class Placed(Batch):
    """A machine in a job that is there: its pool of workers is on the driver's host.

    What a task takes and how it starts is that machine's.
    """

    has_queue = False
    job: ClassVar[Allocation]
    began: ClassVar[float]  # as of time.time()

    @property
    def end(self) -> float:
        own = self.began + 60 * self.walltime_min
        of_job = math.inf if self.job.end is None else self.job.end - DRIVER_END_S
        return math.floor(min(own, of_job))

    def check(self) -> None:
        """Nothing: `setup` may be what brings the launcher."""

    def provider(self, mark: str) -> Any:
        return executor.provider_here(self._worker_init())

    def pilots_of(self, shape: Any, run_dir: Path) -> Pilots | None:
        return None

    def sweep(self, folder: Path) -> int:
        # Its programs are not on every node.
        return super().sweep(folder) if all(map(shutil.which, self.programs)) else 0

    def left(self, folder: Path) -> list[str]:
        return [job for job in super().left(folder) if job != self.job.number]

    def _address(self) -> str:
        return "127.0.0.1"

    def _end(self) -> str:
        return str(self.end)

    def foresee(self, run_dir: Path, least_s: float | None) -> None:
        """There is no pilot to come that could be left the rest."""

    def _pool(self, run_dir: Path) -> dict[str, Any]:
        return {}


class Inside(Batch):
    """The job that the driver is in, by salloc, sbatch, bsub or qsub; tasks start as steps of it.

    How large it is and when it ends is what its batch system says. Settings are those of 'slurm',
    'pbs' or LSF, without what is asked of a queue.
    """

    name = "inside"
    programs = tuple(dict.fromkeys((*Slurm.programs, *Lsf.programs, *Pbs.programs)))
    fixed: ClassVar[Mapping[str, Any]] = dict.fromkeys(OF_QUEUE)

    @classmethod
    def here(cls) -> tuple[type[Site], dict[str, int]]:
        machines: tuple[type[Batch], ...] = (Slurm, Lsf, Alps if shutil.which("aprun") else Pbs)
        for machine in machines:
            allocation = machine.allocation()
            if allocation is not None:
                break
        else:
            raise SiteError(
                f"site '{cls.name}' is the job that the driver is in, and it is in none: start it "
                f"within salloc, sbatch, bsub or qsub, or choose another --site"
            )
        fixed = {
            field.name: field.default
            for field in dataclasses.fields(machine)
            if field.name in OF_QUEUE
        }
        own = {"name": cls.name, "__doc__": cls.__doc__}
        return _placed(machine, allocation, fixed, **own), _found(allocation)


def around(name: str, settings: Mapping[str, str], folders: Sequence[Path] = ()) -> Placed | None:
    """The site of that name in the job of its batch system around this process, if any.

    Nodes and walltime are the job's, whatever the settings say of pilots.

    Raises:
        SiteError: there is no such site, it has no jobs, or a setting is wrong or missing.
    """
    machine, given = find(name, folders)
    if not issubclass(machine, Batch) or issubclass(machine, Inside):
        raise SiteError(
            f"--driver-in-job: site '{name}' submits no jobs; choose one of a batch system, such "
            f"as slurm ('sites list' has all)"
        )
    allocation = machine.allocation()
    if allocation is None:
        return None
    fixed = {key: value for key, value in _found(allocation).items() if key == "walltime_min"}
    placed = _placed(machine, allocation, fixed)
    given |= said_by_user(settings)
    site = build(placed, {key: said for key, said in given.items() if key not in placed.fixed})
    assert isinstance(site, Placed)
    return site


def _placed(
    machine: type[Batch], allocation: Allocation, fixed: Mapping[str, Any], **own: Any
) -> type[Batch]:
    """A machine in a job, whose settings of pilots are fixed."""
    of_job = {"nodes": allocation.nodes, "pilots": 1}
    own = {"__doc__": machine.__doc__, **own, "fixed": {**fixed, **of_job}}
    return type(
        machine.__name__,
        (Placed, machine),
        {**own, "job": allocation, "began": time.time()},
    )


def _found(allocation: Allocation) -> dict[str, int]:
    """What the job says of settings that the user may give too."""
    end = allocation.end
    found = {
        "cores_per_node": allocation.cores_per_node,
        "gpus_per_node": allocation.gpus_per_node,
        "walltime_min": None if end is None else max(1, math.ceil((end - time.time()) / 60)),
    }
    return {key: value for key, value in found.items() if value is not None}
