"""The figures of the search: what they show is what the ledger has, however little that is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from made_runs import Made, make_run
from told_runs import MIXED, REAL, TWO, Told, write_run

from workflow.figures import search
from workflow.figures.axes import Axis, axes_of, robust_range, shortened
from workflow.space import Choice, Real
from workflow.surrogate import Surrogate
from workflow.view import View

A, B, KIND = "model.args.a", "model.args.b", "model.args.kind"


def traces(figure: go.Figure, name: str) -> list[Any]:
    return [trace for trace in figure.data if trace.name == name]


def text_of(figure: go.Figure) -> str:
    """The words in the middle of a figure without data."""
    assert not figure.data
    return str(figure.layout.annotations[0].text)


def all_figures(view: View) -> dict[str, go.Figure]:
    surrogate = Surrogate.of(view)
    paths = list(view.file.space.dimensions)
    return {
        "convergence": search.convergence(view),
        "parallel": search.parallel(view, surrogate),
        "importances": search.importances(surrogate),
        "slices": search.slices(view, surrogate),
        "slices without a model": search.slices(view, None),
        "contour": search.contour(view, surrogate, paths[0], paths[-1]),
        "contours": search.contours(view, surrogate),
        "front": search.front(view),
    }


def some_trials(num: int, **facts: Any) -> list[Told]:
    rng = np.random.default_rng(1)
    points = [{"a": float(rng.random()), "b": float(10 ** rng.uniform(-2, 0))} for _ in range(num)]
    return [Told(point=p, foms=0.5 + p["a"] + 0.05 * rng.normal(size=3), **facts) for p in points]


def mixed_trials(num: int) -> list[Told]:
    """One dimension is active in every fourth alone."""
    kinds = ["x", 1, 1.5, True]
    trials = []
    for number in range(num):
        point: dict[str, Any] = {"kind": kinds[number % 4], "a": (number * 0.37) % 1}
        if point["kind"] == "x":
            point["b"] = (number * 0.21) % 1
        trials.append(
            Told(point=point, foms=[0.1 * number, 0.1 * number + 0.2], seconds=9 - number)
        )
    return trials


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> View:
    folder = tmp_path_factory.mktemp("runs") / "made"
    return View(make_run(folder, Made(num_trials=40, epochs=1, failed=(3, 7), running=(39,))))


@pytest.fixture(scope="module")
def model(made) -> Surrogate | None:
    return Surrogate.of(made)


# Convergence


@pytest.mark.parametrize("goal", ["min", "max"])
def test_the_best_so_far_is_what_the_scores_say(tmp_path, goal):
    trials = some_trials(20)
    view = write_run(tmp_path / "run", trials, TWO, goal=goal)
    [line] = traces(search.convergence(view), "best so far")
    best = np.minimum if goal == "min" else np.maximum
    assert line.y == pytest.approx(best.accumulate([np.mean(t.foms) for t in trials]))
    assert line.x.tolist() == list(range(1, 21))
    assert line.line.shape == "hv"


def test_error_bars_are_the_spread_over_the_folds(made):
    [dots] = traces(search.convergence(made), "trial")
    ends = made.tasks.dropna(subset=["ended"]).groupby("trial")["ended"].max().sort_values()
    rows = made.trials.set_index("trial").loc[ends.index].dropna(subset=["score"])
    assert list(dots.y) == rows["score"].tolist()
    assert list(dots.error_y.array) == rows["spread"].tolist()


def test_failed_trials_are_crosses_below_all_scores_with_their_reason(made):
    figure = search.convergence(made)
    [crosses] = traces(figure, "failed")
    [dots] = traces(figure, "trial")
    assert len(crosses.x) == 2
    assert crosses.marker.symbol == "x"
    assert figure.layout.yaxis.range[0] < max(crosses.y) < min(dots.y)
    assert "failed: diverged" in crosses.hovertext[0]
    assert "lr = " in crosses.hovertext[0]


def test_one_that_exploded_is_a_triangle_at_the_edge(tmp_path):
    trials = some_trials(20)
    trials[5] = Told(point={"a": 0.5, "b": 0.5}, foms=[1e6, 1e7])
    figure = search.convergence(write_run(tmp_path / "run", trials, TWO))
    [cut] = traces(figure, "beyond the axis")
    low, high = figure.layout.yaxis.range
    assert list(cut.x) == [6]
    assert low < cut.y[0] < high < 3
    assert "5.5e+06" in cut.hovertext[0]


def test_smaller_budgets_are_paler_and_never_the_best(tmp_path):
    less = [
        Told(point=t.point, foms=[0.01] * 3, settings={"training.epochs": 1})
        for t in some_trials(5)
    ]
    figure = search.convergence(write_run(tmp_path / "run", [*less, *some_trials(8)], TWO))
    [line], [pale], [full] = (
        traces(figure, name) for name in ("best so far", "smaller budget", "trial")
    )
    assert np.isnan(line.y[:5].astype(float)).all()
    assert np.nanmin(line.y) == min(full.y) > 0.4
    assert (len(pale.x), len(full.x)) == (5, 8)
    assert pale.marker.size < full.marker.size


def test_a_trial_that_racing_dropped_is_hollow_and_not_the_best(tmp_path):
    trials = some_trials(8)
    trials[3] = Told(point=trials[3].point, foms=[0.1, 0.1, 0.1], status="dropped")
    figure = search.convergence(write_run(tmp_path / "run", trials, TWO))
    [dropped] = traces(figure, "dropped by racing")
    assert list(dropped.x) == [4]
    [line] = traces(figure, "best so far")
    assert min(line.y) > dropped.y[0]


def test_a_score_that_is_not_finite_failed(tmp_path):
    trials = some_trials(8)
    trials[2] = Told(point=trials[2].point, foms=[math.nan] * 3)
    trials[4] = Told(point=trials[4].point, foms=[math.inf] * 3)
    [crosses] = traces(search.convergence(write_run(tmp_path / "run", trials, TWO)), "failed")
    assert list(crosses.x) == [3, 5]
    assert "not finite" in crosses.hovertext[0]


def test_many_trials_are_drawn_by_webgl_without_bars(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "MANY", 10)
    [dots] = traces(search.convergence(write_run(tmp_path / "run", some_trials(20), TWO)), "trial")
    assert dots.type == "scattergl"
    assert dots.error_y.array is None


# Parallel coordinates


def test_lines_stand_at_the_values_of_their_trials(tmp_path):
    trials = some_trials(12)
    view = write_run(tmp_path / "run", trials, TWO)
    [a, b, score] = search.parallel(view, None).data[0].dimensions
    assert (a.label, b.label, score.label) == ("a", "b", "val_loss")
    assert list(a.values) == [t.point["a"] for t in trials]
    assert list(b.values) == pytest.approx([math.log10(t.point["b"]) for t in trials])
    assert list(score.values) == pytest.approx([np.mean(t.foms) for t in trials])
    assert dict(zip(b.tickvals, b.ticktext, strict=True))[-1.0] == "0.1"


def test_choices_are_categories_and_the_inactive_have_a_place_of_their_own(tmp_path):
    view = write_run(tmp_path / "run", mixed_trials(8), MIXED)
    [kind, b, _, _] = search.parallel(view, None).data[0].dimensions
    assert list(kind.values) == [0, 1, 2, 3] * 2
    assert list(kind.ticktext) == ["x", "1", "1.5", "True"]
    assert b.ticktext[0] == "–"  # noqa: RUF001
    assert [value == b.tickvals[0] for value in b.values] == [False, True, True, True] * 2
    assert b.range[0] == b.tickvals[0] < 0


@pytest.mark.parametrize(("goal", "sign"), [("min", -1), ("max", 1)])
def test_the_better_a_line_the_brighter(tmp_path, goal, sign):
    """A larger number is brighter, and is drawn above others."""
    view = write_run(tmp_path / "run", some_trials(9), TWO, goal=goal)
    [lines] = search.parallel(view, None).data
    assert list(lines.line.color) == pytest.approx(sign * np.array(lines.dimensions[-1].values))
    assert lines.line.cmin < lines.line.cmax


def test_of_many_dimensions_it_has_the_most_important(tmp_path):
    made = Made(num_trials=10, num_dimensions=60, num_folds=2, epochs=1)
    view = View(make_run(tmp_path / "run", made))
    model = Surrogate.of(view)
    figure = search.parallel(view, model)
    names = [axis.name for axis in axes_of(view.file.space).values()]
    labels = [dimension.label for dimension in figure.data[0].dimensions]
    assert len(labels) == 13
    assert labels[0] == search.importances(model).layout.yaxis.ticktext[-1]
    assert "12 most important of 60" in figure.layout.title.text
    figure = search.parallel(view, None)
    assert [dimension.label for dimension in figure.data[0].dimensions[:-1]] == names[:12]
    assert len(search.importances(model).data[0].y) == 20


# What matters, and how


def test_bars_are_the_indices(model):
    table = model.importances()
    figure = search.importances(model)
    total, alone = figure.data
    assert list(total.x[::-1]) == table["total"].tolist()
    assert list(alone.x[::-1]) == table["first_order"].tolist()
    assert list(total.y[::-1]) == table["path"].tolist()
    assert figure.layout.yaxis.ticktext[-1] == "lr"


def test_a_slice_has_the_trials_and_the_model(made, model):
    figure = search.slices(made, model, ["model.args.dropout", "training.optimizer.lr"])
    scored = made.trials.dropna(subset=["score"])
    dots = traces(figure, "trial")
    assert list(dots[1].x) == scored["training.optimizer.lr"].tolist()
    assert list(dots[1].y) == scored["score"].tolist()
    assert list(dots[1].error_y.array) == scored["spread"].tolist()
    table = model.slice("training.optimizer.lr")
    mean = traces(figure, "mean of the model")[1]
    assert list(mean.y) == table["mean"].tolist()
    assert figure.layout.xaxis2.type == "log"
    assert figure.layout.xaxis2.title.text == "lr"
    assert figure.layout.xaxis.type == "linear"


def test_a_level_has_a_mark_and_its_trials_around_it(made, model):
    figure = search.slices(made, model, ["model.args.activation"])
    [marks] = traces(figure, "mean and 95 % band of a level")
    assert list(marks.x) == [0, 1, 2]
    assert list(figure.layout.xaxis.ticktext) == ["relu", "selu", "gelu"]
    scored = made.trials.dropna(subset=["score"])
    levels = ["relu", "selu", "gelu"]
    expected = [levels.index(value) for value in scored["model.args.activation"]]
    assert np.round(traces(figure, "trial")[0].x).astype(int).tolist() == expected


def test_each_kind_of_mark_is_named_once(made, model):
    names = [trace.name for trace in search.slices(made, model).data if trace.showlegend]
    assert len(names) == len(set(names)) == 5


def test_a_contour_has_the_mean_and_its_uncertainty(made, model):
    figure = search.contour(made, model, "training.optimizer.lr", "model.args.dropout")
    grid = model.contour("training.optimizer.lr", "model.args.dropout")
    mean, deviation = (trace for trace in figure.data if trace.type == "contour")
    assert (mean.z == grid.mean).all()
    assert (deviation.z == grid.deviation).all()
    assert figure.layout.xaxis.type == figure.layout.xaxis2.type == "log"
    assert len(traces(figure, "trial")) == len(traces(figure, "best trial")) == 2


def test_between_levels_there_is_nothing(made, model):
    figure = search.contour(made, model, "model.args.activation", "model.args.dropout")
    assert [trace.type for trace in figure.data[:2]] == ["heatmap", "heatmap"]


def test_contours_are_chosen_from_a_list(made, model):
    figure = search.contours(made, model)
    buttons = figure.layout.updatemenus[0].buttons
    assert len(buttons) == 6
    assert buttons[0].label == "lr, width"
    for place, button in enumerate(buttons):
        shown = np.flatnonzero(button.args[0]["visible"])
        assert shown.tolist() == list(range(6 * place, 6 * place + 6))
    assert [bool(trace.visible) for trace in figure.data] == list(buttons[0].args[0]["visible"])
    assert buttons[0].args[1]["xaxis.title.text"] == "lr"


# Several objectives


def test_the_front_is_joined_from_end_to_end(tmp_path):
    """The score rises with the trial's number, and its seconds fall: nobody beats anybody."""
    trials = [Told(point={"a": n / 9}, foms=[n, n], seconds=9 - n) for n in range(5)]
    trials.append(Told(point={"a": 1.0}, foms=[9, 9], seconds=9.5))
    figure = search.front(write_run(tmp_path / "run", trials, further=["seconds"]))
    [members], [others] = traces(figure, "the front"), traces(figure, "beaten by another")
    assert members.mode == "lines+markers"
    assert list(members.x) == [10, 12, 14, 16, 18]  # of both folds
    assert list(members.y) == [4, 3, 2, 1, 0]
    assert (list(others.x), list(others.y)) == ([19], [9])
    assert "seconds" in figure.layout.xaxis.title.text


def test_a_third_objective_is_the_colour(tmp_path):
    trials = mixed_trials(8)
    view = write_run(tmp_path / "run", trials, MIXED, further=["seconds", "num_parameters"])
    [members] = traces(search.front(view), "the front")
    assert members.mode == "markers"
    assert sorted(members.marker.color) == list(range(100, 108))


def test_a_single_objective_has_no_front(made):
    assert "single objective" in text_of(search.front(made))


# Whatever there is


@pytest.mark.parametrize(
    "trials",
    [
        [],
        [Told(point={"a": 0.1}, status="running")],
        [Told(point={"a": a / 9}, status="failed") for a in range(9)],
        [Told(point={"a": a / 9}, foms=[math.nan, math.nan]) for a in range(9)],
    ],
    ids=["nothing", "running", "failed", "nan"],
)
def test_without_a_score_it_is_said_in_words(tmp_path, trials):
    figures = all_figures(write_run(tmp_path / "run", trials))
    ended = [told for told in trials if told.status != "running"]
    convergence = figures.pop("convergence")
    assert len(traces(convergence, "failed")) == (len(ended) > 0)
    for figure in figures.values():
        assert text_of(figure)


@pytest.mark.parametrize(
    ("trials", "space"),
    [
        ([Told(point={"a": 0.1})], REAL),
        ([Told(point={"a": a / 9}) for a in range(9)], REAL),
        ([Told(point={"a": 0.5}, foms=[a / 9]) for a in range(9)], REAL),
        (mixed_trials(12), MIXED),
    ],
    ids=["one", "equal", "one point, one fold", "mixed"],
)
def test_of_little_there_is_a_picture(tmp_path, trials, space):
    for figure in all_figures(write_run(tmp_path / "run", trials, space, goal="max")).values():
        figure.to_json()
        for axis in (figure.layout.xaxis, figure.layout.yaxis):
            assert axis.range is None or np.isfinite(axis.range).all()


def test_trials_outside_of_a_space_that_changed_are_left_out(tmp_path):
    view = write_run(tmp_path / "run", some_trials(20), TWO)
    study = view.folder / "study.toml"
    study.write_text(study.read_text().replace("low = 0.0, high = 1.0", "low = 0.0, high = 0.5"))
    changed = View(view.folder)
    [lines] = search.parallel(changed, Surrogate.of(changed)).data
    assert all(max(d.values) <= 0.5 for d in lines.dimensions if d.label == "a")
    assert 0 < len(lines.dimensions[0].values) < 20
    all_figures(changed)


def test_what_a_study_says_is_no_markup_in_its_figures(tmp_path):
    kinds = ["<b>x</b>", "y & z", "1"]
    space = f'"model.args.kind" = {{ type = "choice", values = {kinds} }}\n{REAL}'
    trials = [
        Told(point={"kind": kinds[n % 3], "a": n / 9}, foms=[n, n + 1], seconds=9 - n)
        for n in range(9)
    ]
    view = write_run(tmp_path / "run", trials, space, further=["seconds"])
    view.ledger.sessions[-1]["scoring"]["objective"]["metric"] = "val_<b>x</b>"
    figures = all_figures(view)
    dimensions = figures["parallel"].data[0].dimensions
    [kind] = [each for each in dimensions if each.label == "kind"]
    assert list(kind.ticktext) == kinds  # which plotly takes as they are
    kind.ticktext = []
    for name, figure in figures.items():
        assert "<b>x</b>" not in str(figure.to_dict()), name
    assert "kind = &lt;b&gt;x&lt;/b&gt;" in str(figures["convergence"].to_dict())
    assert "val_&lt;b&gt;x" in figures["front"].layout.yaxis.title.text


# Axes


def test_a_name_is_cut_before_it_is_escaped():
    axis = Axis("a", '<i>"name" of 28 letters at most', Choice(values=['<"&">', "x"]))
    assert axis.label == '&lt;i&gt;"name" of 28 letters at most'
    assert axis.layout()["title_text"] == axis.label
    assert axis.layout()["ticktext"] == ['&lt;"&amp;"&gt;', "x"]
    shown = axis.parallel(["x", '<"&">'])
    assert shown["label"] == '&lt;i&gt;"name" of …'
    assert shown["ticktext"] == ['<"&">', "x"]


def test_far_outliers_do_not_stretch_a_range():
    values = np.array([*np.linspace(0, 1, 50), 1e9, math.nan, -math.inf])
    low, high = robust_range(values)
    assert -0.1 < low < 0 < 1 < high < 1.1
    assert robust_range(values, [2.0])[1] > 2


@pytest.mark.parametrize("values", [[], [0.5], [0.5, 0.5], [0.0], [math.nan]])
def test_a_range_is_never_empty(values):
    low, high = robust_range(np.array(values))
    assert low < high


@pytest.mark.parametrize(("low", "high"), [(1e-5, 1e-1), (0.2, 0.9), (0.33, 0.44)])
def test_a_logarithmic_axis_has_ticks_between_its_ends(low, high):
    axis = Axis("a", "a", Real(low=low, high=high, log=True))
    ticks = axis.layout()["tickvals"]
    assert len(ticks) >= 2
    assert low - 1e-9 <= min(ticks) < max(ticks) <= high + 1e-9


def test_long_names_keep_what_tells_them_apart():
    assert shortened("model.args.encoder.num_channels", 16) == "…er.num_channels"
    assert shortened("a long description of it", 8) == "a long …"
    assert shortened("short", 8) == "short"
