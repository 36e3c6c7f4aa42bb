"""Learning rates, step by step, and the optimizers of large batches: against their formulas."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import nn
from training_helpers import classes_h5, launch, make_task, write_task

from apps.contract import N3LOError, Schedule, Training, read_json_lines
from apps.experiment import LARGE_BATCH, Supervised, make_optimizer, make_schedule

LR, EPOCHS = 0.1, 12
Formula = Callable[[float], float]  # the learning rate after so many steps


def rates(phases: list[Schedule], steps: int, unit: int = 1) -> list[float]:
    """The learning rate of each step, as the training loop has it."""
    optimizer = make_optimizer(
        {"name": "sgd", "lr": LR, "momentum": 0.9}, [nn.Parameter(torch.ones(1))]
    )
    scheduler = make_schedule(phases, optimizer, EPOCHS, unit)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


# -- one schedule ----------------------------------------------------------------------------------


def cosine(first: float, last: float, part: float) -> float:
    return last + (first - last) * (1 + math.cos(math.pi * part)) / 2


def one_cycle(steps: int, highest: float, rises: float = 0.3) -> Formula:
    """Smith and Topin 2017 (arXiv:1708.07120), with PyTorch's 1/25 of the highest rate as first,
    1e-4 of that as last, and cosines between."""
    first, top = highest / 25, rises * steps - 1

    def rate(step: float) -> float:
        if step <= top:
            return cosine(first, highest, step / top)
        return cosine(highest, first / 1e4, (step - top) / (steps - 1 - top))

    return rate


def schedules(length: int) -> dict[str, tuple[Schedule, Formula]]:
    """What a study says, and the formula; of those that have a length it is left out."""
    return {
        "constant": (
            {"name": "constant_lr", "factor": 0.25, "total_iters": 4},
            lambda step: LR * (0.25 if step < 4 else 1),
        ),
        "exponential": (
            {"name": "exponential_lr", "gamma": 0.9},
            lambda step: LR * 0.9**step,
        ),
        "step": (
            {"name": "step_lr", "step_size": 5, "gamma": 0.3},
            lambda step: LR * 0.3 ** (step // 5),
        ),
        "multi-step": (
            {"name": "MultiStepLR", "milestones": [2, 3, 9], "gamma": 0.5},
            lambda step: LR * 0.5 ** bisect_right([2, 3, 9], step),
        ),
        "cosine": (
            {"name": "cosine_annealing_lr", "eta_min": 0.01},
            lambda step: cosine(LR, 0.01, step / length),
        ),
        "restarts": (
            {"name": "cosine_annealing_warm_restarts", "T_0": 4},
            lambda step: cosine(LR, 0, step % 4 / 4),
        ),
        "polynomial": (
            {"name": "polynomial_lr", "power": 2.0, "epochs": EPOCHS},
            lambda step: LR * (1 - step / length) ** 2,
        ),
        "linear": (
            {"name": "linear_lr", "start_factor": 0.2, "end_factor": 0.6, "epochs": EPOCHS},
            lambda step: LR * (0.2 + 0.4 * step / length),
        ),
        "one cycle": (
            {"name": "one_cycle_lr", "max_lr": 0.5, "epochs": EPOCHS},
            one_cycle(length, 0.5),
        ),
    }


@pytest.mark.parametrize("unit", [1, 7], ids=["per epoch", "per update"])
@pytest.mark.parametrize("name", schedules(1))
def test_each_step_has_the_learning_rate_of_the_formula(name, unit):
    length = EPOCHS * unit
    settings, formula = schedules(length)[name]
    assert rates([settings], length, unit) == pytest.approx([formula(t) for t in range(length)])


def test_a_length_that_is_given_is_kept():
    for settings in (
        {"name": "cosine_annealing_lr", "T_max": 5},
        {"name": "cosine_annealing_lr", "T_max": 5, "epochs": EPOCHS},
        {"name": "cosine_annealing_lr", "epochs": 5},
    ):
        expected = [cosine(LR, 0, step / 5) for step in range(6)]
        assert rates([settings], 6) == pytest.approx(expected)
    # PyTorch's own default, where no epochs are given.
    expected = [LR * (1 / 3 + 2 / 3 * min(step, 5) / 5) for step in range(8)]
    assert rates([{"name": "linear_lr"}], 8) == pytest.approx(expected)


# -- schedules that follow each other --------------------------------------------------------------

WARM_UP = {"name": "linear_lr", "start_factor": 0.1, "epochs": 3}


@pytest.mark.parametrize("unit", [1, 5], ids=["per epoch", "per update"])
@pytest.mark.parametrize(
    "name", ["cosine", "exponential", "step", "multi-step", "constant", "restarts"]
)
def test_what_follows_a_warm_up_begins_with_the_whole_learning_rate(name, unit):
    warm, left = 3 * unit, (EPOCHS - 3) * unit
    settings, formula = schedules(left)[name]
    expected = [LR * (0.1 + 0.9 * step / warm) for step in range(warm)]
    expected += [formula(step) for step in range(left)]
    assert rates([WARM_UP, settings], EPOCHS * unit, unit) == pytest.approx(expected)


@pytest.mark.parametrize("unit", [1, 5], ids=["per epoch", "per update"])
def test_three_phases_follow_each_other(unit):
    hold = {"name": "constant_lr", "factor": 1.0, "epochs": 4}
    decay = {"name": "polynomial_lr", "power": 1.0, "epochs": 5}
    expected = [LR * (0.1 + 0.9 * step / (3 * unit)) for step in range(3 * unit)]
    expected += [LR] * (4 * unit)
    expected += [LR * (1 - step / (5 * unit)) for step in range(5 * unit)]
    assert rates([WARM_UP, hold, decay], EPOCHS * unit, unit) == pytest.approx(expected)


def test_a_study_counts_epochs_or_updates_as_it_says():
    model = nn.Linear(2, 2)
    for per, unit in (("epoch", 1), ("update", 20)):
        training = Training(
            epochs=EPOCHS,
            optimizer={"name": "sgd", "lr": LR},
            scheduler=[WARM_UP, {"name": "cosine_annealing_lr"}],
            schedule_per=per,
        )
        experiment = Supervised(model, training)
        optimizers = experiment.optimizers()
        scheduler = experiment.schedulers(optimizers, updates_per_epoch=20)["model"]
        for _ in range(3 * unit):
            optimizers["model"].step()
            scheduler.step()
        assert scheduler.get_last_lr() == pytest.approx([LR])
        for _ in range((EPOCHS - 3) * unit // 3):  # a third of the cosine
            scheduler.step()
        assert scheduler.get_last_lr() == pytest.approx([LR * 0.75])


# -- mistakes --------------------------------------------------------------------------------------


def test_a_phase_before_another_has_a_length():
    with pytest.raises(ValueError, match="'linear_lr' is followed by another and needs its length"):
        Training(scheduler=[{"name": "linear_lr"}, {"name": "cosine_annealing_lr"}])
    with pytest.raises(ValueError, match="'linear_lr' is followed by another and needs its length"):
        Training(scheduler=[{"name": "linear_lr", "epochs": 0}, {"name": "cosine_annealing_lr"}])


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"name": "cosine"},
            "training.scheduler: there is no 'cosine', only constantlr, cosineannealinglr, "
            "cosineannealingwarmrestarts, cycliclr, exponentiallr, linearlr, multisteplr, "
            "onecyclelr, polynomiallr, reducelronplateau, steplr",
        ),
        (
            {"name": "step_lr", "step_size": 3, "gama": 0.1},
            "training.scheduler 'step_lr': got an unexpected keyword argument 'gama'; it takes "
            "step_size, gamma, last_epoch",
        ),
        (
            {"name": "step_lr"},
            "training.scheduler 'step_lr': missing a required argument: 'step_size'; it takes "
            "step_size, gamma, last_epoch",
        ),
        (
            {"name": "constant_lr", "factor": 2.0},
            "training.scheduler 'constant_lr': Constant multiplicative factor expected to be "
            "between 0 and 1.",
        ),
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_a_mistake_is_one_line(settings, line, alone):
    with pytest.raises(N3LOError) as caught:
        rates([settings] if alone else [WARM_UP, settings], 1)
    assert str(caught.value) == line


# -- the learning rate of more ranks ---------------------------------------------------------------

SYNC = {"synchronous": True}
# How a task trains, and how many of its batches one update averages.
BATCHES: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"strategy": "local"}, {}, 1),
    ({"strategy": "local", "accumulate": 4}, {}, 4),
    ({"strategy": "allreduce"}, {"num_workers": 2, "ranks_per_worker": 3}, 6),
    ({"strategy": "allreduce", "accumulate": 4}, {"num_workers": 2, "ranks_per_worker": 3}, 24),
    ({"strategy": "sharded"}, {"num_workers": 2, "ranks_per_worker": 3}, 6),
    ({"strategy": "sharded", "accumulate": 2}, {"ranks_per_worker": 4}, 8),
    # a rank that reads as two would
    ({"strategy": "allreduce", "lanes": 4, "accumulate": 3}, {"num_workers": 2}, 12),
    # the ranks of a worker train on one batch
    ({"strategy": "tensor"}, {"num_workers": 2, "ranks_per_worker": 3}, 2),
    ({"strategy": "tensor", "accumulate": 5}, {"num_workers": 2, "ranks_per_worker": 3}, 10),
    ({"strategy": "pipeline"}, {"ranks_per_worker": 4}, 1),
    ({"strategy": "pipeline"}, {"num_workers": 3, "ranks_per_worker": 4, "ranks_per_stage": 2}, 3),
    # workers train apart
    (
        {"strategy": "allreduce", "reduction": {"average_every": 8}, "accumulate": 3},
        {"num_workers": 4, "ranks_per_worker": 2},
        6,
    ),
    ({"strategy": "downpour"}, {"num_workers": 4, "ranks_per_worker": 2}, 2),
    ({"strategy": "easgd", "exchange": SYNC}, {"num_workers": 4, "ranks_per_worker": 2}, 2),
    ({"strategy": "gem"}, {"num_workers": 4}, 1),
    # masters wait for all workers, or all but one
    ({"strategy": "downpour", "exchange": SYNC}, {"num_workers": 4, "ranks_per_worker": 2}, 8),
    (
        {"strategy": "downpour", "exchange": {**SYNC, "backup_workers": 1}},
        {"num_workers": 4, "ranks_per_worker": 2},
        6,
    ),
    ({"strategy": "downpour", "exchange": SYNC}, {"num_workers": 2, "sub_masters": [3]}, 6),
]


@pytest.mark.parametrize(("training", "layout", "batches"), BATCHES, ids=str)
def test_the_learning_rate_grows_with_the_batches_of_an_update(training, layout, batches):
    for scaling, factor in (("none", 1), ("linear", batches), ("sqrt", math.sqrt(batches))):
        task = make_task(
            [Path("events.h5")],
            training={**training, "lr_scaling": scaling},
            layout=layout,
        )
        assert task.scaled_training.optimizer == {"name": "sgd", "lr": pytest.approx(0.1 * factor)}
        assert task.training.optimizer == {"name": "sgd", "lr": 0.1}


def test_a_training_scales_its_learning_rate_once(tmp_path):
    task = make_task(
        [classes_h5(tmp_path / "events.h5")],
        training={
            "accumulate": 4,
            "lr_scaling": "linear",
            "epochs": 3,
            "scheduler": {"name": "exponential_lr", "gamma": 0.5},
        },
    )
    done = launch(1, "-m", "apps.train", write_task(tmp_path / "task", task))
    assert done.returncode == 0, done.stderr
    rows = read_json_lines(tmp_path / "task" / "history.jsonl")
    assert [row["lr"] for row in rows] == pytest.approx([0.4, 0.2, 0.1])


# -- optimizers of large batches -------------------------------------------------------------------


def test_lars_moves_as_in_the_paper():
    """You, Gitman and Ginsburg 2017 (arXiv:1708.03888), algorithm 1; vectors as in plain SGD."""
    lr, decay, momentum, trust = 2.0, 0.05, 0.9, 0.01
    generator = torch.Generator().manual_seed(1)
    matrix, vector = torch.randn(4, 3, generator=generator), torch.randn(3, generator=generator)
    gradients = [
        (torch.randn(4, 3, generator=generator), torch.randn(3, generator=generator))
        for _ in range(3)
    ]
    parameters = [nn.Parameter(matrix.clone()), nn.Parameter(vector.clone())]
    settings = {"name": "lars", "lr": lr, "weight_decay": decay, "momentum": momentum}
    optimizer = make_optimizer({**settings, "trust_coefficient": trust}, parameters)

    matrix_speed, vector_speed = torch.zeros(4, 3), torch.zeros(3)
    for of_matrix, of_vector in gradients:
        for parameter, gradient in zip(parameters, (of_matrix, of_vector), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        ratio = trust * matrix.norm() / (of_matrix.norm() + decay * matrix.norm())
        matrix_speed = momentum * matrix_speed + lr * ratio * (of_matrix + decay * matrix)
        vector_speed = momentum * vector_speed + lr * of_vector
        matrix, vector = matrix - matrix_speed, vector - vector_speed
        torch.testing.assert_close(parameters[0].detach(), matrix)
        torch.testing.assert_close(parameters[1].detach(), vector)


def test_lamb_moves_in_the_direction_of_the_paper():
    """You et al. 2020 (arXiv:1904.00962), algorithm 2, without decay: Adam's direction, and the
    length of the weight. The library debiases the length once more, by 1 / (1 - beta1^t)."""
    lr, betas, eps = 0.01, (0.9, 0.99), 1e-12
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(4, 3, generator=generator)
    gradients = torch.randn(3, 4, 3, generator=generator)
    parameter = nn.Parameter(weight.clone())
    settings = {"name": "Lamb", "lr": lr, "betas": list(betas), "eps": eps}
    optimizer = make_optimizer(settings, [parameter])

    mean, square = torch.zeros(4, 3), torch.zeros(4, 3)
    for number, gradient in enumerate(gradients, start=1):
        parameter.grad = gradient.clone()
        optimizer.step()
        mean = betas[0] * mean + (1 - betas[0]) * gradient
        square = betas[1] * square + (1 - betas[1]) * gradient**2
        step = mean / (1 - betas[0] ** number) / (square / (1 - betas[1] ** number)).sqrt()
        length = lr * weight.norm() / (1 - betas[0] ** number)
        weight = weight - length * step / step.norm()
        torch.testing.assert_close(parameter.detach(), weight)


@pytest.mark.parametrize("name", LARGE_BATCH)
def test_each_is_found_by_its_name_and_goes_downhill(name):
    torch.manual_seed(0)
    # Square: of longer ones float32 can make Shampoo's matrices singular.
    weight, target = nn.Parameter(torch.randn(4, 4)), torch.randn(4, 4)
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = make_optimizer({"name": name.lower(), "lr": 0.01}, [weight, frozen])
    assert type(optimizer) is getattr(pytorch_optimizer, name)
    assert optimizer.param_groups[0]["params"] == [weight]
    losses = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = (weight - target).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", LARGE_BATCH)
def test_an_argument_that_it_would_take_and_not_use_is_refused(name):
    weight = [nn.Parameter(torch.ones(2, 2))]
    getattr(pytorch_optimizer, name)(weight, momentun=0.5)  # not a word
    with pytest.raises(N3LOError) as caught:
        make_optimizer({"name": name, "lr": 0.1, "momentun": 0.5}, weight)
    said = str(caught.value)
    assert said.startswith(
        f"training.optimizer '{name}': got an unexpected keyword argument 'momentun'; it takes lr, "
    )
    assert "\n" not in said
    assert "kwargs" not in said


def test_an_optimizer_that_is_not_there_shows_all_that_are():
    with pytest.raises(N3LOError) as caught:
        make_optimizer({"name": "larc"}, [nn.Parameter(torch.ones(2))])
    said = str(caught.value)
    assert said.startswith("training.optimizer: there is no 'larc', only adadelta, ")
    assert all(name.lower() in said for name in LARGE_BATCH)


def test_a_task_is_the_same_after_its_learning_rate_was_scaled():
    """What a rank puts into its settings must not be scaled again by what reads the task."""
    task = make_task([Path("events.h5")], training={"accumulate": 3, "lr_scaling": "linear"})
    training = task.scaled_training
    [group] = Supervised(nn.Linear(2, 2), training).optimizers()["model"].param_groups
    assert group["lr"] == pytest.approx(0.3)
