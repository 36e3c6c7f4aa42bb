"""The cache of results, as Parsl asks it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from test_launch import make_result, make_task

from apps.contract import TaskPaths
from workflow.cache import ResultCache, TaskCache


@pytest.fixture
def results(tmp_path) -> ResultCache:
    return ResultCache(tmp_path / "runs" / "cache")


@pytest.fixture
def folder(tmp_path) -> Path:
    """The folder of a finished task."""
    task = make_task()
    folder = tmp_path / "runs" / "s" / task.id
    make_result(task).write(TaskPaths(folder).result)
    return folder


def record(task, folder: Path) -> dict:
    return {"kwargs": {"task": dataclasses.asdict(task), "folder": str(folder)}, "from_memo": False}


def test_a_result_is_found_by_its_key(results, folder):
    results.add(make_task().key(), folder)
    assert results.find(make_task().key()) == folder
    assert results.find("0" * 32) is None


def test_an_entry_can_be_opened_and_moves_with_its_runs(results, folder, tmp_path):
    key = make_task().key()
    results.add(key, folder)
    (tmp_path / "runs").rename(tmp_path / "moved")
    moved = ResultCache(tmp_path / "moved" / "cache")
    assert moved.find(key) == tmp_path / "moved" / "s" / "t000-f0"
    assert '"fom": 0.5' in (moved.folder / key[:2] / f"{key}.json").read_text()


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_text("{")])
def test_a_result_that_is_gone_or_torn_is_not_found(results, folder, harm):
    results.add(make_task().key(), folder)
    harm(TaskPaths(folder).result)
    assert results.find(make_task().key()) is None


def test_a_hit_serves_another_study(results, folder, tmp_path):
    results.add(make_task().key(), folder)
    elsewhere = record(make_task(), tmp_path / "runs" / "other" / "t005-f0")
    future = TaskCache(results).check_memo(elsewhere)
    assert future.result()["fom"] == 0.5
    assert future.result()["folder"] == str(folder)


def test_a_result_in_the_tasks_own_folder_counts_though_its_driver_died(results, folder):
    cache = TaskCache(results)
    call = record(make_task(), folder)
    future = cache.check_memo(call)
    cache.update_memo_result(call, future.result())
    assert results.find(make_task().key()) == folder


def test_a_miss_is_a_miss_and_a_failure_is_not_kept(results, tmp_path):
    cache = TaskCache(results)
    call = record(make_task(), tmp_path / "t")
    assert cache.check_memo(call) is None
    cache.update_memo_exception(call, RuntimeError("diverged"))
    assert cache.check_memo(call) is None
