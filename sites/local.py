"""This host, without a batch system."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from sites import executor
from sites.base import SettingError, Site, SiteError, threads
from sites.launchers import Shape, mpirun

# Which GPUs a process sees, of NVIDIA, AMD and Intel.
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


@dataclass(frozen=True, kw_only=True)
class Local(Site):
    """This host: a laptop, a workstation, a server. Slots share its cores and GPUs."""

    name = "local"
    programs = ("mpirun",)

    cores: Annotated[int | None, "cores that the study may use; none: all that are here"] = None
    gpus: Annotated[int | None, "GPUs that the study may use; none: all that are here"] = None
    tasks_per_gpu: Annotated[
        int, "trainings that share a GPU, where one alone leaves it waiting for its processor"
    ] = 1

    def __post_init__(self) -> None:
        if self.cores is not None and self.cores < 1:
            raise SettingError("cores", self.cores, "it must be at least 1")
        if self.gpus is not None and self.gpus < 0:
            raise SettingError("gpus", self.gpus, "it must be at least 0")
        if self.tasks_per_gpu < 1:
            raise SettingError("tasks_per_gpu", self.tasks_per_gpu, "it must be at least 1")

    def check(self) -> None:
        if shutil.which("mpirun") is None:
            raise SiteError(
                "MPI is missing: there is no 'mpirun' on PATH; 'make setup' installs one here, "
                "on a cluster 'module load' one"
            )

    def num_slots(self, shape: Shape) -> int:
        cores, gpus = self._num_cores(), self._num_gpus()
        if shape.num_cores > cores:
            raise SiteError(
                f"a task needs {shape.num_cores} cores ({shape.num_ranks} ranks x "
                f"{shape.cores_per_rank} cores_per_rank) and this host has {cores}: ask for fewer "
                f"ranks under [layout], or add --set cores={shape.num_cores} to share cores"
            )
        if shape.num_gpus > gpus:
            raise SiteError(
                f"a task needs {shape.num_gpus} GPUs ({shape.num_ranks - shape.num_masters} ranks "
                f"x {shape.gpus_per_rank} gpus_per_rank) and this host has {gpus}: ask for fewer "
                f"ranks under [layout]"
            )
        by_gpus = self.tasks_per_gpu * (gpus // shape.num_gpus) if shape.num_gpus else cores
        return min(cores // shape.num_cores, by_gpus)

    def node_share(self, shape: Shape) -> float:
        shares = [shape.num_cores / self._num_cores()]
        if shape.num_gpus:
            shares.append(shape.num_gpus / self._num_gpus() / self.tasks_per_gpu)
        return min(max(shares), 1.0)

    def config(self, shape: Shape, run_dir: Path, memoizer: Any) -> Any:
        init = executor.room("echo localhost", self._node())
        return executor.config(
            self.name,
            executor.provider_here(init),
            run_dir,
            memoizer,
            address="127.0.0.1",
            max_workers_per_node=self.num_slots(shape),
            heartbeat_period=2,  # how soon a killed worker is noticed, in seconds
            heartbeat_threshold=10,  # and a killed pool of workers
            strategy_period=0.5,
        )

    def command(self, shape: Shape) -> list[str]:
        return mpirun(shape)

    def environment(self, shape: Shape) -> dict[str, str]:
        # Open MPI refuses to start as root (a container's usual user) without being told twice.
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        gpus = dict.fromkeys(GPU_VARIABLES, "{gpus}") if shape.num_gpus else {}
        return {**threads(shape.cores_per_rank), **root, **gpus}

    def need(self, shape: Shape) -> dict[str, int]:
        return {
            "nodes": 1,
            "ranks": shape.num_ranks,
            "cores_per_rank": shape.cores_per_rank,
            "gpus": shape.num_gpus,
        }

    def _num_cores(self) -> int:
        return self.cores if self.cores is not None else len(os.sched_getaffinity(0))

    def _num_gpus(self) -> int:
        return self.gpus if self.gpus is not None else len(_visible_gpus())

    def _node(self) -> dict[str, Any]:
        """This host as an `apps.room.Node`."""
        here = sorted(os.sched_getaffinity(0))
        pinned = self._num_cores() <= len(here)  # else the user chose to share cores
        cores = here[: self._num_cores()] if pinned else range(self._num_cores())
        gpus = _visible_gpus() or [str(gpu) for gpu in range(self._num_gpus())]
        return {
            "cores": [str(core) for core in cores],
            "gpus": gpus[: self._num_gpus()],
            "tasks_per_gpu": self.tasks_per_gpu,
            "pinned": pinned,
        }


def _visible_gpus() -> list[str]:
    """Names of the GPUs here: of CUDA_VISIBLE_DEVICES where that is set, else all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu for gpu in visible.split(",") if gpu]
    if shutil.which("nvidia-smi") is None:
        return []
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    found = [line for line in listing.stdout.splitlines() if line.startswith("GPU ")]
    return [str(gpu) for gpu in range(len(found))]
