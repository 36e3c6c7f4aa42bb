"""One suite for all strategies: however ranks share a training, the arithmetic is one rank's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from training_helpers import classes_h5, launch, make_task, train_all, write_task

pytestmark = pytest.mark.mpi

ALONE = [("local", "horovod"), ("allreduce", "horovod"), ("allreduce", "ddp")]
TOGETHER = [("allreduce", "horovod"), ("allreduce", "ddp")]
SETTINGS = {
    "sgd": {"optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.9}},
    "adam": {"optimizer": {"name": "adam", "lr": 0.01}},
    "clip": {"optimizer": {"name": "sgd", "lr": 0.5}, "clip_norm": 0.05},
    "batch_norm": {"optimizer": {"name": "sgd", "lr": 0.0}},
}
STEPS = 3
PARTS = {1: [8], 2: [5, 3]}  # events of each rank: unequal, as in a real epoch

CASES = [(2, *each, name) for each in TOGETHER for name in SETTINGS]
CASES += [(1, *each, name) for each in ALONE for name in ("sgd", "clip")]


def events() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(8, 3, generator=generator), torch.arange(8) % 3


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[tuple, list[dict]]:
    """What each rank holds in the end, of every case; one launch for each number of ranks."""
    folder = tmp_path_factory.mktemp("strategies")
    found = {}
    for num_ranks in (1, 2):
        cases = [case for case in CASES if case[0] == num_ranks]
        batches = list(zip(*(values.split(PARTS[num_ranks]) for values in events()), strict=True))
        content = [
            {
                "training": {"strategy": strategy, "backend": backend, **SETTINGS[name]},
                "model": name,
                "batches": batches,
                "steps": STEPS,
            }
            for _, strategy, backend, name in cases
        ]
        torch.save(content, folder / "cases.pt")
        program = Path(__file__).with_name("strategy_ranks.py")
        done = launch(num_ranks, program, folder / "cases.pt", folder / "out.pt")
        assert done.returncode == 0, done.stderr
        found |= dict(zip(cases, torch.load(folder / "out.pt"), strict=True))
    return found


def reference(name: str) -> tuple[torch.nn.Module, float]:
    """Plain PyTorch on all events at once: the model, and the sum of its losses."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)
    model = torch.nn.Sequential(*layers)
    settings = dict(SETTINGS[name]["optimizer"])
    make = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[settings.pop("name")]
    optimizer = make(model.parameters(), **settings)
    x, y = events()
    total = 0.0
    for _ in range(STEPS):
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if "clip_norm" in SETTINGS[name]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS[name]["clip_norm"])
        optimizer.step()
        total += loss.item() * len(x)
    return model, total


@pytest.mark.parametrize("case", [case for case in CASES if case[3] != "batch_norm"], ids=str)
def test_ranks_move_by_the_mean_gradient_of_all_their_events(outcomes, case):
    model, loss = reference(case[3])
    for rank in outcomes[case]:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(rank["after"][name], value, rtol=1e-5, atol=1e-6)
        total, count = rank["total"][0].tolist()
        assert count == STEPS * 8
        assert total == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case[0] == 2], ids=str)
def test_ranks_hold_the_same_weights_bit_by_bit(outcomes, case):
    first, second = outcomes[case]
    for name, value in first["after"].items():
        assert torch.equal(value, second["after"][name]), name
    assert torch.equal(first["total"], second["total"])


@pytest.mark.parametrize("case", [case for case in CASES if case[3] == "batch_norm"], ids=str)
def test_batch_norm_statistics_are_the_mean_over_ranks(outcomes, case):
    """With a learning rate of 0, each rank's statistics follow from its own events alone."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(3, 4)
    expected = []
    for part in events()[0].split(PARTS[2]):
        running = torch.zeros(4)
        for _ in range(STEPS):
            running = 0.9 * running + 0.1 * linear(part).mean(dim=0)
        expected.append(running.detach())
    for rank, own in zip(outcomes[case], expected, strict=True):
        torch.testing.assert_close(rank["before"]["1.running_mean"], own)
        mean = torch.stack(expected).mean(dim=0)
        torch.testing.assert_close(rank["after"]["1.running_mean"], mean)


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
