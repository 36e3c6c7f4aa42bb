"""How far two sets of showers are apart, by the measures that the field compares generators with.

`real` and `fake` are features, (events, features), in any units, unless a docstring says more.
What depends on random numbers takes a seed and gives its uncertainty. scipy.stats and sklearn take
seconds to import, and are imported where they are used: training needs none of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apps.contract import N3LOError
from apps.physics.observables import CLIC, Geometry, Observables, observe, ratio

# The features that stand for a shower, and their units.
FEATURES = {
    "energy": "GeV",  # of the incoming particle: a generator must be right at each energy
    "response": None,
    "weighted response": None,
    "hits": None,
    "hottest cell fraction": None,
    "mean log10 cell energy": None,
    "x centre": "cells",
    "y centre": "cells",
    "layer centre": "layers",
    "x rms": "cells",
    "y rms": "cells",
    "layer rms": "layers",
    "first 5 layers fraction": None,
    "last 5 layers fraction": None,
}
END_LAYERS = 5

FPD_PARTS = 5
FPD_EVENTS_PER_FEATURE = 10  # of a part; with fewer, the distance is no longer linear in 1/N


@dataclass(frozen=True)
class Estimate:
    """A value with its uncertainty, one standard deviation."""

    value: float
    uncertainty: float


def high_level_features(
    showers: np.ndarray, energies: np.ndarray, geometry: Geometry = CLIC
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Features of showers (events, x, y, layers) of particles of given energies (events,), in GeV.

    Returns:
        (events, features), and their names, the keys of `FEATURES`.

    Raises:
        N3LOError: the shapes are others, or the geometry has another number of layers.
    """
    return features_of(observe(showers, energies, geometry)), tuple(FEATURES)


def features_of(observed: Observables) -> np.ndarray:
    """(events, features), in the order of `FEATURES`."""
    centre, rms = observed.moments[..., 0], np.sqrt(observed.moments[..., 1])
    layers, deposit = observed.layers, observed.deposit
    return np.column_stack(
        [
            observed.energies,
            observed.response,
            observed.weighted_response,
            observed.hits,
            observed.hottest,
            observed.mean_log_cell,
            centre,
            rms,
            ratio(layers[:, :END_LAYERS].sum(axis=1), deposit),
            ratio(layers[:, -END_LAYERS:].sum(axis=1), deposit),
        ]
    )


def separation_power(real: np.ndarray, fake: np.ndarray, num_bins: int = 20) -> float:
    """Separation of the histograms of one quantity, (events,): 0 (alike) to 1 (nothing shared).

    Bins of equal width span the real values; others are counted in the first or the last bin.
    """
    low, high = real.min(), real.max()
    edges = np.linspace(low, high, num_bins + 1) if high > low else np.array([low, low + 1])
    counts = [np.histogram(np.clip(each, low, high), edges)[0] for each in (real, fake)]
    return separation_of_counts(*counts)


def separation_of_counts(real: np.ndarray, fake: np.ndarray) -> float:
    """1/2 Σ (p - q)^2 / (p + q) of two histograms, (bins,), normalised here to p and q.

    Diefenbacher et al. 2020, arXiv:2009.03796, eq. 15. 1 where one of them has no entry.
    """
    if not (real.sum() > 0 and fake.sum() > 0):
        return 1.0
    p, q = real / real.sum(), fake / fake.sum()
    return float(0.5 * ratio((p - q) ** 2, p + q).sum())


def wasserstein(real: np.ndarray, fake: np.ndarray) -> np.ndarray:
    """Wasserstein-1 distance of each feature, (features,), in the feature's unit."""
    from scipy.stats import wasserstein_distance

    return np.array(
        [wasserstein_distance(*columns) for columns in zip(real.T, fake.T, strict=True)]
    )


def frechet_distance(real: np.ndarray, fake: np.ndarray) -> float:
    """Fréchet distance of Gaussians with the samples' means and covariances, at finite N.

    |μ - μ'|^2 + tr(Σ + Σ' - 2 (Σ Σ')^1/2): Heusel et al. 2017, arXiv:1706.08500, eq. 6. Biased
    upwards by about c/N. The features are taken as they are; see `scaled`.
    """
    root = _root(np.atleast_2d(np.cov(real, rowvar=False)))
    other = np.atleast_2d(np.cov(fake, rowvar=False))
    # The eigenvalues of the symmetric matrix are those of Σ Σ', and real.
    common = np.sqrt(np.clip(np.linalg.eigvalsh(root @ other @ root), 0, None)).sum()
    shift = real.mean(axis=0) - fake.mean(axis=0)
    return float(shift @ shift + np.trace(root @ root) + np.trace(other) - 2 * common)


def frechet_physics_distance(
    real: np.ndarray, fake: np.ndarray, seed: int, repeats: int = 10
) -> Estimate:
    """FPD: the Fréchet distance of scaled features, extrapolated linearly in 1/N to infinite N.

    Kansal et al. 2022, arXiv:2211.10295, section III. Both samples are cut into k = 1 ... 5 parts,
    and the mean distance of the k pairs of parts is fitted over 1/N = k/events. Parts share no
    event: drawn with replacement, as in jetnet, samples tend to the finite set and not to its
    source. The uncertainty is that of the fit alone.

    Raises:
        N3LOError: a part would hold fewer than ten events a feature; take `frechet_distance` of
            `scaled` features then.
    """
    real, fake = scaled(real, fake)
    num_events, needed = min(len(real), len(fake)), fpd_events(real.shape[1])
    if num_events < needed:
        raise N3LOError(
            f"FPD: {num_events} events are too few to extrapolate with {real.shape[1]} features, "
            f"which needs {needed}"
        )
    rng = np.random.default_rng(seed)
    distances = np.zeros(FPD_PARTS)
    for _ in range(repeats):
        a, b = (rng.permutation(each)[:num_events] for each in (real, fake))
        for k in range(1, FPD_PARTS + 1):
            parts = zip(np.array_split(a, k), np.array_split(b, k), strict=True)
            distances[k - 1] += np.mean([frechet_distance(*pair) for pair in parts]) / repeats
    inverse_n = np.arange(1, FPD_PARTS + 1) / num_events
    coefficients, covariance = np.polyfit(inverse_n, distances, 1, cov=True)
    return Estimate(float(coefficients[1]), float(np.sqrt(covariance[1, 1])))


def fpd_events(num_features: int) -> int:
    """The fewest events of each kind from which the FPD can be extrapolated."""
    return FPD_PARTS * FPD_EVENTS_PER_FEATURE * num_features


def kernel_physics_distance(
    real: np.ndarray, fake: np.ndarray, seed: int, num_batches: int = 10
) -> Estimate:
    """KPD: the median over batches of the unbiased MMD^2 of scaled features.

    Kansal et al. 2022, arXiv:2211.10295, section III, with the kernel (x·y/d + 1)^4. The batches
    share no event, as an event that is drawn twice would bias the estimate. The uncertainty is the
    standard error of a median, 1.25 σ/√batches; that of two sets of one source lies a little below
    0, as MMD^2 is 0 there in the mean, but skew.

    Raises:
        N3LOError: a batch would hold fewer than two events.
    """
    real, fake = scaled(real, fake)
    if min(len(real), len(fake)) < 2 * num_batches:
        raise N3LOError(f"KPD: {num_batches} batches need {2 * num_batches} events of each kind")
    rng = np.random.default_rng(seed)
    batches = zip(
        *(np.array_split(rng.permutation(each), num_batches) for each in (real, fake)), strict=True
    )
    values = np.array([mmd_squared(*batch) for batch in batches])
    error = np.sqrt(np.pi / 2) * values.std(ddof=1) / np.sqrt(num_batches)
    return Estimate(float(np.median(values)), float(error))


def mmd_squared(real: np.ndarray, fake: np.ndarray) -> float:
    """Unbiased squared maximum mean discrepancy with the kernel (x·y/d + 1)^4.

    Gretton et al. 2012, JMLR 13, 723, eq. 3.
    """
    return (
        _mean_off_diagonal(_kernel(real, real))
        + _mean_off_diagonal(_kernel(fake, fake))
        - 2 * float(_kernel(real, fake).mean())
    )


def classifier_auc(real: np.ndarray, fake: np.ndarray, seed: int, num_folds: int = 5) -> Estimate:
    """Area under the ROC curve of boosted trees that tell fake from real; 0.5 if they cannot.

    Each fold is judged by a classifier that was trained on the others; the value is the folds'
    mean, and the uncertainty its standard error. Lopez-Paz & Oquab 2017, arXiv:1610.06545.

    Raises:
        N3LOError: there are fewer events of a kind than folds.
    """
    from sklearn.model_selection import StratifiedKFold

    if min(len(real), len(fake)) < num_folds:
        raise N3LOError(f"classifier: {num_folds} folds need as many events of each kind")
    x = np.concatenate([real, fake])
    is_fake = np.repeat([0, 1], [len(real), len(fake)])
    folds = StratifiedKFold(num_folds, shuffle=True, random_state=seed)
    areas = np.array([_auc_of_fold(x, is_fake, split, seed) for split in folds.split(x, is_fake)])
    return Estimate(float(areas.mean()), float(areas.std(ddof=1) / np.sqrt(num_folds)))


def scaled(real: np.ndarray, fake: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both divided by the largest absolute value of each feature in the real set, if not 0."""
    largest = np.abs(real).max(axis=0)
    largest = np.where(largest > 0, largest, 1)
    return real / largest, fake / largest


def _auc_of_fold(
    x: np.ndarray, is_fake: np.ndarray, split: tuple[np.ndarray, np.ndarray], seed: int
) -> float:
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.metrics import roc_auc_score

    train, test = split
    trees = HistGradientBoostingClassifier(
        max_iter=100, max_leaf_nodes=8, early_stopping=False, random_state=seed
    )
    score = trees.fit(x[train], is_fake[train]).predict_proba(x[test])[:, 1]
    return float(roc_auc_score(is_fake[test], score))


def _root(covariance: np.ndarray) -> np.ndarray:
    """The symmetric square root."""
    values, vectors = np.linalg.eigh(covariance)
    return (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T


def _kernel(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (x @ y.T / x.shape[1] + 1) ** 4


def _mean_off_diagonal(kernel: np.ndarray) -> float:
    n = len(kernel)
    return float((kernel.sum() - np.trace(kernel)) / (n * (n - 1)))
