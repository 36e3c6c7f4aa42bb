"""Room for tasks in a pilot: which of them has which cores and GPUs of which nodes.

The workers of a pilot share a host, and there a folder with a file that says who has what. Each
takes room under a lock before it starts its task, and waits where there is none: the largest task
first, so that small ones do not keep a big one out for ever. Standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POOL = "N3LO_POOL"  # in a worker's environment: the folder
NODES = "N3LO_NODES"  # and the names of the pilot's nodes, with spaces or lines between them
NODE = "N3LO_NODE"  # and a Node as JSON: what each of them has
JOB = "N3LO_JOB"  # and the number of the batch job, where there is one
POLL_S = 0.1
ORPHAN_GRACE_S = 10.0  # for what is left of a task whose worker was killed


@dataclass(frozen=True, kw_only=True)
class Node:
    """What each node of a pilot has, by the ids that its launcher and CUDA know."""

    cores: list[str]
    gpus: list[str]
    tasks_per_gpu: int = 1
    pinned: bool = False  # a task's processes are kept on its cores by us


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a task takes: so many nodes, and on each of them ranks with cores, and GPUs.

    Of several nodes it has all that they have.
    """

    nodes: int
    ranks: int
    cores_per_rank: int
    gpus: int

    @property
    def cores(self) -> int:
        return self.ranks * self.cores_per_rank

    @property
    def size(self) -> tuple[int, int, int]:
        return self.nodes, self.gpus, self.cores


@dataclass(frozen=True, kw_only=True)
class Place:
    """The room that a task has."""

    hosts: list[str]
    cores: list[str] = field(default_factory=list)  # on each of them
    gpus: list[str] = field(default_factory=list)
    cores_per_rank: int = 1
    pinned: bool = False

    def filled(self, text: str) -> str:
        """A word of a launch line, or the value of a variable, with its placeholders replaced.

        {hosts}: "n1,n2". {gpus}: "0,1". {cores}: of each rank on a node, "0,1:2,3".
        """
        each = self.cores_per_rank
        ranks = [self.cores[first : first + each] for first in range(0, len(self.cores), each)]
        return (
            text.replace("{hosts}", ",".join(self.hosts))
            .replace("{gpus}", ",".join(self.gpus))
            .replace("{cores}", ":".join(",".join(rank) for rank in ranks))
        )


@dataclass(frozen=True)
class Room:
    """The room of the pilot around this worker."""

    folder: Path
    hosts: list[str]
    node: Node

    @classmethod
    def of_pilot(cls) -> Room:
        """As this worker's environment has it."""
        return cls(
            Path(os.environ[POOL]), os.environ[NODES].split(), Node(**json.loads(os.environ[NODE]))
        )

    @contextlib.contextmanager
    def taken(
        self, name: str, need: Need, avoid: list[str], deadline: float
    ) -> Iterator[Tenant | None]:
        """Room for a task, free again afterwards; None if there is none before the deadline.

        Args:
            name: the task's; another attempt at it has ended before its room is given again.
            avoid: nodes to leave alone, as long as the others are enough.
            deadline: as of time.time().

        Raises:
            ValueError: it could never fit.
        """
        if self.found(need, [], []) is None:
            has = f"{len(self.hosts)} nodes of {len(self.node.cores)} cores"
            raise ValueError(f"{need} is more than the pilot has: {has}, {self.node.gpus} as GPUs")
        own: dict[str, Any] = {"name": name, "worker": _process(os.getpid())}
        own |= {"size": need.size, "since": time.time(), "place": None, "session": None}
        tenant = Tenant(self, own)
        try:
            while time.time() < deadline and not tenant.moved_in(need, avoid):
                time.sleep(POLL_S)
            yield tenant if tenant.has_place else None
        finally:
            tenant.leave()

    @contextlib.contextmanager
    def locked(self) -> Iterator[list[dict[str, Any]]]:
        """All tenants, those who wait included; what is done to the list is kept."""
        book = self.folder / "tenants.json"
        with open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            tenants = json.loads(book.read_text()) if book.exists() else []
            tenants[:] = [each for each in tenants if not _is_gone(each)]
            yield tenants
            beside = self.folder / "tenants.json.new"
            beside.write_text(json.dumps(tenants))
            os.replace(beside, book)

    def found(self, need: Need, tenants: list[dict[str, Any]], avoid: list[str]) -> Place | None:
        """Where a task fits beside the others; None if it does not, now."""
        free = {host: self._free(host, tenants) for host in self.hosts}
        wanted = [host for host in self.hosts if host not in avoid]
        if len(wanted) < need.nodes:  # the others are not enough
            wanted = self.hosts
        if need.nodes > 1:
            empty = [host for host in wanted if free[host] == self._free(host, [])]
            if len(empty) < need.nodes:
                return None
            return self._place(need, empty[: need.nodes], self.node.cores, self.node.gpus)
        fitting = [
            host
            for host in wanted
            if len(free[host][0]) >= need.cores and len(dict.fromkeys(free[host][1])) >= need.gpus
        ]
        if not fitting:
            return None
        # The fullest: empty nodes are left for those who need whole ones.
        host = min(fitting, key=lambda name: (len(free[name][0]), len(free[name][1])))
        cores, gpus = free[host]
        emptiest = sorted(dict.fromkeys(gpus), key=lambda gpu: -gpus.count(gpu))
        return self._place(need, [host], cores, emptiest)

    def _place(self, need: Need, hosts: list[str], cores: list[str], gpus: list[str]) -> Place:
        return Place(
            hosts=hosts,
            cores=cores[: need.cores],
            gpus=gpus[: need.gpus],
            cores_per_rank=need.cores_per_rank,
            pinned=self.node.pinned,
        )

    def _free(self, host: str, tenants: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
        """The cores, and the shares of GPUs, that nobody has on a node."""
        cores = list(self.node.cores)
        gpus = self.node.gpus * self.node.tasks_per_gpu
        for place in (each["place"] for each in tenants if each["place"]):
            if host not in place["hosts"]:
                continue
            if len(place["hosts"]) > 1:
                return [], []
            cores = [core for core in cores if core not in place["cores"]]
            for gpu in place["gpus"]:
                gpus.remove(gpu)
        return cores, gpus


class Tenant:
    """A task in a room, or at its door."""

    def __init__(self, room: Room, entry: dict[str, Any]) -> None:
        self.room = room
        self.entry = entry

    @property
    def has_place(self) -> bool:
        return self.entry["place"] is not None

    @property
    def place(self) -> Place:
        return Place(**self.entry["place"])

    def moved_in(self, need: Need, avoid: list[str]) -> bool:
        """Whether there was room, which is taken then; else the task is among those who wait."""
        with self.room.locked() as tenants:
            others = [each for each in tenants if each["worker"] != self.entry["worker"]]
            if not self._must_wait(others):
                place = self.room.found(need, others, avoid)
                self.entry["place"] = None if place is None else dataclasses.asdict(place)
            tenants[:] = [*others, self.entry]
        return self.has_place

    def holds(self, session: int) -> None:
        """What runs there: as long as it does, the room is not free."""
        self.entry["session"] = session
        self._tell([self.entry])

    def leave(self) -> None:
        self._tell([])

    def _tell(self, entries: list[dict[str, Any]]) -> None:
        with self.room.locked() as tenants:
            others = [each for each in tenants if each["worker"] != self.entry["worker"]]
            tenants[:] = [*others, *entries]

    def _must_wait(self, others: list[dict[str, Any]]) -> bool:
        """Behind a larger task, or one as large that came before; or for its own last attempt."""
        turn = ([-each for each in self.entry["size"]], self.entry["since"])
        return any(
            each["name"] == self.entry["name"]
            if each["place"]
            else ([-part for part in each["size"]], each["since"]) < turn
            for each in others
        )


def _is_gone(tenant: dict[str, Any]) -> bool:
    """Whether a worker was killed, and nothing of its task is left."""
    if _process(tenant["worker"][0]) == tenant["worker"]:
        return False
    left = session_members(tenant["session"]) if tenant["session"] is not None else []
    tenant.setdefault("orphan_since", time.time())
    if time.time() > tenant["orphan_since"] + ORPHAN_GRACE_S:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return not left


def _process(pid: int) -> list[int] | None:
    """What tells a process from a later one of the same number; None if it is not alive."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return [pid, int(fields[19])] if fields[0] != "Z" else None


def session_members(session: int) -> list[int]:
    """Process ids of the live members of a session."""
    members = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, sid = entry.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(sid) == session and state != "Z":
            members.append(int(entry.parent.name))
    return members
