"""A Gaussian process for expensive functions, on NumPy and SciPy alone.

ARD Matérn-5/2 kernel; the hyper-parameters are at the maximum of their posterior (MAP); each
observation may bring its own noise (Rasmussen and Williams 2006, Gaussian Processes for Machine
Learning, eq. 2.25-2.26, 4.17, 5.9).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lapack
from scipy.optimize import minimize
from scipy.special import erfcx, log_ndtr, ndtr

Array = NDArray[np.float64]

# Priors (mean and deviation of the logarithm) of what MAP finds, for targets of deviation 1. That
# of the length-scales is what makes the model work from few points; a unit cube's mean distance
# grows as sqrt(D), and so does it. Its centre is drawn for each fit (CENTRE_SPREAD): proposals that
# are made one after the other then do not share one mistaken view, at a fraction of what it costs
# to average over hyper-parameters (benchmarks/search_quality.py).
LENGTH = 0.4, 0.6  # times sqrt(D / 2)
CENTRE_SPREAD = 0.8
SIGNAL = 1.0, 1.0  # variance
NOISE = 1e-4, 2.0  # variance, on top of what observations bring
SMALLEST_NOISE = 1e-7
FIT_POINTS = 256  # hyper-parameters are fitted to at most so many: the cost is cubic
MAX_STEPS = 30


@dataclass(frozen=True)
class Groups:
    """Which columns of the inputs share a length-scale: those of a choice's one-hot code do."""

    of_column: NDArray[np.intp]  # (C,), the dimension of each column
    factor: Array  # (D,), by which the prior of its length-scale differs from the others'

    @property
    def num(self) -> int:
        return len(self.factor)


@dataclass(frozen=True)
class Gaussian:
    """A fitted process over inputs x of shape (n, C)."""

    x: Array  # (n, C)
    scale: Array  # (C,), 1 / length-scale
    signal: float  # variance
    mean: float
    alpha: Array  # (n,), K^-1 (y - mean)
    inverse: Array  # (n, n), K^-1

    def predict(self, at: Array) -> tuple[Array, Array]:
        """Mean and deviation of the noiseless function, (m,) each, at `at`, (m, C)."""
        k = self.signal * _matern(_squared(at * self.scale, self.x * self.scale))
        return self._moments(k, k @ self.inverse)

    def _moments(self, k: Array, solved: Array) -> tuple[Array, Array]:
        variance = self.signal - np.einsum("ij,ij->i", k, solved)
        return self.mean + k @ self.alpha, np.sqrt(np.maximum(variance, 1e-12 * self.signal))

    def slopes(self, at: Array) -> tuple[Array, Array, Array, Array]:
        """`predict`, and the derivatives of mean and deviation by `at`, (m, C) each."""
        points, x = at * self.scale, self.x * self.scale
        squared = _squared(points, x)
        root = np.sqrt(5 * squared)
        decay = self.signal * np.exp(-root)
        k = (1 + root + 5 / 3 * squared) * decay
        solved = k @ self.inverse
        mean, deviation = self._moments(k, solved)
        # dk/dx = dk/d(r^2) * 2 (x - x_i) / length^2
        factor = -5 / 3 * (1 + root) * decay
        by_mean = factor * self.alpha
        by_variance = -2 * factor * solved
        slope_mean = (by_mean.sum(axis=1)[:, None] * points - by_mean @ x) * self.scale
        slope_variance = (by_variance.sum(axis=1)[:, None] * points - by_variance @ x) * self.scale
        return mean, deviation, slope_mean, slope_variance / (2 * deviation[:, None])

    def with_points(self, more: Array) -> Gaussian:
        """The process after `more`, (m, C), were seen at their predicted mean: nothing moves but
        the deviation, which falls there (kriging believer: Ginsbourger et al. 2010)."""
        if len(more) == 0:
            return self
        k = self.signal * _matern(_squared(more * self.scale, self.x * self.scale))
        own = self.signal * _matern(_squared(more * self.scale, more * self.scale))
        solved = k @ self.inverse
        rest = own - solved @ k.T + 1e-6 * self.signal * np.eye(len(more))
        corner = np.linalg.inv(rest)
        side = -corner @ solved
        inverse = np.block([[self.inverse - solved.T @ side, side.T], [side, corner]])
        alpha = np.concatenate([self.alpha, np.zeros(len(more))])
        x = np.vstack([self.x, more])
        return Gaussian(x, self.scale, self.signal, self.mean, alpha, inverse)


def fit(x: Array, y: Array, noise: Array, groups: Groups, rng: np.random.Generator) -> Gaussian:
    """The process through the observations.

    Args:
        x: (n, C), in the unit cube.
        y: (n,), of deviation about 1.
        noise: (n,), the variance that each observation is known to have.
        rng: draws the centre of a prior, and the points to fit to where there are many.

    Raises:
        LinAlgError: the covariance is not positive definite.
    """
    some: NDArray[np.intp] = np.arange(len(y))
    if len(y) > FIT_POINTS:  # the best ones, where the model has to be good, and some of the rest
        order = np.argsort(y, kind="stable")
        best, rest = order[: FIT_POINTS // 2], order[FIT_POINTS // 2 :]
        some = np.concatenate([best, rng.choice(rest, FIT_POINTS - len(best), replace=False)])
    length = LENGTH[0] * math.sqrt(groups.num / 2) * math.exp(CENTRE_SPREAD * rng.normal())
    theta = _map(x[some], y[some], noise[some], groups, length)
    lengths, signal, own_noise = np.exp(theta[:-2]), math.exp(theta[-2]), math.exp(theta[-1])
    scale = 1 / lengths[groups.of_column]
    covariance = signal * _matern(_squared(x * scale, x * scale))
    covariance[np.diag_indices(len(y))] += own_noise + noise
    inverse, _ = _inverse(covariance)
    ones = inverse.sum(axis=0)
    mean = float(ones @ y / ones.sum())
    return Gaussian(x, scale, signal, mean, inverse @ (y - mean), inverse)


def _map(x: Array, y: Array, noise: Array, groups: Groups, length: float) -> Array:
    """Logarithms of length-scales (D,), signal variance and noise variance.

    Args:
        length: the centre of the length-scales' prior.
    """
    num = groups.num
    center = np.log([*length * groups.factor, SIGNAL[0], NOISE[0]])
    spread = np.array([*[LENGTH[1]] * num, SIGNAL[1], NOISE[1]])
    apart = np.stack(
        [_squared_exact(x[:, groups.of_column == group]) for group in range(num)]
    )  # (D, n, n)

    def loss(theta: Array) -> tuple[float, Array]:
        """Minus the log posterior, and its gradient."""
        weights = np.exp(-2 * theta[:num])
        signal, own_noise = math.exp(theta[-2]), math.exp(theta[-1])
        squared = np.tensordot(weights, apart, axes=1)
        root = np.sqrt(5 * squared)
        decay = signal * np.exp(-root)
        kernel = (1 + root + 5 / 3 * squared) * decay
        covariance = kernel.copy()
        covariance[np.diag_indices(len(y))] += own_noise + noise
        try:
            inverse, log_det = _inverse(covariance)
        except np.linalg.LinAlgError:
            return 1e25, np.zeros_like(theta)
        ones = inverse.sum(axis=0)
        residual = y - ones @ y / ones.sum()  # from the generalised least squares mean
        alpha = inverse @ residual
        pull = (theta - center) / spread
        value = 0.5 * (residual @ alpha + log_det + pull @ pull)
        inner = 0.5 * (inverse - np.outer(alpha, alpha))  # d loss / d covariance
        by_squared = inner * (-5 / 6 * (1 + root) * decay)
        gradient = np.empty_like(theta)
        gradient[:num] = -2 * weights * np.einsum("ij,gij->g", by_squared, apart)
        gradient[-2] = np.sum(inner * kernel)
        gradient[-1] = own_noise * np.trace(inner)
        return float(value), gradient + pull / spread

    bounds = [(math.log(1e-2), math.log(30))] * num
    bounds += [(math.log(1e-2), math.log(1e3)), (math.log(SMALLEST_NOISE), math.log(1))]
    found = minimize(
        loss, center, jac=True, bounds=bounds, method="L-BFGS-B", options={"maxiter": MAX_STEPS}
    )
    theta: Array = found.x
    return theta


def log_expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    """Log of E[max(best - f, 0)], exact also where it underflows (Ament et al. 2023, eq. 9)."""
    return np.log(deviation) + _log_h((best - mean) / deviation)


def log_expected_improvement_slopes(
    mean: Array, deviation: Array, best: float
) -> tuple[Array, Array, Array]:
    """The same, and its derivatives by mean and deviation, (m,) each."""
    z = (best - mean) / deviation
    log_h = _log_h(z)
    by_mean = -np.exp(log_ndtr(z) - log_h) / deviation
    by_deviation = np.exp(-0.5 * z * z - 0.5 * math.log(2 * math.pi) - log_h) / deviation
    return np.log(deviation) + log_h, by_mean, by_deviation


def _log_h(z: Array) -> Array:
    """log(phi(z) + z Phi(z))."""
    result = np.empty_like(z)
    near = z > -1
    close = z[near]
    density = np.exp(-0.5 * close * close) / math.sqrt(2 * math.pi)
    result[near] = np.log(density + close * ndtr(close))
    far = z[~near]
    # phi(z) (1 + z Phi(z) / phi(z)), with Phi / phi = sqrt(pi / 2) erfcx(-z / sqrt 2)
    ratio = math.sqrt(math.pi / 2) * erfcx(-far / math.sqrt(2)) * far  # -> -1
    rest = np.where(far > -1e5, np.log1p(np.maximum(ratio, -1 + 1e-15)), -2 * np.log(-far))
    result[~near] = -0.5 * far * far - 0.5 * math.log(2 * math.pi) + rest
    return result


def _squared(a: Array, b: Array) -> Array:
    """Squared distances, (m, n), of (m, C) and (n, C)."""
    squared = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1) - 2 * (a @ b.T)
    result: Array = np.maximum(squared, 0.0)
    return result


def _squared_exact(a: Array) -> Array:
    """Squared distances of (n, C) to itself, without cancellation."""
    differences = a[:, None, :] - a[None, :, :]
    squared: Array = np.einsum("ijc,ijc->ij", differences, differences)
    return squared


def _matern(squared: Array) -> Array:
    """Matérn-5/2 of squared scaled distances (R&W eq. 4.17)."""
    root = np.sqrt(5 * squared)
    return (1 + root + 5 / 3 * squared) * np.exp(-root)


def _inverse(matrix: Array) -> tuple[Array, float]:
    """Inverse and log determinant of a positive definite matrix.

    Raises:
        LinAlgError: it is none.
    """
    factor, failed = lapack.dpotrf(matrix, lower=1)
    if failed:
        raise np.linalg.LinAlgError("the covariance is not positive definite")
    log_det = 2 * float(np.log(np.diag(factor)).sum())
    inverse, _ = lapack.dpotri(factor, lower=1)
    return np.tril(inverse) + np.tril(inverse, -1).T, log_det
