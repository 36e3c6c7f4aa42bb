"""A model split within its layers does the arithmetic of the whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensor_plan_ranks import (
    CASES,
    CLIP_NORM,
    OPTIMIZERS,
    STEPS,
    Functional,
    Skip,
    Words,
    dropouts,
    loss_of,
    mlp,
    start,
    tokens,
    transformer,
)
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, weight_norm
from training_helpers import launch

from apps.contract import N3LOError
from apps.models.jets import DeepSets, JetMlp
from apps.models.mnist import ConvNet
from apps.strategies.tensor_plan import plan_of

ALL = [(num_ranks, case) for num_ranks, cases in CASES.items() for case in cases]


# -- which layers become what ----------------------------------------------------------------------


def test_two_linear_layers_with_an_activation_between_are_a_pair():
    plan = plan_of(mlp(), torch.ones(2, 6), 2)
    assert plan == {"0": "column", "2": "row"}


def test_a_pair_may_have_dropout_in_it_and_a_linear_alone_is_gathered():
    plan = plan_of(dropouts(), torch.ones(2, 6), 2)
    assert plan == {"0": "column", "2": "dropout", "3": "row", "7": "column_gathered"}


def test_a_chain_is_paired_from_its_beginning():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    styles = plan_of(model, torch.ones(2, 4), 2).values()
    assert list(styles) == ["column", "row", "column", "row", "column_gathered"]


def test_outputs_that_a_function_reads_too_are_gathered():
    plan = plan_of(Skip(), torch.ones(2, 6), 2)
    assert plan == {"first": "column_gathered", "second": "column_gathered"}


def test_activations_may_be_functions():
    plan = plan_of(Functional(), torch.ones(2, 4, 6), 2)
    assert plan == {"first": "column", "second": "row", "third": "column_gathered"}


def test_the_jet_models_are_pairs_and_a_head():
    jets = torch.rand(2, 20, 16)
    pairs = {"phi.0": "column", "phi.2": "row", "rho.0": "column", "rho.2": "row"}
    assert plan_of(DeepSets(width=8), jets, 2) == {**pairs, "head": "column_gathered"}
    assert plan_of(JetMlp(width_1=8), jets, 2) == {"hidden.0": "column", "head": "row"}


def test_the_model_itself_may_be_a_linear():
    assert plan_of(nn.Linear(3, 4), torch.ones(2, 3), 2) == {"": "column_gathered"}


def test_convolutions_stay_whole():
    assert plan_of(ConvNet(), torch.ones(2, 28, 28), 2) == {"layers.8": "column_gathered"}


def test_embeddings_are_split_unless_their_weight_is_changed_in_forward():
    words = torch.ones(2, 5, dtype=torch.long)
    model = Words()
    assert plan_of(model, words, 2) == dict.fromkeys(("embedding", "head"), "column_gathered")
    model.embedding.max_norm = 1.0
    assert plan_of(model, words, 2) == {"head": "column_gathered"}
    assert plan_of(tokens(), words, 2) == {"0": "column", "2": "row"}


def test_a_linear_whose_weight_attention_reads_is_left_alone():
    plan = plan_of(transformer(), torch.ones(2, 4, 8), 2)
    assert plan == {"linear1": "column", "dropout": "dropout", "linear2": "row"}


class Uses(nn.Module):
    """Two layers that could be a pair, and what else is done with them."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout()
        self.do = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.do(self, x)


def styles(forward: Any) -> tuple[str | None, str | None]:
    plan = plan_of(Uses(forward), torch.ones(2, 4), 2)
    return plan.get("first"), plan.get("second")


GATHERED = "column_gathered"


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda m, x: m.second(m.first(x)), ("column", "row")),
        (lambda m, x: m.second(m.first(x).to(m.first.weight.dtype)), (GATHERED, GATHERED)),
        (lambda m, x: m.second(m.first(x)) / m.first(x).shape[-1], (None, GATHERED)),
        (lambda m, x: m.second(m.first(m.first(x))), (None, GATHERED)),
        (lambda m, x: m.second(m.first(x)) + m.first.weight.norm(), (None, GATHERED)),
        (lambda m, x: m.second(m.first(input=x)), (None, GATHERED)),
        (lambda m, x: m.second(x) @ m.first.weight, (None, GATHERED)),
        (lambda m, x: m.second(m.first(x).softmax(-1)), (GATHERED, GATHERED)),
        (lambda m, x: m.second(functional.dropout(m.first(x))), (GATHERED, GATHERED)),
        (lambda m, x: m.second(m.dropout(m.first(m.dropout(x)))), (GATHERED, GATHERED)),
        (lambda m, x: [h := m.first(x), m.second(h)], (GATHERED, GATHERED)),
        (lambda m, x: {"h": (h := m.first(x).relu_()), "y": m.second(h)}, (GATHERED, GATHERED)),
        (lambda m, x: m.second(h := m.first(x)) + len(h.tolist()), (GATHERED, GATHERED)),
        (lambda m, x: m.second(h := m.first(x)) / h.shape[-1], ("column", "row")),
    ],
)
def test_only_what_a_model_does_in_no_other_way_is_split(forward, expected):
    assert styles(forward) == expected


def test_layers_that_share_a_weight_are_left_alone():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[1].weight = model[0].weight
    assert plan_of(model, torch.ones(2, 4), 2) == {"2": "column_gathered"}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_weight_that_is_computed_is_left_alone():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    weight_norm(model[0])
    nn.utils.parametrizations.orthogonal(model[1])
    assert plan_of(model, torch.ones(2, 4), 2) == {"2": "column_gathered"}


def test_every_rank_must_have_a_part():
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 5))
    assert plan_of(model, torch.ones(2, 6), 2) == {"0": "column", "2": "row"}
    assert plan_of(model, torch.ones(2, 6), 3) == {"2": "column_gathered"}


def test_nothing_to_split_is_an_error():
    with pytest.raises(N3LOError, match=r"this model has none that 2 ranks can share; use 'pipe"):
        plan_of(nn.Sequential(nn.Conv1d(1, 2, 3)), torch.ones(2, 1, 5), 2)


def test_inputs_may_be_a_list_or_a_table():
    model = nn.Bilinear(2, 2, 2)
    model.forward = lambda a, b: model.linear(a + b)
    model.linear = nn.Linear(2, 2)
    one = torch.ones(1, 2)
    assert plan_of(model, [one, one], 2) == plan_of(model, {"a": one, "b": one}, 2) != {}


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan_of(model, torch.ones(2, 4), 2)
    assert [module.training for module in model] == [True, False, True]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# -- the user's plan -------------------------------------------------------------------------------


def test_a_given_plan_splits_what_it_names_and_no_more():
    given = {"phi.0": "column", "phi.2": "row", "rho.*": "column_gathered", "rho.2": "row"}
    plan = plan_of(DeepSets(width=8), torch.rand(2, 20, 16), 2, given)
    assert plan == {"phi.0": "column", "phi.2": "row", "rho.0": "column_gathered", "rho.2": "row"}


def test_a_given_plan_needs_no_word_on_dropout():
    plan = plan_of(dropouts(), torch.ones(2, 6), 2, {"0": "column", "3": "row"})
    assert plan == {"0": "column", "2": "dropout", "3": "row"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"1": "row"}, "'1' = 'row': of Linear and Embedding layers there is 0, 3, 7"),
        ({"0": "rows"}, "'0' = 'rows': there is column, row, column_gathered"),
        ({"0": "column"}, "'0' = 'column': its outputs must .* to one Linear that is 'row'"),
        ({"0": "column", "3": "column_gathered"}, "'0' = 'column': its outputs must"),
        ({"7": "column"}, "'7' = 'column': its outputs must .*; use 'column_gathered'"),
    ],
)
def test_a_given_plan_that_does_not_fit_is_named(given, message):
    with pytest.raises(N3LOError, match=rf"training\.split\.tensor: {message}"):
        plan_of(dropouts(), torch.ones(2, 6), 2, given)


@pytest.mark.parametrize(
    ("model", "inputs", "given", "message"),
    [
        (transformer(), torch.ones(2, 4, 8), {"self_attn*": "row"}, "used in another way"),
        (Words(), torch.ones(2, 5).long(), {"embedding": "row"}, "has no inputs to split"),
        (nn.Linear(3, 1), torch.ones(2, 3), {"*": "column_gathered"}, "1 cannot be shared by 2"),
    ],
)
def test_a_layer_that_cannot_be_split_says_why(model, inputs, given, message):
    with pytest.raises(N3LOError, match=message):
        plan_of(model, inputs, 2, given)


# -- on ranks --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[tuple, list[dict]]:
    """What each rank holds in the end, of every case; one launch for each number of ranks."""
    folder = tmp_path_factory.mktemp("tensor_plan")
    found = {}
    for num_ranks, cases in CASES.items():
        program = Path(__file__).with_name("tensor_plan_ranks.py")
        done = launch(num_ranks, program, folder / "out.pt")
        assert done.returncode == 0, done.stderr
        every = torch.load(folder / "out.pt")
        found |= {(num_ranks, *each): ranks for each, ranks in zip(cases, every, strict=True)}
    return found


def reference(name: str, optimizer_name: str) -> dict[str, Any]:
    """Plain PyTorch on one rank."""
    model, inputs = start(name)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    torch.manual_seed(7)
    norms = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model(inputs)).backward()
        norms.append(clip_grad_norm_(model.parameters(), CLIP_NORM))
        optimizer.step()
    model.eval()
    with torch.no_grad():
        outputs = model(inputs)
    return {
        "norms": norms,
        "outputs": outputs,
        "weights": {key: value.detach() for key, value in model.named_parameters()},
        "gradients": {key: value.grad for key, value in model.named_parameters()},
        "states": [optimizer.state[each] for each in model.parameters()],
    }


def name_of(case: tuple) -> str:
    num_ranks, (model, optimizer, given) = case
    return f"{num_ranks} ranks, {model}, {optimizer}{', given' if given else ''}"


@pytest.mark.mpi
@pytest.mark.parametrize("case", ALL, ids=name_of)
def test_ranks_train_as_the_whole_model(outcomes, case):
    """Weights, gradients, their norms, moments, and what the trained model gives."""
    num_ranks, [model, optimizer, given] = case
    expected = reference(model, optimizer)
    for rank in outcomes[num_ranks, model, optimizer, given]:
        found = {key: rank[key] for key in expected}
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.mpi
@pytest.mark.parametrize("case", ALL, ids=name_of)
def test_ranks_hold_the_same_bits(outcomes, case):
    """Of what each has, and of what they have together."""
    num_ranks, rest = case
    first, *others = outcomes[num_ranks, *rest]
    for rank in others:
        for key in ("norms", "weights", "gradients", "states", "outputs"):
            torch.testing.assert_close(rank[key], first[key], rtol=0, atol=0)


@pytest.mark.mpi
def test_each_rank_holds_half_of_a_pair(outcomes):
    """The biases of rows and the norm are on both."""
    whole = sum(each.numel() for each in mlp().parameters())
    everywhere = 8 + 2 * 8
    for rank in outcomes[2, "mlp", "sgd", ()]:
        assert rank["held"] == (whole - everywhere) / 2 + everywhere


@pytest.mark.mpi
@pytest.mark.parametrize("case", ALL, ids=name_of)
def test_what_was_put_together_is_cut_again(outcomes, case):
    num_ranks, rest = case
    for rank in outcomes[num_ranks, *rest]:
        assert rank["is cut again"]
        assert rank["copied"]
