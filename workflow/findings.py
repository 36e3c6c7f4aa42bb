"""What is to be mended on a machine, from what the ranks of `sites check` found on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from apps.scout import Report

SLOW_IMPORT_S = 30.0
LITTLE_GB = 2.0


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What was asked for, and the settings by which the site can be told otherwise."""

    num_ranks: int
    num_nodes: int
    cores: int  # of each rank
    gpus: int  # of each node, seen by all of its ranks
    settings: frozenset[str]


def findings(reports: Sequence[Report], driver: Mapping[str, str], expected: Expected) -> list[str]:
    """One line for each thing to mend: what is wrong, and what to do.

    Args:
        driver: the versions that the driver has, by name.
    """
    hosts_by_line: dict[str, set[str]] = {}
    for report in reports:
        for line in (
            *_files(report),
            *_programs(report, driver, expected),
            *_size_of(report, expected),
        ):
            hosts_by_line.setdefault(line, set()).add(report.host)
    of_hosts = [f"{', '.join(sorted(hosts))}: {line}" for line, hosts in hosts_by_line.items()]
    return [*_together(reports, expected), *of_hosts]


def _together(reports: Sequence[Report], expected: Expected) -> Iterator[str]:
    """What the ranks show only together."""
    asked = expected.num_ranks
    if len(reports) < asked:
        yield (
            f"{asked} ranks were to start, and {len(reports)} wrote what they found: if the others "
            f"did start, they do not see --runs, which must be on a file system that all nodes "
            f"share"
        )
    hosts = {report.host for report in reports}
    if len(reports) == asked and len(hosts) != expected.num_nodes:
        yield (
            f"the ranks are on {plural(len(hosts), 'node')} ({', '.join(sorted(hosts))}), and "
            f"{expected.num_nodes} were asked for: the launcher does not spread them"
        )
    sizes = {report.size for report in reports if report.size is not None}
    libraries = sorted({report.mpi_library for report in reports if report.mpi_library})
    if sizes == {1} and asked > 1:
        yield (
            f"each of {asked} ranks takes itself for the only one: the launcher and mpi4py's MPI "
            f"({', '.join(libraries)}) do not fit together; {_fit(expected)}"
        )
    elif sizes and sizes != {asked}:
        seen = " or ".join(map(str, sorted(sizes)))
        yield f"MPI counts {seen} ranks, and {asked} were asked for; {_fit(expected)}"


def _fit(expected: Expected) -> str:
    """How launcher and MPI come to be of one kind."""
    ways = []
    if "mpi" in expected.settings:
        ways.append(
            "try --set mpi=pmix, pmi2 or cray_shasta ('srun --mpi=list' says which there are)"
        )
    if "setup" in expected.settings:
        ways.append("--set setup='module load ...' with the MPI that mpi4py was built for")
    else:
        ways.append("the 'mpirun' on PATH must be that of the MPI that mpi4py loads")
    return ", or ".join(ways)


def _files(report: Report) -> Iterator[str]:
    errors = report.errors
    if "token" in errors:
        yield (
            f"what the driver writes cannot be read ({errors['token']}): --runs must be on a file "
            f"system that all nodes share"
        )
    if report.free_gb is not None and report.free_gb < LITTLE_GB:
        yield f"--runs: {report.free_gb:.1f} GB are free there; choose another file system"
    name = report.temporary or "the folder for temporary files"
    if "temporary" in errors:
        yield (
            f"{name} cannot be written to ({errors['temporary']}): set TMPDIR to a folder on the "
            f"node's own disk, or data.cache in studies"
        )
    elif report.temporary_gb is not None and report.temporary_gb < LITTLE_GB:
        yield (
            f"{name} has {report.temporary_gb:.1f} GB free: too little for copies of data; let "
            f"data.cache in studies name another folder of the node"
        )


def _programs(report: Report, driver: Mapping[str, str], expected: Expected) -> Iterator[str]:
    errors = report.errors
    if "mpi" in errors:
        yield f"MPI does not start ({errors['mpi']}); {_fit(expected)}"
    if "sum" in errors and "mpi" not in errors:
        yield (
            f"MPI started, and a sum over its ranks fails ({errors['sum']}): the network between "
            f"the nodes is not the one that MPI takes, or the launcher is of another MPI; "
            f"{_fit(expected)}"
        )
    for name in ("torch", "h5py"):
        if name in errors:
            yield f"{name} does not load ({errors[name]}): {_same_environment(expected)}"
    if "horovod" in errors:
        yield (
            f"Horovod is installed and does not load ({errors['horovod']}): build it for this "
            f'torch and MPI (install_horovod.sh), or set training.backend = "ddp" in studies'
        )
    for name, version in driver.items():
        there = report.versions.get(name, "none")
        if there != version:
            yield (
                f"{name} is {there} there, and {version} for the driver: "
                f"{_same_environment(expected)}"
            )
    if report.torch_s is not None and report.torch_s > SLOW_IMPORT_S:
        yield (
            f"torch takes {report.torch_s:.0f} s to import, in each task anew: put the Python "
            f"environment on faster storage, such as one image file, or the nodes' own disks"
        )


def _same_environment(expected: Expected) -> str:
    said = "start the driver from an environment that the nodes see as it is"
    if "setup" in expected.settings:
        said += ", and load in --set setup='module load ...' what it needs"
    return said


def _size_of(report: Report, expected: Expected) -> Iterator[str]:
    if report.cores < expected.cores:
        way_out = (
            f"--set cores_per_node={report.cores}, or have the batch system give whole nodes"
            if "cores_per_node" in expected.settings
            else f"--set cores={report.cores}"
        )
        yield (
            f"a rank may use {plural(report.cores, 'core')}, and {expected.cores} were asked "
            f"for: {way_out}"
        )
    if report.gpus is not None and len(report.gpus) < expected.gpus:
        torch = report.versions.get("torch", "")
        why = (
            f"torch {torch} is built without CUDA; install one with it"
            if torch.endswith("+cpu")
            else "'nvidia-smi' there shows what the node has, and the driver that torch needs; "
            f"{_gpu_setting(expected)} says how many are asked for"
        )
        yield f"torch sees {plural(len(report.gpus), 'GPU')} of {expected.gpus}: {why}"


def _gpu_setting(expected: Expected) -> str:
    return "--set gpus_per_node" if "gpus_per_node" in expected.settings else "--set gpus"


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
