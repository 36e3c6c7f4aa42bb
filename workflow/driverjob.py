"""`--driver-in-job`: the driver itself is a job, followed by another where it ends too soon."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from apps.contract import N3LOError
from sites.base import SiteError
from sites.batch import JOBS, Batch
from workflow import PROGRAM, runfolder, session
from workflow.console import terminal
from workflow.study import StudyFile


def submit(file: StudyFile, site: Batch, runs: Path, command: list[str]) -> int:
    """Submit a job that runs the driver; return the exit status.

    Args:
        command: that of the driver.

    Raises:
        N3LOError, SiteError: something is wrong that the user can mend; nothing was submitted.
    """
    session.require_libraries(file)
    site.check()
    session.prepared(file, site, runs)  # here somebody reads what is wrong, and there is a network
    folder = runs / file.study.name
    with runfolder.opened(folder, file):
        if jobs := site.left(folder):
            raise N3LOError(
                f"job {', '.join(jobs)} of this study is in the queue already; wait for it, or "
                f"take it out first: {site.cancels} {' '.join(jobs)}"
            )
    job = _submitted(site, folder, command)
    look = shlex.join([*PROGRAM.split(), "status", str(file.path), "--runs", str(runs)])
    terminal().print(
        f"job {job} was submitted to {site.system} and will run the study; its output goes to "
        f"{folder / JOBS}; to look, once it runs: {look}",
        soft_wrap=True,
    )
    return 0


def go_on(site: Batch, folder: Path, command: list[str], has_trained: bool) -> None:
    """Submit the next job of a driver whose own one ended first, and say so.

    Args:
        command: that of the driver.
        has_trained: whether the job was of any use; else the next would not be.
    """
    by_hand = f"by hand: {shlex.join(command)}"
    if not has_trained:
        line = f"nothing was trained in this job, so that no other follows; to go on {by_hand}"
    else:
        try:
            line = f"job {_submitted(site, folder, command)} goes on with the study"
        except SiteError as error:
            line = f"{error}; from a login node, go on {by_hand}"
    terminal().print(line, soft_wrap=True)


def _submitted(site: Batch, folder: Path, command: list[str]) -> str:
    # A job inherits variables, and its own driver would take it for what is left of this one.
    os.environ.pop(runfolder.MARK, None)
    return site.submit(folder, command)
