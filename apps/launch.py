"""The body of the Parsl app: start one MPI job, watch it, read its result. Standard library only.

It runs in a Parsl worker, which on some machines is a node where neither torch nor MPI may be
imported. It takes and returns plain types and raises nothing but RuntimeError(text): an exception
that the driver cannot unpickle would stop Parsl's result thread, and with it every later task.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from apps.contract import (
    Failure,
    TaskPaths,
    TrainResult,
    TrainTask,
    canonical_json,
    from_dict,
    read_json,
)

PILOT_END = "N3LO_PILOT_END"  # in a worker's environment: when its batch job ends, as of time()
PILOT_GRACE_S = 30.0  # before it: what runs is stopped in good order, and goes on in the next one
TERM_GRACE_S = 10.0  # between SIGTERM and SIGKILL
END_GRACE_S = 15.0  # for a job that has written its result, or why it failed
_PR_SET_PDEATHSIG = 1
_HUNG = 1  # taken as the exit status of a job that said how it ended and did not end


def run_training(
    task: dict[str, Any],
    command: list[str],
    environment: dict[str, str],
    folder: str,
    attempt: int,
) -> dict[str, Any]:
    """Train one task in `folder` and return its TrainResult as a dict.

    Args:
        task: a TrainTask as a dict.
        command: the launch line of the site up to the program, such as ["mpirun", "-n", "2"].
        environment: variables to set for the ranks, on top of the worker's own.
        folder: the task's folder, on a file system that driver and ranks share.
        attempt: how many times this task was started, this time included.

    Raises:
        RuntimeError: the training failed; the text is a Failure as JSON.
    """
    paths = TaskPaths(Path(folder))
    try:
        outcome = _run(from_dict(TrainTask, task), command, environment, paths, attempt)
    except Exception as error:  # noqa: BLE001  nothing foreign may cross to the driver
        outcome = Failure(reason="launch", message=f"{type(error).__name__}: {error}")
    if isinstance(outcome, Failure):
        raise RuntimeError(canonical_json(dataclasses.asdict(outcome)))
    return outcome


def _run(
    task: TrainTask, command: list[str], environment: dict[str, str], paths: TaskPaths, attempt: int
) -> dict[str, Any] | Failure:
    key = task.key()
    finished = finished_result(paths, key)
    if finished is not None:  # its driver was killed before it could hear of it
        return finished
    paths.failure.unlink(missing_ok=True)
    paths.result.unlink(missing_ok=True)
    task.write(paths.task)
    own_limit_s = task.layout.walltime_min * 60
    pilot_s = float(os.environ.get(PILOT_END, "inf")) - PILOT_GRACE_S - time.time()
    if pilot_s <= 0:
        return Failure(reason="walltime", message="the pilot ended before it began")
    exit_code = _execute(
        training_line(command, paths),
        {**_own_environment(), **environment},
        paths,
        attempt,
        min(own_limit_s, pilot_s),
    )
    finished = finished_result(paths, key)
    if finished is None and exit_code is None and pilot_s < own_limit_s:
        return Failure(reason="walltime", message="the pilot ended; it goes on in the next one")
    return finished or _explain(paths, exit_code, task.layout.walltime_min)


def training_line(command: list[str], paths: TaskPaths) -> list[str]:
    """The whole launch line of a task; -P: no file of the current folder passes for a module."""
    return [*command, sys.executable, "-P", "-m", "apps.train", str(paths.task)]


def finished_result(paths: TaskPaths, key: str) -> dict[str, Any] | None:
    """The result in a task's folder, if there is a whole one of this very task."""
    try:
        result = TrainResult.read(paths.result)
    except (OSError, ValueError, TypeError):
        return None
    return dataclasses.asdict(result) if result.key == key else None


def _own_environment() -> dict[str, str]:
    """This worker's environment, without the thread pinning that Parsl sets for a whole slot.

    Every rank would pin its first thread to the slot's first core.
    """
    pinning = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY")
    return {name: value for name, value in os.environ.items() if name not in pinning}


def _execute(
    line: list[str],
    environment: dict[str, str],
    paths: TaskPaths,
    attempt: int,
    limit_s: float,
) -> int | None:
    """Run `line` in a session of its own and return its exit code; None if it ran too long.

    Output goes to files: a pipe that nobody empties would stop the job.
    """
    with open(paths.stdout, "ab") as stdout, open(paths.stderr, "ab") as stderr:
        header = f"=== attempt {attempt}, {time.strftime('%F %T')}: {' '.join(line)}\n"
        stderr.write(header.encode())
        stderr.flush()
        process = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
        try:
            return _wait(process, paths, limit_s)
        finally:
            _end_session(process)


def _wait(process: subprocess.Popen[bytes], paths: TaskPaths, limit_s: float) -> int | None:
    """The exit code; None if it ran too long.

    One that has said how it went is not waited for much longer: an mpirun that outlives ranks
    locks itself now and then when several abort at once, and MPI_Finalize may wait for the dead.
    """
    deadline = time.monotonic() + limit_s
    had_said = False
    while True:
        left_s = deadline - time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=max(0.0, min(END_GRACE_S, left_s)))
        has_said = paths.result.exists() or paths.failure.exists()
        is_over = left_s <= END_GRACE_S
        if has_said and (had_said or is_over):
            return _HUNG
        if is_over:
            return None
        had_said = has_said


def _die_with_parent() -> None:
    """A worker that is killed takes its job along (Linux only; elsewhere the next start sweeps)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL, to whatever of the job is left.

    By session and not by process group, because mpirun gives every rank a group of its own.
    """
    for sent, patience_s in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, TERM_GRACE_S)):
        deadline = time.monotonic() + patience_s
        if process.poll() is None and sent == signal.SIGTERM:
            process.terminate()  # mpirun passes it on to its ranks, also those on other nodes
        while left := _session_members(process.pid):
            if process.poll() is not None or sent == signal.SIGKILL:
                for pid in left:
                    _signal(pid, sent)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
            process.poll()  # reaps it, so that it does not count as left


def _session_members(session: int) -> list[int]:
    """Process ids of the live members of a session; without /proc, of its leader alone."""
    members = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, sid = entry.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(sid) == session and state != "Z":
            members.append(int(entry.parent.name))
    return members


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _explain(paths: TaskPaths, exit_code: int | None, walltime_min: float) -> Failure:
    """The reason of a job without a result, from what it left behind."""
    if exit_code is None:
        return Failure(
            reason="time_limit",
            message=f"stopped after layout.walltime_min = {walltime_min:g} minutes",
        )
    try:
        return from_dict(Failure, read_json(paths.failure))
    except (OSError, ValueError, TypeError):
        last = _last_line(paths.stderr)
    if "PMIx server" in _tail(paths.stderr):  # now and then, where two mpirun start at once
        return Failure(reason="lost", message="mpirun could not start its own server")
    killed = exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL) or "signal 9" in last
    if killed:
        return Failure(
            reason="killed", message="a rank was killed by signal 9 (out of memory, or by hand)"
        )
    return Failure(reason="exit", message=f"exit status {exit_code}: {last}")


def _tail(path: Path) -> str:
    """The log of the last attempt."""
    text = path.read_text(errors="replace") if path.exists() else ""
    return text.rpartition("=== attempt")[2]


def _last_line(path: Path) -> str:
    """The last line of the log that says something, without the rules that mpirun draws."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    # A full disk leaves zeros.
    said = [line.strip() for line in lines if line.strip(" -=*\t\0")]
    return said[-1][:300] if said else "no output"
