"""Modules of PyTorch Lightning, without its Trainer."""

from __future__ import annotations

import copy
import pickle
import sys

import numpy as np
import pytest
import torch
from framework_helpers import Workplace, assert_same_bits, last_row, weights
from sklearn.metrics import r2_score
from torch.nn.functional import cross_entropy
from training_helpers import train_all, write_h5, write_task

from apps.check import check
from apps.contract import N3LOError
from apps.data import Batch
from apps.experiment import Experiment, make_experiment
from apps.export import export
from apps.predict import predict
from apps.train import seed_torch
from apps.trained import load_trained

CPU = torch.device("cpu")

MODELS = """
import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score
from torchmetrics.regression import R2Score


class Tagger(lightning.LightningModule):
    def __init__(self, width=8, dropout=0.2):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Linear(3, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 3)
        )
        self.f1 = MulticlassF1Score(3)

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("annealing", self.current_epoch / 10)
        self.log("epoch", -1.0)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        outputs = self(x)
        self.f1(outputs, y)
        self.log("val_f1", self.f1, on_epoch=True)
        right = outputs.argmax(dim=1) == y
        self.log_dict({"val_loss": cross_entropy(outputs, y), "val_acc": right.float().mean()})

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


class Hooked(Tagger):
    def on_train_epoch_end(self):
        pass

    def validation_step(self, batch):  # neither numbered nor logged
        return {"loss": cross_entropy(self(batch[0]), batch[1])}


class Manual(Tagger):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Unjudged(Tagger):
    validation_step = lightning.LightningModule.validation_step


class Asking(Tagger):
    def training_step(self, batch, batch_idx):
        return self.global_step * super().training_step(batch, batch_idx)


class Annealed(Tagger):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("progress", self.current_epoch / self.trainer.max_epochs)
        return loss


class Ways(Tagger):
    def __init__(self, how="sum"):
        super().__init__()
        self.how = how

    def validation_step(self, batch, batch_idx):
        x, y = batch
        outputs = self(x)
        right = (outputs.argmax(dim=1) == y).float()
        self.log("val/loss", cross_entropy(outputs, y), batch_size=len(y))
        self.log("val/right", right.sum(), False, None, False, True, self.how)
        self.log_dict({"val_high": x[x > 0].mean()}, batch_size=int((x > 0).sum()))


class Twice(Tagger):
    def validation_step(self, batch, batch_idx):
        self.log("acc", 1.0)
        self.log("val_acc", 0.0)
        return self.training_step(batch, batch_idx)


class Late(Tagger):
    def setup(self, stage):
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.layers(x))


class AtTheEnd(Tagger):
    def validation_step(self, batch, batch_idx):
        self.outputs = self(batch[0])

    def on_validation_epoch_end(self):
        self.log("val_loss", self.outputs.mean())


class Skipping(Tagger):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) if batch_idx != 1 else None


class Explained(Tagger):
    def __init__(self):
        super().__init__()
        self.r2 = R2Score()

    def validation_step(self, batch, batch_idx):
        outputs = self(batch[0])
        self.r2.update(outputs, batch[0])
        self.log("val_r2", self.r2)
        return cross_entropy(outputs, batch[1])


class Ranked(Tagger):
    def __init__(self):
        super().__init__()
        self.f1 = MulticlassAUROC(3)


class Averaged(Tagger):
    def __init__(self):
        super().__init__()
        self.of_training, self.of_validation = MeanMetric(), MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.of_training(loss)
        self.log("train/loss", self.of_training)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = cross_entropy(self(batch[0]), batch[1])
        self.of_validation(loss, weight=len(batch[1]))
        self.log("val/loss", self.of_validation)
        return loss


class Sometimes(Tagger):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            self.log("rare", 1.0)
        return super().training_step(batch, batch_idx)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("lightning"), MODELS)


def events(number: int = 40) -> Batch:
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(number, 3)).astype(np.float32))
    return Batch(x, x.argmax(dim=1), number, number)


def experiment_of(place: Workplace, name: str, **training) -> Experiment:
    task = place.task(name, **{"loss": "own", **training})
    seed_torch(task.seed)
    return make_experiment(task.model, task.training, lambda: events(2))


def judged(experiment: Experiment, batch: Batch) -> dict[str, float]:
    """What validation finds of 40 events in unequal batches."""
    experiment.train(False)
    parts = [slice(0, 7), slice(7, 30), slice(30, 40)]
    with torch.no_grad():
        sums = sum(
            experiment.evaluate(
                Batch(batch.inputs[part], batch.targets[part], part.stop - part.start, 40)
            )
            for part in parts
        )
    return experiment.val_means(sums)


def test_what_steps_log_is_the_mean_or_the_metric_of_all_events(place):
    """From unequal batches; F1 against torchmetrics on all events at once."""
    experiment, batch = experiment_of(place, "Tagger"), events()
    assert experiment.measured == [
        *("loss", "train_loss", "annealing"),
        *("val_loss", "val_acc", "val_f1"),
    ]
    found = judged(experiment, batch)
    with torch.no_grad():
        outputs = experiment.served("model")(batch.inputs)
    f1 = sys.modules["torchmetrics.classification"].MulticlassF1Score(3)
    right = (outputs.argmax(dim=1) == batch.targets).float().mean()
    assert found["loss"] == pytest.approx(cross_entropy(outputs, batch.targets).item(), rel=1e-5)
    assert found["acc"] == pytest.approx(right.item())
    assert found["f1"] == pytest.approx(f1(outputs, batch.targets).item())


def test_what_is_logged_is_summed_or_weighted_as_asked(place):
    experiment, batch = experiment_of(place, "Ways"), events()
    assert experiment.measured[3:] == ["val_loss", "val_right", "val_high"]
    found = judged(experiment, batch)
    with torch.no_grad():
        outputs = experiment.served("model")(batch.inputs)
    assert found["loss"] == pytest.approx(cross_entropy(outputs, batch.targets).item(), rel=1e-5)
    assert found["right"] == (outputs.argmax(dim=1) == batch.targets).sum().item()
    assert found["high"] == pytest.approx(batch.inputs[batch.inputs > 0].mean().item())


def test_what_cannot_be_added_up_over_ranks_is_refused(place):
    task = place.task("Ways", {"how": "max"}, loss="own")
    with pytest.raises(N3LOError, match="'val/right' is logged with reduce_fx = 'max', and what"):
        make_experiment(task.model, task.training, lambda: events(2))


def test_states_of_a_metric_may_take_their_shape_from_the_first_update(place):
    """R2 of three columns, whose states begin as single numbers; against scikit-learn."""
    experiment, batch = experiment_of(place, "Explained"), events()
    found = judged(experiment, batch)["r2"]
    with torch.no_grad():
        outputs = experiment.served("model")(batch.inputs)
    assert found == pytest.approx(r2_score(batch.inputs, outputs), rel=1e-5)


def test_a_metric_may_have_seen_the_loss_of_a_step(place):
    """With its graph, of which no copy can be made; as "val/loss" it is what is judged by."""
    experiment, batch = experiment_of(place, "Averaged"), events()
    (update,) = experiment.updates(experiment.networks, batch)
    copy.deepcopy(experiment.networks["model"])
    assert experiment.means(update.sums)["train/loss"] == pytest.approx(update.loss.item())
    update.loss.backward()
    with torch.no_grad():
        expected = cross_entropy(experiment.served("model").eval()(batch.inputs), batch.targets)
    assert judged(experiment, batch) == {"loss": pytest.approx(expected.item(), rel=1e-5)}


def test_the_check_goes_as_far_as_the_end_of_an_epoch(place, monkeypatch):
    """Of training with its gradients, and of validation."""
    kind, ends = type(experiment_of(place, "Averaged")), []
    for name in ("means", "val_means"):
        monkeypatch.setattr(kind, name, lambda _, sums, name=name: ends.append(name))
    with_gradients = []
    take = kind._take

    def taken(self, step, *args):
        with_gradients.append((step, torch.is_grad_enabled()))
        return take(self, step, *args)

    monkeypatch.setattr(kind, "_take", taken)
    check(place.task("Averaged", loss="own"))
    assert set(ends) == {"means", "val_means"}
    assert with_gradients == [("validation_step", False), ("training_step", True)]


def test_a_module_can_be_copied_and_pickled_with_what_stands_for_its_trainer(place):
    trainer = experiment_of(place, "Annealed", epochs=4).trainer
    for made in (copy.copy(trainer), copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
        assert made.max_epochs == 4
        with pytest.raises(N3LOError, match=r"asks for trainer\.global_step"):
            made.global_step  # noqa: B018


def test_a_module_knows_how_many_epochs_there_are(place):
    experiment = experiment_of(place, "Annealed", epochs=4)
    experiment.epoch = 2
    (update,) = experiment.updates(experiment.networks, events())
    assert experiment.means(update.sums)["progress"] == pytest.approx(1 / 4)


def test_a_step_that_returns_no_loss_is_named(place):
    experiment = experiment_of(place, "Skipping")
    experiment.train(True)
    list(experiment.updates(experiment.networks, events()))
    with pytest.raises(N3LOError, match="'Skipping': training_step returns no loss for batch 1"):
        list(experiment.updates(experiment.networks, events()))


def test_a_step_without_a_number_may_return_its_loss_in_a_table(place):
    experiment, batch = experiment_of(place, "Hooked"), events()
    experiment.train(False)
    with torch.no_grad():
        found = experiment.val_means(experiment.evaluate(batch))
        expected = cross_entropy(experiment.served("model")(batch.inputs), batch.targets)
    assert found == {"loss": pytest.approx(expected.item(), rel=1e-5)}


def test_a_module_knows_the_epoch_and_its_device(place):
    experiment = experiment_of(place, "Tagger")
    experiment.epoch = 3
    (update,) = experiment.updates(experiment.networks, events())
    found = experiment.means(update.sums)
    assert found["annealing"] == pytest.approx(0.2)
    experiment.networks["model"].to("meta")
    assert experiment.served("model").device.type == "meta"


def test_a_killed_training_ends_with_the_same_bits_and_can_be_used(place, tmp_path):
    task = place.task("Tagger", loss="own")
    whole, killed = place.train("whole", task), place.train("killed", task, kill_after=2)
    assert_same_bits(whole, killed)
    assert last_row(whole)["epoch"] == 3
    assert last_row(whole)["annealing"] == last_row(killed)["annealing"] == pytest.approx(0.2)

    _, experiment = load_trained(whole, CPU)
    own = type(experiment.served("model"))()
    own.load_state_dict(weights(whole))  # the names are the user's own
    x = events().inputs
    assert torch.equal(own.eval()(x), experiment.served("model")(x))
    given = predict(whole, [write_h5(tmp_path / "new.h5", x=x.numpy())])
    torch.testing.assert_close(torch.from_numpy(given["output"]), own(x))
    assert export(whole, tmp_path / "net.pt2", None) < 1e-5


@pytest.mark.mpi
def test_two_ranks_train_as_one(place):
    """All-reduce as one rank that reads in two lanes; a master with one worker as plain SGD."""
    two = {"num_workers": 2}
    ways = {
        "horovod": {"strategy": "allreduce", "backend": "horovod", "layout": two},
        "ddp": {"strategy": "allreduce", "backend": "ddp", "layout": two},
        "sharded": {"strategy": "sharded", "layout": {"ranks_per_worker": 2}},
        "downpour": {"strategy": "downpour"},
    }
    args = {"dropout": 0.0}
    paths = [
        write_task(place.folder / way, place.task("Tagger", args, loss="own", **choices))
        for way, choices in ways.items()
    ]
    train_all(2, *paths)
    for lanes, names in ((2, ("horovod", "ddp", "sharded")), (1, ("downpour",))):
        alone = place.train(f"alone-{lanes}", place.task("Tagger", args, loss="own", lanes=lanes))
        for name in names:
            found = weights(place.folder / name)
            for key, value in weights(alone).items():
                torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)
            row = last_row(place.folder / name)
            assert row["val_f1"] == pytest.approx(last_row(alone)["val_f1"])


@pytest.mark.parametrize(("name", "training", "message"), [
    ("Tagger", {"loss": "mse"}, "'Tagger' is a LightningModule, which brings its loss"),
    ("Tagger", {"metrics": ["accuracy"]}, "'Tagger' logs what is measured; leave it out"),
    ("Tagger", {"strategy": "pipeline"}, "is called for its steps; use 'allreduce' or 'sharded'"),
    ("Manual", {}, "has automatic_optimization = False and moves its weights itself"),
    ("Unjudged", {}, "model 'Unjudged' has no validation_step"),
    ("Asking", {}, r"model 'Asking' asks for trainer.global_step \(models.py line \d+\), and N3LO "
     "has no Trainer; use self.current_epoch and batch_idx"),
    ("Twice", {}, "logs 'val_acc' and another of that column, as 'acc', .*; log val_acc once"),
    ("Late", {}, r"has no attribute 'head' \(models.py line \d+\); not called, as .*: setup$"),
    ("AtTheEnd", {}, "'AtTheEnd': validation_step neither returns a loss nor logs 'val_loss'; not "
     "called, as there is no Trainer: on_validation_epoch_end"),
    ("Ranked", {}, "is logged as a MulticlassAUROC, which cannot be added up"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torchmetrics, about AUROC
def test_what_cannot_be_had_without_a_trainer_is_one_line(place, name, training, message):
    with pytest.raises(N3LOError, match=message) as error:
        experiment_of(place, name, **training)
    assert "\n" not in str(error.value)


def test_what_is_logged_now_and_then_is_refused_in_one_line(place):
    experiment = experiment_of(place, "Sometimes")
    experiment.train(True)
    list(experiment.updates(experiment.networks, events()))
    with pytest.raises(N3LOError, match="logs 'rare', and did not for the first batch"):
        list(experiment.updates(experiment.networks, events()))


def test_the_check_says_what_is_not_used(place):
    report = check(place.task("Hooked", loss="own"))
    assert report["measured"] == ["loss", "train_loss", "annealing", "val_loss"]
    assert report["warnings"] == [
        "configure_optimizers (adam, lr = 0.02) is not used: training.optimizer is (sgd, lr = 0.1)",
        "not called, as there is no Trainer: on_train_epoch_end",
    ]
