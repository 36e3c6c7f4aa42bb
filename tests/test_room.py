"""Room in a pilot: who gets which cores and GPUs of which node, and when."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from apps.room import Need, Node, Place, Room

FOREVER = float("inf")


def need(ranks: int = 1, nodes: int = 1, gpus: int = 0, cores_per_rank: int = 1) -> Need:
    return Need(nodes=nodes, ranks=ranks, cores_per_rank=cores_per_rank, gpus=gpus)


def a_room(folder: Path, num_nodes: int = 2, tasks_per_gpu: int = 1) -> Room:
    node = Node(cores=["0", "1", "2", "3"], gpus=["0", "1"], tasks_per_gpu=tasks_per_gpu)
    return Room(folder, [f"n{number}" for number in range(1, num_nodes + 1)], node)


def tenant(name: str, place: Place | None) -> dict:
    held = None if place is None else dict(place.__dict__)
    return {"name": name, "place": held, "worker": [0, 0], "session": None}


def filled(room: Room, *needs: Need, avoid: tuple[str, ...] = ()) -> list[Place | None]:
    """Where tasks go, one after the other."""
    tenants: list[dict] = []
    for number, each in enumerate(needs):
        tenants.append(tenant(str(number), room.found(each, tenants, list(avoid))))
    return [None if each["place"] is None else Place(**each["place"]) for each in tenants]


def test_tasks_of_a_node_have_different_cores_and_gpus(tmp_path):
    first, second, third = filled(a_room(tmp_path), *[need(ranks=2, gpus=1)] * 3)
    assert (first.hosts, first.cores, first.gpus) == (["n1"], ["0", "1"], ["0"])
    assert (second.hosts, second.cores, second.gpus) == (["n1"], ["2", "3"], ["1"])
    assert third.hosts == ["n2"]


def test_small_tasks_are_packed_so_that_nodes_stay_whole_for_large_ones(tmp_path):
    places = filled(a_room(tmp_path, 3), need(), need(ranks=2), need(ranks=2, nodes=2), need())
    assert [place.hosts for place in places] == [["n1"], ["n1"], ["n2", "n3"], ["n1"]]


def test_a_task_over_several_nodes_has_them_to_itself(tmp_path):
    both, none = filled(a_room(tmp_path), need(nodes=2), need())
    assert both.hosts == ["n1", "n2"]
    assert none is None


@pytest.mark.parametrize("more", [need(nodes=3), need(ranks=5), need(gpus=3)])
def test_what_no_pilot_of_that_size_has_is_refused_at_once(tmp_path, more):
    """Else it would wait in one pilot after the other."""
    with (
        pytest.raises(ValueError, match="is more than the pilot has: 2 nodes of 4 cores"),
        a_room(tmp_path).taken("a", more, [], FOREVER),
    ):
        pass


def test_a_gpu_is_shared_by_as_many_tasks_as_the_user_says(tmp_path):
    places = filled(a_room(tmp_path, 1, tasks_per_gpu=2), *[need(gpus=1)] * 4)
    assert sorted(place.gpus[0] for place in places) == ["0", "0", "1", "1"]
    assert places[0].gpus != places[1].gpus  # as far apart as can be
    [pair] = filled(a_room(tmp_path, 1, tasks_per_gpu=2), need(gpus=2))
    assert sorted(pair.gpus) == ["0", "1"]


def test_a_node_is_avoided_as_long_as_the_others_are_enough(tmp_path):
    first, second = filled(a_room(tmp_path), need(), need(ranks=4), avoid=("n1",))
    assert first.hosts == ["n2"]
    assert second is None
    [both] = filled(a_room(tmp_path), need(nodes=2), avoid=("n1",))
    assert both.hosts == ["n1", "n2"]


def test_placeholders_become_what_a_task_has():
    place = Place(hosts=["n1", "n2"], cores=list("0123"), gpus=["0", "1"], cores_per_rank=2)
    assert place.filled("--hosts={hosts} list:{cores} {gpus}") == "--hosts=n1,n2 list:0,1:2,3 0,1"


class Worker(threading.Thread):
    """Takes room, and leaves it when it is told to."""

    def __init__(self, room: Room, name: str, wanted: Need, deadline: float = FOREVER) -> None:
        super().__init__(daemon=True)
        self.arguments = name, wanted, [], deadline
        self.room = room
        self.is_in, self.may_leave = threading.Event(), threading.Event()
        self.got: list[bool] = []
        self.start()

    def run(self) -> None:
        with self.room.taken(*self.arguments) as taken:
            self.got.append(taken is not None)
            self.is_in.set()
            self.may_leave.wait()


@pytest.fixture
def workers(monkeypatch):
    """As many as a test wants, each with a process number of its own."""
    with ExitStack() as stack:
        monkeypatch.setattr("apps.room._process", lambda pid: [threading.get_ident(), 0])
        monkeypatch.setattr("apps.room._is_gone", lambda tenant: False)

        def start(*arguments: object) -> Worker:
            worker = Worker(*arguments)  # type: ignore[arg-type]
            stack.callback(worker.may_leave.set)
            return worker

        yield start


def test_the_largest_of_those_who_wait_goes_first(tmp_path, workers):
    room = a_room(tmp_path, 1)
    inside = workers(room, "a", need(ranks=3))
    assert inside.is_in.wait(5)
    large = workers(room, "b", need(ranks=4))
    time.sleep(0.3)
    small = workers(room, "c", need())  # there is a core for it, but the large one would starve
    assert not small.is_in.wait(0.5)
    inside.may_leave.set()
    assert large.is_in.wait(5)
    large.may_leave.set()
    assert small.is_in.wait(5)


def test_a_further_attempt_waits_for_the_end_of_the_one_before(tmp_path, workers):
    room = a_room(tmp_path)
    first = workers(room, "t000-f0", need())
    assert first.is_in.wait(5)
    second = workers(room, "t000-f0", need())
    assert not second.is_in.wait(0.5)
    first.may_leave.set()
    assert second.is_in.wait(5)


def test_who_finds_no_room_in_time_has_none(tmp_path, workers):
    room = a_room(tmp_path, 1)
    assert workers(room, "a", need(ranks=4)).is_in.wait(5)
    late = workers(room, "b", need(), time.time() + 0.3)
    assert late.is_in.wait(5)
    assert late.got == [False]


def test_the_room_of_a_killed_worker_is_free_when_its_job_is_gone(tmp_path):
    code = (
        "import subprocess, sys, time; sys.path.insert(0, sys.argv[1]);"
        "from pathlib import Path; from test_room import a_room, need, FOREVER\n"
        "with a_room(Path(sys.argv[2]), 1).taken('a', need(ranks=4), [], FOREVER) as tenant:\n"
        "    job = subprocess.Popen(['sleep', '100'], start_new_session=True)\n"
        "    tenant.holds(job.pid)\n"
        "    print(job.pid, flush=True)\n"
        "    time.sleep(100)\n"
    )
    words = [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as worker:
        job = int(worker.stdout.readline())
        worker.kill()
    room = a_room(tmp_path, 1)
    with room.taken("b", need(), [], time.time() + 0.5) as taken:
        assert taken is None
    os.kill(job, 9)
    with room.taken("b", need(), [], time.time() + 10) as taken:
        assert taken is not None
