"""The report of a run: one HTML file that opens from disk, figures for a paper, and Markdown."""

from __future__ import annotations

import html
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from apps.contract import N3LOError, write_json
from workflow import best, compare
from workflow.console import score_text, short_names, value_text
from workflow.extras import require
from workflow.figures import machine, search, several, training
from workflow.surrogate import Surrogate
from workflow.view import View
from workflow.whole import check_file, whole_file, write_whole

MOST_ROWS = 1000  # of a table
PAPER_WIDTH, PAPER_SCALE = 800, 3  # pixels; of a PNG, by which they are multiplied
PATIENCE_S, PER_FIGURE_S = 60.0, 10.0  # with a browser: until it is there, and for each figure

_STYLE = """
body { font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: #222;
       max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; margin-bottom: 0; } h2 { font-size: 1.2em; margin-top: 2em; }
table { border-collapse: collapse; font-size: 13px; }
.wide { overflow-x: auto; max-height: 32em; }
th, td { padding: .25em .7em; text-align: right; border-bottom: 1px solid #ddd; }
th { position: sticky; top: 0; background: #fff; cursor: pointer; white-space: nowrap; }
th[aria-sort=ascending]::after { content: " \\2191"; }
th[aria-sort=descending]::after { content: " \\2193"; }
.text { text-align: left; }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content auto; gap: .1em 1em; }
dt { color: #555; } dd { margin: 0; }
pre { background: #f6f6f6; padding: .7em; overflow-x: auto; font-size: 12px; }
@media print { .wide { max-height: none; } section { break-inside: avoid; } }
"""

# A click on a column's heading sorts by it, numbers as numbers; another one turns it round.
_SORT = """
for (const heading of document.querySelectorAll("th")) heading.onclick = () => {
  const body = heading.closest("table").tBodies[0], place = heading.cellIndex;
  const sign = heading.ariaSort === "ascending" ? -1 : 1;
  for (const other of heading.parentElement.cells) other.ariaSort = null;
  heading.ariaSort = sign > 0 ? "ascending" : "descending";
  const value = (row) => row.cells[place].dataset.value ?? row.cells[place].textContent;
  const compare = (a, b) => {
    const x = value(a), y = value(b);
    if ((x === "") !== (y === "")) return x === "" ? 1 : -1;  // what is missing comes last
    return sign * (isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y);
  };
  body.append(...[...body.rows].sort(compare));
};
"""


def figures(view: View) -> dict[str, go.Figure]:
    """All figures of a run, by the name of their files."""
    surrogate = Surrogate.of(view)
    made = {
        "convergence": search.convergence(view),
        "learning_curves": training.learning_curves(view),
        "importances": search.importances(surrogate),
        "slices": search.slices(view, surrogate),
        "contours": search.contours(view, surrogate),
        "parallel": search.parallel(view, surrogate),
        "scaling": training.scaling(view),
        "timeline": machine.timeline(view),
        "cost": machine.cost(view),
    }
    if view.ledger.scoring.further:
        made["front"] = search.front(view)
    return made


def write_page(view: View, path: Path, made: Mapping[str, go.Figure] | None = None) -> None:
    """Write the report of a run as one HTML file, which needs no network.

    Args:
        made: its `figures`, if they are there already.
    """
    shown = figures(view) if made is None else made
    parts = [
        _section("Summary", _facts(best.summary(view))),
        _section(
            "Best trials",
            _table(best.best_table(view)),
            _paragraph(f"{best.against_runner_up(view)}."),
        ),
        *(_figure(shown[name]) for name in ("convergence", "front") if name in shown),
        _section("Where good trials are"),
        *(_figure(shown[name]) for name in ("importances", "slices", "contours", "parallel")),
        _section("Trainings"),
        *(_figure(shown[name]) for name in ("learning_curves", "scaling")),
        _section("The machine"),
        *(_figure(shown[name]) for name in ("timeline", "cost")),
        *_failures(view),
        _section("All trials", _table(view.ranked.dropna(axis="columns", how="all"))),
        _section("The study", f"<pre>{html.escape(view.file.text)}</pre>"),
    ]
    _write(path, view.name, parts)


def write_comparison(views: Sequence[View], path: Path) -> None:
    """Write several runs beside each other as one HTML file."""
    names = ", ".join(compare.labels(views))
    parts = [
        _section("Runs", _table(compare.table(views))),
        _figure(several.courses(views)),
    ]
    _write(path, names, parts)


def write_figures(made: Mapping[str, go.Figure], folder: Path, kind: str) -> list[Path]:
    """Write figures for a paper, one file each; return their paths.

    Raises:
        ModuleNotFoundError: kaleido is not installed.
        N3LOError: it finds no browser that works, or a file cannot be written.
    """
    require("kaleido")
    paths = {name: folder / f"{name}.{kind}" for name in made}
    for path in paths.values():
        check_file(path)
    with tempfile.TemporaryDirectory(prefix="n3lo-") as there:
        orders = [
            {
                "name": paths[name].name,
                # A menu cannot be opened on paper.
                "figure": json.loads(
                    go.Figure(figure).update_layout(updatemenus=[], width=PAPER_WIDTH).to_json()
                ),
                "options": {"format": kind, "scale": PAPER_SCALE if kind == "png" else 1},
            }
            for name, figure in made.items()
        ]
        write_json(Path(there) / "orders.json", orders, durable=False)
        if (said := _drawn(Path(there), PATIENCE_S + PER_FIGURE_S * len(orders))) is not None:
            raise N3LOError(
                f"figures as {kind} are drawn by a Chrome or Chromium: {said}; install the "
                f"package of your system, or type 'plotly_get_chrome'"
            )
        for path in paths.values():
            with whole_file(path) as beside:
                shutil.copyfile(Path(there) / path.name, beside)
    return list(paths.values())


def _drawn(folder: Path, patience_s: float) -> str | None:
    """Have `workflow.drawing` draw what is ordered there; what it complains of, if it does."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "workflow.drawing", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # its browser is ended with it
    )
    try:
        if process.wait(patience_s) == 0:
            return None
    except subprocess.TimeoutExpired:
        return f"none has answered in {patience_s:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    error = folder / "error.txt"
    said = error.read_text() if error.exists() else f"it ended with status {process.returncode}"
    return said.partition("\n")[0].partition(". ")[0].rstrip(".")


def markdown(view: View) -> str:
    """A summary to paste into a log book, an issue, or a chat."""
    facts = best.summary(view)
    rows = best.best_table(view)
    lines = [
        f"## {facts['name']}",
        "",
        *(f"- {name}: {text}" for name, text in in_words(facts).items()),
        "",
        *_markdown_table(rows),
        "",
        f"{best.against_runner_up(view)}.",
    ]
    return "\n".join(lines).rstrip() + "\n"


def in_words(facts: Mapping[str, Any]) -> dict[str, str]:
    """What `best.summary` says, for people."""
    started = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(facts["started"]))
    said = {
        "state": "running" if facts["running"] else "not running",
        "goal": f"{facts['metric']} ({facts['goal']})",
        "trials": f"{_counts(facts['trials'])} (budget: {facts['num_trials']})",
        "tasks": _counts(facts["tasks"]),
        "started": started if facts["site"] is None else f"{started}, on {facts['site']}",
        "cost": f"{facts['node_hours']:.3g} node-hours, in {facts['hours']:.3g} hours of drivers",
    }
    if facts["utilisation"] is not None:
        said["use of the slots"] = f"{facts['utilisation']:.0%}"
    if facts["failures"]:
        said["failures"] = _counts(facts["failures"])
    if facts["best"] is not None:
        trial = facts["best"]
        spread = math.nan if trial["spread"] is None else trial["spread"]
        said["best"] = f"t{trial['trial']:03d}, {score_text(trial['score'], spread)}"
    return said


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items()) or "none"


# -- pieces ----------------------------------------------------------------------------------------


def _write(path: Path, title: str, parts: Sequence[str]) -> None:
    name = html.escape(title)
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style>'
        f"<script>{get_plotlyjs()}</script></head>"
    )
    body = "\n".join(parts)
    write_whole(path, f"{head}<body><h1>{name}</h1>{body}<script>{_SORT}</script></body></html>\n")


def _section(title: str, *parts: str) -> str:
    return f"<h2>{html.escape(title)}</h2>" + "".join(parts)


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _figure(figure: go.Figure) -> str:
    config = {"displaylogo": False, "responsive": True}
    inner: str = figure.to_html(full_html=False, include_plotlyjs=False, config=config)
    return f"<section>{inner}</section>"


def _facts(facts: Mapping[str, Any]) -> str:
    pairs = in_words(facts).items()
    items = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in pairs)
    return f"<dl>{items}</dl>"


def _failures(view: View) -> list[str]:
    failures = machine.failures(view)
    if failures.empty:
        return []
    ends = [machine.log_end(Path(log)) for log in failures["log"]]
    failures = failures.assign(**{"its end": ends})
    return [
        _section("Failures", _figure(machine.failure_counts(view)), _table(failures)),
    ]


def _table(rows: pd.DataFrame) -> str:
    """A table that is sorted by a click on a heading."""
    shown = rows.head(MOST_ROWS)
    names = short_names([str(name) for name in shown.columns])
    kinds = (
        "" if pd.api.types.is_numeric_dtype(dtype) else ' class="text"' for dtype in shown.dtypes
    )
    heads = "".join(
        f"<th{kind}>{html.escape(name)}</th>" for name, kind in zip(names, kinds, strict=True)
    )
    lines = "".join(
        f"<tr>{''.join(_cell(value) for value in row)}</tr>"
        for row in shown.itertuples(index=False, name=None)
    )
    left = len(rows) - len(shown)
    more = f"<p>... and {left} more; 'export' has all</p>" if left else ""
    return (
        f'<div class="wide"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>{more}"
    )


def _cell(value: object) -> str:
    if _is_missing(value):
        return "<td></td>"
    if isinstance(value, float):
        return f'<td data-value="{value!r}">{value_text(value)}</td>'
    kind = "" if pd.api.types.is_number(value) else ' class="text"'
    return f"<td{kind}>{html.escape(str(value))}</td>"


def _is_missing(value: object) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def _markdown_table(rows: pd.DataFrame) -> list[str]:
    names = short_names([str(name) for name in rows.columns])
    lines = [
        ["" if _is_missing(value) else _markdown_cell(value) for value in row]
        for row in rows.itertuples(index=False, name=None)
    ]
    return [f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *lines)]


def _markdown_cell(value: object) -> str:
    """In one line, of one cell."""
    return " ".join(value_text(value).split()).replace("|", "\\|")
