"""Spectra against numpy and sklearn, moments by dimension against scipy, outliers by hand."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.decomposition import PCA
from torch.testing import assert_close

from istar.errors import NonFiniteError, UserError
from istar.measures import (
    DimensionMoments,
    Moments,
    effective_rank,
    isoscore,
    outlier_dimensions,
    participation_ratio,
    singular_values,
    variance_shares,
)
from tests import oracles

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def cloud(n=60, d=5, seed=0, shift=3.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(n, d, generator=generator, dtype=torch.float64)
    mixing = torch.randn(d, d, generator=generator, dtype=torch.float64)
    return (points @ mixing + shift).to(dtype)


@pytest.mark.parametrize("n", [60, 3, 1])
def test_singular_values_are_those_of_numpy_and_of_pca(n):
    points = cloud(n)
    raw_singular_values = np.pad(np.linalg.svd(points.numpy(), compute_uv=False), (0, 5 - min(n, 5)))
    assert_close(singular_values(points, centered=False).numpy(), raw_singular_values, **CLOSE)
    centered_singular_values = np.linalg.svd(points.numpy() - points.numpy().mean(0), compute_uv=False)
    assert_close(singular_values(points).numpy(), np.pad(centered_singular_values, (0, 5 - min(n, 5))), **CLOSE)
    if n > 5:
        assert_close(singular_values(points).numpy(), PCA().fit(points.numpy()).singular_values_, **CLOSE)


@pytest.mark.parametrize("centered", [False, True])
def test_moments_have_the_singular_values_of_their_points(centered):
    points = cloud()
    moments = Moments(5).update(points[:7]).update(points[7:])
    assert_close(singular_values(moments, centered), singular_values(points, centered), **CLOSE)
    line = torch.outer(torch.linspace(-1, 2, 9, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
    values = singular_values(Moments.of(line), centered)
    assert (values >= 0).all()
    assert_close(values, singular_values(line, centered), rtol=1e-10, atol=1e-7)


def test_a_shift_adds_one_large_raw_value_and_changes_no_centered_one():
    points = cloud(shift=0.0)
    assert_close(singular_values(points + 50), singular_values(points), rtol=1e-9, atol=1e-9)
    raw_singular_values = singular_values(points + 50, centered=False)
    assert raw_singular_values[0] > 30 * raw_singular_values[1]


SPECTRA = [[3.0, 2.0, 1.0], [5.0], [1e-3, 0.0, 7.0, 7.0], [2.0] * 9, [1e300, 1e300, 1e299]]


@pytest.mark.parametrize("values", SPECTRA)
def test_effective_rank_is_the_exponential_of_the_entropy(values):
    actual = effective_rank(torch.tensor(values, dtype=torch.float64)).item()
    scaled = [value / max(values) for value in values]
    assert actual == pytest.approx(oracles.entropy_rank(scaled), rel=1e-12)
    assert actual == pytest.approx(math.exp(scipy.stats.entropy(scaled)), rel=1e-12)
    assert 1 - 1e-12 <= actual <= len(values) + 1e-12


@pytest.mark.parametrize("values", SPECTRA)
def test_participation_ratio_is_the_squared_sum_over_the_sum_of_squares(values):
    scaled = [value / max(values) for value in values]
    expected = math.fsum(scaled) ** 2 / math.fsum(value**2 for value in scaled)
    actual = participation_ratio(torch.tensor(values, dtype=torch.float64)).item()
    assert actual == pytest.approx(expected, rel=1e-12)
    assert 1 - 1e-12 <= actual <= len(values) + 1e-12


def test_participation_ratio_of_the_variances_is_isoscore_in_other_units():
    points = cloud()
    ratio = participation_ratio(singular_values(points).square())
    assert_close(ratio, 1 + 4 * isoscore(points), **CLOSE)


def test_isotropic_and_flat_spectra_are_the_extremes():
    cross = torch.cat([torch.eye(4), -torch.eye(4)])
    assert effective_rank(singular_values(cross)).item() == pytest.approx(4)
    assert participation_ratio(singular_values(cross).square()).item() == pytest.approx(4)
    line = torch.tensor([[1.0, 2.0], [2.0, 4.0], [5.0, 10.0]])
    assert effective_rank(singular_values(line)).item() == pytest.approx(1, abs=1e-6)


def test_variance_shares_are_those_of_pca_and_of_the_diagonal():
    points = cloud()
    expected = PCA().fit(points.numpy()).explained_variance_ratio_
    assert_close(variance_shares(singular_values(points).square()).numpy(), expected, **CLOSE)
    diagonal = points.numpy().var(0)
    assert_close(
        variance_shares(Moments.of(points).covariance().diagonal()).numpy(), diagonal / diagonal.sum(), **CLOSE
    )


def naive_outliers(values, k, rule, reference=None):
    values = np.asarray(values)
    if rule == "sigma":
        return [i for i, v in enumerate(values) if abs(v - np.mean(values)) > k * np.std(values)]
    typical_magnitude = {"mean": np.mean, "median": np.median}[rule](
        np.abs(values if reference is None else np.asarray(reference))
    )
    return [i for i, v in enumerate(values) if abs(v) > k * typical_magnitude]


@pytest.mark.parametrize("k", [1.0, 3.0, 5.0])
@pytest.mark.parametrize("rule", ["sigma", "mean", "median"])
def test_outliers_are_what_each_rule_says(rule, k):
    values = cloud(1, 64, seed=3)[0].clone()
    values[[5, 40]] = torch.tensor([300.0, -150.0], dtype=torch.float64)
    assert outlier_dimensions(values, k, rule).tolist() == naive_outliers(values, k, rule)
    assert 5 in outlier_dimensions(values, k, rule)
    if rule != "sigma":
        reference = cloud(1, 64, seed=4)[0]
        expected = naive_outliers(values, k, rule, reference)
        assert outlier_dimensions(values, k, rule, reference).tolist() == expected
        assert outlier_dimensions(-values * 7, k, rule, reference * 7).tolist() == expected


def test_outliers_hide_each_other_from_the_deviation_but_not_from_the_median():
    values = torch.ones(40)
    values[:6] = 1000
    assert outlier_dimensions(values, 3, "sigma").tolist() == []
    assert outlier_dimensions(values, 3, "median").tolist() == [0, 1, 2, 3, 4, 5]
    assert outlier_dimensions(torch.full((7,), 0.1), 1e-9, "sigma").tolist() == []


@pytest.mark.parametrize("shift", [0.0, 3.0, 1e4])
@pytest.mark.parametrize("shape", [(60, 5), (3, 20, 5)])
def test_moments_by_dimension_are_those_of_scipy(shape, shift):
    points = cloud().square() + shift
    moments = DimensionMoments.of(points.reshape(shape))
    array = points.numpy()
    tolerance = {"rtol": 1e-10, "atol": 1e-10}
    assert moments.count == 60
    assert_close(moments.mean.numpy(), array.mean(0), **tolerance)
    for correction in (0, 1):
        assert_close(moments.variance(correction).numpy(), array.var(0, ddof=correction), **tolerance)
        assert_close(moments.deviation(correction).numpy(), array.std(0, ddof=correction), **tolerance)
    assert_close(moments.skewness().numpy(), scipy.stats.skew(array), **tolerance)
    assert_close(moments.kurtosis().numpy(), scipy.stats.kurtosis(array), **tolerance)
    assert_close(moments.kurtosis(excess=False).numpy(), scipy.stats.kurtosis(array, fisher=False), **tolerance)


def test_power_sums_about_an_origin_give_the_moments_about_the_mean():
    points, origin = cloud().square() + 100, torch.linspace(97, 104, 5).double()
    points[:, 3] = origin[3]
    array = points.numpy()
    power_sums = torch.stack([(points - origin).pow(power).sum(0) for power in (1, 2, 3, 4)])
    moments = DimensionMoments.about_mean(origin, torch.tensor(60.0).double(), power_sums)
    assert_close(moments.mean.numpy(), array.mean(0), rtol=1e-12, atol=0)
    assert_close(moments.variance().numpy(), array.var(0, ddof=1), rtol=1e-10, atol=1e-12)
    is_varying = array.var(0) > 0
    assert not is_varying[3]
    assert_close(moments.skewness().numpy()[is_varying], scipy.stats.skew(array[:, is_varying]), rtol=1e-9, atol=1e-9)
    kurtosis = scipy.stats.kurtosis(array[:, is_varying])
    assert_close(moments.kurtosis().numpy()[is_varying], kurtosis, rtol=1e-9, atol=1e-9)
    assert moments.kurtosis()[3].isnan()


def assert_moments_equal(actual, expected):
    for name in ("count", "mean", "m2", "m3", "m4"):
        scale = getattr(expected, name).abs().max().item()
        assert_close(getattr(actual, name), getattr(expected, name), rtol=1e-11, atol=1e-12 * scale)


@pytest.mark.parametrize("cuts", [(1, 2, 3), (7, 7, 50), (30, 31, 59)])
def test_merging_is_exact_in_any_order(cuts):
    # The parts differ in size, mean and shape, so that no term of the merge is small.
    points = cloud().square() * torch.linspace(1, 3, 60)[:, None] + torch.linspace(0, 40, 60)[:, None]
    parts = [DimensionMoments.of(part) for part in points.tensor_split(cuts) if len(part)]
    expected = DimensionMoments.of(points)
    merged_backwards = DimensionMoments(5)
    for part in reversed(parts):
        merged_backwards.merge(part)
    assert_moments_equal(merged_backwards, expected)
    streamed = DimensionMoments(5)
    for part in points.tensor_split(cuts):
        streamed.update(part)
    assert_moments_equal(streamed, expected)
    assert_close(streamed.kurtosis().numpy(), scipy.stats.kurtosis(points.numpy()), rtol=1e-11, atol=1e-11)


def test_a_dimension_that_is_constant_has_no_kurtosis():
    points = torch.cat([cloud(), torch.full((60, 1), 0.1, dtype=torch.float64)], dim=1)
    kurtosis = DimensionMoments.of(points[:30]).merge(DimensionMoments.of(points[30:])).kurtosis()
    assert kurtosis[:5].isfinite().all()
    assert DimensionMoments.of(torch.full((8, 2), 2.0)).kurtosis().isnan().all()


WITH_NAN = cloud()
WITH_NAN[2, 1] = math.nan
ONES = torch.ones(3)
INVALID_CALLS = {
    "nan in moments": (lambda: singular_values(Moments.of(WITH_NAN)), NonFiniteError, "squares, are not finite"),
    "no moments": (lambda: singular_values(Moments(3)), UserError, "0 points have no singular values"),
    "negative": (lambda: effective_rank(-ONES), UserError, "smallest value is -1; expected none below 0"),
    "zeros": (lambda: participation_ratio(0 * ONES), UserError, "all values are zero"),
    "matrix": (lambda: variance_shares(torch.eye(3)), UserError, r"shape \(3, 3\); expected \(d,\)"),
    "no values": (lambda: effective_rank(torch.ones(0)), UserError, r"shape \(0,\)"),
    "nan values": (lambda: effective_rank(WITH_NAN[2]), NonFiniteError, "values of the vector are not finite"),
    "integer values": (lambda: variance_shares(torch.ones(3).long()), UserError, "int64; expected a floating"),
    "rule": (lambda: outlier_dimensions(ONES, rule="mad"), UserError, "'mad'; expected one of sigma, mean, median"),
    "k": (lambda: outlier_dimensions(ONES, 0), UserError, "k is 0; expected a number above 0"),
    "k nan": (lambda: outlier_dimensions(ONES, math.nan), UserError, "k is nan"),
    "sigma": (lambda: outlier_dimensions(ONES, reference=ONES), UserError, "a reference was given with rule 'sigma'"),
    "reference": (lambda: outlier_dimensions(ONES, 3, "mean", torch.ones(4)), UserError, r"reference has shape \(4,\)"),
    "no points": (lambda: DimensionMoments(3).kurtosis(), UserError, "^0 points .* at least 1"),
    "one point": (lambda: DimensionMoments.of(ONES[None]).variance(), UserError, "^1 points .* at least 2"),
    "nan points": (lambda: DimensionMoments.of(WITH_NAN).kurtosis(), NonFiniteError, "not finite"),
    "no dim": (lambda: DimensionMoments(0), UserError, "0 dimensions"),
}


@pytest.mark.parametrize(("call", "error", "message"), INVALID_CALLS.values(), ids=INVALID_CALLS)
def test_what_has_no_spectrum_is_refused_in_one_line(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
