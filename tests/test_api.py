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

from workflow import Ledger, N3LOError, SiteError, Study, commands, process, runfolder, session
from workflow.arguments import Pair, checked
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
        *(
            (path, f"small.toml: '{path}' is no path of a value; write one as in 'training.epochs'")
            for path in ("", "training..epochs", "training.epochs.", "model.args.my arg", "a = 0 #")
        ),
        ('training."epo\\qs"', "is no path of a value"),
        ("training\n.epochs", r"small.toml: 'training\\n.epochs' is no path of a value"),
        ("training.epoch", "unknown key 'epoch'; did you mean 'epochs'?"),
        ("training. epoch", "unknown key 'epoch'; did you mean 'epochs'?"),
    ],
)
def test_a_path_that_leads_into_a_value_is_one_line(folder, path, said):
    with pytest.raises(N3LOError, match=said):
        Study("small.toml", {path: 1})


def test_a_path_may_be_written_as_toml_may(folder):
    space = """ search . space.'training.optimizer.lr' . "high" """
    study = Study("small.toml", {"search . num_trials": 5, space: 0.5, "model.args.'a b'": 1})
    assert study.file.study.search.space["training.optimizer.lr"].high == 0.5
    assert study.file.study.model.args == {"width": 4, "a b": 1}
    assert list(study.values) == [
        "search.num_trials", 'search.space."training.optimizer.lr".high', 'model.args."a b"',
    ]  # fmt: skip


def test_the_last_to_be_set_holds(folder):
    study = Study("small.toml", {"training.epochs": 3, "training.optimizer.lr": 0.3})
    study.set({"training": {"epochs": 4, "optimizer": {"name": "adam", "lr": 0.4}}})
    assert study.file.study.training.epochs == 4
    study.set({"training.optimizer.lr": 0.5, "training.epochs": 5})
    assert study.file.study.training.optimizer == {"name": "adam", "lr": 0.5}
    assert study.file.study.training.epochs == 5


@pytest.mark.parametrize(
    "values", [{"training": {"metrics": None, "clip_norm": None}}, {"training.metrics": None}]
)
def test_none_leaves_out_what_the_file_says_also_in_the_copy_of_the_run(folder, values):
    study = Study("small.toml", {"training.metrics": ["mse"]})
    study.set(values)
    assert study.file.study.training.metrics == []
    with runfolder.opened(study.folder, study.file):
        pass
    kept = (study.folder / runfolder.FIRST).read_text()
    assert "training.metrics left out" in kept.splitlines()[0]
    assert load(study.folder / runfolder.FIRST).study == study.file.study
    study.set({'search.space."model.args.width"': None})
    assert list(study.file.study.search.space) == ["training.optimizer.lr"]
    study.set({"training.early_stopping.patience": None})  # which does not begin it
    assert study.file.study.training.early_stopping is None


def test_what_is_not_there_or_needed_cannot_be_left_out(folder):
    for path, said in (
        ("training.epohcs", "training.epohcs: there is no 'epohcs' to leave out"),
        ("data.files", "data: files is missing|data.files is missing"),
    ):
        with pytest.raises(N3LOError, match=said):
            Study("small.toml", {path: None})


def test_a_key_of_a_table_is_a_text(folder):
    for path in ("model.args", "training"):
        with pytest.raises(N3LOError, match="3 names no value of a study: write a text"):
            Study("small.toml", {path: {3: 1}})


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
        (lambda study: study.generate("g.h5", energy=[1]), r"\[1\] is not a pair of numbers"),
        (lambda study: study.generate("g.h5", energy="12"), "'12' is not a pair of numbers"),
        (lambda study: study.predict("p.h5", on=3), "Study.predict: on: 3 is not a text or a Path"),
        (lambda study: study.generate("g.h5", 0), "Study.generate: events: 0 is not at least 1"),
        (lambda study: study.ensemble(best=0), "Study.ensemble: best: 0 is not at least 1"),
        (lambda study: study.history("t099"), "t099: there is no such trial in .*: t000 to t001"),
        (lambda study: study.history(0, fold=9), "fold 9: there is no such fold in .*: 0 to 0"),
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


def test_a_pair_may_be_a_list_or_an_array():
    @checked
    def between(energy: Pair) -> tuple[float, float]:
        return energy

    assert between([1, 2.5]) == between(np.array([1, 2.5])) == (1.0, 2.5)


def test_one_file_alone_may_be_given(folder, driven, monkeypatch):
    study = Study("small.toml")
    study.run()
    asked = []
    monkeypatch.setattr(commands, "use", lambda view, what: asked.append(list(what.words)))
    for on in ("y.h5", ["y.h5"], Path("y.h5"), (Path("y.h5"),)):
        study.predict("p.h5", on=on)
    assert len(asked) == 4
    assert asked == asked[:1] * 4


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
