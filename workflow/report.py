"""What a ledger says, in words: the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
from rich.console import Console as Terminal
from rich.table import Table
from rich.text import Text

from apps.contract import Objective, TaskPaths
from workflow import scaling
from workflow.console import (
    best_first,
    ranked,
    score_text,
    short_names,
    trials_table,
    value_text,
)
from workflow.ledger import Ledger
from workflow.scores import Scoring
from workflow.study import Study

BEST = 10
MOST_LAYOUTS = 24


def print_report(ledger: Ledger, study: Study, out: Terminal) -> None:
    """The best trials, the front, the failures with their reasons, scaling, and the cost."""
    objective = study.search.objective
    trials = ranked(ledger.trials(), objective.goal, ledger)
    best = best_first(trials, objective.goal, ledger)
    out.print(f"{study.name}: {objective.metric} ({objective.goal}) over {study.data.folds} folds")
    out.print("\nBest trials", style="bold")
    out.print(trials_table(best.head(BEST), study.data.folds))
    if ledger.scoring.further:
        out.print(
            "\nPareto front: no trial is better in one without being worse in another", style="bold"
        )
        out.print(_front_table(trials, ledger.scoring))
    tasks = ledger.tasks()
    failures = tasks.query("status == 'failed'")
    if not failures.empty:
        out.print("\nFailures", style="bold")
        out.print(_failures_table(failures, ledger))
    if tasks["num_ranks"].nunique() > 1:
        _print_scaling(scaling.described(tasks, study), study, out)
    out.print("\nCost", style="bold")
    for line in _cost(tasks, study):
        out.print(line)


def plain_table(rows: pd.DataFrame) -> Table:
    """A frame as a table for a terminal."""
    table = Table(*map(str, rows.columns), box=None, pad_edge=False)
    for row in rows.itertuples(index=False, name=None):
        table.add_row(*(_or_dash(value, value_text) for value in row))
    return table


def print_best(ledger: Ledger, study: Study, out: Terminal) -> None:
    """The end of a run: the best trial and where its files are."""
    objective: Objective = study.search.objective
    scored = best_first(ledger.trials(), objective.goal, ledger)
    if scored.empty:
        out.print("no trial has a score yet")
        return
    best = scored.iloc[0]
    number = int(best["trial"])
    score = score_text(best["score"], best["spread"])
    out.print(f"best trial t{number:03d}: {objective.metric} {score} over its folds")
    for path, value in ledger.trials_by_number[number].point.items():
        out.print(f"  {path} = {value_text(value)}")
    for _, state in sorted(ledger.trials_by_number[number].tasks.items()):
        out.print(f"  {TaskPaths(ledger.place_of(state.folder)).weights}")


def _front_table(trials: pd.DataFrame, scoring: Scoring) -> Table:
    metrics = [each.metric for each in scoring.further]
    table = Table("trial", scoring.objective.metric, *metrics, box=None, pad_edge=False)
    for row in trials[trials["pareto"].astype(bool)].to_dict("records"):
        values = (value_text(row[name]) for name in ("score", *metrics))
        table.add_row(f"t{row['trial']:03d}", *values)
    return table


def _failures_table(failures: pd.DataFrame, ledger: Ledger) -> Table:
    headings = ("task", "attempts", "reason", "what happened", "job", "host", "log")
    table = Table(*headings, box=None, pad_edge=False)
    for row in failures.to_dict("records"):
        log = ledger.place_of(str(row["folder"])) / "stderr.txt"
        task = f"t{row['trial']:03d}-f{row['fold']}"
        facts = (row[name] for name in ("attempt", "reason", "message", "job", "host"))
        table.add_row(*(Text(str(cell)) for cell in (task, *facts, log)))
    return table


def _print_scaling(done: pd.DataFrame, study: Study, out: Terminal) -> None:
    """How fast each layout is, what it gains by its ranks, and where its time goes."""
    setting = scaling.setting_of(done, study)
    rows = scaling.compared(done, setting)
    shown = rows.head(MOST_LAYOUTS)
    out.print("\nScaling: against the fewest ranks of the same setting", style="bold")
    out.print(_scaling_table(shown, setting))
    if len(shown) < len(rows):
        out.print(f"... and {len(rows) - len(shown)} more; `export` has all tasks")
    if shown["masters"].any():
        out.print("masters count as ranks, though they do not train")
    compared = shown.dropna(subset=["speed_up"])
    if not compared.empty:
        out.print("\nSpeed-up; ideal where the | is", style="bold")
        out.print(_speed_up_table(compared, setting))


def _scaling_table(rows: pd.DataFrame, setting: list[str]) -> Table:
    says_all = not rows["masters"].any() and not rows.duplicated([*setting, "num_ranks"]).any()
    layout = [] if says_all else ["layout"]
    table = Table(box=None, pad_edge=False)
    headings = ("ranks", *layout, "batch", "samples/s", "speed-up", "efficiency", *scaling.PARTS)
    for heading in (*short_names(setting), *headings):
        table.add_column(heading, overflow="fold")
    for row in rows.to_dict("records"):
        table.add_row(
            *(_or_dash(row[name], value_text) for name in setting),
            *(str(row[name]) for name in ("num_ranks", *layout, "batch")),
            _or_dash(row["samples_per_second"], "{:.0f}".format),
            _or_dash(row["speed_up"], "{:.2f}".format),
            *(_or_dash(row[name], "{:.0%}".format) for name in ("efficiency", *scaling.PARTS)),
        )
    return table


def _speed_up_table(rows: pd.DataFrame, setting: list[str]) -> Table:
    table = Table(*short_names(setting), "ranks", "", box=None, pad_edge=False)
    for row, bar in zip(rows.to_dict("records"), scaling.bars(rows), strict=True):
        cells = (_or_dash(row[name], value_text) for name in setting)
        table.add_row(*cells, str(row["num_ranks"]), bar)
    return table


def _or_dash(value: Any, text: Callable[[Any], str]) -> str:
    return "-" if pd.isna(value) else text(value)


def _cost(tasks: pd.DataFrame, study: Study) -> Iterator[str]:
    done = tasks[tasks["status"] == "done"]
    executed = done[~done["cached"].astype(bool)]
    seconds = executed["seconds"] * executed["num_ranks"].astype(float)
    hours = float(seconds.sum()) / 3600
    cores, gpus = study.layout.cores_per_rank, study.layout.gpus_per_rank
    yield f"{len(executed)} trainings, {len(done) - len(executed)} taken from the cache"
    yield f"{hours * cores:.3g} core-hours of finished trainings" + (
        f", {hours * gpus:.3g} GPU-hours" if gpus else ""
    )
    if len(executed):
        yield f"{executed['samples_per_second'].median():.0f} samples/s in the median training"
    waits = scaling.input_bound(done)
    if waits:
        yield waits
