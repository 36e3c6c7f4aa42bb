"""The model through the trials' scores: what it predicts, and what it says matters."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from made_runs import Made, make_run
from told_runs import MIXED, REAL, TWO, Told, write_run

from workflow.surrogate import Scale, Surrogate, sobol_indices
from workflow.view import View

A, B, KIND = "model.args.a", "model.args.b", "model.args.kind"


def parabola(a: float) -> float:
    return 0.2 + (a - 0.3) ** 2


def exact(num: int) -> list[Told]:
    """Trials without noise on a parabola."""
    return [Told(point={"a": a}, foms=[parabola(a)] * 2) for a in np.linspace(0, 1, num).tolist()]


def random_points(num: int) -> list[dict[str, float]]:
    rng = np.random.default_rng(2)
    return [{"a": float(rng.random()), "b": float(10 ** rng.uniform(-2, 0))} for _ in range(num)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Surrogate:
    folder = tmp_path_factory.mktemp("runs") / "made"
    surrogate = Surrogate.of(View(make_run(folder, Made(num_trials=60, epochs=1))))
    assert surrogate is not None
    return surrogate


# Sensitivity


def test_the_indices_are_those_of_the_ishigami_function():
    """Ishigami and Homma 1990: sin x + 7 sin^2 y + 0.1 z^4 sin x, over (-pi, pi)^3."""
    a, b = 7.0, 0.1

    def ishigami(unit: np.ndarray) -> np.ndarray:
        x, y, z = (math.pi * (2 * unit - 1)).T
        return np.sin(x) + a * np.sin(y) ** 2 + b * z**4 * np.sin(x)

    pi4 = math.pi**4
    alone = np.array([0.5 * (1 + b * pi4 / 5) ** 2, a**2 / 8, 0.0])
    both = b**2 * pi4**2 * (1 / 18 - 1 / 50)  # of x and z
    variance = alone.sum() + both
    first, total = sobol_indices(ishigami, 3, 2**13)
    assert first == pytest.approx(alone / variance, abs=0.01)
    assert total == pytest.approx((alone + np.array([both, 0, both])) / variance, abs=0.01)


def test_of_a_sum_the_indices_are_the_shares_of_its_variance():
    first, total = sobol_indices(lambda unit: unit @ np.array([3.0, 4.0, 0.0]), 3, 2**10)
    assert first == pytest.approx([0.36, 0.64, 0], abs=0.01)
    assert total == pytest.approx([0.36, 0.64, 0], abs=0.01)


def test_nothing_matters_to_a_constant():
    first, total = sobol_indices(lambda unit: np.full(len(unit), 0.7), 2, 16)
    assert first.tolist() == total.tolist() == [0, 0]


def test_the_most_important_dimension_comes_first(made):
    """`true_score` weighs the learning rate most, then the width."""
    table = made.importances()
    assert list(table["path"][:2]) == ["training.optimizer.lr", "model.args.width"]
    assert (table["total"].diff()[1:] <= 0).all()
    assert made.skill > 0.9


def test_what_is_inactive_has_no_effect(tmp_path):
    """Only of kind x the score depends on b, which there alone is active."""
    rng = np.random.default_rng(0)
    trials = []
    for _ in range(60):
        kind = ["x", 1, 1.5, True][rng.integers(4)]
        point = {"kind": kind, "a": float(rng.random())}
        if kind == "x":
            point["b"] = float(rng.random())
        trials.append(Told(point=point, foms=[0.2 + point.get("b", 0.5) + point["a"]] * 2))
    surrogate = Surrogate.of(write_run(tmp_path / "run", trials, MIXED))
    table = surrogate.importances().set_index("path")
    # Var(b) / 4 of kind x on average, beside Var(a): the rest is what the model does not know.
    assert table.loc[A, "total"] > 2 * table.loc[B, "total"] > 0
    along = surrogate.slice(B)["mean"].to_numpy(dtype=float)
    assert np.ptp(along) == pytest.approx(1.0, abs=0.1)  # its parent is set such that it is active
    grid = surrogate.contour(KIND, B)
    assert np.ptp(grid.mean[:, 1:], axis=0) == pytest.approx(0.0, abs=1e-12)
    assert grid.x == ["x", 1, 1.5, True]
    assert type(grid.x[3]) is bool


# Predictions


def test_the_mean_passes_through_exact_observations(tmp_path):
    surrogate = Surrogate.of(write_run(tmp_path / "run", exact(9)))
    table = surrogate.slice(A, num=17)
    values = table["value"].to_numpy(dtype=float)
    assert values == pytest.approx(np.linspace(0, 1, 17))
    assert table["mean"].to_numpy() == pytest.approx(parabola(values), abs=0.01)
    assert ((table["low"] <= table["mean"]) & (table["mean"] <= table["high"])).all()


def test_the_band_holds_what_is_true(tmp_path):
    """Of noisy folds; 95 % of a smooth function's values, and here all but a few of 41."""
    rng = np.random.default_rng(3)
    points = np.linspace(0, 1, 30).tolist()
    trials = [Told(point={"a": a}, foms=parabola(a) + 0.03 * rng.normal(size=3)) for a in points]
    table = Surrogate.of(write_run(tmp_path / "run", trials)).slice(A)
    truth = parabola(table["value"].to_numpy(dtype=float))
    assert np.mean((table["low"] <= truth) & (truth <= table["high"])) > 0.85
    assert (table["high"] - table["low"]).max() < 0.2


@pytest.mark.parametrize("goal", ["min", "max"])
def test_the_other_values_are_those_of_the_best_trial(tmp_path, goal):
    sign = 1 if goal == "min" else -1
    points = random_points(40)
    scores = [2 + sign * ((p["a"] - 0.3) ** 2 + p["b"]) for p in points]
    trials = [Told(point=p, foms=[s, s]) for p, s in zip(points, scores, strict=True)]
    surrogate = Surrogate.of(write_run(tmp_path / "run", trials, TWO, goal=goal))
    best = points[int(np.argmin(sign * np.array(scores)))]
    assert surrogate.space.decode(surrogate.best) == pytest.approx({A: best["a"], B: best["b"]})
    table = surrogate.slice(A)
    truth = 2 + sign * ((table["value"].to_numpy(dtype=float) - 0.3) ** 2 + best["b"])
    assert table["mean"].to_numpy() == pytest.approx(truth, abs=0.02)


def test_values_over_decades_are_modelled_by_their_logarithm(tmp_path):
    trials = [Told(point={"a": a}, foms=[10 ** (4 * a)] * 2) for a in np.linspace(0, 1, 12)]
    surrogate = Surrogate.of(write_run(tmp_path / "run", trials))
    table = surrogate.slice(A, num=23)
    assert surrogate.scale.is_log
    assert (table["low"] > 0).all()
    truth = 10 ** (4 * table["value"].to_numpy(dtype=float))
    assert table["mean"].to_numpy() / truth == pytest.approx(np.ones(23), abs=0.05)


def test_the_scale_goes_to_the_process_and_back():
    for values, goal in (([0.1, 0.2, 40.0], "min"), ([-1.0, 2.0, 3.0], "max")):
        scale = Scale.of(np.array(values), goal)
        told = scale.told(np.array(values))
        assert (told.mean(), told.std()) == pytest.approx((0, 1))
        assert scale.said(told) == pytest.approx(values)
        assert np.argmin(told) == (0 if goal == "min" else 2)


def test_a_training_that_exploded_does_not_press_the_others_together():
    values = np.array([*np.linspace(-0.5, 0.5, 20), 1e6])
    told = Scale.of(values, "min").told(values)
    assert np.ptp(told[:20]) > 1


def test_the_deviation_is_in_units_of_the_metric(tmp_path):
    """Of the same trials with scores ten times as large, it is ten times as large."""
    points = random_points(12)
    grids = []
    for name, factor in (("one", 1.0), ("ten", 10.0)):
        trials = [Told(point=p, foms=[factor * (1 + p["a"] * p["b"])] * 2) for p in points]
        grids.append(Surrogate.of(write_run(tmp_path / name, trials, TWO)).contour(A, B, num=5))
    assert grids[1].deviation == pytest.approx(10 * grids[0].deviation, rel=1e-3)
    assert grids[0].mean.shape == (5, 5)


def test_a_prediction_is_made_where_the_constraints_hold(tmp_path):
    points = [p for p in random_points(40) if p["a"] + p["b"] <= 1]
    trials = [Told(point=p, foms=[p["a"], p["a"]]) for p in points]
    rule = "model.args.a + model.args.b <= 1"
    view = write_run(tmp_path / "run", trials, TWO, constraints=[rule])
    grid = Surrogate.of(view).contour(A, B, num=7)
    x, y = np.meshgrid(np.array(grid.x, dtype=float), np.array(grid.y, dtype=float))
    assert (np.isnan(grid.mean) == (x + y > 1)).all()


# Which trials


def test_there_is_no_model_of_too_little(tmp_path):
    told = {
        "three": exact(3),
        "failed": [Told(point={"a": a / 9}, status="failed") for a in range(9)],
        "nan": [Told(point={"a": a / 9}, foms=[math.nan] * 2) for a in range(9)],
        "same": [Told(point={"a": 0.5}, foms=[a, a]) for a in range(9)],
        "none": [],
    }
    for name, trials in told.items():
        assert Surrogate.of(write_run(tmp_path / name, trials)) is None


def test_equal_scores_make_a_flat_model(tmp_path):
    trials = [Told(point={"a": a / 9}) for a in range(9)]
    surrogate = Surrogate.of(write_run(tmp_path / "run", trials))
    assert surrogate.slice(A)["mean"].to_numpy() == pytest.approx(np.full(41, 0.5))
    assert surrogate.importances()["total"].tolist() == [0]
    assert math.isnan(surrogate.skill)


def test_trials_with_a_smaller_budget_are_left_out(tmp_path):
    less = [
        Told(point=told.point, foms=[9.0, 9.0], settings={"training.epochs": 1})
        for told in exact(9)
    ]
    surrogate = Surrogate.of(write_run(tmp_path / "run", [*less, *exact(7)]))
    assert surrogate.num_trials == 7
    assert surrogate.slice(A)["mean"].max() < 1


def test_trials_outside_of_a_space_that_changed_are_left_out(tmp_path):
    view = write_run(tmp_path / "run", exact(9))
    study = Path(view.folder, "study.toml")
    study.write_text(study.read_text().replace(REAL, REAL.replace("1.0", "0.5")))
    assert Surrogate.of(View(view.folder)).num_trials == 5


def test_of_many_trials_it_takes_some_and_always_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("workflow.surrogate.MOST", 20)
    view = write_run(tmp_path / "run", exact(50))
    first, second = Surrogate.of(view), Surrogate.of(view)
    assert first.num_trials == 20
    assert first.slice(A).equals(second.slice(A))
    assert first.importances().equals(second.importances())
    assert first.space.decode(first.best)[A] == pytest.approx(0.3, abs=0.02)
