"""`init`: a model and its data become a study that runs as it is."""

from __future__ import annotations

import tomllib
from pathlib import Path

import h5py
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
        "layer 'first' (Linear) takes 3 features, and input 'jets' gives (B, 7)",
    ):
        assert piece in line


def test_images_whose_channels_come_last_are_told_as_in_a_study(tmp_path):
    (tmp_path / "my_model.py").write_text(
        "import torch\n\n\ndef model():\n    return torch.nn.Conv2d(3, 2, 1)\n"
    )
    write_h5(tmp_path / "events.h5", image=np.ones((20, 6, 6, 3), np.float32), label=CLASSES[:20])
    with pytest.raises(N3LOError, match="where the channels come last: set") as error:
        drafted(tmp_path)
    step = 'data.transforms."image" = [{ name = "transpose", axes = [3, 1, 2] }]'
    assert step in str(error.value)


def test_what_cannot_be_a_target_is_told_with_the_reason(folder):
    kind = np.array([b"W", b"Z"] * 60)
    write_h5(folder / "events.h5", jets=X, kind=kind, y=CLASSES[:90], w=X[:, 0])
    with pytest.raises(N3LOError) as told:
        drafted(folder)
    line = str(told.value)
    assert "not usable: 'kind' holds |S1, not numbers; class numbers are numpy.unique(" in line
    assert "'y' has 90 events, and others have 120" in line


def test_a_file_without_arrays_is_told(folder):
    write_h5(folder / "events.h5")
    with pytest.raises(N3LOError, match="an event has no array of numbers; nothing fits"):
        drafted(folder)


def test_frames_of_pytables_are_not_taken_by_the_names_of_their_layout(folder):
    with h5py.File(write_h5(folder / "events.h5", df__block0_values=X), "r+") as file:
        file["df"].attrs["pandas_type"] = np.bytes_("frame")
    with pytest.raises(N3LOError, match=r"pandas.read_hdf\('events.h5'\).to_parquet"):
        drafted(folder)


def test_arrays_beside_a_frame_of_pytables_are_taken_and_the_frame_is_told(folder):
    arrays = {"df/block0_values": X[:40], "df/axis0": X[:40, 0], "df/axis1": X[:40, 0]}
    with h5py.File(write_h5(folder / "events.h5", jets=X, kind=CLASSES), "r+") as file:
        for name, values in arrays.items():
            file[name] = values
        file["df"].attrs["pandas_type"] = np.bytes_("frame")
    found = drafted(folder)
    assert (found["inputs"], found["targets"]) == (["jets"], ["kind"])
    assert "pandas.read_hdf('events.h5').to_parquet" in found["left_out"]
    assert drafted(folder, inputs=["jets"], targets=["kind"])["left_out"] == ""


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (["b", "d", "a"], r'are one input in parentheses: --inputs "\(b, d, a\)"'),
        ([], r'it takes 3 columns as one, as in --inputs "\(a, b, c\)"'),
    ],
)
def test_columns_of_a_model_with_one_argument_are_told_to_be_named_in_parentheses(
    folder, named, said
):
    columns = dict(zip("abcde", RNG.normal(size=(5, 50)), strict=True))
    write_h5(folder / "events.h5", **columns)
    with pytest.raises(N3LOError, match=said):
        drafted(folder, inputs=named)


def test_targets_that_no_loss_can_compare_are_told(folder):
    write_h5(folder / "events.h5", jets=X, kind=CLASSES + 5)
    with pytest.raises(N3LOError, match=r"Tagger gives \(B, 3\), and kind is \(B,\)"):
        drafted(folder, targets=["kind"])


def test_a_file_without_a_model_and_one_that_needs_arguments_are_told(folder):
    (folder / "nothing.py").write_text("width = 3\n")
    with pytest.raises(N3LOError, match=r"'nothing.py': there is no class of torch.nn.Module or k"):
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


def test_a_compiled_model_keeps_its_optimizer_and_the_names_of_its_inputs(tmp_path):
    found = {
        **{"source": "net.py:net", "args": {}, "events": 100, "fields": {}, "space": {}},
        **{"inputs": ["x", "q"], "targets": ["y"], "keys": (["jets", "met"], [])},
        **{"loss": "own", "metrics": [], "why": "", "optimizer": {"name": "sgd", "lr": 1e-5}},
    }
    text = init.compose(init.Wanted(model="net.py", data=["a.h5"]), found, tmp_path / "s.toml")
    written = tomllib.loads(text)
    assert written["data"]["inputs"] == {"jets": "x", "met": "q"}
    assert written["data"]["targets"] == "y"
    assert written["training"]["optimizer"] == {"name": "sgd", "lr": 1e-5}
    rates = written["search"]["space"]["training.optimizer.lr"]
    assert (rates["low"], rates["high"]) == (1e-6, 1e-3)


def test_where_no_field_is_a_label_the_file_is_one(folder, looked, capsys):
    for name in ("signal.h5", "qcd_1.h5", "qcd_2.h5"):
        write_h5(folder / name, jets=X)
    assert cli.main(["init", "my_model.py", "qcd_*.h5", "signal.h5"]) == 0
    assert "learned: 0 in qcd_*.h5, 1 in signal.h5;" in capsys.readouterr().out
    file = study.load(folder / "study.toml")
    assert file.study.data.targets == "@file"
    assert file.file_numbers() == [0, 0, 1]


@pytest.mark.parametrize(
    "data", [["part_1.h5", "part_2.h5"], ["train.h5", "test.h5"], ["a/x.h5", "b/x.h5"], ["*.h5"]]
)
def test_parts_of_a_sample_are_no_classes(data):
    assert init._file_numbers(data, data) is None


def test_other_models_of_a_file_are_told(folder, looked, capsys):
    with (folder / "my_model.py").open("a") as file:
        file.write("\n\nclass Wider(Tagger):\n    pass\n")
    assert cli.main(["init", "my_model.py", "events.h5"]) == 0
    said = "of several models Wider was taken; there is also my_model.py:Tagger"
    assert said in capsys.readouterr().out


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
        (["my_model.py", "events.h5", "e*.h5"], "once more, after 'events.h5'"),
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
    with pytest.raises(N3LOError, match="is a set"):
        toml.text({"training": {"lr": {1, 2}}})
    of_numpy = {"a": np.float64(0.1), "b": np.int64(3), "c": [np.float32(0.5)], "d": np.True_}
    of_numpy |= {"e": np.arange(3)}
    expected = {"a": 0.1, "b": 3, "c": [0.5], "d": True, "e": [0, 1, 2]}
    assert tomllib.loads(toml.text(of_numpy)) == expected
