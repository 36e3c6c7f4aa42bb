"""The README's commands as they stand there, typed by somebody with a checkout, a model and data.

The shipped studies are made small, and numbers of trials and of showers; nothing else is changed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import uproot
from conftest import MODEL, ROOT, STUDY, write_events
from made_runs import Made, make_run
from test_docs import Block, blocks, named

from workflow import Ledger

pytestmark = pytest.mark.campaign

IN_LESS = {
    "--trials 40": "--trials 4",
    "--trials 10": "--trials 2",
    "--trial t003": "--trial t003 --trials 4",
    "--to made.h5": "--to made.h5 --events 20",
}
SMALL = {"epochs": 1, "num_trials": 2, "folds": 2, "gpus_per_rank": 0}
SHOWERS = 8
# This is part of it; .ci/run types it.
NOT_TYPED = re.compile(r"^make test .*\n", re.MULTILINE)


def made_small(study: str) -> str:
    """A study of one epoch, on this host's CPU."""
    for key, most in SMALL.items():
        study = re.sub(
            rf"^({key} *= )(\d+)", lambda found, most=most: f"{found[1]}{min(int(found[2]), most)}",
            study, flags=re.MULTILINE,
        )  # fmt: skip
    return study


def checkout(folder: Path) -> None:
    """The program, its data, and its studies, which are made small."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "install_horovod.sh"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    shutil.copy(ROOT / "run_workflow.py", folder)
    for name in ("apps", "sites", "workflow"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for path in (ROOT / "studies").rglob("*.toml"):
        small = folder / path.relative_to(ROOT)
        small.parent.mkdir(parents=True, exist_ok=True)
        small.write_text(made_small(path.read_text()))
    (folder / "studies" / "data").mkdir()
    for path in (ROOT / "studies" / "data").iterdir():
        small = folder / "studies" / "data" / path.name
        if path.name.startswith("clic_"):
            with h5py.File(path) as whole, h5py.File(small, "w") as file:
                for name in whole:
                    file[name] = whole[name][:SHOWERS]
        else:
            small.symlink_to(path)


def of_root_and_nnlo(folder: Path) -> None:
    """Two ROOT files with a model for them, and what NNLO ran."""
    (folder / "my_model.py").write_text(MODEL)
    rng = np.random.default_rng(1)
    for part in (1, 2):
        columns = {name: rng.normal(size=60) for name in ("pt", "eta", "phi")}
        with uproot.recreate(folder / f"part{part}.root") as file:
            file["Events"] = {**columns, "y": (columns["pt"] > 0).astype("int64")}
    for name in ("mnist_torch.py", "run_mnist.sh"):
        shutil.copy(ROOT / "studies" / "nnlo" / name, folder)


def of_model_and_events(folder: Path) -> None:
    (folder / "my_model.py").write_text(MODEL)
    write_events(folder / "events.h5")


def of_study(folder: Path) -> None:
    of_model_and_events(folder)
    (folder / "study.toml").write_text(STUDY)


def of_cluster(folder: Path) -> None:
    """A run on a 'cluster' that rsync reaches without a network."""
    if shutil.which("rsync") is None and os.getuid() != 0:  # for root, `make programs` installs it
        pytest.skip("rsync is not installed")
    make_run(folder / "cluster" / "n3lo" / "runs" / "jets", Made(name="jets"))
    (folder / "Downloads").mkdir()
    shell = folder / "rsh"
    shell.write_text(
        f'#!/bin/sh\ntest "$1" = cluster && shift && cd "{folder}/cluster" && exec "$@"\n'
    )
    shell.chmod(0o755)


def of_nothing(folder: Path) -> None:
    """All that it needs is in the checkout."""


def of_setup(folder: Path) -> None:
    """An environment in which `make` has nothing to do."""
    done = subprocess.run(["make", "--question", "setup"], cwd=folder, check=False)
    assert done.returncode == 0, f"type 'make setup' first: {sys.prefix} is not as it leaves it"


def finished(run: Path) -> Ledger:
    ledger = Ledger(run)
    assert len(ledger.tasks())
    assert set(ledger.tasks()["status"]) == {"done"}
    return ledger


def all_finished(*names: str) -> Callable[[Path], None]:
    def check(folder: Path) -> None:
        for name in names:
            finished(folder / "runs" / name)

    return check


def every_command_left_its_result(folder: Path) -> None:
    all_finished("jets", "tagger")(folder)
    assert len(Ledger(folder / "runs" / "tagger").trials()) == 4
    made = ["digits.toml", "tasks.parquet", "best.onnx", "given.h5", "runs/tagger/report.html"]
    assert all((folder / name).stat().st_size for name in made)


def showers_were_made(folder: Path) -> None:
    all_finished("calorimeter-flow-cpu", "calorimeter-flow")(folder)
    with h5py.File(folder / "made.h5") as file:
        assert file["ECAL"].shape[1:] == (25, 25, 25)


def the_run_was_copied_without_weights(folder: Path) -> None:
    assert (folder / "Downloads" / "jets" / "report.html").stat().st_size


# The first words of a block -> what there is before it, and what has to be there after it.
BLOCKS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "make run": (of_setup, all_finished("jets")),
    "source .venv/bin/activate": (of_root_and_nnlo, every_command_left_its_result),
    "python run_workflow.py studies/search/halving.toml": (
        of_nothing,
        all_finished("search-halving"),
    ),
    "python run_workflow.py studies/scaling.toml": (
        of_nothing,
        all_finished("scaling", "parallel-spectrum"),
    ),
    "python run_workflow.py studies/parallel/algorithms.toml": (
        of_nothing,
        all_finished("parallel-algorithms"),
    ),
    "python run_workflow.py studies/calorimeter_flow_cpu.toml": (of_nothing, showers_were_made),
    "n3lo init": (of_model_and_events, all_finished("tagger")),
    "from workflow import Study": (of_study, all_finished("small")),
    "rsync": (of_cluster, the_run_was_copied_without_weights),
}


def to_run() -> list[Block]:
    """test_docs.py has the TOML, and the Python that looks at runs that are there."""
    of_readme = blocks(ROOT / "README.md")
    return [each for each in of_readme if each.language == "sh" or "study.run(" in each.text]


def test_what_a_study_can_say_is_what_a_model_and_data_can_be_planned_with(tmp_path, n3lo):
    [block] = [each for each in blocks(ROOT / "README.md") if each.language == "toml"]
    (tmp_path / "mine.toml").write_text(block.text.replace("/data/run2/*.h5", "*.h5"))
    (tmp_path / "my_model.py").write_text(MODEL.replace("width, 2)", "width, 3)"))
    rng = np.random.default_rng(1)
    with h5py.File(tmp_path / "events.h5", "w") as file:
        file["tracks"] = rng.normal(size=(200, 3)).astype("float32")
        file["labels"] = np.eye(6)[rng.choice([2, 3, 4], 200)]
        file["w"] = rng.normal(1, 2, 200)
    planned = n3lo("plan", "mine.toml", "--set", "gpus=4", "--set", "cores=4")
    assert planned.returncode == 0, planned
    assert "40 trials x 5 folds = 200 tasks" in planned.stdout


def test_every_block_of_the_readme_is_of_a_kind_that_a_test_runs():
    shown = [block.language for block in blocks(ROOT / "README.md")]
    assert set(shown) == {"sh", "python", "toml", ""}
    assert shown.count("") == 2  # what the main job prints, and how it flows


@pytest.mark.parametrize("block", to_run(), ids=named)
def test_a_block_of_the_readme_runs_as_it_stands(block, tmp_path):
    prepare, check = next(what for start, what in BLOCKS.items() if block.text.startswith(start))
    checkout(tmp_path)
    prepare(tmp_path)
    text = NOT_TYPED.sub("", block.text)
    for number, fewer in IN_LESS.items():
        text = text.replace(number, fewer)
    shell = ["bash", "-euo", "pipefail", "-c"] if block.language == "sh" else [sys.executable, "-c"]
    output = tmp_path / "output.txt"
    with output.open("w") as out:
        done = subprocess.run(
            [*shell, text], cwd=tmp_path, stdout=out, stderr=out, timeout=400, check=False,
            env={
                **os.environ,
                "HOME": str(tmp_path),
                "N3LO": str(ROOT),
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                "RSYNC_RSH": str(tmp_path / "rsh"),
                "XDG_CONFIG_HOME": str(tmp_path / "config"),
            },
        )  # fmt: skip
    assert done.returncode == 0, output.read_text()
    assert "Traceback" not in output.read_text()
    check(tmp_path)
