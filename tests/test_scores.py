"""How trials are compared."""

from __future__ import annotations

import math

import numpy as np
import pytest

from apps.contract import Objective
from workflow.scores import Scoring, mean_and_spread, pareto_front

LESS, MORE = Objective(metric="val_loss", goal="min"), Objective(metric="val_accuracy", goal="max")


def test_the_score_is_the_mean_over_folds():
    assert Scoring(LESS).score([0.2, 0.4]) == pytest.approx(0.3)
    assert math.isnan(Scoring(LESS).score([]))


@pytest.mark.parametrize(("objective", "sign"), [(LESS, 1), (MORE, -1)])
def test_a_penalty_makes_a_spread_score_worse(objective, sign):
    deviation = 0.2 / math.sqrt(2)
    score = Scoring(objective, spread_penalty=2.0).score([0.2, 0.4])
    assert score == pytest.approx(0.3 + sign * 2 * deviation)


def test_scoring_goes_to_plain_values_and_back():
    scoring = Scoring(MORE, 0.5, (LESS, Objective(metric="seconds", goal="min")))
    assert Scoring.of_plain(scoring.plain()) == scoring
    assert scoring.goals == ["max", "min", "min"]


def test_spread_is_the_sample_deviation():
    assert mean_and_spread([1.0, 2.0, 4.0]) == pytest.approx((7 / 3, np.std([1, 2, 4], ddof=1)))


def test_the_front_is_what_no_other_row_beats():
    rows = [[1.0, 5.0], [2.0, 2.0], [2.0, 3.0], [5.0, 1.0], [math.nan, 0.0], [1.0, 5.0]]
    assert pareto_front(rows, ["min", "min"]) == [True, True, False, True, False, True]


def test_the_front_respects_each_goal():
    rows = [[0.9, 10.0], [0.8, 5.0], [0.7, 7.0]]  # accuracy, seconds
    assert pareto_front(rows, ["max", "min"]) == [True, True, False]


def test_with_one_objective_the_front_is_the_best():
    assert pareto_front([[3.0], [1.0], [2.0]], ["min"]) == [False, True, False]
