"""A run folder as one looks at it: read as far as it is written, and never written to."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from apps.contract import read_json
from workflow import runfolder, tables
from workflow.console import best_first, ranked
from workflow.ledger import Ledger
from workflow.study import StudyFile

Task = tuple[int, int]  # trial, fold


class View:
    """What a study has come to; `refresh` reads what has been added since.

    Needs nothing but the folder: neither the study's data nor its model, nor what trains it.
    """

    def __init__(self, folder: str | Path, opened: tuple[Ledger, StudyFile] | None = None) -> None:
        """
        Args:
            folder: of the run.
            opened: its ledger and its study, if they were read already.

        Raises:
            N3LOError: there is no run in that folder.
        """
        self.folder = Path(folder).expanduser()
        self.ledger, self.file = opened or runfolder.read(self.folder)
        self.read_at = time.time()  # Unix seconds
        self._histories: dict[Task, _Read] = {}

    def refresh(self) -> bool:
        """Read what a driver has added; return whether the tables have changed."""
        num_sessions = len(self.ledger.sessions)
        has_changed = self.ledger.refresh()
        if len(self.ledger.sessions) != num_sessions:  # a start may have changed the search
            self.file = runfolder.study_of(self.folder, self.ledger)
        self._drop("attempts")  # those that run have got on
        if has_changed:
            self._drop("tasks", "trials")
        self.read_at = time.time()
        return has_changed

    def _drop(self, *names: str) -> None:
        for name in names:
            self.__dict__.pop(name, None)

    # -- what the study asks for ---------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.file.study.name

    @property
    def metric(self) -> str:
        return self.ledger.scoring.objective.metric

    @property
    def goal(self) -> str:
        """ "min" or "max"."""
        return self.ledger.scoring.objective.goal

    @property
    def num_trials(self) -> int:
        """The budget, as the last start had it."""
        asked: int = self.ledger.sessions[-1].get("num_trials", self.file.study.search.num_trials)
        return asked

    @property
    def node_share(self) -> float:
        """The part of a node that one task occupies."""
        share: float = self.ledger.sessions[-1].get("node_share", 1.0)
        return share

    # -- what there is -------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether a driver is at work in the folder, as seen from this host."""
        return self.ledger.is_running

    @cached_property
    def tasks(self) -> pd.DataFrame:
        """As `Ledger.tasks`."""
        return self.ledger.tasks()

    @cached_property
    def trials(self) -> pd.DataFrame:
        """As `Ledger.trials`."""
        return self.ledger.trials()

    @cached_property
    def attempts(self) -> pd.DataFrame:
        """As `Ledger.attempts`; those without an end have their nodes and begin from their files.

        What still runs has ended now.
        """
        attempts = self.ledger.attempts()
        is_open = np.array([each.status == "running" for each in self.ledger.attempts_made], bool)
        if self.is_running:
            attempts.loc[is_open, "ended"] = pd.Timestamp(self.read_at, unit="s", tz="UTC")
        for index in attempts.index[is_open]:
            place = self.place(int(attempts.loc[index, "trial"]), int(attempts.loc[index, "fold"]))
            if place.get("begun", math.nan) >= attempts.loc[index, "submitted"].timestamp():
                begun = pd.Timestamp(place["begun"], unit="s", tz="UTC")
                attempts.loc[index, ["begun", "job", "host"]] = [
                    begun,
                    place.get("job", ""),
                    ",".join(place.get("hosts", [])),
                ]
        return attempts

    @property
    def ranked(self) -> pd.DataFrame:
        """All trials: `best_first`, and the others by their score after them."""
        return ranked(self.trials, self.goal, self.ledger)

    @property
    def best_first(self) -> pd.DataFrame:
        """The trials of the largest budget that have a finite score, the best first."""
        return best_first(self.trials, self.goal, self.ledger)

    def place(self, trial: int, fold: int) -> dict[str, Any]:
        """Where a task was started last: job, hosts, begun; empty as long as it waits."""
        try:
            place: dict[str, Any] = read_json(self.ledger.files_of(trial, fold).place)
        except (OSError, ValueError):
            return {}
        return place

    def history(self, trial: int, fold: int) -> pd.DataFrame:
        """One row an epoch of a task; without rows where there is none. Read when it has grown."""
        path = self.ledger.files_of(trial, fold).history
        try:
            facts = path.stat()
        except OSError:
            return pd.DataFrame()
        stamp = (facts.st_size, facts.st_mtime_ns)
        known = self._histories.get((trial, fold))
        if known is None or known.stamp != stamp:
            known = self._histories[trial, fold] = _Read(stamp, tables.history(path))
        return known.rows


@dataclass(frozen=True)
class _Read:
    """A history as it was when it was read."""

    stamp: tuple[int, int]  # size, time of change
    rows: pd.DataFrame
