"""The driver in a job: what is found of the job, and how a site is placed in it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from test_campaign import FINGERPRINT, ThreadEngine, distance

import sites
from apps.contract import Failure
from sites import inside
from sites.base import Site, SiteError
from sites.batch import mark_of, seconds_of
from sites.launchers import Shape
from sites.lsf import Lsf
from sites.pbs import Alps, Pbs, facts_of
from sites.slurm import Frontier, Slurm
from workflow import cli, driverjob, runfolder, session
from workflow.campaign import Campaign
from workflow.console import Console
from workflow.ledger import Ledger, session_facts
from workflow.plan import Planner
from workflow.study import load

STANDINS = Path(__file__).parent / "standins"
COLUMNS = ["trial", "fold", "status", "fom", "training.optimizer.lr", "model.args.width", "key"]
JOB_VARIABLES = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "N3LO_JOB", "N3LO_PILOT_END")


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    for name in JOB_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def program(tmp_path, monkeypatch) -> Callable[[str, str], None]:
    """Put a program on PATH that prints some lines."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def put(name: str, prints: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\ncat <<'END'\n{prints}\nEND\n")
        (folder / name).chmod(0o755)

    return put


@pytest.fixture
def slurm_job(program, monkeypatch) -> float:
    """A job of Slurm, of nodes that differ, around this process; when it ends."""
    end = time.time() + 1800
    program("scontrol", "n1\nn2\nn3")
    for name, value in {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_JOB_CPUS_PER_NODE": "64(x2),48",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_JOB_END_TIME": f"{end:.0f}",
    }.items():
        monkeypatch.setenv(name, value)
    return end


def test_slurm_says_what_a_job_has_and_when_it_ends(slurm_job):
    site = sites.get("inside", {})
    assert isinstance(site, Slurm)
    assert (site.name, site.nodes, site.cores_per_node, site.gpus_per_node) == ("inside", 3, 48, 4)
    assert site.end == round(slurm_job) - 60
    assert site.num_slots(Shape(num_ranks=1, cores_per_rank=12, gpus_per_rank=1)) == 3 * 4
    shape = Shape(num_ranks=8, gpus_per_rank=1)
    machine = {"nodes": "3", "walltime_min": "30", "cores_per_node": "48", "gpus_per_node": "4"}
    pilots = sites.get("slurm", machine)
    assert site.command(shape) == pilots.command(shape)
    assert site.need(shape) == pilots.need(shape)
    assert site.environment(shape) == pilots.environment(shape)


def test_without_an_end_in_the_environment_the_queue_is_asked(slurm_job, program, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    program("squeue", "1-00:30:00")
    assert sites.get("inside", {}).end == pytest.approx(time.time() + 86400 + 1740, abs=5)
    program("squeue", "UNLIMITED")
    with pytest.raises(SiteError, match="site 'inside' needs walltime_min: add --set walltime_"):
        sites.get("inside", {})
    limited = sites.get("inside", {"walltime_min": "20"})
    assert limited.end == pytest.approx(time.time() + 1200, abs=5)


def test_the_user_may_take_less_of_a_job_than_it_has_and_not_more(slurm_job):
    assert sites.get("inside", {"walltime_min": "10"}).end == pytest.approx(
        time.time() + 600, abs=5
    )
    assert sites.get("inside", {"walltime_min": "90"}).end == round(slurm_job) - 60
    assert sites.get("inside", {"cores_per_node": "8"}).num_slots(Shape(num_ranks=1)) == 24


def test_what_is_asked_of_a_queue_is_no_setting_of_a_job(slurm_job):
    with pytest.raises(SiteError) as caught:
        sites.get("inside", {"nodes": "2"})
    assert str(caught.value) == (
        "--set nodes: site 'inside' has no such setting; it knows: walltime_min, cores_per_node, "
        "gpus_per_node, steps, setup, mpi, memory_gb_per_node, threads_per_core"
    )


def test_workers_start_on_this_host_and_know_the_nodes_and_the_end(slurm_job, tmp_path):
    site = sites.get("inside", {"setup": "module load gcc"})
    [pool] = site.config(Shape(num_ranks=1, cores_per_rank=12), tmp_path / "parsl", None).executors
    assert (pool.address, pool.max_workers_per_node) == ("127.0.0.1", 12)
    assert type(pool.provider).__name__ == "LocalProvider"
    assert (pool.provider.max_blocks, pool.provider.nodes_per_block) == (1, 1)
    lines = pool.provider.worker_init.splitlines()
    assert lines[0] == f"export N3LO_PILOT_END={round(slurm_job) - 60}"
    assert 'export N3LO_NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST")' in lines
    assert lines[-1].startswith("unset SLURM_GPUS_PER_NODE ")
    assert site.pilots_of(Shape(num_ranks=1), tmp_path) is None


def test_a_site_of_the_user_s_own_may_be_like_the_job_around(slurm_job, tmp_path):
    (tmp_path / "sites.toml").write_text('[mine]\nlike = "inside"\nmpi = "pmi2"\n')
    site = sites.get("mine", {}, [tmp_path])
    assert (site.name, site.end) == ("mine", round(slurm_job) - 60)
    assert "--mpi=pmi2" in site.command(Shape(num_ranks=1))


def test_lsf_says_its_nodes_and_its_end_and_the_user_the_rest(program, monkeypatch, tmp_path):
    (tmp_path / "hosts").write_text("launch1\n" + "a01n01\n" * 42 + "a01n02\n" * 42)
    monkeypatch.setenv("LSB_JOBID", "815")
    monkeypatch.setenv("LSB_DJOB_HOSTFILE", str(tmp_path / "hosts"))
    program("bjobs", "1:59 L")
    with pytest.raises(SiteError, match="site 'inside' needs cores_per_node: add --set cores_"):
        sites.get("inside", {})
    site = sites.get("inside", {"cores_per_node": "42", "gpus_per_node": "6"})
    assert isinstance(site, Lsf)
    assert (site.nodes, site.num_slots(Shape(num_ranks=1, gpus_per_rank=1))) == (2, 12)
    assert site.end == pytest.approx(time.time() + 7080, abs=5)


STIME = "Sun Nov 29 08:00:00 2026"
PBS_PRO = f"""\
Job Id: 4711.polaris
    Job_Name = STDIN
    job_state = R
    Resource_List.ncpus = 128
    Resource_List.ngpus = 8
    Resource_List.nodect = 2
    Resource_List.walltime = 01:30:00
    stime = {STIME}
    Variable_List = PBS_O_HOME=/home/ada,
\tResource_List.nodect = 7"""
TORQUE = """\
Job Id: 4711.titan
    Resource_List.nodes = 2:ppn=16
    Resource_List.nodect = 2
    Walltime.Remaining = 3480"""


def test_pbs_pro_and_torque_say_it_in_their_own_words():
    assert facts_of(PBS_PRO.splitlines(), 0.0) == {
        "cores_per_node": 64,
        "gpus_per_node": 4,
        "end": time.mktime(time.strptime(STIME)) + 5400,
    }
    assert facts_of(TORQUE.splitlines(), 100.0) == {"end": 3580.0}


@pytest.mark.parametrize(("launcher", "kind"), [("mpiexec", Pbs), ("aprun", Alps)])
def test_a_job_of_pbs_starts_tasks_by_what_is_there(program, monkeypatch, tmp_path, launcher, kind):
    (tmp_path / "nodes").write_text("x3001\nx3001\nx3002\n")
    monkeypatch.setenv("PBS_JOBID", "4711.polaris")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    program("qstat", PBS_PRO)
    program(launcher, "")
    site = sites.get("inside", {})
    assert isinstance(site, kind)
    assert (site.nodes, site.command(Shape(num_ranks=1))[0]) == (2, launcher)


def test_outside_of_any_job_there_is_one_line(n3lo, study_path):
    for command in ("run", "plan"):
        result = n3lo(command, study_path, "--site", "inside")
        assert result.returncode == 2
        assert result.stderr == (
            "n3lo: site 'inside' is the job that the driver is in, and it is in none: start it "
            "within salloc, sbatch, bsub or qsub, or choose another --site\n"
        )


def test_a_job_without_a_list_of_its_nodes_is_named(program, monkeypatch, tmp_path):
    (tmp_path / "hosts").write_text("launch1\n")
    monkeypatch.setenv("LSB_JOBID", "815")
    monkeypatch.setenv("LSB_DJOB_HOSTFILE", str(tmp_path / "hosts"))
    with pytest.raises(SiteError) as caught:
        sites.get("inside", {"cores_per_node": "42"})
    assert str(caught.value) == (
        "job 815 has no nodes: 'tail -n +2 \"$LSB_DJOB_HOSTFILE\" | uniq' names none"
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0:30", 30), ("30:00", 1800), ("04:30:00", 16200), ("2-04:30:00", 189000), ("NOT_SET", None)],
)
def test_times_are_read_as_batch_systems_print_them(text, seconds):
    assert seconds_of(text) == seconds


# -- a named site in a job ---------------------------------------------------------------------


def test_a_named_site_takes_nodes_and_walltime_from_the_job(slurm_job):
    site = inside.around("frontier", {"account": "hep101", "nodes": "90", "walltime_min": "5"})
    assert isinstance(site, Frontier)
    assert (site.name, site.nodes, site.pilots, site.cores_per_node) == ("frontier", 3, 1, 56)
    assert site.end == round(slurm_job) - 60
    assert inside.around("frontier", {"account": "hep101"}) is not None
    assert inside.around("summit", {"account": "hep101"}) is None  # there is no job of LSF


def test_a_site_without_a_queue_has_no_jobs_for_a_driver():
    for name in ("local", "inside"):
        with pytest.raises(SiteError, match=f"--driver-in-job: site '{name}' submits no jobs"):
            inside.around(name, {})


def test_a_driver_leaves_the_job_that_it_is_in_alone(slurm_job, program, tmp_path):
    """And cancels others of its run folder."""
    program("squeue", f"4711|{mark_of(tmp_path)}\n4712|{mark_of(tmp_path)}\n4713|n3lo-other")
    placed = inside.around("slurm", {"cores_per_node": "64"})
    assert placed.left(tmp_path) == ["4712"]


def test_a_job_of_ours_knows_its_end_by_itself(slurm_job, monkeypatch):
    monkeypatch.setenv("N3LO_PILOT_END", "1795943149")
    assert not Slurm.allocation().is_ours
    monkeypatch.setenv("N3LO_JOB", "4711")
    assert Slurm.allocation().is_ours
    assert Slurm.allocation().end == 1795943149


# -- the driver as a job -------------------------------------------------------------------------


@pytest.fixture
def queue(tmp_path, monkeypatch) -> Path:
    """Of the stand-ins of PBS and LSF, whose jobs run on this host."""
    folder = tmp_path / "queue"
    folder.mkdir()
    monkeypatch.setenv("STANDIN_QUEUE", str(folder))
    monkeypatch.setenv("PATH", f"{STANDINS / 'pbs'}:{STANDINS}:{os.environ['PATH']}")
    return folder


def words_of(name: str, *settings: str) -> list[str]:
    machine = ("account=hep101", "nodes=1", "walltime_min=10", "cores_per_node=2", *settings)
    return ["--site", name, *(word for each in machine for word in ("--set", each))]


@pytest.mark.campaign
@pytest.mark.parametrize(
    "name", ["polaris", pytest.param("summit", marks=pytest.mark.long)], ids=str
)
def test_a_driver_in_a_job_gives_the_same_ledger_as_one_on_this_host(
    n3lo, study_path, edit, tmp_path, queue, name
):
    edit("num_trials = 3", "num_trials = 2")
    here = n3lo(study_path, "--set", "cores=2", "--runs", "here")
    assert here.returncode == 0, here
    expected = Ledger(tmp_path / "here" / "small").tasks()
    of_pbs = f"setup=export PATH={STANDINS / 'pbs'}:$PATH STANDIN_QUEUE={queue}"
    words = words_of(name, *([of_pbs] if name == "polaris" else []))
    submitted = n3lo(study_path, "--runs", name, *words, "--driver-in-job")
    assert submitted.returncode == 0, submitted
    assert " was submitted to " in submitted.stdout
    machine = sites.get(name, {"account": "hep101", "nodes": "1", "walltime_min": "10"})
    wait_until(lambda: not machine.queued())
    said = [path.read_text() for path in (tmp_path / name / "small" / "jobs").glob("*out")]
    table = Ledger(tmp_path / name / "small").tasks()
    assert set(table["status"]) == {"done"}, said
    pd.testing.assert_frame_equal(table[COLUMNS], expected[COLUMNS])


def wait_until(condition: Callable[[], bool], patience_s: float = 120) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.2)


@pytest.fixture
def polaris(queue) -> Site:
    return sites.get("polaris", {"account": "hep101", "nodes": "1", "walltime_min": "10"})


def test_a_command_in_a_job_is_the_same_wherever_it_starts(study_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["rerun", "small.toml", "--trial", "3", "--runs", "my runs", "--site", "polaris"]
    words += ["--set", "setup=module load 'a b'", "--parallel", "4", "--driver-in-job"]
    options = cli._parser().parse_args(words)
    program = [sys.executable, "-P", "-m", "workflow.cli"]
    rest = [
        str(study_path), "--runs", f"{tmp_path}/my runs", "--site", "polaris",
        "--set", "setup=module load 'a b'", "--parallel", "4",
    ]  # fmt: skip
    assert cli._command(options, [3]) == [*program, "rerun", *rest, "--trial", "3", words[-1]]
    assert cli._command(options, []) == [*program, "run", *rest, words[-1]]  # of the next job


def test_a_study_that_waits_in_the_queue_is_not_submitted_twice(n3lo, study_path, tmp_path, queue):
    folder = tmp_path / "runs" / "small"
    folder.mkdir(parents=True)
    job = sites.get("polaris", {"account": "a", "nodes": "1", "walltime_min": "5"}).submit(
        folder, ["sleep", "60"]
    )
    result = n3lo(study_path, *words_of("polaris"), "--driver-in-job")
    assert result.returncode == 2
    assert result.stderr == (
        f"n3lo: job {job} of this study is in the queue already; wait for it, or take it out "
        f"first: qdel {job}\n"
    )
    assert len(list(queue.glob("*.json"))) == 1
    subprocess.run(["qdel", job], check=True)


def test_a_study_that_does_not_fit_is_not_submitted(n3lo, study_path, edit, queue):
    edit("walltime_min = 2", "walltime_min = 2\ncores_per_rank = 3")
    result = n3lo(study_path, *words_of("polaris"), "--driver-in-job")
    assert result.returncode == 2
    assert result.stderr.startswith("n3lo: a rank needs 3 cores (layout.cores_per_rank) and a node")
    assert not list(queue.glob("*.json"))


def test_the_next_job_follows_where_something_was_trained(polaris, tmp_path, capsys):
    folder = tmp_path / "runs"
    folder.mkdir()
    driverjob.go_on(polaris, folder, ["echo", "a b"], has_trained=False)
    assert capsys.readouterr().out == (
        "nothing was trained in this job, so that no other follows; to go on by hand: echo 'a b'\n"
    )
    os.environ[runfolder.MARK] = str(folder)
    driverjob.go_on(polaris, folder, ["echo", "a b"], has_trained=True)
    assert capsys.readouterr().out == "job 1.standin goes on with the study\n"
    assert runfolder.MARK not in os.environ  # or that job's driver would be swept by itself
    [script] = (path for path in (folder / "jobs").iterdir() if path.suffix.strip(".").isdigit())
    assert script.read_text().strip().endswith("\necho 'a b'")


def test_where_jobs_may_not_submit_jobs_the_user_is_told_how_to_go_on(
    polaris, tmp_path, program, capsys
):
    program("qsub", "")
    refused = Path(os.environ["PATH"].partition(":")[0]) / "qsub"
    refused.write_text("#!/bin/sh\necho 'qsub: not from a compute node' >&2\nexit 1\n")
    driverjob.go_on(polaris, tmp_path, ["echo", "a b"], has_trained=True)
    assert capsys.readouterr().out == (
        "PBS did not take the job: qsub: not from a compute node; from a login node, go on by "
        "hand: echo 'a b'\n"
    )


# -- the end of a job ------------------------------------------------------------------------


@pytest.fixture
def started(study_path, tmp_path) -> Callable[[Callable], Campaign]:
    """A campaign, in threads, of tasks that are trained by a function."""

    def start(train: Callable) -> Campaign:
        file = load(study_path)
        (tmp_path / "run").mkdir(exist_ok=True)
        ledger = Ledger(tmp_path / "run")
        scoring = session.scoring_of(file.study.search).plain()
        ledger.record_session(**session_facts(FINGERPRINT, site="threads", scoring=scoring))
        planner = Planner(file, file.data_files(), FINGERPRINT)
        console = Console(file.study.search.objective, 3, file.study.data.folds, 2)
        engine = ThreadEngine(tmp_path / "run", train)
        return Campaign(planner, session.make_search(file), ledger, engine, console)

    return start


CUT = Failure(reason="walltime", message="the pilot ended")


def test_what_the_end_of_the_job_cuts_off_does_not_begin_again_there(started):
    end = time.time() + 1.0

    def train(task):
        if task.trial != 1:
            return distance(task)
        time.sleep(max(end - time.time(), 0.0))
        return CUT

    campaign = started(train)
    campaign.last_begin = end
    campaign.run()
    assert campaign.is_cut_short
    assert campaign.has_trained
    assert 1 <= campaign.cut_off <= 2
    executed = campaign.engine.executed
    assert len(executed) == len(set(executed))
    again = started(distance)
    again.run()
    assert set(again.ledger.tasks()["status"]) == {"done"}
    assert len(again.ledger.trials()) == 3


def test_nothing_begins_once_the_job_is_about_to_end(started):
    campaign = started(distance)
    campaign.last_begin = time.time() - 1
    campaign.run()
    assert campaign.is_cut_short
    assert campaign.engine.executed == []
    assert not campaign.has_trained


def test_a_study_that_is_done_when_the_job_ends_is_not_cut_short(started):
    campaign = started(distance)
    campaign.run()
    campaign.last_begin = time.time() - 1
    assert not campaign.is_cut_short
