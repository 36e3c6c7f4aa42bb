"""The run folder: one study, one driver, no left-overs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import Made, make_run
from test_launch import is_alive, wait_for

from apps.contract import N3LOError
from sites import get
from workflow import runfolder, session
from workflow.ledger import Ledger
from workflow.study import load


def test_the_study_is_copied_into_its_folder_and_stays(study_path, edit, tmp_path):
    text = study_path.read_text()
    with runfolder.opened(tmp_path / "run", load(study_path)):
        pass
    edit("num_trials = 3", "num_trials = 9")
    with runfolder.opened(tmp_path / "run", load(study_path)):
        pass
    assert (tmp_path / "run" / "study.toml").read_text() == text


@pytest.mark.parametrize("budgets", [[3, 9], [3, 9, 3], [3, 9, 12]])
def test_who_looks_at_a_run_sees_the_study_as_the_last_start_had_it(
    study_path, edit, tmp_path, budgets
):
    for before, now in zip([3, *budgets], budgets, strict=False):
        edit(f"num_trials = {before}", f"num_trials = {now}")
        with runfolder.opened(tmp_path / "run", load(study_path)):
            pass
    assert runfolder.study_of(tmp_path / "run").text == study_path.read_text()


def test_the_folder_of_another_study_is_refused(study_path, edit, tmp_path):
    folder = tmp_path / "run"
    with runfolder.opened(folder, load(study_path)):
        pass
    path = edit("epochs = 2", "epochs = 20")
    with pytest.raises(N3LOError) as caught, runfolder.opened(folder, load(path)):
        pass
    assert str(caught.value) == (
        f"{folder} belongs to another study: training.epochs is 2 there and 20 in {path}; give "
        "this one another name"
    )


def test_what_looks_whether_a_study_can_run_refuses_the_folder_too(study_path, edit, tmp_path):
    """As `plan` and `run` do, before they look at anything else."""
    with runfolder.opened(tmp_path / "runs" / "small", load(study_path)):
        pass
    file = load(edit("epochs = 2", "epochs = 20"))
    with pytest.raises(N3LOError, match=r"belongs to another study: training.epochs is 2 there"):
        session.prepared(file, get("local", {}), tmp_path / "runs")
    with pytest.raises(N3LOError, match="Parsl cannot work in"):
        session.prepared(file, get("local", {}), tmp_path / "my runs")


def test_a_run_that_lies_beside_the_study_is_told_to_who_looks_elsewhere(
    study_path, tmp_path, monkeypatch
):
    make_run(tmp_path / "runs" / "small", Made(num_trials=1))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(N3LOError) as told:
        session.open_ledger(Path("../small.toml"), Path("runs"))
    assert str(told.value) == (
        "there is no ledger in runs/small, but one beside the study: add --runs ../runs"
    )
    assert session.open_ledger(Path("../small.toml"), Path("../runs"))[0].sessions


@pytest.mark.parametrize("name", ["my runs", "a;b", "$HOME"])
def test_a_folder_that_a_shell_would_misread_is_refused(study_path, tmp_path, name):
    folder = tmp_path / name
    with pytest.raises(N3LOError, match="choose another folder by --runs"):
        runfolder.opened(folder, load(study_path)).__enter__()
    assert not folder.exists()


def test_a_second_driver_is_refused_while_the_first_is_at_work(study_path, tmp_path):
    folder = tmp_path / "run"
    file = load(study_path)
    with runfolder.opened(folder, file):
        assert Ledger(folder).is_running
        with pytest.raises(N3LOError, match=f"another driver is at work in .*{os.getpid()}"):
            runfolder.opened(folder, file).__enter__()
    assert not Ledger(folder).is_running


def test_what_a_killed_driver_left_is_killed_at_the_next_start(study_path, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    mark = {**os.environ, runfolder.MARK: str(folder)}
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], env=mark)
    other = subprocess.Popen(["sleep", "100"])
    try:
        wait_for(lambda: runfolder._is_marked(runfolder.psutil.Process(left.pid), str(folder)))
        with runfolder.opened(folder, load(study_path)):
            assert not is_alive(left.pid)
            assert is_alive(other.pid)
    finally:
        left.kill()
        other.kill()
        left.wait()
        other.wait()
