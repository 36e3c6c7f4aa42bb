"""Figures of the machine: who ran where and when, what it cost, and what failed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workflow.figures.style import GREY, HEIGHT, PALE, STATUS, empty, escaped, styled
from workflow.timeline import Timeline, fates_of, sessions_of, work
from workflow.timeline import timeline as timeline_of
from workflow.view import View

MOST_BARS = 2000
MOST_LABELS = 30  # of nodes
LONGEST = 18  # letters of a node's name
CURVE_POINTS = 400
MOST_FAILURES = 200
LOG_BYTES, LOG_LINES = 8192, 12  # of the end of a log
GAP = 0.25  # a gap between sessions is cut out where it is longer than this part of them all
STEPS_S = (60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)  # of ticks

FATES = ("done", "failed", "lost", "running")
SAID = {"lost": "cut off or tried again"}  # of a fate, where its name does not say it
PATTERNS = {"done": "", "failed": "x", "lost": "/", "running": "."}  # beside colours, for print
_PATTERN = {"fgcolor": "white", "size": 6, "solidity": 0.15}


def timeline(view: View) -> go.Figure:
    """Each attempt as a bar on the lanes of its nodes; idle lanes are grey."""
    seen = timeline_of(view)
    if seen.bars.empty:
        return empty("Machine", "nothing has begun to run yet")
    bars = _last(seen.bars)
    figure = go.Figure()
    drawn = [
        (max(first, bars["begun"].min()), max(last, bars["ended"].min()))
        for first, last in seen.sessions
        if last > bars["begun"].min()
    ]
    lanes = range(len(seen.lanes))
    figure.add_bar(
        name="no task",
        y=[lane for lane in lanes for _ in drawn],
        base=[_date(first) for first, _ in drawn] * len(lanes),
        x=[1e3 * (last - first) for first, last in drawn] * len(lanes),
        orientation="h",
        width=0.9,
        marker={"color": PALE, "line_width": 0},
        hoverinfo="skip",
    )
    for fate in FATES:
        rows = bars[bars["fate"] == fate]
        if len(rows):
            figure.add_bar(**_bars(rows, fate))
    styled(figure, _machine_title(seen, bars), x="time of day (UTC)")
    figure.update_layout(
        barmode="overlay",
        height=int(np.clip(170 + 22 * len(lanes), 280, 900)),
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        margin={"t": 85, "l": 20},
        bargap=0,
    )
    figure.update_xaxes(type="date", showgrid=False, **_without_gaps(drawn, most_ticks=8))
    _label_nodes(figure, seen.lanes)
    return figure


def _last(bars: pd.DataFrame) -> pd.DataFrame:
    """The bars of the last attempts, as many as a browser draws at ease."""
    names = ["trial", "fold", "attempt"]
    order = bars.groupby(names, sort=False).agg(begun=("begun", "first"), size=("lane", "size"))
    order = order.sort_values("begun", ascending=False)
    kept = order[(order["size"].cumsum() <= MOST_BARS) | (np.arange(len(order)) == 0)]
    return bars[bars.set_index(names).index.isin(kept.index)]


def _bars(rows: pd.DataFrame, fate: str) -> dict[str, Any]:
    seconds = rows["ended"] - rows["begun"]
    said = rows["reason"] + np.where(rows["message"] != "", ": ", "") + rows["message"]
    facts = pd.DataFrame(
        {
            "task": _task_names(rows),
            "attempt": rows["attempt"],
            "status": rows["status"],
            "why": [f"<br>{escaped(text[:120])}" if text else "" for text in said],
            "seconds": [f"{value:,.0f} s" for value in seconds],
            "nodes": [_few(names) for names in rows["nodes"]],
            "job": [f"<br>job {escaped(job)}" if job else "" for job in rows["job"]],
        }
    )
    few = len(rows) <= MOST_BARS / 10
    return {
        "name": SAID.get(fate, fate),
        "y": rows["lane"].tolist(),
        "base": [_date(value) for value in rows["begun"]],
        "x": (1e3 * seconds).tolist(),
        "orientation": "h",
        "width": 0.8,
        "marker": {**_fill(fate), "line": {"color": "white", "width": 1 if few else 0}},
        "customdata": facts.astype(str).to_numpy(),
        "hovertemplate": (
            "%{customdata[0]}, attempt %{customdata[1]}: %{customdata[2]}%{customdata[3]}<br>"
            "%{customdata[4]} on %{customdata[5]}%{customdata[6]}<extra></extra>"
        ),
    }


def _machine_title(seen: Timeline, bars: pd.DataFrame) -> str:
    hours = sum(last - first for first, last in seen.sessions) / 3600
    title = f"Machine: tasks ran on {seen.utilisation:.0%} of its slots in {_duration(hours)}"
    if len(bars) == len(seen.bars):
        return title
    names = ["trial", "fold", "attempt"]
    shown, made = (len(each.drop_duplicates(names)) for each in (bars, seen.bars))
    return f"{title}; the last {shown} of {made} attempts"


def _label_nodes(figure: go.Figure, lanes: Sequence[str]) -> None:
    """Each node's name beside the middle of its lanes, and a line between nodes."""
    nodes = list(dict.fromkeys(lanes))
    firsts = [lanes.index(node) for node in nodes]
    middles = [(a + b - 1) / 2 for a, b in pairwise([*firsts, len(lanes)])]
    step = -(-len(nodes) // MOST_LABELS)
    figure.update_yaxes(
        tickvals=middles[::step],
        ticktext=[escaped(_short(node)) for node in nodes[::step]],
        range=[len(lanes) - 0.5, -0.5],
        showgrid=False,
        ticks="",
        automargin=True,
    )
    if len(nodes) <= MOST_LABELS:
        for first in firsts[1:]:
            figure.add_hline(y=first - 0.5, line={"color": GREY, "width": 1})


def _without_gaps(sessions: Sequence[tuple[float, float]], most_ticks: int) -> dict[str, Any]:
    """An axis of time that leaves out long gaps between sessions, but for a white strip."""
    total = sum(last - first for first, last in sessions)
    strip = 0.01 * total
    gaps = [
        {"bounds": [_date(last + strip), _date(first - strip)]}
        for (_, last), (first, _) in pairwise(sessions)
        if first - last > GAP * total + 2 * strip
    ]
    if not gaps:
        return {"nticks": most_ticks}
    # plotly places its own as if nothing were left out
    step = next((step for step in STEPS_S if total / step <= most_ticks), STEPS_S[-1])
    ticks = [tick for first, last in sessions for tick in _ticks(first, last, step)]
    ticks = ticks[:: -(-len(ticks) // most_ticks)]
    days = [_date(tick)[:10] for tick in ticks]
    labels = [
        _date(tick)[11:16] + (f"<br>{day}" if day != before else "")
        for tick, day, before in zip(ticks, days, ["", *days], strict=False)
    ]
    places = [_date(tick) for tick in ticks]
    return {"rangebreaks": gaps, "tickvals": places, "ticktext": labels, "tickangle": 0}


def _ticks(first: float, last: float, step: float) -> list[float]:
    """The multiples of the step in a session, not close to the next; its begin without any."""
    return np.arange(-(-first // step) * step, last - step / 2, step).tolist() or [first]


# -- cost ------------------------------------------------------------------------------------------


def cost(view: View) -> go.Figure:
    """Node-hours by what became of them, and how they added up.

    What was done, failed, and was cut off with a word of it is `workflow.stop.node_hours`; what
    runs, and what ended with its driver, comes on top.
    """
    rows = work(view)
    if rows.empty:
        return empty("Cost", "nothing has begun to run yet")
    sums = rows.groupby("fate")["node_hours"].sum()
    sums = sums[[fate for fate in FATES if fate in sums.index]]
    figure = make_subplots(cols=2, column_widths=[0.4, 0.6], horizontal_spacing=0.14)
    figure.add_bar(**_sums(sums))
    at = _curve_times(rows, sessions_of(view))
    for fate in sums.index:
        figure.add_scatter(
            x=[_date(time) for time in at],
            y=_used_by(at, rows[rows["fate"] == fate], view.node_share),
            name=SAID.get(fate, fate),
            stackgroup="cost",
            mode="lines",
            line={"width": 0.5, "color": STATUS[fate]},
            fillcolor=STATUS[fate],
            fillpattern={**_fill(fate)["pattern"], "bgcolor": STATUS[fate]},
            hovertemplate="%{y:.4g} node-hours",
            showlegend=False,
            row=1,
            col=2,
        )
    styled(figure, f"Cost: {sums.sum():.3g} node-hours", y="node-hours")
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(showgrid=False, col=1)
    figure.update_xaxes(title_text="time (UTC)", type="date", col=2)
    figure.update_xaxes(**_without_gaps(sessions_of(view), most_ticks=5), col=2)
    figure.update_yaxes(rangemode="tozero", range=[0, 1.12 * sums.max()], col=1)
    figure.update_yaxes(title_text="node-hours, added up", rangemode="tozero", col=2)
    return figure


def _sums(sums: pd.Series[float]) -> dict[str, Any]:
    """A bar a fate."""
    fates = list(sums.index)
    return {
        "x": [SAID.get(fate, fate).replace(" or ", "<br>or ") for fate in fates],
        "y": sums.tolist(),
        "text": [f"{value:.3g}" for value in sums],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {
            "color": [STATUS[fate] for fate in fates],
            "pattern": {**_PATTERN, "shape": [PATTERNS[fate] for fate in fates]},
        },
        "width": 0.7,
        "showlegend": False,
        "hovertemplate": "%{x}: %{y:.4g} node-hours<extra></extra>",
    }


def _curve_times(rows: pd.DataFrame, sessions: Sequence[tuple[float, float]]) -> np.ndarray:
    """At which the used node-hours are drawn: where they change, or evenly if that is often."""
    changes = [rows["begun"].to_numpy(), rows["ended"].to_numpy(), np.ravel(sessions)]
    times = np.unique(np.concatenate(changes))
    if len(times) > CURVE_POINTS:
        times = times[np.linspace(0, len(times) - 1, CURVE_POINTS).astype(int)]
    return times


def _used_by(times: np.ndarray, rows: pd.DataFrame, node_share: float) -> np.ndarray:
    """Node-hours of some attempts until each of the times; each attempt uses them evenly."""
    used = np.zeros(len(times))
    for column, sign in (("begun", 1.0), ("ended", -1.0)):  # sum of max(0, time - begin or end)
        changes = np.sort(rows[column].to_numpy()) - times[0]
        count = np.searchsorted(changes, times - times[0])
        sums = np.concatenate([[0.0], np.cumsum(changes)])
        used += sign * (count * (times - times[0]) - sums[count])
    result: np.ndarray = used * node_share / 3600
    return result


# -- failures --------------------------------------------------------------------------------------


def failures(view: View, most: int = MOST_FAILURES) -> pd.DataFrame:
    """The tasks that failed, the last ones first.

    Returns:
        task, reason, message, attempts, job, host, and log, which is the path.
    """
    tasks = view.tasks
    rows = tasks[tasks["status"] == "failed"].sort_values("ended", ascending=False).head(most)
    numbers = zip(rows["trial"], rows["fold"], strict=True)
    logs = [view.ledger.files_of(int(trial), int(fold)).stderr for trial, fold in numbers]
    facts = rows[["reason", "message", "attempt", "job", "host"]]
    frame = facts.rename(columns={"attempt": "attempts"}).reset_index(drop=True)
    frame.insert(0, "task", pd.Series(_task_names(rows), dtype="string"))
    frame["log"] = pd.Series([str(log) for log in logs], dtype="string")
    return frame


def failure_counts(view: View) -> go.Figure:
    """How often what went wrong; also where the task was tried again."""
    tasks = view.tasks
    failed = tasks[tasks["status"] == "failed"]
    counts = _reasons(view.attempts, failed)
    if counts.empty:
        return empty("Failures", "nothing has failed")
    figure = go.Figure()
    reasons = [escaped(str(reason)) for reason in counts.index]
    for fate in counts.columns:
        name = SAID.get(fate, fate)
        if counts[fate].any():
            figure.add_bar(
                name=name,
                y=reasons,
                x=counts[fate],
                orientation="h",
                marker=_fill(fate),
                width=0.6,
                hovertemplate="%{y}: %{x}<extra>" + name + "</extra>",
            )
    sums = counts.sum(axis=1)
    figure.add_scatter(
        x=sums,
        y=reasons,
        text=[f" {number}" for number in sums],
        mode="text",
        textposition="middle right",
        cliponaxis=False,
        hoverinfo="skip",
        showlegend=False,
    )
    styled(figure, f"Failures: {len(failed)} of {len(tasks)} tasks", x="attempts")
    figure.update_layout(
        barmode="stack",
        showlegend=True,
        height=int(np.clip(190 + 30 * len(counts), 250, HEIGHT + 220)),
        legend={"y": 1.0, "yanchor": "bottom"},
        margin={"t": 85},
    )
    figure.update_xaxes(rangemode="tozero", tickformat="d", dtick=1 if sums.max() < 10 else None)
    figure.update_yaxes(automargin=True, showgrid=False, ticks="")
    return figure


def _reasons(attempts: pd.DataFrame, failed: pd.DataFrame) -> pd.DataFrame:
    """How many attempts failed, and were lost, for each reason; the most frequent one last."""
    orphans = failed[failed["submitted"].isna()]  # they had nothing to go on from
    fates = pd.concat([fates_of(attempts), orphans["status"]])
    said = attempts["reason"].mask(attempts["status"] == "lost", "driver ended")
    said = pd.concat([said, orphans["reason"]])
    counts = {fate: said[fates == fate].value_counts() for fate in ("failed", "lost")}
    table = pd.DataFrame(counts).fillna(0).astype(int)
    return table.loc[table.sum(axis=1).sort_values(kind="stable").index]


def log_end(log: Path) -> str:
    """The last lines of a file; however long it is, little of it is read."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = text.splitlines()
    if size > LOG_BYTES:
        lines = lines[1:]  # the first is torn
    return "\n".join(lines[-LOG_LINES:])


# -- fates and words -------------------------------------------------------------------------------


def _fill(fate: str) -> dict[str, Any]:
    """The marker of its bars."""
    return {"color": STATUS[fate], "pattern": {**_PATTERN, "shape": PATTERNS[fate]}}


def _task_names(rows: pd.DataFrame) -> list[str]:
    pairs = zip(rows["trial"], rows["fold"], strict=True)
    return [f"t{trial:03d}-f{fold}" for trial, fold in pairs]


def _date(seconds: float) -> str:
    """UTC, as plotly has dates."""
    return str(np.datetime64(round(1e3 * seconds), "ms"))


def _duration(hours: float) -> str:
    if hours < 2 / 60:
        return f"{3600 * hours:.0f} s"
    return f"{60 * hours:.0f} min" if hours < 2 else f"{hours:,.1f} hours"


def _short(node: str) -> str:
    """Without its domain; of a long name the end, which differs."""
    name = node.partition(".")[0]
    return name if len(name) <= LONGEST else f"…{name[-LONGEST + 1 :]}"


def _few(names: Sequence[str]) -> str:
    said = ", ".join(escaped(name) for name in names[:4])
    return said if len(names) <= 4 else f"{said} and {len(names) - 4} more"
