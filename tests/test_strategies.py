"""One suite for all strategies: however ranks share a training, the arithmetic is one rank's."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_optimizer import LARS, Lamb
from strategy_ranks import model as new_model
from torch import nn
from torch.nn.functional import cross_entropy
from training_helpers import classes_h5, launch, make_task, train_all, write_task

from apps.contract import Layout, N3LOError, Training, from_dict, ranks_of
from apps.strategies.base import kept_buffers
from apps.strategies.sharded import check_parameters, units

pytestmark = pytest.mark.mpi

SMALL_UNITS = {"unit_parameters": 10}
PARTS_OF_3 = {"micro_batches": 3}
GPIPE = {"micro_batches": 4, "schedule": "gpipe"}
TWO_BY_TWO = {"num_workers": 2, "ranks_per_worker": 2}
STEPS = 3

# How ranks share a training: their number, their layout, the choices of [training].
WAYS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "local": (1, {}, {"strategy": "local"}),
    "horovod-1": (1, {}, {"strategy": "allreduce", "backend": "horovod"}),
    "ddp-1": (1, {}, {"strategy": "allreduce", "backend": "ddp"}),
    "sharded-1": (1, {}, {"strategy": "sharded"}),
    "tensor-1": (1, {}, {"strategy": "tensor"}),
    "pipeline-1": (1, {}, {"strategy": "pipeline", "split": {"micro_batches": 3}}),
    "horovod": (2, {"num_workers": 2}, {"strategy": "allreduce", "backend": "horovod"}),
    "ddp": (2, {"num_workers": 2}, {"strategy": "allreduce", "backend": "ddp"}),
    "sharded": (2, {"ranks_per_worker": 2}, {"strategy": "sharded", "split": SMALL_UNITS}),
    "copies": (2, {"num_workers": 2}, {"strategy": "sharded", "split": SMALL_UNITS}),
    "tensor": (2, {"ranks_per_worker": 2}, {"strategy": "tensor"}),
    "tensor copies": (2, {"num_workers": 2}, {"strategy": "tensor"}),
    "pipeline": (2, {"ranks_per_worker": 2}, {"strategy": "pipeline", "split": PARTS_OF_3}),
    "gpipe": (2, {"ranks_per_worker": 2}, {"strategy": "pipeline", "split": GPIPE}),
    "hierarchical": (
        4,
        {"num_workers": 2, "ranks_per_worker": 2},
        {"strategy": "allreduce", "backend": "ddp", "reduction": {"hierarchical": True}},
    ),
    "data x sharded": (4, TWO_BY_TWO, {"strategy": "sharded", "split": SMALL_UNITS}),
    "data x tensor": (4, TWO_BY_TWO, {"strategy": "tensor"}),
    "data x pipeline": (4, TWO_BY_TWO, {"strategy": "pipeline", "split": PARTS_OF_3}),
    "pipeline x tensor": (
        4,
        {"ranks_per_worker": 4, "ranks_per_stage": 2},
        {"strategy": "pipeline", "split": PARTS_OF_3},
    ),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.9}},
    "adam": {"optimizer": {"name": "adam", "lr": 0.01}},
    "clip": {"optimizer": {"name": "sgd", "lr": 0.5}, "clip_norm": 0.05},
    "accumulate": {"optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.9}, "accumulate": 2},
    "lars": {"optimizer": {"name": "lars", "lr": 20.0, "weight_decay": 0.01}},
    "lamb": {"optimizer": {"name": "lamb", "lr": 0.05, "pre_norm": True}},
    "batch_norm": {"optimizer": {"name": "sgd", "lr": 0.5}},
    "sync_batch_norm": {"optimizer": {"name": "sgd", "lr": 0.5}, "sync_batchnorm": True},
    "borrowing": {"optimizer": {"name": "sgd", "lr": 0.5}},
    "weighted": {"optimizer": {"name": "sgd", "lr": 0.5}},
}
SCALES_LAYERS = [way for way in WAYS if "tensor" not in way]  # LARS needs whole layers
OF_TWO = [way for way, (num_ranks, *_) in WAYS.items() if num_ranks <= 2]
NO_PIPELINE = [way for way in WAYS if "pipe" not in way]
OF_SETTING = {
    "sgd": list(WAYS),
    "adam": OF_TWO,
    "clip": list(WAYS),
    "accumulate": NO_PIPELINE,
    "lars": SCALES_LAYERS,
    "lamb": ["local", "horovod", "ddp"],
    "batch_norm": ["horovod", "ddp", "copies"],
    "sync_batch_norm": NO_PIPELINE,
    "borrowing": ["local", "horovod", "ddp", "sharded", "data x sharded"],
    "weighted": list(WAYS),
}
MAKE = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "lars": LARS, "lamb": Lamb}
CASES = [(way, name) for name, ways in OF_SETTING.items() for way in ways]
EXACT = [case for case in CASES if case[1] != "batch_norm"]


def events() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(11, 3, generator=generator), torch.arange(11) % 3


# Of the events, in the cases "weighted": their mean is 1, as in a study.
WEIGHTS = torch.tensor([2.0, -1.0, 0.5, 3.0, 1.0, 0.0, 2.5, -0.5, 1.5, 1.0, 1.0])


def loss_of_all(name: str, model: nn.Module) -> torch.Tensor:
    x, y = events()
    losses = cross_entropy(model(x), y, reduction="none")
    return (losses * WEIGHTS if name == "weighted" else losses).mean()


# Events of each rank, or worker, that reads its own: unequal, as in a real epoch.
PARTS = {1: [11], 2: [6, 5], 4: [3, 3, 3, 2]}


def case_of(way: str, name: str) -> dict[str, Any]:
    _, layout, choices = WAYS[way]
    training = {**choices, **SETTINGS[name]}
    readers = ranks_of(from_dict(Training, training), Layout(**layout)).readers
    tensors = (*events(), WEIGHTS) if name == "weighted" else events()
    batches = list(zip(*(values.split(PARTS[readers]) for values in tensors), strict=True))
    return {
        "training": training, "layout": layout, "name": name, "batches": batches, "steps": STEPS,
    }  # fmt: skip


def run_all(folder: Path, num_ranks: int, cases: list[dict[str, Any]]) -> list[list[dict]]:
    """What each rank holds in the end of each case: one launch for all."""
    torch.save(cases, folder / "cases.pt")
    program = Path(__file__).with_name("strategy_ranks.py")
    done = launch(num_ranks, program, folder / "cases.pt", folder / "out.pt")
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "out.pt")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[tuple[str, str], list[dict]]:
    folder = tmp_path_factory.mktemp("strategies")
    found = {}
    # A strategy a launch: DTensor remembers groups of ranks, which are new in each case.
    together = groupby(sorted(CASES, key=launch_of), key=launch_of)
    for (num_ranks, _), cases in together:
        cases = list(cases)
        results = run_all(folder, num_ranks, [case_of(*case) for case in cases])
        found |= dict(zip(cases, results, strict=True))
    return found


def launch_of(case: tuple[str, str]) -> tuple[int, str]:
    num_ranks, _, choices = WAYS[case[0]]
    return num_ranks, choices["strategy"] if num_ranks > 1 else "all"


def reference(name: str) -> tuple[torch.nn.Module, float]:
    """Plain PyTorch on all events at once: the model, and the sum of its losses."""
    model = new_model(name, seed=0)
    settings = dict(SETTINGS[name]["optimizer"])
    optimizer = MAKE[settings.pop("name")](model.parameters(), **settings)
    total = 0.0
    for _ in range(STEPS):
        loss = loss_of_all(name, model)
        optimizer.zero_grad()
        loss.backward()
        if "clip_norm" in SETTINGS[name]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS[name]["clip_norm"])
        optimizer.step()
        total += loss.item() * 11
    return model, total


def assert_same_weights(found: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_ranks_move_by_the_mean_gradient_of_all_their_events(outcomes, case):
    model, loss = reference(case[1])
    first, *_ = outcomes[case]
    assert_same_weights(first["after"], model)
    total, count = first["total"][:2].tolist()
    assert total / count == pytest.approx(loss / (STEPS * 11), rel=1e-5)


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_validation_gives_the_loss_of_all_events(outcomes, case):
    model, _ = reference(case[1])
    expected = loss_of_all(case[1], model.eval()).item()
    for rank in outcomes[case]:
        total, count = rank["evaluated"][:2].tolist()
        assert total / count == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if WAYS[case[0]][0] > 1], ids=str)
def test_ranks_know_the_same_sums_bit_by_bit(outcomes, case):
    first, *others = outcomes[case]
    for other in others:
        assert torch.equal(first["total"], other["total"])


@pytest.mark.parametrize("case", [case for case in EXACT if case[0] in ("horovod", "ddp")], ids=str)
def test_copies_of_the_weights_are_the_same_bit_by_bit(outcomes, case):
    first, second = outcomes[case]
    for name, value in first["after"].items():
        assert torch.equal(value, second["after"][name]), name


@pytest.mark.parametrize("way", OF_SETTING["batch_norm"])
def test_batch_norm_that_is_not_synchronised_normalises_each_part_apart(outcomes, way):
    model, _ = reference("batch_norm")
    after = outcomes[way, "batch_norm"][0]["after"]
    assert not torch.allclose(after["0.weight"], model[0].weight, rtol=1e-3)


@pytest.mark.parametrize("way", OF_SETTING["batch_norm"])
def test_batch_norm_statistics_are_the_mean_over_ranks(outcomes, way):
    ranks = outcomes[way, "batch_norm"]
    mean = torch.stack([each["before"]["1.running_mean"] for each in ranks]).mean(dim=0)
    torch.testing.assert_close(ranks[0]["after"]["1.running_mean"], mean)
    own = [each["before"]["1.running_mean"] for each in ranks]
    assert not torch.allclose(own[0], own[1])


def test_constants_of_a_model_are_not_averaged():
    model = nn.Sequential(nn.BatchNorm1d(3))
    model.register_buffer("mask", torch.ones(3), persistent=False)
    assert [len(each.shape) for each in kept_buffers(model)] == [1, 1, 0]  # of BatchNorm


def test_two_ranks_train_as_one_rank_that_reads_in_two_lanes(tmp_path):
    """Whole trainings: 121 events leave 80 or 81 to train on, in batches of 6 and 7 a rank."""
    files = [classes_h5(tmp_path / "events.h5")]
    common = {"metrics": ["accuracy"], "optimizer": {"name": "adam", "lr": 0.05}, "clip_norm": 1.0}
    folders = {name: tmp_path / name for name in ("one", "horovod", "ddp")}
    for name, folder in folders.items():
        several = {"strategy": "allreduce", "backend": name} if name != "one" else {"lanes": 2}
        layout = {"num_workers": 1 if name == "one" else 2}
        task = make_task(files, training=common | several, layout=layout, fold=1)
        write_task(folder, task)
    train_all(1, folders["one"] / "task.json")
    train_all(2, folders["horovod"] / "task.json", folders["ddp"] / "task.json")
    one, *others = [torch.load(each / "weights.pt") for each in folders.values()]
    for other in others:
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-6)


class Attention(torch.nn.Module):
    """Reads the weights of a layer that it does not call, and those of another twice."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.attention(x, x, x)
        return self.head(self.second(self.first(x)))


def test_layers_are_put_together_where_they_are_called_as_a_whole():
    network = Attention()

    def rehearse() -> None:
        network(torch.rand(2, 4, 8))

    found = units(network, rehearse, least=20)
    assert found == [network.attention, network.head]
    assert units(network, rehearse, least=1000) == []


class Odd(torch.nn.Module):
    def __init__(self, odd: torch.Tensor) -> None:
        super().__init__()
        self.head = torch.nn.Linear(3, 3)
        self.odd = torch.nn.Parameter(odd)


def test_a_parameter_that_is_one_number_cannot_be_sharded():
    words = "'odd' is a single number; give it the shape (1,), or use 'allreduce'"
    with pytest.raises(N3LOError, match=re.escape(words)):
        check_parameters(Odd(torch.tensor(1.0)), [])


def test_parameters_of_two_types_are_sharded_in_units_of_their_own():
    network = Odd(torch.ones(3, dtype=torch.float64))
    words = "'odd' is torch.float64 and 'head.weight' torch.float32; use 'allreduce'"
    with pytest.raises(N3LOError, match=re.escape(words)):
        check_parameters(network, [])
    check_parameters(network, [network.head])


def test_a_missing_horovod_names_the_way_out(tmp_path):
    files = [classes_h5(tmp_path / "events.h5")]
    path = write_task(tmp_path / "t", make_task(files, training={"strategy": "allreduce"}))
    program = (
        "import sys; sys.modules['horovod'] = None; sys.argv = ['train', sys.argv[1]];"
        "from apps.train import main; main()"
    )
    done = launch(1, "-c", program, path)
    assert done.returncode == 1
    assert "Horovod is not installed: run 'make setup', or set training.backend" in done.stderr
