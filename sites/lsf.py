"""LSF with jsrun: pilots by bsub, tasks as steps by jsrun. Summit, and its kind."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

from sites.batch import POLL_S, Batch, ask, seconds_of
from sites.launchers import Shape, jsrun


@dataclass(frozen=True, kw_only=True)
class Lsf(Batch):
    """Pilots by bsub, tasks as steps by jsrun.

    Workers run on the launch node that the machine gives to each job.
    """

    name = "lsf"
    programs = ("bsub", "bjobs", "bkill")
    system = "LSF"
    cancels = "bkill"
    hosts_of_job = 'tail -n +2 "$LSB_DJOB_HOSTFILE" | uniq'  # its first line is the launch node
    job_number = "$LSB_JOBID"
    unset = ("TMPDIR",)  # jsrun fails where it is set

    queue: Annotated[str | None, "queue, as of bsub"] = None

    @classmethod
    def job_facts(cls, job: str) -> dict[str, Any]:
        [left] = ask(["bjobs", "-noheader", "-o", "time_left", job])
        left_s = seconds_of(f"{left.partition(' ')[0]}:00")  # of "1:59 L"
        return {} if left_s is None else {"end": time.time() + left_s}

    def nodes_of(self, shape: Shape) -> int:
        # A resource set has GPUs for all of its ranks, masters or not.
        return super().nodes_of(dataclasses.replace(shape, num_masters=0))

    def command(self, shape: Shape) -> list[str]:
        return jsrun(shape, self.nodes_of(shape))

    def provider(self, mark: str) -> Any:
        from parsl.providers import LSFProvider

        class Polled(LSFProvider):  # type: ignore[misc]
            status_polling_interval = POLL_S

        return Polled(
            project=self.account,
            queue=self.queue,
            scheduler_options=f"#BSUB -Jd {mark}",
            worker_init=self._worker_init(),
            **self.blocks,
        )

    def queued(self) -> list[tuple[str, str]]:
        form = "jobid job_description delimiter='|'"
        lines = ask(["bjobs", "-noheader", "-o", form], nothing="No unfinished job found")
        return [(job, mark) for job, _, mark in (line.partition("|") for line in lines)]


@dataclass(frozen=True, kw_only=True)
class Summit(Lsf):
    """OLCF's, switched off on 2024-11-15: 6 V100 and 42 usable cores a node.

    A user has 4096 processes on a launch node, and a jsrun and its worker have four.
    Source: https://docs.olcf.ornl.gov/systems/summit_user_guide.html (of 2024).
    """

    name = "summit"

    account: str = field()  # required, unlike that of the class above
    steps: int | None = 1000
    cores_per_node: int = 42
    gpus_per_node: int = 6
    interface: str | None = "ib0"
