"""Ways to reduce gradients: what all ranks get, what each keeps back, and what is sent."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compression_ranks import batch, gradients_of, loss_of, network
from torch import nn
from training_helpers import launch

from apps import contract
from apps.contract import N3LOError
from apps.strategies.compression import Cast, Mean, PowerSgd, TopK, make_reduction

pytestmark = pytest.mark.mpi

SHORT, HALF, LONG = (0, 6), 3, (0, 200)
MIN_SIZE = 200  # the kernel, the last layer and the biases are smaller
RANK = {"args": {"rank": 2}}
SPARSE = {"args": {"density": 0.05, "min_size": MIN_SIZE}}
MOMENTUM = {"args": {"density": 0.05, "min_size": MIN_SIZE, "momentum": 0.9}}
FP16 = {"args": {"dtype": torch.float16}}
BF16 = {"args": {"dtype": torch.bfloat16}}
IN_BF16 = {"dtype": torch.bfloat16}  # the network itself
LEARN = {"record": False, "steps": LONG, "lr": 0.1}

ON_TWO = {
    "mean": {"kind": "mean"},
    "mean in pieces": {"kind": "mean", "accumulate": 2},
    "mean of bf16": {"kind": "mean", **IN_BF16},
    "fp16": {"kind": "cast", **FP16},
    "bf16": {"kind": "cast", **BF16},
    "fp16, large": {"kind": "cast", **FP16, "scale": 2.5e5, "lr": 0.0},
    "powersgd": {"kind": "powersgd", **RANK},
    "powersgd in pieces": {"kind": "powersgd", **RANK, "accumulate": 2},
    "powersgd later": {"kind": "powersgd", "args": {"rank": 1, "start_after": 2}},
    "powersgd of bf16": {"kind": "powersgd", **RANK, **IN_BF16},
    "topk": {"kind": "topk", **SPARSE},
    "topk in pieces": {"kind": "topk", **SPARSE, "accumulate": 2},
    "topk with momentum": {"kind": "topk", **MOMENTUM},
    "topk of bf16": {"kind": "topk", **SPARSE, **IN_BF16},
    "learn mean": {"kind": "mean", **LEARN},
    "learn powersgd": {"kind": "powersgd", "args": {"rank": 1}, **LEARN},
    "learn powersgd, forgetting": {
        "kind": "powersgd",
        "args": {"rank": 1},
        **LEARN,
        "forgets": True,
    },
    "learn topk": {"kind": "topk", **SPARSE, **LEARN},
    "learn topk, forgetting": {"kind": "topk", **SPARSE, **LEARN, "forgets": True},
}
ON_FOUR = {
    "mean": {"kind": "mean"},
    "powersgd": {"kind": "powersgd", **RANK},
    "topk": {"kind": "topk", **SPARSE},
    "hierarchical": {"kind": "hierarchical"},
    "hierarchical, bf16 across": {"kind": "hierarchical", "args": {"wire": torch.bfloat16}},
    "hierarchical of bf16": {"kind": "hierarchical", **IN_BF16},
}
CASES = [(2, name) for name in ON_TWO] + [(4, name) for name in ON_FOUR]
RESUMED = ("mean", "fp16", "powersgd", "powersgd later", "topk", "topk with momentum")

Outcome = list[dict[str, Any]]  # of each rank


def run(folder: Path, num_ranks: int, cases: dict[str, dict]) -> dict[tuple[int, str], Outcome]:
    common = {"steps": SHORT, "save_before": HALF}
    torch.save([{**common, **case} for case in cases.values()], folder / "cases.pt")
    program = Path(__file__).with_name("compression_ranks.py")
    done = launch(num_ranks, program, folder / "cases.pt", folder / "out.pt")
    assert done.returncode == 0, done.stderr
    keys = [(num_ranks, name) for name in cases]
    return dict(zip(keys, torch.load(folder / "out.pt"), strict=True))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[tuple[int, str], Outcome]:
    """What each rank saw and holds in the end, of every case; one launch a number of ranks."""
    folder = tmp_path_factory.mktemp("compression")
    return run(folder, 2, ON_TWO) | run(folder, 4, ON_FOUR)


def mean_of(outcome: Outcome, step: int) -> dict[str, torch.Tensor]:
    """The mean of what the ranks had in a step."""
    owns = [rank["own"][step] for rank in outcome]
    return {name: torch.stack([own[name] for own in owns]).mean(dim=0) for name in owns[0]}


def is_large(gradient: torch.Tensor) -> bool:
    return gradient.numel() >= MIN_SIZE


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_ranks_get_the_same_bits(outcomes, case):
    first, *others = outcomes[case]
    for other in others:
        for name, value in first["weights"].items():
            assert torch.equal(value, other["weights"][name]), name
        for mean, other_mean in zip(first["mean"], other["mean"], strict=True):
            assert all(torch.equal(mean[name], other_mean[name]) for name in mean)


@pytest.mark.parametrize("case", [case for case in CASES if case[1][:5] != "learn"], ids=str)
def test_the_cases_have_several_buckets(outcomes, case):
    assert outcomes[case][0]["num_buckets"] > 1


@pytest.mark.parametrize(
    "case",
    [(2, "mean"), (2, "mean in pieces"), (4, "mean"), (4, "hierarchical")],
    ids=str,
)
def test_ranks_train_as_one_rank_on_the_whole_batch(outcomes, case):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(*SHORT):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        for name, gradient in gradients_of(model).items():
            got = outcomes[case][0]["mean"][step][name]
            torch.testing.assert_close(got, gradient, rtol=1e-4, atol=1e-6)
        optimizer.step()


@pytest.mark.parametrize(
    ("case", "rtol"),
    [
        ((2, "fp16"), 2**-9),
        ((2, "fp16, large"), 2**-9),
        ((2, "bf16"), 2**-6),
        ((4, "hierarchical, bf16 across"), 2**-6),
        ((2, "mean of bf16"), 2**-6),
        ((4, "hierarchical of bf16"), 2**-5),
    ],
    ids=str,
)
def test_a_mean_in_a_short_type_is_right_to_its_precision(outcomes, case, rtol):
    """Terms of opposite sign can cancel, so that the largest of them gives the scale."""
    for step in range(*SHORT):
        got = outcomes[case][0]["mean"][step]
        for name, mean in mean_of(outcomes[case], step).items():
            scale = max(rank["own"][step][name].abs().max() for rank in outcomes[case])
            error = (got[name].float() - mean.float()).abs().max()
            assert error <= rtol * scale, name


def test_a_sum_that_fp16_cannot_hold_is_no_matter_if_the_terms_can_be_held(outcomes):
    ranks = outcomes[2, "fp16, large"]
    owns = torch.stack([torch.stack([own["4.bias"] for own in rank["own"]]) for rank in ranks])
    assert owns.sum(dim=0).abs().max() > torch.finfo(torch.float16).max > owns.abs().max()
    assert all(mean["4.bias"].isfinite().all() for mean in ranks[0]["mean"])


# Vogels et al. 2019, algorithms 1 and 2


def orthogonalised(matrix: np.ndarray) -> np.ndarray:
    """By Gram and Schmidt, as in the paper."""
    columns: list[np.ndarray] = []
    for column in matrix.T:
        rest = column - sum(((column @ other) * other for other in columns), np.zeros_like(column))
        columns.append(rest / np.linalg.norm(rest))
    return np.stack(columns, axis=1)


def powersgd(name: str, gradients: list[list[np.ndarray]], rank: int, start_after: int) -> Any:
    """What all ranks get in each step, and each rank's error in the end.

    Args:
        gradients: of each step and rank, (n, m).
    """
    num_ranks, (_, num_columns) = len(gradients[0]), gradients[0][0].shape
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    factor = torch.randn(num_columns, rank, generator=generator).double().numpy()
    errors = [np.zeros_like(gradients[0][0]) for _ in range(num_ranks)]
    steps = [np.mean(of_ranks, axis=0) for of_ranks in gradients[:start_after]]
    for of_ranks in gradients[start_after:]:
        matrices = [gradient + error for gradient, error in zip(of_ranks, errors, strict=True)]
        basis = orthogonalised(np.mean([matrix @ factor for matrix in matrices], axis=0))
        factor = np.mean([matrix.T @ basis for matrix in matrices], axis=0)
        steps.append(basis @ factor.T)
        errors = [matrix - steps[-1] for matrix in matrices]
    return steps, errors


@pytest.mark.parametrize(
    ("case", "rank", "start_after"),
    [
        ((2, "powersgd"), 2, 0),
        ((2, "powersgd in pieces"), 2, 0),
        ((2, "powersgd later"), 1, 2),
        ((4, "powersgd"), 2, 0),
    ],
    ids=str,
)
def test_powersgd_does_what_the_paper_says(outcomes, case, rank, start_after):
    ranks = outcomes[case]
    for name in ("0.weight", "2.weight", "4.weight"):
        gradients = [
            [rank_["own"][step][name].flatten(1).double().numpy() for rank_ in ranks]
            for step in range(*SHORT)
        ]
        steps, errors = powersgd(name, gradients, rank, start_after)
        for step, expected in enumerate(steps):
            got = ranks[0]["mean"][step][name].flatten(1).numpy()
            np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-5)
        for rank_, expected in zip(ranks, errors, strict=True):
            got = rank_["state"]["errors"][name].numpy()
            np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("case", [(2, "powersgd"), (4, "powersgd"), (2, "topk")], ids=str)
def test_what_is_not_compressed_is_the_mean(outcomes, case):
    names = ["0.bias", "2.bias", "4.bias"] + ["0.weight", "4.weight"] * (case[1] == "topk")
    for step in range(*SHORT):
        mean = mean_of(outcomes[case], step)
        for name in names:
            torch.testing.assert_close(outcomes[case][0]["mean"][step][name], mean[name])


# Lin et al. 2018, sections 3.1 to 3.3


def topk(gradients: list[list[np.ndarray]], density: float, momentum: float) -> Any:
    """What all ranks get in each step, and each rank's residual in the end.

    Args:
        gradients: of each step and rank, (n,).
    """
    num_ranks, size = len(gradients[0]), len(gradients[0][0])
    velocities, residuals = np.zeros((2, num_ranks, size), np.float32)
    steps = []
    for of_ranks in gradients:
        sent = np.zeros((num_ranks, size), np.float32)
        for rank, gradient in enumerate(of_ranks):
            velocities[rank] = np.float32(momentum) * velocities[rank] + gradient
            residuals[rank] += velocities[rank]
            largest = np.argsort(-np.abs(residuals[rank]))[: math.ceil(density * size)]
            sent[rank, largest] = residuals[rank, largest]
            residuals[rank, largest] = velocities[rank, largest] = 0
        steps.append(sent.sum(axis=0) / num_ranks)
    return steps, residuals


@pytest.mark.parametrize(
    ("case", "momentum"),
    [
        ((2, "topk"), 0.0),
        ((2, "topk in pieces"), 0.0),
        ((2, "topk with momentum"), 0.9),
        ((4, "topk"), 0.0),
    ],
    ids=str,
)
def test_topk_does_what_the_papers_say(outcomes, case, momentum):
    ranks = outcomes[case]
    gradients = [
        [rank["own"][step]["2.weight"].flatten().numpy() for rank in ranks]
        for step in range(*SHORT)
    ]
    steps, residuals = topk(gradients, 0.05, momentum)
    for step, expected in enumerate(steps):
        got = ranks[0]["mean"][step]["2.weight"].flatten().numpy()
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)
    for rank, expected in zip(ranks, residuals, strict=True):
        got = rank["state"]["residuals"]["2.weight"].numpy()
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)


def test_small_parameters_move_by_plain_momentum(outcomes):
    """Their velocity is sent whole: the mean over ranks is the momentum of the mean."""
    ranks = outcomes[2, "topk with momentum"]
    velocity = torch.zeros(5)
    for step in range(*SHORT):
        velocity = 0.9 * velocity + mean_of(ranks, step)["4.bias"]
        torch.testing.assert_close(ranks[0]["mean"][step]["4.bias"], velocity)


@pytest.mark.parametrize(
    ("case", "kept", "tolerance"),
    [
        ((2, "powersgd"), "errors", 1e-6),
        ((4, "powersgd"), "errors", 1e-6),
        ((2, "powersgd later"), "errors", 1e-6),
        ((2, "powersgd of bf16"), "errors", 1e-6),
        ((2, "topk"), "residuals", 1e-6),
        ((4, "topk"), "residuals", 1e-6),
        ((2, "topk of bf16"), "residuals", 2**-8),
    ],
    ids=str,
)
def test_what_was_applied_and_what_is_kept_add_up_to_all_gradients(outcomes, case, kept, tolerance):
    """For a network in bf16, TopK's mean is rounded to it in the end as `Mean`'s is."""
    ranks = outcomes[case]
    for name in ranks[0]["state"][kept]:
        given = sum(rank["own"][step][name].double() for rank in ranks for step in range(*SHORT))
        applied = sum(mean[name].double() for mean in ranks[0]["mean"])
        left = torch.stack([rank["state"][kept][name].double() for rank in ranks]).mean(dim=0)
        total = applied + left.view_as(applied)
        torch.testing.assert_close(total, given / len(ranks), rtol=0, atol=tolerance)


def final_loss(outcome: Outcome) -> float:
    model = network()
    model.load_state_dict(outcome[0]["weights"])
    x, y = (torch.cat(values) for values in zip(*map(batch, range(20)), strict=True))
    with torch.no_grad():
        return loss_of(model, (x, y)).item()


@pytest.mark.parametrize("kind", ["powersgd", "topk"])
def test_error_feedback_brings_the_loss_of_whole_gradients(outcomes, kind):
    whole = final_loss(outcomes[2, "learn mean"])
    compressed = final_loss(outcomes[2, f"learn {kind}"])
    forgetting = final_loss(outcomes[2, f"learn {kind}, forgetting"])
    assert compressed < 1.1 * whole
    assert forgetting > 1.3 * compressed


# Bytes that a rank sends in a step, by the formulas of the docstrings

SHAPES = {name: each.shape for name, each in network().named_parameters()}
WHOLE = 4 * sum(shape.numel() for shape in SHAPES.values())
BIASES = 4 * sum(shape.numel() for name, shape in SHAPES.items() if "bias" in name)
FACTORS = 4 * ((8 + 2 * 5) + (32 + 64) + (5 + 32))  # of rank 1: kernel, and two layers
ENTRIES = 8 * math.ceil(0.05 * 32 * 64) + WHOLE - 4 * 32 * 64


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("mean", [WHOLE] * 6),
        ("mean in pieces", [WHOLE] * 6),
        ("mean of bf16", [WHOLE // 2] * 6),
        ("fp16", [WHOLE // 2] * 6),
        ("bf16", [WHOLE // 2] * 6),
        ("powersgd", [BIASES + 2 * FACTORS] * 6),
        ("powersgd in pieces", [BIASES + 2 * FACTORS] * 6),
        ("powersgd of bf16", [BIASES + 2 * FACTORS] * 6),
        ("powersgd later", [WHOLE] * 2 + [BIASES + FACTORS] * 4),
        ("topk", [ENTRIES] * 6),
        ("topk with momentum", [ENTRIES] * 6),
        ("topk of bf16", [ENTRIES] * 6),
    ],
)
def test_sent_bytes_follow_the_formula(outcomes, name, sent):
    for rank in outcomes[2, name]:
        assert rank["sent_bytes"] == np.cumsum(sent).tolist()


@pytest.mark.parametrize(
    ("name", "within", "across"),
    [
        ("hierarchical", WHOLE, WHOLE),
        ("hierarchical, bf16 across", WHOLE, WHOLE // 2),
        ("hierarchical of bf16", WHOLE // 2, WHOLE // 2),
    ],
)
def test_only_the_first_rank_of_a_worker_sends_across(outcomes, name, within, across):
    for number, rank in enumerate(outcomes[4, name]):
        is_first = number % 2 == 0
        assert rank["outer_bytes"] == (6 * across if is_first else 0)
        assert rank["sent_bytes"][-1] == 6 * (2 * within + across if is_first else within)


@pytest.fixture(scope="module")
def resumed(outcomes, tmp_path_factory) -> dict[tuple[int, str], Outcome]:
    """The second half of the steps, in new processes."""
    rest = {
        name: {
            **ON_TWO[name],
            "steps": (HALF, SHORT[1]),
            "saved": [rank["saved"] for rank in outcomes[2, name]],
        }
        for name in RESUMED
    }
    return run(tmp_path_factory.mktemp("resumed"), 2, rest)


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_reduction_goes_on_bit_by_bit(outcomes, resumed, name):
    """Its first step has other buckets than that of the job that went on."""
    for rank, again in zip(outcomes[2, name], resumed[2, name], strict=True):
        torch.testing.assert_close(again["weights"], rank["weights"], rtol=0, atol=0)
        torch.testing.assert_close(again["state"], rank["state"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, Mean),
        ({"compression": "fp16"}, Cast),
        ({"compression": "bf16"}, Cast),
        ({"compression": "powersgd"}, PowerSgd),
        ({"compression": "topk"}, TopK),
    ],
)
def test_a_study_chooses_its_reduction(settings, kind):
    reduction = make_reduction(contract.Reduction(**settings), None, nn.Linear(2, 2))
    assert type(reduction) is kind


def test_settings_that_cannot_be_are_named():
    with pytest.raises(N3LOError, match="powersgd_rank: 0 is not at least 1"):
        PowerSgd(None, nn.Linear(2, 2), 0)
    with pytest.raises(N3LOError, match=r"topk_density: 1.5 is not above 0 and at most 1"):
        TopK(None, nn.Linear(2, 2), 1.5)
