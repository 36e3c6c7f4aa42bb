"""Layers computed twice: the same training to the last bit, with fewer activations in memory."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm

from apps.contract import N3LOError
from apps.normalise import synchronise
from apps.recompute import recompute


class Block(nn.Module):
    """Two inputs, one of them by name, and two outputs."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.conv = spectral_norm(nn.Conv2d(4, 4, 3, padding=1))
        self.norm = nn.BatchNorm2d(4, momentum=momentum)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, *, skip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.drop(self.norm(self.conv(x)).relu())
        return x, x + skip


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3)
        self.blocks = nn.ModuleList([Block(0.1), Block(None)])
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(4 * 36, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = skip = self.stem(x)
        for block in self.blocks:
            x, skip = block(x, skip=skip)
        return self.head(x + skip)


def network() -> nn.Module:
    torch.manual_seed(1)
    return Network()


def inputs() -> torch.Tensor:
    return torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(2))


def train(model: nn.Module, num_steps: int = 3) -> list[torch.Tensor]:
    """Outputs, gradients and buffers of all steps, of which each uses the model twice."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(3)
    seen = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        outputs = [model(inputs()), model(2 * inputs())]
        sum(output.square().mean() for output in outputs).backward()
        optimizer.step()
        gradients = [parameter.grad for parameter in model.parameters()]
        seen += [each.detach().clone() for each in (*outputs, *gradients, *model.buffers())]
    return seen


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def saved_bytes(model: nn.Module) -> int:
    """Of the activations that wait for the backward pass."""
    saved = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(inputs())
    assert outputs.requires_grad
    return sum(saved.values())


@pytest.fixture
def count_calls(monkeypatch) -> Callable[[nn.Module], dict[str, int]]:
    """How often each of some layers computes in a training step."""
    calls: dict[nn.Module, int] = {}
    for kind in (nn.Conv2d, nn.BatchNorm2d, nn.Dropout, nn.Linear):

        def forward(self, *args, compute=kind.forward):
            calls[self] = calls.get(self, 0) + 1
            return compute(self, *args)

        monkeypatch.setattr(kind, "forward", forward)

    def count(model: nn.Module) -> dict[str, int]:
        calls.clear()
        model(inputs()).sum().backward()
        return {name: calls[layer] for name, layer in model.named_modules() if layer in calls}

    return count


@pytest.mark.parametrize("patterns", [["*"], ["blocks"], ["blocks.1", "head"], ["*.norm"]])
def test_training_is_the_same_bit_by_bit(patterns):
    model = network()
    recompute(model, patterns)
    assert_same(train(model), train(network()))


def test_batch_norm_over_ranks_is_the_same_bit_by_bit():
    sums = []

    def alone(vector: torch.Tensor) -> torch.Tensor:
        sums.append(len(vector))
        return vector

    plain, model = (synchronise(network(), alone) for _ in range(2))
    recompute(model, ["blocks.*"])
    expected = train(plain)
    num_plain = len(sums)
    assert_same(train(model), expected)
    assert len(sums) - num_plain == num_plain * 3 / 2  # forward, again, and backward


def test_fewer_activations_wait_for_the_backward_pass():
    model = network()
    before = saved_bytes(model)
    recompute(model, ["*"])
    assert saved_bytes(model) < 0.5 * before


@pytest.mark.parametrize(
    ("patterns", "twice"),
    [
        (["*"], {"stem", "blocks.0.norm", "blocks.1.norm", "blocks.1.drop", "head.1"}),
        (["blocks"], {"blocks.0.norm", "blocks.1.norm", "blocks.1.drop"}),
        (["blocks.*", "blocks.0.norm"], {"blocks.0.norm", "blocks.1.norm", "blocks.1.drop"}),
        (["blocks.?.norm"], {"blocks.0.norm", "blocks.1.norm"}),
        ([], set()),
    ],
)
def test_the_outermost_layers_that_match_are_computed_twice(count_calls, patterns, twice):
    model = network()
    recompute(model, patterns)
    watched = {"stem", "blocks.0.norm", "blocks.1.norm", "blocks.1.drop", "head.1"}
    calls = count_calls(model)
    assert {name: calls[name] for name in watched} == {
        name: 2 if name in twice else 1 for name in watched
    }


def test_without_gradients_and_in_eval_mode_layers_run_as_they_are(count_calls):
    model, plain = network(), network()
    recompute(model, ["*"])
    with torch.no_grad():
        torch.manual_seed(4)
        found = model(inputs())
        torch.manual_seed(4)
        assert torch.equal(found, plain(inputs()))
    assert saved_bytes(model.eval()) == saved_bytes(plain.eval())
    assert set(count_calls(model).values()) == {1}


def test_a_graph_that_is_kept_gives_the_same_gradients_again():
    model = network()
    recompute(model, ["*"])
    loss = model(inputs()).square().sum()
    weights = list(model.parameters())
    first, second = (torch.autograd.grad(loss, weights, retain_graph=True) for _ in range(2))
    assert_same(second, first)


def test_names_stay_and_weights_can_be_loaded():
    model, other = network(), network()
    recompute(model, ["*"])
    assert list(model.state_dict()) == list(other.state_dict())
    train(model)
    other.load_state_dict(model.state_dict())
    model.load_state_dict(other.state_dict())
    assert torch.equal(model.eval()(inputs()), other.eval()(inputs()))


def test_a_copy_trains_by_itself(count_calls):
    model = network()
    recompute(model, ["*"])
    copied = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    assert_same(train(copied), train(network()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert count_calls(copied)["stem"] == 2


def test_a_pickled_network_comes_back_plain():
    model = nn.Sequential(nn.Linear(2, 2))
    recompute(model, ["0"])
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(loaded(torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_it_works_below_distributed_data_parallel():
    model = network()
    recompute(model, ["*"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model)
        found = train(wrapped)
        del wrapped
    finally:
        dist.destroy_process_group()
    assert_same(found, train(network()))


def test_half_precision_is_recomputed_in_half_precision():
    model, plain = network(), network()
    recompute(model, ["*"])
    gradients = []
    for each in (model, plain):
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(inputs()).float().square().sum()
        loss.backward()
        gradients.append([parameter.grad for parameter in each.parameters()])
    assert_same(*gradients)


def test_it_works_in_a_compiled_network():
    model = network()
    recompute(model, ["blocks.*"])
    model.compile(backend="eager")
    assert_same(train(model), train(network()))


def test_a_pattern_without_a_layer_shows_the_layers():
    with pytest.raises(
        N3LOError, match=r"recompute: 'blocs.\*' matches no layer, only stem, blocks"
    ):
        recompute(network(), ["*", "blocs.*"])
    with pytest.raises(N3LOError, match=r"only 0, 1, .*, 19 and 10 more$"):
        recompute(nn.Sequential(*(nn.ReLU() for _ in range(30))), ["x"])
    with pytest.raises(N3LOError, match="matches no layer, as the model is one layer"):
        recompute(nn.Linear(1, 1), ["*"])
