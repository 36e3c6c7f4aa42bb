"""Models by the import path of a library, and layers that take their shapes from the data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from training_helpers import make_task, write_h5

from apps import frameworks
from apps.check import check
from apps.contract import N3LOError, TrainTask


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Six images of 3 x 32 x 32 and of 1 x 32 x 32, of three classes."""
    rng = np.random.default_rng(0)
    colour, grey = (rng.normal(size=(6, n, 32, 32)).astype(np.float32) for n in (3, 1))
    path = tmp_path_factory.mktemp("images") / "images.h5"
    return write_h5(path, colour=colour, grey=grey, y=np.arange(6, dtype=np.int32) % 3)


def task(images: Path, source: str, inputs: str = "colour", **args) -> TrainTask:
    data = {"inputs": inputs, "targets": "y", "folds": 2}
    return make_task([images], model={"source": source, "args": args}, data=data)


@pytest.mark.parametrize(("source", "inputs", "args", "num_parameters"), [
    # He et al. 2015, table 1: 11.7 million with 1000 classes, each with 512 weights and a bias
    ("torchvision.models:resnet18", "colour", {"num_classes": 3}, 11_689_512 - 997 * 513),
    ("timm:create_model", "grey", {"model_name": "resnet10t", "num_classes": 3, "in_chans": 1},
     None),
    ("torch.nn:LazyLinear", "grey[:, 0, 0, :]", {"out_features": 3}, 3 * 32 + 3),
])  # fmt: skip
def test_a_model_of_a_library_needs_no_file(images, source, inputs, args, num_parameters):
    report = check(task(images, source, inputs, **args))
    assert report["num_parameters"] == (num_parameters or report["num_parameters"])


@pytest.mark.parametrize(("source", "args", "message"), [
    ("torchvision.models:resnet81", {}, "there is no 'resnet81', only .* others, such as resnet1"),
    ("torchvision.models:resnet18", {"classes": 3}, "unexpected keyword argument 'classes'"),
    ("torchvision.models:googlenet", {"num_classes": 3, "init_weights": False},
     "a GoogLeNetOutputs of logits, .* one tensor: set aux_logits = false in model.args"),
    ("timm:create_model", {"model_name": "resnet9000"}, r"Unknown model \(resnet9000\)"),
])  # fmt: skip
def test_a_mistake_in_it_is_one_line(images, source, args, message):
    with pytest.raises(N3LOError, match=message) as error:
        check(task(images, source, **args))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("library", "extra"), [
    ("keras", "keras"), ("pytorch_lightning", "lightning"), ("timm", "vision"),
    ("torch_geometric.nn", "graph"),
])  # fmt: skip
def test_a_missing_library_is_told_with_the_extra_that_has_it(monkeypatch, library, extra):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = frameworks.remedy(ModuleNotFoundError(f"No module named '{library}'", name=library))
    assert said.startswith(f"{library.partition('.')[0]} is not installed in ")
    assert said.endswith(f"pip install 'n3lo[{extra}]'")
