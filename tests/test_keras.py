"""Models of Keras 3 on its PyTorch back end."""

from __future__ import annotations

import dataclasses
import re
import sys

import numpy as np
import pytest
import torch
from framework_helpers import Workplace, assert_same_bits, last_row, weights
from training_helpers import train_all, write_h5, write_task

from apps import draft, frameworks
from apps.check import check
from apps.contract import Model, N3LOError
from apps.data import Batch
from apps.experiment import Experiment, build_model, make_experiment
from apps.export import export
from apps.predict import predict
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


class Testing(Own):
    def test_step(self, data):
        return {"loss": 0.0}


def wrong(targets, outputs):
    return ops.mean(ops.cast(ops.argmax(outputs, -1) != ops.cast(targets, "int64"), "float32"))


class OwnMetrics(Own):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {"wrong": wrong(y, y_pred)}


class Wrong(keras.metrics.Metric):
    def __init__(self, name="wrong"):
        super().__init__(name=name)
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(wrong(y_true, y_pred) * len(y_true))

    def result(self):
        return self.total


class Largest(Wrong):
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign(ops.maximum(self.total, ops.max(ops.abs(y_pred))))


class FromOne(Wrong):
    def reset_state(self):
        self.total.assign(1.0)


class OwnMetricsAlone(Own):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {}


class Adding(Own):
    def call(self, x):
        self.add_loss(ops.mean(ops.sum(x**2, axis=-1)))
        return self.dense(x)


class Drawing(Own):
    def call(self, x):
        return self.dense(x + keras.random.normal(ops.shape(x)))


def adding():
    return compile_for(Adding(), metrics=["accuracy"])


def active():
    dense = layers.Dense(3, activity_regularizer="l2")
    return compile_for(keras.Sequential([dense]))


def drawing():
    return compile_for(Drawing(), metrics=["accuracy"])


def own_metrics_alone():
    return compile_for(OwnMetricsAlone(), metrics=["accuracy"])


def bounded(nested, end=None):
    last = layers.Dense(1, end, kernel_initializer="zeros", bias_initializer="ones")
    model = keras.Sequential([last])
    if nested:
        x = keras.Input((3,))
        model = keras.Model(x, model(x))
    model.compile(loss=keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def moved_by(optimizer, args):
    if "learning_rate" not in args:
        args["learning_rate"] = keras.optimizers.schedules.PiecewiseConstantDecay([10], [0.1, 1e-3])
    return compile_for(Own(), optimizer=getattr(keras.optimizers, optimizer)(**args))


KINDS = {"wrong": Wrong, "largest": Largest, "from_one": FromOne}


def judged(kind):
    return compile_for(Own(), metrics=[KINDS[kind](kind)])


def own_metrics():
    return compile_for(OwnMetrics())


def testing():
    return compile_for(Testing())


def compile_for(model, reduction="sum_over_batch_size", **settings):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    model.compile(loss=loss, **settings)
    return model


def summed():
    return compile_for(Own(), "sum")


def clipped():
    return compile_for(Own(), optimizer=keras.optimizers.Adam(1e-5, clipnorm=1.0))


def scheduled():
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 100, 0.9)
    return compile_for(Own(), optimizer=keras.optimizers.SGD(rate, momentum=0.9))


def ending(end, from_logits):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits)
    model = keras.Sequential([layers.Dense(3, activation=end)])
    model.compile(loss=loss)
    return model


def tower(name):
    x = keras.Input((3,))
    return keras.Model(x, layers.Dense(4, name="hidden")(x), name=name)


def by_name(own_loss):
    model = keras.Sequential([layers.Dense(3, activation="softmax")])
    model.compile(loss=own_loss)
    return model


def towers():
    x = keras.Input((3,))
    both = layers.Concatenate()([tower("a")(x), tower("b")(x)])
    return compile_for(keras.Model(x, layers.Dense(3)(both)))


class Twice(layers.Layer):
    def build(self, shape):
        self.one = self.add_weight(shape=(shape[-1], 3), name="w")
        self.other = self.add_weight(shape=(shape[-1], 3), name="w")

    def call(self, x):
        return x @ self.one + ops.tanh(x @ self.other)


def twice():
    return compile_for(keras.Sequential([Twice()]))


def constrained():
    short = keras.constraints.MaxNorm(0.01)
    dense = layers.Dense(3, kernel_constraint="non_neg", bias_constraint=short)
    return compile_for(keras.Sequential([dense]))


def masked():
    x = keras.Input((None,), dtype="int64")
    steps = layers.Embedding(5, 4, mask_zero=True)(x)
    return compile_for(keras.Model(x, layers.Dense(3)(steps)), metrics=["accuracy"])
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
    assert experiment.inspect(several) == []  # each loss is measured as a metric is


def test_a_model_that_is_not_compiled_has_the_loss_of_the_study_and_its_regularisation(place):
    batch = events(5)
    experiment = experiment_of(place, "Own", loss="cross_entropy", metrics=["accuracy"])
    (update,) = experiment.updates(experiment.networks, batch)
    kernel = next(each for each in experiment.networks["model"].parameters() if each.ndim == 2)
    outputs = experiment.networks["model"](batch.inputs)
    expected = torch.nn.functional.cross_entropy(outputs, batch.targets)
    assert update.loss.item() == pytest.approx((expected + 0.1 * kernel.square().sum()).item())


def test_weights_of_events_weigh_the_regularisation_too(place):
    batch = dataclasses.replace(events(5), weights=torch.tensor([2.0, -1.0, 0.5, 3.0, 1.0]))
    experiment = experiment_of(place, "Own", loss="cross_entropy")
    experiment.check_weights()
    kernel = next(each for each in experiment.networks["model"].parameters() if each.ndim == 2)
    outputs = experiment.networks["model"](batch.inputs)
    losses = torch.nn.functional.cross_entropy(outputs, batch.targets, reduction="none")
    each = losses + 0.1 * kernel.square().sum()
    (update,) = experiment.updates(experiment.networks, batch)
    assert update.loss.item() == pytest.approx((batch.weights @ each).item() / 5)
    found = experiment.val_means(experiment.evaluate(batch))["loss"]
    assert found == pytest.approx((batch.weights @ each / batch.weights.sum()).item())
    with pytest.raises(N3LOError, match=r"data.weights: the model brings its losses"):
        experiment_of(place, "compiled", one_hot(events(2))).check_weights()


def test_metrics_of_masked_steps_are_those_of_keras(place):
    x = torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0], [1, 4, 2, 3]])
    batch = Batch(x, torch.tensor([[0, 1, 2, 2], [2, 2, 2, 2], [1, 0, 1, 2]]), 3, 3)
    experiment = experiment_of(place, "masked", batch)
    model = experiment.networks["model"].model
    with torch.no_grad():
        found = experiment.val_means(experiment.evaluate(batch))
    expected = model.evaluate(x.numpy(), batch.targets.numpy(), verbose=0, return_dict=True)
    assert found == pytest.approx({name: float(value) for name, value in expected.items()})
    assert experiment.inspect(batch) == []


def test_a_metric_may_give_its_variable(place):
    experiment = experiment_of(place, "judged", kind="wrong")
    outputs = experiment.networks["model"](events().inputs)
    wrong = (outputs.argmax(dim=1) != events().targets).sum().item()
    assert experiment.val_means(experiment.evaluate(events()))["wrong"] == wrong


@pytest.mark.parametrize("kind", ["largest", "from_one"])
def test_a_metric_whose_variables_are_no_sums_is_refused(place, kind):
    message = f"the metric '{kind}' is .* after two batches, and"
    with pytest.raises(N3LOError, match=message) as error:
        experiment_of(place, "judged", kind=kind).inspect(events())
    assert "\n" not in str(error.value)


# -- variables and random numbers ------------------------------------------------------------------


def test_the_same_seed_gives_the_same_weights_and_names(place):
    first, second = (experiment_of(place, "compiled", one_hot(events(2))) for _ in range(2))
    states = [each.networks["model"].state_dict() for each in (first, second)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize("name", ["plain", "towers", "twice"])
def test_weights_pt_has_all_weights_in_the_order_of_keras(place, name):
    """Also of variables that share a path, as layers of equal names in two submodels do."""
    loss = "cross_entropy" if name == "plain" else "own"
    experiment = experiment_of(place, name, loss=loss)
    network = experiment.networks["model"].eval()
    written = experiment.weights({"model": network.state_dict()})
    with frameworks.new_model():  # as in a program of the user's
        own = getattr(sys.modules["n3lo_model_models"], name)()
        own(torch.zeros(1, 3))
    own.set_weights([each.numpy() for each in written.values()])
    torch.testing.assert_close(own(events().inputs), network(events().inputs))
    network.load_state_dict(experiment.states_of(written)["model"])


def test_the_state_dict_of_keras_which_weights_pt_once_was_still_loads(place):
    experiment = experiment_of(place, "plain", loss="cross_entropy")
    network = experiment.networks["model"]
    old = {key: each + 1 for key, each in network.model.state_dict().items()}
    expected = {key: each + 1 for key, each in network.state_dict().items()}
    network.load_state_dict(experiment.states_of(old)["model"])
    assert all(torch.equal(each, expected[key]) for key, each in network.state_dict().items())


def test_weights_of_another_model_are_told_by_their_names(place):
    folder = place.train("other", place.task("calm", loss="own", epochs=1))
    torch.save({"dense/kernel": torch.zeros(3, 8)}, folder / "weights.pt")
    with pytest.raises(N3LOError, match=r"was trained: Missing key.*dense_1/bias") as error:
        load_trained(folder, CPU)
    assert "\n" not in str(error.value)


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
    own.set_weights([each.numpy() for each in weights(whole).values()])
    torch.testing.assert_close(own(x), expected)

    assert export(whole, tmp_path / "net.pt2", None) < 1e-5


def test_the_predictions_of_a_compiled_model_have_the_accuracy_that_its_training_found(place):
    folder = place.train("predicted", place.task("calm", loss="own", epochs=1))
    given = predict(folder)
    accuracy = (given["output"].argmax(axis=1) == given["target"]).mean()
    assert accuracy == pytest.approx(last_row(folder)["val_accuracy"])


def test_constraints_hold_after_each_update(place):
    found = weights(place.train("constrained", place.task("constrained", loss="own", epochs=1)))
    kernel, bias = found.values()
    assert (kernel >= 0).all()
    assert 0 < bias.norm() <= 0.01 + 1e-6


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
    ("testing", {"loss": "own"}, "has its own test_step, which is not called"),
    ("own_metrics_alone", {"loss": "own"}, r"let it call super\(\)\.compute_metrics"),
    ("own_metrics", {"loss": "own"}, "compute_metrics returns 'wrong', which is not the result of"),
    ("constrained", {"loss": "own", "strategy": "downpour"}, "has the constraint NonNeg"),
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


@pytest.mark.parametrize(("name", "args", "message"), [
    ("compiled", {"optimizer": "adam"}, "the model is compiled with the optimizer Adam(), which is "
     "not used: training.optimizer is (name = 'sgd', lr = 0.1)"),
    ("clipped", {}, "the model is compiled with the optimizer Adam(learning_rate=1e-05, "
     "clipnorm=1), which is not used: training.optimizer is (name = 'sgd', lr = 0.1); see "
     "training.clip_norm"),
    ("scheduled", {}, "the model is compiled with the optimizer SGD(learning_rate=ExponentialDecay,"
     " momentum=0.9), which is not used: training.optimizer is (name = 'sgd', lr = 0.1); see "
     "training.scheduler"),
])  # fmt: skip
def test_the_check_shows_what_compile_says_of_the_optimizer_and_the_study_does_not(
    place, name, args, message
):
    batch = one_hot(events()) if name == "compiled" else events()
    warnings = experiment_of(place, name, batch, **args).inspect(batch)
    assert warnings == [message]


def test_init_is_told_the_optimizer_of_compile(place):
    def told(name):
        return frameworks.compiled_optimizer(experiment_of(place, name).networks["model"].model)

    assert told("calm") is None  # the default of compile
    assert told("clipped") == {"name": "adam", "lr": 1e-5, "eps": 1e-7}
    assert told("scheduled") == {"name": "sgd", "lr": 0.1, "momentum": 0.9}


@pytest.mark.parametrize(("optimizer", "args"), [
    ("Adam", {"learning_rate": 0.01, "beta_1": 0.8}),
    ("Adam", {"learning_rate": 0.01, "amsgrad": True}),
    ("Adam", {"learning_rate": 0.01, "weight_decay": 0.1}),
    ("AdamW", {"learning_rate": 0.05}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("RMSprop", {"learning_rate": 0.01}),
    ("RMSprop", {"learning_rate": 0.01, "rho": 0.99, "momentum": 0.5}),
    ("Nadam", {"learning_rate": 0.01, "weight_decay": 0.5}),
    ("Adamax", {"learning_rate": 0.01}),
    ("Adagrad", {"learning_rate": 0.1}),
    ("Adadelta", {"learning_rate": 10.0}),
    ("Adafactor", {"learning_rate": 0.01}),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of NumPy, about code of Keras
def test_what_init_takes_from_compile_moves_weights_as_keras_does(place, optimizer, args):
    """Five steps of torch with its own defaults for the rest, against the optimizer of Keras."""
    network = experiment_of(place, "moved_by", optimizer=optimizer, args=args).networks["model"]
    model = network.model
    settings = dict(frameworks.compiled_optimizer(model))
    name = settings.pop("name")
    assert name == ("adamw" if args.get("weight_decay") == 0.1 else optimizer.lower())
    (kind,) = (each for key, each in vars(torch.optim).items() if key.lower() == name)
    kernel = model.trainable_variables[0]
    ours = torch.nn.Parameter(kernel.value.detach().clone())
    moving = kind([ours], **settings)
    rng = torch.Generator().manual_seed(1)
    gradients = [torch.randn(ours.shape, generator=rng) + 0.5 for _ in range(5)]
    model.optimizer.build([kernel])
    before = ours.detach().clone()
    for gradient in gradients:
        ours.grad = gradient
        moving.step()
        model.optimizer.apply([gradient], [kernel])
    moved = kernel.value.detach() - before
    torch.testing.assert_close(
        ours.detach() - before, moved, rtol=5e-3, atol=1e-6
    )  # eps is under the root


@pytest.mark.parametrize(("optimizer", "args", "study", "message"), [
    ("AdamW", {"learning_rate": 2e-3}, {"name": "adamw", "lr": 2e-3},
     r"AdamW\(weight_decay=0.004\)"),
    ("AdamW", {"learning_rate": 2e-3}, {"name": "adamw", "lr": 2e-3, "weight_decay": 4e-3}, None),
    ("RMSprop", {"learning_rate": 1e-4}, {"name": "adam", "lr": 1e-4},
     r"RMSprop\(learning_rate=0.0001\), which is not used"),
    ("RMSprop", {"learning_rate": 1e-4}, {"name": "rmsprop", "lr": 1e-4}, r"RMSprop\(rho=0.9\)"),
    ("Adam", {"learning_rate": 0.001}, {"name": "adam", "lr": 0.1}, None),  # the user's word
    ("Adam", {"learning_rate": 1e-4, "weight_decay": 0.1},
     {"name": "adam", "lr": 1e-4, "weight_decay": 0.1}, "its weight_decay is that of 'adamw'$"),
])  # fmt: skip
def test_defaults_of_keras_and_of_torch_are_told_apart(place, optimizer, args, study, message):
    task = place.task(
        "moved_by", {"optimizer": optimizer, "args": args}, loss="own", optimizer=study
    )
    experiment = make_experiment(task.model, task.training, lambda: events(2))
    warnings = experiment.inspect(events())
    assert len(warnings) == (message is not None)
    assert not message or re.search(message, warnings[0])


def test_no_warning_is_left_where_the_study_is_as_init_writes_it(place):
    for optimizer in ("AdamW", "Nadam", "Adadelta", "Adafactor"):
        args = {"optimizer": optimizer, "args": {}}
        model = experiment_of(place, "moved_by", optimizer=optimizer, args={}).networks["model"]
        settings = frameworks.compiled_optimizer(model.model)
        assert settings["lr"] == pytest.approx(0.1)  # the first of the schedule
        task = place.task("moved_by", args, loss="own", optimizer=settings)
        experiment = make_experiment(task.model, task.training, lambda: events(2))
        assert experiment.optimizers()  # which torch takes
        assert all("see training.scheduler" in each for each in experiment.inspect(events()))


def test_init_matches_inputs_and_outputs_by_the_names_of_the_model(place, tmp_path):
    rng = np.random.default_rng(3)
    forms = {"energy": (9,), "other": (9, 3), "b": (9, 2), "a": (9, 3)}
    fields = {name: rng.normal(size=form) for name, form in forms.items()}
    fields["kind"] = rng.integers(0, 3, 9)
    files = [str(write_h5(tmp_path / "events.h5", **fields))]
    trial = draft.own_trial(f"{place.models}:functional", {}, draft.Events(files), (), ())
    inputs, targets = map(draft.as_study, (trial.inputs, trial.targets), trial.keys)
    assert inputs == {"a": "a", "b": "b"}
    assert targets == {"kind": "kind", "energy": "energy"}


def test_init_takes_no_layer_and_no_object_for_what_makes_a_model(tmp_path):
    file = tmp_path / "with_layer.py"
    file.write_text(
        "import keras\nclass Net(keras.Model):\n    pass\nclass Scale(keras.Layer):\n    pass\n"
    )
    assert draft.find_model(str(file), {})[0] == f"{file}:Net"
    file = tmp_path / "made.py"
    file.write_text("import keras\nmodel = keras.Sequential([keras.layers.Dense(3)])\n")
    with pytest.raises(N3LOError, match="'model' is a model, and each training makes one anew: ma"):
        draft.find_model(str(file), {})
    with pytest.raises(N3LOError, match="is a model already; name its class, or a"):
        build_model(Model(source=f"{file}:model", args={}))


def test_a_loss_that_is_no_mean_over_the_events_is_warned_of(place):
    (warning,) = experiment_of(place, "summed").inspect(events())
    assert "a loss must be a mean over the events" in warning


@pytest.mark.parametrize("name", ["adding", "active", "drawing"])
def test_losses_of_layers_and_random_outputs_are_no_sign_of_a_loss_that_is_no_mean(place, name):
    assert experiment_of(place, name).inspect(events()) == []


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("end", [None, "sigmoid"])
def test_logits_that_happen_to_be_from_0_to_1_are_no_probabilities(place, nested, end):
    batch = events()
    batch = dataclasses.replace(batch, targets=(batch.targets > 0).float()[:, None])
    experiment = experiment_of(place, "bounded", batch, nested=nested, end=end)
    assert len(experiment.inspect(batch)) == (end is not None)


@pytest.mark.parametrize(("end", "from_logits", "message"), [
    (None, False, "takes probabilities, and the model gives other numbers"),
    ("softmax", True, "takes logits (from_logits=True), and the model gives numbers from 0 to 1"),
    (None, True, None),
    ("softmax", False, None),
])  # fmt: skip
def test_a_loss_of_keras_and_the_last_layer_must_both_mean_logits_or_not(
    place, end, from_logits, message
):
    experiment = experiment_of(place, "ending", end=end, from_logits=from_logits)
    warnings = experiment.inspect(events())
    assert [message in each for each in warnings] == [True] * (message is not None)


def test_settings_of_keras_that_the_study_does_not_hold_are_refused(place, monkeypatch, tmp_path):
    (tmp_path / "keras.json").write_text('{"floatx": "float32", "image_data_format": "x"}')
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    keras = sys.modules["keras"]
    monkeypatch.setattr(keras.config, "image_data_format", lambda: "x")
    with pytest.raises(N3LOError, match=r"keras\.json: image_data_format = 'x' would change"):
        experiment_of(place, "calm")


@pytest.mark.parametrize(("loss", "hot", "way_out"), [
    ("sparse_categorical_crossentropy", True, "one-hot .* with categorical_c.*class_number"),
    ("categorical_crossentropy", False, "sparse_categorical_crossentropy"),
])  # fmt: skip
def test_one_hot_targets_and_class_numbers_are_told_apart(place, loss, hot, way_out):
    batch = one_hot(events(2)) if hot else events(2)
    with pytest.raises(N3LOError, match=way_out):
        experiment_of(place, "by_name", batch, own_loss=loss)


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


@pytest.mark.parametrize("library", ["tensorflow", "tf_keras"])
def test_who_imports_keras_from_tensorflow_is_told_to_import_keras(library):
    missing = ModuleNotFoundError(f"No module named '{library}'", name=f"{library}.keras")
    assert frameworks.remedy(missing) == (
        f"{library} is not used: N3LO trains models of Keras 3 on PyTorch; write 'import keras' "
        "and 'from keras import layers' in its place"
    )
