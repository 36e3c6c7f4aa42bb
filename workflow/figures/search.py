"""Figures of the search: how it went, what it found, and what its space is like."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workflow.console import score_text, value_text
from workflow.figures.axes import NUM_TICKS, Axis, axes_of, robust_range
from workflow.figures.scored import best_of, ended, point_texts, scored
from workflow.figures.style import (
    BLACK,
    BLUE,
    GREY,
    HEIGHT,
    ORANGE,
    PALE,
    SCALE,
    SKY,
    VERMILION,
    empty,
    escaped,
    styled,
)
from workflow.surrogate import Surrogate
from workflow.view import View

MOST_DOTS = 200  # trials on a map, which more would hide: the best
MANY = 300  # trials from which on points are small, without error bars, and drawn by WebGL
MOST_LINES, MOST_BARS = 12, 20  # dimensions, in parallel coordinates and in bars
NUM_SLICES, PER_ROW = 6, 3
NUM_CROSSED = 4  # dimensions, all pairs of which `contours` has
NO_SCORE = "no trial has a score yet"
NO_MODEL = "a model needs four trials with a score that differ in their points"
BAND = "rgba(86, 180, 233, 0.35)"  # SKY, seen through
ON_TOP = {  # of the axes: a legend
    **{"y": 1.0, "yanchor": "bottom", "x": 0.0},
    **{"traceorder": "normal", "itemsizing": "constant"},
}

TRIAL = "trial"  # those of largest budget
# How the kinds of trials (see `ended`) are drawn; the last ones are on top.
_KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "less": ("smaller budget", {"color": SKY, "size": 4, "opacity": 0.6}),
    "dropped": ("dropped by racing", {"color": GREY, "size": 7, "symbol": "circle-open"}),
    "done": (TRIAL, {"color": BLUE, "size": 7}),
    "failed": ("failed", {"color": VERMILION, "size": 8, "symbol": "x"}),
}
_BEST = {"symbol": "star", "size": 15, "color": ORANGE, "line": {"color": BLACK, "width": 1}}


def convergence(view: View) -> go.Figure:
    """The score of each trial in the order in which they ended, and the best one so far."""
    title = "Score of each trial, in the order in which they ended"
    rows = ended(view)
    if rows.empty:
        return empty(title, "no trial has ended yet")
    order = np.arange(1, len(rows) + 1)
    scores, best = (rows[name].to_numpy(dtype=float) for name in ("score", "best"))
    limits = robust_range(scores, [float(best[-1])])
    floor = limits[0]
    if (rows["kind"] == "failed").any():  # they have a lane of their own below the scores
        floor -= 0.05 * (limits[1] - limits[0])
        limits = 2 * floor - limits[0], limits[1]
    figure = go.Figure()
    for kind, (name, marker) in _KINDS.items():
        chosen = rows["kind"] == kind
        at = np.full(len(rows), floor) if kind == "failed" else scores
        shown = rows.assign(x=order, y=at)[chosen]
        for trace in _points(shown, limits, name, marker):
            figure.add_trace(trace)
    if np.isfinite(best).any():
        line = {"shape": "hv", "color": BLACK, "width": 2}
        figure.add_trace(
            go.Scatter(
                x=order, y=best, mode="lines", line=line, name="best so far", hoverinfo="skip"
            )
        )
        done = rows.assign(x=order, y=scores)[rows["kind"] == "done"]
        top = best_of(done.sort_values("trial"), view.goal)  # of equal ones the first, as elsewhere
        figure.add_trace(_star(top))
        title += _sub(f"best: {score_text(top['score'], top['spread'])} (t{top['trial']:03d})")
    figure = styled(figure, title, "trials ended", _score_label(view))
    figure.update_layout(legend=ON_TOP, margin={"t": 95})
    figure.update_xaxes(range=[0, len(rows) + 1], dtick=1 if len(rows) <= 10 else None)
    return figure.update_yaxes(range=list(limits))


def parallel(view: View, surrogate: Surrogate | None) -> go.Figure:
    """Each trial with a score as a line through its values, coloured by the score."""
    title = "Points of the trials, and their scores"
    rows, axes = scored(view), axes_of(view.file.space)
    if rows.empty or not axes:
        return empty(title, NO_SCORE)
    chosen = _chosen(axes, surrogate, MOST_LINES)
    if len(chosen) < len(axes):
        which = "first" if surrogate is None else "most important"
        title += _sub(f"the {len(chosen)} {which} of {len(axes)} dimensions")
    scores = rows["score"].to_numpy(dtype=float)
    low, high = robust_range(scores)
    if np.ptp(scores) > 0:
        low, high = max(low, float(scores.min())), min(high, float(scores.max()))
    shown = np.clip(scores, low, high)  # what is farther out is at the edge
    dimensions = [
        axes[path].parallel([point.get(path) for point in rows["point"]]) for path in chosen
    ]
    # What has a larger number is drawn on top, and is brighter: that is to be the better.
    sign = -1.0 if view.goal == "min" else 1.0
    at = np.linspace(low, high, NUM_TICKS)
    line = {
        "color": sign * shown,
        "colorscale": SCALE,
        "cmin": min(sign * low, sign * high),
        "cmax": max(sign * low, sign * high),
        "showscale": True,
        "colorbar": {
            "title": {"text": _score_label(view), "side": "right"},
            "thickness": 14,
            "tickvals": sign * at,
            "ticktext": [f"{value:.3g}" for value in at],
        },
    }
    score = {"label": escaped(view.metric), "values": shown, "range": [low, high]}
    figure = styled(go.Figure(go.Parcoords(dimensions=[*dimensions, score], line=line)), title)
    figure.update_traces(labelangle=-20, labelside="top")
    figure.update_layout(title={"y": 0.93, "yanchor": "top"})
    return figure.update_layout(height=HEIGHT + 60, margin={"t": 130, "r": 40, "b": 30})


def importances(surrogate: Surrogate | None) -> go.Figure:
    """How much of the score's variance each dimension explains, alone and with others."""
    title = "What the score depends on"
    if surrogate is None:
        return empty(title, NO_MODEL)
    table = surrogate.importances().head(MOST_BARS).iloc[::-1]
    axes = axes_of(surrogate.space)
    said = f"by a model of {surrogate.num_trials} trials"
    if math.isfinite(surrogate.skill):
        said += f", which predicts each from the others with R² = {surrogate.skill:.2f}"
    if len(table) < len(axes):
        said += f"; {len(table)} of {len(axes)} dimensions"
    total = table["total"].to_numpy()
    paths = [escaped(path) for path in table["path"]]
    bars = {
        "y": paths,
        "orientation": "h",
        "hovertemplate": "%{y}<br>%{fullData.name}: %{x:.3f}<extra></extra>",
    }
    figure = go.Figure(
        [
            go.Bar(
                **bars,
                x=total,
                name="with interactions (total index)",
                marker={"color": PALE, "line": {"color": BLACK, "width": 1}},
                text=[f"{value:.2f}" for value in total],
                textposition="outside",
                cliponaxis=False,
            ),
            go.Bar(
                **bars,
                x=table["first_order"],
                name="alone (first-order index)",
                marker={"color": BLUE},
                width=0.4,
            ),
        ]
    )
    label = "share of the variance of the predicted score (Sobol' index)"
    figure = styled(figure, title + _sub(said), label)
    figure.update_layout(
        barmode="overlay", height=170 + 26 * len(table), legend=ON_TOP, margin={"t": 95, "r": 50}
    )
    figure.update_xaxes(range=[0, max(1.0, float(total.max()))])
    names = [axes[path].label for path in table["path"]]
    figure.update_yaxes(tickvals=paths, ticktext=names)
    return figure.update_yaxes(automargin=True, showgrid=False)


def slices(
    view: View, surrogate: Surrogate | None, paths: Sequence[str] | None = None
) -> go.Figure:
    """The score along single dimensions: of the trials, and of the model through the best one.

    Args:
        paths: by default the most important ones.
    """
    title = "Score along each dimension"
    rows, axes = scored(view), axes_of(view.file.space)
    shown = [axes[path] for path in paths or _chosen(axes, surrogate, NUM_SLICES)]
    if rows.empty or not shown:
        return empty(title, NO_SCORE)
    num_rows, num_columns = -(-len(shown) // PER_ROW), min(PER_ROW, len(shown))
    figure = make_subplots(
        rows=num_rows,
        cols=num_columns,
        shared_yaxes=True,
        horizontal_spacing=0.03,
        vertical_spacing=0.26 / num_rows,
    )
    limits = robust_range(rows["score"].to_numpy(dtype=float))
    for place, axis in enumerate(shown):
        where = {"row": place // PER_ROW + 1, "col": place % PER_ROW + 1}
        traces = _along(axis, rows, limits, view.goal)
        if surrogate is not None:
            traces = [*_model_along(axis, surrogate), *traces]
        for trace in traces:
            trace.legendgroup = trace.name
            figure.add_trace(trace, **where)
    named: set[str] = set()
    for trace in figure.data:  # each name once, wherever it comes first
        trace.showlegend = trace.showlegend is not False and trace.name not in named
        named |= {trace.name} if trace.showlegend else set()
    if surrogate is not None:
        title += _sub("the model's other values are those of the best trial")
    figure = styled(figure, title)
    for place, axis in enumerate(shown):
        figure.update_xaxes(**axis.layout(), row=place // PER_ROW + 1, col=place % PER_ROW + 1)
    figure.update_yaxes(range=list(limits))
    figure.update_yaxes(title_text=escaped(view.metric), col=1)
    height = 150 + 240 * num_rows
    return figure.update_layout(height=height, legend=ON_TOP, margin={"t": 95})


def contour(view: View, surrogate: Surrogate | None, path_x: str, path_y: str) -> go.Figure:
    """The predicted score over two dimensions, and how uncertain it is."""
    axes = axes_of(view.file.space)
    x, y = axes[path_x], axes[path_y]
    title = f"Predicted score over {x.label} and {y.label}"
    if surrogate is None:
        return empty(title, NO_MODEL)
    return _crossed(view, surrogate, [(x, y)], title)


def contours(view: View, surrogate: Surrogate | None) -> go.Figure:
    """`contour` for each pair of the most important dimensions, which are chosen from a list."""
    title = "Predicted score over two dimensions"
    if surrogate is None:
        return empty(title, NO_MODEL)
    axes = axes_of(view.file.space)
    crossed = [axes[path] for path in surrogate.most_important(NUM_CROSSED)]
    pairs = list(itertools.combinations(crossed, 2))
    if not pairs:
        return empty(title, "the space has a single dimension")
    figure = _crossed(view, surrogate, pairs, title)
    each = len(figure.data) // len(pairs)
    buttons = []
    for place, (x, y) in enumerate(pairs):
        visible = [number // each == place for number in range(len(figure.data))]
        args = [{"visible": visible}, _relayout(x, y)]
        buttons.append({"label": f"{x.label}, {y.label}", "method": "update", "args": args})
    for number, trace in enumerate(figure.data):
        trace.visible = number < each
    menu = {"buttons": buttons, "x": 1.0, "xanchor": "right", "y": 1.18, "yanchor": "bottom"}
    return figure.update_layout(updatemenus=[menu])


def front(view: View) -> go.Figure:
    """The trials by their score and a further objective; the colour is one more."""
    title = "What no other trial beats in all objectives"
    further = view.ledger.scoring.further
    names = ["score", *(each.metric for each in further)]
    values = view.trials[names].to_numpy(dtype=float)
    rows = view.trials.iloc[np.flatnonzero(np.isfinite(values).all(axis=1))]
    if rows.empty or not further:
        return empty(title, NO_SCORE if further else "the study has a single objective")
    metrics = [f"{escaped(each.metric)} ({_better(each.goal)})" for each in further]
    labels = [_score_label(view), *metrics]
    rows = rows.assign(x=rows[names[1]], y=rows["score"], text=_objective_texts(view, rows, names))
    colours: dict[str, Any] = {}
    if len(further) > 1:
        low, high = robust_range(rows[names[2]].to_numpy(dtype=float))
        bar = {"title": {"text": labels[2], "side": "right"}, "thickness": 14}
        is_less = further[1].goal == "min"  # the better, the brighter
        scale = {"colorscale": SCALE, "reversescale": is_less, "cmin": low, "cmax": high}
        colours = {**scale, "colorbar": bar}
    figure = go.Figure()
    for is_best, name, symbol, size in (
        (False, "beaten by another", "circle-open", 6),
        (True, "the front", "diamond", 11),
    ):
        some = rows[rows["pareto"] == is_best].sort_values(["x", "y"])
        colour = {**colours, "color": some[names[2]]} if colours else {}
        marker = {"symbol": symbol, "size": size, "color": VERMILION if is_best else GREY, **colour}
        # With a third objective the front is a surface, which no line follows.
        mode = "lines+markers" if is_best and not colours else "markers"
        trace = _scatter(some, name, marker, mode)
        figure.add_trace(trace.update(line={"color": VERMILION, "width": 1.5, "dash": "dash"}))
    num_best = int(rows["pareto"].sum())
    title += _sub(f"{num_best} of {len(rows)} trials")
    figure = styled(figure, title, labels[1], labels[0])
    best = rows["pareto"].to_numpy(dtype=bool)
    for name, update in (("x", figure.update_xaxes), ("y", figure.update_yaxes)):
        along = rows[name].to_numpy(dtype=float)
        update(range=list(robust_range(along, along[best].tolist())))
    return figure.update_layout(legend=ON_TOP, margin={"t": 95})


# -- along dimensions ------------------------------------------------------------------------------


def _chosen(axes: Mapping[str, Axis], surrogate: Surrogate | None, most: int) -> list[str]:
    """The most important dimensions; without a model the first."""
    return list(axes)[:most] if surrogate is None else surrogate.most_important(most)


def _along(axis: Axis, rows: pd.DataFrame, limits: tuple[float, float], goal: str) -> list[Any]:
    """The trials by their values of a dimension; those where it is inactive are left out."""
    places = axis.places([point.get(axis.path) for point in rows["point"]])
    if axis.is_listed:  # those of a level beside each other
        places = places + 0.5 * (np.random.default_rng(0).random(len(places)) - 0.5)
    shown = rows.assign(x=places, y=rows["score"])
    top = best_of(shown, goal)
    shown = shown[~np.isnan(places)]
    marker = {"color": BLUE, "size": 5, "opacity": 0.8}
    traces = _points(shown, limits, TRIAL, marker)
    return [*traces, _star(top)] if math.isfinite(top["x"]) else traces


def _model_along(axis: Axis, surrogate: Surrogate) -> list[Any]:
    """Mean and 95 % band: lines, or marks with bars where values have no order."""
    table = surrogate.slice(axis.path)
    x = axis.places(list(table["value"]))
    mean, low, high = (table[name].to_numpy(dtype=float) for name in ("mean", "low", "high"))
    if axis.is_listed:
        bars = {"array": high - mean, "arrayminus": mean - low, "color": BLACK, "thickness": 1.5}
        marker = {"symbol": "line-ew-open", "size": 22, "color": BLACK, "line": {"width": 2.5}}
        return [
            go.Scatter(
                x=x,
                y=mean,
                mode="markers",
                marker=marker,
                error_y=bars,
                name="mean and 95 % band of a level",
                hoverinfo="skip",
            )
        ]
    edge = {"x": x, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    line = {"color": BLACK, "width": 2}
    return [
        go.Scatter(**edge, y=low, showlegend=False),
        go.Scatter(**edge, y=high, fill="tonexty", fillcolor=BAND, name="95 % band of the model"),
        go.Scatter(
            x=x, y=mean, mode="lines", line=line, name="mean of the model", hoverinfo="skip"
        ),
    ]


def _crossed(
    view: View, surrogate: Surrogate, pairs: Sequence[tuple[Axis, Axis]], title: str
) -> go.Figure:
    """Mean and uncertainty over pairs of dimensions; the axes are those of the first pair."""
    figure = make_subplots(cols=2, shared_yaxes=True, horizontal_spacing=0.16)
    rows = scored(view).sort_values("score", ascending=view.goal == "min", kind="stable")
    rows = rows.head(MOST_DOTS)
    for x, y in pairs:
        for column, trace in enumerate(_fields(view, surrogate, x, y), start=1):
            figure.add_trace(trace, row=1, col=column)
        for column in (1, 2):
            shown = rows.assign(
                x=x.places([point.get(x.path) for point in rows["point"]]),
                y=y.places([point.get(y.path) for point in rows["point"]]),
            )
            dots = {"size": 5, "color": "white", "line": {"color": BLACK, "width": 1}}
            figure.add_trace(_scatter(shown, TRIAL, dots, "markers"), row=1, col=column)
            figure.add_trace(_star(best_of(shown, view.goal)), row=1, col=column)
    figure = styled(figure, title + _sub("the other values are those of the best trial (star)"))
    x, y = pairs[0]
    figure.update_xaxes(**x.layout(), showgrid=False).update_yaxes(**y.layout(), showgrid=False)
    figure.update_yaxes(title_text=None, col=2)
    return figure.update_layout(height=HEIGHT + 40, showlegend=False, margin={"t": 90})


def _fields(view: View, surrogate: Surrogate, x: Axis, y: Axis) -> list[Any]:
    grid = surrogate.contour(x.path, y.path)
    common = {
        "x": x.places(grid.x),
        "y": y.places(grid.y),
        "hovertemplate": f"{x.label} %{{x}}<br>{y.label} %{{y}}<br>%{{z:.4g}}<extra></extra>",
    }
    if x.is_listed or y.is_listed:  # there is nothing between levels
        kind, more = go.Heatmap, {}
    else:
        kind, more = go.Contour, {"ncontours": 15, "line": {"width": 0.5, "color": "white"}}
    return [
        kind(
            **common,
            **more,
            z=z,
            colorscale=scale,
            reversescale=is_reversed,
            colorbar={"title": {"text": label, "side": "right"}, "thickness": 14, "x": place},
        )
        for z, scale, is_reversed, label, place in (
            (grid.mean, SCALE, view.goal == "min", f"predicted {escaped(view.metric)}", 0.42),
            (grid.deviation, "Greys", False, "its standard deviation", 1.0),
        )
    ]


# -- pieces ----------------------------------------------------------------------------------------


def _points(
    rows: pd.DataFrame, limits: tuple[float, float], name: str, marker: Mapping[str, Any]
) -> list[Any]:
    """Trials at x and y; those beyond the limits as triangles at the edge."""
    is_many = len(rows) > MANY
    y = rows["y"].to_numpy(dtype=float)
    inside = (y >= limits[0]) & (y <= limits[1])
    traces = []
    if inside.any():
        size = marker["size"] - 3 if is_many else marker["size"]
        trace = _scatter(rows[inside], name, {**marker, "size": size}, "markers")
        if not is_many and name == TRIAL:
            trace.error_y = {
                "array": rows["spread"][inside].to_numpy(dtype=float),
                "thickness": 1,
                "width": 2,
                "color": GREY,
            }
        traces.append(trace)
    inward = 0.025 * (limits[1] - limits[0])
    for beyond, edge, symbol in (
        (y > limits[1], limits[1] - inward, "triangle-up"),
        (y < limits[0], limits[0] + inward, "triangle-down"),
    ):
        if beyond.any():
            at_edge = rows[beyond].assign(y=edge)
            cut = {"symbol": symbol, "size": 9, "color": VERMILION}
            traces.append(_scatter(at_edge, "beyond the axis", cut, "markers"))
    return traces


def _scatter(rows: pd.DataFrame, name: str, marker: Mapping[str, Any], mode: str) -> Any:
    kind = go.Scattergl if len(rows) > MANY else go.Scatter
    return kind(
        x=rows["x"].to_numpy(dtype=float),
        y=rows["y"].to_numpy(dtype=float),
        mode=mode,
        marker=marker,
        name=name,
        hovertext=rows["text"],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _star(row: pd.Series[Any]) -> Any:
    return _scatter(row.to_frame().T, "best trial", _BEST, "markers")


def _relayout(x: Axis, y: Axis) -> dict[str, Any]:
    """The two axes of both parts, as the browser is told to change them."""
    changes: dict[str, Any] = {}
    for letter, axis in (("x", x), ("y", y)):
        for key, value in axis.layout().items():
            for number in ("", "2"):
                changes[f"{letter}axis{number}.{key.replace('title_', 'title.')}"] = value
    return {**changes, "yaxis2.title.text": ""}


def _objective_texts(view: View, rows: pd.DataFrame, names: Sequence[str]) -> list[str]:
    numbers = [int(number) for number in rows["trial"]]
    values = rows[list(names)].to_numpy(dtype=float)
    texts = []
    for number, row, point in zip(numbers, values, point_texts(view, numbers), strict=True):
        said = [f"{name} {value_text(float(v))}" for name, v in zip(names, row, strict=True)]
        texts.append("<br>".join([f"<b>t{number:03d}</b>", *map(escaped, said), point]))
    return texts


def _score_label(view: View) -> str:
    """The metric, and what the score makes of its folds."""
    penalty = view.ledger.scoring.spread_penalty
    sign = "+" if view.goal == "min" else "-"
    of_folds = f"mean {sign} {penalty:g} deviations over folds, " if penalty else ""
    return f"{escaped(view.metric)} ({of_folds}{_better(view.goal)})"


def _better(goal: str) -> str:
    return "less is better" if goal == "min" else "more is better"


def _sub(text: str) -> str:
    """A second line of a title."""
    return f"<br><span style='font-size: 12px'>{text}</span>"
