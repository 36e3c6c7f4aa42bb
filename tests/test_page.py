"""The report of a run: as one file, as figures for a paper, as Markdown; and several runs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from made_runs import Made, make_run

from apps.contract import N3LOError
from workflow import cli, compare, page
from workflow.figures import several
from workflow.view import View


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_run(tmp_path / "runs" / "made", Made(num_trials=8, failed=(2,)))


RUNS = {
    "nothing": Made(num_trials=1, num_folds=1, running=(0,)),
    "all-failed": Made(num_trials=3, failed=(0, 1, 2)),
    "one-trial": Made(num_trials=1, num_folds=1),
    "wide": Made(num_trials=20, num_folds=2, num_dimensions=60),
}


@pytest.mark.parametrize("made", RUNS.values(), ids=RUNS)
def test_every_run_has_a_report(tmp_path, made):
    view = View(make_run(tmp_path / "run", made))
    page.write_page(view, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert text.count('class="plotly-graph-div"') >= 9
    assert page.markdown(view).startswith("## made\n")
    assert not list(tmp_path.glob(".report*"))


def test_what_a_run_says_is_text_in_its_report_and_no_markup(tmp_path):
    folder = make_run(tmp_path / "run", Made(num_trials=3, failed=(1,)))
    evil = "</script><script>alert(1)</script>"
    ledger = folder / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace("loss is nan", evil).replace("node1", evil))
    (folder / "study.toml").write_text((folder / "study.toml").read_text() + f"# {evil}\n")
    (folder / "t001-f0" / "stderr.txt").write_text(evil)
    page.write_page(View(folder), tmp_path / "report.html")
    assert "alert(1)</script>" not in (tmp_path / "report.html").read_text()


def test_the_command_writes_the_page_beside_the_ledger_and_says_where(folder, capsys):
    assert cli.main(["report", str(folder)]) == 0
    assert str(folder / "report.html") in capsys.readouterr().out
    assert (folder / "report.html").exists()


def test_the_markdown_has_the_best_trials_first_and_what_they_are_worth(folder, tmp_path):
    view = View(folder)
    path = tmp_path / "summary.md"
    assert cli.main(["report", str(folder), "--markdown", str(path)]) == 0
    lines = path.read_text().splitlines()
    [head] = [number for number, line in enumerate(lines) if line.startswith("| trial ")]
    rows = [line.split("|") for line in lines[head + 2 : head + 9]]
    assert [int(row[1]) for row in rows] == view.best_first["trial"].tolist()
    assert float(rows[0][2]) == pytest.approx(view.best_first["score"].iloc[0], rel=1e-3)
    assert "3 shared folds" in lines[-1]


@pytest.mark.browser
def test_figures_for_a_paper_are_files_of_their_own(folder, tmp_path):
    made = page.figures(View(folder))
    some = {name: made[name] for name in ("convergence", "timeline")}
    [first, second] = page.write_figures(some, tmp_path / "figures", "pdf")
    assert [path.name for path in (first, second)] == ["convergence.pdf", "timeline.pdf"]
    assert all(path.read_bytes().startswith(b"%PDF") for path in (first, second))


def test_without_what_draws_them_one_line_says_what_to_install(folder, tmp_path, monkeypatch):
    import plotly.graph_objects as go

    def refuse(*_: object, **__: object) -> bytes:
        raise ValueError("Kaleido requires Google Chrome\nmore\nlines")

    monkeypatch.setattr(go.Figure, "to_image", refuse)
    with pytest.raises(N3LOError, match="Chrome") as caught:
        page.write_figures(page.figures(View(folder)), tmp_path / "figures", "png")
    assert "\n" not in str(caught.value)


def test_several_runs_are_compared_by_their_best_and_what_they_cost(tmp_path, capsys):
    folders = [
        make_run(tmp_path / name, Made(name=name, num_trials=num, seed=num)) for name, num in NAMES
    ]
    views = [View(folder) for folder in folders]
    rows = compare.table(views)
    assert rows["run"].tolist() == ["short", "long"]
    for view, row in zip(views, rows.to_dict("records"), strict=True):
        assert row["score"] == view.best_first["score"].min()
        assert (row["trials"], row["failed"]) == (view.num_trials, 0)
    path = tmp_path / "compared.html"
    assert cli.main(["compare", *map(str, folders), "--to", str(path)]) == 0
    assert re.search(r"long +random +9 ", capsys.readouterr().out)
    assert path.exists()


NAMES = [("short", 4), ("long", 9)]


def test_the_course_of_a_run_is_the_best_of_all_that_had_ended(tmp_path):
    view = View(make_run(tmp_path / "run", Made(num_trials=9, failed=(3,))))
    course = compare.course(view)
    ends = view.tasks.groupby("trial")["ended"].max().sort_values().index
    scores = view.trials.set_index("trial")["score"][ends]
    assert course.best == pytest.approx(np.fmin.accumulate(scores.to_numpy()))
    figure = several.courses([view])
    assert list(figure.data[0].y) == pytest.approx(list(course.best))
    assert list(figure.data[1].x) == pytest.approx(list(course.node_hours))
    assert course.node_hours[-1] == pytest.approx(compare.table([view])["node_hours"].iloc[0])


def test_runs_of_the_same_name_are_told_apart_by_their_folders(tmp_path):
    folders = [make_run(tmp_path / part / "made", Made(num_trials=1)) for part in ("a", "b")]
    assert compare.labels([View(folder) for folder in folders]) == [str(each) for each in folders]


def test_runs_with_different_goals_are_not_compared(folder, tmp_path, capsys):
    other = make_run(tmp_path / "other", Made(num_trials=1))
    ledger = other / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"goal": "min"', '"goal": "max"'))
    assert cli.main(["compare", str(folder), str(other)]) == 2
    assert capsys.readouterr().err == (
        f"n3lo: '{other}' is scored by val_loss (max), and '{folder}' by val_loss (min); only runs "
        f"with the same can be compared\n"
    )


def test_a_folder_of_runs_is_no_run_but_names_those_in_it(folder, capsys):
    assert cli.main(["compare", str(folder.parent)]) == 2
    assert "name a run folder, such as made in it" in capsys.readouterr().err
