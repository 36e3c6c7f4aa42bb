"""The Gaussian process and its acquisition, against scikit-learn, quadrature and differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import check_grad
from scipy.stats import norm
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern

from workflow.search.gaussian import (
    Groups,
    fit,
    log_expected_improvement,
    log_expected_improvement_slopes,
)

PLAIN = Groups(np.arange(3), np.ones(3))


def sample(num: int = 30, seed: int = 0):
    rng = np.random.default_rng(seed)
    x = rng.random((num, 3))
    y = np.sin(5 * x[:, 0]) + x[:, 1] ** 2
    return x, (y - y.mean()) / y.std()


def fitted(noise: float = 0.0, num: int = 30):
    x, y = sample(num)
    return fit(x, y, np.full(num, noise), PLAIN, np.random.default_rng(1)), x, y


def reference(model, x, y, variance):
    """scikit-learn's process with the same hyper-parameters; `variance` on the diagonal."""
    kernel = ConstantKernel(model.signal, "fixed") * Matern(1 / model.scale, "fixed", nu=2.5)
    return GaussianProcessRegressor(kernel, alpha=variance, optimizer=None).fit(x, y - model.mean)


def on_diagonal(model) -> float:
    """The variance that fit() put there, all kinds together."""
    covariance = np.linalg.inv(model.inverse)
    return float(covariance[0, 0] - model.signal)


def test_predictions_are_those_of_scikit_learn():
    model, x, y = fitted(noise=0.01)
    at = np.random.default_rng(2).random((50, 3))
    mean, deviation = model.predict(at)
    expected, its_deviation = reference(model, x, y, on_diagonal(model)).predict(at, True)
    assert mean == pytest.approx(expected + model.mean, abs=1e-6)
    assert deviation == pytest.approx(its_deviation, abs=1e-6)


def test_without_noise_it_goes_through_the_points():
    model, x, y = fitted()
    assert model.predict(x)[0] == pytest.approx(y, abs=0.01)


def test_a_noisy_point_pulls_less_than_a_sure_one():
    x, y = sample(20)
    y[0] += 3.0
    sure = fit(x, y, np.zeros(20), PLAIN, np.random.default_rng(1)).predict(x[:1])[0]
    noise = np.zeros(20)
    noise[0] = 9.0
    unsure = fit(x, y, noise, PLAIN, np.random.default_rng(1)).predict(x[:1])[0]
    assert abs(unsure[0] - (y[0] - 3.0)) < 0.5 < abs(sure[0] - (y[0] - 3.0))


def test_a_dimension_without_effect_gets_a_long_length_scale():
    model, _, _ = fitted(num=60)
    assert model.scale[2] < 0.6 * model.scale[0]


def test_slopes_are_the_derivatives():
    model, _, _ = fitted()
    at = np.random.default_rng(3).random((4, 3))
    mean, deviation, slope_mean, slope_deviation = model.slopes(at)
    for got, expected in zip((mean, deviation), model.predict(at), strict=True):
        assert got == pytest.approx(expected)
    for j in range(3):
        step = np.zeros(3)
        step[j] = 1e-5
        up, down = model.predict(at + step), model.predict(at - step)
        assert slope_mean[:, j] == pytest.approx((up[0] - down[0]) / 2e-5, rel=1e-3, abs=1e-5)
        assert slope_deviation[:, j] == pytest.approx((up[1] - down[1]) / 2e-5, rel=1e-3, abs=1e-5)


def test_pending_points_take_away_uncertainty_and_move_no_mean():
    model, x, y = fitted()
    pending = np.random.default_rng(4).random((3, 3))
    believed = model.with_points(pending)
    at = np.random.default_rng(5).random((20, 3))
    assert believed.predict(at)[0] == pytest.approx(model.predict(at)[0], abs=1e-6)
    assert (believed.predict(pending)[1] < 0.01).all()
    # the same as conditioning on them at their predicted mean
    both = np.vstack([x, pending])
    values = np.concatenate([y, model.predict(pending)[0]])
    diagonal = np.array([on_diagonal(model)] * len(x) + [1e-6 * model.signal] * 3)
    expected, deviation = reference(model, both, values, diagonal).predict(at, True)
    assert believed.predict(at)[0] == pytest.approx(expected + model.mean, abs=1e-4)
    assert believed.predict(at)[1] == pytest.approx(deviation, abs=1e-4)


@pytest.mark.parametrize("z", [3.0, 0.0, -0.9, -1.1, -3.0, -8.0])
def test_log_expected_improvement_is_the_integral(z):
    mean, deviation, best = 0.3, 0.7, 0.3 + 0.7 * z
    integral, _ = quad(
        lambda t: t * norm.pdf(best - t, mean, deviation), 0, max(best - mean, 0) + 12 * deviation,
        epsabs=0, epsrel=1e-10, limit=500,
    )  # fmt: skip
    got = log_expected_improvement(np.array([mean]), np.array([deviation]), best)
    assert got[0] == pytest.approx(math.log(integral), rel=1e-6)


def test_it_orders_points_also_where_improvement_underflows():
    far = log_expected_improvement(np.array([10.0, 100.0, 1e4, 1e7]), np.ones(4), 0.0)
    assert np.isfinite(far).all()
    assert (np.diff(far) < 0).all()


@pytest.mark.parametrize("z", [2.0, -0.5, -2.0, -30.0])
def test_its_slopes_are_the_derivatives(z):
    def value(v):
        return log_expected_improvement(v[:1], v[1:], z)[0]

    def slope(v):
        _, by_mean, by_deviation = log_expected_improvement_slopes(v[:1], v[1:], z)
        return np.concatenate([by_mean, by_deviation])

    at = np.array([0.0, 1.0])
    assert check_grad(value, slope, at) < 1e-4 * max(1, abs(slope(at)).max())


def test_two_values_of_a_choice_are_one_apart_on_one_length_scale():
    groups = Groups(np.array([0, 0, 0, 1]), np.ones(2))
    rng = np.random.default_rng(0)
    x = np.hstack([np.eye(3)[rng.integers(3, size=30)] / math.sqrt(2), rng.random((30, 1))])
    y = rng.normal(size=30)
    model = fit(x, y, np.full(30, 0.1), groups, rng)
    assert len(set(model.scale[:3])) == 1
