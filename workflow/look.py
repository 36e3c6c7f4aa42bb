"""A look at a study from a terminal, while it runs or afterwards: `status`, `show`, `logs`."""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from apps.contract import N3LOError, TaskPaths, json_row, read_json
from workflow.console import (
    ROWS,
    best_first,
    best_line,
    ranked,
    score_text,
    trials_table,
    value_text,
    whereabouts,
)
from workflow.ledger import Ledger
from workflow.stop import node_hours
from workflow.study import Study

REFRESH_S = 1.0
LAST_ROW_BYTES = 65536  # of a history, in which its last row is
_FOLD_COLUMNS = (
    *("fold", "status", "fom", "epoch", "epochs", "stopped", "seconds", "samples_per_second"),
    *("num_ranks", "attempt", "job", "host", "reason", "message"),
)


def overview(ledger: Ledger, study: Study) -> dict[str, Any]:
    """How far a study is, as plain values; what `status --json` prints."""
    tasks, trials = ledger.tasks(), ledger.trials()
    session = ledger.sessions[-1]
    best = best_first(trials, study.search.objective.goal, ledger)
    return {
        "study": study.name,
        "folder": str(ledger.folder),
        "running": ledger.is_running,
        "driver": {name: session.get(name) for name in ("site", "host", "pid", "time")},
        "num_trials": session.get("num_trials", study.search.num_trials),
        **headline(ledger, tasks, trials, best),
        "now": [_at_work(ledger, row, study) for row in _running(tasks)],
    }


def headline(
    ledger: Ledger, tasks: pd.DataFrame, trials: pd.DataFrame, best: pd.DataFrame
) -> dict[str, Any]:
    """The trials and tasks of each status, the tasks that failed by reason, the best trial, the
    cost: as plain values.

    Args:
        best: those of the trials that `best_first` has.
    """
    return {
        "trials": dict(sorted(Counter(trials["status"]).items())),
        "tasks": dict(sorted(Counter(tasks["status"]).items())),
        "failures": dict(Counter(tasks.loc[tasks["status"] == "failed", "reason"])),
        "best": None if best.empty else _best_facts(ledger, best.iloc[0]),
        "hours": ledger.hours(),
        "node_hours": node_hours(ledger, ledger.sessions[-1].get("node_share", 1.0)),
    }


def _best_facts(ledger: Ledger, row: pd.Series[Any]) -> dict[str, Any]:
    number = int(row["trial"])
    return {
        "trial": number,
        "score": float(row["score"]),
        "spread": _finite(float(row["spread"])),
        "point": ledger.trials_by_number[number].point,
    }


def _finite(value: float | None) -> float | None:
    """None of what JSON has no number for."""
    return value if value is not None and math.isfinite(value) else None


def _running(tasks: pd.DataFrame) -> Iterator[dict[str, Any]]:
    for row in tasks[tasks["status"] == "running"].to_dict("records"):
        yield {str(name): value for name, value in row.items()}


def _at_work(ledger: Ledger, row: dict[str, Any], study: Study) -> dict[str, Any]:
    """What a running task has come to, from the files that it writes."""
    name = f"t{row['trial']:03d}-f{row['fold']}"
    paths = TaskPaths(ledger.folder / name)
    try:
        place = read_json(paths.place)
    except (OSError, ValueError):  # it waits for room, or for a pilot
        place = {}
    last = last_row(paths.history)
    metric = study.search.objective.metric
    return {
        "task": name,
        "attempt": int(row["attempt"]),
        "epoch": last.get("epoch"),
        metric: _finite(last.get(metric)),
        "begun": place.get("begun"),
        "job": place.get("job"),
        "nodes": place.get("hosts", []),
    }


def last_row(history: Path) -> dict[str, Any]:
    """Of a history that is being written; empty before the first epoch."""
    try:
        with open(history, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - LAST_ROW_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return {}
    rows = map(json_row, reversed(lines))
    return next((row for row in rows if row is not None), {})


# -- status ----------------------------------------------------------------------------------------


def print_status(ledger: Ledger, study: Study, out: Terminal) -> None:
    """One screen: how far the study is, what runs, and its trials."""
    out.print(_screen(overview(ledger, study), ledger, study))


def watch(ledger: Ledger, study: Study, out: Terminal) -> None:
    """`print_status` again and again, as long as a driver is at work."""
    if not out.is_terminal:
        return _watch_in_lines(ledger, study, out)
    with Live(console=out, auto_refresh=False) as live:
        while True:
            ledger.refresh()
            seen = overview(ledger, study)
            live.update(_screen(seen, ledger, study), refresh=True)
            if not seen["running"]:
                return None
            time.sleep(REFRESH_S)


def _watch_in_lines(ledger: Ledger, study: Study, out: Terminal) -> None:
    """A line for each change, where nobody looks at a screen."""
    before = ""
    while True:
        ledger.refresh()
        seen = overview(ledger, study)
        if (line := _headline(seen)) != before:
            out.print(line, soft_wrap=True)
        if not seen["running"]:
            return
        before = line
        time.sleep(REFRESH_S)


def _headline(seen: dict[str, Any]) -> str:
    state = "running" if seen["running"] else "not running"
    trials = sum(seen["trials"].values())
    said = ", ".join(f"{count} {status}" for status, count in seen["tasks"].items())
    return f"{seen['study']}: {state}; {trials} trials; tasks: {said}"


def _screen(seen: dict[str, Any], ledger: Ledger, study: Study) -> RenderableType:
    lines: list[RenderableType] = [Text(_headline(seen))]
    if seen["running"]:
        driver = seen["driver"]
        lines.append(Text(f"driver: process {driver['pid']} on {driver['host']}, {driver['site']}"))
    if best := best_line(ledger, study.search.objective):
        lines.append(Text(best))
    lines.append(
        Text(f"{seen['hours']:.2g} hours of drivers at work, {seen['node_hours']:.3g} node-hours")
    )
    if seen["failures"]:
        failed = ", ".join(f"{reason} {count}" for reason, count in seen["failures"].items())
        lines.append(Text(f"failed: {failed}; 'report' has what happened and the logs"))
    if seen["now"]:
        lines.append(_now_table(seen["now"], study.search.objective.metric))
    lines.append(_trials(ledger, ledger.trials(), study))
    return Group(*lines)


def _now_table(now: list[dict[str, Any]], metric: str) -> Table:
    table = Table("task", "epoch", metric, "for", "where", box=None, pad_edge=False)
    for each in now:
        begun = each["begun"]
        place = {"job": each["job"], "nodes": each["nodes"]}
        table.add_row(
            each["task"],
            "-" if each["epoch"] is None else str(each["epoch"]),
            "-" if each[metric] is None else value_text(float(each[metric])),
            "waits" if begun is None else f"{max(0.0, time.time() - begun):.0f} s",
            ", ".join(whereabouts(place)),
        )
    return table


def _trials(ledger: Ledger, trials: pd.DataFrame, study: Study) -> RenderableType:
    """Those at work and the best of the others, as many as a screen has room for."""
    trials = ranked(trials, study.search.objective.goal, ledger)
    is_active = trials["status"] == "running"
    rest = trials[~is_active]
    shown = rest.head(max(ROWS - int(is_active.sum()), 1))
    table = trials_table(pd.concat([trials[is_active], shown]), study.data.folds)
    left = len(rest) - len(shown)
    return Group(table, Text(f"... and {left} more; `export` has all trials")) if left else table


# -- show ------------------------------------------------------------------------------------------


def trial_facts(ledger: Ledger, number: int) -> dict[str, Any]:
    """All that the ledger knows of a trial, as plain values; what `show --json` prints.

    Raises:
        N3LOError: there is no such trial.
    """
    ledger.require_trial(number)
    trial = ledger.trials_by_number[number]
    trials, tasks = ledger.trials(), ledger.tasks()
    [row] = _records(trials[trials["trial"] == number][["status", "score", "spread"]])
    return {
        "trial": number,
        **row,
        "point": trial.point,
        "settings": dict(trial.proposal.settings),
        "tags": dict(trial.proposal.tags),
        "parent": trial.proposal.parent,
        "folds": _records(tasks[tasks["trial"] == number][[*_FOLD_COLUMNS, "folder"]]),
    }


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as plain values, None where there is none."""
    rows: list[dict[str, Any]] = json.loads(frame.to_json(orient="records", double_precision=15))
    return rows


def print_trial(ledger: Ledger, number: int, out: Terminal) -> None:
    """A trial's point, its score, and its folds with where they ran and why they failed."""
    facts = trial_facts(ledger, number)
    score = math.nan if facts["score"] is None else facts["score"]
    spread = math.nan if facts["spread"] is None else facts["spread"]
    metric = ledger.scoring.objective.metric
    out.print(f"t{number:03d}: {facts['status']}; {metric} {score_text(score, spread)}")
    for path, value in {**facts["settings"], **facts["point"]}.items():
        out.print(f"  {path} = {value_text(value)}")
    if facts["parent"] is not None:
        out.print(f"  goes on from t{facts['parent']:03d}")
    folds = facts["folds"]
    columns = [
        name for name in _FOLD_COLUMNS if any(fold[name] not in (None, "") for fold in folds)
    ]
    table = Table(*columns, box=None, pad_edge=False)
    for fold in folds:
        table.add_row(*(Text(_cell(fold[name])) for name in columns))
    out.print(table)
    for fold in folds:
        if fold["folder"]:
            out.print(f"  {ledger.place_of(fold['folder'])}", soft_wrap=True)


def _cell(value: object) -> str:
    return "" if value is None else value_text(value)


# -- logs ------------------------------------------------------------------------------------------


def log_of(ledger: Ledger, task: str) -> Path:
    """The log of a task, such as "t003-f1".

    Raises:
        N3LOError: there is no such task, or no log of it.
    """
    found = re.fullmatch(r"t?(\d+)-f?(\d+)", task)
    if found is None:
        raise N3LOError(f"'{task}': write the task as t003-f1, which is fold 1 of trial 3")
    trial, fold = int(found[1]), int(found[2])
    states = ledger.trials_by_number[trial].tasks if trial in ledger.trials_by_number else {}
    if fold not in states:
        raise N3LOError(f"t{trial:03d}-f{fold}: there is no such task in {ledger.folder}")
    path = TaskPaths(ledger.folder / (states[fold].folder or f"t{trial:03d}-f{fold}")).stderr
    if not path.exists():
        has_ended = states[fold].status in ("done", "failed")  # perhaps in another study's folder
        why = "its log is gone, or was not copied" if has_ended else "it has no log yet"
        raise N3LOError(f"t{trial:03d}-f{fold}: {why} ({path})")
    return path


def print_log(ledger: Ledger, task: str, num_lines: int, follow: bool, out: Terminal) -> None:
    """The end of a task's log; what is added is printed too as long as a driver is at work.

    Raises:
        N3LOError: there is no such task, or it has not begun.
    """
    path = log_of(ledger, task)
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in deque(file, maxlen=num_lines):
            out.out(line, end="", highlight=False)
        while follow and ledger.is_running:
            time.sleep(REFRESH_S)
            ledger.refresh()
            out.out(file.read(), end="", highlight=False)
