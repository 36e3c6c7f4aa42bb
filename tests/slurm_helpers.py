"""A real Slurm: several nodes of this host in a network of their own, and drivers beside it.

Each file of tests that imports the fixtures has a cluster of its own; two may run at once.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from conftest import ROOT

from apps.contract import read_json_lines
from workflow.ledger import Ledger

LAB = Path(__file__).parent / "slurm"
SETTINGS = ("nodes=2", "cores_per_node=2", "interface=lo", "partition=debug")


class Cluster:
    """Slurm's daemons, and how to run something beside them."""

    def __init__(self, folder: Path, num_nodes: int = 4, cores: int = 2) -> None:
        self.folder = folder
        lab, here = shlex.quote(str(LAB)), shlex.quote(str(folder))
        script = (
            "hostname localhost; "  # which the daemons listen on
            "ip link set lo up; ip addr add 127.0.0.2/8 dev lo; "  # for getaddrinfo
            f"bash {lab}/up.sh {num_nodes} {cores} > {here}/up.out 2>&1 && echo up || "
            f"echo down; read -r line; bash {lab}/down.sh > {here}/down.out"
        )
        environment = {**os.environ, "SLURM_LAB": str(folder)}
        self.process = subprocess.Popen(
            ["unshare", "--net", "--uts", "bash", "-c", script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True,
        )  # fmt: skip
        if self.process.stdout.readline().strip() != "up":
            self.down()
            pytest.fail((folder / "up.out").read_text())
        wanted = f"source {here}/env.sh; env -0"
        shown = subprocess.run(["bash", "-c", wanted], capture_output=True, text=True, check=True)
        self.environment = dict(line.split("=", 1) for line in shown.stdout.split("\0") if line)

    def start(self, *words: str) -> subprocess.Popen:
        """A program that sees the cluster; it has the process id that it is started with."""
        inside = [*self._inside, *words]
        with open(self.folder / "out.txt", "a") as out:
            return subprocess.Popen(
                inside, env=self.environment, stdout=out, stderr=out, start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )  # fmt: skip

    def ask(self, *words: str) -> str:
        inside = [*self._inside, *words]
        answer = subprocess.run(
            inside, env=self.environment, capture_output=True, text=True, check=True
        )
        return answer.stdout.strip()

    @property
    def _inside(self) -> list[str]:
        return ["nsenter", "--net", "--uts", "--target", str(self.process.pid), "--"]

    def jobs(self) -> list[str]:
        return self.ask("squeue", "--noheader", "--format", "%i").split()

    def lose(self, node: str) -> None:
        """A node dies with all that runs there, and Slurm is told so."""
        own, conf = [], self.environment["SLURM_CONF"]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                variables, line = process.environ(), process.cmdline()
                there = (variables.get("SLURMD_NODENAME"), variables.get("SLURM_CONF"))
                if there == (node, conf):
                    own += [process, *(each for each in process.parents() if _is_stepd(each))]
                elif process.name() == "slurmd" and node in line and conf in line:
                    own.insert(0, process)  # or it would tell of the end of the others
        for process in own:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def mend(self, node: str) -> None:
        """A node that was lost starts again."""
        self.ask("slurmd", "-N", node, "-f", self.environment["SLURM_CONF"])
        self._wait_for(node)
        pid = (self.folder / f"run/slurmd-{node}.pid").read_text().strip()
        with open(self.folder / "run/pids", "a") as pids:  # of those to stop in the end
            pids.write(f"{pid} slurmd-{node}\n")

    def drain(self, node: str) -> None:
        self.ask("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")

    def resume(self, node: str) -> None:
        self.ask("scontrol", "update", f"nodename={node}", "state=resume")
        self._wait_for(node)

    def _wait_for(self, node: str) -> None:
        wait_until(lambda: self.ask("sinfo", "-h", "-n", node, "-o", "%t") == "idle")

    def down(self) -> None:
        self.process.communicate("end\n", timeout=60)


@pytest.fixture(name="cluster", scope="module")
def own_cluster(tmp_path_factory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    folder.parent.chmod(0o755)  # munged wants to be reached
    started = Cluster(folder)
    yield started
    started.down()


@pytest.fixture(name="drive")
def start_of_driver(cluster, study_path, tmp_path) -> Iterator[Callable[..., subprocess.Popen]]:
    drivers = []

    def start(*settings: str) -> subprocess.Popen:
        words = [word for each in (*SETTINGS, *settings) for word in ("--set", each)]
        driver = [sys.executable, str(ROOT / "run_workflow.py"), str(study_path)]
        runs = ["--runs", str(tmp_path / "runs")]
        drivers.append(cluster.start(*driver, "--site", "slurm", *words, *runs))
        return drivers[-1]

    yield start
    for driver in drivers:  # or one that is hung would keep nodes from further tests
        driver.terminate()
        driver.wait()


def _is_stepd(process: psutil.Process) -> bool:
    return process.name() == "slurmstepd"


def rows(tmp_path: Path, event: str) -> list[dict]:
    path = tmp_path / "runs" / "small" / "ledger.jsonl"
    return [row for row in read_json_lines(path) if row["event"] == event] if path.exists() else []


def done(tmp_path: Path) -> list[tuple[int, int]]:
    return [(row["trial"], row["fold"]) for row in rows(tmp_path, "end") if row["status"] == "done"]


def assert_each_done_once(tmp_path: Path, num_tasks: int, epochs: int) -> None:
    ledger = Ledger(tmp_path / "runs" / "small")
    tasks = ledger.tasks()
    assert set(tasks["status"]) == {"done"}
    assert len(tasks) == num_tasks
    assert sorted(done(tmp_path)) == list(zip(tasks["trial"], tasks["fold"], strict=True))
    for trial, fold in done(tmp_path):
        assert list(ledger.history(trial, fold)["epoch"]) == list(range(1, epochs + 1))


def wait_until(condition, patience_s: float = 60) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.2)
