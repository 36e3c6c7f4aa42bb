"""PBS in its kinds: what is asked of qsub, qstat, aprun and PALS' mpiexec, to the letter."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd
import pytest

import sites
from sites.base import SiteError
from sites.batch import Batch, mark_of
from sites.launchers import Shape
from sites.pbs import marked_jobs
from sites.script import rendered
from workflow.ledger import Ledger

STANDINS = Path(__file__).parent / "standins" / "pbs"
COLUMNS = ["trial", "fold", "status", "fom", "training.optimizer.lr", "model.args.width", "key"]
MARK = "n3lo-0123456789ab"


def site(name: str, **settings: str) -> Batch:
    asked = {"account": "hep101", "nodes": "4", "walltime_min": "90", **settings}
    found = sites.get(name, asked)
    assert isinstance(found, Batch)
    return found


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PBS of stand-ins, whose jobs run on this host."""
    folder = tmp_path / "queue"
    folder.mkdir()
    monkeypatch.setenv("STANDIN_QUEUE", str(folder))
    monkeypatch.setenv("PATH", f"{STANDINS}:{os.environ['PATH']}")
    return folder


@pytest.mark.campaign
def test_a_study_gives_the_same_ledger_on_this_host_on_polaris_and_on_titan(
    n3lo, study_path, edit, tmp_path, queue
):
    """On stand-ins, which check that no two tasks have the same cores, GPUs or nodes."""
    machines = {
        "polaris": ("nodes=1", "cores_per_node=2"),
        "titan": ("nodes=2",),
    }
    edit("num_trials = 3", "num_trials = 2")
    here = n3lo(study_path, "--set", "cores=2", "--runs", "here")
    assert here.returncode == 0, here
    expected = Ledger(tmp_path / "here" / "small").tasks()
    assert set(expected["status"]) == {"done"}
    setup = f"setup=export PATH={STANDINS}:$PATH"
    for name, shape in machines.items():
        settings = ("account=hep101", "walltime_min=10", "interface=lo", setup, *shape)
        words = [word for each in settings for word in ("--set", each)]
        there = n3lo(study_path, "--site", name, *words, "--runs", name)
        assert there.returncode == 0, there
        table = Ledger(tmp_path / name / "small").tasks()
        pd.testing.assert_frame_equal(table[COLUMNS], expected[COLUMNS])
        assert site(name).queued() == []


@pytest.mark.parametrize("name", ["polaris", "titan"])
def test_what_a_dead_driver_left_is_taken_out_of_the_queue(name, queue, tmp_path):
    machine, mine, other = site(name), tmp_path / "mine", tmp_path / "other"
    jobs = []
    for folder in (mine, other):
        provider = machine.provider(mark_of(folder))
        provider.script_dir = str(tmp_path)
        jobs.append(provider.submit("sleep 60", 1))
    assert machine.queued() == [(jobs[0], mark_of(mine)), (jobs[1], mark_of(other))]
    assert machine.sweep(mine) == 1
    assert machine.queued() == [(jobs[1], mark_of(other))]
    assert [status.state.name for status in provider.status([jobs[1]])] == ["RUNNING"]
    assert machine.sweep(other) == 1
    assert [status.state.name for status in provider.status([jobs[1]])] == ["COMPLETED"]


QSTAT = """\
Job Id: 4711.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov
    Job_Name = n3lo-0123456789ab.1700000000.123
    Job_Owner = ada@polaris-login-02.hsn.cm.polaris.alcf.anl.gov
    job_state = R
    Variable_List = PBS_O_HOME=/home/ada,NAME=\\'"\\',
\tPBS_O_LANG=C,Job_Name = n3lo-ffffffffffff

Job Id: 4712.polaris
    Job_Name = parsl.n3lo-0123456789ab.1700000001.456
    Job_Owner = ada@titan-ext3
    job_state = Q

Job Id: 4713.polaris
    Job_Name = n3lo-0123456789ab.1700000002.789
    Job_Owner = bob@polaris-login-02
    job_state = R

Job Id: 4714.polaris
    Job_Name = n3lo-0123456789ab.1700000003.12
    Job_Owner = ada@polaris-login-02
    job_state = C

Job Id: 4715[].polaris
    Job_Name = something_else
    Job_Owner = ada@polaris-login-02
    job_state = B
"""


def test_only_jobs_of_ours_that_are_not_over_are_found_in_the_queue():
    jobs = marked_jobs(QSTAT.splitlines(), "ada")
    assert jobs == [
        ("4711.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov", MARK),
        ("4712.polaris", MARK),
    ]
    assert marked_jobs([], "ada") == []


def test_a_cluster_without_gpus_is_asked_for_none():
    script = rendered(site("pbs", cores_per_node="128", select="mem=240gb").provider(MARK), "pool")
    assert "#PBS -l select=4:ncpus=128:mem=240gb" in script.splitlines()


@pytest.mark.parametrize(
    ("name", "submits"),
    [("frontier", "sbatch"), ("summit", "bsub"), ("polaris", "qsub"), ("titan", "qsub")],
)
def test_a_script_is_shown_and_nothing_submitted(name, submits, tmp_path, monkeypatch):
    (tmp_path / submits).write_text(f"#!/bin/sh\ntouch {tmp_path}/submitted\n")
    (tmp_path / submits).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    texts = [
        rendered(site(name).provider(MARK), "pool", folder) for folder in ("<a>", "<a>", "<b>")
    ]
    assert texts[0] == texts[1] == texts[2].replace("<b>", "<a>")
    assert "pool" in texts[0].splitlines()
    assert [path.name for path in tmp_path.iterdir()] == [submits]


def test_steps_of_pals_say_how_many_ranks_the_fullest_node_has():
    shape = Shape(num_ranks=10, cores_per_rank=8, gpus_per_rank=1)
    assert " ".join(site("polaris").command(shape)).startswith("mpiexec -n 10 --ppn 4 ")


def test_where_there_are_no_gpus_none_is_named_to_the_ranks():
    environment = site("pbs", cores_per_node="8").environment(Shape(num_ranks=1))
    assert "CUDA_VISIBLE_DEVICES" not in environment


@pytest.mark.parametrize(
    ("name", "shape", "line"),
    [
        ("titan", Shape(num_ranks=4, cores_per_rank=8), "-n 4 -N 2 -d 8"),
        ("theta", Shape(num_ranks=5, cores_per_rank=16), "-n 5 -N 3 -d 16"),
    ],
)
def test_steps_of_aprun_name_their_nodes(name, shape, line):
    assert " ".join(site(name).command(shape)) == f"aprun {line} -cc depth -L {{hosts}}"


def test_a_node_of_a_cray_runs_one_task_at_a_time():
    assert site("titan").num_slots(Shape(num_ranks=1)) == 4
    assert site("titan").node_share(Shape(num_ranks=1)) == 1
    assert site("polaris").num_slots(Shape(num_ranks=1, cores_per_rank=8)) == 16


@pytest.mark.parametrize("name", ["polaris", "titan", "theta"])
def test_machines_of_known_shape_need_an_account(name):
    with pytest.raises(SiteError, match="account"):
        sites.get(name, {"nodes": "2", "walltime_min": "60"})


def test_theta_says_that_it_is_gone():
    with pytest.raises(SiteError) as caught:
        site("theta").check()
    assert str(caught.value) == (
        "Theta was switched off on 2023-12-31, and Parsl has no provider for its batch system, "
        "Cobalt; polaris is its successor: --site polaris"
    )


def test_without_pbs_the_user_is_told_where_to_go(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SiteError) as caught:
        site("pbs", cores_per_node="8").check()
    assert str(caught.value) == (
        "PBS is missing: there is no 'qsub' on PATH; start the driver on a login node of the "
        "cluster"
    )
