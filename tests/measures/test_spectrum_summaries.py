"""RankMe, alpha-ReQ, NESum and shares of the top values: naive formulas, scipy and numpy, and known spectra."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from istar.errors import NonFiniteError, UserError
from istar.measures import (
    DimensionMoments,
    Moments,
    alpha_req,
    count_dimensions,
    effective_rank,
    nesum,
    participation_ratio,
    rank_me,
    singular_values,
    top_share,
)


def cloud(n=60, d=5, seed=0, shift=3.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(n, d, generator=generator, dtype=torch.float64)
    mixing = torch.randn(d, d, generator=generator, dtype=torch.float64)
    return (points @ mixing + shift).to(dtype)


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


SPECTRA = [[3.0, 2.0, 1.0], [5.0], [1e-3, 0.0, 7.0, 7.0], [2.0] * 9, [1e300, 1e300, 1e299]]


def naive_rank_me(points, epsilon):
    """Equation 1 of the paper for points `(n, d)`, term by term."""
    values = np.linalg.svd(points, compute_uv=False)
    shares = [value / math.fsum(values) + epsilon for value in values]
    return math.exp(-math.fsum(share * math.log(share) for share in shares))


@pytest.mark.parametrize("epsilon", [1e-7, 0.01])
@pytest.mark.parametrize("n", [60, 5])
def test_rank_me_is_equation_1_of_the_raw_points(n, epsilon):
    points = cloud(n)
    raw_singular_values = singular_values(points, centered=False)
    assert rank_me(raw_singular_values, epsilon).item() == pytest.approx(
        naive_rank_me(points.numpy(), epsilon), rel=1e-12
    )
    streamed = Moments(5).update(points[:3]).update(points[3:])
    assert rank_me(singular_values(streamed, centered=False), epsilon).item() == pytest.approx(
        rank_me(raw_singular_values, epsilon).item(), rel=1e-7
    )


@pytest.mark.parametrize("values", SPECTRA)
def test_rank_me_without_epsilon_is_the_effective_rank_and_exceeds_it_little_with(values):
    values = vector(*values)
    assert rank_me(values, 0.0).item() == pytest.approx(effective_rank(values).item(), rel=1e-14)
    entropy = scipy.stats.entropy((values / values.max()).numpy())
    assert rank_me(values, 0.0).item() == pytest.approx(math.exp(entropy), rel=1e-12)
    excess = rank_me(values).item() / effective_rank(values).item() - 1
    assert excess >= -1e-7 - 1e-12
    assert excess <= len(values) * 1e-7 * math.log(1e7) * 1.01


def test_a_distant_mean_lowers_rank_me_but_not_the_effective_rank_about_the_mean():
    points = cloud(500, shift=0.0)
    shifted_points = points + 100
    assert rank_me(singular_values(shifted_points, centered=False)) < 0.6 * rank_me(
        singular_values(points, centered=False)
    )
    assert effective_rank(singular_values(shifted_points)).item() == pytest.approx(
        effective_rank(singular_values(points)).item(), rel=1e-9
    )


@pytest.mark.parametrize("values", SPECTRA)
def test_nesum_is_the_sum_over_the_largest(values):
    scaled = [value / max(values) for value in values]
    actual = nesum(vector(*values)).item()
    assert actual == pytest.approx(math.fsum(scaled), rel=1e-12)
    assert 1 - 1e-12 <= actual <= participation_ratio(vector(*values)).item() + 1e-12


def test_nesum_of_a_cloud_is_its_stable_rank():
    points = cloud()
    centered_points = points.numpy() - points.numpy().mean(0)
    stable_rank = (np.linalg.norm(centered_points) / np.linalg.norm(centered_points, 2)) ** 2
    assert nesum(singular_values(Moments.of(points)).square()).item() == pytest.approx(stable_rank, rel=1e-10)
    eigenvalues = np.linalg.eigvalsh(np.cov(points.numpy(), rowvar=False))
    assert nesum(torch.from_numpy(eigenvalues)).item() == pytest.approx(stable_rank, rel=1e-10)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.5])
@pytest.mark.parametrize("weights", ["equal", "inverse_rank"])
def test_alpha_req_of_a_power_law_is_its_exponent(alpha, weights):
    spectrum = 7e-5 * torch.arange(1, 301, dtype=torch.float64) ** -alpha
    shuffled = spectrum[torch.randperm(300, generator=torch.Generator().manual_seed(0))]
    fit = alpha_req(shuffled, weights=weights)
    assert fit.alpha == pytest.approx(alpha, abs=1e-11)
    assert (fit.first, fit.last) == (11, 100)
    assert math.isnan(fit.r_squared) if alpha == 0 else fit.r_squared == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(("first", "last"), [(11, 100), (1, 40), (3, 7), (30, 31)])
def test_alpha_req_is_the_least_squares_line_of_scipy_and_numpy(first, last):
    variances = cloud(300, 40, seed=4).var(0)
    fit = alpha_req(variances, first, last)
    last = min(last, 40)
    ranks = np.arange(first, last + 1)
    logs = np.log(np.sort(variances.numpy())[::-1][first - 1 : last])
    regression = scipy.stats.linregress(np.log(ranks), logs)
    assert fit.alpha == pytest.approx(-regression.slope, rel=1e-9)
    assert fit.r_squared == pytest.approx(regression.rvalue**2, rel=1e-9)
    assert (fit.first, fit.last) == (first, last)
    # polyfit squares its weights.
    weighted_coefficients = np.polyfit(np.log(ranks), logs, 1, w=1 / np.sqrt(ranks))
    assert alpha_req(variances, first, last, "inverse_rank").alpha == pytest.approx(-weighted_coefficients[0], rel=1e-9)


def test_alpha_req_leaves_out_zeros_and_does_not_depend_on_scale():
    spectrum = torch.arange(1, 31, dtype=torch.float64) ** -1.3
    with_zeros = torch.cat([torch.zeros(20, dtype=torch.float64), spectrum])
    fit, fit_with_zeros = alpha_req(spectrum), alpha_req(with_zeros)
    assert fit_with_zeros.alpha == pytest.approx(fit.alpha, rel=1e-12)
    assert fit_with_zeros.r_squared == pytest.approx(fit.r_squared, rel=1e-12)
    assert (fit_with_zeros.first, fit_with_zeros.last) == (fit.first, fit.last) == (11, 30)
    for scale in (1e-200, 1e200):
        assert alpha_req(spectrum * scale).alpha == pytest.approx(1.3, rel=1e-9)
    assert alpha_req(spectrum.float()).alpha == pytest.approx(1.3, rel=1e-5)
    assert alpha_req(spectrum.bfloat16()).alpha == pytest.approx(1.3, rel=1e-2)


def test_summaries_of_a_gaussian_with_a_known_spectrum():
    """Points with randomly rotated variances 1 / i have summaries near those of this spectrum."""
    generator = torch.Generator().manual_seed(1)
    variances = torch.arange(1, 41, dtype=torch.float64) ** -1.0
    rotation, _ = torch.linalg.qr(torch.randn(40, 40, generator=generator, dtype=torch.float64))
    points = torch.randn(20_000, 40, generator=generator, dtype=torch.float64) * variances.sqrt() @ rotation
    estimated = singular_values(Moments(40).update(points[:7000]).update(points[7000:])).square()
    assert alpha_req(estimated, 1, 40).alpha == pytest.approx(1, abs=0.02)
    assert nesum(estimated).item() == pytest.approx(variances.sum().item(), rel=0.03)
    assert top_share(estimated, 3).item() == pytest.approx((variances[:3].sum() / variances.sum()).item(), rel=0.02)
    expected = math.exp(scipy.stats.entropy(variances.sqrt().numpy()))
    assert rank_me(singular_values(points, centered=False)).item() == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_top_share_is_that_of_sorted_values(k):
    points = cloud()
    variances = points.numpy().var(0)
    expected = np.sort(variances)[-k:].sum() / variances.sum()
    streamed = DimensionMoments(5).update(points[:20]).merge(DimensionMoments.of(points[20:]))
    assert top_share(streamed.variance(), k).item() == pytest.approx(expected, rel=1e-12)
    assert top_share(1e305 * streamed.variance(), k).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_dimensions_for_a_share_of_the_variance(scale):
    variances = vector(1, 6, 2, 1, 0) * scale
    shares = (0.5, 0.6, 0.61, 0.8, 0.9, 0.91, 0.999)
    assert [count_dimensions(variances, share) for share in shares] == [1, 1, 2, 2, 3, 4, 4]
    equal_variances = vector(*[0.1] * 256) * scale
    assert [count_dimensions(equal_variances, share) for share in (0.25, 0.5, 0.95)] == [64, 128, 244]


def test_top_share_of_signed_values():
    assert top_share(vector(4, -1, -1), 1).item() == pytest.approx(2)
    assert top_share(vector(4, -1, -1), 3).item() == pytest.approx(1)
    assert math.isnan(top_share(vector(1, -1)))
    assert math.isnan(top_share(vector(0, 0)))
    assert math.isnan(top_share(vector(1, -3)))


ONES = torch.ones(20, dtype=torch.float64)
INVALID_CALLS = {
    "rank_me shape": (lambda: rank_me(torch.ones(2, 2)), UserError, r"shape \(2, 2\); expected \(d,\)"),
    "rank_me zeros": (lambda: rank_me(torch.zeros(3)), UserError, "all values are zero"),
    "rank_me epsilon": (lambda: rank_me(ONES, -1e-7), UserError, "epsilon is -1e-07"),
    "nesum nan": (lambda: nesum(vector(1, math.nan)), NonFiniteError, "not finite"),
    "nesum integers": (lambda: nesum(torch.ones(3).long()), UserError, "int64; expected a floating dtype"),
    "alpha short": (lambda: alpha_req(ONES[:11]), UserError, "ranks 11 to 11"),
    "alpha first": (lambda: alpha_req(ONES, 0), UserError, "ranks 0 to 20"),
    "alpha zeros": (lambda: alpha_req(vector(1, 0, 0), 1), UserError, "at least two ranks"),
    "alpha order": (lambda: alpha_req(ONES, 9, 3), UserError, "ranks 9 to 3"),
    "alpha weights": (lambda: alpha_req(ONES, weights="rank"), UserError, "expected one of equal, inverse_rank"),
    "share k": (lambda: top_share(ONES, 21), UserError, "k is 21; expected 1 to 20"),
    "share no k": (lambda: top_share(ONES, 0), UserError, "k is 0"),
    "dimensions share": (lambda: count_dimensions(ONES, 95), UserError, "share is 95; expected a number above 0"),
    "dimensions zeros": (lambda: count_dimensions(torch.zeros(3)), UserError, "all values are zero"),
    "share infinite": (lambda: top_share(vector(1, math.inf)), NonFiniteError, "not finite"),
}


@pytest.mark.parametrize(("call", "error", "message"), INVALID_CALLS.values(), ids=INVALID_CALLS)
def test_bad_spectra_are_refused_in_one_line(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
