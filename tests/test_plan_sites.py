"""What `plan` shows for each site, to the letter: the batch script of a pilot, every launch line.

The texts are in tests/golden. After a change that is meant, and read in `git diff`:

    N3LO_GOLDEN=write pytest tests/test_plan_sites.py
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import sites
from apps import room
from apps.launch import PILOT_END
from sites.batch import mark_of
from workflow import cli

GOLDEN = Path(__file__).parent / "golden"
PILOT = {"account": "hep101", "nodes": "12", "walltime_min": "90"}
NODE = {"cores_per_node": "64", "gpus_per_node": "4"}
SETTINGS = {
    "local": {"cores": "96", "gpus": "12"},
    "slurm": {
        **(PILOT | NODE),
        "pilots": "2",
        "partition": "gpu",
        "qos": "long",
        "constraint": "a100",
        "memory_gb_per_node": "240",
        "setup": "module load gcc openmpi",
    },
    "frontier": PILOT,
    "perlmutter": PILOT,
    "daint_alps": PILOT,
    "piz_daint": PILOT,
    "summit": {**PILOT, "queue": "batch"},
    "pbs": {**(PILOT | NODE), "queue": "main", "select": "mem=240gb"},
    "polaris": {**PILOT, "queue": "prod"},
    "titan": {**PILOT, "queue": "batch"},
    "theta": PILOT,
}
CHECKED = {  # what the look at model and data, which takes seconds, would find
    "warnings": [],
    "events": 64,
    "train_events": [51],
    "val_events": [13],
    "num_parameters": 26,
    "steps_per_epoch": 4,
    "measured": ["val_loss", "val_accuracy"],
}
OF_ALLOCATIONS = {"inside"}  # what it does there is in tests/test_inside.py


@pytest.fixture
def several_sizes(edit) -> Path:
    """Tasks of 1, 2 and 12 ranks, of 7 cores and a GPU each."""
    edit('strategy = "local"', 'strategy = "allreduce"')
    edit('method = "random"', 'method = "grid"')
    edit("folds = 2", "folds = 1")
    edit("walltime_min = 2", "walltime_min = 2\ncores_per_rank = 7\ngpus_per_rank = 1")
    return edit(
        '"training.optimizer.lr" = { type = "real", low = 1e-3, high = 1.0, log = true }\n'
        '"model.args.width" = { type = "int", low = 2, high = 8 }\n',
        '"layout.num_workers" = { type = "ordinal", values = [1, 2, 12] }\n',
    )


@pytest.fixture
def planned(tmp_path, monkeypatch, capsys) -> Callable[[str, Path], str]:
    """What `plan` prints on a host that has none of a machine's programs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("workflow.preflight.check", lambda task, folder: CHECKED)

    def plan(name: str, study: Path) -> str:
        words = [f"{key}={value}" for key, value in SETTINGS[name].items()]
        options = [word for each in words for word in ("--set", each)]
        status = cli.main(["plan", str(study), "--site", name, *options])
        out, err = capsys.readouterr()
        assert status == 0, err
        for found, said in {
            sys.executable: "<python>",
            str(Path(sys.executable).parent): "<bin>",
            mark_of(tmp_path / "runs" / "small"): "n3lo-<mark>",
            str(tmp_path): "<folder>",
        }.items():
            out = out.replace(found, said)
        return out

    return plan


@pytest.mark.parametrize("name", SETTINGS)
def test_a_plan_shows_what_is_submitted_and_started(name, several_sizes, planned):
    if name == "theta":  # no GPUs
        several_sizes.write_text(several_sizes.read_text().replace("gpus_per_rank = 1\n", ""))
    text = planned(name, several_sizes)
    golden = GOLDEN / f"plan_{name}.txt"
    if os.environ.get("N3LO_GOLDEN") == "write":
        golden.write_text(text)
    lines = [each.splitlines() for each in (golden.read_text(), text)]
    diff = difflib.unified_diff(*lines, golden.name, "what plan shows", lineterm="")
    assert lines[0] == lines[1], "\n".join(diff)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "local"])
def test_a_pilot_tells_its_workers_what_they_look_for(name):
    text = (GOLDEN / f"plan_{name}.txt").read_text()
    for variable in (PILOT_END, room.JOB, room.POOL, room.NODES, room.NODE):
        assert f"  export {variable}=" in text


def test_every_site_has_its_text():
    assert {*SETTINGS} == {*sites.SITES} - OF_ALLOCATIONS
    assert {path.name for path in GOLDEN.iterdir()} == {f"plan_{name}.txt" for name in SETTINGS}
