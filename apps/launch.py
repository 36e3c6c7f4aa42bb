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
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from apps import room
from apps.contract import (
    Failure,
    TaskPaths,
    TrainResult,
    TrainTask,
    canonical_json,
    from_dict,
    read_json,
    write_json,
)

PILOT_END = "N3LO_PILOT_END"  # in a worker's environment: when its batch job ends, as of time()
LAST_START = "N3LO_LAST_START"  # and when it begins no task any more, or only at its end
PILOT_GRACE_S = 30.0  # before it: what runs is stopped in good order, and goes on in the next one
LATE_S = 10.0  # a worker that is late lets so much pass, in which its pilot is given no more tasks
TERM_GRACE_S = 10.0  # between SIGTERM and SIGKILL
END_GRACE_S = 15.0  # for a job that has written its result, or why it failed
_PR_SET_PDEATHSIG = 1
# In the words of launchers and batch systems, which come last.
LAST_WORDS = 20  # lines
_OUT_OF_MEMORY = re.compile(r"oom[-_ ]kill|out of memory", re.IGNORECASE)
_NODE_LOST = re.compile(r"node[ _]?fail|lost communication with", re.IGNORECASE)
_HUNG = 1  # taken as the exit status of a job that said how it ended and did not end


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a site starts a task.

    The launch line up to the program, such as ["mpirun", "-n", "2"], and the variables for the
    ranks, on top of the worker's own, may have placeholders: see `room.Place.filled`.
    """

    command: list[str]
    environment: dict[str, str]
    need: room.Need
    avoid: list[str]  # nodes on which tasks have failed

    @classmethod
    def of_plain(cls, content: dict[str, Any]) -> Launch:
        return cls(**{**content, "need": room.Need(**content["need"])})

    def placed(self, place: room.Place) -> tuple[list[str], dict[str, str]]:
        """The launch line, and all variables, of a task that has its place."""
        own = {name: place.filled(text) for name, text in self.environment.items()}
        return [place.filled(word) for word in self.command], {**os.environ, **own}


def run_training(
    task: dict[str, Any], how: dict[str, Any], folder: str, attempt: int
) -> dict[str, Any]:
    """Train one task in `folder` and return its TrainResult as a dict.

    Args:
        task: a TrainTask as a dict.
        how: a Launch as a dict.
        folder: the task's folder, on a file system that driver and ranks share.
        attempt: how many times this task was started, this time included.

    Raises:
        RuntimeError: the training failed; the text is a Failure as JSON.
    """
    paths = TaskPaths(Path(folder))
    try:
        outcome = _run(from_dict(TrainTask, task), Launch.of_plain(how), paths, attempt)
    except Exception as error:  # noqa: BLE001  nothing foreign may cross to the driver
        outcome = Failure(reason="launch_failed", message=f"{type(error).__name__}: {error}")
    if isinstance(outcome, Failure):
        raise RuntimeError(canonical_json(dataclasses.asdict(outcome)))
    return outcome


def _run(task: TrainTask, how: Launch, paths: TaskPaths, attempt: int) -> dict[str, Any] | Failure:
    key = task.key()
    pilot_end = float(os.environ.get(PILOT_END, "inf")) - PILOT_GRACE_S
    last_start = min(pilot_end, float(os.environ.get(LAST_START, "inf")))
    with room.Room.of_pilot().taken(task.id, how.need, how.avoid, last_start) as tenant:
        if tenant is None:
            time.sleep(LATE_S)
            return Failure(reason="walltime", message="too late in the pilot to begin")
        finished = finished_result(paths, key)
        if finished is not None:  # its driver was killed before it could hear of it
            return finished
        for of_last_attempt in (paths.failure, paths.result, paths.begun):
            of_last_attempt.unlink(missing_ok=True)
        task.write(paths.task)
        own_end = time.time() + task.layout.walltime_min * 60
        kills = _oom_kills()
        command, environment = how.placed(tenant.place)
        line = training_line(command, paths)
        with (
            open(paths.stdout, "ab") as stdout,
            open(paths.stderr, "ab") as stderr,
        ):
            header = f"=== attempt {attempt}, {time.strftime('%F %T')}: {' '.join(line)}\n"
            stderr.write(header.encode())
            stderr.flush()
            with job(line, environment, (stdout, stderr), tenant) as process:
                write_json(paths.place, _whereabouts(tenant.place, process.pid))
                exit_code = _wait(process, paths, min(own_end, pilot_end))
    finished = finished_result(paths, key)
    if finished is not None:
        return finished
    if exit_code is not None:
        return _explain(paths, exit_code, _oom_kills() > kills)
    if pilot_end < own_end:
        return Failure(reason="walltime", message="the pilot ended")
    minutes = f"{task.layout.walltime_min:g}"
    message = f"stopped after layout.walltime_min = {minutes} minutes"
    return Failure(reason="time_limit", message=message)


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


@contextlib.contextmanager
def job(
    line: list[str],
    environment: dict[str, str],
    output: tuple[IO[bytes], IO[bytes]],
    tenant: room.Tenant,
) -> Iterator[subprocess.Popen[bytes]]:
    """A job in a session of its own, in its room; what is left of it at the end is stopped.

    Output goes to files: a pipe that nobody empties would stop it.
    """
    process = subprocess.Popen(
        line,
        stdin=subprocess.DEVNULL,
        stdout=output[0],
        stderr=output[1],
        env=environment,
        start_new_session=True,
        preexec_fn=partial(_become_job, tenant.place),
    )
    try:
        tenant.holds(process.pid)
        yield process
    finally:
        _end_session(process)


def _wait(process: subprocess.Popen[bytes], paths: TaskPaths, end: float) -> int | None:
    """The exit code; None if it ran too long.

    One that has said how it went is not waited for much longer: an mpirun that outlives ranks
    locks itself now and then when several abort at once, and MPI_Finalize may wait for the dead.
    """
    deadline = time.monotonic() + end - time.time()
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


def _become_job(place: room.Place) -> None:
    """On its cores; and a worker that is killed takes its job along (Linux only).

    By SIGTERM, at which launchers end their ranks on other nodes too.
    """
    if place.pinned:
        os.sched_setaffinity(0, {int(core) for core in place.cores})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _whereabouts(place: room.Place, launcher: int) -> dict[str, Any]:
    """Where an attempt runs, for whoever looks for it when its worker is gone."""
    return {
        "job": os.environ.get(room.JOB, ""),
        "hosts": place.hosts,
        "launched_by": [socket.gethostname(), launcher],
        "begun": time.time(),
    }


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL, to whatever of the job is left.

    By session and not by process group, because mpirun gives every rank a group of its own.
    """
    for sent, patience_s in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, TERM_GRACE_S)):
        deadline = time.monotonic() + patience_s
        if process.poll() is None and sent == signal.SIGTERM:
            process.terminate()  # mpirun passes it on to its ranks, also those on other nodes
        while left := room.session_members(process.pid):
            if process.poll() is not None or sent == signal.SIGKILL:
                for pid in left:
                    _signal(pid, sent)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
            process.poll()  # reaps it, so that it does not count as left


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _explain(paths: TaskPaths, exit_code: int, had_oom_kill: bool) -> Failure:
    """The reason of a job without a result, from what it left behind."""
    try:
        return from_dict(Failure, read_json(paths.failure))
    except (OSError, ValueError, TypeError):
        log = "\n".join(_output(paths.stderr).splitlines()[-LAST_WORDS:])
    last = _last_line(log)
    number = _signal_number(exit_code, last)
    if _OUT_OF_MEMORY.search(log) or (had_oom_kill and number == signal.SIGKILL):
        return Failure(reason="oom", message=f"the system ended a rank for want of memory: {last}")
    if _NODE_LOST.search(log):
        return Failure(reason="node_lost", message=last)
    if number is not None:
        said = f"ended by {signal.Signals(number).name}: {last}"
        return Failure(reason="signal", code=number, message=said)
    if not paths.begun.exists():
        message = f"exit status {exit_code} before its ranks had begun: {last}"
        return Failure(reason="launch_failed", message=message)
    return Failure(reason="exit", code=exit_code, message=last)


def _signal_number(exit_code: int, last: str) -> int | None:
    """By which signal a job ended, as Python, a shell, or the launcher's last line has it."""
    said = re.search(r"\bsignal (\d+)", last)
    for number in (-exit_code, exit_code - 128, int(said[1]) if said else 0):
        if number in set(signal.Signals):
            return number
    return None


def _oom_kills() -> int:
    """How often this host has ended a process for want of memory, since it started."""
    try:
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(counts.get("oom_kill", 0))


def _output(path: Path) -> str:
    """What the last attempt has left in its log."""
    text = path.read_text(errors="replace") if path.exists() else ""
    return text.rpartition("=== attempt")[2].partition("\n")[2]


def _last_line(log: str) -> str:
    """The last line that says something, without the rules that mpirun draws."""
    # A full disk leaves zeros.
    said = [line.strip() for line in log.splitlines() if line.strip(" -=*\t\0")]
    return said[-1][:300] if said else "no output"
