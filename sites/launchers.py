"""Launch lines: numbers in, a list of strings out. Pure functions, standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What one task takes of a machine."""

    num_ranks: int
    cores_per_rank: int = 1
    gpus_per_rank: int = 0
    num_masters: int = 0  # of the ranks, first on the first node; they use no GPU
    outlives_ranks: bool = False  # the others go on when a rank dies

    @property
    def num_cores(self) -> int:
        return self.num_ranks * self.cores_per_rank

    def ranks_on(self, nodes: int) -> int:
        """On the fullest of so many nodes, over which they are spread evenly."""
        return -(-self.num_ranks // nodes)

    def gpus_on(self, nodes: int) -> int:
        """On the node that needs most; masters are on the first."""
        return self.gpus_per_rank * min(self.num_ranks - self.num_masters, self.ranks_on(nodes))

    @property
    def num_gpus(self) -> int:
        return (self.num_ranks - self.num_masters) * self.gpus_per_rank


def mpirun(shape: Shape, host: str = "localhost") -> list[str]:
    """Open MPI's mpirun (4 or 5) on one host.

    The host and its slots are given, or mpirun would look for an allocation around it and spread
    over that. The ranks stay inside the cores of their slot and are not bound further; waiting
    ranks yield, or Horovod's background thread and MPI's waits take cores from the training (35 %
    slower). Ranks of one host need shared memory only: without looking for networks, MPI starts
    in 0.06 s, not 1.1 s. That a job outlives a rank is Open MPI's ULFM.
    """
    return [
        "mpirun",
        "--host", f"{host}:{shape.num_ranks}",
        "-n", str(shape.num_ranks),
        "--bind-to", "none",
        "--mca", "mpi_yield_when_idle", "1",
        "--mca", "pml", "ob1",
        "--mca", "btl", "self,sm",
        "--mca", "osc", "^ucx",
        *(["--with-ft", "ulfm"] if shape.outlives_ranks else []),
    ]  # fmt: skip


def srun(
    shape: Shape,
    nodes: int,
    *,
    mpi: str | None = None,
    threads_per_core: int | None = None,
    memory_mb: int = 0,
    has_gpus: bool = True,
) -> list[str]:
    """Slurm's srun (20.11 or newer), as a step of the pilot around it.

    Without --exact a step takes its nodes whole, and others wait for it. Cores are always said:
    srun does not inherit them since 22.05. GPUs are given to the node and not to each rank: NCCL
    wants to see those of its neighbours; a step that says nothing of GPUs takes all of them, and of
    memory perhaps all that the pilot has. Nodes are those that the worker names. A rank that dies
    ends the step.

    Args:
        nodes: that the ranks are spread over.
        mpi: how ranks find each other; None: as the site has it.
        threads_per_core: where each is a CPU for Slurm, of which --cpus-per-task would give a rank
            half a core; with it, cores are counted. None: as the site has it.
        memory_mb: of the step on each node; 0: of the pilot's, and it keeps others from none of it.
        has_gpus: the pilot has.
    """
    gpus = shape.gpus_on(nodes)
    gres = [f"--gres=gpu:{gpus}" if gpus else "--gres=none"]
    return [
        "srun",
        "--exact",
        *([f"--mpi={mpi}"] if mpi is not None else []),
        f"--nodes={nodes}",
        "--nodelist={hosts}",
        f"--ntasks={shape.num_ranks}",
        f"--ntasks-per-node={shape.ranks_on(nodes)}",
        f"--cpus-per-task={shape.cores_per_rank}",
        *([f"--threads-per-core={threads_per_core}"] if threads_per_core is not None else []),
        *(gres if has_gpus else []),
        f"--mem={memory_mb}M" if memory_mb else "--mem=0",
        "--kill-on-bad-exit=1",
    ]


def jsrun(shape: Shape, nodes: int) -> list[str]:
    """jsrun of LSF on Summit's kind of machines, as a step of the pilot around it.

    A resource set is cores and GPUs that its ranks share. There is one a node, as OLCF has it for
    deep learning: NCCL wants to see the GPUs of its neighbours. Where ranks cannot be dealt evenly,
    each has a set of its own. Nothing is left to defaults, which are one core and no GPU.

    Source: https://docs.olcf.ornl.gov/systems/summit_user_guide.html (of 2024).
    """
    ranks_of_set = shape.num_ranks // nodes if shape.num_ranks % nodes == 0 else 1
    return [
        "jsrun",
        f"--nrs={shape.num_ranks // ranks_of_set}",
        f"--rs_per_host={shape.ranks_on(nodes) // ranks_of_set}",
        f"--tasks_per_rs={ranks_of_set}",
        f"--cpu_per_rs={ranks_of_set * shape.cores_per_rank}",
        f"--gpu_per_rs={ranks_of_set * shape.gpus_per_rank}",
        f"--bind=packed:{shape.cores_per_rank}",
        "--launch_distribution=packed",
    ]


def aprun(shape: Shape, nodes: int) -> list[str]:
    """aprun of Cray's ALPS (Titan, Theta), on the nodes of the pilot that the worker names.

    A node runs one aprun at a time, so that a task has its nodes whole and a rank its cores one
    after the other. Without -L two tasks at once would be put on the same first nodes.

    Sources: https://www.olcf.ornl.gov/kb_articles/using-the-aprun-command (of 2017), ALCF's
    docs/theta/queueing-and-running-jobs (of 2023), in argonne-lcf/user-guides.
    """
    return [
        "aprun",
        "-n", str(shape.num_ranks),
        "-N", str(shape.ranks_on(nodes)),
        "-d", str(shape.cores_per_rank),
        "-cc", "depth",
        "-L", "{hosts}",
    ]  # fmt: skip


def pals(shape: Shape, nodes: int) -> list[str]:
    """mpiexec of HPE's PALS, on nodes and cores of the pilot that the worker names.

    PALS places nothing around what runs already: without --hosts and a list of cores, all tasks
    would start on the first cores of the first node. A list leaves no meaning to --depth, which
    only says how far apart ranks are. GPUs are not its business: ranks see those that
    CUDA_VISIBLE_DEVICES names, and each takes its own by its number on the node.

    Source: https://docs.alcf.anl.gov/polaris/running-jobs/using-gpus, "Running Multiple MPI
    Applications on a Node" (2025).
    """
    return [
        "mpiexec",
        "-n", str(shape.num_ranks),
        "--ppn", str(shape.ranks_on(nodes)),
        "--hosts", "{hosts}",
        "--cpu-bind", "list:{cores}",
    ]  # fmt: skip


@dataclass(frozen=True)
class Flags:
    """By which a launch line of somebody else says its ranks: all, or nodes and those of each."""

    ranks: tuple[str, ...]
    nodes: tuple[str, ...] = ()
    of_each: tuple[str, ...] = ()
    in_sets: bool = False  # "nodes" are resource sets, of one rank each if nothing else is said


_MPIRUN = Flags(("-n", "-np", "--np", "-c"), (), ("-npernode", "--npernode", "-ppn", "-N"))
FLAGS = {
    "srun": Flags(("-n", "--ntasks"), ("-N", "--nodes"), ("--ntasks-per-node",)),
    "jsrun": Flags(("-p", "--np"), ("-n", "--nrs"), ("-a", "--tasks_per_rs"), in_sets=True),
    "aprun": Flags(("-n",), (), ("-N",)),
    **dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra", "orterun"), _MPIRUN),
}
FLAGS_OF_OTHERS = Flags(("-n", "-np", "--np", "--ntasks"))
