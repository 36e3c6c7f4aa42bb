"""The report of a run: as one file, as figures for a paper, as Markdown; and several runs."""

from __future__ import annotations

import re
import socketserver
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from made_runs import Made, make_run

from apps.contract import N3LOError
from workflow import best, cli, compare, page
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


@pytest.mark.browser
def test_the_page_that_draws_figures_asks_no_network(folder, tmp_path, monkeypatch):
    """All that Chromium asks for comes by a proxy; beside the page's, questions of its own."""
    asked = []

    class Proxy(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            asked.append(self.rfile.readline().decode())

    some = {"convergence": page.figures(View(folder))["convergence"]}
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        monkeypatch.setenv("CHOREO_PROXY_SERVER", f"127.0.0.1:{proxy.server_address[1]}")
        page.write_figures(some, tmp_path / "figures", "svg")
        proxy.shutdown()
    assert [line for line in asked if "cdn" in line] == []


@pytest.mark.parametrize(
    ("browser", "said"),
    [("/nowhere", "No browser found at BROWSER_PATH='/nowhere'"), ("/bin/false", "The browser")],
)
def test_without_what_draws_them_one_line_says_what_to_install(
    folder, tmp_path, monkeypatch, capfd, browser, said
):
    monkeypatch.setenv("BROWSER_PATH", browser)
    assert cli.main(["report", str(folder), "--figures", str(tmp_path / "figures")]) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"n3lo: figures as pdf are drawn by a Chrome or Chromium: {said}")
    assert error.count("\n") == 1
    assert not (tmp_path / "figures").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("report --to adir", "'adir': that is a folder; name a file in it"),
        ("report --markdown adir", "'adir': that is a folder; name a file in it"),
        ("compare --to adir", "'adir': that is a folder; name a file in it"),
        ("report --figures afile", "'afile': that is a file; name a folder"),
        ("report --to afile/x.html", "'afile/x.html': '{}/afile' is a file; name another folder"),
        ("report --to /dev/null", "'/dev/null': that is a device; name a file"),
        ("report --to /proc/x.html", "'/proc/x.html': No such file or directory"),
    ],
)
def test_what_is_in_the_way_is_said_in_one_line(folder, tmp_path, monkeypatch, capsys, words, said):
    (tmp_path / "adir").mkdir()
    (tmp_path / "afile").touch()
    monkeypatch.chdir(tmp_path)
    name, *options = words.split()
    assert cli.main([name, str(folder), *options]) == 2
    assert capsys.readouterr().err == f"n3lo: cannot write {said.format(tmp_path)}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adir", "afile", "runs"]
    assert not list((tmp_path / "adir").iterdir())


def test_one_figure_that_is_in_the_way_stops_all(folder, tmp_path):
    (tmp_path / "figures" / "cost.png").mkdir(parents=True)
    with pytest.raises(N3LOError, match=r"cost\.png': that is a folder"):
        page.write_figures(page.figures(View(folder)), tmp_path / "figures", "png")


def test_a_run_folder_of_a_colleague_is_only_read(folder, tmp_path):
    """Mounted read-only, as root may write in any folder."""
    script = (
        f"mount --bind runs runs && mount -o remount,bind,ro runs && "
        f"exec {sys.executable} {ROOT / 'run_workflow.py'} report runs/made"
    )
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "Best trials" in done.stdout
    assert done.stdout.splitlines()[-1] == (
        "No page: 'runs/made' cannot be written to; --to FILE writes it elsewhere"
    )


def test_the_figures_are_made_once_for_page_and_files(folder, tmp_path, monkeypatch):
    made, drawn = [], []

    def figures(view: View) -> dict[str, object]:
        made.append(real(view))
        return made[-1]

    real = page.figures
    monkeypatch.setattr(page, "figures", figures)
    monkeypatch.setattr(page, "write_figures", lambda *given: drawn.append(given) or [])
    assert cli.main(["report", str(folder), "--figures", str(tmp_path), "--format", "png"]) == 0
    [once] = made
    assert drawn == [(once, tmp_path, "png")]


def test_a_format_without_figures_is_no_wish_for_figures(folder, capsys):
    assert cli.main(["report", str(folder), "--format", "png"]) == 2
    said = capsys.readouterr()
    assert said.err == "n3lo: --format png is that of figures: add --figures FOLDER\n"
    assert said.out == ""


def test_an_older_run_does_not_say_on_which_site_it_was(folder):
    facts = best.summary(View(folder))
    assert page.in_words(facts)["started"].endswith(" UTC, on local")
    assert page.in_words({**facts, "site": None})["started"].endswith(" UTC")


def test_a_cell_of_markdown_is_one_line_whatever_is_in_it():
    rows = page._markdown_table(pd.DataFrame({"value": ["a|b\nc\r\n d"]}))
    assert rows == ["| value |", "| --- |", "| a\\|b c d |"]


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


def test_runs_are_compared_by_their_study_files_too(tmp_path, monkeypatch, capsys):
    make_run(tmp_path / "there" / "made", Made(num_trials=2))
    (tmp_path / "there" / "made" / "study.toml").rename(tmp_path / "made.toml")
    (tmp_path / "there" / "made" / "study.toml").symlink_to(tmp_path / "made.toml")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compare", "made.toml", "--runs", "there"]) == 0
    assert re.search(r"made +random +2 ", capsys.readouterr().out)
    assert cli.main(["compare", "made.toml"]) == 2
    assert capsys.readouterr().err.startswith("n3lo: there is no ledger in runs/made: start the")


def test_a_comparison_without_a_page_does_not_wait_for_what_draws_it(folder):
    program = (
        "import sys; from workflow import cli; cli.main(sys.argv[1:]); "
        "print({'plotly', 'scipy.stats'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, "compare", str(folder)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "set()"


def test_a_folder_of_runs_is_no_run_but_names_those_in_it(folder, capsys):
    assert cli.main(["compare", str(folder.parent)]) == 2
    assert "name a run folder, such as made in it" in capsys.readouterr().err
