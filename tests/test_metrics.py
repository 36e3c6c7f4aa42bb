"""What is measured beside the loss: exact over batches and ranks, whatever it is made of."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import explained_variance_score, f1_score, r2_score
from test_ensemble import finished
from torch import nn
from training_helpers import launch, make_task, write_h5, write_task

from apps.contract import N3LOError, Training, goal_of, metric_name
from apps.data import Batch
from apps.experiment import Supervised
from apps.frameworks import vision
from apps.history import stop_reason
from apps.metrics import make_metric
from apps.trained import load_trained
from workflow import extras
from workflow.fingerprint import fingerprint
from workflow.study import load, metric_names

vision.watch()
torchmetrics = pytest.importorskip("torchmetrics")

EVENTS = 57
OWN = """\
def within(outputs, targets, tolerance=0.5):
    return ((outputs - targets).abs() < tolerance).float()


def one_number(outputs, targets):
    return (outputs - targets).mean()
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    """The path of a file with metrics of a user's."""
    (tmp_path / "my_metrics.py").write_text(OWN)
    return str(tmp_path / "my_metrics.py")


def measured(
    outputs: object, targets: object, *metrics: object, loss: object = "mse", batches: int = 4
) -> dict[str, float]:
    """What validation finds of a model that gives its inputs, in some unequal batches."""
    training = Training(loss=loss, metrics=list(metrics))
    first = Batch(cut(outputs, 0, 2), cut(targets, 0, 2), 2, 2)
    experiment = Supervised(nn.Identity(), training, example=lambda: first)
    experiment.forward = lambda model, inputs: inputs
    ends = [round(EVENTS * (part / batches) ** 2) for part in range(batches + 1)]
    sums = experiment.no_val_sums()
    for first, end in pairwise(ends):
        batch = Batch(cut(outputs, first, end), cut(targets, first, end), end - first, EVENTS)
        sums += experiment.evaluate(batch)
    return experiment.val_means(sums)


def cut(values, first, end):
    if isinstance(values, dict):
        return {name: each[first:end] for name, each in values.items()}
    return values[first:end]


@pytest.fixture
def classified() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (57, 3), right more often than not, and the classes (57,)."""
    rng = torch.Generator().manual_seed(3)
    classes = torch.randint(0, 3, (EVENTS,), generator=rng)
    logits = torch.randn(EVENTS, 3, generator=rng) + 2 * nn.functional.one_hot(classes, 3)
    return logits, classes


@pytest.fixture
def fitted() -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers (57, 1) and targets (57,)."""
    rng = torch.Generator().manual_seed(4)
    targets = torch.randn(EVENTS, generator=rng)
    return (targets + 0.4 * torch.randn(EVENTS, generator=rng))[:, None], targets


def test_a_metric_of_torchmetrics_is_that_of_all_events(classified, fitted):
    logits, classes = classified
    f1 = {"name": "torchmetrics:MulticlassF1Score", "num_classes": 3}
    found = measured(logits, classes, f1, loss="cross_entropy")
    expected = f1_score(classes, logits.argmax(1), average="macro")
    assert found["multiclass_f1_score"] == pytest.approx(expected)
    found = measured(*fitted, "torchmetrics:R2Score")
    assert found["r2_score"] == pytest.approx(r2_score(fitted[1], fitted[0][:, 0]), abs=1e-6)


@pytest.mark.parametrize("name", ["R2Score", "ExplainedVariance"])
def test_states_may_take_their_form_from_the_targets(name):
    """Of three columns; the mean of what scikit-learn finds of each."""
    rng = np.random.default_rng(6)
    targets = torch.from_numpy(rng.normal(size=(EVENTS, 3)).astype("float32"))
    outputs = targets + 0.3 * torch.from_numpy(rng.normal(size=(EVENTS, 3)).astype("float32"))
    judge = {"R2Score": r2_score, "ExplainedVariance": explained_variance_score}[name]
    found = measured(outputs, targets, {"name": f"torchmetrics:{name}", "as": "found"})
    assert found["found"] == pytest.approx(judge(targets, outputs), rel=1e-5)


def test_events_are_asked_for_once_and_only_where_something_is_measured():
    asked = []
    batch = Batch(torch.randn(5, 3), torch.randn(5, 3), 5, 5)
    metrics = ["mse", "torchmetrics:R2Score", "torchmetrics:MeanSquaredError"]
    experiment = Supervised(
        nn.Identity(),
        Training(loss="mse", metrics=metrics),
        example=lambda: asked.append(1) or batch,
    )
    assert (experiment.measured[:2], asked) == (["loss", "mse"], [])
    found = experiment.evaluate(batch)  # before there are sums
    assert found.shape == experiment.no_sums().shape  # as of a rank that has no events
    expected = r2_score(batch.targets, batch.inputs)
    assert experiment.means(found)["r2_score"] == pytest.approx(expected, rel=1e-5)
    assert len(asked) == 2  # once for each of torchmetrics


def test_a_trained_network_is_used_without_the_data_of_its_training(tmp_path):
    training = {"loss": "mse", "metrics": ["torchmetrics:R2Score"]}
    task = make_task([tmp_path / "moved.h5"], training=training)
    _, experiment = load_trained(finished(tmp_path / "t", task), torch.device("cpu"))
    assert experiment.measured[-1] == "val_r2_score"


def test_states_that_are_of_other_sizes_for_each_target_are_refused():
    outputs = {"p": torch.randn(EVENTS, 3), "e": torch.randn(EVENTS, 2)}
    with pytest.raises(N3LOError, match=r"'R2Score' has states of other sizes .*; .* set of = one"):
        measured(outputs, outputs, "torchmetrics:R2Score", loss={"p": "mse", "e": "mse"})
    of_one = {"name": "torchmetrics:R2Score", "of": "p"}
    found = measured(outputs, outputs, of_one, loss={"p": "mse", "e": "mse"})
    assert found["r2_score"] == 1


@pytest.mark.parametrize(
    ("metric", "name"),
    [("mae", "mae"), ("torchmetrics:R2Score", "r2_score"), ("accuracy", "accuracy")],
)
def test_a_metric_that_fails_is_named(metric, name):
    outputs, targets = torch.randn(EVENTS, 3, 2, 2), torch.zeros(EVENTS, 2, dtype=torch.int64)
    with pytest.raises(N3LOError, match=rf"^training\.metrics: '{name}': "):
        make_metric(metric, lambda key: "mse_loss").sums({None: (outputs, targets)})


def test_one_of_torchmetrics_takes_no_weights_of_events():
    f1 = {"name": "torchmetrics:MulticlassF1Score", "num_classes": 3, "as": "f1"}
    Supervised(nn.Identity(), Training(metrics=["accuracy"])).check_weights()
    with pytest.raises(N3LOError, match="'f1' is of torchmetrics and takes no weights of events"):
        Supervised(nn.Identity(), Training(metrics=["accuracy", f1])).check_weights()


@pytest.mark.parametrize("batches", [1, 4])
def test_the_area_under_the_curve_does_not_depend_on_the_batches(classified, batches):
    """torchmetrics guesses batch by batch whether it is given logits."""
    logits, classes = classified
    area = {"name": "torchmetrics:MulticlassAUROC", "num_classes": 3, "thresholds": 50, "as": "auc"}
    found = measured(logits, classes, area, loss="cross_entropy", batches=batches)["auc"]
    made = torchmetrics.classification.MulticlassAUROC(num_classes=3, thresholds=50)
    assert found == pytest.approx(made(logits.softmax(1), classes).item())


def test_yes_and_no_may_be_one_logit_or_two(classified):
    logits, classes = classified[0][:, :2], (classified[1] == 1).long()
    area = {"name": "torchmetrics:BinaryAUROC", "thresholds": 200}
    two = measured(logits, classes, area, loss="cross_entropy")
    one = measured(logits[:, 1:] - logits[:, :1], classes.float(), area, loss="bce")
    assert one["binary_auroc"] == pytest.approx(two["binary_auroc"])
    assert one["binary_auroc"] > 0.5


def test_with_a_loss_of_the_users_own_outputs_are_logits(classified, tmp_path):
    (tmp_path / "my_losses.py").write_text(
        "from torch.nn.functional import cross_entropy\n"
        "def crossed(outputs, targets):\n"
        "    return cross_entropy(outputs, targets)\n"
    )
    logits, classes = classified[0][:, :2], (classified[1] == 1).long()
    area = {"name": "torchmetrics:BinaryAUROC", "thresholds": 200}
    own = measured(logits, classes, area, loss=f"{tmp_path / 'my_losses.py'}:crossed")
    assert own == pytest.approx(measured(logits, classes, area, loss="cross_entropy"))


def test_labels_at_once_are_measured_by_label():
    targets = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]).repeat(19, 1)
    outputs = torch.where(targets > 0.5, 2.0, -2.0)
    outputs[::3, 0] = -2.0  # a third of the events is wrong in one of two labels
    right = {"name": "torchmetrics:MultilabelAccuracy", "num_labels": 2}
    found = measured(outputs, targets, right, loss="bce")["multilabel_accuracy"]
    assert found == pytest.approx((2 / 3 + 1) / 2)


def test_a_metric_of_the_users_own_is_the_mean_over_events(own, fitted):
    outputs, targets = fitted[0][:, 0], fitted[1]
    close = {"name": f"{own}:within", "tolerance": 0.3, "as": "close"}
    found = measured(outputs, targets, f"{own}:within", close)
    for name, tolerance in (("within", 0.5), ("close", 0.3)):
        share = ((outputs - targets).abs() < tolerance).float().mean().item()
        assert found[name] == pytest.approx(share)


def test_a_metric_may_be_of_one_of_several_targets(classified, fitted):
    outputs = {"label": classified[0], "energy": fitted[0][:, 0]}
    targets = {"label": classified[1], "energy": fitted[1]}
    losses = {"label": "cross_entropy", "energy": "mse"}
    right = {"name": "accuracy", "of": "label"}
    error = {"name": "mae", "of": "energy", "as": "energy_mae"}
    found = measured(outputs, targets, right, error, loss=losses)
    expected = (classified[0].argmax(1) == classified[1]).float().mean().item()
    assert found["accuracy"] == pytest.approx(expected)
    expected = (fitted[0][:, 0] - fitted[1]).abs().mean().item()
    assert found["energy_mae"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ({"name": "torchmetrics:MulticlassAUROC", "num_classes": 3},
         "keeps all outputs (preds, target), which would fill the memory of every rank; set t"),
        ("torchmetrics:SpearmanCorrCoef", "fill the memory of every rank; choose another"),
        ("torchmetrics:PearsonCorrCoef", "cannot be added up over ranks (mean_x, mean_y, "),
        ("torchmetrics:F1", "training.metrics 'torchmetrics:F1': there is no 'F1'; torch"
         "metrics has 'torchmetrics:BinaryF1Score', "),
        ("torchmetrics:MulticlassAUROC", "missing a required argument: 'num_classes'; it takes "),
        ({"name": "torchmetrics:MulticlassRecall", "num_classes": 4},
         "'MulticlassRecall' has num_classes = 4, but the model gives (B, 3)"),
        ({"name": "torchmetrics:MulticlassRecall", "num_classes": 3, "average": "none"},
         "'MulticlassRecall' gives (3,) and not one number; set average = 'macro'"),
        ({"name": "accuracy", "of": "label"}, "is of = 'label', but the targets are one"),
        ({"name": "accuracy", "topk": 2}, "'accuracy' takes no topk"),
        ("auc", "training.metrics: there is no 'auc', only accuracy, mae, mse; torchmetrics has "
         "'torchmetrics:AUROC', 'torchmetrics:BinaryAUROC', 'torchmetrics:MulticlassAUROC', "),
        ("purity", "; others are named as 'torchmetrics:MulticlassF1Score' or 'file.py:name'"),
    ],
)  # fmt: skip
def test_a_metric_that_cannot_be_had_says_why(classified, metric, message):
    with pytest.raises(N3LOError) as error:
        measured(*classified, metric, loss="cross_entropy")
    assert message in str(error.value)


def test_a_metric_of_the_users_own_has_a_value_for_each_event(own, fitted):
    with pytest.raises(N3LOError, match=r"gives \(\) for a batch; it must have a value for each"):
        measured(fitted[0][:, 0], fitted[1], f"{own}:one_number")


def test_a_library_of_metrics_that_is_missing_is_named(edit, tmp_path, monkeypatch):
    study = load(edit('["accuracy"]', '["torchmetrics:R2Score"]'))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError) as error:
        fingerprint(study, study.data_files(), tmp_path / "memo.json")
    assert "pip install 'n3lo[metrics]'" in extras.remedy(error.value)


# -- names and goals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ("accuracy", "accuracy"),
        ("torchmetrics:MulticlassAUROC", "multiclass_auroc"),
        ("torchmetrics:R2Score", "r2_score"),
        ("torchmetrics.regression:KLDivergence", "kl_divergence"),
        ("my_metrics.py:within_ten", "within_ten"),
        ({"name": "torchmetrics:BinaryF1Score", "as": "f1"}, "f1"),
    ],
)
def test_a_metric_is_called_by_its_own_name_in_the_ledger(metric, name):
    assert metric_name(metric) == name


def test_the_driver_knows_the_names(edit):
    path = edit('["accuracy"]', '["accuracy", { name = "my.py:within", as = "close" }]')
    names = ["loss", "accuracy", "close", "val_loss", "val_accuracy", "val_close"]
    assert metric_names(load(path).study.training) == names


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (
            '["mse", "torchmetrics:MSE"]',
            "training: metrics: 'mse' is there twice; set as = to",
        ),
        ('[{ name = "mse", as = "loss" }]', "training: metrics: 'loss' cannot name one; set as = "),
        ('[{ name = "mse", as = "a b" }]', "training: metrics: 'a b' cannot name one; set as = to"),
        ('[{ as = "mse" }]', "training: metrics: None is no metric; as in 'accuracy', "),
    ],
)
def test_names_of_metrics_are_their_own(edit, metrics, message):
    with pytest.raises(N3LOError) as error:
        load(edit('["accuracy"]', metrics))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("metric", "goal"),
    [
        *((name, "max") for name in ("val_accuracy", "multiclass_auroc", "f1", "val_r2_score")),
        *((name, "min") for name in ("loss", "val_mean_squared_error", "energy_mae")),
        *((name, None) for name in ("val_within", "bias")),
    ],
)
def test_what_is_better_of_a_metric_is_known_by_its_name(metric, goal):
    assert goal_of(metric) == goal


def test_where_a_name_does_not_say_what_is_better_the_study_does(edit):
    path = edit("metrics = [", 'target = { metric = "val_within", value = 0.9 }\nmetrics = [')
    path = edit('["accuracy"]', '["my.py:within"]')
    with pytest.raises(N3LOError, match="the name 'val_within' does not say what is better of it"):
        load(path)
    training = load(edit("value = 0.9", 'value = 0.9, goal = "max"')).study.training
    rows = [{"epoch": 1, "val_within": 0.95, "seconds": 1.0}]
    assert stop_reason(training, rows) == "target"
    assert stop_reason(training, [{**rows[0], "val_within": 0.5}]) is None


# -- ranks -----------------------------------------------------------------------------------------


@pytest.mark.mpi
def test_ranks_add_up_to_what_one_finds(tmp_path, own):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(90, 3)).astype("float32")
    file = write_h5(tmp_path / "a.h5", x=x, y=x.argmax(axis=1).astype("int16"))
    training = {
        "epochs": 1,
        "lanes": 2,
        "loss": {"name": "cross_entropy", "weight": [1.0, 2.0, 3.0]},
        "metrics": [
            {"name": "torchmetrics:MulticlassAUROC", "num_classes": 3, "thresholds": 20},
            "accuracy",
        ],
    }
    found = []
    for ranks in (1, 2):
        sections = {"strategy": "allreduce", "backend": "ddp"} if ranks > 1 else {}
        task = make_task(
            [file],
            training={**training, **sections},
            layout={"ranks_per_worker": ranks},
        )
        path = write_task(tmp_path / str(ranks), task)
        done = launch(ranks, "-m", "apps.train", path)
        assert done.returncode == 0, done.stderr
        row = json.loads((path.parent / "history.jsonl").read_text())
        names = ("loss", "multiclass_auroc", "accuracy")
        found.append([row[prefix + name] for name in names for prefix in ("", "val_")])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert all(map(math.isfinite, found[0]))
