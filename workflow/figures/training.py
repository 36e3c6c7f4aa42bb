"""Figures of trainings: their curves, how their speed grows with ranks, where their time goes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workflow import scaling as speeds
from workflow.console import short_names, value_text
from workflow.figures.style import (
    BLACK,
    BLUE,
    CYCLE,
    DASHES,
    GREY,
    HEIGHT,
    ORANGE,
    SYMBOLS,
    VERMILION,
    empty,
    escaped,
    styled,
    ticks,
)
from workflow.view import View

MOST_RUNNING = 8  # curves with a label each
CURVE_POINTS = 400
QUANTILES = (0.01, 0.97)  # of the values, which the axis shows at the least
LABEL_PX = 15  # between labels

MOST_TASKS = 2000  # whose layouts are worked out, half a millisecond each
MOST_SETTINGS = 6
MOST_BARS = 20
LONG_NAME = 30  # letters of a setting; two such have no room in a line
CLOSE = 1.25  # labels of ranks whose ratio is less would touch
MOST_NODES = 12
PART_COLOURS = dict(zip(speeds.PARTS, (BLUE, VERMILION, ORANGE, GREY), strict=True))
PART_PATTERNS = dict(zip(speeds.PARTS, ("", "/", ".", "x"), strict=True))


# -- curves ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Curve:
    """A column of one history."""

    trial: int
    fold: int
    epochs: np.ndarray  # (n,)
    values: np.ndarray  # (n,), finite


def learning_curves(view: View, metric: str | None = None, num_best: int = 5) -> go.Figure:
    """A metric against the epoch, of what runs and of the best trials.

    Args:
        metric: a column of the histories; the objective's if it is not said.
    """
    metric = metric or view.metric
    running, best = _running(view), _best(view, num_best)
    now = _curves(view, running.tail(MOST_RUNNING), metric)
    past = _curves(view, best, metric)
    title = f"Learning curves: {escaped(metric)}"
    if not now and not past:
        return empty(title, "no task has ended an epoch yet")
    figure = go.Figure()
    for place, trial in enumerate(best["trial"].unique()):
        _draw_best(figure, [curve for curve in past if curve.trial == trial], place)
    for curve in now:
        _draw_running(figure, curve)

    values = np.concatenate([curve.values for curve in (*now, *past)])
    is_log = bool((values > 0).all() and values.max() > 100 * values.min())
    shown = np.log10(values) if is_log else values
    lasts = [curve.values[-1] for curve in (*now, *past)]
    lasts = np.log10(lasts).tolist() if is_log else lasts
    low = min(float(np.quantile(shown, QUANTILES[0])), *lasts)
    high = max(float(np.quantile(shown, QUANTILES[1])), *lasts)
    pad = 0.05 * (high - low) or abs(low) / 10 or 1.0

    if len(past) > len({curve.trial for curve in past}):
        title += " (thin: folds, thick: their mean)"
    if len(running) > len(now) and now:
        title += f"; {len(now)} of {len(running)} running tasks"
    styled(figure, title, x="epoch", y=escaped(metric))
    figure.update_yaxes(type="log" if is_log else "linear", range=[low - pad, high + pad])
    if is_log:
        figure.update_yaxes(**_log_ticks(low - pad, high + pad))
    figure.update_xaxes(rangemode="tozero")
    figure.update_layout(height=HEIGHT + 60, margin={"r": 75 if now else 20})
    _label(figure, now, is_log, (low - pad, high + pad))
    return figure


def curve_metrics(view: View) -> list[str]:
    """What `learning_curves` can draw: the objective's metric, and the others of the histories."""
    names = {view.metric: None}
    for trial, fold in _tasks_of(pd.concat([_running(view).tail(1), _best(view, 1).head(1)])):
        history = view.history(trial, fold)
        numbers = history.select_dtypes("number").columns
        names.update(dict.fromkeys(name for name in numbers if name not in ("epoch", "seconds")))
    return list(names)


def _running(view: View) -> pd.DataFrame:
    return view.tasks[view.tasks["status"] == "running"]


def _best(view: View, number: int) -> pd.DataFrame:
    """The tasks of the best trials, the best trial first."""
    best = view.best_first[["trial"]].head(number)
    return best.merge(view.tasks, on="trial")


def _tasks_of(tasks: pd.DataFrame) -> Iterable[tuple[int, int]]:
    return zip(tasks["trial"].astype(int), tasks["fold"].astype(int), strict=True)


def _curves(view: View, tasks: pd.DataFrame, metric: str) -> list[_Curve]:
    """Of those that have any values; an epoch that was trained again counts as it was then."""
    curves = []
    for trial, fold in _tasks_of(tasks):
        history = view.history(trial, fold)
        if not {metric, "epoch"} <= set(history.columns):
            continue
        rows = history[["epoch", metric]].apply(pd.to_numeric, errors="coerce")
        rows = rows[np.isfinite(rows).all(axis=1)].drop_duplicates("epoch", keep="last")
        if len(rows):
            curves.append(_Curve(trial, fold, rows["epoch"].to_numpy(), rows[metric].to_numpy()))
    return curves


def _draw_best(figure: go.Figure, folds: Sequence[_Curve], place: int) -> None:
    """A thin line a fold, and a thick one: their mean over the epochs that all have."""
    if not folds:
        return
    colours = [colour for colour in CYCLE if colour != BLACK]  # which is for what runs
    colour, dash = colours[place % len(colours)], DASHES[place % len(DASHES)]
    name = f"t{folds[0].trial:03d}"
    together = [pd.Series(curve.values, curve.epochs) for curve in folds]
    mean = pd.concat(together, axis=1).dropna().mean(axis=1)
    at = _thinned(len(mean))
    figure.add_scatter(
        x=mean.index[at],
        y=mean.to_numpy()[at],
        name=name,
        legendgroup=name,
        mode="lines" if len(mean) > 1 else "markers",
        line={"color": colour, "width": 2.2, "dash": dash},
        hovertemplate=f"{name}, epoch %{{x}}: %{{y:.5g}}<extra></extra>",
    )
    for curve in folds if len(folds) > 1 else []:
        at = _thinned(len(curve.epochs))
        figure.add_scatter(
            x=curve.epochs[at],
            y=curve.values[at],
            legendgroup=name,
            showlegend=False,
            mode="lines",
            line={"color": colour, "width": 0.8},
            opacity=0.45,
            hovertemplate=f"{name}-f{curve.fold}, epoch %{{x}}: %{{y:.5g}}<extra></extra>",
        )


def _draw_running(figure: go.Figure, curve: _Curve) -> None:
    at = _thinned(len(curve.epochs))
    marked = [0.0] * (len(at) - 1) + [7.0]  # where it has come to
    name = f"t{curve.trial:03d}-f{curve.fold}"
    figure.add_scatter(
        x=curve.epochs[at],
        y=curve.values[at],
        name="running now",
        legendgroup="running",
        showlegend=not any(trace.legendgroup == "running" for trace in figure.data),
        mode="lines+markers",
        marker={"size": marked, "opacity": 1, "line_width": 0},
        line={"color": BLACK, "width": 2.5},
        hovertemplate=f"{name}, epoch %{{x}}: %{{y:.5g}}<extra>running</extra>",
    )


def _label(
    figure: go.Figure, curves: Sequence[_Curve], is_log: bool, shown: tuple[float, float]
) -> None:
    """The names of what runs beside the ends of the curves, moved apart where they would touch."""
    height = figure.layout.height - figure.layout.margin.t - figure.layout.margin.b
    ends = [math.log10(curve.values[-1]) if is_log else curve.values[-1] for curve in curves]
    pixels = [height * (end - shown[0]) / (shown[1] - shown[0]) for end in ends]
    for curve, end, pixel, moved in zip(curves, ends, pixels, apart(pixels, LABEL_PX), strict=True):
        figure.add_annotation(
            x=curve.epochs[-1],
            y=end,
            text=f"t{curve.trial:03d}-f{curve.fold}",
            showarrow=False,
            xanchor="left",
            xshift=8,
            yshift=moved - pixel,
            font_size=12,
            bgcolor="rgba(255, 255, 255, 0.7)",
        )


def apart(places: Sequence[float], least: float) -> list[float]:
    """The places, moved as little as it takes that there is `least` between neighbours."""
    blocks: list[list[int]] = []  # of those that touch, which are moved together
    centres: list[float] = []
    for index in sorted(range(len(places)), key=places.__getitem__):
        blocks.append([index])
        centres.append(places[index])
        while len(blocks) > 1:
            room = least * (len(blocks[-2]) + len(blocks[-1])) / 2
            if centres[-1] - centres[-2] >= room:
                break
            block = blocks.pop()
            centres.pop()
            blocks[-1] += block
            centres[-1] = sum(places[member] for member in blocks[-1]) / len(blocks[-1])
    moved = [0.0] * len(places)
    for block, centre in zip(blocks, centres, strict=True):
        for number, index in enumerate(block):
            moved[index] = centre + least * (number - (len(block) - 1) / 2)
    return moved


def _thinned(number: int) -> np.ndarray:
    """Which points of a long curve are drawn; the first and the last are."""
    return np.unique(np.linspace(0, number - 1, min(number, CURVE_POINTS)).round().astype(int))


# -- speed -----------------------------------------------------------------------------------------


def scaling(view: View) -> go.Figure:
    """Samples a second against ranks, and the parts of the time.

    Where all trainings have the same number of ranks, both are by node: a slow one shows.
    """
    done = view.tasks[view.tasks["status"] == "done"].dropna(subset=["samples_per_second"])
    if done.empty:
        return empty("Speed", "no task is done yet")
    if done["num_ranks"].nunique() == 1:
        return _by_node(done)
    num_done = len(done)
    done = speeds.described(done.tail(MOST_TASKS), view.file.study)
    setting = speeds.setting_of(done, view.file.study)
    rows = speeds.compared(done, setting)
    names = _setting_names(rows, setting)
    shown, rates = names.unique()[:MOST_SETTINGS], rows["samples_per_second"]
    shares = rows[list(speeds.PARTS)].assign(label=names + _layouts(rows, names)).head(MOST_BARS)
    heights = [260, 26 * len(shares) + 20]
    between = 120  # pixels, for the labels of the axis and a legend
    figure = make_subplots(
        rows=2, row_heights=heights, vertical_spacing=between / (sum(heights) + between)
    )
    for place, name in enumerate(shown):
        _draw_speeds(figure, rows[names == name], name, place)
    _draw_parts(figure, shares, row=2, col=1)

    title = "Speed against ranks; dashed: ideal"
    if names.nunique() > len(shown):
        title += f"; {len(shown)} of {names.nunique()} settings"
    if len(done) < num_done:
        title += f"; of the last {len(done)} tasks"
    styled(figure, title)
    figure.update_xaxes(type="log", title_text="ranks", **_rank_ticks(done["num_ranks"]), row=1)
    figure.update_yaxes(type="log", title_text="samples/s", row=1)
    figure.update_yaxes(**_log_ticks(*np.log10([rates.min(), rates.max()])), row=1)
    _style_parts(figure, row=2, col=1)
    above = {"orientation": "h", "yanchor": "bottom", "x": 0, "traceorder": "normal"}
    is_long = max(map(len, shown)) > LONG_NAME
    top = 65 + 22 * (len(shown) if is_long else -(-len(shown) // 2))  # the legend's lines
    figure.update_layout(
        height=sum(heights) + between + top + 55,
        title={"y": 1, "yref": "container", "yanchor": "top", "pad_t": 18},
        legend={**above, "y": 1.0},
        legend2={**above, "y": figure.layout.yaxis2.domain[1]},
        margin={"t": top},
    )
    return figure


def _rank_ticks(ranks: pd.Series[int]) -> dict[str, list[int]]:
    """The numbers that there are, but for those too close to the one before on a log axis."""
    kept: list[int] = []
    for number in sorted(int(number) for number in ranks.unique()):
        if not kept or number >= CLOSE * kept[-1]:
            kept.append(number)
    return {"tickvals": kept}


def _log_ticks(low: float, high: float) -> dict[str, list[str] | list[float]]:
    """Of a log axis, from logarithms; plotly's own are bare digits between decades."""
    texts = [str(text) for text in ticks([low, high])["ticktext"]]
    return {"tickvals": [float(text) for text in texts], "ticktext": texts}


def _setting_names(rows: pd.DataFrame, setting: Sequence[str]) -> pd.Series[str]:
    """A setting in words: its strategy, and what else differs."""
    short = dict(zip(setting, short_names(setting), strict=True))

    def words(row: dict[str, object]) -> str:
        said = [
            f"{short[name]} {value_text(row[name])}" if "." in name else str(row[name])
            for name in setting
            if pd.notna(row[name])  # type: ignore[call-overload]  # values are scalars
        ]
        return escaped(", ".join(said))

    return pd.Series(
        [words({str(key): value for key, value in row.items()}) for row in rows.to_dict("records")]
    )


def _layouts(rows: pd.DataFrame, names: pd.Series[str]) -> pd.Series[str]:
    """The number of ranks in words; the layout where that does not tell rows apart."""
    ranks = rows["num_ranks"].map(lambda number: f", {number} rank" + "s" * (number != 1))
    is_twice = (names + ranks).duplicated(keep=False)
    return ranks.mask(is_twice, ", " + rows["layout"])


def _draw_speeds(figure: go.Figure, rows: pd.DataFrame, name: str, place: int) -> None:
    colour = CYCLE[place % len(CYCLE)]
    ranks = rows["num_ranks"].astype(int)
    figure.add_scatter(
        x=ranks,
        y=rows["samples_per_second"],
        name=name,
        mode="markers+lines" if ranks.is_unique else "markers",
        marker={"color": colour, "size": 8, "symbol": SYMBOLS[place % len(SYMBOLS)]},
        line={"color": colour},
        customdata=rows[["layout", "efficiency"]].fillna(math.nan),
        hovertemplate=(
            f"{name}<br>%{{x}} ranks (%{{customdata[0]}}): %{{y:.4g}}/s, "
            "efficiency %{customdata[1]:.0%}<extra></extra>"
        ),
        row=1,
        col=1,
    )
    ideal = rows.dropna(subset=["ideal"]).sort_values("num_ranks")
    if len(ideal):
        of_one = ideal["samples_per_second"] / ideal["speed_up"]  # of the reference
        figure.add_scatter(
            x=ideal["num_ranks"].astype(int),
            y=of_one * ideal["ideal"],
            mode="lines",
            line={"color": colour, "dash": "dash", "width": 1},
            showlegend=False,
            hoverinfo="skip",
            row=1,
            col=1,
        )


def _by_node(done: pd.DataFrame) -> go.Figure:
    """How fast tasks of equal size were on each node."""
    nodes = done["host"].replace("", "unknown node").fillna("unknown node")
    often = nodes.value_counts().index[:MOST_NODES]
    groups = nodes.where(nodes.isin(often), "other nodes").map(_short_nodes)
    ranks = int(done["num_ranks"].iloc[0])
    figure = make_subplots(cols=2, horizontal_spacing=0.2)
    order = sorted(groups.unique())
    for group in order:
        rows = done[groups == group]
        tasks = zip(rows["trial"], rows["fold"], strict=True)
        figure.add_box(
            x=rows["samples_per_second"],
            y=[group] * len(rows),
            orientation="h",
            boxpoints="all" if len(rows) <= CURVE_POINTS else "outliers",
            jitter=0.5,
            pointpos=0,
            marker={"color": BLUE, "size": 4, "opacity": 0.6},
            line={"color": BLACK, "width": 1},
            fillcolor="rgba(0,0,0,0)",
            text=[f"t{trial:03d}-f{fold}" for trial, fold in tasks],
            hovertemplate="%{text}: %{x:.4g}/s<extra></extra>",
            showlegend=False,
            row=1,
            col=1,
        )
    seconds = done[speeds.SECONDS].groupby(groups).sum()
    shares = seconds.div(seconds.sum(axis=1), axis=0).set_axis(list(speeds.PARTS), axis=1)
    shares = shares.loc[order].rename_axis("label").reset_index()
    _draw_parts(figure, shares, row=1, col=2)
    plural = "" if ranks == 1 else "s"
    styled(figure, f"Speed of the tasks, {ranks} rank{plural} each, by node")
    legend = {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 1.0, "xanchor": "right"}
    figure.update_layout(
        height=int(np.clip(190 + 32 * len(order), 280, 800)),
        legend2={**legend, "traceorder": "normal"},
        margin={"t": 85},
    )
    _style_parts(figure, row=1, col=2)
    figure.update_xaxes(title_text="samples/s", rangemode="tozero", col=1)
    figure.update_yaxes(autorange="reversed", showgrid=False, ticks="", automargin=True, col=1)
    return figure


def _short_nodes(host: str) -> str:
    """Of several nodes the first, and how many more."""
    first, *more = host.split(",")
    name = escaped(first.partition(".")[0][-16:])
    return f"{name} + {len(more)}" if more else name


def _draw_parts(figure: go.Figure, shares: pd.DataFrame, row: int, col: int) -> None:
    """Stacked bars of the time's parts.

    Args:
        shares: one row a bar: label, and the parts; a bar without parts was not measured.
    """
    for part in speeds.PARTS:
        values = shares[part].astype(float)
        figure.add_bar(
            x=values,
            y=shares["label"],
            name=part,
            legend="legend2",
            width=0.7,
            orientation="h",
            text=[f"{value:.0%}" if value >= 0.1 else "" for value in values],
            textangle=0,
            insidetextanchor="middle",
            marker={
                "color": PART_COLOURS[part],
                "pattern": {"shape": PART_PATTERNS[part], "fgcolor": "white", "solidity": 0.1},
            },
            hovertemplate=f"%{{y}}: {part} %{{x:.1%}}<extra></extra>",
            row=row,
            col=col,
        )


def _style_parts(figure: go.Figure, row: int, col: int) -> None:
    place = {"row": row, "col": col}
    figure.update_layout(barmode="stack")
    figure.update_xaxes(
        title_text="part of the time in training steps", tickformat=".0%", range=[0, 1], **place
    )
    figure.update_yaxes(autorange="reversed", showgrid=False, ticks="", automargin=True, **place)
