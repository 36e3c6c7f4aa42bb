"""What a driver shows while it runs: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from apps.contract import Objective, TaskPaths, TrainTask
from workflow.ledger import Ledger

if TYPE_CHECKING:  # it imports Parsl, which takes a second that a look at a ledger need not wait
    from workflow.tasks import Outcome

ROWS = 12  # of the live table: the running trials and the best


@dataclass
class Console:
    """The output of one session."""

    objective: Objective
    num_trials: int
    num_folds: int
    num_slots: int
    terminal: Terminal = field(default_factory=lambda: terminal())
    live: Live | None = None
    is_shown: bool = False  # what is done, elsewhere: in a notebook
    started: float = field(default_factory=time.monotonic)
    executed: int = 0
    last_ended: float = 0.0
    shown: float = 0.0

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Within it, `refresh` draws a live table if the output is a terminal."""
        if not self.terminal.is_terminal:
            yield
            return
        with Live(console=self.terminal, auto_refresh=False) as self.live:
            yield
        self.live = None

    def note(self, line: str) -> None:
        self.terminal.print(line, soft_wrap=True)

    def ended(self, task: TrainTask, outcome: Outcome, goes_on: bool = False) -> None:
        """One line for each attempt that ended; with the live table, only where it failed.

        Args:
            goes_on: whether a task that failed is tried again.
        """
        if not outcome.cached:
            self.executed += 1
            self.last_ended = time.monotonic()
        if outcome.failure is not None:
            failure, log = outcome.failure, TaskPaths(outcome.folder).stderr
            ended = "cut off, and goes on" if goes_on else "failed"
            where = ", ".join([*whereabouts(outcome.place), os.path.relpath(log)])
            self.note(f"{clock()} {task.id} {ended}: {failure.name}: {failure.message} ({where})")
        elif outcome.result is not None and self.live is None and not self.is_shown:
            result = outcome.result
            how = (
                "from the cache"
                if outcome.cached
                else f"{result['seconds']:.1f} s on {result['num_ranks']} ranks, "
                f"{result['samples_per_second']:.0f} samples/s"
            )
            said = f"{self.objective.metric} {result['fom']:.4g} at epoch {result['epoch']}"
            self.note(f"{clock()} {task.id} done: {said}, {how}")

    def refresh(self, ledger: Ledger) -> None:
        if self.live is not None and time.monotonic() - self.shown > 0.4:
            self.shown = time.monotonic()
            self.live.update(Group(self._headline(ledger), self._table(ledger)), refresh=True)

    def _table(self, ledger: Ledger) -> RenderableType:
        trials = ranked(ledger.trials(), self.objective.goal, ledger)
        active = trials[trials["status"] == "running"]
        rest = trials[trials["status"] != "running"].head(max(ROWS - len(active), 1))
        return trials_table(pd.concat([active, rest]), self.num_folds)

    def _headline(self, ledger: Ledger) -> Text:
        states = [
            state for trial in ledger.trials_by_number.values() for state in trial.tasks.values()
        ]
        done = sum(state.status == "done" for state in states)
        failed = sum(state.status == "failed" for state in states)
        total = self.num_trials * self.num_folds
        running = sum(state.status == "running" for state in states)
        parts = [
            f"{len(ledger.trials_by_number)}/{self.num_trials} trials",
            f"{done}/{total} tasks done",
            f"{min(running, self.num_slots)} running",
            *([f"{failed} failed"] if failed else []),
            best_line(ledger, self.objective),
            f"about {self._left(total - done - failed)} left",
        ]
        return Text(" | ".join(part for part in parts if part))

    def _left(self, num_tasks: int) -> str:
        """From the rate of this session; unknown before the first task ended."""
        if not self.executed:
            return "?"
        pace = (self.last_ended - self.started) / self.executed
        seconds = max(pace * num_tasks - (time.monotonic() - self.last_ended), 0.0)
        return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def terminal() -> Terminal:
    """Standard output; where that is no terminal, lines are as long as they need to be."""
    width = None if sys.stdout.isatty() else 200
    return _Terminal(highlight=False, markup=False, emoji=False, width=width)


class _Terminal(Terminal):
    def on_broken_pipe(self) -> None:
        """A study goes on though nobody reads its lines any more (`... | head`)."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def by_score(trials: pd.DataFrame, goal: str) -> pd.DataFrame:
    """The trials, best first; those without a score last, by number."""
    return trials.sort_values(
        ["score", "trial"], ascending=[goal == "min", True], na_position="last", kind="stable"
    )


def best_first(trials: pd.DataFrame, goal: str, ledger: Ledger) -> pd.DataFrame:
    """The trials of the largest budget that have a finite score, the best first.

    What others have come to says little of what they would come to in full.
    """
    can_be = np.isfinite(trials["score"]) & trials["trial"].isin(ledger.compared())
    return by_score(trials[can_be], goal)


def ranked(trials: pd.DataFrame, goal: str, ledger: Ledger) -> pd.DataFrame:
    """All trials: `best_first`, and the others by their score after them."""
    first = best_first(trials, goal, ledger).index
    return trials.loc[[*first, *by_score(trials.drop(first), goal).index]]


def best_line(ledger: Ledger, objective: Objective) -> str:
    """The best trial's score in words; empty before there is one."""
    scored = best_first(ledger.trials(), objective.goal, ledger)
    if scored.empty:
        return ""
    best = scored.iloc[0]
    score = score_text(best["score"], best["spread"])
    return f"best {objective.metric} {score} (t{best['trial']:03d})"


def whereabouts(place: Mapping[str, Any]) -> list[str]:
    """The batch job and the nodes of an attempt, in words; this host's own need none."""
    job, nodes = place.get("job"), [node for node in place.get("nodes", []) if node != "localhost"]
    return [*([f"job {job}"] if job else []), *(["on " + ",".join(nodes)] if nodes else [])]


def score_text(score: float, spread: float) -> str:
    """Mean and sample standard deviation over the folds."""
    if math.isnan(score):
        return "-"
    return f"{score:.4g}" if math.isnan(spread) else f"{score:.4g} ± {spread:.2g}"


def trials_table(trials: pd.DataFrame, num_folds: int) -> Table:
    """Trials as a table for a terminal."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    parameters = [name for name in trials.columns if "." in name]
    for heading in ("trial", "status", "folds", "score", *short_names(parameters), "seconds"):
        table.add_column(heading, overflow="fold")
    for row in trials.to_dict("records"):
        table.add_row(
            f"t{row['trial']:03d}",
            str(row["status"]),
            f"{row['done']}/{num_folds}",
            score_text(row["score"], row["spread"]),
            *(value_text(row[name]) for name in parameters),
            f"{row['seconds']:.1f}",
        )
    return table


def short_names(paths: Sequence[str]) -> list[str]:
    """The last part of each dotted path, or all of it where two would be the same."""
    last = [path.rpartition(".")[2] for path in paths]
    return [name if last.count(name) == 1 else path for name, path in zip(last, paths, strict=True)]


def value_text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def clock() -> str:
    return time.strftime("%H:%M:%S")
