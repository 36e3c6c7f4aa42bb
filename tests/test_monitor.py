"""The notebook's monitor, without a notebook: what it reads, when it draws, that it only looks."""

from __future__ import annotations

import fcntl
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from made_runs import Made, make_run
from test_launch import wait_for

from apps.contract import N3LOError
from workflow import monitor
from workflow.monitor import Monitor, watch
from workflow.view import View


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_run(tmp_path / "runs" / "made", Made(num_trials=6, failed=(1,)))


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    for each in monitor._watching.values():
        each.stop()
    monitor._watching.clear()


@pytest.fixture
def last_row(folder) -> Callable[[], None]:
    """The ledger without its last row, the end of a task; call it to have the driver write that."""
    ledger = folder / "ledger.jsonl"
    *rows, last = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(rows))

    def write() -> None:
        with open(ledger, "a") as file:
            file.write(last)

    return write


def figures(shown: Monitor) -> list[dict]:
    """The figures of the tab that is open."""
    box = shown.tabs[shown.book.selected_index].box
    return [json.loads(part.figure) for part in box.children if hasattr(part, "figure")]


def test_what_a_driver_adds_is_drawn(folder, last_row):
    shown = Monitor(View(folder))
    before = figures(shown)
    assert "14 done" in shown.headline.value
    shown.refresh()
    assert figures(shown) == before
    last_row()
    shown.refresh()
    assert "15 done" in shown.headline.value
    assert figures(shown) != before


def test_it_refreshes_in_the_background_until_it_is_stopped(folder, last_row):
    shown = watch(folder, every_s=0.05)
    last_row()
    wait_for(lambda: "15 done" in shown.headline.value)
    shown.stop()
    time.sleep(0.2)
    (folder / "ledger.jsonl").write_text("")
    time.sleep(0.2)
    assert "15 done" in shown.headline.value


@pytest.mark.parametrize("tab", range(5))
@pytest.mark.parametrize(
    "made",
    [Made(num_trials=1, num_folds=1, running=(0,)), Made(num_trials=2, failed=(0, 1)), Made()],
    ids=["nothing", "all-failed", "a-run"],
)
def test_every_tab_of_every_run_can_be_opened(tmp_path, made, tab):
    shown = Monitor(View(make_run(tmp_path / "run", made)))
    shown.book.selected_index = tab
    assert shown.tabs[tab].box.children
    shown.view.refresh()
    shown.draw()
    assert figures(shown)


def test_a_tab_that_is_not_open_is_not_drawn(folder):
    shown = Monitor(View(folder))
    assert [bool(tab.box.children) for tab in shown.tabs] == [True, False, False, False, False]


def test_a_run_is_only_read(folder):
    with open(folder / "driver.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}
        shown = Monitor(View(folder))
        for place in range(len(shown.tabs)):
            shown.book.selected_index = place
            shown.refresh()
        assert "state: running" in shown.headline.value
        after = {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}
    assert after == before


@pytest.mark.usefixtures("last_row")
def test_a_look_that_fails_is_told_and_the_next_one_is_made(folder, monkeypatch):
    shown = watch(folder, every_s=0.05)

    def fail() -> bool:
        raise OSError(116, "Stale file handle")

    refresh = shown.view.refresh
    monkeypatch.setattr(shown.view, "refresh", fail)
    wait_for(lambda: "Stale file handle" in shown.headline.value)
    monkeypatch.setattr(shown.view, "refresh", refresh)
    wait_for(lambda: "14 done" in shown.headline.value)


def test_of_several_runs_the_one_written_last_is_shown_and_another_can_be_chosen(folder):
    make_run(folder.parent / "other", Made(name="other", num_trials=2))
    both = watch(folder.parent)
    assert [name for name, _ in both.choice.options] == ["made", "other"]
    first = both.monitor
    assert first.view.name == "other"
    both.choice.value = folder
    assert both.monitor.view.name == "made"
    assert both.children == (both.choice, both.monitor)
    assert first._stopped.is_set()
    both.stop()
    assert both.monitor._stopped.is_set()


def test_a_log_that_is_read_stays_while_more_fails(folder):
    shown = Monitor(View(folder))
    shown.book.selected_index = 4
    task = shown.tabs[4].task
    task.value = task.options[-1]
    chosen = task.value
    ledger = folder / "ledger.jsonl"
    done = next(line for line in ledger.read_text().splitlines() if '"status": "done"' in line)
    failed = json.loads(done) | {"status": "failed", "reason": "oom", "message": "", "result": {}}
    with open(ledger, "a") as file:
        file.write(json.dumps(failed) + "\n")
    shown.refresh()
    assert len(task.options) == 4
    assert task.value == chosen
    assert "loss is not finite" in shown.tabs[4].log.value


def test_a_start_that_changes_the_space_changes_what_is_drawn(folder):
    shown = Monitor(View(folder))
    shown.book.selected_index = 2
    study = (folder / "study.toml").read_text()
    (folder / "latest.toml").write_text(study.replace('"model.args.dropout"', '"model.args.width2"')
                                        .replace("dropout = 0.0", "width2 = 0.0"))  # fmt: skip
    session = json.loads((folder / "ledger.jsonl").read_text().splitlines()[0])
    with open(folder / "ledger.jsonl", "a") as file:
        file.write(json.dumps(session) + "\n")
    shown.refresh()
    names = [name for name, _ in shown.tabs[2].axes[0].options]
    assert "width2" in names
    assert "dropout" not in names


def test_the_other_tabs_wait_while_the_run_is_read(folder):
    """A menu is chosen from in the kernel's thread, and the run is read in the background's."""
    shown = Monitor(View(folder))
    entered, go_on = threading.Event(), threading.Event()
    refresh = shown.view.refresh

    def slowly() -> bool:
        entered.set()
        go_on.wait(10)
        return refresh()

    shown.view.refresh = slowly
    background = threading.Thread(target=shown.refresh)
    background.start()
    entered.wait(10)
    drawn = threading.Thread(target=shown.draw)
    drawn.start()
    drawn.join(0.2)
    assert drawn.is_alive()
    go_on.set()
    background.join(10)
    drawn.join(10)
    assert not drawn.is_alive()


def test_a_cell_that_runs_again_leaves_no_second_thread(folder):
    first, second = watch(folder), watch(folder)
    assert first._stopped.is_set()
    assert not second._stopped.is_set()


def test_where_there_is_no_run_one_line_says_so(tmp_path):
    with pytest.raises(N3LOError, match=f"there is no run in '{tmp_path}'"):
        watch(tmp_path)


def test_a_run_that_is_gone_leaves_its_last_picture(folder):
    shown = Monitor(View(folder))
    shutil.rmtree(folder)
    shown.refresh()
    assert "15 done" in shown.headline.value
