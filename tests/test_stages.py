"""A model in stages gives what the whole model gives, wherever it is cut and on however many ranks.

What is expected comes from the whole model in plain PyTorch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stages_ranks import MODELS, NUM_MICRO, Masked, Normed, Residual, Table, loss, make
from torch import nn
from torch.nn import functional
from training_helpers import launch

from apps.contract import N3LOError
from apps.experiment import call
from apps.models.jets import DeepSets, InteractionNetwork, JetMlp
from apps.models.mnist import ConvNet
from apps.strategies.stages import (
    costs,
    cut,
    cut_at,
    examples,
    positional,
    restore,
    stages,
    trace,
)


def numbers(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def jets(num: int = 8) -> torch.Tensor:
    """Positive columns, and constituents that are missing."""
    values = numbers(num, 12, 16).abs()
    values[:, 9:] = 0
    return values


def sequential() -> nn.Module:
    return nn.Sequential(*[each for _ in range(4) for each in (nn.Linear(3, 3), nn.Tanh())])


class Pair(nn.Module):
    """Two inputs, and a list of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 5), nn.Linear(2, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        hidden = self.first(x) + self.second(y)
        return [self.third(hidden.relu()), hidden]


class InPlace(nn.Module):
    """Layers that write into what they get."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 5), nn.ReLU(inplace=True)
        )
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)).mul_(2)


EVENTS = numbers(8, 3)
WHOLE = {
    "sequential": (sequential, EVENTS),
    "residual": (Residual, EVENTS),
    "in place": (InPlace, EVENTS),
    "masked": (Masked, numbers(8, 5, 4)),
    "table": (Table, {"tracks": EVENTS, "towers": numbers(8, 2)}),
    "pair": (Pair, [EVENTS, numbers(8, 2)]),
    "convolutions": (lambda: ConvNet(channels=2, dropout=0.5), 100 * numbers(4, 28, 28)),
    "DeepSets": (lambda: DeepSets(width=8, dropout=0.5), jets()),
    "JetMlp": (lambda: JetMlp(width_1=8, width_2=6, depth=2), jets()),
    "InteractionNetwork": (lambda: InteractionNetwork(hidden=8, num_constituents=7), jets()),
}


def built(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    make_model, inputs = WHOLE[name]
    return make_model(), inputs


def total(outputs: Any) -> torch.Tensor:
    values = outputs.values() if isinstance(outputs, dict) else outputs
    values = [outputs] if isinstance(outputs, torch.Tensor) else values
    return sum(each.square().mean() for each in values)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters()}


def pass_on(traced: Any, parts: list[nn.Module], inputs: Any, all_trained: bool) -> Any:
    """Forward and backward over the stages, as PipelineStage does it; the model's outputs.

    Args:
        all_trained: as an older torch asks, all that is received can have a gradient.
    """
    values = positional(traced, inputs)
    received: list[list[torch.Tensor]] = []
    sent: list[tuple[torch.Tensor, ...]] = []
    for number, part in enumerate(parts):
        trained = all_trained and number > 0
        received.append([v.detach().requires_grad_(v.requires_grad or trained) for v in values])
        given = part(*received[-1])
        values = (given,) if isinstance(given, torch.Tensor) else given
        sent.append(values)
    outputs = restore(traced, given)
    total(outputs).backward()
    for mine, theirs in zip(sent[-2::-1], received[:0:-1], strict=True):
        assert all(each.grad is not None for each in theirs if each.requires_grad)
        pairs = [(a, b.grad) for a, b in zip(mine, theirs, strict=True) if a.requires_grad]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
    return outputs


@pytest.mark.parametrize("all_trained", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("name", WHOLE)
def test_stages_give_the_outputs_and_gradients_of_the_whole_model(name, num_stages, all_trained):
    """Also with dropout: the stages draw the same random numbers in the same order."""
    model, inputs = built(name)
    torch.manual_seed(1)
    expected = call(model, inputs)
    total(expected).backward()
    wanted = gradients(model)
    model.zero_grad()
    traced = trace(model, inputs)
    parts = stages(traced, cut(traced, [1.0] * len(traced.nodes), num_stages))
    torch.manual_seed(1)
    outputs = pass_on(traced, parts, inputs, all_trained)
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(gradients(model), wanted)


EVERY = {"sequential": 1, "in place": 1, "masked": 1, "DeepSets": 11, "InteractionNetwork": 11}


@pytest.mark.parametrize("name", EVERY)
def test_the_model_may_be_cut_wherever_nothing_speaks_against_it(name):
    """Of long models, every eleventh place is tried."""
    model, inputs = built(name)
    model.eval()
    expected = call(model, inputs)
    traced = trace(model, inputs)
    places = [index for index in range(1, len(traced.nodes) - 1) if not traced.obstacle(index)]
    for index in places[:: EVERY[name]]:
        if traced.nodes[index - 1].op != "get_attr":
            outputs = pass_on(traced, stages(traced, [index]), inputs, all_trained=False)
            torch.testing.assert_close(outputs, expected)


@pytest.mark.parametrize("name", WHOLE)
def test_the_states_of_all_stages_are_the_state_of_the_model(name):
    model, inputs = built(name)
    traced = trace(model, inputs)
    parts = stages(traced, cut(traced, [1.0] * len(traced.nodes), 3))
    names = [name for part in parts for name in part.state_dict()]
    assert sorted(names) == sorted(model.state_dict())
    mine = model.state_dict(keep_vars=True)
    for part in parts:
        assert all(mine[name] is each for name, each in part.state_dict(keep_vars=True).items())


def test_stages_go_into_training_and_evaluation():
    model = nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5), nn.Linear(50, 50))
    traced = trace(model, EVENTS)
    first, second = stages(traced, cut_at(traced, ["1"], 2))
    assert (second(first(EVENTS)) != second(first(EVENTS))).any()
    for part in (first, second):
        part.eval()
    assert torch.equal(second(first(EVENTS)), model.eval()(EVENTS))


def test_tracing_and_measuring_leave_the_model_and_the_random_numbers_alone():
    model = Normed()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    model.first.eval()
    random = torch.get_rng_state()
    traced = trace(model, EVENTS)
    costs(traced, EVENTS)
    examples(traced, stages(traced, cut_at(traced, ["second"], 2)), EVENTS)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert all(each.grad is None for each in model.parameters())
    assert (model.training, model.first.training, model.second.training) == (True, False, True)
    assert torch.equal(torch.get_rng_state(), random)


def test_batch_norm_statistics_belong_to_the_stage_that_computes_them():
    model = Normed()
    traced = trace(model, EVENTS)
    first, second = stages(traced, cut_at(traced, ["third"], 2))
    assert [name for name, _ in second.named_buffers()] == [
        f"third.1.{each}" for each in ("running_mean", "running_var", "num_batches_tracked")
    ]
    second(first(EVENTS))
    assert (model.third[1].num_batches_tracked, model.first[1].num_batches_tracked) == (1, 1)


def test_examples_are_what_passes_between_the_stages():
    traced = trace(Masked(), numbers(8, 5, 4))
    parts = stages(traced, cut_at(traced, ["middle"], 2))
    enters, passes, leaves = examples(traced, parts, numbers(2, 5, 4))
    assert [each.shape for each in enters] == [(2, 5, 4)]
    assert [each.shape for each in leaves] == [(2, 3)]
    given = parts[0](numbers(2, 5, 4))
    for example, value in zip(passes, given, strict=True):
        assert example.device.type == "meta"
        for what in ("shape", "dtype", "requires_grad"):
            assert getattr(example, what) == getattr(value, what)
        assert example.stride() == value.stride()


def test_only_floats_pass_and_large_integers_arrive_exactly():
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, number: torch.Tensor) -> list[torch.Tensor]:
            short, byte, yes = number.short(), number.byte(), number > 0
            hidden = self.first(x)
            return [self.second(hidden), number * 1, short * 1, byte * 1, ~yes]

    number = torch.tensor([2**63 - 1, -(2**62) - 1, 255])
    inputs = [EVENTS[:3], number]
    traced = trace(Large(), inputs)
    first, second = stages(traced, cut_at(traced, ["second"], 2))
    passed = first(*inputs)
    assert all(each.is_floating_point() for each in passed)
    _, *found = second(*passed)
    expected = [number, number.short(), number.byte(), ~(number > 0)]
    for value, exact in zip(found, expected, strict=True):
        assert value.dtype == exact.dtype
        assert torch.equal(value, exact)


@pytest.mark.parametrize("layer", [nn.Conv2d, nn.Conv3d])
def test_images_keep_their_channels_last(layer):
    """What is sent lies in its own order, as a buffer of that shape holds it."""
    num_dims = 4 if layer is nn.Conv2d else 5
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}[num_dims]
    model = nn.Sequential(layer(3, 4, 3), layer(4, 4, 3)).to(memory_format=layout)
    images = numbers(2, *[3, 8, 8, 8][: num_dims - 1]).to(memory_format=layout)
    traced = trace(model, images)
    first, second = stages(traced, cut_at(traced, ["1"], 2))
    sent = first(images)
    assert sent.is_contiguous()
    assert sent.shape == (2, *[6] * (num_dims - 2), 4)
    seen = []
    model[1].register_forward_pre_hook(lambda _, inputs: seen.extend(inputs))
    torch.testing.assert_close(second(sent), model(images))
    assert all(each.is_contiguous(memory_format=layout) for each in seen)


def test_autocast_does_not_change_what_passes():
    """Its choice of types differs from device to device; the receiver must know it before."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    traced = trace(model, EVENTS)
    first, second = stages(traced, cut_at(traced, ["1"], 2))
    with torch.autocast("cpu", torch.bfloat16):
        assert model[0](EVENTS).dtype == torch.bfloat16
        assert first(EVENTS).dtype == torch.float32
        assert torch.equal(second(first(EVENTS)), model(EVENTS))


# -- balance ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_the_slowest_stage_is_as_fast_as_it_can_be(seed, num_stages):
    """Compared with all cuts there are, of those that leave each stage a linear layer."""
    traced = trace(sequential(), EVENTS)
    seconds = numbers(len(traced.nodes), seed=seed).abs().tolist()

    linear = {1, 3, 5, 7}  # the nodes: an input, four times a linear layer and tanh, the output

    def slowest(cuts: tuple[int, ...]) -> float:
        segments = [range(*each) for each in itertools.pairwise([0, *cuts, 10])]
        if not all(linear & set(each) for each in segments):
            return float("inf")
        return max(sum(seconds[node] for node in each) for each in segments)

    every = itertools.combinations(range(1, 9), num_stages - 1)
    found = slowest(tuple(cut(traced, seconds, num_stages)))
    assert found == pytest.approx(min(map(slowest, every)))


def test_of_equal_cuts_the_one_that_sends_least_is_taken():
    model = nn.Sequential(nn.Linear(3, 9), nn.Linear(9, 2), nn.Tanh(), nn.Linear(2, 9))
    traced = trace(model, EVENTS)
    assert traced.nodes[2].target == "1"
    assert cut(traced, [0, 1.0, 0.0, 0.0, 1.0, 0], 2) == [3]


def test_costs_are_seconds_of_each_node():
    traced = trace(Masked(), numbers(8, 5, 4))
    seconds = dict(zip(traced.nodes, costs(traced, numbers(8, 5, 4)), strict=True))
    for node, cost in seconds.items():
        assert (cost > 0) == node.op.startswith("call"), node


def test_stages_begin_at_the_modules_that_are_named():
    traced = trace(DeepSets(), jets())
    cuts = cut_at(traced, ["phi.2", "head"], 3)
    assert [traced.nodes[each].target for each in cuts] == ["phi.2", "head"]
    names = [
        sorted({key.split(".")[0] for key in each.state_dict()}) for each in stages(traced, cuts)
    ]
    assert names == [["phi"], ["phi", "rho"], ["head"]]


# -- models that ask for care ----------------------------------------------------------------------


class Shared(nn.Module):
    """Weights that are used twice, one that is never used, and buffers of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(3))
        self.spare = nn.Linear(2, 2)
        self.register_buffer("shift", torch.ones(3))
        self.register_buffer("table", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale
        hidden = self.second(self.first(x).tanh()).tanh()
        return self.third(hidden) * scale + self.shift * self.table


def test_tied_weights_stay_together_and_nothing_of_the_state_is_lost():
    model = Shared()
    traced = trace(model, EVENTS)
    parts = stages(traced, cut(traced, [1.0] * len(traced.nodes), 3))
    assert {"first.weight", "second.weight"} <= parts[0].state_dict().keys()
    names = [name for part in parts for name in part.state_dict()]
    assert sorted(names) == sorted(model.state_dict())
    values = EVENTS
    for part in parts:
        values = part(values)
    torch.testing.assert_close(values, model(EVENTS))
    with pytest.raises(N3LOError, match=r"at 'second': 'first.weight' is needed on both sides"):
        cut_at(traced, ["second"], 2)


class Decides(nn.Module):
    """Looks at its data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum() > 0 else self.layer(-x)


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.layer(x), 0.5, self.training)


@pytest.mark.parametrize("block", [Decides, Drops])
def test_a_module_that_cannot_be_recorded_stays_whole(block):
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(block()), nn.LazyLinear(3))
    model(EVENTS)
    traced = trace(model, EVENTS)
    assert [node.target for node in traced.nodes[1:-1]] == ["0", "1.0", "2"]
    first, second = stages(traced, cut_at(traced, ["2"], 2))
    for sign in (1, -1):
        torch.manual_seed(1)
        expected = model(sign * EVENTS)
        torch.manual_seed(1)
        assert torch.equal(second(first(sign * EVENTS)), expected)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden = self.first(x)
        return self.second(hidden) + self.first(x)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + torch.randn(3))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return [self.layer(x), [x]]


LOSES = "forward does what a record of it loses"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Decides, r"TraceError: symbolically traced .* control flow \(test_stages.py line \d+\);"),
        (Drops, LOSES),
        (Frozen, LOSES),
        (Noisy, LOSES),
        (Nested, "it gives a list, not a tensor, or a list or table of tensors;"),
    ],
)
def test_what_cannot_be_recorded_is_refused_in_one_line(model, message):
    with pytest.raises(N3LOError, match=message) as caught:
        trace(model(), EVENTS)
    text = str(caught.value)
    assert text.startswith("training.strategy: 'pipeline' cannot cut this model: ")
    assert text.endswith("; use 'sharded' or 'allreduce'")
    assert "\n" not in text


class Views(nn.Module):
    """Writes into one of two views of a memory after both exist."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        turned = hidden.t()
        hidden.mul_(2)
        return self.second(hidden) + turned.sum()


def test_views_of_memory_that_is_written_to_are_not_parted():
    model = Views()
    traced = trace(model, EVENTS)
    places = [index for index in range(1, len(traced.nodes) - 1) if not traced.obstacle(index)]
    assert traced.nodes[3].target == "mul_"
    assert 3 not in places
    for index in places:
        first, second = stages(traced, [index])
        passed = first(EVENTS)
        passed = [passed] if isinstance(passed, torch.Tensor) else passed
        torch.testing.assert_close(second(*[each.clone() for each in passed]), model(EVENTS))


def test_the_largest_number_of_stages_is_named():
    traced = trace(Residual(), EVENTS)
    with pytest.raises(
        N3LOError, match=r"^layout.ranks_per_worker: 6 stages, .* at most 4, .* 4 or fewer$"
    ):
        cut(traced, [1.0] * len(traced.nodes), 6)


def test_a_model_without_parameters_is_refused():
    traced = trace(nn.Sequential(nn.Tanh(), nn.Tanh()), EVENTS)
    with pytest.raises(N3LOError, match="the model has no parameters to train"):
        cut(traced, [1.0] * len(traced.nodes), 2)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["first", "third"], "2 names, but the ranks of a worker are 2 stages; name the 1 modules"),
        (["frist"], r"there is no module 'frist', only first, second, third, last$"),
        (["first"], "first: stage 1 of 2 would have no parameters to train"),
    ],
)
def test_names_that_cannot_begin_a_stage_are_refused(modules, message):
    traced = trace(Residual(), EVENTS)
    with pytest.raises(N3LOError, match=f"^training.split.stages: {message}"):
        cut_at(traced, modules, 2)


def test_names_must_come_in_the_models_order():
    traced = trace(Residual(), EVENTS)
    with pytest.raises(N3LOError, match="'second' does not come after the module before it"):
        cut_at(traced, ["third", "second"], 3)


# -- on ranks --------------------------------------------------------------------------------------

AT = {
    "residual": {2: ["third"], 3: ["second", "third"]},
    "masked": {2: ["middle"], 3: ["middle", "kinds"]},
    "normed": {2: ["second"], 3: ["second", "third"]},
    "table": {2: ["towers"], 3: ["towers", "label"]},
    "deep_sets": {2: ["phi.2"], 3: ["phi.2", "phi.4"]},
}
BATCHES = {
    "residual": EVENTS,
    "masked": numbers(8, 5, 4),
    "normed": numbers(16, 3),
    "table": {"tracks": EVENTS, "towers": numbers(8, 2)},
    "deep_sets": jets(),
}
CASES = list(itertools.product(AT, (2, 3), ("gpipe", "1f1b")))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[tuple, list[dict]]:
    """What each rank holds, of every case; one launch for each number of ranks."""
    folder = tmp_path_factory.mktemp("stages")
    program = Path(__file__).with_name("stages_ranks.py")
    found = {}
    for num_ranks in (2, 3):
        cases = [case for case in CASES if case[1] == num_ranks]
        content = [
            {
                "model": name,
                "at": AT[name][num_ranks],
                "schedule": schedule,
                "inputs": BATCHES[name],
                "targets": targets(name),
            }
            for name, _, schedule in cases
        ]
        torch.save(content, folder / "cases.pt")
        done = launch(num_ranks, program, folder / "cases.pt", folder / "out.pt")
        assert done.returncode == 0, done.stderr
        found |= dict(zip(cases, torch.load(folder / "out.pt"), strict=True))
    return found


def targets(name: str) -> torch.Tensor:
    return torch.arange(16 if name == "normed" else 8) % 3


def micro_batches(name: str) -> Iterator[tuple[Any, torch.Tensor]]:
    inputs = BATCHES[name]
    for part in torch.arange(len(targets(name))).chunk(NUM_MICRO):
        taken = {key: each[part] for key, each in inputs.items()} if name == "table" else None
        yield taken or inputs[part], targets(name)[part]


@pytest.mark.mpi
@pytest.mark.parametrize("case", [case for case in CASES if case[0] != "normed"], ids=str)
def test_ranks_give_the_gradient_of_the_whole_batch(outcomes, case):
    model = make(case[0])
    loss(call(model, BATCHES[case[0]]), targets(case[0])).backward()
    found = {}
    for rank in outcomes[case]:
        assert not found.keys() & rank["gradients"].keys()
        found |= rank["gradients"]
    torch.testing.assert_close(found, gradients(model), rtol=1e-5, atol=1e-7)


@pytest.mark.mpi
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_last_rank_has_the_losses_of_the_micro_batches(outcomes, case):
    model = make(case[0])
    expected = [loss(call(model, x), y).detach() for x, y in micro_batches(case[0])]
    *others, last = outcomes[case]
    torch.testing.assert_close(last["losses"], expected)
    assert all(rank["losses"] == [] for rank in others)


@pytest.mark.mpi
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_last_rank_has_the_outputs_of_an_evaluation(outcomes, case):
    """By `eval` of the schedule that trains, and by one of its own."""
    model = make(case[0])
    for x, _ in micro_batches(case[0]):
        call(model, x)  # for BatchNorm
    expected = call(model.eval(), BATCHES[case[0]])
    *others, last = outcomes[case]
    for outputs in last["outputs"]:
        torch.testing.assert_close(outputs, expected)
    assert all("outputs" not in rank for rank in others)


@pytest.mark.mpi
@pytest.mark.parametrize("case", [case for case in CASES if case[0] == "normed"], ids=str)
def test_batch_norm_sees_each_micro_batch_once_and_nothing_else(outcomes, case):
    model = make(case[0])
    for x, _ in micro_batches(case[0]):
        model(x)
    found = {name: each for rank in outcomes[case] for name, each in rank["state"].items()}
    torch.testing.assert_close(found, dict(model.state_dict()))


def test_the_models_of_the_ranks_are_all_tried():
    assert AT.keys() == MODELS.keys()
