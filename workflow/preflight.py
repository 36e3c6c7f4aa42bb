"""A look at model and data before anything is submitted, in a process of its own.

The driver imports neither torch nor h5py; `apps.check` does, and writes what it found.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from apps.contract import N3LOError, TrainTask, read_json, write_json
from sites.base import threads
from workflow import extras

NAME = "check.json"


def check(task: TrainTask, run_folder: Path) -> dict[str, Any]:
    """What `apps.check` reports of a study's base task; remembered in the run folder by its key.

    Raises:
        N3LOError: the model or the data cannot be used; one line.
    """
    remembered = run_folder / NAME
    key = task.key()
    try:
        report: dict[str, Any] = read_json(remembered)
        if report["key"] == key:
            return report
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return {**_run(task), "key": key}


def remember(report: dict[str, Any], run_folder: Path) -> None:
    write_json(run_folder / NAME, report)


def _run(task: TrainTask) -> dict[str, Any]:
    extras.require(*extras.OF_PROGRAMS)
    with tempfile.TemporaryDirectory(prefix="n3lo-") as folder:
        task_file, report_file = Path(folder, "task.json"), Path(folder, "report.json")
        task.write(task_file)
        process = subprocess.run(
            [sys.executable, "-P", "-m", "apps.check", str(task_file), str(report_file)],
            env={**os.environ, **threads(1)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if not report_file.exists():
            said = process.stderr.strip().splitlines() or ["no output"]
            raise N3LOError(
                f"the check of model and data ended with status {process.returncode}: {said[-1]}"
            )
        report: dict[str, Any] = read_json(report_file)
    if "error" in report:
        raise N3LOError(report["error"])
    return report
