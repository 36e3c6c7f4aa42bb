"""What folds say: against the formulas of the two-way layout, and by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import t as student

from workflow.folds import PRIOR_DOF, FoldModel


def table(num_trials: int, num_folds: int, sd: float, seed: int = 0) -> dict[int, list[float]]:
    """m_t + b_f + e_tf, with b_f much larger than e_tf."""
    rng = np.random.default_rng(seed)
    level = rng.normal(0, 1, size=(num_trials, 1))
    ease = np.linspace(-2, 2, num_folds)
    values = level + ease + rng.normal(0, sd, size=(num_trials, num_folds))
    return dict(enumerate(values.tolist()))


def test_the_ease_of_a_fold_is_no_noise():
    model = FoldModel.of(table(200, 3, sd=0.1))
    assert model.ease == pytest.approx([-2, 0, 2], abs=0.03)
    assert model.variance == pytest.approx(0.01, rel=0.15)
    assert model.dof == 199 * 2


def test_a_trial_without_some_folds_has_the_mean_that_it_would_have_with_them():
    model = FoldModel.of(table(200, 3, sd=0.01))
    assert model.mean([3.0 - 2, None, None]) == pytest.approx(3.0, abs=0.01)
    assert model.mean([None, 3.0, 3.0 + 2]) == pytest.approx(3.0, abs=0.01)
    assert math.isnan(model.mean([None, None, None]))


def test_the_noise_of_a_mean_is_the_moderated_standard_error():
    model = FoldModel.of(table(200, 3, sd=0.1))
    scores = [1.0 - 2 + 0.3, 1.0, 1.0 + 2 - 0.3]  # residuals 0.3, 0, -0.3
    own = sum((s - e - 1) ** 2 for s, e in zip(scores, model.ease, strict=True))
    expected = (PRIOR_DOF * model.variance + own) / (PRIOR_DOF + 2)
    assert model.noise(scores) == pytest.approx(math.sqrt(expected / 3), rel=0.01)


def test_one_trial_alone_has_the_standard_error_of_its_folds():
    assert FoldModel.of({0: [0.2, 0.4]}).noise([0.2, 0.4]) == pytest.approx(0.1)
    assert FoldModel.of({0: [0.2]}).noise([0.2]) is None
    assert FoldModel.of({}).noise([0.2, 0.4]) == pytest.approx(0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_no_number_has_no_noise_and_spoils_no_model(bad):
    rows = table(50, 3, sd=0.1)
    model = FoldModel.of(rows | {99: [bad, 1.0, 1.0]})
    assert model == FoldModel.of(rows)
    assert model.noise([bad, 1.0, 1.0]) is None


def test_a_wild_trial_does_not_make_the_others_look_noisy():
    rows = table(50, 3, sd=0.1)
    wild = FoldModel.of(rows | {99: [-50.0, 70.0, 3.0]})
    assert wild.variance == pytest.approx(FoldModel.of(rows).variance, rel=0.2)


def test_the_chance_is_that_of_a_student_t_with_the_formula_of_the_docstring():
    model = FoldModel.of(table(20, 5, sd=0.1))
    best = [0.0] * 5
    scores = [0.2, 0.3, None, None, None]
    width = math.sqrt(2 * model.variance * (5 - 2) / (2 * 5))
    assert model.chance(scores, best) == pytest.approx(student.cdf(-0.25 / width, 19 * 4))
    assert model.chance(scores, best, "max") == pytest.approx(student.cdf(0.25 / width, 19 * 4))


def test_the_chance_is_as_often_right_as_it_says():
    """Over many pairs of trials of nearly the same level, on the first 2 of 5 folds."""
    rng = np.random.default_rng(3)
    model = FoldModel.of(table(400, 5, sd=0.1))
    said, happened = [], []
    for _ in range(4000):
        level = rng.normal(0, 1)  # a flat prior, as far as 0.1 can see
        pair = rng.normal(0, 0.1, size=(2, 5)) + np.array([[level], [level + rng.uniform(-1, 1)]])
        said.append(model.chance([*pair[1, :2], None, None, None], pair[0].tolist()))
        happened.append(pair[1].mean() < pair[0].mean())
    said_of, did = np.array(said), np.array(happened)
    for low, high in ((0.02, 0.1), (0.1, 0.3), (0.3, 0.7), (0.7, 0.98)):
        some = (said_of > low) & (said_of < high)
        assert did[some].mean() == pytest.approx(said_of[some].mean(), abs=0.08)


def test_without_two_complete_trials_nothing_is_hopeless():
    assert FoldModel.of({0: [0.1, 0.2, 0.3]}).chance([9.0, None, None], [0.1, 0.2, 0.3]) == 1.0
