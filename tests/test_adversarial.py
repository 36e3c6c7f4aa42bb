"""Networks that train against each other: as plain PyTorch does it, under every strategy."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from central_helpers import Trained
from parallel_helpers import Launches
from torch import nn
from training_helpers import make_task, without_clock, write_h5

from apps.adversarial import Adversarial, Adversaries
from apps.check import check
from apps.contract import N3LOError, Start, Training, TrainTask
from apps.data import Batch, Preview
from apps.experiment import Supervised, make_experiment
from apps.strategies.local import Local

pytestmark = pytest.mark.mpi


class TinyGan(Adversaries):
    """Points in the plane, of noise that comes with the data; the critic moves twice.

    Of least squares (Mao et al. 2017, arXiv:1611.04076), with -1, 1 and 0, which come to rest.
    """

    turns = ("critic", "critic", "generator")
    metrics = ("real_score",)
    verdicts = ("mean_error",)
    judged = 4

    def __init__(self, width: int = 8, norm: bool = False) -> None:
        # Adam would make steps of what rounding leaves of the gradient of a bias before a norm.
        norms = [nn.BatchNorm1d(width)] if norm else []
        self.networks = {
            "critic": nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1)),
            "generator": nn.Sequential(
                nn.Linear(3, width, bias=not norm), *norms, nn.Tanh(), nn.Linear(width, 2)
            ),
        }

    def loss(self, turn: int, networks: Any, inputs: Any, targets: Any) -> Any:
        points, noise = inputs
        if turn == 0:
            scores = networks["critic"](points)
            return (scores - 1).square().mean(), {"real_score": scores.mean()}
        made = networks["generator"](noise)
        scores = networks["critic"](made)
        return (scores + (turn == 1)).square().mean(), {}

    def judge(self, inputs: Any, targets: Any) -> torch.Tensor:
        points, noise = inputs
        made = self.networks["generator"](noise)
        return torch.cat([points.double().sum(dim=0), made.double().sum(dim=0)])

    def verdict(self, total: torch.Tensor) -> dict[str, float]:
        real, made = total.view(2, 2)
        return {"mean_error": ((made - real).abs().sum() / real.abs().sum()).item()}


RATES = {"critic": {"lr": 0.05}, "generator": {"name": "adam", "lr": 0.02}}
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9}


def points_h5(path: Path, events: int = 96) -> Path:
    rng = np.random.default_rng(5)
    points = (rng.normal(size=(events, 2)) * 0.3 + [2.0, -1.5]).astype(np.float32)
    noise = rng.normal(size=(events, 3)).astype(np.float32)
    return write_h5(path, 16, points=points, noise=noise, y=np.zeros(events, np.float32))


def gan_task(file: Path, model: type = TinyGan, **sections: Any) -> TrainTask:
    source = {"source": f"{Path(__file__)}:{model.__name__}", "args": sections.pop("args", {})}
    training = {
        "loss": "own", "select": "last", "batch_size": 8, "optimizer": SGD, "optimizers": RATES,
        **sections.pop("training", {}),
    }  # fmt: skip
    data = {"inputs": ["points", "noise"], "targets": "y"}
    objective = {"metric": "val_mean_error", "goal": "min"}
    return make_task(
        [file], model=source, data=data, training=training, objective=objective, **sections
    )


# -- one rank --------------------------------------------------------------------------------------


def batch_of(events: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(events, size, generator=generator) for size in (2, 3)]
    return Batch(inputs, torch.zeros(events), events, events)


def tiny(**settings: Any) -> Adversarial:
    torch.manual_seed(3)
    return Adversarial(TinyGan(), Training(loss="own", optimizer=SGD, **settings))


def local(experiment: Adversarial, **settings: Any) -> Local:
    from types import SimpleNamespace

    cpu = torch.device("cpu")
    alone = SimpleNamespace(num_ranks=1, device=cpu, devices=[cpu])
    training = Training(loss="own", optimizer=SGD, **settings)
    return Local(experiment, alone, training, Preview(batch_of, 3, 6))


def test_steps_are_those_of_plain_pytorch_with_an_optimizer_for_each_network():
    torch.manual_seed(3)
    networks = TinyGan().networks
    critic, generator = networks.values()
    optimizers = [
        torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.9),
        torch.optim.Adam(generator.parameters(), lr=0.02),
    ]
    points, noise = batch_of().inputs
    for _ in range(3):
        for loss, optimizer in (
            (lambda: (critic(points) - 1).square().mean(), optimizers[0]),
            (lambda: (critic(generator(noise)) + 1).square().mean(), optimizers[0]),
            (lambda: critic(generator(noise)).square().mean(), optimizers[1]),
        ):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
    experiment = tiny(optimizers=RATES)
    strategy = local(experiment, optimizers=RATES)
    strategy.train([batch_of()] * 3)
    for name, network in networks.items():
        found = experiment.networks[name].state_dict()
        for key, value in network.state_dict().items():
            torch.testing.assert_close(found[key], value)


def test_only_the_network_that_moves_gathers_a_gradient():
    experiment = tiny()
    for update in experiment.updates(experiment.networks, batch_of()):
        update.loss.backward()
        for name, network in experiment.networks.items():
            gradients = [each.grad is not None for each in network.parameters()]
            assert gradients == [name == update.network] * len(gradients)
            network.zero_grad()
            assert all(each.requires_grad for each in network.parameters())


def test_a_schedule_per_update_ends_with_the_training_of_each_network():
    """The critic moves twice in a step, and the generator once."""
    settings = {
        "epochs": 2, "schedule_per": "update", "scheduler": {"name": "cosine_annealing_lr"},
    }  # fmt: skip
    experiment = tiny(**settings)
    strategy = local(experiment, **settings)
    rates = []
    for _ in range(2):
        strategy.train([batch_of()] * 3)
        rates.append([each.param_groups[0]["lr"] for each in strategy.optimizers.values()])
    assert rates == [pytest.approx([0.05, 0.05]), pytest.approx([0.0, 0.0], abs=1e-9)]


def test_losses_are_means_over_events_and_turns():
    """Of two batches of 2 and 6 events, as of one with all."""
    experiment, whole = tiny(), batch_of(8)
    parts = [
        Batch([each[rows] for each in whole.inputs], None, number, 8)
        for rows, number in ((slice(0, 2), 2), (slice(2, 8), 6))
    ]
    sums = torch.stack([experiment.evaluate(part) for part in parts]).sum(dim=0)
    found = experiment.val_means(sums)
    critic, generator = experiment.networks.values()
    points, noise = whole.inputs
    of_real, of_made = critic(points), critic(generator(noise))
    expected = {
        "real_score": of_real.mean(),
        "critic_loss": ((of_real - 1).square().mean() + (of_made + 1).square().mean()) / 2,
        "generator_loss": of_made.square().mean(),
        "mean_error": (generator(noise).sum(dim=0) - points.sum(dim=0)).abs().sum()
        / points.sum(dim=0).abs().sum(),
    }
    expected["loss"] = expected["critic_loss"] + expected["generator_loss"]
    assert found == pytest.approx({key: value.item() for key, value in expected.items()})


class Alone(TinyGan):
    """Its generator never moves, and has no loss."""

    turns = ("critic", "critic")


class Silent(TinyGan):
    metrics = ("real_score", "fake_score")


class Talking(TinyGan):
    metrics = ()


class Nobody(TinyGan):
    turns = ("critic", "forger")


@pytest.mark.parametrize(
    ("model", "sections", "line"),
    [
        (Nobody, {}, "model 'Nobody': turns = ['critic', 'forger'], but the networks are critic, "
         "generator"),
        (Silent, {}, "model 'Silent' fails on the first batch: metrics has 'fake_score', which no "
         "turn gives; inputs are points (B, 2), noise (B, 3), targets are (B,)"),
        (Talking, {}, "model 'Talking' fails on the first batch: the loss gives 'real_score', "
         "which is not in metrics; inputs are points (B, 2), noise (B, 3), targets are (B,)"),
        (TinyGan, {"training": {"loss": "mse"}}, "training.loss: 'mse', but 'TinyGan' brings its "
         "losses; set it to 'own'"),
        (TinyGan, {"training": {"metrics": ["accuracy"]}}, "training.metrics: 'TinyGan' brings its "
         "metrics; leave it out"),
        (TinyGan, {"training": {"optimizers": {"forger": {"lr": 1.0}}}}, "training.optimizers: "
         "there is no network 'forger', only critic, generator"),
        (TinyGan, {"training": {"strategy": "pipeline"}, "layout": {"ranks_per_worker": 2}},
         "training.strategy: 'pipeline' divides one network, and 'TinyGan' has several; use "
         "'sharded' or 'allreduce'"),
        (TinyGan, {"training": {"strategy": "tensor"}, "layout": {"ranks_per_worker": 2}},
         "training.strategy: 'tensor' divides one network, and 'TinyGan' has several; use "
         "'sharded' or 'allreduce'"),
        (TinyGan, {"layout": {"gpus_per_rank": 2}},
         "layout.gpus_per_rank: several GPUs divide one network, and 'TinyGan' has several; use "
         "'sharded' or 'allreduce' with one GPU for each rank"),
        (TinyGan, {"objective": {"metric": "val_accuracy"}}, "objective.metric: there is no "
         "'val_accuracy', only loss, critic_loss, generator_loss, real_score, val_loss, "
         "val_critic_loss, val_generator_loss, val_real_score, val_mean_error"),
    ],
    ids=lambda value: "",
)  # fmt: skip
def test_what_does_not_fit_is_said_before_a_job(tmp_path, model, sections, line):
    file = points_h5(tmp_path / "points.h5")
    objective = sections.pop("objective", None)
    task = gan_task(file, model, **sections)
    if objective:
        task = make_task([file], **{**vars_of(task), "objective": objective})
    with pytest.raises(N3LOError, match=f"^{re.escape(line)}$"):
        check(task)


def test_a_network_that_never_moves_has_no_loss():
    torch.manual_seed(3)
    experiment = Adversarial(Alone(), Training(loss="own", optimizer=SGD))
    assert "generator_loss" not in experiment.measured
    found = experiment.val_means(experiment.evaluate(batch_of()))
    assert all(math.isfinite(value) for value in found.values())


def vars_of(task: TrainTask) -> dict[str, Any]:
    from dataclasses import asdict

    content = asdict(task)
    return {name: content[name] for name in ("model", "data", "training")}


def test_a_module_is_supervised_and_what_is_neither_is_named(tmp_path):
    task = gan_task(points_h5(tmp_path / "points.h5"))
    assert isinstance(make_experiment(task.model, task.training), Adversarial)
    plain = make_task([tmp_path / "a.h5"])
    assert isinstance(make_experiment(plain.model, plain.training), Supervised)
    task = make_task([tmp_path / "a.h5"], model={"source": "fractions:Fraction", "args": {}})
    with pytest.raises(N3LOError, match=r"gives a Fraction, not a torch\.nn\.Module, nor apps\."):
        make_experiment(task.model, task.training)


# -- all strategies --------------------------------------------------------------------------------

SMALL_UNITS = {"unit_parameters": 10}
WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "local": ("1", {}, {"lanes": 2}),
    "horovod": ("2", {"num_workers": 2}, {"strategy": "allreduce", "backend": "horovod"}),
    "ddp": ("2", {"num_workers": 2}, {"strategy": "allreduce", "backend": "ddp"}),
    "sharded": ("2", {"ranks_per_worker": 2}, {"strategy": "sharded", "split": SMALL_UNITS}),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate": 2, "clip_norm": 0.5},
    "sync norm": {"sync_batchnorm": True},
    "bf16": {"precision": "bf16", "schedule_per": "update", "scheduler": {"name": "linear_lr"}},
}
MESSAGES, BATCH = {"transport": "messages"}, {"per": "batch"}
SLOW = {"optimizer": {"name": "sgd", "lr": 0.05}, "optimizers": {"generator": RATES["generator"]}}
GEM = {"strategy": "gem", "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
       "optimizers": {"generator": {"lr": 0.1}}}  # fmt: skip
CENTRAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "downpour": ({"num_workers": 2}, {"strategy": "downpour"}),
    "downpour per batch": ({"num_workers": 2}, {"strategy": "downpour", "exchange": BATCH}),
    "downpour synchronous": (
        {"num_workers": 2}, {"strategy": "downpour", "exchange": {"synchronous": True}}
    ),
    "downpour overlap": (
        {"num_workers": 2}, {"strategy": "downpour", "exchange": {"overlap": True}}
    ),
    "downpour window": (
        {"num_workers": 3}, {"strategy": "downpour", "exchange": {"transport": "window"}}
    ),
    "downpour two masters": ({"num_workers": 1, "num_masters": 2}, {"strategy": "downpour"}),
    "easgd": ({"num_workers": 2}, {"strategy": "easgd", "exchange": {"elastic_force": 0.5}}),
    "easgd per batch": ({"num_workers": 2}, {"strategy": "easgd", "exchange": BATCH}),
    "easgd window": (
        {"num_workers": 3}, {"strategy": "easgd", "exchange": {"transport": "window"}}
    ),
    "gem": ({"num_workers": 2}, GEM),
    "gem per batch": ({"num_workers": 2}, {**GEM, "exchange": BATCH}),
    "gem sub-master": ({"num_workers": 1, "sub_masters": [1]}, GEM),
}  # fmt: skip
CUT = ["local plain", "horovod plain", "ddp plain", "sharded plain", "ddp accumulate"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Launches:
    """Each launch begins when one of its trainings is asked for."""
    after = {"1 again": ["1"], "2 again": ["2"]}
    launches = Launches(tmp_path_factory.mktemp("adversarial") / "tasks", after)
    file = points_h5(launches.root.parent / "points.h5")
    for way, (group, layout, choices) in WAYS.items():
        for setting, settings in SETTINGS.items():
            args = {"norm": "norm" in setting}
            sync = {"sync_batchnorm": False} if way == "local" and "norm" in setting else {}
            training = {"epochs": 3, **settings, **choices, **sync}
            task = gan_task(file, args=args, training=training, layout=layout)
            launches.add(group, f"{way} {setting}", task)
    for name, (layout, choices) in CENTRAL.items():
        task = gan_task(file, training={"epochs": 6, **SLOW, **choices}, layout=layout)
        launches.add("3", name, task)
    one = {"strategy": "downpour"}
    launches.add("2", "one worker", gan_task(file, training={**one, "epochs": 3}, layout={}))
    launches.add("1", "one rank", gan_task(file, training={"epochs": 3}, layout={}))
    # One that goes on from another, with another learning rate for one of the networks.
    first = replace(gan_task(file, training={"epochs": 2}), keep_state=True)
    launches.add("1", "two", first)
    start = Start(key=first.key(), folder=str(launches.root / "two"))
    for name, rates in (("three", RATES), ("three faster", {**RATES, "critic": {"lr": 0.1}})):
        task = gan_task(file, training={"epochs": 3, "optimizers": rates})
        launches.add("1 again", name, replace(task, start=start))
    for name in CUT:
        launches.again(name, f"cut {name}", f"{launches.group_of(name)} again")
    return launches


def assert_same_training(one: Trained, other: Trained, tolerance: float = 1e-4) -> None:
    for row, expected in zip(one.rows, other.rows, strict=True):
        for name in ("loss", "critic_loss", "generator_loss", "val_loss", "val_mean_error"):
            assert row[name] == pytest.approx(expected[name], rel=tolerance), name
    for network, values in other.weights.items():
        for name, value in values.items():
            found = one.weights[network][name]
            torch.testing.assert_close(found, value, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("setting", ["plain", "accumulate", "sync norm"])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "local"])
def test_two_ranks_train_as_one_rank_with_the_doubled_batch(trained, way, setting):
    assert_same_training(trained[f"{way} {setting}"], trained[f"local {setting}"])


def test_a_master_and_one_worker_train_as_one_rank(trained):
    """The networks, each with its optimizer, are parts of one vector there."""
    assert_same_training(trained["one worker"], trained["one rank"])
    for state in trained["one worker"].weights.values():
        for value in state.values():  # and not in the file of weights
            assert value.untyped_storage().nbytes() == value.nbytes


@pytest.mark.parametrize("name", [*(f"{way} bf16" for way in WAYS), *CENTRAL])
def test_the_generator_learns_where_the_points_are(trained, name):
    rows = trained[name].rows
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert min(row["val_mean_error"] for row in rows) < 0.6  # 1.0 for a generator of zeros


@pytest.mark.parametrize("name", CUT)
def test_a_training_that_was_cut_ends_as_one_that_was_not(trained, name):
    whole, other = trained[name], trained[f"cut {name}"]
    assert without_clock(other.rows) == without_clock(whole.rows)
    assert other.paths.weights.read_bytes() == whole.paths.weights.read_bytes()


def test_a_training_goes_on_with_the_moments_of_each_network(trained):
    whole, rest, faster = (trained[name] for name in ("one rank", "three", "three faster"))
    assert without_clock(rest.rows) == without_clock(whole.rows[2:])
    assert rest.paths.weights.read_bytes() == whole.paths.weights.read_bytes()
    assert faster.rows[0]["lr"] == 0.1  # the critic's
    assert faster.rows[0]["loss"] != rest.rows[0]["loss"]


def test_the_figure_of_merit_is_the_verdict_and_the_weights_are_those_of_all_networks(trained):
    training = trained["horovod plain"]
    assert training.result.fom == training.rows[-1]["val_mean_error"]
    networks = TinyGan().networks
    assert list(training.weights) == list(networks)
    for name, network in networks.items():
        network.load_state_dict(training.weights[name])
    assert training.result.num_parameters == 8 * 3 + 9 + 8 * 4 + 18
