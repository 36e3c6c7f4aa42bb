"""The losses that a study can name are means over the events, as their formulas have them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from conftest import STUDY
from torch.nn import functional

from apps.contract import N3LOError, Training
from apps.data import Batch
from apps.experiment import Supervised
from apps.losses import Losses, class_numbers
from workflow.fingerprint import fingerprint
from workflow.plan import Planner
from workflow.study import load

LOGITS = torch.tensor([[2.0, 0.5, -1.0], [0.0, 1.0, 3.0], [-0.5, 0.0, 0.5], [1.0, 1.0, 0.0]])
CLASSES = torch.tensor([0, 2, 1, 0])

OWN = """\
import torch


def squared(outputs, targets, scale=1.0):
    return scale * (outputs - targets).square().mean()


def for_each(outputs, targets):
    return (outputs - targets).square()


def number(outputs, targets):
    return 1.0


def wrong_size(outputs, targets):
    return torch.ones(7)


class Power(torch.nn.Module):
    def __init__(self, exponent=2):
        super().__init__()
        self.exponent = exponent

    def forward(self, outputs, targets):
        return (outputs - targets).abs().pow(self.exponent).mean()


class Learned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    """The path of a file with losses of a user's."""
    (tmp_path / "my_losses.py").write_text(OWN)
    return str(tmp_path / "my_losses.py")


def loss_of(spec: object, outputs: object, targets: object, **more: object) -> float:
    return Losses(Training(loss=spec, **more))(outputs, targets).item()


def test_huber_has_the_delta_of_its_table():
    outputs, targets = torch.tensor([0.25, 3.0]), torch.tensor([0.0, 0.0])
    expected = (0.5 * 0.25**2 + 0.5 * (3.0 - 0.25)) / 2  # quadratic up to delta, then linear
    assert loss_of({"name": "huber_loss", "delta": 0.5}, outputs, targets) == pytest.approx(
        expected
    )


def test_label_smoothing_mixes_in_the_mean_of_all_classes():
    logs = LOGITS.log_softmax(dim=1)
    hard = -logs[torch.arange(4), CLASSES].mean()
    expected = 0.9 * hard - 0.1 * logs.mean()
    spec = {"name": "cross_entropy", "label_smoothing": 0.1}
    assert loss_of(spec, LOGITS, CLASSES) == pytest.approx(expected.item())


def test_weights_of_classes_leave_the_loss_a_mean_over_events():
    """torch divides by the sum of the weights in the batch, which differs between ranks."""
    spec = {"name": "cross_entropy", "weight": [1.0, 2.0, 5.0]}
    each = functional.cross_entropy(LOGITS, CLASSES, reduction="none")
    expected = (each * torch.tensor([1.0, 5.0, 2.0, 1.0])).sum() / 4
    assert loss_of(spec, LOGITS, CLASSES) == pytest.approx(expected.item())
    parts = [loss_of(spec, LOGITS[:1], CLASSES[:1]), loss_of(spec, LOGITS[1:], CLASSES[1:])]
    assert parts[0] / 4 + parts[1] * 3 / 4 == pytest.approx(expected.item())


def test_the_divergence_is_that_of_an_event():
    """Its default in torch is the mean over all numbers."""
    outputs, targets = LOGITS.log_softmax(dim=1), torch.full((4, 3), 1 / 3)
    expected = (targets * (targets.log() - outputs)).sum(dim=1).mean()
    assert loss_of("kl_div", outputs, targets) == pytest.approx(expected.item())


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "expected"),
    [
        ("soft_margin_loss", [0.0, 0.0], [1.0, -1.0], math.log(2)),
        ("poisson_nll_loss", [0.0, math.log(2)], [1.0, 3.0], (1 + 2 - 3 * math.log(2)) / 2),
        ("binary_cross_entropy", [0.25, 0.5], [0.0, 1.0], -(math.log(0.75) + math.log(0.5)) / 2),
        ("multilabel_soft_margin_loss", [[0.0, 0.0]], [[1.0, 0.0]], math.log(2)),
    ],
)
def test_further_losses_equal_their_formulas(name, outputs, targets, expected):
    found = loss_of(name, torch.tensor(outputs), torch.tensor(targets))
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("form", ["float32", "int8", "int32", "(B, 1)", "one-hot"])
def test_class_numbers_are_taken_as_people_have_them(form):
    forms = {"(B, 1)": CLASSES[:, None].float(), "one-hot": functional.one_hot(CLASSES).float()}
    targets = forms[form] if form in forms else CLASSES.to(getattr(torch, form))
    assert class_numbers(LOGITS, targets).equal(CLASSES)
    for name in ("cross_entropy", "nll_loss"):
        outputs = LOGITS.log_softmax(dim=1)
        assert loss_of(name, outputs, targets) == pytest.approx(loss_of(name, outputs, CLASSES))


def test_axes_in_another_order_are_no_targets_of_outputs():
    outputs, targets = torch.zeros(4, 3, 2), torch.zeros(4, 2, 3)
    with pytest.raises(N3LOError, match=r"gives \(B, 3, 2\), but the targets are \(B, 2, 3\)"):
        Losses(Training(loss="mse"))(outputs, targets)
    flat = torch.arange(24.0).view(4, 6)
    assert Losses(Training(loss="mse"))(flat.view(4, 3, 2), flat) == 0


def test_yes_and_no_may_be_two_classes():
    assert class_numbers(LOGITS[:, :2], torch.tensor([True, False, True, True])).tolist() == [
        *(1, 0, 1, 1),
    ]


@pytest.mark.parametrize("spec", ["squared", "for_each", "Power"])
def test_a_loss_of_the_users_own_is_called(own, spec):
    outputs, targets = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0])
    assert loss_of(f"{own}:{spec}", outputs, targets) == pytest.approx((1 + 4) / 2)


def test_a_loss_of_the_users_own_takes_arguments(own):
    outputs, targets = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0])
    assert loss_of({"name": f"{own}:squared", "scale": 3.0}, outputs, targets) == pytest.approx(7.5)
    assert loss_of({"name": f"{own}:Power", "exponent": 1}, outputs, targets) == pytest.approx(1.5)


def test_a_class_of_torch_is_a_loss():
    outputs, targets = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0])
    assert loss_of("torch.nn:MSELoss", outputs, targets) == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number", "my_losses.py:number': gives a float, not a tensor"),
        ("wrong_size", "gives (7,); it must be the mean over the events, or have a value for each"),
        ("missing", "there is no 'missing', only squared, for_each, number, wrong_size, Power, "),
        ("Learned", "has weights of its own, which no optimizer trains"),
    ],
)
def test_a_loss_of_the_users_own_that_is_none_is_named(own, name, message):
    with pytest.raises(N3LOError) as error:
        loss_of(f"{own}:{name}", torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0]))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "huber_loss", "detla": 1.0}, "'detla'; it takes delta, weight"),
        ({"name": "mse", "reduction": "sum"}, "'reduction'; it takes weight"),
        ({"name": "cross_entropy", "weight": "a"}, "training.loss 'cross_entropy': "),
        ("hinge", "training.loss: there is no 'hinge', only bce, "),
        ({"name": "OWN:squared", "sclae": 1.0}, "'sclae'; it takes scale"),
    ],
)
def test_an_argument_that_a_loss_does_not_take_is_named(own, spec, message):
    if isinstance(spec, dict):
        spec = {**spec, "name": spec["name"].replace("OWN", own)}
    with pytest.raises(N3LOError) as error:
        loss_of(spec, LOGITS, CLASSES)
    assert message in str(error.value)


# -- several targets -------------------------------------------------------------------------------


def test_each_target_may_have_its_loss_and_its_weight():
    """The weights of NNLO's GAN are 2, 0.1 and 0.1."""
    outputs = {"label": LOGITS, "energy": torch.ones(4), "angle": torch.zeros(4)}
    targets = {"label": CLASSES, "energy": torch.zeros(4), "angle": torch.full((4,), 3.0)}
    losses = {"label": "cross_entropy", "energy": "mse", "angle": {"name": "huber_loss"}}
    found = loss_of(
        losses, outputs, targets, loss_weights={"label": 2, "energy": 0.1, "angle": 0.1}
    )
    expected = 2 * functional.cross_entropy(LOGITS, CLASSES).item() + 0.1 * 1.0 + 0.1 * 2.5
    assert found == pytest.approx(expected)
    as_lists = [list(each.values()) for each in (losses, outputs, targets)]
    assert loss_of(*as_lists, loss_weights=[2, 0.1, 0.1]) == pytest.approx(expected)


def test_one_loss_is_that_of_all_targets():
    outputs = [torch.ones(2), torch.ones(2)]
    targets = [torch.zeros(2), torch.full((2,), 3.0)]
    assert loss_of("mse", outputs, targets) == pytest.approx(1 + 4)
    assert loss_of("mse", outputs, targets, loss_weights=[0.5, 0.25]) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("loss", "weights", "message"),
    [
        (
            ["mse"],
            None,
            "training.loss: is for a list of 1 targets, and data.targets has ",
        ),
        (
            {"a": "mse"},
            None,
            "training.loss: is for the targets a, and data.targets has a list",
        ),
        (
            "mse",
            [1.0],
            "training.loss_weights: is for a list of 1 targets, and data.",
        ),
    ],
)
def test_there_are_as_many_losses_and_weights_as_targets(loss, weights, message):
    losses = Losses(Training(loss=loss, loss_weights=weights))
    with pytest.raises(N3LOError) as error:
        losses.check([torch.zeros(2), torch.zeros(2)])
    assert message in str(error.value)


def test_outputs_and_targets_of_another_form_are_refused():
    with pytest.raises(N3LOError, match=r"gives a tuple of 2, but the targets are one tensor: let"):
        loss_of("mse", (LOGITS, LOGITS), LOGITS)


# -- a study ---------------------------------------------------------------------------------------


@pytest.fixture
def studied(study_path: Path):
    """The tasks of a study with a loss of the user's own, and how to change that."""
    text = STUDY.replace("epochs = 2", 'epochs = 2\nloss = "my_losses.py:crossed"')
    study_path.write_text(text)
    file = study_path.with_name("my_losses.py")
    file.write_text(
        "from torch.nn.functional import cross_entropy\n"
        "def crossed(outputs, targets):\n"
        "    return cross_entropy(outputs, targets)\n"
    )

    def task():
        study = load(study_path)
        files = study.data_files()
        digests = fingerprint(study, files, study_path.with_name("memo.json"))
        return Planner(study, files, digests).base_task()

    return task, file


def test_the_ranks_find_a_loss_beside_the_study(studied):
    task, file = studied
    assert task().training.loss == f"{file}:crossed"
    x, y = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
    loss = Losses(task().training)(x, y)
    assert loss.item() == pytest.approx(functional.cross_entropy(x, y).item())


def test_a_changed_loss_is_not_taken_from_the_cache(studied):
    task, file = studied
    before = task().key()
    assert task().key() == before
    file.write_text(file.read_text().replace("return cross", "return 2 * cross"))
    assert task().key() != before


def test_the_folder_of_a_loss_does_not_change_the_key(studied):
    task, _ = studied
    one = task()
    moved = dataclasses.replace(one.training, loss="/elsewhere/my_losses.py:crossed")
    assert dataclasses.replace(one, training=moved).key() == one.key()


def test_a_loss_file_that_is_not_there_is_named(studied):
    task, file = studied
    file.unlink()
    with pytest.raises(N3LOError, match=r"training.loss: there is no file 'my_losses.py'"):
        task()


def test_a_loss_can_be_searched(studied, study_path):
    task, _ = studied
    space = '"training.loss" = { type = "choice", values = ["cross_entropy", "other.py:loss"] }\n'
    study_path.write_text(study_path.read_text() + space)
    study_path.with_name("other.py").write_text("def loss(outputs, targets):\n    return 1\n")
    study = load(study_path)
    point = {"training.optimizer.lr": 0.1, "model.args.width": 4, "training.loss": "other.py:loss"}
    assert study.at(point).training.loss == "other.py:loss"
    before = task().key()
    study_path.with_name("other.py").write_text("def loss(outputs, targets):\n    return 2\n")
    assert task().key() != before


def test_an_argument_of_a_loss_can_be_searched(study_path, edit):
    edit("epochs = 2", 'epochs = 2\nloss = { name = "cross_entropy", label_smoothing = 0.1 }')
    with open(study_path, "a") as file:
        file.write('"training.loss.label_smoothing" = { type = "real", low = 0.0, high = 0.5 }\n')
    study = load(study_path)
    point = {**study.own_values(), "training.loss.label_smoothing": 0.25}
    assert study.at(point).training.loss["label_smoothing"] == 0.25


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("loss = 3", ":16: training.loss: 3 is not"),
        ("loss = { delta = 0.5 }", ":16: training: loss: 0.5 is no loss; give a name, or a table"),
        ('loss = "a:b:c"', ":16: training: loss: 'a:b:c' is no loss; as in 'mse', 'file.py:name'"),
        ("loss = []", ":16: training: loss: name at least one"),
    ],
)
def test_a_loss_that_is_none_is_named_with_its_line(edit, line, message):
    path = edit("epochs = 2", f"{line}\nepochs = 2")
    with pytest.raises(N3LOError) as error:
        load(path)
    assert message in str(error.value)


def test_the_mean_over_batches_of_different_sizes_is_that_of_all_events():
    experiment = Supervised(torch.nn.Identity(), Training(loss="mse"))
    outputs, targets = torch.arange(7.0), torch.zeros(7)
    parts = [slice(0, 2), slice(2, 7)]
    sums = sum(
        experiment.evaluate(Batch(outputs[part], targets[part], len(outputs[part]), 7))
        for part in parts
    )
    assert experiment.val_means(sums)["loss"] == pytest.approx((outputs**2).mean().item())
