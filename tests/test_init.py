"""`init`: a model and its data become a study that runs as it is."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from training_helpers import write_h5

from apps import draft
from apps.contract import N3LOError
from workflow import cli, init, schema, study, toml

TAGGER = """\
import torch

class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x).relu()

class Tagger(torch.nn.Module):
    def __init__(self, width=16, heads=4, dropout=0.1, features=3, classes=3, activation="relu"):
        super().__init__()
        assert width % heads == 0, "heads divide the width"
        self.first, self.layer = torch.nn.Linear(features, width), Layer(width)
        self.dropout, self.head = torch.nn.Dropout(dropout), torch.nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.dropout(self.layer(self.first(x))))
"""

RNG = np.random.default_rng(1)
X = RNG.normal(size=(120, 3)).astype("float32")
CLASSES = X.argmax(axis=1)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """With a model, and data whose names say little."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_model.py").write_text(TAGGER)
    write_h5(tmp_path / "events.h5", weight=X[:, 0], jets=X, kind=CLASSES)
    return tmp_path


def drafted(folder: Path, model: str = "my_model.py", **request) -> dict:
    asked = {"args": {}, "files": [str(folder / "events.h5")], "inputs": [], "targets": []}
    return draft.draft({**asked, "model": str(folder / model), **request})


# -- what fits -----------------------------------------------------------------------------------


def test_the_fields_that_fit_the_model_are_found_whatever_their_names(folder):
    found = drafted(folder)
    assert (found["inputs"], found["targets"]) == (["jets"], ["kind"])
    assert (found["loss"], found["metrics"]) == ("cross_entropy", ["accuracy"])
    assert found["events"] == 120
    assert found["fields"] == {
        "jets": "(3,) float32", "kind": "() int64", "weight": "() float32",
    }  # fmt: skip


def test_of_several_classes_the_last_that_needs_no_arguments_is_the_model(folder):
    assert drafted(folder)["source"].endswith("my_model.py:Tagger")
    with (folder / "my_model.py").open("a") as file:
        file.write("\n\nclass Block(Layer):\n    pass\n")
    assert drafted(folder)["source"].endswith("my_model.py:Tagger")


def test_arguments_that_can_vary_become_dimensions_and_others_stay(folder):
    found = drafted(folder)
    assert found["args"] == {
        "width": 16, "heads": 4, "dropout": 0.1, "features": 3, "classes": 3, "activation": "relu",
    }  # fmt: skip
    space = found["space"]
    assert space["dropout"] == {"type": "real", "low": 0.0, "high": 0.55}
    assert space["width"] == {"type": "choice", "values": [4, 16, 64]}  # 5 has not 4 heads
    assert space["heads"] == {"type": "choice", "values": [2, 4, 8]}
    # Other numbers of features do not fit the data, other numbers of classes not the targets.
    assert space.keys() == {"dropout", "width"} | {"heads"}


TARGETS = {
    "class numbers": (CLASSES, 3, "cross_entropy", ("accuracy",)),
    "one-hot": (np.eye(3)[CLASSES], 3, "cross_entropy", ("accuracy",)),
    "several labels": (X > 0, 3, "binary_cross_entropy_with_logits", ()),
    "0 and 1": (
        (X[:, 0] > 0).astype("int32"),
        1,
        "binary_cross_entropy_with_logits",
        ("accuracy",),
    ),
    "a number": (X.sum(axis=1), 1, "mse_loss", ("mae",)),
    "numbers": (2 * X, 3, "mse_loss", ("mae",)),
}


@pytest.mark.parametrize("name", TARGETS)
def test_the_loss_is_that_of_outputs_and_targets(tmp_path, name):
    values, width, loss, metrics = TARGETS[name]
    events = draft.Events([str(write_h5(tmp_path / "events.h5", x=X, y=values))])
    trial = draft.fitted("torch.nn:Linear", nn.Linear(3, width), events, [], [])
    assert (trial.inputs, trial.targets) == (["x"], ["y"])
    assert (trial.fit.loss, trial.fit.metrics) == (loss, metrics)
    # The study's own loss takes them.
    function = getattr(nn.functional, loss)
    targets = events.sample("y").targets[: len(trial.outputs[0])]
    alike = targets if loss == "cross_entropy" else targets.reshape(trial.outputs[0].shape).float()
    assert torch.isfinite(function(trial.outputs[0], alike))


def test_a_model_that_gives_logarithms_of_probabilities_has_nll_loss(tmp_path):
    events = draft.Events([str(write_h5(tmp_path / "events.h5", x=X, y=CLASSES))])
    model = nn.Sequential(nn.Linear(3, 3), nn.LogSoftmax(dim=1))
    assert draft.fitted("m.py:M", model, events, [], []).fit.loss == "nll_loss"


def test_layers_that_take_their_form_from_the_data_are_no_obstacle(folder):
    lazy = TAGGER.replace("Linear(features, width)", "LazyLinear(width)")
    (folder / "my_model.py").write_text(lazy)
    assert drafted(folder)["inputs"] == ["jets"]


class Two(nn.Module):
    def forward(self, image, tracks):
        return image.flatten(1).sum(dim=1, keepdim=True) + tracks.sum(dim=1, keepdim=True)


def test_several_inputs_are_found_by_the_names_of_the_arguments(tmp_path):
    image = RNG.normal(size=(120, 2, 2)).astype("float32")
    file = write_h5(tmp_path / "events.h5", energy=X[:, 0], tracks=X, image=image)
    trial = draft.fitted("m.py:Two", Two(), draft.Events([str(file)]), [], [])
    assert (trial.inputs, trial.targets) == (["image", "tracks"], ["energy"])


def test_columns_of_a_table_become_one_input(tmp_path):
    file = write_h5(tmp_path / "events.h5", a=X[:, 0], b=X[:, 1], response=X[:, 2])
    trial = draft.fitted("m.py:M", nn.Linear(2, 1), draft.Events([str(file)]), [], [])
    assert (trial.inputs, trial.targets) == (["(a, b)"], ["response"])


def test_fields_that_are_named_are_taken(folder):
    found = drafted(folder, inputs=["jets"], targets=["jets"])
    assert (found["inputs"], found["targets"], found["loss"]) == (["jets"], ["jets"], "mse_loss")


# -- what does not fit ---------------------------------------------------------------------------


def test_a_model_that_fits_nothing_is_told_what_it_takes_and_what_there_is(folder):
    write_h5(folder / "events.h5", jets=RNG.normal(size=(50, 7)), kind=np.zeros(50, "int64"))
    with pytest.raises(N3LOError) as told:
        drafted(folder)
    line = str(told.value)
    assert "\n" not in line
    for piece in (
        "Tagger takes x",
        "jets (7,) float64",
        "kind () int64",
        "--inputs",
        "50x7 and 3x16",
    ):
        assert piece.replace("50x7", "4x7") in line


def test_targets_that_no_loss_can_compare_are_told(folder):
    write_h5(folder / "events.h5", jets=X, kind=CLASSES + 5)
    with pytest.raises(N3LOError, match=r"Tagger gives \(B, 3\), and kind is \(B,\)"):
        drafted(folder, targets=["kind"])


def test_a_file_without_a_model_and_one_that_needs_arguments_are_told(folder):
    (folder / "nothing.py").write_text("width = 3\n")
    with pytest.raises(N3LOError, match=r"'nothing.py': there is no torch.nn.Module class and no"):
        drafted(folder, "nothing.py")
    with pytest.raises(N3LOError, match=r"'my_model.py': Layer needs width; add --arg width=VALUE"):
        drafted(folder, "my_model.py:Layer")
    with pytest.raises(N3LOError, match=r"there is no 'Taggr', only Layer, Tagger"):
        drafted(folder, "my_model.py:Taggr")


def test_factories_come_first(folder):
    with (folder / "my_model.py").open("a") as file:
        file.write("\n\ndef get_model(width=8, heads=2):\n    return Tagger(width, heads)\n")
    assert drafted(folder)["source"].endswith("my_model.py:get_model")


# -- the study -----------------------------------------------------------------------------------


@pytest.fixture
def looked(monkeypatch):
    """The programs of `apps` in this process: importing torch again takes seconds."""
    from apps.check import check
    from apps.contract import TrainTask, from_dict

    programs = {"draft": draft.draft, "check": lambda asked: check(from_dict(TrainTask, asked))}
    monkeypatch.setattr("workflow.preflight.look", lambda name, asked: programs[name](asked))


def test_the_written_study_is_valid_and_says_what_to_type_next(folder, looked, capsys):
    assert cli.main(["init", "my_model.py", "events.h5"]) == 0
    said = capsys.readouterr().out
    assert "Tagger: jets -> kind" in said
    assert said.splitlines()[-2:] == [
        "written: study.toml",
        "next: n3lo plan study.toml, then n3lo run study.toml",
    ]
    file = study.load(folder / "study.toml")
    assert file.study.model.source == "my_model.py:Tagger"
    assert file.data_files() == [folder / "events.h5"]
    assert file.study.search.objective.metric == "val_accuracy"
    text = file.text
    assert text.startswith("#:schema ./study.schema.json\n")
    assert (folder / "study.schema.json").read_text() == schema.text()
    assert "#   jets    (3,) float32  -> inputs" in text
    assert max(len(line) for line in text.splitlines() if "#" in line) <= 100


def test_a_study_in_another_folder_finds_model_and_data(folder, looked):
    (folder / "studies").mkdir()
    assert cli.main(["init", "my_model.py", "events*.h5", "--to", "studies/a.toml"]) == 0
    file = study.load(folder / "studies" / "a.toml")
    assert file.study.model.source == "../my_model.py:Tagger"
    assert file.study.data.files == ["../events*.h5"]
    assert file.data_files() == [folder / "events.h5"]


def test_what_is_there_is_not_overwritten(folder, looked, capsys):
    (folder / "study.toml").write_text("mine")
    assert cli.main(["init", "my_model.py", "events.h5"]) == 2
    assert "'study.toml' is there already" in capsys.readouterr().err
    assert (folder / "study.toml").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "init: name a model and data, such as: n3lo init my_model.py events.h5"),
        (["my_model.py"], "init: name a model and data"),
        (["mymodel.py", "events.h5"], "there is no model file 'mymodel.py'"),
        (["my_model", "events.h5"], "'my_model' is neither a file"),
        (["my_model.py", "event.h5"], "there is no data file 'event.h5'"),
        (["my_model.py", "no*.h5"], "no file matches 'no*.h5'"),
        (["my_model.py", "events.h5", "--arg", "width"], "--arg width: write it as NAME=VALUE"),
    ],
)
def test_each_mistake_is_one_line(folder, capsys, words, said):
    assert cli.main(["init", *words]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
    assert not (folder / "study.toml").exists()


def test_arguments_are_read_as_toml_or_else_as_text():
    given = [
        "width=64",
        "rate=1e-3",
        "pool=mean",
        "sizes=[1, 2]",
        "deep=true",
        "name='a'",
        "day=2020-01-01",
    ]
    assert init.args_of(given) == {
        "width": 64, "rate": 1e-3, "pool": "mean", "sizes": [1, 2], "deep": True, "name": "a",
        "day": "2020-01-01",
    }  # fmt: skip


@pytest.mark.parametrize("events", [1, 20, 900, 2000, 60_000, 10**7])
def test_the_sizes_of_a_first_study_are_sensible(events):
    sizes = init.Sizes(events)
    assert 8 <= sizes.batch_size <= 256
    assert 5 <= sizes.epochs <= 30
    assert sizes.batch_size & (sizes.batch_size - 1) == 0


def test_toml_that_is_written_is_read_as_what_it_was():
    content = {
        "name": 'a "quoted" \\ \x7f\n text ü',
        "seed": 3,
        "model": {"source": "m.py:M", "args": {"a b": [1, 2.5], "deep": True}},
        "search": {"space": {"training.lr": {"type": "real", "low": 1e-8, "log": True}}},
    }
    assert tomllib.loads(toml.text(content)) == content
    assert tomllib.loads(toml.text({"data": {"cache": None, "folds": 2}})) == {"data": {"folds": 2}}
    with pytest.raises(N3LOError, match=r"training.lr: nan is a float"):
        toml.text({"training": {"lr": float("nan")}})
    with pytest.raises(N3LOError, match="is a ndarray"):
        toml.text({"training": {"lr": np.zeros(2)}})
    of_numpy = {"a": np.float64(0.1), "b": np.int64(3), "c": [np.float32(0.5)], "d": np.True_}
    assert tomllib.loads(toml.text(of_numpy)) == {"a": 0.1, "b": 3, "c": [0.5], "d": True}
