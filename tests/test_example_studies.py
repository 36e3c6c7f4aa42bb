"""The studies of studies/examples: one for each kind of data of the field."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import ROOT

from apps.check import check
from apps.contract import Fingerprint
from workflow.ledger import Ledger
from workflow.plan import Planner
from workflow.study import load

STUDIES = {path.stem: path for path in sorted((ROOT / "studies" / "examples").glob("*.toml"))}

IMAGENET_LIKE = runpy.run_path(str(ROOT / "benchmarks" / "imagenet_like.py"))

# The objective of the first trial, and what is reached without having learned: by chance, or by
# what the study's first lines say.
RUN = [
    pytest.param("digits", "max", 0.5),  # 0.1
    pytest.param("jets_sequence", "max", 0.35, marks=pytest.mark.long),  # 0.2
    pytest.param("jets_graph", "max", 0.35, marks=pytest.mark.long),  # 0.2
    pytest.param("jets_pyg", "max", 0.35, marks=pytest.mark.long),  # 0.2
    pytest.param("events", "min", 0.4, marks=pytest.mark.long),  # 0.50
    pytest.param("multilabel", "max", 0.65, marks=pytest.mark.long),  # 0.5
    pytest.param("energy_regression", "min", 2.0, marks=pytest.mark.long),  # 3.07
]


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """What imagenet.toml has the user make, but fewer."""
    return make_images(tmp_path_factory.mktemp("images") / "imagenet_like.h5")


def make_images(path: Path) -> Path:
    IMAGENET_LIKE["write"](path, events=20, size=64, classes=4)
    return path


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # in torch_geometric
@pytest.mark.parametrize("name", STUDIES)
def test_an_example_fits_its_model_and_data(name, request):
    file = load(STUDIES[name])
    files = [request.getfixturevalue("images")] if name == "imagenet" else file.data_files()
    planner = Planner(file, files, Fingerprint(data="d", model="m", code="c"))
    report = check(planner.base_task())
    assert report["warnings"] == []


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "goal", "bound"), RUN)
def test_an_example_runs_to_its_end_and_learns(name, goal, bound, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "run_workflow.py"), str(STUDIES[name]),
         "--runs", str(tmp_path), "--set", "cores=2", "--trials", "1"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [folder] = [each.parent for each in tmp_path.glob("*/ledger.jsonl")]
    [score] = Ledger(folder).trials()["score"]
    assert score > bound if goal == "max" else score < bound


def test_every_example_that_ships_its_data_is_run():
    assert {param.values[0] for param in RUN} == set(STUDIES) - {"imagenet"}


# -- images in the shape of ImageNet ---------------------------------------------------------------


def test_images_of_a_class_have_its_colours_and_each_class_is_there_as_often(images):
    """A plane wave of any phase correlates red, green and blue alike, up to the noise."""
    with h5py.File(images) as file:
        pictures, labels = file["images"][:], file["labels"][:]
    assert pictures.shape == (20, 64, 64, 3)
    assert np.bincount(labels).tolist() == [5] * 4
    correlations = np.array([np.corrcoef(each.reshape(-1, 3).T)[[0, 0, 1], [1, 2, 2]]
                             for each in pictures])  # fmt: skip
    of_class = np.array([correlations[labels == each].mean(axis=0) for each in range(4)])
    assert abs(correlations - of_class[labels]).max() < 0.1
    assert min(abs(of_class[i] - of_class[j]).max() for i in range(4) for j in range(i)) > 0.1


def test_the_same_seed_gives_the_same_images(images, tmp_path):
    again = make_images(tmp_path / "again.h5")
    with h5py.File(images) as first, h5py.File(again) as second:
        assert (first["images"][:] == second["images"][:]).all()


def test_a_size_that_makes_no_image_is_refused(tmp_path, monkeypatch, capsys):
    words = ["imagenet_like.py", "--size", "0", "--to", str(tmp_path / "none.h5")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        IMAGENET_LIKE["main"]()
    assert ended.value.code == 2
    assert "--size 0 is not at least 1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
