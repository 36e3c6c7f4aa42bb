"""Batch systems: what is asked of them, to the letter."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pandas as pd
import pytest

import sites
from sites.base import SiteError
from sites.batch import LAST_START_FILE, mark_of
from sites.launchers import Shape
from sites.slurm import Slurm
from workflow.ledger import Ledger

STANDINS = Path(__file__).parent / "standins"
COLUMNS = ["trial", "fold", "status", "fom", "training.optimizer.lr", "model.args.width", "key"]

SMALL = {"nodes": "4", "walltime_min": "60", "cores_per_node": "64", "gpus_per_node": "4"}


def slurm(**settings: str) -> Slurm:
    site = sites.get("slurm", {**SMALL, **settings})
    assert isinstance(site, Slurm)
    return site


@pytest.mark.campaign
def test_a_study_gives_the_same_ledger_on_this_host_and_on_summit(n3lo, study_path, tmp_path):
    """On stand-ins of LSF's programs and of jsrun, which check what they are asked for."""
    (tmp_path / "queue").mkdir()
    environment = {
        "PATH": f"{STANDINS}:{os.environ['PATH']}",
        "STANDIN_QUEUE": str(tmp_path / "queue"),
    }
    machine = ("account=phy101", "nodes=1", "walltime_min=10", "cores_per_node=2", "interface=lo")
    settings = [word for each in machine for word in ("--set", each)]
    there = n3lo(study_path, "--site", "summit", *settings, "--runs", "there", env=environment)
    assert there.returncode == 0, there
    here = n3lo(study_path, "--set", "cores=2", "--runs", "here")
    assert here.returncode == 0, here
    tables = [Ledger(tmp_path / runs / "small").tasks() for runs in ("here", "there")]
    for table in tables:
        assert set(table["status"]) == {"done"}
    pd.testing.assert_frame_equal(*(table[COLUMNS] for table in tables))
    jobs = {"PATH": environment["PATH"], "STANDIN_QUEUE": environment["STANDIN_QUEUE"]}
    form = "jobid job_description delimiter='|'"
    left = subprocess.run(
        ["bjobs", "-noheader", "-o", form], env=jobs, capture_output=True, text=True, check=False
    )
    assert left.stderr.strip() == "No unfinished job found"


@pytest.mark.parametrize(
    ("shape", "nodes", "slots"),
    [
        (Shape(num_ranks=1), 1, 256),
        (Shape(num_ranks=2, cores_per_rank=16), 1, 8),
        (Shape(num_ranks=4, cores_per_rank=16), 1, 4),
        (Shape(num_ranks=5, cores_per_rank=16), 2, 2),
        (Shape(num_ranks=1, cores_per_rank=16, gpus_per_rank=1), 1, 16),
        (Shape(num_ranks=3, gpus_per_rank=1), 1, 4),
        (Shape(num_ranks=8, cores_per_rank=16, gpus_per_rank=1), 2, 2),
        (Shape(num_ranks=12, gpus_per_rank=1), 3, 1),
    ],
)
def test_tasks_are_packed_into_the_nodes_of_a_pilot(shape, nodes, slots):
    assert slurm().nodes_of(shape) == nodes
    assert slurm().num_slots(shape) == slots
    assert slurm(pilots="3").num_slots(shape) == 3 * slots


def test_no_more_steps_run_at_once_than_the_machine_bears():
    wide = {"account": "hep101", "nodes": "20", "walltime_min": "60"}
    of_one_gpu = Shape(num_ranks=1, gpus_per_rank=1)
    assert sites.get("frontier", wide).num_slots(of_one_gpu) == 100  # and not 20 x 8
    assert sites.get("frontier", {**wide, "nodes": "4"}).num_slots(of_one_gpu) == 32
    assert slurm(steps="3", pilots="2").num_slots(of_one_gpu) == 6


def test_a_task_occupies_its_part_of_a_node_or_several():
    assert slurm().node_share(Shape(num_ranks=2, cores_per_rank=16)) == 0.5
    assert slurm().node_share(Shape(num_ranks=8, gpus_per_rank=1)) == 2


def test_a_step_without_gpus_says_so():
    half = Shape(num_ranks=2, cores_per_rank=16)
    assert "--gres=none" in slurm().command(half)
    assert not any("gres" in word for word in slurm(gpus_per_node="0").command(half))


@pytest.mark.parametrize(
    ("shape", "memory"),
    [
        (Shape(num_ranks=2, cores_per_rank=16), "128000M"),
        (Shape(num_ranks=3, gpus_per_rank=1), "192000M"),  # one with a GPU fits beside it
        (Shape(num_ranks=5, gpus_per_rank=1), "256000M"),  # its two nodes are its own
    ],
)
def test_a_step_has_its_share_of_memory_and_leaves_the_others_theirs(shape, memory):
    assert f"--mem={memory}" in slurm(memory_gb_per_node="256").command(shape)
    assert "--mem=0" in slurm().command(shape)


@pytest.mark.parametrize(
    ("shape", "nodes", "gpus"),
    [
        (Shape(num_ranks=3, gpus_per_rank=2), 2, 4),  # 2 + 1 ranks
        (Shape(num_ranks=5, num_masters=1, gpus_per_rank=1), 1, 4),  # a master needs none
        (Shape(num_ranks=8, num_masters=2, gpus_per_rank=1), 2, 4),  # 2 + 2 and 4
        (Shape(num_ranks=11, num_masters=3, gpus_per_rank=1), 3, 4),  # on two, 3 + 3 and 5
    ],
)
def test_the_fullest_node_of_a_task_has_its_gpus(shape, nodes, gpus):
    assert slurm().nodes_of(shape) == nodes
    assert f"--gres=gpu:{gpus}" in slurm().command(shape)


def test_ranks_that_cannot_be_dealt_evenly_have_a_resource_set_each():
    summit = sites.get("summit", {"account": "phy101", "nodes": "4", "walltime_min": "60"})
    assert summit.command(Shape(num_ranks=7, cores_per_rank=7, gpus_per_rank=1)) == [
        "jsrun", "--nrs=7", "--rs_per_host=4", "--tasks_per_rs=1", "--cpu_per_rs=7",
        "--gpu_per_rs=1", "--bind=packed:7", "--launch_distribution=packed",
    ]  # fmt: skip
    assert summit.num_slots(Shape(num_ranks=1, cores_per_rank=7, gpus_per_rank=1)) == 24


@pytest.mark.parametrize("name", ["frontier", "perlmutter", "daint_alps", "piz_daint", "summit"])
def test_machines_of_known_shape_need_an_account(name):
    with pytest.raises(SiteError, match="account"):
        sites.get(name, {"nodes": "2", "walltime_min": "60"})


def test_what_a_node_cannot_hold_is_said_with_the_equation():
    for shape, line in (
        (
            Shape(num_ranks=1, cores_per_rank=65),
            "a rank needs 65 cores (layout.cores_per_rank) and a node of slurm has 64 "
            "(cores_per_node)",
        ),
        (
            Shape(num_ranks=1, gpus_per_rank=5),
            "a rank needs 5 GPUs (layout.gpus_per_rank) and a node of slurm has 4 (gpus_per_node)",
        ),
        (
            Shape(num_ranks=20, gpus_per_rank=1),
            "a task needs 5 nodes (20 ranks x 1 cores and 1 GPUs, on nodes of 64 and 4) and a "
            "pilot has 4: ask for fewer ranks under [layout], or --set nodes=5",
        ),
        (
            Shape(num_ranks=2, outlives_ranks=True),
            "training.exchange.tolerate_worker_loss needs Open MPI's mpirun, which is that of site "
            "'local'; set it to false on slurm",
        ),
    ):
        with pytest.raises(SiteError) as caught:
            slurm().num_slots(shape)
        assert str(caught.value) == line


@pytest.mark.parametrize(
    ("least_s", "last_start_s"),
    [(None, 300), (20.0, 70), (600.0, 795), (7200.0, 2400)],
)
def test_a_pilot_begins_no_task_that_would_be_cut_off_before_its_first_epoch(
    tmp_path, least_s, last_start_s
):
    """A quarter more than the least that tasks needed, and 45 s; at most two thirds of a pilot."""
    slurm().foresee(tmp_path / "parsl", least_s)
    assert int((tmp_path / "parsl" / LAST_START_FILE).read_text()) == last_start_s


def test_settings_that_a_pilot_needs_are_asked_for():
    with pytest.raises(SiteError) as caught:
        sites.get("slurm", {"nodes": "2"})
    assert "walltime_min" in str(caught.value)
    for key in ("nodes", "memory_gb_per_node", "threads_per_core"):
        with pytest.raises(SiteError, match=f"--set {key}=0: it must be at least 1"):
            slurm(**{key: "0"})


def test_a_name_that_stands_for_the_loopback_is_of_no_use_to_other_nodes(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "login1")
    monkeypatch.setattr("socket.gethostbyname", lambda name: "127.0.1.1")
    with pytest.raises(SiteError) as caught:
        slurm()._address()
    assert str(caught.value) == (
        "this host's name, login1, stands for 127.0.1.1, which no other node reaches; add --set "
        "interface=..., the network that the nodes share: 'ip address' lists them"
    )


def test_a_queue_that_does_not_answer_is_asked_again(monkeypatch, tmp_path):
    monkeypatch.setattr("sites.batch.POLL_S", 0.0)
    answers = iter([SiteError("busy"), [("7", mark_of(tmp_path)), ("8", "other")], []])
    asked = []

    def answer(line):
        asked.append(line)
        if line[0] != "squeue":
            return []
        said = next(answers)
        if isinstance(said, SiteError):
            raise said
        return [f"{job}|{mark}" for job, mark in said]

    monkeypatch.setattr("sites.batch.ask", answer)
    monkeypatch.setattr("sites.slurm.ask", answer)
    assert slurm().sweep(tmp_path) == 1
    assert asked[2] == ["scancel", "7"]


def test_each_run_folder_has_a_mark_of_its_own(tmp_path):
    assert mark_of(tmp_path / "a") == mark_of(tmp_path / "b" / ".." / "a")
    assert mark_of(tmp_path / "a") != mark_of(tmp_path / "b")


def test_without_slurm_the_user_is_told_where_to_go(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SiteError) as caught:
        slurm().check()
    assert str(caught.value) == (
        "Slurm is missing: there is no 'sbatch' on PATH; start the driver on a login node of the "
        "cluster"
    )
