"""Models of Keras 3 on its PyTorch back end."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from framework_helpers import Workplace, assert_same_bits, last_row, weights
from training_helpers import train_all, write_task

from apps import frameworks
from apps.check import check
from apps.contract import N3LOError
from apps.data import Batch
from apps.experiment import Experiment, make_experiment
from apps.export import export
from apps.strategies.base import kept_buffers
from apps.train import seed_torch
from apps.trained import load_trained

CPU = torch.device("cpu")

MODELS = """
import keras
from keras import layers, ops


def plain(width=8, dropout=0.3, end=None):
    model = keras.Sequential([
        layers.Dense(width, activation="relu"), layers.BatchNormalization(),
        layers.Dropout(dropout), layers.Dense(3, activation=end),
    ])
    return model


def compiled(width=8, dropout=0.3, optimizer="rmsprop"):
    model = plain(width, dropout, "softmax")
    metrics = ["accuracy", keras.metrics.AUC(name="auc")]
    model.compile(optimizer, "categorical_crossentropy", metrics=metrics)
    return model


def calm(width=8):
    model = keras.Sequential([layers.Dense(width, activation="relu"), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, metrics=["accuracy"])
    return model


def functional():
    a, b = keras.Input((3,), name="a"), keras.Input((2,), name="b")
    both = layers.Concatenate()([a, b])
    kind, energy = layers.Dense(3, name="kind")(both), layers.Dense(1, name="energy")(both)
    model = keras.Model({"a": a, "b": b}, {"kind": kind, "energy": energy})
    kind_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        loss={"kind": kind_loss, "energy": "mse"}, loss_weights={"kind": 1.0, "energy": 0.5},
        metrics={"kind": ["accuracy"], "energy": ["mae"]},
    )
    return model


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.1))

    def call(self, x):
        return self.dense(x)


class Stepping(Own):
    def train_step(self, data):
        return {}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("keras"), MODELS)


def events(number: int = 40) -> Batch:
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.normal(size=(number, 3)).astype(np.float32))
    return Batch(x, x.argmax(dim=1), number, number)


def experiment_of(place: Workplace, name: str, batch: Batch | None = None, **args) -> Experiment:
    training = {"loss": args.pop("loss", "own"), "metrics": args.pop("metrics", [])}
    task = place.task(name, args, **training)
    seed_torch(task.seed)
    return make_experiment(task.model, task.training, lambda: batch or events(2))


def one_hot(batch: Batch) -> Batch:
    hot = torch.nn.functional.one_hot(batch.targets, 3).float()
    return Batch(batch.inputs, hot, batch.num_events, batch.num_global)


# -- losses and metrics ----------------------------------------------------------------------------


def test_loss_and_metrics_of_compile_are_those_of_keras_on_all_events(place):
    """Added up over unequal batches; against `evaluate` of Keras itself."""
    batch = one_hot(events())
    experiment = experiment_of(place, "compiled", one_hot(events(2)))
    assert experiment.measured[:3] == ["loss", "accuracy", "auc"]
    experiment.train(False)
    parts = [slice(0, 7), slice(7, 30), slice(30, 40)]
    with torch.no_grad():
        sums = sum(
            experiment.evaluate(
                Batch(batch.inputs[part], batch.targets[part], part.stop - part.start, 40)
            )
            for part in parts
        )
    model = experiment.networks["model"].model
    expected = model.evaluate(
        batch.inputs.numpy(), batch.targets.numpy(), verbose=0, return_dict=True
    )
    values = {name: float(value) for name, value in expected.items()}
    assert experiment.val_means(sums) == pytest.approx(values, rel=1e-5)


def test_several_outputs_have_their_losses_weights_and_metrics(place):
    batch = events(10)
    rng = np.random.default_rng(2)
    b, energy = (
        torch.from_numpy(rng.normal(size=(10, size)).astype(np.float32)) for size in (2, 1)
    )
    inputs, targets = {"a": batch.inputs, "b": b}, {"kind": batch.targets, "energy": energy}
    several = Batch(inputs, targets, 10, 10)
    experiment = experiment_of(place, "functional", several)
    experiment.train(False)
    with torch.no_grad():
        found = experiment.val_means(experiment.evaluate(several))
        outputs = experiment.networks["model"](inputs)
    of_kind = torch.nn.functional.cross_entropy(outputs["kind"], targets["kind"]).item()
    of_energy = torch.nn.functional.mse_loss(outputs["energy"], energy).item()
    assert found["loss"] == pytest.approx(of_kind + 0.5 * of_energy, rel=1e-5)
    assert found["kind_loss"] == pytest.approx(of_kind, rel=1e-5)
    assert found["energy_mae"] == pytest.approx((outputs["energy"] - energy).abs().mean().item())


def test_a_model_that_is_not_compiled_has_the_loss_of_the_study_and_its_regularisation(place):
    batch = events(5)
    experiment = experiment_of(place, "Own", loss="cross_entropy", metrics=["accuracy"])
    (update,) = experiment.updates(experiment.networks, batch)
    kernel = next(each for each in experiment.networks["model"].parameters() if each.ndim == 2)
    outputs = experiment.networks["model"](batch.inputs)
    expected = torch.nn.functional.cross_entropy(outputs, batch.targets)
    assert update.loss.item() == pytest.approx((expected + 0.1 * kernel.square().sum()).item())


# -- variables and random numbers ------------------------------------------------------------------


def test_the_same_seed_gives_the_same_weights_and_names(place):
    first, second = (experiment_of(place, "compiled", one_hot(events(2))) for _ in range(2))
    states = [each.networks["model"].state_dict() for each in (first, second)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_moving_statistics_are_averaged_over_ranks_and_seen_by_no_optimizer(place):
    network = experiment_of(place, "plain", loss="cross_entropy").networks["model"]
    names = [name for name, _ in network.named_buffers()]
    assert [name.rpartition("/")[2] for name in names] == ["moving_mean", "moving_variance"]
    assert len(kept_buffers(network)) == 2
    assert all(each.requires_grad for each in network.parameters())
    before = network.get_buffer(names[0]).clone()
    network.train()(events().inputs)
    assert not torch.equal(network.get_buffer(names[0]), before)


def test_dropout_follows_the_seed_of_the_epoch_and_differs_by_rank(place):
    network = experiment_of(place, "plain", loss="cross_entropy").networks["model"].train()
    found = []
    for rank in (0, 1, 0):
        seed_torch(11, 1, rank)
        found.append(torch.stack([network(events().inputs) for _ in range(2)]))
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0][0], found[0][1])


def test_a_model_moves_with_all_that_it_holds(place):
    network = experiment_of(place, "plain", loss="cross_entropy").networks["model"]
    network.double()
    assert {each.value.dtype for each in network.model.weights} == {torch.float64}


# -- trainings -------------------------------------------------------------------------------------


def test_a_killed_training_ends_with_the_same_bits_and_can_be_used(place, tmp_path):
    task = place.task("plain", {"dropout": 0.2}, loss="cross_entropy", metrics=["accuracy"])
    whole, killed = place.train("whole", task), place.train("killed", task, kill_after=2)
    assert_same_bits(whole, killed)
    _, experiment = load_trained(whole, CPU)
    network = experiment.networks["model"]
    x = events().inputs
    expected = network(x)

    with frameworks.new_model():  # as in a program of the user's
        own = sys.modules["n3lo_model_models"].plain()
        own(torch.zeros(1, 3))
    own.load_state_dict(weights(whole))
    torch.testing.assert_close(own(x), expected)

    assert export(whole, tmp_path / "net.pt2", None) < 1e-5


@pytest.mark.mpi
def test_two_ranks_train_as_one(place):
    """All-reduce as one rank that reads in two lanes; a master with one worker as plain SGD."""
    ways = {
        "horovod": {"strategy": "allreduce", "backend": "horovod", "layout": {"num_workers": 2}},
        "ddp": {"strategy": "allreduce", "backend": "ddp", "layout": {"num_workers": 2}},
        "downpour": {"strategy": "downpour"},
    }
    paths = [
        write_task(place.folder / way, place.task("calm", loss="own", **choices))
        for way, choices in ways.items()
    ]
    train_all(2, *paths)
    for lanes, names in ((2, ("horovod", "ddp")), (1, ("downpour",))):
        task = place.task("calm", loss="own", lanes=lanes)
        alone = place.train(f"alone-{lanes}", task)
        expected = weights(alone)
        for name in names:
            found = weights(place.folder / name)
            for key, value in expected.items():
                torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)
            row = last_row(place.folder / name)
            assert row["val_accuracy"] == pytest.approx(last_row(alone)["val_accuracy"])


# -- what is refused, and what is warned of --------------------------------------------------------


@pytest.mark.parametrize(("name", "training", "message"), [
    ("calm", {"loss": "cross_entropy"}, "is compiled with a loss; set loss = 'own'"),
    ("plain", {"loss": "own"}, "'own', but model 'sequential' is not compiled; call compile"),
    ("calm", {"loss": "own", "metrics": ["accuracy"]}, "compiled with its metrics; leave it out"),
    ("Stepping", {"loss": "own"}, "has its own train_step"),
    ("calm", {"loss": "own", "compile": True}, "training.compile: cannot be had for a Keras"),
    ("calm", {"loss": "own", "strategy": "sharded"}, "'sharded' cannot divide a Keras model"),
])  # fmt: skip
def test_what_cannot_be_had_with_keras_is_one_line(place, name, training, message):
    task = place.task(name, **training)
    with pytest.raises(N3LOError, match=message) as error:
        make_experiment(task.model, task.training, lambda: events(2))
    assert "\n" not in str(error.value)


def test_the_check_builds_a_model_on_the_data_and_warns(place):
    report = check(place.task("plain", {"end": "softmax"}))
    assert report["num_parameters"] == 3 * 8 + 8 + 2 * 8 + 8 * 3 + 3
    assert report["warnings"] == [
        "training.loss: 'cross_entropy' takes logits, and the model gives numbers from 0 to 1; "
        "leave out its last softmax, or compile it with the loss of Keras and set loss = 'own'"
    ]


def test_the_optimizer_of_compile_is_not_used_and_the_check_says_so(place):
    experiment = experiment_of(place, "compiled", one_hot(events(2)), optimizer="adam")
    assert experiment.inspect(events()) == [
        "the model is compiled with the optimizer Adam, which is not used: training.optimizer is "
        "(sgd)"
    ]


def test_inputs_of_another_shape_than_the_model_takes_are_one_line(place):
    wrong = Batch({"a": torch.zeros(2, 3)}, torch.zeros(2), 2, 2)
    task = place.task("functional", loss="own")
    with pytest.raises(N3LOError, match="model 'functional' fails on the first batch: ") as error:
        make_experiment(task.model, task.training, lambda: wrong)
    assert "\n" not in str(error.value)


def test_another_back_end_of_keras_is_told_in_one_line(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    missing = ModuleNotFoundError("No module named 'jax'", name="jax")
    assert frameworks.remedy(missing) == (
        "KERAS_BACKEND=jax: N3LO trains Keras models of the back end 'torch'; unset it"
    )
