"""BatchNorm over all ranks: two ranks of 5 and 3 events give what one gives of all 8."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from normalise_ranks import layer_of, step
from torch import nn
from training_helpers import launch

from apps.contract import N3LOError
from apps.normalise import synchronise

BACKENDS = ("torch", "horovod")
SHAPES = {
    "1d": ("BatchNorm1d", ()),
    "sequence": ("BatchNorm1d", (4,)),
    "2d": ("BatchNorm2d", (4, 2)),
    "3d": ("BatchNorm3d", (2, 3, 2)),
}
SETTINGS = {
    "default": {},
    "no_affine": {"affine": False},
    "no_momentum": {"momentum": None},
    "no_statistics": {"track_running_stats": False},
    "others": {"dtype": torch.float64, "eps": 0.1, "momentum": 0.4},
}
SPLIT = [5, 3]
STEPS = 3


def case(
    shape: str, settings: str = "default", split: list[int] = SPLIT, uses: int = 1, **how: bool
) -> dict:
    """`uses` times in a step; each rank has a list of so many batches in every step."""
    layer, rest = SHAPES[shape]
    generator = torch.Generator().manual_seed(7)
    # Ranks whose events have different means, some far from zero.
    centre = torch.linspace(-4, 9, sum(split)).view(-1, *[1] * (1 + len(rest)))
    steps = [
        [
            2 * torch.randn(sum(split), 3, *rest, generator=generator) + centre * (number + 1)
            for _ in range(uses)
        ]
        for number in range(STEPS)
    ]
    dtype = SETTINGS[settings].get("dtype", torch.float32)
    return {
        "layer": layer,
        "settings": SETTINGS[settings],
        "half": how.get("half", False),
        "checkpoint": how.get("checkpoint", False),
        "synchronise": how.get("synchronise", True),
        "whole": [[each.to(dtype) for each in whole] for whole in steps],
        "steps": [
            list(zip(*(each.to(dtype).split(split) for each in whole), strict=True))
            for whole in steps
        ],
    }


CASES = {
    **{f"{shape} default": case(shape) for shape in SHAPES},
    **{f"2d {name}": case("2d", name) for name in SETTINGS},
    "3d no_affine": case("3d", "no_affine"),
    "a rank without events": case("2d", split=[8, 0]),
    "a rank with one event": case("1d", split=[7, 1]),
    "used twice": case("3d", uses=2),
    "half precision": case("2d", half=True),
    "checkpointed": case("2d", settings="no_statistics", checkpoint=True),
}
PLAIN = {f"{shape} plain": case(shape, synchronise=False) for shape in SHAPES}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, dict[str, list[dict]]]:
    """What each rank has, of every backend and case."""
    folder = tmp_path_factory.mktemp("normalise")
    cases = CASES | PLAIN
    torch.save(list(cases.values()), folder / "cases.pt")
    program = Path(__file__).with_name("normalise_ranks.py")
    done = launch(2, "-m", "mpi4py", program, folder / "cases.pt", folder / "out.pt")
    assert done.returncode == 0, done.stderr
    found = torch.load(folder / "out.pt")
    return {backend: dict(zip(cases, found[backend], strict=True)) for backend in BACKENDS}


def joined(ranks: list[dict], key: str) -> list[torch.Tensor]:
    """The whole batch of each use."""
    return [torch.cat(parts) for parts in zip(*(rank[key] for rank in ranks), strict=True)]


@pytest.mark.mpi
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_ranks_together_give_what_one_gives_of_all_events(outcomes, backend, name):
    case, ranks = CASES[name], outcomes[backend][name]
    layer = layer_of(case)
    digits = {"rtol": 2e-2, "atol": 2e-2} if case["half"] else {"rtol": 2e-5, "atol": 2e-5}
    for number, whole in enumerate(case["whole"]):
        expected = step(layer, whole, case)
        found = [rank["steps"][number] for rank in ranks]
        for key in ("outputs", "inputs"):
            torch.testing.assert_close(joined(found, key), expected[key], **digits)
        for parameter, gradient in expected["parameters"].items():
            total = sum(rank["parameters"][parameter] for rank in found)
            torch.testing.assert_close(total, gradient, rtol=digits["rtol"], atol=1e-3)
        for rank in found:
            torch.testing.assert_close(rank["buffers"], expected["buffers"], **digits)
    if layer.track_running_stats:
        expected_eval = layer.eval()(whole[0])
        found_eval = torch.cat([rank["eval"] for rank in ranks])
        torch.testing.assert_close(found_eval, expected_eval, rtol=1e-5, atol=1e-5)


@pytest.mark.mpi
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_ranks_keep_the_same_statistics_bit_by_bit(outcomes, backend, name):
    first, second = (
        [step["buffers"] for step in rank["steps"]] for rank in outcomes[backend][name]
    )
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.mpi
@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_layer_differs(outcomes, name):
    """Or the tests above would show nothing."""
    case = PLAIN[name]
    expected = step(layer_of(case), case["whole"][0], case)
    found = [rank["steps"][0] for rank in outcomes["torch"][name]]
    for key in ("outputs", "inputs"):
        assert (joined(found, key)[0] - expected[key][0]).abs().max() > 0.05
    first, second = (rank["buffers"]["running_mean"] for rank in found)
    assert (first - second).abs().max() > 0.05


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3))
        self.second = self.first[1]
        self.norm = nn.BatchNorm1d(4, momentum=None)


def alone(vector: torch.Tensor) -> torch.Tensor:
    return vector


def test_names_parameters_modes_and_hooks_stay():
    network = Network()
    network.norm.eval().requires_grad_(False)
    before, parameters = copy.deepcopy(network), list(network.parameters())
    assert synchronise(network, alone) is network
    assert [name for name, _ in network.named_modules()] == [
        name for name, _ in before.named_modules()
    ]
    assert all(old is new for old, new in zip(parameters, network.parameters(), strict=True))
    assert not network.norm.training
    assert network.norm.momentum is None
    assert network.second is network.first[1]
    assert isinstance(network.norm, nn.BatchNorm1d)
    assert network.load_state_dict(before.state_dict())


def test_the_network_may_be_one_layer():
    layer = synchronise(nn.BatchNorm1d(2, dtype=torch.float64), alone)
    x = torch.tensor([[1.0, 5.0], [3.0, 5.0]], dtype=torch.float64)
    expected = 1 / (1 + 1e-5) ** 0.5
    assert layer(x).flatten().tolist() == pytest.approx([-expected, 0, expected, 0])


def test_a_copy_of_the_network_uses_the_same_function():
    class Ranks:
        calls = 0

        def sum(self, vector: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return vector

    ranks = Ranks()
    copied = copy.deepcopy(synchronise(Network(), ranks.sum))
    copied.norm(torch.randn(5, 4, requires_grad=True)).sum().backward()
    assert ranks.calls == 1 + 1


def test_in_eval_mode_other_ranks_are_not_asked():
    def nobody(vector: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    layer = synchronise(nn.BatchNorm1d(2), nobody).eval()
    layer(torch.randn(5, 2)).sum().backward()


def test_a_mean_far_from_zero_keeps_the_digits_of_the_variance():
    x = torch.randn(1000, 1, generator=torch.Generator().manual_seed(1)) + 1e4
    layer = synchronise(nn.BatchNorm1d(1, momentum=1.0), alone)
    layer(x)
    torch.testing.assert_close(layer.running_var, x.double().var(dim=0).float(), rtol=1e-4, atol=0)


def test_input_of_the_wrong_shape_is_refused_as_by_pytorch():
    with pytest.raises(ValueError, match="expected 4D input"):
        synchronise(nn.BatchNorm2d(3), alone)(torch.randn(5, 3))


def test_a_second_derivative_is_refused_and_not_wrong():
    layer, x = synchronise(nn.BatchNorm1d(2), alone), torch.randn(5, 2, requires_grad=True)
    [gradient] = torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_layer_of_another_kind_is_named():
    class Mine(nn.BatchNorm1d):
        pass

    with pytest.raises(N3LOError, match=r"sync_batchnorm: layer '1' is a Mine; only BatchNorm1d"):
        synchronise(nn.Sequential(nn.Linear(2, 2), Mine(2)), alone)


def test_layers_of_pytorch_that_synchronise_are_left():
    layer = synchronise(nn.SyncBatchNorm(2), alone)
    assert type(layer) is nn.SyncBatchNorm
