"""N3LO from Python: what the command does, in few lines and with the same words."""

from __future__ import annotations

import logging
import multiprocessing
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
    assert Study("small.toml").file.copy == STUDY
    assert Study("small.toml", {"search.num_trials": 5}).file.copy == STUDY  # the ledger has it
    changed = Study("small.toml", {"training.epochs": 3, "name": "longer"})
    assert changed.file.copy.startswith('# small.toml with training.epochs = 3, name = "longer"\n')
    content = tomllib.loads(STUDY)
    expected = {**content, "name": "longer", "training": {**content["training"], "epochs": 3}}
    assert tomllib.loads(changed.file.copy) == expected


def test_a_line_that_is_named_is_one_of_the_users_file_also_where_values_were_replaced(folder):
    study = Study("small.toml", {"name": "other", "data.files": ["none.h5"]})
    with pytest.raises(N3LOError) as told:
        study.file.data_files()
    line = 1 + STUDY.splitlines().index('files = ["events.h5"]')
    assert str(told.value).startswith(f"small.toml:{line}: data.files: there is no file 'none.h5'")


def test_a_part_of_a_path_that_has_dots_is_in_quotes(folder):
    study = Study("small.toml", {'search.space."training.optimizer.lr".high': 0.5})
    dimension = study.file.study.search.space["training.optimizer.lr"]
    assert (dimension.low, dimension.high) == (1e-3, 0.5)
    assert list(study.file.study.search.space) == ["training.optimizer.lr", "model.args.width"]


def test_a_table_replaces_a_section_key_by_key_and_another_table_whole(folder):
    study = Study(
        "small.toml", {"training": {"epochs": 3}, "training.optimizer": {"name": "adam", "lr": 0.2}}
    )
    training = study.file.study.training
    assert (training.epochs, training.batch_size, training.metrics) == (3, 16, ["accuracy"])
    assert training.optimizer == {"name": "adam", "lr": 0.2}
    for section in ("layout", "training"):
        with pytest.raises(N3LOError, match=rf"{section}: 3 is not a table"):
            study.set({section: 3})


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("training.epochs.x", "small.toml:16: training.epochs.x: 'epochs' is 2, which is replaced"),
        ("data.files.0", r"data.files.0: 'files' is \['events.h5'\], which is replaced whole"),
        ("", "unknown key ''"),
    ],
)
def test_a_path_that_leads_into_a_value_is_one_line(folder, path, said):
    with pytest.raises(N3LOError, match=said):
        Study("small.toml", {path: 1})


def test_arrays_of_numpy_are_lists(folder):
    (folder / "more.h5").touch()
    values = {"data.files": np.array(["events.h5", "more.h5"]), "training.metrics": ("mse",)}
    study = Study("small.toml", values)
    assert study.file.study.data.files == ["events.h5", "more.h5"]
    assert study.values["training.metrics"] == ["mse"]


def test_a_run_that_began_with_other_values_is_told_with_where_they_are_from(folder):
    with runfolder.opened(Path("runs/small"), Study("small.toml").file):
        pass
    with pytest.raises(N3LOError) as told:
        Study("small.toml", {"training": {"epochs": 3}}).plan()
    assert str(told.value) == (
        "runs/small belongs to another study: training.epochs is 2 there and 3 as it was set over "
        "small.toml; give this one another name"
    )


# -- wrong arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda study: Study(None), "Study: path: None is not a text or a Path; its arguments: "),
        (lambda study: Study("small.toml", ["a=3"]), r"Study: values: \['a=3'\] is not a dict"),
        (lambda study: study.set(None), "Study.set: values: None is not a dict"),
        (lambda study: study.set({3: 3}), "Study.set: values: 3 is not a text"),
        (lambda study: study.run(5), "Study.run: site: 5 is not a text; .*: site, settings, tri"),
        (lambda study: study.run(settings="cores=3"), "settings: 'cores=3' is not a dict"),
        (lambda study: study.check(settings={2: 2}), "Study.check: settings: 2 is not a text"),
        (lambda study: study.run(trials=True), "Study.run: trials: True is not a whole number"),
        (lambda study: study.show("first"), "trial: 'first' is not a trial, such as 3 or \"t003\""),
        (lambda study: study.show(-1), "Study.show: trial: -1 is not at least 0"),
        (lambda study: study.logs(0), "Study.logs: task: 0 is not a text"),
        (lambda study: study.logs("t000-f0", lines=-1), "lines: -1 is not at least 0"),
        (lambda study: study.ensemble("5"), "Study.ensemble: best: '5' is not a whole number"),
        (lambda study: study.generate("g.h5", energy=5), "energy: 5 is not a pair of numbers"),
        (lambda study: study.generate("g.h5", energy=[1]), "is not a pair of numbers"),
        (lambda study: study.report(to=3), "Study.report: to: 3 is not a text or a Path"),
        (lambda study: study.compare(5), "others: 5 is not a Study or a text or a Path"),
        (lambda study: study.rerun(None), "Study.rerun: trials: None is not a whole number"),
        (lambda study: Study.from_dict(None), "Study.from_dict: content: None is not a dict"),
        (lambda study: Ledger(4), "Ledger: folder: 4 is not a text or a Path"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_one_line_that_names_it(folder, driven, call, said):
    study = Study("small.toml")
    study.run()
    with pytest.raises(N3LOError, match=said) as told:
        call(study)
    assert "\n" not in str(told.value)


def test_what_python_itself_says_of_a_call_stays(folder):
    with pytest.raises(TypeError, match=r"Study.set\(\) got an unexpected keyword argument"):
        Study("small.toml").set(epochs=3)


def test_a_trial_is_given_by_its_number_or_its_name(folder, driven, capsys):
    study = Study("small.toml")
    study.run()
    said = []
    for trial in (1, np.int64(1), "t001"):
        study.show(trial)
        said.append(capsys.readouterr().out)
        assert set(study.history(trial=trial)["trial"]) == {1}
    assert said[0].startswith("t001")
    assert said == said[:1] * 3
    for trials in (1, "t001", [1], ["t001"], np.array([1])):
        study.rerun(trials)
        assert driven[-1][3] == [1]
    with pytest.raises(N3LOError, match="--trial 1 --fold 7: that task is not finished"):
        study.export_model("model.pt2", trial="t001", fold=7)


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


def test_a_child_that_was_forked_during_a_run_is_told_so(folder):
    with process.prepared():
        child = multiprocessing.get_context("fork").Process(target=_told, args=("told.txt",))
        child.start()
        child.join(30)
    assert "forked from one that runs a study" in Path("told.txt").read_text()


def _told(to: str) -> None:
    try:
        Study("small.toml").run()
    except N3LOError as error:
        Path(to).write_text(str(error))


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
    # by the run's folder, which is that of this study whatever was set
    shown = [each["data"]["text/plain"] for each in notebook.cells[2].outputs if "data" in each]
    assert any("more: n3lo report runs/small" in text for text in shown)
    [error] = notebook.cells[3].outputs
    assert error.traceback == [f"n3lo: {error.evalue}"]
    statuses = Ledger(folder / "runs" / "small").trials()["status"]
    assert statuses.tolist() == ["done", "done"]
