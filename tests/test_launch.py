"""The body of the Parsl app: what it makes of every way in which a job can end.

The launch line's own programs stand in for MPI: `sh -c '...'` ignores the training line after it.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from training_helpers import launch_of, pilot

from apps import launch
from apps.contract import (
    Data,
    Failure,
    Fingerprint,
    Layout,
    Model,
    Objective,
    TaskPaths,
    Training,
    TrainResult,
    TrainTask,
)


def make_task(**layout) -> TrainTask:
    return TrainTask(
        study="s",
        trial=0,
        fold=0,
        seed=1,
        split_seed=1,
        model=Model(source="m.py:M"),
        data=Data(files=["a.h5"], inputs="x", targets="y"),
        training=Training(),
        layout=Layout(**layout),
        objective=Objective(goal="min"),
        fingerprint=Fingerprint(data="", model="", code=""),
    )


def make_result(task: TrainTask, **changes) -> TrainResult:
    facts = {
        "key": task.key(), "fom": 0.5, "epoch": 1, "start_epoch": 0, "epochs": 1,
        "stopped": "epochs", "metrics": {"val_loss": 0.5}, "seconds": 1.0,
        "samples_per_second": 10.0, "training_s": 0.8, "compute_s": 0.5, "communication_s": 0.1,
        "data_s": 0.1, "idle_s": 0.1, "inference_us": 2.0, "num_ranks": 1, "hosts": ["h"],
        "devices": ["cpu"], "num_train": 8, "num_val": 2, "num_parameters": 3, "versions": {},
    }  # fmt: skip
    return TrainResult(**{**facts, **changes})


def run(task: TrainTask, folder: Path, shell: str, environment=None):
    return start(task, folder, ["sh", "-c", shell], environment)


def start(task: TrainTask, folder: Path, command: list[str], environment=None):
    how = launch_of(command, environment)
    with pilot(folder.parent / "pilot"):
        return launch.run_training(dataclasses.asdict(task), how, str(folder), attempt=1)


def failure_of(task: TrainTask, folder: Path, shell: str) -> Failure:
    with pytest.raises(RuntimeError) as caught:
        run(task, folder, shell)
    assert type(caught.value) is RuntimeError  # anything else might not unpickle in the driver
    return Failure(**json.loads(str(caught.value)))


def test_the_result_file_is_the_result(tmp_path):
    task = make_task()
    make_result(task).write(tmp_path / "made.json")
    result = run(task, tmp_path / "t", f"cp {tmp_path}/made.json {tmp_path}/t/result.json")
    assert result == dataclasses.asdict(make_result(task))
    assert TrainTask.read(TaskPaths(tmp_path / "t").task) == task


def test_a_finished_task_is_not_started_again(tmp_path):
    task = make_task()
    make_result(task).write(TaskPaths(tmp_path).result)
    assert run(task, tmp_path, f"touch {tmp_path}/started")["fom"] == 0.5
    assert not (tmp_path / "started").exists()


def test_a_result_of_another_task_does_not_count(tmp_path):
    make_result(make_task(), key="other").write(TaskPaths(tmp_path).result)
    assert failure_of(make_task(), tmp_path, "exit 3").reason == "launch_failed"


def test_a_result_counts_only_if_whole(tmp_path):
    task = make_task()
    paths = TaskPaths(tmp_path)
    make_result(task).write(paths.result)
    paths.result.write_text(paths.result.read_text()[:-20])
    assert launch.finished_result(paths, task.key()) is None


def test_the_reason_that_a_rank_wrote_is_the_reason(tmp_path):
    told = Failure(reason="diverged", message="training loss became nan in epoch 2", rank=1)
    told.write(tmp_path / "made.json")
    shell = f"cp {tmp_path}/made.json {tmp_path}/t/failure.json; exit 1"
    assert failure_of(make_task(), tmp_path / "t", shell) == told


def test_without_a_reason_the_exit_status_and_the_last_words_are_given(tmp_path):
    said = f"touch {tmp_path}/begun; echo 'no space on device' >&2; echo ---- >&2; exit 7"
    failure = failure_of(make_task(), tmp_path, said)
    assert failure == Failure(reason="exit", code=7, message="no space on device")
    assert failure.name == "exit 7"


def test_ranks_that_never_found_each_other_were_not_launched(tmp_path):
    failure = failure_of(make_task(), tmp_path, f"touch {tmp_path}/begun; exit 3")
    assert failure.name == "exit 3"
    said = "echo 'The PMIx server could not start' >&2; exit 213"
    assert failure_of(make_task(), tmp_path, said) == Failure(
        reason="launch_failed",
        message="exit status 213 before its ranks had begun: The PMIx server could not start",
    )
    failure = failure_of(make_task(), tmp_path, "exit 3")  # each attempt for itself
    assert failure.message == "exit status 3 before its ranks had begun: no output"


@pytest.mark.parametrize(
    ("shell", "name"),
    [
        ("kill -9 $$", "signal 9"),
        ("kill -15 $$", "signal 15"),
        ("exit 139", "signal 11"),
        (
            "echo 'rank 1 with PID 0 on node x exited on signal 6 (Aborted).' >&2; exit 1",
            "signal 6",
        ),
        ("echo 'srun: error: n1: task 0: Out Of Memory' >&2; exit 137", "oom"),
        (
            "echo 'slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0' >&2;"
            "echo 'srun: error: n1: task 0: Killed' >&2; exit 137",
            "oom",
        ),
        ("echo 'srun: error: Node failure on n2' >&2; kill -9 $$", "node_lost"),
        ("echo '[NID 00012] Apid 77 killed. Cause: nodefailed event' >&2; exit 1", "node_lost"),
    ],
)
def test_what_ended_a_job_from_outside_is_named(tmp_path, shell, name):
    assert failure_of(make_task(), tmp_path, f"touch {tmp_path}/begun; {shell}").name == name


def test_a_rank_that_the_system_ended_for_want_of_memory_is_named(tmp_path, monkeypatch):
    counts = iter((4, 5))
    monkeypatch.setattr(launch, "_oom_kills", lambda: next(counts))
    assert failure_of(make_task(), tmp_path, "kill -9 $$").name == "oom"


def test_a_program_that_is_not_there_is_a_launch_failure(tmp_path):
    with pytest.raises(RuntimeError) as caught:
        start(make_task(), tmp_path, ["no-such-mpirun"])
    assert json.loads(str(caught.value))["reason"] == "launch_failed"


def test_output_goes_to_files_attempt_after_attempt(tmp_path):
    for _ in range(2):
        failure_of(make_task(), tmp_path, "echo out; echo err >&2; exit 1")
    assert TaskPaths(tmp_path).stdout.read_text() == "out\nout\n"
    assert TaskPaths(tmp_path).stderr.read_text().count("=== attempt 1") == 2


def test_a_job_past_its_time_is_ended_with_all_its_processes(tmp_path, monkeypatch):
    """Also those that ignore SIGTERM, and those in a process group of their own, as mpirun's."""
    monkeypatch.setattr(launch, "TERM_GRACE_S", 0.5)
    (tmp_path / "stubborn.py").write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n"
        "    os.setpgid(0, 0)\n"
        f"open({str(tmp_path / 'pids')!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
        "time.sleep(100)\n"
    )
    shell = f"exec {sys.executable} {tmp_path}/stubborn.py"
    failure = failure_of(make_task(walltime_min=0.02), tmp_path, shell)
    assert failure == Failure(
        reason="time_limit", message="stopped after layout.walltime_min = 0.02 minutes"
    )
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert not [pid for pid in pids if is_alive(pid)]


def test_a_job_is_stopped_before_the_pilot_around_it_ends(tmp_path, monkeypatch):
    monkeypatch.setenv(launch.PILOT_END, str(time.time() + launch.PILOT_GRACE_S + 5))
    failure = failure_of(make_task(), tmp_path, "exec sleep 100")
    assert failure == Failure(reason="walltime", message="the pilot ended")


def test_a_job_does_not_begin_in_a_pilot_that_is_about_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "LATE_S", 0.0)
    monkeypatch.setenv(launch.PILOT_END, str(time.time() + launch.PILOT_GRACE_S - 1))
    failure = failure_of(make_task(), tmp_path, f"touch {tmp_path}/began")
    assert failure == Failure(reason="walltime", message="too late in the pilot to begin")
    monkeypatch.setenv(launch.PILOT_END, str(time.time() + 3600))
    monkeypatch.setenv(launch.LAST_START, str(time.time() - 1))
    assert failure_of(make_task(), tmp_path, f"touch {tmp_path}/began") == failure
    assert not (tmp_path / "began").exists()


@pytest.mark.parametrize("said", ["failure", "result"])
def test_a_job_that_said_how_it_went_and_hangs_in_its_end_is_ended(tmp_path, monkeypatch, said):
    """As an mpirun that outlives ranks does when several of them abort at once."""
    monkeypatch.setattr(launch, "END_GRACE_S", 0.3)
    task = make_task(walltime_min=1)
    made = {
        "failure": Failure(reason="exception", message="MPI_ERR_PROC_FAILED", rank=1),
        "result": make_result(task),
    }[said]
    made.write(tmp_path / "made.json")
    shell = f"cp {tmp_path}/made.json {tmp_path}/t/{said}.json; echo $$ > {tmp_path}/pid; sleep 100"
    if said == "failure":
        assert failure_of(task, tmp_path / "t", shell) == made
    else:
        assert run(task, tmp_path / "t", shell) == dataclasses.asdict(made)
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_a_killed_worker_takes_its_job_along(tmp_path):
    worker = subprocess.Popen(
        [sys.executable, "-c",
         "import dataclasses, sys; sys.path.insert(0, sys.argv[1]);"
         "from test_launch import make_task, run; from pathlib import Path;"
         "run(make_task(), Path(sys.argv[2]), 'echo $$ > $WHERE; exec sleep 100',"
         " {'WHERE': sys.argv[2] + '/pid'})",
         str(Path(__file__).parent), str(tmp_path)],
    )  # fmt: skip
    pid = int(wait_for(lambda: (tmp_path / "pid").read_text().strip()))
    worker.kill()
    worker.wait()
    wait_for(lambda: not is_alive(pid))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition, patience_s: float = 20.0):
    """The first true value of `condition`; a file that is not there yet counts as not true."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            value = condition()
        except OSError:
            value = None
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError("waited in vain")
