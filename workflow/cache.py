"""The cache of finished tasks: Parsl's own, through its extension point, over result files.

`runs/cache/ab/abcd....json` is a link to the `result.json` of the task with that key. So a hit is
shared between studies, sites and restarts, a person can open it, deleting a result is enough to
have it run again, and a kill cannot tear it. Failures are never cached.
"""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from parsl.dataflow.memoization import Memoizer

from apps.contract import TaskPaths, TrainTask, from_dict
from apps.launch import finished_result


class ResultCache:
    """Task key -> the folder of the task that finished with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, key: str) -> Path | None:
        """The folder of a finished task with this key, if its result is still there, and whole."""
        try:
            found = self._link(key).resolve(strict=True).parent
        except OSError:
            return None
        return found if finished_result(TaskPaths(found), key) is not None else None

    def add(self, key: str, folder: Path) -> None:
        link = self._link(key)
        link.parent.mkdir(parents=True, exist_ok=True)
        target = os.path.relpath(TaskPaths(folder).result, link.parent.resolve())
        beside = link.with_name(f".{link.name}.{os.getpid()}")
        beside.unlink(missing_ok=True)
        beside.symlink_to(target)
        os.replace(beside, link)

    def forget(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._link(key).unlink()

    def _link(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"


class TaskCache(Memoizer):  # type: ignore[misc]  # Parsl has no type information
    """What Parsl asks before it executes a task, and tells when one is done."""

    def __init__(self, results: ResultCache) -> None:
        self.results = results

    def start(self, *, run_dir: str, config_run_dir: str) -> None:
        """Nothing to load: entries are looked up one by one."""

    def close(self) -> None:
        """Nothing to save: entries are written one by one."""

    def check_memo(self, task: Any) -> Future[dict[str, Any]] | None:
        key, own_folder = _of(task)
        for folder in (own_folder, self.results.find(key)):  # own: its driver died before `add`
            result = finished_result(TaskPaths(folder), key) if folder else None
            if result is not None:
                task["from_memo"] = True
                future: Future[dict[str, Any]] = Future()
                future.set_result({**result, "folder": str(folder)})
                return future
        task["from_memo"] = False
        return None

    def update_memo_result(self, task: Any, r: Any) -> None:
        key, own_folder = _of(task)
        if not task["from_memo"] or Path(r["folder"]) == own_folder:
            self.results.add(key, own_folder)

    def update_memo_exception(self, task: Any, e: BaseException) -> None:
        """A failure is not kept: the same call runs again."""


def _of(task: Any) -> tuple[str, Path]:
    """Key and folder of a call of the app in workflow/tasks.py, from its keyword arguments."""
    call = task["kwargs"]
    return from_dict(TrainTask, call["task"]).key(), Path(call["folder"])
