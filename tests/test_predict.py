"""A trained network on events: what its training found, and on files that have no targets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import expit, softmax
from test_ensemble import finished, validation_events, weights_of
from training_helpers import classes_h5, make_task, train_all, write_h5, write_task

from apps import predict as program
from apps.adversarial import Adversaries
from apps.contract import N3LOError, TaskPaths, read_json
from apps.predict import load, predict
from workflow import cli, commands

LINE = {"source": "torch.nn:Linear", "args": {"in_features": 3, "out_features": 1}}
X = np.random.default_rng(8).normal(size=(53, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def events(tmp_path_factory) -> Path:
    return classes_h5(tmp_path_factory.mktemp("data") / "classes.h5")


@pytest.fixture
def new_h5(tmp_path) -> Path:
    """Events without targets."""
    return write_h5(tmp_path / "new.h5", 8, x=X)


def linear_of(folder: Path, x: np.ndarray) -> np.ndarray:
    weights = weights_of(folder)
    return x @ weights["weight"].T + weights["bias"]


def run(*words: object) -> int:
    return program.main(list(map(str, words)))


# -- the events of the validation ------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory, events) -> dict[str, Path]:
    """A classifier, weighted events, and a regression with transforms, in one launch."""
    root = tmp_path_factory.mktemp("trained")
    steps = {"x": ["normalise"], "number": [{"name": "scale", "by": 0.1}, "normalise"]}
    tasks = {
        "classes": make_task([events], fold=1, training={"metrics": ["accuracy"]}),
        "weights": make_task([events], data={"weights": "number"}),
        "numbers": make_task(
            [events], model=LINE, data={"targets": "number", "transforms": steps},
            training={"loss": "mse"},
        ),
    }  # fmt: skip
    train_all(1, *(write_task(root / name, task) for name, task in tasks.items()))
    return {name: root / name for name in tasks}


def test_the_validation_events_give_the_loss_that_the_training_found(trained):
    found = read_json(TaskPaths(trained["classes"]).result)["metrics"]
    given = predict(trained["classes"])
    assert_array_equal(given["events"], validation_events(trained["classes"]))
    right = given["output"][np.arange(len(given["target"])), given["target"]]
    assert_allclose(-np.log(right).mean(), found["val_loss"], rtol=1e-5)
    accuracy = (given["output"].argmax(axis=1) == given["target"]).mean()
    assert_allclose(accuracy, found["val_accuracy"])


def test_weighted_events_give_the_loss_with_their_weights_as_stored(trained, events):
    found = read_json(TaskPaths(trained["weights"]).result)["metrics"]["val_loss"]
    given = predict(trained["weights"])
    with h5py.File(events) as data:
        assert_array_equal(given["weight"], data["number"][:][given["events"]].astype(np.float32))
    right = given["output"][np.arange(len(given["target"])), given["target"]]
    assert_allclose(np.average(-np.log(right), weights=given["weight"]), found, rtol=1e-5)


def test_transformed_targets_are_predicted_as_the_loss_had_them_and_their_steps_are_told(
    trained, events, tmp_path, capsys
):
    folder, out = trained["numbers"], tmp_path / "out.h5"
    assert run(folder, out) == 0
    assert "output (41, 1), target (41,), by t000-f0" in capsys.readouterr().out
    found = read_json(TaskPaths(folder).result)["metrics"]["val_loss"]
    with h5py.File(out) as file, h5py.File(events) as data:
        error = file["output"][:, 0] - file["target"][:]
        assert_allclose((error**2).mean(), found, rtol=1e-5)
        scale, normalise = json.loads(file["output"].attrs["steps"])
        in_the_file = (file["target"][:] * normalise["width"] + normalise["shift"]) / scale["by"]
        assert_allclose(in_the_file, data["number"][:][file["events"][:]], atol=1e-3)
        assert file["output"].attrs["values"] == "outputs"


# -- other files -----------------------------------------------------------------------------------


def test_files_without_targets_get_the_transforms_of_the_training(trained, new_h5, tmp_path):
    out = tmp_path / "out.h5"
    assert run(trained["numbers"], out, "--on", new_h5, new_h5) == 0
    [step] = read_json(TaskPaths(trained["numbers"]).transforms)["x"]
    x = (X - np.array(step["shift"])) / np.array(step["width"])
    with h5py.File(out) as file:
        assert list(file) == ["files", "output"]
        expected = np.concatenate([linear_of(trained["numbers"], x)] * 2)
        assert_allclose(file["output"], expected, rtol=1e-4, atol=1e-5)
        assert list(file["files"].asstr()) == [str(new_h5)] * 2


def test_more_files_than_an_attribute_holds_are_named(trained, new_h5, tmp_path):
    given = load(trained["numbers"], [new_h5])
    many = [str(new_h5), *(f"/data/{number}.h5" for number in range(5000))]
    events = (len(X), *[0] * 5000)
    index = replace(given.index, files=tuple(many), file_events=events)
    program.write(given._replace(index=index), tmp_path / "out.h5")
    with h5py.File(tmp_path / "out.h5") as file:
        assert list(file["files"].asstr()) == many


@pytest.mark.parametrize(
    ("loss", "form", "values"),
    [
        ("cross_entropy", lambda z: softmax(z, axis=1), "probabilities"),
        ("bce", expit, "probabilities"),
        ("mse", lambda z: z, "outputs"),
        (f"{__file__}:squares", lambda z: z, "outputs"),
    ],
)
def test_an_output_is_a_probability_where_the_loss_is_of_one(
    tmp_path, events, new_h5, loss, form, values
):
    model = {} if loss == "cross_entropy" else LINE  # of three classes
    task = make_task([events], model=model, training={"loss": loss}, data={"targets": "number"})
    folder = finished(tmp_path / "t", task)
    assert run(folder, tmp_path / "out.h5", "--on", new_h5) == 0
    with h5py.File(tmp_path / "out.h5") as file:
        assert_allclose(file["output"], form(linear_of(folder, X)), rtol=1e-4, atol=1e-6)
        assert file["output"].attrs["values"] == values


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs[:, 0] - targets) ** 2).mean()


class Two(torch.nn.Linear):
    def __init__(self, by_name: bool) -> None:
        super().__init__(3, 2)
        self.by_name = by_name

    def forward(self, x: torch.Tensor) -> Any:
        one, two = super().forward(x).T
        return {"one": one, "two": two} if self.by_name else (one, two)


@pytest.mark.parametrize("by_name", [True, False])
def test_several_outputs_have_a_name_or_a_number_each(tmp_path, events, new_h5, by_name):
    targets = {"one": "number", "two": "y"} if by_name else ["number", "y"]
    model = {"source": f"{__file__}:Two", "args": {"by_name": by_name}}
    task = make_task([events], model=model, training={"loss": "mse"}, data={"targets": targets})
    folder = finished(tmp_path / "t", task)
    names = ("one", "two") if by_name else ("0", "1")
    for files in ([new_h5], []):
        given = predict(folder, files)
        assert {f"output_{name}" for name in names} <= given.keys()
    assert {f"target_{name}" for name in names} <= given.keys()
    one = predict(folder, [new_h5])[f"output_{names[0]}"]
    assert_allclose(one, linear_of(folder, X)[:, 0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("form", "targets", "steps"),
    [
        ("one", "number", {"output": True}),
        ("one", {"a": "number"}, {"output": False}),
        ("table", {"a": "number"}, {"output_a": True, "output_b": False}),
        ("table", ["number", "y"], {"output_a": False, "output_b": False}),
        ("table", "number", {"output_a": False, "output_b": False}),
        ("list", ["number"], {"output_0": True, "output_1": False}),
        ("list", {"a": "number"}, {"output_0": False, "output_1": False}),
        ("list", "number", {"output_0": False, "output_1": False}),
    ],
)
def test_a_model_with_its_own_loss_may_give_outputs_of_another_form_than_the_targets(
    tmp_path, events, new_h5, form, targets, steps
):
    scaled = "a" if isinstance(targets, dict) else "number"
    transforms = {scaled: [{"name": "scale", "by": 0.1}]}
    task = make_task(
        [events],
        model={"source": f"{__file__}:OwnLoss", "args": {"form": form}},
        training={"loss": "own"},
        data={"targets": targets, "transforms": transforms},
    )
    folder = finished(tmp_path / "t", task)
    TaskPaths(folder).transforms.write_text(json.dumps(transforms))
    assert run(folder, tmp_path / "out.h5", "--on", new_h5) == 0
    with h5py.File(tmp_path / "out.h5") as file:
        assert {name: file[name].attrs["steps"] != "[]" for name in steps} == steps
        network = torch.load(TaskPaths(folder).weights)["model"]
        for name in steps:
            expected = X @ network["weight"].numpy().T + network["bias"].numpy()
            assert_allclose(file[name], expected, rtol=1e-4, atol=1e-6)
    assert run(folder, tmp_path / "out.h5") == 0


class Outputs(torch.nn.Linear):
    def __init__(self, form: str) -> None:
        super().__init__(3, 1)
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        one = super().forward(x)
        return {"one": one, "table": {"a": one, "b": one}, "list": (one, one)}[self.form]


class OwnLoss(Adversaries):
    turns = ("model",)

    def __init__(self, form: str) -> None:
        self.networks = {"model": Outputs(form)}


# -- what is refused -------------------------------------------------------------------------------


def refused(folder: Path, *files: Path) -> str:
    with pytest.raises(N3LOError) as error:
        predict(folder, files)
    return str(error.value)


def test_events_that_the_network_does_not_take_are_told_with_their_shape(tmp_path, events):
    folder = finished(tmp_path / "t", make_task([events]))
    wide = write_h5(tmp_path / "wide.h5", x=np.zeros((5, 4), np.float32))
    said = refused(folder, wide)
    assert said.startswith("model 'Linear' fails: RuntimeError: mat1 and mat2 shapes cannot be")
    assert said.endswith("inputs are (B, 4)")
    assert "there is no 'x', only y" in refused(folder, write_h5(tmp_path / "y.h5", y=np.ones(3)))
    assert refused(folder, Path("none.h5")) == "--on: 'none.h5' does not exist"


@pytest.mark.parametrize("inputs", ["(number, @file)", ["x", "@file"], {"at": "@file", "x": "x"}])
def test_new_files_have_no_number_that_the_network_was_trained_with(tmp_path, events, inputs):
    data = {"inputs": inputs, "file_numbers": [500.0, 1000.0]}
    second = classes_h5(tmp_path / "b.h5")
    folder = finished(tmp_path / "t", make_task([events, second], data=data))
    assert refused(folder, events, second).startswith("--on: the network was trained with '@file'")


def test_new_files_need_no_number_where_it_was_the_target(tmp_path, events, new_h5):
    data = {"targets": "@file", "file_numbers": [0, 1]}
    folder = finished(tmp_path / "t", make_task([events, classes_h5(tmp_path / "b.h5")], data=data))
    assert predict(folder, [new_h5])["output"].shape == (53, 3)


def test_networks_that_train_against_each_other_predict_nothing(tmp_path, events):
    task = make_task(
        [events], training={"loss": "own"},
        model={"source": f"{Path(__file__).with_name('test_ensemble.py')}:Rivals", "args": {}},
    )  # fmt: skip
    said = refused(finished(tmp_path / "t", task))
    assert said.startswith(
        "model 'Rivals' is several networks (one, other), of which none predicts"
    )


def test_a_file_that_is_read_is_not_written_over(tmp_path, events, new_h5, capsys):
    folder = finished(tmp_path / "t", make_task([events]))
    before = new_h5.read_bytes()
    assert run(folder, new_h5, "--on", new_h5) == 2
    assert capsys.readouterr().err == (
        f"--to {new_h5}: is one of the files that are read; name another\n"
    )
    assert new_h5.read_bytes() == before


def test_the_command_takes_files_and_a_task():
    words = ["predict", "small.toml", "--trial", "t001", "--fold", "2", "--to", "out.h5"]
    given = cli._parser().parse_args([*words, "--on", "a.h5", "b.root"])
    assert (given.fold, given.on) == (2, [Path("a.h5"), Path("b.root")])


def test_a_pattern_that_the_shell_left_is_expanded(tmp_path):
    for name in ("new_2.h5", "new_1.h5", "old.h5"):
        (tmp_path / name).touch()
    found = [str(tmp_path / name) for name in ("new_1.h5", "new_2.h5", "old.h5")]
    words = commands.file_words([f"{tmp_path}/new_*.h5", tmp_path / "old.h5"])
    assert words == ["--on", *found]
    assert commands.file_words([]) == []
    with pytest.raises(N3LOError, match=r"^--on: no file matches '.*/none_\*\.h5'$"):
        commands.file_words([tmp_path / "none_*.h5"])
