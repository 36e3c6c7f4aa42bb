"""The program as a user meets it: whole runs of a small study, and the line for each mistake."""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys

import h5py
import numpy as np
import pandas as pd
import pytest
from conftest import ROOT

from sites import SITES
from workflow import cli
from workflow.ledger import Ledger


def executed(result: subprocess.CompletedProcess) -> list[str]:
    """The tasks that were trained, by the lines of the run."""
    return re.findall(r"^\d\d:\d\d:\d\d (t\d+-f\d+) done: .* ranks, ", result.stdout, re.M)


@pytest.fixture
def error_of(n3lo, tmp_path):
    """The one line that a wrong command gets; nothing is left behind."""

    def run(*words, leaves: tuple[str, ...] = ()) -> str:
        before = {path.name for path in tmp_path.iterdir()}
        result = n3lo(*words)
        assert result.returncode == 2, result
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1, result.stderr
        assert {path.name for path in tmp_path.iterdir()} - before == set(leaves)
        return result.stderr.strip()

    return run


# -- mistakes --------------------------------------------------------------------------------


def test_a_mistake_in_the_study(edit, error_of):
    path = edit("epochs = 2", "epoch = 2")
    assert error_of(path) == (
        f"n3lo: {path}:16: training: unknown key 'epoch'; did you mean 'epochs'?"
    )


def test_an_unknown_site(study_path, error_of):
    assert error_of(study_path, "--site", "mars") == (
        "n3lo: --site mars: no such site; there are: daint_alps, frontier, inside, local, "
        "pbs, perlmutter, piz_daint, polaris, slurm, summit, theta, titan"
    )


def test_an_unknown_option(study_path, error_of):
    assert error_of(study_path, "--sight", "local") == (
        "n3lo: unrecognized arguments: --sight local; see 'run_workflow.py --help'"
    )


def test_a_budget_that_is_not_valid(study_path, error_of):
    assert error_of(study_path, "--trials", "0") == (
        f"n3lo: {study_path}:27: search: num_trials: 0 is not at least 1"
    )


def test_an_unknown_search_method(edit, error_of):
    path = edit('method = "random"', 'method = "bayesain"')
    assert error_of(path) == (
        f"n3lo: {path}:25: search.method: unknown method 'bayesain'; there are: bayesian, multi, "
        "skopt, optuna, evolution, population, halving, constructive, grid, random, sobol; did "
        "you mean 'bayesian'?"
    )


def test_more_ranks_than_slots(edit, error_of):
    path = edit('strategy = "local"', 'strategy = "allreduce"\nbackend = "ddp"')
    edit("walltime_min = 2", "walltime_min = 2\nnum_workers = 3")
    assert error_of(path, "--set", "cores=2") == (
        "n3lo: a task needs 3 cores (3 ranks x 1 cores_per_rank) and this host has 2: ask for "
        "fewer ranks under [layout], or add --set cores=3 to share cores"
    )


def test_a_model_that_does_not_import(study_path, error_of):
    model = study_path.with_name("my_model.py")
    model.write_text(model.read_text().replace("import torch", "import torch\nimprot numpy"))
    assert error_of(study_path) == (
        "n3lo: model.source 'my_model.py:Tagger': SyntaxError: invalid syntax (my_model.py line 2)"
    )


def test_a_model_whose_name_is_not_in_its_file(edit, error_of):
    path = edit("my_model.py:Tagger", "my_model.py:Tager")
    assert error_of(path) == (
        "n3lo: model.source 'my_model.py:Tager': there is no 'Tager', only Tagger"
    )


def test_a_missing_data_file(study_path, error_of):
    study_path.with_name("events.h5").unlink()
    assert error_of(study_path) == (
        f"n3lo: {study_path}:9: data.files: there is no file 'events.h5' "
        f"({study_path.parent / 'events.h5'})"
    )


def test_a_field_that_is_not_in_the_file(edit, error_of):
    path = edit('inputs = "x"', 'inputs = "xx"')
    data = path.with_name("events.h5")
    assert error_of(path) == f"n3lo: {data}: there is no 'xx', only x, y; did you mean 'x'?"


def test_a_truncated_file(study_path, error_of):
    data = study_path.with_name("events.h5")
    data.write_bytes(data.read_bytes()[:-500])
    assert error_of(study_path) == (
        f"n3lo: data.files: '{data}' is not a readable HDF5 file (truncated?)"
    )


def test_more_folds_than_events(edit, error_of):
    path = edit("folds = 2", "folds = 65")
    assert error_of(path) == "n3lo: data.folds: 65 folds are more than 64 events"


def test_a_disk_that_is_read_only(study_path, error_of):
    assert error_of(study_path, "--runs", "/sys/n3lo") == (
        "n3lo: cannot read or write '/sys/n3lo': Operation not permitted; nothing that finished is "
        "lost, and the same command goes on"
    )


@pytest.mark.parametrize("size_kb", [4, 100, 240])
def test_a_disk_that_is_full(study_path, tmp_path, size_kb):
    """A real one, in a mount namespace: full from the start, or in the middle of the run.

    Then either the driver ends with one line, or the tasks that could not write have failed.
    """
    program = f"exec {sys.executable} {ROOT / 'run_workflow.py'} {study_path} --runs full"
    script = f"mkdir full && mount -t tmpfs -o size={size_kb}k none full && {program}"
    result = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 2 or (size_kb > 4 and result.returncode == 1), result
    assert result.stderr == "" or re.fullmatch(
        "n3lo: cannot write 'full.*': No space left on device; nothing that finished is lost, and "
        "the same command goes on\n",
        result.stderr,
    )
    assert not left_over(tmp_path)


def test_a_status_before_any_start(study_path, error_of):
    assert error_of("status", study_path) == (
        "n3lo: there is no ledger in runs/small: start the study with 'python run_workflow.py "
        "small.toml', or name its folder by --runs"
    )


def test_a_project_that_is_not_installed(study_path, monkeypatch, capsys):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert cli.main([str(study_path)]) == 2
    assert capsys.readouterr().err == (
        f"n3lo: n3lo is not installed in {sys.prefix}: type 'make setup', or "
        "'pip install -e \".[run]\"' in an environment of yours\n"
    )


def test_a_missing_horovod(edit, monkeypatch, capsys):
    path = edit('strategy = "local"', 'strategy = "allreduce"')
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "horovod" else find(name)
    )
    assert cli.main([str(path)]) == 2
    assert capsys.readouterr().err == (
        "n3lo: Horovod is missing: type 'make setup', or set training.backend = \"ddp\" in the "
        "study\n"
    )


def test_a_fault_of_ours_is_no_traceback(study_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_study", lambda options: 1 / 0)
    assert cli.main(["plan", str(study_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("n3lo: a fault of ours: ZeroDivisionError: division by zero; please")
    assert said.count("\n") == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_disk_that_cannot_be_written_is_named(study_path, monkeypatch, capsys, number):
    def fail(options):
        raise OSError(number, "no", "ledger.jsonl")

    monkeypatch.setattr(cli, "_study", fail)
    assert cli.main(["plan", str(study_path)]) == 2
    assert capsys.readouterr().err.startswith("n3lo: cannot write 'ledger.jsonl': no; nothing")


def test_a_ledger_that_cannot_be_read_is_named(study_path, error_of, tmp_path):
    (tmp_path / "afile").touch()
    assert error_of("status", study_path, "--runs", "afile") == (
        "n3lo: cannot read 'afile/small/ledger.jsonl': Not a directory"
    )


# -- runs ------------------------------------------------------------------------------------


@pytest.mark.campaign
def test_a_small_study_from_first_start_to_export(study_path, n3lo, tmp_path):
    first = n3lo(study_path)
    assert first.returncode == 0, first.stderr
    assert first.stderr == ""
    assert len(executed(first)) == 3 * 2
    assert "best trial t" in first.stdout
    tasks = Ledger(tmp_path / "runs" / "small").tasks()
    assert len(tasks) == 6
    assert set(tasks["status"]) == {"done"}
    assert (tasks["num_ranks"] == 1).all()
    assert tasks["fom"].equals(tasks["val_loss"].rename("fom"))

    # a second start executes nothing; a deleted result is trained again, and gives the same
    assert executed(n3lo(study_path)) == []
    (tmp_path / "runs" / "small" / "t001-f1" / "result.json").unlink()
    assert executed(n3lo(study_path)) == ["t001-f1"]
    again = Ledger(tmp_path / "runs" / "small").tasks()
    assert list(again["fom"]) == list(tasks["fom"])

    # a larger budget continues; a chosen trial is run again
    assert set(executed(n3lo(study_path, "--trials", 4))) == {"t003-f0", "t003-f1"}
    rerun = n3lo("rerun", study_path, "--trial", "t002", "--trials", 4)
    assert sorted(executed(rerun)) == ["t002-f0", "t002-f1"]

    # what lies beyond the budget cannot be rerun: its results would be forgotten for nothing
    beyond = n3lo("rerun", study_path, "--trial", "3")
    assert beyond.returncode == 2
    assert beyond.stderr == "n3lo: --trial 3: no such trial in the ledger and budget: 0 to 2\n"
    assert Ledger(tmp_path / "runs" / "small").trials_by_number[3].tasks[0].status == "done"

    # another study with the same tasks takes them from the cache
    other = study_path.with_name("other.toml")
    other.write_text(study_path.read_text().replace('name = "small"', 'name = "other"'))
    shared = n3lo(other)
    assert executed(shared) == []
    assert shared.stdout.count("from the cache") == 6

    # looking at it
    status = n3lo("status", study_path)
    assert "not running; 4 trials; tasks: 8 done" in status.stdout
    assert json.loads(n3lo("status", study_path, "--json").stdout)["tasks"] == {"done": 8}
    assert n3lo("show", "t001", study_path).stdout.startswith("t001: done; val_loss ")
    assert "apps.train" in n3lo("logs", "t001-f0", study_path).stdout
    report = n3lo("report", study_path)
    assert "Best trials" in report.stdout
    assert "core-hours" in report.stdout
    for name, read in (("tasks.csv", pd.read_csv), ("tasks.parquet", pd.read_parquet)):
        assert n3lo("export", study_path, "--to", name).returncode == 0
        assert len(read(tmp_path / name)) == 8
    refused = n3lo("export", study_path, "--to", "tasks.xls")
    assert refused.stderr.startswith("n3lo: export to 'tasks.xls': the file must end in .csv, ")

    # an edited model: all runs again, and says why
    model = study_path.with_name("my_model.py")
    model.write_text(model.read_text().replace("ReLU", "SELU"))
    edited = n3lo(study_path, "--trials", 1)
    assert len(executed(edited)) == 2
    assert "changed since the last start: the model's source" in edited.stdout


@pytest.mark.campaign
def test_what_goes_wrong_in_a_training_is_a_reason_in_the_ledger(study_path, n3lo, tmp_path):
    study_path.with_name("my_model.py").write_text(
        "import os, signal, time, torch\n\n\n"
        "class Tagger(torch.nn.Module):\n"
        "    def __init__(self, mode):\n"
        "        super().__init__()\n"
        "        self.mode, self.layer = mode, torch.nn.Linear(3, 2)\n\n"
        "    def forward(self, x):\n"
        "        if self.training and self.mode == 'raise':\n"
        "            raise ValueError('no such jet')\n"
        "        if self.training and self.mode == 'memory':\n"
        "            torch.empty(10**15)\n"
        "        if self.training and self.mode == 'hang':\n"
        "            time.sleep(1000)\n"
        "        if self.training and self.mode == 'killed':\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return self.layer(x) * (float('nan') if self.mode == 'nan' else 1)\n"
    )
    text = study_path.read_text().replace("args = { width = 4 }", 'args = { mode = "fine" }')
    text = text.replace("walltime_min = 2", "walltime_min = 0.15").replace("folds = 2", "folds = 1")
    text = text[: text.index("[search]")] + (
        '[search]\nmethod = "grid"\nobjective = { goal = "min" }\nnum_trials = 6\n'
        "num_parallel = 6\n[search.space]\n"
        '"model.args.mode" = { type = "choice", values = '
        '["fine", "raise", "memory", "hang", "killed", "nan"] }\n'
    )
    study_path.write_text(text)
    result = n3lo(study_path)
    assert result.returncode == 1
    tasks = Ledger(tmp_path / "runs" / "small").tasks().set_index("model.args.mode")
    assert dict(tasks["reason"]) == {
        "fine": "",
        "raise": "exception",
        "memory": "oom",
        "hang": "time_limit",
        "killed": "signal 9",
        "nan": "diverged",
    }
    assert tasks.loc["raise", "message"] == "ValueError: no such jet (my_model.py line 11)"
    assert tasks.loc["nan", "message"] == "training loss became nan in epoch 1"
    assert tasks.loc["killed", "attempt"] == 3
    assert "Failures" in n3lo("report", study_path).stdout
    assert not left_over(tmp_path)


@pytest.mark.campaign
def test_values_that_are_not_finite_are_counted_in_a_warning(study_path, n3lo):
    with h5py.File(study_path.with_name("events.h5"), "r+") as file:
        file["x"][3:5, 1] = np.nan
    result = n3lo(study_path, "--trials", 1)
    assert (
        "warning: x holds 2 values that are not finite (nan or inf)" in result.stdout.splitlines()
    )
    assert result.returncode == 1  # they spoil the training, which is a reason in the ledger
    assert "diverged" in result.stdout


def test_a_plan_runs_nothing_and_shows_the_exact_launch_lines(study_path, n3lo, tmp_path):
    result = n3lo("plan", study_path)
    assert result.returncode == 0
    assert not (tmp_path / "runs").exists()
    assert (
        "3 trials x 2 folds = 6 tasks of 1 worker x 1 rank = 1 rank as the study has it;"
        in result.stdout
    )
    assert (
        "  t000-f0: mpirun --host localhost:1 -n 1 --bind-to none --mca mpi_yield_when_idle 1 "
        f"--mca pml ob1 --mca btl self,sm --mca osc '^ucx' {sys.executable} -P -m apps.train "
        f"{tmp_path}/runs/small/t000-f0/task.json"
    ) in result.stdout.splitlines()


def test_the_help_names_every_command(n3lo):
    said = n3lo("--help").stdout
    for name in cli.COMMANDS:
        assert name in said


# -- sites -----------------------------------------------------------------------------------


def row_of(result: subprocess.CompletedProcess, first: str) -> list[str]:
    """The cells of the line of a table."""
    [line] = [line for line in result.stdout.splitlines() if line.split(" ")[0] == first]
    return re.split(r" {2,}", line.strip())


def test_the_sites_are_listed_with_a_mark_where_their_programs_are_found(n3lo, tmp_path):
    (tmp_path / "sites.toml").write_text('[mine]\nlike = "slurm"\nsummary = "The group\'s."\n')
    result = n3lo("sites", "list", env={"PATH": "/nowhere"})
    assert result.returncode == 0, result
    for name in (*SITES, "mine"):
        assert row_of(result, name)[0] == name
    assert row_of(result, "local")[1] == "found"  # beside the Python of this program
    assert row_of(result, "slurm") == [
        "slurm", "-", "Any Slurm cluster: pilots by sbatch, tasks as steps by srun.",
    ]  # fmt: skip
    assert row_of(result, "mine") == ["mine", "-", "The group's."]


def test_a_site_is_shown_with_the_values_of_its_settings_and_whence_they_are(n3lo, tmp_path):
    (tmp_path / "sites.toml").write_text('[perlmutter]\naccount = "m1234"\nqos = ""\n')
    user = tmp_path / "config" / "n3lo" / "sites.toml"
    user.parent.mkdir(parents=True)
    user.write_text('[perlmutter]\naccount = "m5678"\npilots = 3\n')
    words = ("perlmutter", "--set", "setup=module load gcc")
    result = n3lo("sites", "show", *words, env={"XDG_CONFIG_HOME": "config"})
    assert result.returncode == 0, result
    assert "Source: https://docs.nersc.gov/systems/perlmutter" in result.stdout
    for name, cells in {
        "account": ["text", "required", "m1234", "sites.toml:2"],
        "qos": ["text", "regular", "none", "sites.toml:3"],
        "pilots": ["whole number", "1", "3", "config/n3lo/sites.toml:3"],
        "setup": ["text", '""', "module load gcc", "--set"],
        "nodes": ["whole number", "required", "missing", "-"],
        "cores_per_node": ["whole number", "64", "64", "default"],
    }.items():
        assert row_of(result, name)[1:5] == cells
    assert result.stdout.splitlines()[-1] == (
        "For example: python run_workflow.py my_study.toml --site perlmutter --set nodes=N "
        "--set walltime_min=N --set 'setup=module load gcc'"
    )


def test_a_study_is_planned_with_the_settings_beside_it(study_path, n3lo):
    study_path.with_name("sites.toml").write_text(
        '[mine]\nlike = "slurm"\nnodes = 2\nwalltime_min = 60\ncores_per_node = 8\nmpi = "pmi2"\n'
    )
    result = n3lo("plan", study_path, "--site", "mine")
    assert result.returncode == 0, result
    assert "small on mine: " in result.stdout
    assert "srun --exact --mpi=pmi2 " in result.stdout


def test_the_settings_beside_a_study_are_shown_from_elsewhere(study_path, n3lo, tmp_path):
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "sites.toml").write_text("[local]\ncores = 3\n")
    assert row_of(n3lo("sites", "show", "local"), "cores")[3] == "none"
    shown = n3lo("sites", "show", "local", "--study", "else/any.toml")
    assert row_of(shown, "cores")[3:5] == ["3", "else/sites.toml:2"]


def test_a_site_without_its_settings_is_not_checked(error_of, tmp_path):
    assert error_of("sites", "check", "slurm", "--set", "nodes=1", "--set", "walltime_min=5") == (
        "n3lo: site 'slurm' needs cores_per_node: add --set cores_per_node=..., or "
        f"cores_per_node = ... below [slurm] in {tmp_path}/config/n3lo/sites.toml"
    )


def test_a_study_may_be_called_sites(study_path, n3lo):
    assert n3lo("plan", study_path.rename(study_path.with_name("sites"))).returncode == 0
    shown = n3lo("status", "sites")
    assert shown.stderr.startswith("n3lo: there is no ledger in runs/small")
    nothing = n3lo("sites")
    assert nothing.returncode == 2
    assert nothing.stderr == (
        "n3lo: the following arguments are required: COMMAND; see 'run_workflow.py sites --help'\n"
    )


def left_over(folder) -> list[str]:
    """Command lines of live processes that name a folder."""
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return [line for line in listing.stdout.splitlines() if str(folder) in line]
