"""Distances between sets of showers, against formulas, loops and scipy; and their validation."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy.linalg
from scipy.stats import norm, wasserstein_distance

from apps.contract import N3LOError
from apps.physics.distances import (
    FEATURES,
    classifier_auc,
    features_of,
    fpd_events,
    frechet_distance,
    frechet_physics_distance,
    high_level_features,
    kernel_physics_distance,
    mmd_squared,
    scaled,
    separation_of_counts,
    separation_power,
    wasserstein,
)
from apps.physics.observables import observe
from apps.physics.validation import Row, check_showers, measure, validate

DATA = Path(__file__).resolve().parent.parent / "studies" / "data"


def gaussians(events: int, shift: float, scale: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two samples in three dimensions, of N(0, 1) and N(shift, scale^2)."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(events, 3)), rng.normal(shift, scale, size=(events, 3))


def with_moments(x: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """The sample, made to have exactly this mean and covariance."""
    x = x - x.mean(axis=0)
    whitened = x @ np.linalg.inv(scipy.linalg.cholesky(np.cov(x, rowvar=False)))
    return whitened @ scipy.linalg.cholesky(covariance) + mean


# Separation power and Wasserstein distance


def test_the_separation_of_histograms_is_the_formula():
    # p = (.5, .5, 0), q = (0, .25, .75): (.25/.5 + .0625/.75 + .5625/.75) / 2
    assert separation_of_counts(np.array([2, 2, 0]), np.array([0, 1, 3])) == pytest.approx(2 / 3)


def test_separation_is_zero_for_equal_and_one_for_disjoint_or_empty_sets():
    values = np.linspace(0, 1, 100)
    assert separation_power(values, values) == 0
    assert separation_of_counts(np.array([3, 0]), np.array([0, 5])) == 1
    assert separation_of_counts(np.array([3, 0]), np.array([0, 0])) == 1


def test_values_beyond_the_real_ones_are_not_lost():
    real = np.linspace(0, 1, 101)
    assert separation_power(real, np.full(50, 7.0)) == pytest.approx(
        separation_power(real, real * 0 + 1)
    )
    assert separation_power(np.ones(5), np.ones(5)) == 0


def test_the_wasserstein_distance_of_a_shift_is_the_shift():
    real, fake = gaussians(200, 0, 1, 1)
    np.testing.assert_allclose(wasserstein(real, real + np.array([1, 2, 3])), [1, 2, 3])
    expected = [wasserstein_distance(real[:, k], fake[:, k]) for k in range(3)]
    np.testing.assert_allclose(wasserstein(real, fake), expected)


# Fréchet and kernel distances


def test_the_frechet_distance_of_commuting_gaussians_is_analytic():
    """|shift|^2 + sum (sigma - sigma')^2."""
    real, fake = gaussians(50, 0, 1, 1)
    real = with_moments(real, np.zeros(3), np.diag([1.0, 4.0, 9.0]))
    fake = with_moments(fake, np.array([1.0, 2.0, 0.0]), np.diag([4.0, 4.0, 1.0]))
    assert frechet_distance(real, fake) == pytest.approx(5 + 1 + 0 + 4)


def test_the_frechet_distance_is_that_of_scipys_matrix_root():
    rng = np.random.default_rng(3)
    real, fake = (rng.normal(size=(100, 4)) @ rng.normal(size=(4, 4)) for _ in range(2))
    a, b = (np.cov(each, rowvar=False) for each in (real, fake))
    shift = real.mean(axis=0) - fake.mean(axis=0)
    expected = shift @ shift + np.trace(a + b - 2 * scipy.linalg.sqrtm(a @ b).real)
    assert frechet_distance(real, fake) == pytest.approx(expected)


def test_constant_features_have_a_frechet_distance():
    assert frechet_distance(np.zeros((20, 3)), np.ones((20, 3))) == pytest.approx(3)
    real, fake = scaled(np.zeros((20, 2)), np.full((20, 2), 2.0))
    assert (real.max(), fake.max()) == (0, 2)


def test_the_extrapolated_distance_has_lost_the_bias_of_finite_samples():
    truth, found, finite = 3 * 0.05**2 + 3 * 0.05**2, [], []
    for seed in range(20):
        real, fake = gaussians(1000, 0.05, 1.05, seed)
        largest = np.abs(real).max(axis=0)
        unit = (largest**2).mean()  # undoes the scaling, to a good approximation
        found.append(frechet_physics_distance(real, fake, seed, repeats=2).value * unit)
        finite.append(frechet_distance(*scaled(real, fake)) * unit)
    error = np.std(found) / np.sqrt(len(found))
    assert abs(np.mean(found) - truth) < 3 * error
    assert np.mean(finite) > truth + 3 * error


def test_too_few_events_are_not_extrapolated():
    real, fake = gaussians(100, 0, 1, 1)
    assert fpd_events(3) == 150
    with pytest.raises(N3LOError, match="100 events are too few to extrapolate with 3 features"):
        frechet_physics_distance(real, fake, 1)


def test_the_kernel_distance_is_that_of_loops_over_pairs():
    real, fake = gaussians(12, 0.3, 1.2, 5)
    fake = fake[:9]

    def kernel(x, y):
        return (sum(a * b for a, b in zip(x, y, strict=True)) / 3 + 1) ** 4

    def within(rows):
        pairs = [(i, j) for i in range(len(rows)) for j in range(len(rows)) if i != j]
        return sum(kernel(rows[i], rows[j]) for i, j in pairs) / len(pairs)

    across = sum(kernel(x, y) for x in real for y in fake) / (len(real) * len(fake))
    assert mmd_squared(real, fake) == pytest.approx(within(real) + within(fake) - 2 * across)


def test_the_kernel_distance_of_one_source_is_zero_in_the_mean():
    values = np.array([mmd_squared(*gaussians(100, 0, 1, seed)) for seed in range(100)])
    assert abs(values.mean()) < 3 * values.std() / np.sqrt(len(values))


def test_the_kernel_distance_of_two_sources_is_seen():
    far = kernel_physics_distance(*gaussians(500, 0.5, 1, 1), 1)
    near = kernel_physics_distance(*gaussians(500, 0, 1, 1), 1)
    assert far.value > 3 * far.uncertainty
    assert near.value < 3 * near.uncertainty


# The classifier


def test_the_classifier_comes_near_the_best_possible_area():
    """Of two Gaussians at a distance d: Phi(d / sqrt 2)."""
    real, fake = gaussians(1000, 1 / np.sqrt(3), 1, 1)
    best = norm.cdf(1 / np.sqrt(2))
    area = classifier_auc(real, fake, 1, num_folds=3)
    assert best - 0.05 < area.value < best + 2 * area.uncertainty


def test_the_classifier_cannot_tell_a_source_from_itself():
    area = classifier_auc(*gaussians(500, 0, 1, 2), 1, num_folds=3)
    assert abs(area.value - 0.5) < 0.05


def test_random_measures_repeat_with_their_seed():
    real, fake = gaussians(300, 0.1, 1, 1)
    for measured in (
        lambda seed: kernel_physics_distance(real, fake, seed),
        lambda seed: frechet_physics_distance(real, fake, seed, repeats=1),
        lambda seed: classifier_auc(real, fake, seed, num_folds=2),
    ):
        assert measured(1) == measured(1)
        assert measured(1) != measured(2)


def test_too_few_events_are_said():
    few = np.zeros((3, 2))
    with pytest.raises(N3LOError, match="5 folds need as many events"):
        classifier_auc(few, few, 1)
    with pytest.raises(N3LOError, match="10 batches need 20 events"):
        kernel_physics_distance(few, few, 1)


# Of showers


def test_the_features_have_names_and_are_finite_for_empty_showers():
    features, names = high_level_features(np.zeros((4, 25, 25, 25)), np.full(4, 50.0))
    assert features.shape == (4, len(names))
    assert names == tuple(FEATURES)
    assert features[:, 0].tolist() == [50.0] * 4
    assert not features[:, 1:].any()


def test_the_features_are_the_quantities_that_they_are_called(geant4_parts):
    observed = geant4_parts[0].take(np.arange(5))
    named = dict(zip(FEATURES, features_of(observed).T, strict=True))
    np.testing.assert_array_equal(named["weighted response"], observed.weighted_response)
    np.testing.assert_array_equal(named["layer centre"], observed.moments[:, 2, 0])
    np.testing.assert_array_equal(named["y rms"] ** 2, np.sqrt(observed.moments[:, 1, 1]) ** 2)
    last = observed.layers[:, 20:].sum(axis=1) / observed.deposit
    np.testing.assert_allclose(named["last 5 layers fraction"], last)


def test_the_floors_of_the_geant4_files(geant4_parts):
    """Of research/data.md; the separation in S/E depends on the bins, by 0.003 a five of them."""
    found = {name: value for name, _, value in measure(*geant4_parts, seed=1)}
    assert found["separation power, response"] == pytest.approx(0.011, abs=0.003)
    assert found["separation power, cell energies"] == pytest.approx(3e-5, rel=0.1)
    assert found["layer correlation, largest difference"] == pytest.approx(0.12, abs=0.005)
    assert found["- its profiles"] == pytest.approx(0.046, abs=0.0005)
    assert found["classifier AUC"] == pytest.approx(0.5, abs=0.04)


# Validation


@pytest.fixture(scope="module")
def rows(geant4_parts) -> tuple[dict[str, Row], dict[str, Row]]:
    """Of Geant4 against itself, and of showers that are a tenth too hot."""
    few = np.arange(300)
    real, same = (each.take(few) for each in geant4_parts)
    with h5py.File(DATA / "clic_ecal_electrons_geant4_part2.h5") as file:
        hot = observe(1.1 * file["ECAL"][:300], file["energy"][:300])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("apps.physics.validation.HALVES", 4)  # for speed
        same_rows, hot_rows = (validate(real, fake, seed=1) for fake in (same, hot))
    return {row.name: row for row in same_rows}, {row.name: row for row in hot_rows}


def test_showers_of_one_source_are_at_the_floor(rows):
    significances = [row.significance for row in rows[0].values()]
    assert all(abs(each) < 5 for each in significances)
    assert np.mean(significances) < 1


def test_wrong_showers_are_above_the_floor(rows):
    for name in ("response, relative difference", "Wasserstein-1, response", "classifier AUC"):
        assert rows[1][name].significance > 5
    assert rows[1]["response, relative difference"].value == pytest.approx(0.1, abs=0.01)
    # What is a share of the deposit does not change with it.
    assert rows[1]["Wasserstein-1, hottest cell fraction"].significance < 3


def test_a_validation_needs_events(geant4_parts):
    few = geant4_parts[0].take(np.arange(99))
    with pytest.raises(N3LOError, match="99 real and 1000 generated showers; at least 100"):
        validate(few, geant4_parts[1], seed=1)


def test_rows_have_units_and_no_significance_without_an_uncertainty(rows):
    assert rows[0]["Wasserstein-1, layer centre"].unit == "layers"
    assert rows[0]["KPD"].unit is None
    certain = Row(name="", unit=None, value=1, uncertainty=0, floor=0, floor_uncertainty=0)
    assert certain.significance is None


# Checks of the input


@pytest.fixture(scope="module")
def good() -> tuple[np.ndarray, np.ndarray]:
    with h5py.File(DATA / "clic_ecal_electrons_geant4_part1.h5") as file:
        return file["ECAL"][:50], file["energy"][:50]


def test_good_showers_give_no_warning(good):
    assert check_showers(*good) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda x, e: (x, 1000 * e), "energies look like MeV: the median response S/E is 2"),
        (lambda x, e: (1000 * x, e), "cells look like MeV: the median response S/E is 2"),
        (lambda x, e: (x.swapaxes(1, 3), e), "axis x looks like the layers"),
        (lambda x, e: (x.swapaxes(2, 3), e), "axis y looks like the layers"),
        (lambda x, e: (x * (np.arange(50) > 2)[:, None, None, None], e), "3 of 50 showers deposit"),
        (lambda x, e: (0 * x, e), "50 of 50 showers deposit nothing"),
        (lambda x, e: (np.where(x > 0.01, -0.5, x), e), "lowest -0.5 GeV"),
    ],
)
def test_odd_showers_give_one_warning(good, change, line):
    (warning,) = check_showers(*change(*good))
    assert line in warning


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda x, e: (np.where(x > 0.03, np.nan, x), e), r"\d+ cells are not finite"),
        (lambda x, e: (x, np.where(e > 50, np.inf, e)), r"\d+ energies are not finite"),
        (lambda x, e: (x, e - e[0]), "GeV is not above 0"),
        (lambda x, e: (x[..., None], e), "is not .events, x, y, layers."),
        (lambda x, e: (x, e[:9]), r"energies: \(9,\) for 50 showers"),
        (lambda x, e: (x[:0], e[:0]), "there is none"),
    ],
)
def test_showers_of_which_nothing_can_be_measured_are_refused(good, change, line):
    with pytest.raises(N3LOError, match=line):
        check_showers(*change(*good))
