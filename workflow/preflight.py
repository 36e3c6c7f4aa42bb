"""A look at model and data before anything is submitted, in a process of its own.

The driver imports neither torch nor h5py; `apps.check` and `apps.draft` do, and write what they
found.
"""

from __future__ import annotations

import dataclasses
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
    return {**look("check", dataclasses.asdict(task)), "key": key}


def remember(report: dict[str, Any], run_folder: Path) -> None:
    write_json(run_folder / NAME, report)


def look(program: str, request: dict[str, Any]) -> dict[str, Any]:
    """What a program of `apps` reports of what is asked.

    Raises:
        N3LOError: it refuses, with its line; or it crashed.
    """
    extras.require(*extras.OF_PROGRAMS)
    with tempfile.TemporaryDirectory(prefix="n3lo-") as folder:
        asked, report_file = Path(folder, "request.json"), Path(folder, "report.json")
        write_json(asked, request, durable=False)
        process = subprocess.run(
            [sys.executable, "-P", "-m", f"apps.{program}", str(asked), str(report_file)],
            env={**os.environ, **threads(1)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if not report_file.exists():
            said = process.stderr.strip().splitlines() or ["no output"]
            raise N3LOError(
                f"the look at model and data ended with status {process.returncode}: {said[-1]}; "
                "it crashed, or the model's or the data's code ended it"
            )
        report: dict[str, Any] = read_json(report_file)
    if "error" in report:
        raise N3LOError(report["error"])
    return report
