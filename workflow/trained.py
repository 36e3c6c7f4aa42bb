"""Commands that use what a study has trained. Networks run in a process of their own: the driver
imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from apps.contract import N3LOError
from workflow import extras
from workflow.console import best_first
from workflow.ledger import Ledger
from workflow.study import Study

USER_ERROR = 2


def folder_of(ledger: Ledger, study: Study, trial: int | None, fold: int) -> Path:
    """Of a finished task; of the best trial, if none is named.

    Raises:
        N3LOError: it is not finished.
    """
    tasks = ledger.tasks()
    done = tasks[(tasks["status"] == "done") & (tasks["fold"] == fold)]
    if trial is None:
        scored = best_first(ledger.trials(), study.search.objective.goal, ledger)
        finished = [number for number in scored["trial"] if number in set(done["trial"])]
        if not finished:
            raise N3LOError(f"no trial has finished fold {fold} yet")
        trial = int(finished[0])
    found = done[done["trial"] == trial]
    if found.empty:
        raise N3LOError(f"--trial {trial} --fold {fold}: that task is not finished; see 'status'")
    return (ledger.folder / str(found["folder"].iloc[0])).resolve()


def best_folders(ledger: Ledger, study: Study, most: int) -> dict[int, list[Path]]:
    """Of the tasks of the best trials that finished all folds: by trial, the best first.

    Raises:
        N3LOError: there is none, or none is asked for.
    """
    if most < 1:
        raise N3LOError(f"--best {most}: is not at least 1")
    scored = best_first(ledger.trials(), study.search.objective.goal, ledger)
    if scored.empty:
        raise N3LOError("no trial has finished all its folds yet; see 'status'")
    return {
        int(number): [
            (ledger.folder / state.folder).resolve()
            for _, state in sorted(ledger.trials_by_number[number].tasks.items())
        ]
        for number in scored["trial"].head(most)
    }


def run_program(
    module: str, words: Sequence[str], needs: Sequence[str] = extras.OF_PROGRAMS
) -> None:
    """Run a program of `apps`; what it has to say goes to the terminal.

    Args:
        needs: libraries that it imports.

    Raises:
        N3LOError: it refused, with its line; or it crashed.
        ModuleNotFoundError: what it needs is not installed.
    """
    extras.require(*needs)
    done = subprocess.run(
        [sys.executable, "-P", "-m", f"apps.{module}", *words],
        env=dict(os.environ),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    if done.returncode == USER_ERROR:
        raise N3LOError(last)
    raise N3LOError(f"apps.{module} ended with status {done.returncode}: {last}")
