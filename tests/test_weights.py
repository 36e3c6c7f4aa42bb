"""Events with weights: what they do to losses, metrics and folds, by its formula."""

from __future__ import annotations

import dataclasses
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from training_helpers import classes_h5, make_task, train_all, write_h5, write_task

from apps import contract, datacheck
from apps.check import check, first_events
from apps.contract import (
    N3LOError,
    TaskPaths,
    Training,
    TrainTask,
    read_json_lines,
)
from apps.data import Batch, prepare_fold, trains
from apps.experiment import Supervised
from apps.hdf5 import index_files
from apps.losses import Losses

WEIGHTS = torch.tensor([2.0, -1.0, 0.5, 3.0, 0.0])
LOGITS = torch.randn(5, 3, generator=torch.Generator().manual_seed(2))
CLASSES = torch.tensor([0, 2, 1, 0, 2])
NUMBERS = torch.linspace(-1, 1, 15).view(5, 3)

OWN = """\
def for_each(outputs, targets):
    return (outputs - targets).square()


def mean(outputs, targets):
    return for_each(outputs, targets).mean()


def total(outputs, targets):
    return for_each(outputs, targets).sum()


def weighing(outputs, targets, weights=None):
    losses = for_each(outputs, targets).mean(dim=1)
    return losses.mean() if weights is None else (weights * losses).mean()


def needs_weights(outputs, targets, weights):
    return weighing(outputs, targets, weights)


def asks(outputs, targets, sample_weight):
    return 0


def near(outputs, targets):
    return (outputs.argmax(dim=1) == targets).float()


class Scaled:
    def __init__(self, weights=1.0):
        self.scale = weights

    def __call__(self, outputs, targets, weights=None):
        return self.scale * weighing(outputs, targets, weights)


def of_classes(outputs, targets, class_weight):
    return 0


class Asks:
    def __call__(self, outputs, targets, w):
        return 0


def of_pairs(outputs, targets):
    alike = outputs @ outputs.T
    return -alike.triu(1).sum() / len(outputs)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a file with losses of a user's."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def loss_of(spec: Any, outputs: Any, targets: Any, weights: Any = WEIGHTS, **more: Any) -> float:
    return Losses(Training(loss=spec, **more))(outputs, targets, weights).item()


# -- losses ----------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_of_weight_times_loss():
    squares = ((LOGITS - NUMBERS) ** 2).mean(dim=1)  # of an event, over what the model gives
    assert loss_of("mse", LOGITS, NUMBERS) == pytest.approx((WEIGHTS @ squares).item() / 5)
    each = -LOGITS.log_softmax(dim=1)[torch.arange(5), CLASSES]
    assert loss_of("cross_entropy", LOGITS, CLASSES) == pytest.approx((WEIGHTS @ each).item() / 5)


@pytest.mark.parametrize(
    ("spec", "targets"),
    [
        ("cross_entropy", functional.one_hot(CLASSES, 3)),
        ({"name": "cross_entropy", "weight": [1.0, 2.0, 5.0], "label_smoothing": 0.1}, CLASSES),
        ({"name": "cross_entropy", "ignore_index": 2}, CLASSES),
        ("multi_margin_loss", CLASSES),
        ("bce", NUMBERS.abs()),
        ("soft_margin_loss", NUMBERS.sign()),
        ("multilabel_soft_margin_loss", NUMBERS.abs().round()),
        ({"name": "huber_loss", "delta": 0.5}, NUMBERS),
        ("mae", NUMBERS),
        ("poisson_nll_loss", NUMBERS.abs()),
        ("kl_div", NUMBERS.abs()),
    ],
    ids=lambda value: None if isinstance(value, torch.Tensor) else str(value),
)
def test_each_loss_is_weighed_as_that_of_single_events(spec, targets):
    alone = [loss_of(spec, LOGITS[i : i + 1], targets[i : i + 1], None) for i in range(5)]
    expected = np.dot(WEIGHTS.numpy(), alone) / 5
    assert loss_of(spec, LOGITS, targets) == pytest.approx(expected, rel=1e-5)


def test_several_targets_share_the_weights():
    outputs, targets = {"a": LOGITS, "b": LOGITS[:, 0]}, {"a": CLASSES, "b": NUMBERS[:, 0]}
    found = loss_of(
        {"a": "cross_entropy", "b": "mse"}, outputs, targets, loss_weights={"a": 2, "b": 0.1}
    )
    parts = loss_of("cross_entropy", LOGITS, CLASSES), loss_of("mse", outputs["b"], targets["b"])
    assert found == pytest.approx(2 * parts[0] + 0.1 * parts[1])


@pytest.mark.parametrize("name", ["for_each", "weighing", "needs_weights"])
def test_an_own_loss_is_weighed_or_weighs(own, name):
    expected = loss_of("mse", LOGITS, NUMBERS)
    assert loss_of(f"{own}:{name}", LOGITS, NUMBERS) == pytest.approx(expected)


def test_arguments_of_the_study_are_not_taken_for_weights_of_events(own):
    expected = loss_of("mse", LOGITS, NUMBERS)
    scaled = {"name": f"{own}:Scaled", "weights": 2.0}
    assert loss_of(scaled, LOGITS, NUMBERS) == pytest.approx(2 * expected)
    with pytest.raises(N3LOError, match="missing a required argument: 'class_weight'"):
        loss_of(f"{own}:of_classes", LOGITS, NUMBERS)


def test_an_own_loss_may_go_without_weights(own):
    assert loss_of(f"{own}:weighing", LOGITS, NUMBERS, None) == pytest.approx(
        loss_of("mse", LOGITS, NUMBERS, None)
    )


@pytest.mark.parametrize(
    ("name", "weights", "message"),
    [
        ("mean", WEIGHTS, "mean': gives (), of which data.weights cannot weigh the events; return"),
        ("needs_weights", None, "asks for weights, and the study has none: name them as data.wei"),
        ("asks", WEIGHTS, "asks for 'sample_weight': the weights of events are named by data.wei"),
        ("Asks", WEIGHTS, "Asks': asks for 'w': the weights of events are named by data.weights"),
    ],
)
def test_an_own_loss_that_cannot_be_weighed_is_told_how(own, name, weights, message):
    with pytest.raises(N3LOError) as error:
        loss_of(f"{own}:{name}", LOGITS, NUMBERS, weights)
    assert message in str(error.value)


# -- what is measured ------------------------------------------------------------------------------


def test_what_is_measured_is_weighed(own):
    metrics = ["accuracy", {"name": f"{own}:near", "as": "near"}]
    experiment = Supervised(nn.Identity(), Training(metrics=metrics))
    parts = [slice(first, end) for first, end in pairwise([0, 1, 3, 5])]
    sums = sum(
        experiment.evaluate(
            Batch(LOGITS[part], CLASSES[part], part.stop - part.start, 5, WEIGHTS[part])
        )
        for part in parts
    )
    losses = functional.cross_entropy(LOGITS, CLASSES, reduction="none")
    right = (LOGITS.argmax(dim=1) == CLASSES).float()
    accuracy = (WEIGHTS @ right / WEIGHTS.sum()).item()
    assert experiment.val_means(sums) == pytest.approx(
        {
            "loss": (WEIGHTS @ losses / WEIGHTS.sum()).item(),
            "accuracy": accuracy,
            "near": accuracy,
        }
    )


def test_the_mean_error_is_that_of_weighted_events():
    experiment = Supervised(nn.Identity(), Training(loss="mse", metrics=["mse", "mae"]))
    found = experiment.val_means(experiment.evaluate(Batch(LOGITS, NUMBERS, 5, 5, WEIGHTS)))
    errors = (LOGITS - NUMBERS).double().numpy()
    weights = WEIGHTS.double().numpy()
    expected = np.average((errors**2).mean(axis=1), weights=weights)
    assert found["loss"] == pytest.approx(expected)
    assert found["mse"] == pytest.approx(expected)
    assert found["mae"] == pytest.approx(np.average(np.abs(errors).mean(axis=1), weights=weights))


# -- the data --------------------------------------------------------------------------------------


RNG = np.random.default_rng(6)
SIGNED = RNG.choice([-0.5, 1.5, 4.0], size=121, p=[0.2, 0.5, 0.3])


def weighted(folder: Path, weights: Any = SIGNED, **sections: Any) -> TrainTask:
    """A task on the events of `classes_h5`, with these weights in the dataset w."""
    folder.mkdir(exist_ok=True)
    file = classes_h5(folder / "events.h5")
    with h5py.File(file, "a") as opened:
        opened["w"] = weights
    return make_task([file], data={"weights": "w", **sections.pop("data", {})}, **sections)


@pytest.mark.parametrize("form", ["(B,)", "(B, 1)", "int8"])
def test_weights_have_mean_one_over_the_training_events_of_the_fold(tmp_path, form):
    stored = {"(B,)": SIGNED, "(B, 1)": SIGNED[:, None], "int8": SIGNED.astype(np.int8)}[form]
    task = weighted(tmp_path, stored)
    for fold in range(3):
        index, fold_of_event = prepare_fold(task.data, task.split_seed, fold)
        batch = first_events(index, 121)
        values = stored.astype(np.float64).reshape(121)
        mean = values[trains(fold_of_event, fold)].mean()
        assert batch.weights.dtype == torch.float32
        assert batch.weights.numpy() == pytest.approx(values / mean, rel=1e-6)
        assert batch.targets.dtype == torch.int64


def test_weights_do_not_change_the_folds(tmp_path):
    task = weighted(tmp_path)
    plain = dataclasses.replace(task.data, weights=None)
    folds = [prepare_fold(each, task.split_seed, 0)[1] for each in (task.data, plain)]
    assert np.array_equal(*folds)


def test_events_that_are_only_predicted_need_no_weights(tmp_path):
    task = weighted(tmp_path)
    file = write_h5(tmp_path / "new.h5", x=np.zeros((4, 3), np.float32))
    data = dataclasses.replace(task.data, files=[str(file)])
    assert index_files(data, with_targets=False).weights is None


def with_one(value: float) -> np.ndarray:
    weights = np.ones(121)
    weights[5] = value
    return weights


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (with_one(np.nan), "data.weights: 'w' holds 1 values that are not finite (nan or inf), the "
         "first in event 5 of all files; leave"),
        (with_one(np.inf), "data.weights: 'w' holds 1 values that are not finite"),
        (with_one(-100), "data.weights: 'w' adds up to -"),
        (np.zeros(121), "data.weights: 'w' adds up to 0 over the training events of fold 0, wh"),
        (np.ones((121, 2)), "data.weights: 'w' is (2,) an event, and a weight is one number"),
        (np.ones(120), "fields differ in their number of events: 'x' has 121, 'y' has 121, 'w' "),
    ],
    ids=["nan", "inf", "below 0", "0", "two", "too few"],
)  # fmt: skip
def test_weights_that_cannot_be_used_are_one_line(tmp_path, weights, message):
    with pytest.raises(N3LOError) as error:
        check(weighted(tmp_path, weights))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_weights_are_in_the_key_and_only_where_there_are_some(tmp_path, monkeypatch):
    task = weighted(tmp_path)
    plain = dataclasses.replace(task, data=dataclasses.replace(task.data, weights=None))
    assert task.key() != plain.key()
    hashed: list[dict[str, Any]] = []
    monkeypatch.setattr(contract, "canonical_json", lambda content: hashed.append(content) or "")
    plain.key()
    assert "weights" not in hashed[0]["data"]  # as before there were any


def test_data_check_shows_the_range_and_the_negative_share(tmp_path):
    [report] = datacheck.of_study(weighted(tmp_path).data)
    share = (SIGNED < 0).mean()
    assert f"  w: weights from -0.5 to 4, {share:.1%} negative" in datacheck.written(report)


# -- the check -------------------------------------------------------------------------------------


def refused(task: TrainTask) -> str:
    with pytest.raises(N3LOError) as error:
        check(task)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_task_with_weights_passes_the_check(tmp_path):
    assert check(weighted(tmp_path, training={"metrics": ["accuracy"]}))["warnings"] == []


def test_a_model_that_brings_its_losses_takes_no_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "net.py").write_text(
        "import torch\nfrom apps.adversarial import Adversaries\n\n\n"
        "class Net(Adversaries):\n"
        "    def __init__(self):\n"
        "        self.networks = {'a': torch.nn.Linear(3, 1)}\n"
        "        self.turns = ('a',)\n"
    )
    model = {"source": f"{tmp_path / 'net.py'}:Net", "args": {}}
    task = weighted(tmp_path, model=model, training={"loss": "own"})
    assert refused(task).startswith("data.weights: the model brings its losses (training.loss = 'o")


def test_an_own_loss_that_is_a_sum_is_refused_and_a_mean_is_not(own, tmp_path):
    x = NUMBERS.numpy().repeat(6, axis=0)
    file = write_h5(tmp_path / "a.h5", x=x, y=x)

    def task(name: str) -> TrainTask:
        return make_task([file], training={"loss": f"{own}:{name}"})

    assert refused(task("total")).startswith(
        "training.loss: of 2 events it is as large as those of each alone, added up: it is a sum; "
    )
    for name in ("mean", "for_each", "weighing", "of_pairs"):
        check(task(name))


@pytest.mark.parametrize("targets", [["y", "w"], {"label": "y", "weight": "w"}], ids=str)
def test_a_weight_among_the_targets_is_told_its_place(tmp_path, targets):
    task = weighted(tmp_path, data={"targets": targets, "weights": None})
    name = "w" if isinstance(targets, list) else "weight"
    assert refused(task) == (
        f"data.targets: '{name}' has no output of the model to compare with; where it is the "
        'weight of the events, take it out and set data.weights = "w"'
    )


# -- whole trainings -------------------------------------------------------------------------------


@pytest.mark.mpi
def test_two_ranks_train_as_one_and_equal_weights_as_none(tmp_path):
    """Otherwise the learning rate would mean another thing with weights of 3."""
    task = weighted(tmp_path / "data", training={"metrics": ["accuracy"], "lanes": 2})
    several = {"strategy": "allreduce", "backend": "ddp", "lanes": None}
    two = dataclasses.replace(
        task,
        training=dataclasses.replace(task.training, **several),
        layout=dataclasses.replace(task.layout, num_workers=2),
    )
    threes = weighted(tmp_path / "threes", np.full(121, 3.0), training={"metrics": ["accuracy"]})
    plain = dataclasses.replace(threes, data=dataclasses.replace(threes.data, weights=None))
    tasks = {"one": task, "two": two, "threes": threes, "plain": plain}
    paths = {name: write_task(tmp_path / name, each) for name, each in tasks.items()}
    train_all(1, paths["one"], paths["threes"], paths["plain"])
    train_all(2, paths["two"])
    rows = {name: read_json_lines(TaskPaths(each.parent).history) for name, each in paths.items()}
    for pair in (("one", "two"), ("threes", "plain")):
        for first, second in zip(*(rows[name] for name in pair), strict=True):
            for measured in ("loss", "val_loss", "accuracy", "val_accuracy"):
                assert first[measured] == pytest.approx(second[measured], rel=1e-5)
        one, other = (torch.load(tmp_path / name / "weights.pt") for name in pair)
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-6)
    assert rows["one"][0]["val_loss"] != pytest.approx(rows["plain"][0]["val_loss"], rel=1e-3)
