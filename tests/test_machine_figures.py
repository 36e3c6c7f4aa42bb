"""Figures of trainings and of the machine: who ran where, what it cost, how fast it was."""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import Made, make_run

from workflow.figures import machine, training
from workflow.figures.style import STATUS
from workflow.stop import node_hours
from workflow.timeline import coloured, timeline, work
from workflow.view import View

T0 = 1_790_000_000.0
FIGURES = (
    training.learning_curves,
    training.scaling,
    machine.timeline,
    machine.cost,
    machine.failure_counts,
)


def hand_made(tmp_path: Path, *sessions: list[dict[str, Any]], **facts: Any) -> View:
    """A run with one trial a task.

    Args:
        sessions: the tasks of each: at, begun, end (hours), and the facts of their end. One
            without an end runs, or ran when its driver ended.
    """
    folder = make_run(tmp_path / "hand", Made(num_trials=1, num_folds=1))
    lines = (folder / "ledger.jsonl").read_text().splitlines()
    head, trial = json.loads(lines[0]), json.loads(lines[1])
    rows, number = [], itertools.count()
    for tasks in sessions:
        rows.append({**head, "time": T0 + 3600 * min(task["at"] for task in tasks), **facts})
        for task in tasks:
            name = {"trial": next(number), "fold": 0, "key": "k"}
            start = T0 + 3600 * task["at"]
            rows.append({**trial, **name, "time": start, "num_folds": 1})
            rows.append({"event": "start", "time": start, "attempt": 1, **name})
            if "end" in task:
                rows.append(_end(task, name))
    rows.sort(key=lambda row: row["time"])
    (folder / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return View(folder)


def _end(task: dict[str, Any], name: dict[str, Any]) -> dict[str, Any]:
    facts = {"status": "done", "nodes": ["n1"], **task}
    for key in ("at", "begun", "end"):
        facts.pop(key, None)
    if "begun" in task:
        facts["begun"] = T0 + 3600 * task["begun"]
    if facts["status"] == "done":
        seconds = 3600 * (task["end"] - task.get("begun", task["at"]))
        result = {"fom": 1.0, "seconds": seconds, "num_ranks": 1, "epochs": 2, "hosts": ["n1"]}
        facts["result"] = {**result, **facts.get("result", {})}
    folder = f"t{name['trial']:03d}-f0"
    return {"event": "end", "time": T0 + 3600 * task["end"], "folder": folder, **name, **facts}


@pytest.fixture
def running(tmp_path) -> Iterator[View]:
    """Of 6 trials one failed and two run, in their middle."""
    folder = make_run(tmp_path / "run", Made(num_trials=6, failed=(1,), running=(4, 5)))
    with open(folder / "driver.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield View(folder)


# -- lanes -----------------------------------------------------------------------------------------


def test_intervals_that_overlap_never_share_a_lane_and_lanes_are_as_few_as_can_be():
    rng = np.random.default_rng(1)
    for _ in range(20):
        begun = rng.integers(0, 100, 60).astype(float)
        ended = begun + rng.integers(1, 20, 60)
        lanes = coloured(begun, ended)
        for a, b in itertools.combinations(range(60), 2):
            if begun[a] < ended[b] and begun[b] < ended[a]:
                assert lanes[a] != lanes[b]
        at_once = max(int(((begun <= time) & (time < ended)).sum()) for time in begun)
        assert set(lanes) == set(range(at_once))


def test_utilisation_is_the_busy_part_of_the_slots_while_drivers_were_at_work(tmp_path):
    """Two slots for 4 hours, days apart from 2 slots for 2: 3 + 2 + 1 of 12 hours."""
    view = hand_made(
        tmp_path,
        [
            {"at": 0, "begun": 1, "end": 4},
            {"at": 0, "begun": 1, "end": 3, "status": "failed", "reason": "oom"},
        ],
        [{"at": 100, "begun": 101, "end": 102}],
        num_slots=2,
    )
    seen = timeline(view)
    assert seen.utilisation == pytest.approx(6 / 12)
    assert seen.lanes == ["n1", "n1"]
    assert seen.bars["lane"].tolist() == [0, 1, 0]
    assert [last - first for first, last in seen.sessions] == [4 * 3600, 2 * 3600]


def test_without_the_number_of_slots_it_is_that_of_tasks_at_once(tmp_path):
    tasks = [{"at": 0, "begun": 0.5, "end": 1}, {"at": 0, "begun": 0.5, "end": 2}]
    assert timeline(hand_made(tmp_path, tasks, num_slots=None)).utilisation == pytest.approx(0.5)


def test_a_task_over_several_nodes_has_a_lane_on_each_and_nodes_are_in_order(tmp_path):
    wide = {"at": 0, "begun": 1, "end": 2, "nodes": ["n10", "n9"]}
    other = {"at": 0, "begun": 1, "end": 2, "nodes": ["n2"]}
    seen = timeline(hand_made(tmp_path, [wide, other], node_share=2.0, num_slots=1))
    assert seen.lanes == ["n2", "n9", "n10"]
    assert seen.bars.groupby("trial")["lane"].agg(set).tolist() == [{1, 2}, {0}]


def test_a_node_has_a_lane_for_each_slot_also_where_nothing_ran(tmp_path):
    view = hand_made(tmp_path, [{"at": 0, "begun": 1, "end": 2}], num_slots=3)
    assert timeline(view).lanes == ["n1"] * 3


def test_an_end_that_is_recorded_late_takes_no_lane_from_the_next(tmp_path):
    late = 0.5 / 3600
    tasks = [{"at": 0, "begun": 1, "end": 2 + late}, {"at": 0, "begun": 2, "end": 3}]
    assert timeline(hand_made(tmp_path, tasks, num_slots=1)).lanes == ["n1"]


def test_waiting_is_not_work_and_neither_is_what_the_cache_had(tmp_path):
    cached = {"at": 0, "end": 1, "cached": True, "nodes": []}
    rows = work(hand_made(tmp_path, [{"at": 0, "begun": 3, "end": 4}, cached]))
    assert rows[["trial", "begun", "ended"]].to_numpy().tolist() == [[0, T0 + 10800, T0 + 14400]]


def test_what_older_versions_wrote_occupied_its_seconds_up_to_its_end(tmp_path):
    old = {"at": 0, "end": 4, "nodes": [], "result": {"seconds": 7200.0}}
    [row] = work(hand_made(tmp_path, [old])).to_dict("records")
    assert (row["begun"], row["ended"], row["nodes"]) == (T0 + 7200, T0 + 14400, ("n1",))


def test_what_runs_ends_now(running):
    bars = timeline(running).bars
    assert set(bars.loc[bars["trial"] >= 4, "fate"]) == {"running"}
    assert bars.loc[bars["trial"] >= 4, "ended"].to_numpy() == pytest.approx(running.read_at)


def test_only_the_last_attempts_are_drawn_and_the_title_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "MOST_BARS", 3)
    tasks = [{"at": n, "begun": n + 0.1, "end": n + 0.9} for n in range(5)]
    figure = machine.timeline(hand_made(tmp_path, tasks))
    [done] = [trace for trace in figure.data if trace.name == "done"]
    assert [facts[0] for facts in done.customdata] == ["t002-f0", "t003-f0", "t004-f0"]
    assert figure.layout.title.text.endswith("the last 3 of 5 attempts")


def test_a_long_gap_between_sessions_is_left_out_of_the_axis(tmp_path):
    sessions = [[{"at": at, "begun": at + 0.1, "end": at + 1}] for at in (0, 72)]
    figure = machine.timeline(hand_made(tmp_path, *sessions))
    [gap] = figure.layout.xaxis.rangebreaks
    assert np.diff(np.array(gap.bounds, "datetime64[s]")).astype(float) / 3600 == pytest.approx(
        71, abs=0.1
    )


# -- cost and failures -----------------------------------------------------------------------------


def test_the_bars_of_the_cost_add_up_to_the_node_hours_that_count(tmp_path):
    view = hand_made(
        tmp_path,
        [
            {"at": 0, "begun": 1, "end": 4},
            {"at": 0, "begun": 1, "end": 3, "status": "failed", "reason": "oom"},
            {"at": 0, "begun": 2, "end": 3, "status": "failed", "reason": "walltime"},
            {"at": 0, "end": 1, "cached": True},
            {"at": 1, "end": 3, "result": {"seconds": 3600.0}},
        ],
        node_share=0.5,
    )
    bars, *curves = machine.cost(view).data
    costs = dict(zip(bars.x, bars.y, strict=True))
    assert costs == pytest.approx({"done": 2, "failed": 1, "cut off<br>or tried again": 0.5})
    assert sum(bars.y) == pytest.approx(node_hours(view.ledger, 0.5))
    assert [curve.y[-1] for curve in curves] == pytest.approx(list(bars.y))
    assert all(np.diff(curve.y).min() >= 0 for curve in curves)


def test_failures_have_the_ends_of_their_logs_however_long_those_are(tmp_path):
    view = View(make_run(tmp_path / "run", Made(num_trials=3, num_folds=1, failed=(0, 2))))
    log = view.folder / "t002-f0" / "stderr.txt"
    log.write_text("".join(f"line {number}\n" for number in range(100_000)))
    (view.folder / "t000-f0" / "stderr.txt").unlink()
    table = machine.failures(view).set_index("task").sort_index()
    assert table["reason"].tolist() == ["diverged"] * 2
    assert machine.log_end(Path(table.loc["t000-f0", "log"])) == ""
    lines = machine.log_end(Path(table.loc["t002-f0", "log"])).splitlines()
    assert lines == [f"line {n}" for n in range(100_000 - machine.LOG_LINES, 100_000)]


def test_failures_are_counted_by_reason_and_by_whether_there_is_hope(tmp_path):
    ends = [{"at": 0, "begun": 1, "end": 2, "status": "failed"} for _ in range(3)]
    for end, reason in zip(ends, ("oom", "oom", "walltime"), strict=True):
        end["reason"] = reason
    view = hand_made(tmp_path, [*ends, {"at": 0}], [{"at": 9, "begun": 10, "end": 11}])
    bars = {
        bar.name: dict(zip(bar.y, bar.x, strict=True)) for bar in machine.failure_counts(view).data
    }
    assert bars["failed"] == {"oom": 2, "walltime": 0, "driver ended": 0}
    assert bars["cut off or tried again"] == {"oom": 0, "walltime": 1, "driver ended": 1}


def test_a_bar_has_the_colour_and_the_pattern_of_its_fate_in_every_figure(tmp_path):
    ends = [{"at": 0, "begun": 1, "end": 2, "status": "failed", "reason": "oom"}, {"at": 0}]
    view = hand_made(tmp_path, ends, [{"at": 9, "begun": 10, "end": 11}])
    colour, shape = STATUS["failed"], machine.PATTERNS["failed"]
    for figure in (machine.timeline(view), machine.failure_counts(view)):
        [failed] = [bar for bar in figure.data if bar.name == "failed"]
        assert (failed.marker.color, failed.marker.pattern.shape) == (colour, shape)
    bars, *curves = machine.cost(view).data
    place = list(bars.x).index("failed")
    assert (bars.marker.color[place], bars.marker.pattern.shape[place]) == (colour, shape)
    [curve] = [curve for curve in curves if curve.name == "failed"]
    assert (curve.fillcolor, curve.fillpattern.shape) == (colour, shape)


def test_each_status_of_a_task_has_a_colour_of_its_own():
    """The headline's bar counts tasks of all of them."""
    assert {"waiting", "running", "done", "failed", "dropped"} < set(STATUS)
    assert len(set(STATUS.values())) == len(STATUS)


# -- trainings -------------------------------------------------------------------------------------


def test_curves_are_of_what_runs_and_of_the_best_with_their_mean(running):
    figure = training.learning_curves(running, num_best=1)
    best = int(running.best_first["trial"].iloc[0])
    [mean, *folds, now] = [t for t in figure.data if t.showlegend is not False or t.opacity]
    assert (mean.name, now.name) == (f"t{best:03d}", "running now")
    values = [running.history(best, fold)["val_loss"].to_numpy() for fold in range(3)]
    assert mean.y == pytest.approx(np.mean(values, axis=0))
    assert [fold.y for fold in folds] == [pytest.approx(each) for each in values]
    labels = [note.text for note in figure.layout.annotations]
    assert labels == [f"t00{trial}-f{fold}" for trial in (4, 5) for fold in range(3)]


def test_the_axis_is_logarithmic_over_decades_and_shows_where_curves_end(tmp_path):
    view = View(make_run(tmp_path / "run", Made(num_trials=1, num_folds=1, epochs=40)))
    path = view.folder / "t000-f0" / "history.jsonl"
    values = [1e9, *(10.0 ** (2 - epoch / 10) for epoch in range(39))]
    rows = [{"epoch": epoch, "val_loss": value} for epoch, value in enumerate(values, 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    axis = training.learning_curves(view).layout.yaxis
    assert axis.type == "log"
    assert axis.range[0] < math.log10(values[-1])
    assert 1.9 < axis.range[1] < 5  # the outlier is left out


def test_the_menu_has_the_objective_first(running):
    metrics = training.curve_metrics(running)
    assert metrics[0] == "val_loss"
    assert {"loss", "val_accuracy", "lr"} < set(metrics)


def test_labels_are_moved_apart_by_as_little_as_it_takes():
    assert training.apart([0.0, 100.0], 15) == [0, 100]
    assert training.apart([10.0, 10.0, 100.0], 15) == [2.5, 17.5, 100]
    assert training.apart([20.0, 0.0, 10.0], 15) == [25, -5, 10]


def test_the_speed_is_drawn_against_ranks_with_its_ideal(tmp_path):
    folder = make_run(tmp_path / "run", Made(num_trials=3, num_folds=1, num_dimensions=1))
    study = (
        (folder / "study.toml")
        .read_text()
        .replace("[training]", '[training]\nstrategy = "allreduce"')
    )
    head = study.partition("[search.space]")[0]
    workers = '"layout.num_workers" = { type = "ordinal", values = [1, 2, 4] }\n'
    (folder / "study.toml").write_text(f"{head}[search.space]\n{workers}")
    rows = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    for row in rows:
        if row["event"] == "trial":
            row["point"] = {"layout.num_workers": 2 ** row["trial"]}
        if row["event"] == "end":
            ranks = 2 ** row["trial"]
            row["result"] |= {"num_ranks": ranks, "samples_per_second": 100.0 * ranks**0.5}
    (folder / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    speed, ideal, *parts = training.scaling(View(folder)).data
    assert list(speed.x) == [1, 2, 4]
    assert list(speed.y) == pytest.approx([100, 100 * 2**0.5, 200])
    assert list(ideal.y) == pytest.approx([100, 200, 400])
    assert [part.x[0] for part in parts] == pytest.approx([0.7, 0.15, 0.1, 0.05])


# -- whatever there is -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    [
        Made(num_trials=1, num_folds=1),
        Made(num_trials=2, failed=(0, 1)),
        Made(num_trials=2, running=(0, 1)),
    ],
    ids=["one trial", "all failed", "none finished"],
)
def test_every_figure_is_drawn_of_whatever_there_is(tmp_path, made):
    draw_all(View(make_run(tmp_path / "run", made)))


def test_every_figure_is_drawn_before_the_first_trial(tmp_path):
    folder = make_run(tmp_path / "run", Made())
    session, *_ = (folder / "ledger.jsonl").read_text().splitlines(keepends=True)
    (folder / "ledger.jsonl").write_text(session)
    draw_all(View(folder))


def test_every_figure_is_drawn_while_tasks_run(running):
    draw_all(running)


def test_every_figure_is_drawn_of_torn_and_missing_histories(tmp_path):
    folder = make_run(tmp_path / "run", Made(num_trials=3))
    (folder / "t000-f0" / "history.jsonl").unlink()
    with open(folder / "t001-f0" / "history.jsonl", "a") as file:
        file.write('{"epoch": 11, "val_l')
    with open(folder / "t001-f1" / "history.jsonl", "a") as file:
        file.write('{"epoch": 11, "val_loss": NaN}\n{"epoch": 12}\n')
    draw_all(View(folder))


@pytest.mark.parametrize("end", [{"cached": True, "nodes": []}, {"nodes": []}])
def test_every_figure_is_drawn_without_the_times_of_begin(tmp_path, end):
    sessions = [[{"at": at, "end": at + 1, **end}, {"at": at}] for at in (0, 200, 400)]
    draw_all(hand_made(tmp_path, *sessions, num_slots=None))


def draw_all(view: View) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for draw in FIGURES:
            figure = draw(view)
            assert figure.layout.title.text
            assert figure.data or figure.layout.annotations  # it says why there is nothing
            json.loads(figure.to_json())
        assert len(machine.failures(view)) == (view.tasks["status"] == "failed").sum()
