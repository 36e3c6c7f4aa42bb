"""The ledger for other programs, as those programs read it."""

from __future__ import annotations

import math
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import optuna
import pandas as pd
import pytest
from made_runs import BEGIN, EPOCH_S, Made, make_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from test_launch import make_result
from test_ledger import start_session
from training_helpers import classes_h5, launch, make_task, write_task

from apps.contract import Failure, N3LOError, TaskPaths, TrainTask, read_json_lines
from apps.tensorboard import begin_events, scalars, write_events
from workflow import cli, runfolder
from workflow.exports import export
from workflow.exports.mlflow_runs import write_mlflow
from workflow.ledger import Ledger
from workflow.search import Proposal
from workflow.study import StudyFile, load

# Connections of Optuna and MLflow that these tests open to read: Python 3.13 tells of them.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

LR, KIND, DEPTH = "training.optimizer.lr", "model.args.kind", "model.args.depth"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Six trials of two folds: trial 2 failed, and trial 3 was cut off with its driver."""
    made = Made(num_trials=6, num_folds=2, epochs=4, failed=(2,), running=(3,))
    folder = make_run(tmp_path_factory.mktemp("runs") / "made", made)
    with open(folder / "t003-f1" / "history.jsonl", "a") as history:
        history.write('{"epoch": 3, "val_l')  # it is being written
    return folder


@pytest.fixture
def write(folder, tmp_path) -> Callable[..., Path]:
    """Export that run; where to."""

    def write(name: str, **options: Any) -> Path:
        export(Ledger(folder), load(folder / "study.toml"), str(tmp_path / name), **options)
        return tmp_path / name

    return write


@pytest.fixture
def odd(edit, tmp_path) -> Odd:
    """A study with a choice of several types, and a dimension that only some of them have."""
    edit("args = { width = 4 }", 'args = { kind = "a", depth = 2 }')
    edit(
        '"model.args.width" = { type = "int", low = 2, high = 8 }',
        f'"{KIND}" = {{ type = "choice", values = [1, "a", true] }}\n'
        f'"{DEPTH}" = {{ type = "int", low = 1, high = 4, when = {{ "{KIND}" = ["a"] }} }}',
    )
    return Odd(load(tmp_path / "small.toml"), tmp_path)


class Odd:
    """A ledger to write to, and what an export makes of it."""

    def __init__(self, file: StudyFile, tmp_path: Path) -> None:
        self.file, self.tmp_path = file, tmp_path
        self.ledger = Ledger(tmp_path / "runs" / "small")
        self.ledger.folder.mkdir(parents=True)
        start_session(self.ledger)

    def trial(self, kind: Any = True, **facts: Any) -> int:
        number = len(self.ledger.trials_by_number)
        point = {LR: 0.1, KIND: kind, **({DEPTH: 3} if kind == "a" else {})}
        self.ledger.record_trial(Proposal(point, number=number, **facts), num_folds=2)
        return number

    def task(self, trial: int, fold: int) -> TrainTask:
        task = make_task([self.tmp_path], trial=trial, fold=fold)
        self.ledger.record_start(task, 1)
        return task

    def done(self, trial: int, *foms: float) -> None:
        for fold, fom in enumerate(foms):
            task = self.task(trial, fold)
            result = vars(make_result(task, fom=fom, metrics={"val_loss": fom}))
            self.ledger.record_done(task, result, cached=False, folder=task.id)

    def failed(self, trial: int) -> None:
        for fold in range(2):
            task = self.task(trial, fold)
            failure = Failure(reason="diverged", message="loss is nan\0")
            self.ledger.record_failed(task, failure, folder=task.id)

    def write(self, name: str, **options: Any) -> Path:
        export(self.ledger, self.file, str(self.tmp_path / name), **options)
        return self.tmp_path / name

    def in_optuna(self) -> optuna.Study:
        return study_in(self.write("o.db", tracker="optuna"), "small")


def study_in(path: Path, name: str = "made") -> optuna.Study:
    return optuna.load_study(study_name=name, storage=f"sqlite:///{path}")


# -- tables ----------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["tasks", "trials", "history", "attempts"])
def test_csv_and_parquet_hold_one_table(write, folder, table):
    expected = getattr(Ledger(folder), table)()
    pd.testing.assert_frame_equal(pd.read_parquet(write("a.parquet", table=table)), expected)
    read = pd.read_csv(write("a.csv", table=table))
    assert list(read.columns) == list(expected.columns)
    assert list(read["trial"]) == list(expected["trial"])


def test_a_table_is_the_tasks_unless_another_is_asked_for(write, folder):
    assert len(pd.read_parquet(write("a.parquet"))) == 6 * 2
    with closing(sqlite3.connect(write("a.db", table="trials"))) as database:
        assert database.execute("SELECT name FROM sqlite_master").fetchall() == [("trials",)]


def test_hdf5_holds_all_tables_column_by_column(write, folder):
    ledger = Ledger(folder)
    with h5py.File(write("a.h5")) as file:
        assert set(file) == {"tasks", "trials", "history", "attempts"}
        tasks = file["tasks"]
        assert list(tasks) == list(ledger.tasks().columns)
        assert tasks["status"].asstr()[4:8].tolist() == ["failed", "failed", "waiting", "waiting"]
        np.testing.assert_array_equal(tasks["fom"][:], ledger.tasks()["fom"])
        assert tasks["trial"].dtype == np.int64
        assert tasks["cached"].dtype == bool
        assert np.isnan(tasks["epochs"][4])  # a whole number that is missing
        begun = ledger.tasks()["begun"][0].timestamp()
        assert tasks["begun"][0] == pytest.approx(begun, abs=1e-6)
        assert tasks["begun"].attrs["unit"] == "s"
        assert "batch" in tasks["job"].attrs["meaning"]
        assert file["history/val_loss"].shape == (4 * 2 * 4 + 2 * 2 + 2 * 4,)


def test_sqlite_holds_all_tables_with_plain_values(write, folder):
    with closing(sqlite3.connect(write("a.sqlite"))) as database:
        mean, num = database.execute(
            "SELECT avg(fom), count(*) FROM tasks WHERE status = 'done' AND cached = 0"
        ).fetchone()
        [first] = database.execute("SELECT min(submitted) FROM attempts").fetchone()
        missing = database.execute("SELECT epochs, ended FROM tasks WHERE trial = 3").fetchall()
    assert (mean, num) == (pytest.approx(Ledger(folder).tasks()["fom"].mean()), 8)
    assert pd.Timestamp(first).timestamp() == BEGIN
    assert missing == [(None, None)] * 2


def test_a_choice_of_several_types_is_text_in_a_table(odd):
    for kind in (1, "a", True):
        odd.done(odd.trial(kind), 0.5, 0.7)
    odd.failed(odd.trial(1))
    wanted = ["1", "a", "True", "1"]
    assert list(pd.read_parquet(odd.write("a.parquet", table="trials"))[KIND]) == wanted
    with closing(sqlite3.connect(odd.write("a.db"))) as database:
        rows = database.execute(f'SELECT "{KIND}", "{DEPTH}", score FROM trials').fetchall()
    assert rows == [("1", None, 0.6), ("a", 3, 0.6), ("True", None, 0.6), ("1", None, None)]
    with h5py.File(odd.write("a.h5")) as file:
        assert file[f"trials/{KIND}"].asstr()[:].tolist() == wanted
        assert file["tasks/message"].asstr()[-1] == "loss is nan"


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.h5", "a.db"])
def test_a_study_without_any_trial_is_tables_without_rows(odd, name):
    odd.write(name)
    if name == "a.h5":
        with h5py.File(odd.tmp_path / name) as file:
            assert file["history/epoch"].shape == (0,)


# -- Optuna ----------------------------------------------------------------------------------


def test_optuna_reads_the_trials_with_our_numbers_and_scores(write, folder):
    study, trials = study_in(write("o.db", tracker="optuna")), Ledger(folder).trials()
    best = trials["score"].idxmin()
    assert study.best_trial.number == best
    assert study.best_value == trials["score"][best]
    assert study.best_params == Ledger(folder).trials_by_number[best].point
    assert study.best_trial.user_attrs["spread"] == pytest.approx(trials["spread"][best])
    assert study.metric_names == ["val_loss"]
    assert [trial.state.name for trial in study.trials] == [
        "COMPLETE", "COMPLETE", "FAIL", "RUNNING", "COMPLETE", "COMPLETE",
    ]  # fmt: skip
    assert study.trials[0].datetime_start.timestamp() == BEGIN
    rate = study.trials[0].distributions[LR]
    assert rate == optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True)


def test_optuna_has_the_mean_over_folds_of_each_epoch_that_all_have_reached(write, folder):
    study, history = study_in(write("o.db", tracker="optuna")), Ledger(folder).history()
    means = history.groupby(["trial", "epoch"])["val_loss"].mean()
    for number, epochs in ((0, 4), (3, 2)):
        values = study.trials[number].intermediate_values
        assert list(values) == list(range(1, epochs + 1))
        assert list(values.values()) == pytest.approx(list(means[number]))


def test_optuna_can_go_on_with_the_study(write):
    study = study_in(write("o.db", tracker="optuna"))
    study.sampler = optuna.samplers.TPESampler(seed=1)
    space = study.best_trial.distributions
    assert set(study.ask(fixed_distributions=space).params) == set(space)


def test_each_status_has_its_state_in_optuna(odd):
    odd.done(odd.trial("a", tags={"rung": 1}, settings={"training.epochs": 2}), 0.5, 0.7)
    odd.done(odd.trial(), math.nan, 0.5)
    odd.failed(odd.trial())
    odd.done(odd.trial(parent=0), 0.9)
    odd.ledger.record_dropped(3, [1], "hopeless")
    odd.trial()
    odd.ledger.record_trial(Proposal({LR: 99.0, KIND: True}, number=5), num_folds=2)
    odd.ledger.record_aside([5])
    complete, bad, failed, dropped, waiting, aside = odd.in_optuna().trials
    assert complete.user_attrs["folds"] == [0.5, 0.7]
    assert (complete.user_attrs["rung"], complete.user_attrs["training.epochs"]) == (1, 2)
    states = [each.state.name for each in (complete, bad, failed, dropped, waiting, aside)]
    assert states == ["COMPLETE", "FAIL", "FAIL", "PRUNED", "WAITING", "FAIL"]
    assert dropped.user_attrs["parent"] == 0
    assert (dropped.values, waiting.params, aside.params) == (None, {}, {})
    assert aside.user_attrs["status"] == "aside"


def test_choices_that_optuna_takes_for_one_are_text(odd):
    for kind in (1, "a", True):
        odd.done(odd.trial(kind), 0.5, 0.7)
    params = [trial.params for trial in odd.in_optuna().trials]
    assert [each[KIND] for each in params] == ["1", '"a"', "true"]
    assert [each.get(DEPTH) for each in params] == [None, 3, None]  # where it is inactive


def test_several_objectives_are_several_directions_in_optuna(odd):
    scoring = {
        "objective": {"metric": "val_loss", "goal": "min"},
        "spread_penalty": 0.0,
        "further": [{"metric": "num_parameters", "goal": "max"}],
    }
    odd.ledger.sessions[-1]["scoring"] = scoring
    odd.done(odd.trial(), 0.5, 0.7)
    study = odd.in_optuna()
    assert [each.name for each in study.directions] == ["MINIMIZE", "MAXIMIZE"]
    assert study.best_trials[0].values == [pytest.approx(0.6), 3.0]


def test_without_a_finished_trial_there_is_no_best_one(odd):
    odd.failed(odd.trial())
    study = odd.in_optuna()
    assert [trial.state.name for trial in study.trials] == ["FAIL"]
    with pytest.raises(ValueError, match="Record does not exist"):
        _ = study.best_trial


# -- TensorBoard -----------------------------------------------------------------------------


def events_in(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder)).Reload()


def test_tensorboard_reads_the_history_of_each_task(write, folder):
    out = write("tb", tracker="tensorboard")
    assert sorted(each.name for each in out.iterdir())[:3] == ["t000-f0", "t000-f1", "t001-f0"]
    events, history = events_in(out / "t001-f1"), Ledger(folder).history(1, 1)
    found = events.Scalars("val_loss")
    assert [each.step for each in found] == [1, 2, 3, 4]
    assert [each.value for each in found] == pytest.approx(list(history["val_loss"]))
    assert found[1].wall_time - found[0].wall_time == pytest.approx(EPOCH_S)
    assert events.Scalars("fom")[0].value == pytest.approx(Ledger(folder).tasks()["fom"][3])
    assert len(events_in(out / "t003-f1").Scalars("val_loss")) == 2  # without the torn line


def test_tensorboard_has_the_point_of_each_trial(write, folder):
    events = events_in(write("tb", tracker="tensorboard") / "t000-f1")
    [content] = events.PluginTagToContent("hparams").values()
    start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    assert start.group_name == "t000"
    point = Ledger(folder).trials_by_number[0].point
    assert start.hparams[LR].number_value == point[LR]
    assert start.hparams["model.args.activation"].string_value == point["model.args.activation"]


def test_a_training_writes_for_tensorboard_too(tmp_path):
    files = [classes_h5(tmp_path / "a.h5")]
    task = write_task(tmp_path / "t", make_task(files, training={"tensorboard": True}))
    run = launch(1, "-m", "apps.train", task)
    assert run.returncode == 0, run.stderr
    paths = TaskPaths(task.parent)
    rows = read_json_lines(paths.history)
    events = events_in(paths.tensorboard)
    assert set(events.Tags()["scalars"]) == rows[0].keys() - {"epoch"}
    losses = [each.value for each in events.Scalars("val_loss")]
    assert losses == pytest.approx([row["val_loss"] for row in rows])


def test_an_attempt_that_goes_on_takes_the_place_of_epochs_that_were_lost(tmp_path):
    for first, last, loss in ((1, 3, 1.0), (3, 4, 2.0)):
        file = begin_events(tmp_path, first)
        rows = [{"epoch": epoch, "loss": loss} for epoch in range(first, last + 1)]
        write_events(file, [scalars(row, BEGIN) for row in rows])
    found = events_in(tmp_path).Scalars("loss")
    assert [(each.step, each.value) for each in found] == [(1, 1), (2, 1), (3, 2), (4, 2)]


def test_the_option_may_be_set_later_for_all_trials(study_path, edit, tmp_path):
    with runfolder.opened(tmp_path / "run", load(study_path)):
        pass
    path = edit("epochs = 2", "epochs = 2\ntensorboard = true")
    with runfolder.opened(tmp_path / "run", load(path)):
        pass
    edit('"model.args.width" =', '"training.tensorboard" =')
    with pytest.raises(N3LOError, match="cannot be searched: it is the same for all trials"):
        load(path)


def test_tensorboard_that_is_missing_is_said_before_anything_starts(edit, monkeypatch, capsys):
    path = edit("epochs = 2", "epochs = 2\ntensorboard = true")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert cli.main([str(path)]) == 2
    assert "tensorboard is not installed in " in (said := capsys.readouterr().err)
    assert "pip install 'n3lo[tensorboard]'" in said
    assert said.count("\n") == 1


# -- MLflow ----------------------------------------------------------------------------------


def test_mlflow_has_a_run_for_each_task_and_doubles_none(folder, tmp_path, monkeypatch, capfd):
    """A new file, and then the same file as a database to which others add."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    ledger, file = Ledger(folder), load(folder / "study.toml")
    write_mlflow(ledger, file, str(tmp_path / "m.db"))
    address = f"sqlite:///{tmp_path / 'm.db'}"
    from mlflow import MlflowClient  # after it was told to be silent

    client = MlflowClient(address)
    experiment = client.get_experiment_by_name("made").experiment_id
    runs = {run.info.run_name: run for run in client.search_runs([experiment])}
    assert len(runs) == 6 * 2
    done, tasks = runs["t001-f1"], ledger.tasks()
    assert done.data.metrics["fom"] == tasks["fom"][3]
    assert done.data.metrics["result/val_accuracy"] == tasks["val_accuracy"][3]
    assert done.data.params[LR] == str(ledger.trials_by_number[1].point[LR])
    assert done.data.params["layout.ranks_per_worker"] == "1"
    assert done.data.tags["n3lo.key"] == tasks["key"][3]
    assert done.info.end_time == round(tasks["ended"][3].timestamp() * 1000)
    history = client.get_metric_history(done.info.run_id, "val_loss")
    assert [each.step for each in history] == [1, 2, 3, 4]
    assert [runs[f"t00{n}-f0"].info.status for n in (0, 2, 3)] == ["FINISHED", "FAILED", "RUNNING"]
    assert runs["t002-f0"].data.tags["n3lo.reason"] == "diverged"

    write_mlflow(ledger, file, address)
    again = {run.info.run_name: run for run in client.search_runs([experiment])}
    changed = [name for name in runs if again[name].info.run_id != runs[name].info.run_id]
    assert sorted(changed) == ["t003-f0", "t003-f1"]  # they are not done
    assert len(again) == len(runs)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(N3LOError, match=r"^--to http://127\.0\.0\.1:9: MLflow: API request to"):
        write_mlflow(ledger, file, "http://127.0.0.1:9")


# -- what is there already -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tracker"),
    [("a.csv", None), ("a.h5", None), ("a.db", None), ("o.db", "optuna"), ("tb", "tensorboard")],
)
def test_an_export_takes_the_place_of_an_earlier_one_and_leaves_nothing_else(write, name, tracker):
    for _ in range(2):
        path = write(name, tracker=tracker)
    assert [each.name for each in path.parent.iterdir()] == [name]


def test_a_database_or_folder_of_others_is_not_replaced(write, tmp_path):
    with closing(sqlite3.connect(tmp_path / "a.db")) as database:
        database.execute("CREATE TABLE dear (x)")
    (tmp_path / "a.csv").mkdir()
    for tracker in (None, "optuna"):
        with pytest.raises(N3LOError, match="that is not an earlier export"):
            write("a.db", tracker=tracker)
    with pytest.raises(N3LOError, match="that is a folder; name a file in it"):
        write("a.csv")


def test_a_folder_of_event_files_of_others_is_not_replaced(write, tmp_path):
    theirs = begin_events(tmp_path / "tb" / "run", first_epoch=0)
    with pytest.raises(N3LOError, match=rf"'run/{theirs.name}' in it is of no earlier export"):
        write("tb", tracker="tensorboard")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [theirs]
    ours = write("ours", tracker="tensorboard")
    shutil.copytree(tmp_path / "tb" / "run", ours / "mine")  # to look at both
    with pytest.raises(N3LOError, match=r"'mine/.*' in it is of no earlier export"):
        write("ours", tracker="tensorboard")
    assert (ours / "mine" / theirs.name).exists()


@pytest.mark.parametrize(
    ("name", "tracker", "said"),
    [
        ("adir.csv", None, "that is a folder; name a file in it"),
        ("adir.db", "optuna", "that is a folder; name a file in it"),
        ("afile/x.csv", None, "'{}/afile' is a file; name another folder"),
        ("afile/x.h5", None, "'{}/afile' is a file; name another folder"),
        ("afile/x.db", "mlflow", "'{}/afile' is a file; name another folder"),
        ("afile/tb", "tensorboard", "'{}/afile' is a file; name another folder"),
        ("afile", "tensorboard", "that is a file; name a folder"),
    ],
)
def test_what_is_in_the_way_of_an_export_is_said(write, tmp_path, name, tracker, said):
    for folder in ("adir.csv", "adir.db"):
        (tmp_path / folder).mkdir()
    (tmp_path / "afile").touch()
    with pytest.raises(N3LOError) as caught:
        write(name, tracker=tracker)
    assert str(caught.value) == f"cannot write '{tmp_path / name}': {said.format(tmp_path)}"
    assert {path.name for path in tmp_path.rglob("*")} == {"adir.csv", "adir.db", "afile"}


# -- the command -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--to", "x.txt"],
            "export to 'x.txt': the file must end in .csv, .parquet, .h5, .hdf5, .sqlite, "
            ".sqlite3, .db; for other programs there is --as optuna, mlflow or tensorboard",
        ),
        (
            ["--to", "x.csv", "--as", "optuna"],
            "export to 'x.csv': the file must end in .sqlite, .sqlite3, .db",
        ),
        (
            ["--to", "x.db", "--as", "optuna", "--table", "tasks"],
            "--table tasks: --as optuna takes the whole ledger; leave one out",
        ),
    ],
)
def test_what_cannot_be_exported_is_one_line(folder, capsys, monkeypatch, tmp_path, words, line):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", str(folder), *words]) == 2
    assert capsys.readouterr().err == f"n3lo: {line}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tracker", "library"),
    [("optuna", "optuna"), ("mlflow", "alembic"), ("tensorboard", "tensorboard")],
)
def test_a_library_that_is_missing_is_named_with_what_to_install(
    folder, capsys, monkeypatch, tmp_path, tracker, library
):
    monkeypatch.setitem(sys.modules, library, None)
    words = ["export", str(folder), "--to", str(tmp_path / "x.db"), "--as", tracker]
    assert cli.main(words) == 2
    assert f"pip install 'n3lo[{tracker}]'" in capsys.readouterr().err


def test_hdf5_needs_one_library_and_not_all_that_trains(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(N3LOError, match=r"HDF5 needs h5py: pip install h5py$"):
        write("a.h5")


def test_the_command_says_where_it_wrote(folder, capsys, tmp_path):
    path = tmp_path / "new" / "made.h5"
    assert cli.main(["export", str(folder), "--to", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert path.is_file()
