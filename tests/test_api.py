"""N3LO from Python: what the command does, in few lines and with the same words."""

from __future__ import annotations

import logging
import os
import tomllib
from pathlib import Path

import nbformat
import numpy as np
import pytest
from conftest import STUDY
from made_runs import Made, make_run
from nbclient import NotebookClient

from workflow import Ledger, N3LOError, SiteError, Study, process, runfolder, session
from workflow.study import load


@pytest.fixture
def folder(tmp_path, study_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


@pytest.fixture
def driven(monkeypatch) -> list[tuple]:
    """What a session is asked for, in place of one."""
    asked: list[tuple] = []

    def run(file, site, runs, rerun=(), begun=None):
        assert os.environ["OMP_NUM_THREADS"] == "1"
        os.environ[runfolder.MARK] = "run"
        asked.append((file, site, runs, rerun))
        if not (runs / file.study.name).exists():
            make_run(runs / file.study.name, Made(num_trials=2, num_folds=1))
        return 0

    monkeypatch.setattr(session, "run", run)
    return asked


# -- the study -----------------------------------------------------------------------------------


def test_values_replace_what_the_file_says(folder):
    study = Study("small.toml", {"training.epochs": 3})
    study.set({"model.args.width": np.int64(8)})  # as a search of the user's own gives it
    assert study.file.study.training.epochs == 3
    assert study.file.study.model.args == {"width": 8}
    assert load(Path("small.toml")).study.training.epochs == 2


def test_a_run_folder_keeps_the_study_with_its_values_and_the_file_as_it_is_without(folder):
    assert Study("small.toml").file.text == STUDY
    assert Study("small.toml", {"search.num_trials": 5}).file.text == STUDY  # the ledger has it
    changed = Study("small.toml", {"training.epochs": 3, "name": "longer"})
    assert changed.file.text.startswith('# small.toml with training.epochs = 3, name = "longer"\n')
    content = tomllib.loads(STUDY)
    expected = {**content, "name": "longer", "training": {**content["training"], "epochs": 3}}
    assert tomllib.loads(changed.file.text) == expected


def test_a_wrong_value_is_one_line_and_changes_nothing(folder):
    study = Study("small.toml")
    with pytest.raises(N3LOError, match=r"small.toml:16: training: epochs: -1 is not at least 1"):
        study.set({"training.epochs": -1})
    assert study.file.study.training.epochs == 2
    assert study.values == {}
    with pytest.raises(N3LOError, match=r"there is no study file 'smal.toml'; in '.' there are:"):
        Study("smal.toml")


def test_a_study_of_dicts_is_written_so_that_it_goes_on_later(folder):
    content = tomllib.loads(STUDY)
    study = Study.from_dict(content, "made.toml")
    assert study.file.study == Study("made.toml").file.study == Study("small.toml").file.study
    assert (folder / "study.schema.json").exists()
    again = Study.from_dict({**content, "seed": 6}, "made.toml")  # the cell ran again, changed
    assert again.file.study.seed == 6
    with pytest.raises(N3LOError, match=r"'small.toml' was not written by Study.from_dict"):
        Study.from_dict(content, "small.toml")
    assert (folder / "small.toml").read_text() == STUDY
    with pytest.raises(N3LOError, match=r"other.toml:\d+: seed: -1 is not at least 0"):
        Study.from_dict({**content, "seed": -1}, "other.toml")
    assert not (folder / "other.toml").exists()


# -- runs ----------------------------------------------------------------------------------------


def test_a_run_is_a_session_of_the_command_with_the_same_words(folder, driven):
    study = Study("small.toml")
    ledger = study.run(site="local", settings={"cores": 3}, trials=7, parallel=1)
    file, site, runs, rerun = driven[0]
    assert (file.study.search.num_trials, file.study.search.num_parallel) == (7, 1)
    assert (site.name, site.cores, runs, list(rerun)) == ("local", 3, Path("runs"), [])
    assert isinstance(ledger, Ledger)
    assert len(study.trials()) == len(ledger.trials()) == 2
    study.rerun([1], settings={"cores": "3"})
    assert driven[1][3] == [1]
    assert driven[1][0].study.search.num_trials == 3  # what a run is asked for is of that run


def test_a_run_leaves_the_process_as_it_was(folder, driven, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv(runfolder.MARK, raising=False)
    monkeypatch.setattr(logging, "raiseExceptions", True)
    before = dict(os.environ)
    Study("small.toml").run()
    assert dict(os.environ) == before
    assert logging.raiseExceptions


def test_a_second_run_at_the_same_time_is_refused_in_a_line(folder):
    with process.prepared(), pytest.raises(N3LOError, match="runs a study already"):
        Study("small.toml").run()


def test_the_stop_button_ends_a_run_in_a_line(folder, monkeypatch):
    def stop(*words):
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "run", stop)
    with pytest.raises(KeyboardInterrupt) as stopped:
        Study("small.toml").run()
    assert stopped.value._render_traceback_() == ["n3lo: interrupted; run() goes on from here"]
    with process.prepared():  # another can begin
        pass


def test_what_is_to_be_mended_is_the_line_of_the_command(folder, monkeypatch):
    study = Study("small.toml")
    with pytest.raises(SiteError, match="--site mars: no such site") as told:
        study.plan(site="mars")
    assert told.value._render_traceback_() == [f"n3lo: {told.value}"]
    with pytest.raises(N3LOError, match=r"there is no ledger in 'runs/small': run\(\) starts the"):
        study.status()

    def full(*words):
        raise OSError(28, "No space left on device", "ledger.jsonl")

    monkeypatch.setattr(session, "run", full)
    with pytest.raises(N3LOError, match=r"cannot write 'ledger.jsonl': No space left on device"):
        study.run()

    def missing(*words):
        raise ModuleNotFoundError("No module named 'horovodx'", name="horovodx")

    monkeypatch.setattr(session, "run", missing)
    with pytest.raises(ModuleNotFoundError):  # a fault of ours: with its traceback
        study.run()


# -- what came of it -----------------------------------------------------------------------------


def test_a_run_is_looked_at_as_the_command_does(folder, driven, capsys):
    study = Study("small.toml")
    study.run()
    study.status()
    assert "tasks: 2 done" in capsys.readouterr().out
    study.show(0)
    assert "t000" in capsys.readouterr().out
    study.compare("runs/small")
    assert capsys.readouterr().out
    study.export("tasks.csv")
    assert len((folder / "tasks.csv").read_text().splitlines()) == 3
    assert study.report(markdown="summary.md") == [
        Path("runs/small/report.html"), Path("summary.md"),
    ]  # fmt: skip
    assert "Best trials" in capsys.readouterr().out
    assert set(study.history(trial=1)["fold"]) == {0}


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda study: study.export("a.csv", table="nope"), "there is no table 'nope', only tasks"),
        (lambda study: study.export("a", tracker="wandb"), "there is no tracker 'wandb', only opt"),
        (lambda study: study.report(figures="f", format="gif"), "there is no format 'gif', only"),
    ],
    ids=["table", "tracker", "format"],
)
def test_a_word_that_is_not_known_is_told_with_those_that_are(folder, driven, what, said):
    study = Study("small.toml")
    study.run()
    with pytest.raises(N3LOError, match=said):
        what(study)


def test_a_trained_network_that_is_not_there_is_one_line(folder, driven):
    study = Study("small.toml")
    study.run()
    with pytest.raises(N3LOError, match="--trial 7 --fold 0: that task is not finished"):
        study.export_model("model.pt2", trial=7)


# -- for real ------------------------------------------------------------------------------------

CELLS = [
    'from workflow import N3LOError, Study\nstudy = Study("small.toml", {"data.folds": 1})',
    'study.run(settings={"cores": 1}, trials=1)',
    'study.run(settings={"cores": 1}, trials=2)\nprint(len(study.trials()), "trials")',
    'study.run(site="mars")',
]


@pytest.mark.campaign
def test_a_notebook_runs_a_study_twice_and_shows_errors_in_a_line(folder):
    cells = [nbformat.v4.new_code_cell(text) for text in CELLS]
    cells[-1].metadata["tags"] = ["raises-exception"]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(folder)}}).execute()
    widgets, printed = (
        [kind for each in notebook.cells[1].outputs for kind in each.get("data", {})],
        "".join(each.get("text", "") for each in notebook.cells[2].outputs),
    )
    assert "application/vnd.jupyter.widget-view+json" in widgets
    assert "2 trials\n" in printed
    [error] = notebook.cells[3].outputs
    assert error.traceback == [f"n3lo: {error.evalue}"]
    statuses = Ledger(folder / "runs" / "small").trials()["status"]
    assert statuses.tolist() == ["done", "done"]
