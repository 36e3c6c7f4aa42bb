"""Sites: exact launch lines, slots and pinning, and settings with clear mistakes."""

from __future__ import annotations

import json
import os
import shlex

import pytest

import sites
from apps import room
from sites.base import SiteError
from sites.launchers import Shape
from sites.local import Local


@pytest.mark.parametrize(
    ("cores", "gpus", "shape", "slots"),
    [
        (8, 0, Shape(num_ranks=2), 4),
        (8, 0, Shape(num_ranks=2, cores_per_rank=2), 2),
        (9, 0, Shape(num_ranks=2), 4),
        (8, 4, Shape(num_ranks=2, gpus_per_rank=1), 2),
        (2, 4, Shape(num_ranks=1, gpus_per_rank=1), 2),
    ],
)
def test_slots_come_from_cores_and_gpus(cores, gpus, shape, slots):
    assert Local(cores=cores, gpus=gpus).num_slots(shape) == slots


def test_without_settings_the_slots_fill_the_cores_of_this_process():
    assert Local().num_slots(Shape(num_ranks=1)) == len(os.sched_getaffinity(0))


def test_more_ranks_than_the_host_has_gives_the_equation():
    with pytest.raises(SiteError) as caught:
        Local(cores=2).num_slots(Shape(num_ranks=3, cores_per_rank=2))
    assert str(caught.value) == (
        "a task needs 6 cores (3 ranks x 2 cores_per_rank) and this host has 2: ask for fewer "
        "ranks under [layout], or add --set cores=6 to share cores"
    )


def test_more_gpus_than_the_host_has_gives_the_equation():
    with pytest.raises(SiteError) as caught:
        Local(cores=2, gpus=1).num_slots(Shape(num_ranks=2, gpus_per_rank=1))
    assert str(caught.value) == (
        "a task needs 2 GPUs (2 ranks x 1 gpus_per_rank) and this host has 1: ask for fewer "
        "ranks under [layout]"
    )


def node_of(site: Local, tmp_path) -> dict:
    """What the workers are told of this host."""
    [executor] = site.config(Shape(num_ranks=1), tmp_path, None).executors
    [line] = [
        line for line in executor.provider.worker_init.splitlines() if room.NODE + "=" in line
    ]
    return json.loads(shlex.split(line)[1].partition("=")[2])


def test_the_cores_and_gpus_of_this_host_are_shared_out(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6, 7})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert node_of(Local(), tmp_path) == {
        "cores": ["4", "5", "6", "7"], "gpus": ["2", "3"], "tasks_per_gpu": 1, "pinned": True,
    }  # fmt: skip
    assert node_of(Local(cores=2, gpus=1), tmp_path) == {
        "cores": ["4", "5"], "gpus": ["2"], "tasks_per_gpu": 1, "pinned": True,
    }  # fmt: skip
    shape = Shape(num_ranks=2, gpus_per_rank=1)
    assert Local().need(shape) == {"nodes": 1, "ranks": 2, "cores_per_rank": 1, "gpus": 2}
    assert Local().environment(shape)["CUDA_VISIBLE_DEVICES"] == "{gpus}"
    [executor] = Local().config(shape, tmp_path, None).executors
    assert executor.max_workers_per_node == 1
    assert executor.encrypted
    assert executor.address == "127.0.0.1"


def test_several_tasks_share_a_gpu_where_the_user_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    site, shape = Local(tasks_per_gpu=2), Shape(num_ranks=1, gpus_per_rank=1)
    assert node_of(site, tmp_path)["tasks_per_gpu"] == 2
    assert site.num_slots(shape) == 4
    assert site.node_share(shape) == 0.25
    with pytest.raises(SiteError, match="--set tasks_per_gpu=0: it must be at least 1"):
        Local(tasks_per_gpu=0)


def test_slots_that_share_cores_are_not_pinned(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    node = node_of(Local(cores=4), tmp_path)
    assert (node["cores"], node["pinned"]) == (["0", "1", "2", "3"], False)


def test_every_rank_gets_its_number_of_threads():
    environment = Local().environment(Shape(num_ranks=2, cores_per_rank=3))
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"


def error_of(name: str, settings: dict[str, str]) -> str:
    with pytest.raises(SiteError) as caught:
        sites.get(name, settings)
    return str(caught.value)


def test_an_unknown_site_lists_those_there_are():
    assert error_of("mars", {}) == (
        "--site mars: no such site; there are: daint_alps, frontier, inside, local, pbs, "
        "perlmutter, piz_daint, polaris, slurm, summit, theta, titan"
    )
    assert error_of("locl", {}) == "--site locl: no such site; did you mean 'local'?"


def test_a_wrong_setting_is_named():
    assert error_of("local", {"core": "4"}) == (
        "--set core: site 'local' has no such setting; did you mean 'cores'?"
    )
    assert error_of("local", {"cores": "many"}) == "--set cores=many: 'many' is not a whole number"
    assert error_of("local", {"cores": "0"}) == "--set cores=0: it must be at least 1"


def test_a_missing_mpirun_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SiteError) as caught:
        Local().check()
    assert str(caught.value) == (
        "MPI is missing: there is no 'mpirun' on PATH; 'make setup' installs one here, on a "
        "cluster 'module load' one"
    )
