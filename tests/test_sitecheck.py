"""`sites check`: what is found on a machine, and what it says is to be mended."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sites
from apps.scout import Report
from sites.launchers import Shape
from workflow.findings import Expected, findings
from workflow.sitecheck import smallest

STANDINS = Path(__file__).parent / "standins"
CHECK = """\
import sys
from pathlib import Path
import sites
from workflow.sitecheck import check

name, runs, *settings = sys.argv[1:]
site = sites.get(name, dict(setting.split("=", 1) for setting in settings))
sys.exit(check(site, Path(runs)))
"""
VERSIONS = {"python": "3.11.7", "n3lo": "0.1.0", "torch": "2.13.0", "mpi4py": "4.1.2"}
SETTINGS = frozenset({"mpi", "setup", "cores_per_node", "gpus_per_node"})
ASKED = Expected(num_ranks=2, num_nodes=2, cores=64, gpus=4, settings=SETTINGS)
WELL = Report(
    host="n1", began=0.0, cores=64, versions=VERSIONS, free_gb=900.0, temporary="/tmp",
    temporary_gb=80.0, rank=0, size=2, mpi_library="Open MPI v5.0.11", mpi_s=0.2, torch_s=3.0,
    gpus=["A100"] * 4,
)  # fmt: skip


def check(runs: Path, name: str, *settings: str, **environment: str):
    return subprocess.run(
        [sys.executable, "-P", "-c", CHECK, name, str(runs), *settings],
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **environment,
        },
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def to_mend(asked: Expected = ASKED, **changes) -> list[str]:
    """What is to be mended where both nodes differ from a good one so."""
    pair = [WELL, dataclasses.replace(WELL, host="n2", rank=1)]
    return findings([dataclasses.replace(each, **changes) for each in pair], VERSIONS, asked)


def test_nothing_is_to_be_mended_where_all_is_well():
    assert to_mend() == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"cores": 1},
            "n1, n2: a rank may use 1 core, and 64 were asked for: --set cores_per_node=1, or have "
            "the batch system give whole nodes",
        ),
        ({"gpus": ["A100"]}, "n1, n2: torch sees 1 GPU of 4: 'nvidia-smi' there shows"),
        (
            {"gpus": [], "versions": {**VERSIONS, "torch": "2.13.0+cpu"}},
            "torch sees 0 GPUs of 4: torch 2.13.0+cpu is built without CUDA",
        ),
        ({"torch_s": 95.0}, "n1, n2: torch takes 95 s to import, in each task anew: put"),
        ({"temporary_gb": 0.5}, "n1, n2: /tmp has 0.5 GB free: too little for copies of data"),
        ({"free_gb": 0.0}, "n1, n2: --runs: 0.0 GB are free there"),
        (
            {"versions": {**VERSIONS, "torch": "2.1.0"}},
            "n1, n2: torch is 2.1.0 there, and 2.13.0 for the driver: start the driver from",
        ),
        ({"versions": {**VERSIONS, "n3lo": "0.0.9"}}, "n3lo is 0.0.9 there, and 0.1.0 for the"),
        (
            {"versions": {"python": "3.11.7", "n3lo": "0.1.0", "torch": "2.13.0"}},
            "mpi4py is none there, and 4.1.2 for the driver",
        ),
        (
            {"errors": {"token": "FileNotFoundError: gone"}},
            "n1, n2: what the driver writes cannot be read (FileNotFoundError: gone): --runs must "
            "be on a file system that all nodes share",
        ),
        (
            {"errors": {"temporary": "PermissionError: no"}},
            "n1, n2: /tmp cannot be written to (PermissionError: no): set TMPDIR",
        ),
        (
            {"errors": {"mpi": "ImportError: libmpi.so.40", "sum": "same"}, "size": None},
            "n1, n2: MPI does not start (ImportError: libmpi.so.40); try --set mpi=pmix",
        ),
        ({"errors": {"sum": "ValueError: 1"}}, "n1, n2: MPI started, and a sum over its ranks"),
        ({"errors": {"torch": "OSError: x"}, "gpus": None}, "n1, n2: torch does not load (OSErr"),
        ({"errors": {"horovod": "OSError: x"}}, "Horovod is installed and does not load (OSError"),
        ({"host": "n1"}, "the ranks are on 1 node (n1), and 2 were asked for"),
        ({"size": 4}, "MPI counts 4 ranks, and 2 were asked for; try --set mpi=pmix"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_a_way_out(changes, said):
    lines = to_mend(**changes)
    assert any(said in line for line in lines), lines
    assert not any("\n" in line for line in lines)


def test_ranks_that_do_not_find_each_other():
    [line] = to_mend(size=1)
    assert line == (
        "each of 2 ranks takes itself for the only one: the launcher and mpi4py's MPI (Open MPI "
        "v5.0.11) do not fit together; try --set mpi=pmix, pmi2 or cray_shasta ('srun --mpi=list' "
        "says which there are), or --set setup='module load ...' with the MPI that mpi4py was "
        "built for"
    )


def test_a_rank_of_which_nothing_is_heard():
    [line] = findings([WELL], VERSIONS, ASKED)
    assert line.startswith("2 ranks were to start, and 1 wrote what they found")


def test_what_is_wrong_on_one_node_names_that_node():
    cramped = dataclasses.replace(WELL, host="n2", rank=1, cores=32)
    [line] = findings([WELL, cramped], VERSIONS, ASKED)
    assert line.startswith("n2: a rank may use 32 cores, and 64 were asked for")


def test_a_pilot_of_many_nodes_is_tried_with_two():
    nodes = {"nodes": "64", "walltime_min": "600", "cores_per_node": "64", "gpus_per_node": "4"}
    site, shape, num_nodes = smallest(sites.get("slurm", {**nodes, "pilots": "3"}))
    assert (site.nodes, site.walltime_min, site.pilots, num_nodes) == (2, 10, 1, 2)
    assert shape == Shape(num_ranks=2, cores_per_rank=64, gpus_per_rank=4)
    assert site.nodes_of(shape) == 2


@pytest.mark.parametrize(
    ("cores", "gpus", "shape"),
    [
        ("1", "0", Shape(num_ranks=1)),
        ("5", "0", Shape(num_ranks=2, cores_per_rank=2)),
        ("8", "1", Shape(num_ranks=2, cores_per_rank=4, gpus_per_rank=1, num_masters=1)),
        ("8", "4", Shape(num_ranks=2, cores_per_rank=4, gpus_per_rank=2)),
    ],
)
def test_one_node_is_tried_with_two_ranks(cores, gpus, shape):
    assert smallest(sites.get("local", {"cores": cores, "gpus": gpus}))[1] == shape


@pytest.mark.mpi
def test_all_is_well_on_this_host(n3lo):
    checked = n3lo("sites", "check", "local", "--set", "cores=2")
    assert checked.returncode == 0, checked
    assert "2 ranks, ready in" in checked.stdout
    assert checked.stdout.endswith("all is well\n")


@pytest.mark.mpi
def test_a_launcher_of_another_mpi_is_found_out(tmp_path):
    """It starts the ranks, and tells them nothing of each other."""
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.parent.mkdir()
    mpirun.write_text(
        '#!/bin/sh\nwhile [ "${1%/python*}" = "$1" ]; do shift; done\n"$@" & "$@" & wait\n'
    )
    mpirun.chmod(0o755)
    path = f"{mpirun.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    checked = check(tmp_path, "local", "cores=2", PATH=path)
    assert checked.returncode == 1, checked
    assert "each of 2 ranks takes itself for the only one" in checked.stdout
    assert "the 'mpirun' on PATH must be that of the MPI that mpi4py loads" in checked.stdout


@pytest.mark.campaign
def test_a_job_that_ends_before_its_worker_comes(tmp_path):
    """The end of its error file says why, on a stand-in of LSF."""
    (tmp_path / "queue").mkdir()
    machine = ("account=phy101", "nodes=1", "walltime_min=10", "cores_per_node=2", "interface=lo")
    checked = check(
        tmp_path, "summit", *machine, "setup=echo no module cuda >&2; false",
        PATH=f"{STANDINS}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        STANDIN_QUEUE=str(tmp_path / "queue"),
    )  # fmt: skip
    assert checked.returncode == 1, checked
    assert "no module cuda" in checked.stdout
    assert "before a worker came" in checked.stdout.splitlines()[-1]
