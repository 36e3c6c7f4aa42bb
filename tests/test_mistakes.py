"""Common mistakes end in one line that says how to mend it, before anything is submitted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from training_helpers import make_task, write_h5

from apps import check as check_module
from apps.check import check
from apps.contract import N3LOError
from apps.frameworks import vision
from apps.mistakes import of_names
from apps.sources import hint


class LocalEntryNotFoundError(OSError):
    """As huggingface_hub has it."""


EVENTS = 30
CLASSES = np.arange(EVENTS) % 3
NUMBERS = np.linspace(0, 5, EVENTS)
ROWS = np.random.default_rng(2).normal(size=(EVENTS, 3)).astype(np.float32)

HEAD = """\
import torch
from torch import nn


"""
MODEL = """\
class Net(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, width))

"""


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What the check of a model on data reports."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def report(
        source: str, x: Any = ROWS, y: Any = CLASSES, loss: Any = "cross_entropy", **more: Any
    ) -> dict[str, Any]:
        args = more.pop("args", {})
        if not source.startswith("torch."):
            (tmp_path / "net.py").write_text(HEAD + source)
            source = f"{tmp_path / 'net.py'}:{more.pop('name', 'Net')}"
        files = [write_h5(tmp_path / "events.h5", x=x, y=y)]
        sections = {"training": {"loss": loss, **more.pop("training", {})}, **more}
        return check(make_task(files, model={"source": source, "args": args}, **sections))

    return report


@pytest.fixture
def refused(report):
    """The one line that the check ends in."""

    def refused(*arguments: Any, **more: Any) -> str:
        with pytest.raises(N3LOError) as error:
            report(*arguments, **more)
        assert "\n" not in str(error.value)
        return str(error.value)

    return refused


def forward(body: str) -> str:
    return f"{MODEL}    def forward(self, x):\n        {body}\n"


PLAIN = forward("return self.layers(x)")


def with_line(line: str) -> str:
    """The plain model with one more line in its constructor."""
    return PLAIN.replace("\n    def forward", f"        {line}\n\n    def forward")


def linear(features: int, outputs: int = 3) -> dict[str, Any]:
    return {
        "source": "torch.nn:Linear",
        "args": {"in_features": features, "out_features": outputs},
    }


# -- the model and the shape of the data -----------------------------------------------------------


def test_a_layer_that_takes_another_number_of_features_is_named(refused):
    said = refused(PLAIN.replace("Linear(3, 5)", "Linear(4, 5)"))
    assert said == (
        "model 'Net' fails on the first batch: layer 'layers.0' (Linear) takes 4 features, and "
        "input 'x' gives (B, 3): set its in_features to 3, by model.args or in the model's file; "
        "inputs are (B, 3), targets are (B,)"
    )
    said = refused(PLAIN.replace("Linear(5, width)", "Linear(6, width)"))
    assert "layer 'layers.2' (Linear) takes 6 features, and gets (B, 5): set its in_" in said


def test_events_that_are_not_flat_are_to_be_flattened(refused):
    said = refused(**linear(12), x=np.ones((EVENTS, 4, 3), np.float32))
    assert "takes 12 features, and input 'x' gives (B, 4, 3): flatten that, by " in said
    assert 'data.transforms."x" = ["flatten"]' in said


def test_one_number_an_event_needs_an_axis_and_is_not_as_many_features_as_events(refused, report):
    numbers = np.linspace(0, 1, EVENTS, dtype=np.float32)
    said = refused(**linear(1), x=numbers)
    assert "takes (B, 1), and input 'x' gives (B,): set data.transforms." in said
    report(**linear(1), x=numbers, data={"transforms": {"x": ["channel_axis"]}})
    said = refused(**linear(12), x=numbers)
    assert "takes 12 features, and input 'x' gives (B,), one number an event" in said
    assert "in_features" not in said


def test_the_flattening_that_is_advised_mends_it(report):
    data = {"transforms": {"x": ["flatten"]}}
    report(**linear(12), x=np.ones((EVENTS, 4, 3), np.float32), data=data)


CONV = "torch.nn:Conv2d"


@pytest.mark.parametrize(
    ("channels", "shape", "message"),
    [
        (1, (6, 6), '(B, 6, 6), which has no axis of channels: add one, by data.transforms."x" = '
         '["channel_axis"], or x.unsqueeze(1)'),
        (5, (6, 6, 5), 'where the channels come last: set data.transforms."x" = '
         '[{ name = "transpose", axes = [3, 1, 2] }]'),
        (3, (1, 6, 6), "takes 3 channels, and input 'x' gives (B, 1, 6, 6): set its in_channels "
         "to 1, by model.args"),
        (3, (36,), "takes (B, 3, ...) with 2 more axes, and input 'x' gives (B, 36): reshape that"),
    ],
)  # fmt: skip
def test_images_of_another_form_than_a_convolution_takes(refused, channels, shape, message):
    args = {"in_channels": channels, "out_channels": 2, "kernel_size": 3}
    assert message in refused(CONV, args=args, x=np.ones((EVENTS, *shape), np.float32))


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        ("nn.LSTM(4, 2)", (7, 3), "(LSTM) takes 4 features a step, and input 'x' gives (B, 7, 3): "
         "set its input_size to 3"),
        ("nn.GRU(1, 2)", (7,), "(GRU) takes (B, steps, 1), and input 'x' gives (B, 7): add an axis "
         'of features, by data.transforms."x" = [{ name = "channel_axis", at = "last" }]'),
        ("nn.BatchNorm1d(4)", (3,), "(BatchNorm1d) takes 4 features on axis 1, and input 'x' gives "
         "(B, 3): set its num_features to 3"),
    ],
)  # fmt: skip
def test_other_layers_say_what_they_take(refused, layer, shape, message):
    model = PLAIN.replace("nn.Linear(3, 5)", layer)
    assert message in refused(model, x=np.ones((EVENTS, *shape), np.float32))


EMBEDDING = "torch.nn:Embedding"


def test_an_embedding_takes_indices_that_it_has(refused):
    numbers = np.arange(EVENTS)[::-1]
    args = {"num_embeddings": 5, "embedding_dim": 3}
    said = refused(EMBEDDING, args=args, x=numbers)
    assert "takes indices from 0 to 4, and input 'x' holds 28 to 29: set its num_embeddings" in said
    said = refused(EMBEDDING, args=args, x=numbers.astype(np.float32))
    assert "takes indices, which are whole numbers, and input 'x' gives (B,) float32: store" in said


@pytest.mark.parametrize("dtype", ["int16", "uint16", "int64"])
def test_whole_numbers_for_a_layer_of_numbers(refused, report, dtype):
    counts = np.ones((EVENTS, 3), dtype)
    said = refused(PLAIN, x=counts)
    assert (
        "layer 'layers.0' (Linear) takes float32 numbers; input 'x' holds whole numbers, which are "
        'given as indices (int64); to give them as float32, set data.transforms."x" = ["scale"]'
    ) in said
    report(PLAIN, x=counts, data={"transforms": {"x": ["scale"]}})


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (PLAIN.replace("(self, x)", "(self, x, mask)"), "x",
         "forward takes (x, mask), and data.inputs names 1; name as many fields as it takes"),
        (PLAIN, ["x", "y"], "forward takes (x), and data.inputs names 2; name as many fields"),
        (PLAIN, {"rows": "x"}, "forward takes (x), and data.inputs is a table of rows; give it"),
    ],
)  # fmt: skip
def test_forward_takes_as_many_inputs_as_the_study_names(refused, model, inputs, message):
    assert message in refused(model, data={"inputs": inputs})


# -- the loss and the targets ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "outputs", "y", "message"),
    [
        ("cross_entropy", 1, CLASSES % 2, "the model gives (B, 1), but the targets are (B,): "
         "'cross_entropy' needs an output for each class, (B, C); for yes or no take loss = 'bce'"),
        ("cross_entropy", 4, np.eye(3)[CLASSES], "the model gives (B, 4), but the targets are (B, "
         "3), one-hot of 3 classes: give 3 outputs"),
        ("mse", 3, CLASSES, "the model gives (B, 3), but the targets are (B,): 'mse_loss' needs a "
         "number for each output; for class numbers take loss = 'cross_entropy'"),
        ("bce", 3, CLASSES, "needs a yes or no for each output; for class numbers take loss = "
         "'cross_entropy', or the step one_hot of data.transforms"),
        ("mse", 1, np.ones((EVENTS, 2)), "'mse_loss' needs as many; give 2 outputs"),
        ("bce", 1, CLASSES, "data.targets: 'y' holds 0 to 2, and 'binary_cross_entropy_with_logits'"
         " takes 0 (no) to 1 (yes); for class numbers take loss = 'cross_entropy' and 3 outputs"),
        ("cross_entropy", 3, NUMBERS, "data.targets: 'y' holds 0 to 5 and not only whole numbers, "
         "and 'cross_entropy' takes class numbers; for numbers take loss = 'mse'"),
        ("soft_margin_loss", 1, CLASSES % 2, "takes -1 (no) and 1 (yes); for 0 and 1 take loss = "
         "'bce'"),
        ("poisson_nll_loss", 1, -NUMBERS, "takes counts, which are not below 0; take loss = 'mse'"),
    ],
)  # fmt: skip
def test_a_loss_that_the_targets_do_not_suit(refused, loss, outputs, y, message):
    assert message in refused(**linear(3, outputs), y=y, loss=loss)


def test_class_numbers_that_no_output_is_for_are_found_in_the_last_event(refused, report):
    late = np.where(np.arange(EVENTS) == EVENTS - 1, 3, CLASSES)
    assert refused(PLAIN, y=late) == (
        "data.targets: 'y' holds the class numbers 0 to 3, and the 3 outputs are for 0 to 2: give "
        "4 outputs, by model.args or in the model's file"
    )
    report(PLAIN, y=late, args={"width": 4})


def test_class_numbers_that_begin_at_one(refused, report):
    assert refused(PLAIN, y=CLASSES + 1) == (
        "data.targets: 'y' holds the class numbers 1 to 3, and the 3 outputs are for 0 to 2: set "
        'data.transforms."y" = [{ name = "scale", offset = -1 }]'
    )
    shifted = {"transforms": {"y": [{"name": "scale", "offset": -1}]}}
    report(PLAIN, y=CLASSES + 1, data=shifted)


def test_class_numbers_below_zero(refused, report):
    y = np.where(np.arange(EVENTS) == 20, -1, CLASSES)
    said = refused(PLAIN, y=y)
    assert "must not be below 0; leave such events out, or set loss = { name = 'cross_ent" in said
    report(PLAIN, y=y, loss={"name": "cross_entropy", "ignore_index": -1})


@pytest.mark.parametrize(
    "y",
    [
        CLASSES.astype(np.float32),
        CLASSES.astype(np.int8),
        CLASSES[:, None].astype(np.int16),
        CLASSES > 0,
        np.eye(3)[CLASSES],
    ],
    ids=["float32", "int8", "(N, 1)", "bool", "one-hot"],
)
def test_classes_are_taken_as_people_have_them(report, y):
    report(PLAIN, y=y, training={"metrics": ["accuracy"]})


@pytest.mark.parametrize("loss", ["cross_entropy", "nll_loss", "multi_margin_loss"])
def test_several_labels_are_no_class(refused, report, loss):
    labels = np.stack([CLASSES == 0, CLASSES < 2, CLASSES > 0], axis=1).astype("float32")
    assert refused(PLAIN, y=labels, loss=loss) == (
        f"data.targets: 'y' has events of several classes, or of none, and '{loss}' is of one for "
        "each; for yes or no to each class take loss = 'bce'"
    )
    one_hot = np.eye(3, dtype="float32")[CLASSES]
    report(PLAIN, y=one_hot, loss=loss)
    one_hot[-1] = 0
    assert "or of none" in refused(PLAIN, y=one_hot, loss=loss)
    report(PLAIN, y=np.full((EVENTS, 3), 1 / 3), loss="cross_entropy")  # probabilities


def test_many_more_outputs_than_classes_are_told(report):
    assert report(PLAIN, args={"width": 1000})["warnings"] == [
        "the model gives 1000 outputs for the 3 classes of 'y': give 3, by model.args or in the "
        "model's file"
    ]
    assert report(PLAIN, args={"width": 6})["warnings"] == []


def test_accuracy_of_several_labels_is_none_and_of_one_hot_classes_is(refused, report):
    labels = np.stack([CLASSES == 0, CLASSES < 2, CLASSES > 0], axis=1).astype("float32")
    asked = {"loss": "bce", "training": {"metrics": ["accuracy"]}}
    message = refused(PLAIN, y=labels, **asked)
    assert "holds several yes or no for each event" in message
    assert "{ name = 'torchmetrics:MultilabelAccuracy', num_labels = 3 }" in message
    report(PLAIN, y=np.eye(3, dtype="float32")[CLASSES], **asked)


def test_accuracy_of_numbers_is_none(refused):
    said = refused(**linear(3, 1), y=NUMBERS, loss="mse", training={"metrics": ["accuracy"]})
    assert said.startswith("data.targets: 'y' holds 0 to 5, of which training.metrics 'accuracy'")


@pytest.mark.parametrize(
    ("end", "loss", "y", "message"),
    [
        (".softmax(1)", "cross_entropy", CLASSES, "takes logits, and the model gives probabilities "
         "(softmax); leave out the softmax, or learning is slow"),
        (".sigmoid()", "bce", np.eye(3)[CLASSES], "takes logits, and the model ends with a sigmoid;"
         " leave it out, or take loss = 'binary_cross_entropy'"),
        ("", "nll_loss", CLASSES, "'nll_loss' takes log-probabilities, and these are none; end the "
         "model with log_softmax, or take loss = 'cross_entropy'"),
    ],
)  # fmt: skip
def test_the_end_of_the_model_seldom_goes_with_the_loss(report, end, loss, y, message):
    [warning] = report(forward(f"return self.layers(x){end}"), y=y, loss=loss)["warnings"]
    assert message in warning


def test_the_right_end_is_no_mistake(report):
    assert report(PLAIN)["warnings"] == []
    ends = forward("return self.layers(x).log_softmax(1)")
    assert report(ends, loss="nll_loss")["warnings"] == []
    ends = forward("return self.layers(x).sigmoid()")
    found = report(ends, y=np.eye(3)[CLASSES], loss="binary_cross_entropy")
    assert found["warnings"] == []


def test_probabilities_lie_between_0_and_1(refused):
    model = forward("return 9 + self.layers(x)")
    said = refused(model, y=np.eye(3)[CLASSES], loss="binary_cross_entropy")
    assert "end it with a sigmoid, or take loss = 'bce', which has one in it" in said


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return self.layers(x), x", "the model gives a list of 2, but the targets are one tensor: "
         "let forward return what the loss is of, and nothing else"),
        ("return self.layers(x).argmax(1)", "forward gives whole numbers (int64), which have no "
         "gradient; return what argmax, round or > is taken of"),
        ("return self.layers(x).mean(0)", "forward gives (3,) for 2 events; its first axis must be "
         "that of the events"),
        ("return self.layers(x).detach()", "the loss does not depend on the weights; look for "
         ".detach(), .data, "),
        ("return None", "the model gives a NoneType, but the targets are one tensor: let forward"),
    ],
)  # fmt: skip
def test_what_forward_gives_is_what_the_loss_is_of(refused, body, message):
    assert message in refused(forward(body))


# -- the model's file ------------------------------------------------------------------------------


def test_a_model_without_weights_has_nothing_to_train(refused):
    said = refused("class Net(nn.Module):\n    def forward(self, x):\n        return x\n")
    assert said.startswith("model 'Net' has no weights to train: make its layers in __init__, as ")
    frozen = with_line("self.requires_grad_(False)")
    assert "all its weights are frozen (requires_grad = False)" in refused(frozen)


def test_weights_that_the_loss_does_not_depend_on_are_named(report):
    assert report(with_line("self.more = nn.Linear(3, 3)"))["warnings"] == [
        "the loss does not depend on more.weight, more.bias: forward does not use them, or "
        "detaches what they give"
    ]


@pytest.mark.parametrize("place", ["constructor", "forward"])
def test_a_model_that_chooses_its_device_is_told_to_leave_it(refused, monkeypatch, place):
    """As on a host without a GPU, whatever this one has."""

    def absent(*_: Any, **__: Any) -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.")

    monkeypatch.setattr("torch.cuda._lazy_init", absent)
    monkeypatch.setattr("torch.Tensor.cuda", absent)
    body = "return self.layers(x.cuda())" if place == "forward" else "return self.layers(x)"
    model = forward(body)
    if place == "constructor":
        model = model.replace("nn.Linear(5, width))", "nn.Linear(5, width)).cuda()")
    said = refused(model)
    assert "leave the device to N3LO, which moves model and data: take out .cuda(), " in said
    assert "net.py line" in said


@pytest.mark.parametrize("more", ["+ torch.zeros(3)", "* self.scale"], ids=["new", "kept"])
def test_a_tensor_that_would_stay_on_the_cpu_is_found_without_a_gpu(refused, report, more):
    model = with_line("self.scale = torch.ones(3)").replace("layers(x)", f"layers(x) {more}")
    said = refused(model, layout={"gpus_per_rank": 1})
    assert "forward has a tensor on the CPU, where the model and its inputs will be on a " in said
    assert "GPU (net.py line 12); leave the device to N3LO" in said
    report(model)  # is right where there are only CPUs
    mended = with_line("self.register_buffer('scale', torch.ones(3))")
    mended = mended.replace("layers(x)", "layers(x) * self.scale + torch.zeros(3, device=x.device)")
    report(mended, layout={"gpus_per_rank": 1})


def test_what_cannot_be_told_without_numbers_is_no_mistake(report):
    model = forward("return self.layers(x) * (2.0 if x.sum() > 0 else 1.0)")
    report(model, layout={"gpus_per_rank": 1})


def test_tensors_on_two_devices_are_explained():
    """It comes in the training, where the check had no GPU."""
    text = "Expected all tensors to be on the same device, but found at least two devices"
    assert "make new tensors in forward with device=x.device" in hint(RuntimeError(text))


def test_a_library_that_is_missing_is_named_with_the_environment(refused):
    said = refused("import n3lo_absent\n" + PLAIN)
    assert "ModuleNotFoundError: No module named 'n3lo_absent' (net.py line 5); if n3lo_abs" in said
    assert f"is a library, install it in {sys.prefix}; if it is a file of yours, put " in said


def test_a_library_of_an_extra_is_named_with_the_extra(refused, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "timm", None)
    said = refused("import timm\n" + PLAIN)
    assert f"timm is not installed in {sys.prefix}: pip install 'n3lo[vision]'" in said


EXIT = "import sys; sys.exit(3)"


@pytest.mark.parametrize(
    "model",
    [
        f"{EXIT}\n{PLAIN}",
        with_line(EXIT),
        with_line("import argparse; argparse.ArgumentParser().parse_args(['--what'])"),
        forward(EXIT),
    ],
    ids=["file", "constructor", "argparse", "forward"],
)
def test_code_that_ends_the_program_is_named(refused, model):
    said = refused(model)
    assert "SystemExit: " in said
    assert "(net.py line " in said
    assert "; the model's code must not end the program, nor read its command line" in said


@pytest.mark.parametrize("error", [URLError("no host"), LocalEntryNotFoundError("not there")])
def test_weights_that_cannot_be_downloaded_are_to_be_fetched_before(error):
    assert "make the model once on a host that has one and the same home folder" in hint(error)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_model_of_torch_script_is_refused(refused):
    model = PLAIN + "\n\ndef script():\n    return torch.jit.script(Net())\n"
    said = refused(model, name="script")
    assert said.startswith(
        "model 'script' is of torch.jit.script, whose layers cannot be looked at"
    )


def test_a_model_that_is_compiled_already_is_told():
    layer = torch.nn.Linear(3, 3)
    [warning] = of_names(torch.nn.ModuleDict({"_orig_mod": layer}))  # as torch.compile wraps it
    assert "the names of its weights have '_orig_mod.' in them; give the module itself" in warning
    assert list(of_names(layer)) == []


def test_an_instance_is_no_source_of_models(refused):
    said = refused(PLAIN + "\n\nnet = Net()\n", name="net")
    assert said.endswith(
        "net.py:net': is a model already; name its class, or a function that gives it"
    )


@pytest.mark.parametrize("default", [": Config", "=Config()"])
def test_a_table_is_no_dataclass(refused, default):
    config = (
        "from dataclasses import dataclass\n\n\n@dataclass\nclass Config:\n    width: int = 3\n"
    )
    model = with_line("self.last = nn.Linear(3, config.width)")
    model = model.replace("width=3", f"config{default}").replace(", width", ", 3")
    said = refused(f"{config}\n\n{model}", args={"config": {"width": 3}})
    assert "model.args.config is given as a dict, and it is a Config: make that of it first" in said


def test_a_file_that_does_not_come_to_an_end_is_named(refused, monkeypatch):
    monkeypatch.setattr(check_module, "BUILD_S", 1.0)
    said = refused("import time\ntime.sleep(60)\n" + PLAIN)
    assert "model.source was not imported and built after 1 s; does its file train, downlo" in said
    assert "net.py line 6" in said


def test_what_does_not_say_its_arguments_is_to_be_wrapped(refused):
    source = PLAIN + "\n\nsimilar = torch.nn.functional.cosine_similarity\n"
    message = refused(source, y=ROWS, loss="torch.nn.functional:cosine_similarity")
    assert "whose arguments are not known; call it in a function or a class of your own" in message


def test_a_metric_of_the_users_own_may_be_called_accuracy(report, tmp_path):
    source = PLAIN + "\n\ndef accuracy(outputs, targets):\n    return outputs[:, 0]\n"
    (tmp_path / "net.py").write_text(HEAD + source)
    metrics = [f"{tmp_path / 'net.py'}:accuracy"]
    report(source, y=ROWS * 5, loss="mse", training={"metrics": metrics})


def test_a_metric_of_several_columns_and_one_that_fails(refused, report, tmp_path):
    vision.watch()
    pytest.importorskip("torchmetrics")
    found = report(PLAIN, y=ROWS, loss="mse", training={"metrics": ["torchmetrics:R2Score"]})
    assert found["measured"][-1] == "val_r2_score"
    source = PLAIN + "\n\ndef wrong(outputs, targets):\n    return outputs[:, 7]\n"
    metrics = [f"{tmp_path / 'net.py'}:wrong"]
    said = refused(source, y=ROWS, loss="mse", training={"metrics": metrics})
    assert said.startswith("training.metrics 'net.py:wrong': IndexError: ")


def test_an_argument_of_another_type_is_named(refused):
    said = refused(PLAIN, args={"width": "3"})
    assert "model.args.width = '3' is of type str, and the default, 3, is of type int" in said
