"""Fréchet distance, kernel distance, precision and recall against independent computations."""

import mpmath
import numpy as np
import pytest
import torch
from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_kid import kid_features_to_metric
from torch_fidelity.metric_prc import prc_features_to_metric

from mhla_diffusion.errors import UserError
from mhla_diffusion.evaluation.statistics import (
    FeatureStatistics,
    StatisticsAccumulator,
    frechet_distance,
    kernel_distance,
    precision_recall,
)


def random_features(count, dim, seed, decay=0.0, shift=0.0):
    """Correlated features whose standard deviations fall from 1 to 10^-decay."""
    rng = np.random.default_rng(seed)
    rotation = np.linalg.qr(rng.standard_normal((dim, dim)))[0]
    return rng.standard_normal((count, dim)) * np.logspace(0, -decay, dim) @ rotation + shift


def frechet_in_high_precision(first, second):
    """The textbook formula from the features, with 60 digits: eigenvalues of the product of the covariances."""
    with mpmath.workdps(60):

        def mean_and_covariance(features):
            rows = mpmath.matrix(features.tolist())
            count, dim = rows.rows, rows.cols
            mean = [mpmath.fsum(rows[i, j] for i in range(count)) / count for j in range(dim)]
            centred = mpmath.matrix(count, dim)
            for i in range(count):
                for j in range(dim):
                    centred[i, j] = rows[i, j] - mean[j]
            return mean, centred.T * centred / (count - 1)

        (mean_1, cov_1), (mean_2, cov_2) = mean_and_covariance(first), mean_and_covariance(second)
        values = mpmath.eig(cov_1 * cov_2, left=False, right=False)
        root = mpmath.fsum(mpmath.re(mpmath.sqrt(value)) for value in values)
        shift = mpmath.fsum((a - b) ** 2 for a, b in zip(mean_1, mean_2, strict=True))
        trace = mpmath.fsum(cov_1[i, i] + cov_2[i, i] for i in range(cov_1.rows))
        return float(shift + trace - 2 * root)


@pytest.mark.parametrize(
    ("counts", "decay", "shift"),
    [((30, 40), 0, 0.1), ((30, 40), 7, 0.0), ((5, 6), 1, 0.0), ((4, 40), 3, 0.01), ((30, 30), 2, 0.0)],
    ids=["regular", "tiny eigenvalues", "both singular", "one singular", "same scale"],
)
@pytest.mark.parametrize("source", ["features", "covariance"])
def test_frechet_distance_equals_high_precision(counts, decay, shift, source):
    first = random_features(counts[0], 8, 1, decay)
    second = random_features(counts[1], 8, 1, decay)[: counts[1]] * 1.1 + shift
    expected = frechet_in_high_precision(first, second)
    statistics = []
    for features in (first, second):
        if source == "features":
            statistics.append(FeatureStatistics.from_features(features))
        else:
            statistics.append(FeatureStatistics.from_covariance(features.mean(0), np.cov(features, rowvar=False)))
    assert frechet_distance(*statistics) == pytest.approx(expected, rel=1e-6)


def test_frechet_distance_from_features_and_from_covariance_agree_when_singular():
    first, second = random_features(50, 128, 0, 1), random_features(80, 128, 1, 1)
    pairs = [
        (
            FeatureStatistics.from_features(f),
            FeatureStatistics.from_covariance(f.mean(0), np.cov(f, rowvar=False)),
        )
        for f in (first, second)
    ]
    expected = frechet_distance(pairs[0][0], pairs[1][0])
    assert frechet_distance(pairs[0][1], pairs[1][1]) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(pairs[0][0], pairs[1][1]) == pytest.approx(expected, rel=1e-9)


def test_frechet_distance_equals_torch_fidelity():
    first, second = random_features(300, 20, 0), random_features(200, 20, 1, shift=0.2)
    theirs = fid_statistics_to_metric(*(fid_features_to_statistics(torch.tensor(f)) for f in (first, second)), False)
    ours = frechet_distance(FeatureStatistics.from_features(first), FeatureStatistics.from_features(second))
    assert ours == pytest.approx(theirs["frechet_inception_distance"], rel=1e-8)


def test_frechet_distance_of_a_set_to_itself_is_zero():
    statistics = FeatureStatistics.from_features(random_features(20, 40, 0))
    assert frechet_distance(statistics, statistics) < 1e-12


def test_frechet_distance_refuses_different_numbers_of_features():
    with pytest.raises(UserError, match="3 and 4 features"):
        frechet_distance(*(FeatureStatistics.from_features(torch.randn(9, dim)) for dim in (3, 4)))


@pytest.mark.parametrize("batch", [1, 7, 64, 500])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_accumulated_covariance_equals_numpy(batch, offset):
    features = random_features(203, 16, 3, decay=2) + offset
    accumulator = StatisticsAccumulator()
    for part in torch.tensor(features).split(batch):
        accumulator.add(part)
    statistics = accumulator.finish()
    assert statistics.count == 203
    np.testing.assert_allclose(statistics.mean, features.mean(0), rtol=1e-13)
    np.testing.assert_allclose(statistics.covariance, np.cov(features, rowvar=False), atol=1e-11)


def test_covariance_of_one_image_is_refused():
    with pytest.raises(UserError, match="at least 2 images, got 1"):
        FeatureStatistics.from_features(torch.randn(1, 4))


@pytest.mark.parametrize(
    ("mean", "covariance", "message"),
    [
        (np.zeros(3), np.zeros((2, 2)), r"\(3,\)"),
        (np.zeros(2), np.diag([1.0, -1.0]), "not positive semi-definite"),
        (np.full(2, np.nan), np.eye(2), "not finite"),
    ],
)
def test_statistics_that_cannot_be_are_refused(mean, covariance, message):
    with pytest.raises(UserError, match=message):
        FeatureStatistics.from_covariance(mean, covariance)


def manifold_share(points, centres, neighbours=3):
    """Kynkäänniemi's definition, one point at a time."""
    radii = [sorted(np.linalg.norm(centres - c, axis=1))[neighbours] for c in centres]
    return np.mean([any(np.linalg.norm(p - c) <= r for c, r in zip(centres, radii, strict=True)) for p in points])


@pytest.mark.parametrize("chunk", [5, 1000])
def test_precision_and_recall_equal_the_definition(chunk):
    generated, reference = random_features(40, 6, 0), random_features(55, 6, 1) * 1.3
    precision, recall = precision_recall(torch.tensor(generated), torch.tensor(reference), chunk=chunk)
    assert precision == pytest.approx(manifold_share(generated, reference))
    assert recall == pytest.approx(manifold_share(reference, generated))
    assert 0 < recall < precision < 1


def test_precision_and_recall_equal_torch_fidelity():
    generated, reference = (torch.tensor(random_features(90, 12, s)).float() for s in (0, 1))
    theirs = prc_features_to_metric(generated, reference, verbose=False)
    ours = precision_recall(generated, reference)
    # Older versions of torch-fidelity exchange the two.
    assert sorted(ours) == pytest.approx(sorted([theirs["precision"], theirs["recall"]]))


def test_precision_and_recall_of_a_set_with_itself_are_one():
    features = torch.randn(30, 5)
    assert precision_recall(features, features) == (1, 1)


def test_precision_needs_more_images_than_neighbours():
    with pytest.raises(UserError, match="more than 3 images"):
        precision_recall(torch.randn(3, 5), torch.randn(30, 5))


@pytest.mark.parametrize("size", [20, 50])
def test_kernel_distance_equals_torch_fidelity(size):
    generated, reference = random_features(60, 7, 0), random_features(50, 7, 1, shift=0.3)
    generated, reference = torch.tensor(generated), torch.tensor(reference)
    theirs = kid_features_to_metric(generated, reference, kid_subsets=5, kid_subset_size=size, verbose=False)
    mean, deviation = kernel_distance(generated, reference, subsets=5, subset_size=size)
    assert mean == pytest.approx(theirs["kernel_inception_distance_mean"], rel=1e-9)
    assert deviation == pytest.approx(theirs["kernel_inception_distance_std"], rel=1e-6)


def test_kernel_distance_is_unbiased():
    estimates = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        x, y = torch.randn(2, 12, 4, generator=generator, dtype=torch.float64)
        estimates.append(kernel_distance(x, y)[0])
    assert abs(np.mean(estimates)) < 4 * np.std(estimates) / 20
