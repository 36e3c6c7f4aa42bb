"""PBS in its kinds: pilots by qsub, tasks as steps by the mpiexec of HPE's PALS or by aprun.

PBS Pro and Torque differ in how nodes are asked for; Theta's Cobalt took after them.
"""

from __future__ import annotations

import getpass
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

from sites.base import SiteError
from sites.batch import POLL_S, Batch, ask, seconds_of
from sites.launchers import Shape, aprun, pals

_OVER = ("C", "F")  # Torque and PBS Pro go on to list a job for a while


@dataclass(frozen=True, kw_only=True)
class Qsub(Batch):
    """Pilots by qsub."""

    programs = ("qsub", "qstat", "qdel")
    system = "PBS"
    cancels = "qdel"
    hosts_of_job = 'sort -u "$PBS_NODEFILE"'
    job_number = "$PBS_JOBID"

    queue: Annotated[str | None, "queue, as of qsub"] = None

    @classmethod
    def job_facts(cls, job: str) -> dict[str, Any]:
        return facts_of(ask(["qstat", "-f", job]), time.time())

    def queued(self) -> list[tuple[str, str]]:
        return marked_jobs(ask(["qstat", "-f"]), getpass.getuser())

    def _options(self) -> list[str]:
        """Of qsub. In the script and not on its line, so that the script says all."""
        asked = {"-A": self.account, "-q": self.queue}
        options = [f"#PBS {letter} {value}" for letter, value in asked.items() if value is not None]
        return [*options, "#PBS -r n"]  # a lost pilot is not run again: Parsl asks for another

    def _kind(self, provider: Any, mark: str) -> Any:
        """A kind of Parsl's provider: its jobs are named by their mark, PBS having no comments.

        Torque counts the cores of each node where it is told how many there are.
        """
        cores = self.cores_per_node

        class Marked(provider):  # type: ignore[misc]
            status_polling_interval = POLL_S

            def submit(self, command: str, tasks_per_node: int, job_name: str = "") -> Any:
                return super().submit(command, cores, mark)

        return Marked


def marked_jobs(lines: Iterable[str], user: str) -> list[tuple[str, str]]:
    """Numbers and marks of a user's jobs in what `qstat -f` prints.

    Not in its JSON: one odd variable of anybody's job makes that unreadable as a whole
    (https://github.com/openpbs/openpbs/issues/2541).
    """
    jobs: dict[str, dict[str, str]] = {}
    for line in lines:
        if found := re.match(r"Job Id: (\S+)", line):
            facts = jobs[found[1]] = {}
        elif found := re.match(r" {4}(Job_Name|Job_Owner|job_state) = (.*)", line):
            facts[found[1]] = found[2]
    return [
        (job, mark[0])
        for job, facts in jobs.items()
        if facts["Job_Owner"].partition("@")[0] == user
        and facts["job_state"] not in _OVER
        and (mark := re.search(r"n3lo-[0-9a-f]+", facts["Job_Name"]))
    ]


def facts_of(lines: Iterable[str], now: float) -> dict[str, Any]:
    """What `qstat -f` prints of a job, as of an `Allocation`. Torque says no cores."""
    found = (re.match(r" {4}(\S+) = (.*)", line) for line in lines)
    said = {each[1]: each[2] for each in found if each}
    facts: dict[str, Any] = {}
    nodes, cores, gpus = (
        int(said.get(f"Resource_List.{name}", 0)) for name in ("nodect", "ncpus", "ngpus")
    )
    if nodes and cores:
        facts |= {"cores_per_node": cores // nodes, "gpus_per_node": gpus // nodes}
    if left := said.get("Walltime.Remaining"):
        facts["end"] = now + int(left)
    elif "stime" in said and (limit_s := seconds_of(said.get("Resource_List.walltime", ""))):
        facts["end"] = time.mktime(time.strptime(said["stime"])) + limit_s
    return facts


@dataclass(frozen=True, kw_only=True)
class Pbs(Qsub):
    """Any cluster of PBS Pro or OpenPBS with PALS: pilots by qsub, tasks by mpiexec."""

    name = "pbs"

    select: Annotated[
        str, "what each node is asked for besides cores and GPUs, such as mem=480gb"
    ] = ""

    def command(self, shape: Shape) -> list[str]:
        return pals(shape, self.nodes_of(shape))

    def environment(self, shape: Shape) -> dict[str, str]:
        gpus = {"CUDA_VISIBLE_DEVICES": "{gpus}"} if self.gpus_per_node else {}
        return {**super().environment(shape), **gpus}

    def provider(self, mark: str) -> Any:
        from parsl.providers import PBSProProvider

        gpus = f"ngpus={self.gpus_per_node}" if self.gpus_per_node else ""
        return self._kind(PBSProProvider, mark)(
            cpus_per_node=self.cores_per_node,
            select_options=":".join(filter(None, (gpus, self.select))),
            scheduler_options="\n".join(self._options()),
            worker_init=self._worker_init(),
            **self.blocks,
        )

    def _options(self) -> list[str]:
        # One chunk on each host, or PBS would put several of few cores on one; nobody else there.
        return [*super()._options(), "#PBS -l place=scatter:excl"]


@dataclass(frozen=True, kw_only=True)
class Polaris(Pbs):
    """ALCF's: 4 A100 and 32 cores a node.

    Queues: debug has at most 2 nodes for an hour, debug-scaling 10 for an hour, prod 10 and more
    for up to 24 hours.
    Sources: https://docs.alcf.anl.gov/polaris/running-jobs, its page on GPUs, and
    /polaris/workflows/parsl (2025).
    """

    name = "polaris"

    account: str = field()  # required, unlike that of the class above
    queue: str = "debug"
    select: str = "system=polaris"
    filesystems: Annotated[str, "file systems that a job needs, as of qsub -l"] = "home:eagle"
    cores_per_node: int = 32
    gpus_per_node: int = 4
    interface: str | None = "bond0"

    def _options(self) -> list[str]:
        return [*super()._options(), f"#PBS -l filesystems={self.filesystems}"]

    def _node(self) -> dict[str, Any]:
        node = super()._node()
        return {**node, "gpus": node["gpus"][::-1]}  # cores 0-7 are next to GPU 3, 24-31 to GPU 0


@dataclass(frozen=True, kw_only=True)
class Alps(Qsub):
    """Cray's machines of before 2018. Workers run on a service node, which starts the apruns."""

    whole_nodes = True

    def command(self, shape: Shape) -> list[str]:
        return aprun(shape, self.nodes_of(shape))

    def provider(self, mark: str) -> Any:
        from parsl.providers import TorqueProvider

        return self._kind(TorqueProvider, mark)(
            scheduler_options="\n".join(self._options()),
            worker_init=self._worker_init(),
            **self.blocks,
        )


@dataclass(frozen=True, kw_only=True)
class Titan(Alps):
    """OLCF's Cray XK7, switched off on 2019-08-02: 1 K20X and 16 cores a node.

    A job has 200 processes on its service node, and an aprun and its worker have two.
    Source: https://www.olcf.ornl.gov/kb_articles/job-execution-on-titan (of 2017).
    """

    name = "titan"

    account: str = field()  # required, unlike that of the class above
    steps: int | None = 90
    cores_per_node: int = 16
    gpus_per_node: int = 1


_COBALT = """#!/bin/bash

#COBALT -n ${nodes_per_block}
#COBALT -t ${walltime}
#COBALT --jobname ${jobname}
#COBALT -o ${submit_script_dir}/${jobname}.submit.stdout
#COBALT -e ${submit_script_dir}/${jobname}.submit.stderr
${scheduler_options}

${worker_init}

export JOBNAME="${jobname}"

${user_script}

"""


@dataclass(frozen=True, kw_only=True)
class Theta(Alps):
    """ALCF's Cray XC40, switched off on 2023-12-31: 64 cores of a Xeon Phi a node, no GPU.

    There are its script and its launch lines to be seen, and nothing submits them: Parsl had a
    provider for Cobalt until October 2024. A job may have 1000 aprun at once.
    Source: docs/theta in https://github.com/argonne-lcf/user-guides (of 2023).
    """

    name = "theta"
    hosts_of_job = 'for part in ${COBALT_PARTNAME//,/ }; do seq "${part%-*}" "${part#*-}"; done'
    job_number = "$COBALT_JOBID"

    account: str = field()  # required, unlike that of the class above
    queue: str = "default"
    filesystems: Annotated[str, "file systems that a job needs, as of qsub --attrs"] = (
        "home,theta-fs0"
    )
    steps: int | None = 1000
    cores_per_node: int = 64

    def check(self) -> None:
        raise SiteError(
            "Theta was switched off on 2023-12-31, and Parsl has no provider for its batch system, "
            "Cobalt; polaris is its successor: --site polaris"
        )

    def provider(self, mark: str) -> Any:
        provider = super().provider(mark)
        provider.template_string = _COBALT
        return provider

    def _options(self) -> list[str]:
        asked = (
            f"-A {self.account}",
            f"-q {self.queue}",
            f"--attrs filesystems={self.filesystems}",
        )
        return [f"#COBALT {option}" for option in asked]
