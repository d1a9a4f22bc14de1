"""The unbiased score and the shrinkage intensity."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from istar.errors import NonFiniteError, UserError
from istar.measures import FourthMoments, Moments, isoscore, isoscore_star, isoscore_unbiased, shrinkage_intensity
from tests import oracles

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
CLOUDS = [(4, 3, 1.0), (5, 40, 1.0), (12, 2, 1e3), (20, 6, 10.0), (24, 30, 1e4)]


def cloud(n, d, ratio=1.0, seed=0, dtype=torch.float64):
    """Return points off the origin, of a skewed distribution with heavy tails."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(n, d, generator=generator, dtype=torch.float64).exp()
    rotation, _ = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
    return (points * torch.logspace(0, -math.log10(ratio), d) @ rotation + 3 * rotation[0]).to(dtype)


def value_and_gradient(function, points):
    points = points.detach().clone().requires_grad_()
    value = function(points)
    return value.detach(), torch.autograd.grad(value, points)[0]


# The unbiased score ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "d", "ratio"), CLOUDS)
def test_score_and_gradient_are_those_of_all_quadruples(n, d, ratio):
    actual = value_and_gradient(isoscore_unbiased, cloud(n, d, ratio))
    expected = value_and_gradient(oracles.unbiased_isoscore, cloud(n, d, ratio))
    assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    assert expected[1].norm() > 1e-6


@pytest.mark.parametrize("n", [4, 5, 6])
def test_both_squares_are_unbiased_over_all_samples_of_a_discrete_distribution(n):
    """The expectations are computed by enumeration of all samples, so without noise."""
    atoms = torch.tensor([[0.0, 0.0], [1.0, 2.0], [-3.0, 0.5]], dtype=torch.float64)
    shares = np.array([0.5, 0.3, 0.2])
    true_covariance = np.cov(atoms.numpy().T, aweights=shares, ddof=0)
    means = np.zeros(2)
    for sample in itertools.combinations_with_replacement(range(3), n):
        counts = np.bincount(sample, minlength=3)
        probability = math.factorial(n) / np.prod([math.factorial(count) for count in counts]) * np.prod(shares**counts)
        means += probability * np.array(estimate_squares(atoms[list(sample)]))
    assert_close(means, np.array([np.sum(true_covariance**2), np.trace(true_covariance) ** 2]), rtol=1e-12, atol=0)


def estimate_squares(points):
    """Return the estimates whose ratio the score contains; the second one is that of the oracle."""
    squared_norm, squared_trace = (square.item() for square in oracles.unbiased_squares(points))
    if squared_norm == 0:
        with pytest.raises(UserError, match=r"estimated as 0|all points are equal"):
            isoscore_unbiased(points)
        return 0.0, squared_trace
    return squared_trace / (isoscore_unbiased(points).item() * (points.shape[1] - 1) + 1), squared_trace


FIGURE_2 = torch.tensor([10.0, 6, 4, 4] + [1] * 764)
TRUE_SCORE = (FIGURE_2.sum() ** 2 / FIGURE_2.square().sum() - 1).item() / 767


def gaussian(n, generator):
    return torch.randn(n, 768, generator=generator) * FIGURE_2.sqrt()


@pytest.mark.slow
def test_figure_2_of_the_paper_from_300_points():
    generator = torch.Generator().manual_seed(0)
    sigma = torch.diag(FIGURE_2.double())
    clouds = [gaussian(300, generator) for _ in range(12)]
    assert round(TRUE_SCORE, 3) == 0.867
    means = {
        "unbiased": np.mean([isoscore_unbiased(points).item() for points in clouds]),
        "plain": np.mean([isoscore(points).item() for points in clouds]),
        "star": np.mean([isoscore_star(points, sigma, 0.8).item() for points in clouds]),
    }
    assert abs(means["unbiased"] - TRUE_SCORE) < 0.02
    assert abs(means["plain"] - 0.27) < 0.01
    assert means["star"] < TRUE_SCORE - 0.05


@pytest.mark.slow
@pytest.mark.parametrize("n", [8, 30])
def test_heavy_tails_do_not_bias_it(n):
    """Points whose lengths vary tenfold; IsoScore of the mixture's covariance, a multiple of the identity, is 1."""
    generator = torch.Generator().manual_seed(1)
    scores, plain_scores = [], []
    for _ in range(400):
        lengths = 10 ** torch.rand(n, 1, generator=generator, dtype=torch.float64)
        points = torch.randn(n, 50, generator=generator, dtype=torch.float64) * lengths
        terms = oracles.unbiased_squares(points) if n == 8 else None
        scores.append(isoscore_unbiased(points).item())
        plain_scores.append(isoscore(points).item())
        if terms is not None:
            assert_close((terms[1] / terms[0]).item(), scores[-1] * 49 + 1, rtol=1e-9, atol=0)
    # The mean of a ratio is above the ratio of the means, the less so the more points there are.
    assert abs(np.median(scores) - 1) < (0.25 if n == 8 else 0.06)
    assert np.mean(plain_scores) < 0.4


def test_range_is_never_below_0_and_above_1_for_few_isotropic_points():
    generator = torch.Generator().manual_seed(0)
    scores = [isoscore_unbiased(torch.randn(6, 9, generator=generator)).item() for _ in range(200)]
    assert min(scores) >= 0
    assert max(scores) > 1.5
    line = torch.arange(9.0)[:, None] * torch.tensor([1.0, -2, 4])
    assert_close(isoscore_unbiased(line).item(), 0.0, rtol=0, atol=1e-6)


def test_many_points_have_the_plain_score():
    points = cloud(50_000, 5, 3)
    assert abs(isoscore_unbiased(points) - isoscore(points)) < 1e-3


def test_gradient_is_that_of_finite_differences():
    points = cloud(5, 3).requires_grad_()
    assert torch.autograd.gradcheck(isoscore_unbiased, points)
    assert torch.autograd.gradgradcheck(isoscore_unbiased, points, fast_mode=True)


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e12])
def test_the_gradient_falls_with_the_scale(scale):
    expected = value_and_gradient(isoscore_unbiased, cloud(9, 5, 10))[1]
    gradient = value_and_gradient(isoscore_unbiased, scale * cloud(9, 5, 10))[1]
    assert_close(scale * gradient, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("scale", [-1, 1e-8, 1e14])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_neither_scale_nor_rotation_nor_translation_changes_it(dtype, scale):
    points = cloud(30, 8, 3)
    rotation, _ = torch.linalg.qr(cloud(8, 8, seed=5))
    tolerance = 1e-4 if dtype == torch.float32 else 1e-9
    moved = scale * (points @ rotation + 100)
    assert_close(isoscore_unbiased(moved.to(dtype)), isoscore_unbiased(points), rtol=tolerance, atol=0)


def test_moments_that_were_streamed_have_the_score_of_the_points():
    points = cloud(40, 6) + 1e4
    streamed = FourthMoments(6)
    for batch in points.split(7):
        streamed.merge(FourthMoments.of(batch))
    assert_close(isoscore_unbiased(streamed), isoscore_unbiased(points), rtol=1e-10, atol=0)


# The shrinkage intensity -----------------------------------------------------------------------------------


def make_shrinkage_target(d):
    return torch.cov(cloud(200, d, 2, seed=7).T)


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e12])
@pytest.mark.parametrize(("n", "d", "ratio"), [*CLOUDS, (2, 3, 1.0), (300, 4, 2.0)])
def test_intensity_is_that_of_all_entries(n, d, ratio, scale):
    points, sigma = cloud(n, d, ratio), make_shrinkage_target(d)
    expected = oracles.shrinkage_intensity(points.numpy(), sigma.numpy())
    actual = shrinkage_intensity(FourthMoments.of(scale * points), scale**2 * sigma)
    assert_close(actual.item(), expected, rtol=1e-9, atol=1e-12)


def test_the_intensities_tested_lie_within_the_range_and_at_its_end():
    zetas = [
        oracles.shrinkage_intensity(cloud(n, d, ratio).numpy(), make_shrinkage_target(d).numpy())
        for n, d, ratio in [*CLOUDS, (300, 4, 2.0)]
    ]
    assert sum(0.01 < zeta < 0.99 for zeta in zetas) >= 4


@pytest.mark.slow
def test_it_has_the_least_squared_error_of_all_zetas():
    """Over many samples of a known covariance: nearly that of the best fixed zeta."""
    generator = torch.Generator().manual_seed(0)
    true_covariance = torch.diag(torch.linspace(1, 3, 10, dtype=torch.float64))
    shrinkage_target = true_covariance + 0.15 * torch.ones(10, 10)
    covariances, zetas = [], []
    for _ in range(300):
        points = torch.randn(40, 10, generator=generator, dtype=torch.float64) @ true_covariance.sqrt()
        covariances.append(torch.cov(points.T))
        zetas.append(shrinkage_intensity(FourthMoments.of(points), shrinkage_target).item())

    def mean_squared_error(zeta_by_sample):
        shrunk = [
            (1 - zeta) * covariance + zeta * shrinkage_target
            for zeta, covariance in zip(zeta_by_sample, covariances, strict=True)
        ]
        return np.mean([(matrix - true_covariance).square().sum().item() for matrix in shrunk])

    error_by_fixed_zeta = {zeta: mean_squared_error([zeta] * 300) for zeta in np.linspace(0, 1, 21)}
    best_zeta = min(error_by_fixed_zeta, key=error_by_fixed_zeta.get)
    assert 0.5 < best_zeta < 0.95
    assert abs(np.mean(zetas) - best_zeta) < 0.08
    assert mean_squared_error(zetas) < 1.2 * error_by_fixed_zeta[best_zeta] < 0.5 * error_by_fixed_zeta[0.0]


def test_it_is_1_for_noise_alone_and_falls_with_the_points():
    sigma = torch.eye(6, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(4000, 6, generator=generator, dtype=torch.float64) * 1.3
    zetas = [shrinkage_intensity(FourthMoments.of(points[:n]), sigma).item() for n in (10, 100, 1000, 4000)]
    assert zetas == sorted(zetas, reverse=True)
    assert zetas[0] > 0.3
    assert zetas[-1] < 0.02
    moments = FourthMoments.of(points)
    assert shrinkage_intensity(moments, moments.covariance()) == 1


def test_it_is_a_constant():
    points = cloud(9, 4).requires_grad_()
    assert not shrinkage_intensity(FourthMoments.of(points), make_shrinkage_target(4).requires_grad_()).requires_grad


def make_simplex():
    return torch.eye(6, dtype=torch.float64)


def make_equal_points_but_one():
    points = torch.ones(7, 3)
    points[3] = 2
    return points


INVALID_CALLS = [
    (lambda: isoscore_unbiased(cloud(3, 4)), "3 points have no unbiased score; expected at least 4"),
    (lambda: isoscore_unbiased(cloud(9, 1)), "at least 2 dimensions; the covariance of the points has 1"),
    (lambda: isoscore_unbiased(torch.full((9, 3), 0.1)), "all points are equal"),
    (lambda: isoscore_unbiased(make_simplex()), "is estimated as 0"),
    (lambda: isoscore_unbiased(make_equal_points_but_one()), "is estimated as 0"),
    (lambda: isoscore_unbiased(Moments.of(cloud(9, 4))), "Moments do not hold the fourth-order sum"),
    (lambda: isoscore_unbiased(FourthMoments.of(cloud(9, 4)), torch.ones(9)), "a mask was given with moments"),
    (lambda: shrinkage_intensity(FourthMoments.of(cloud(9, 4)), torch.eye(3)), r"\(3, 3\); expected \(4, 4\)"),
    (lambda: shrinkage_intensity(FourthMoments.of(cloud(1, 4)), torch.eye(4)), "1 points have no covariance"),
    (lambda: shrinkage_intensity(FourthMoments.of(torch.ones(9, 4)), torch.eye(4)), "all points are equal"),
    (lambda: shrinkage_intensity(FourthMoments.of(cloud(9, 4)), torch.eye(4) / 0), "shrinkage covariance is not fin"),
]


@pytest.mark.parametrize(("call", "message"), INVALID_CALLS, ids=[str(i) for i in range(len(INVALID_CALLS))])
def test_what_has_no_score_is_refused_in_one_line(call, message):
    with pytest.raises(UserError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
    assert ("not fin" in message) == isinstance(error.value, NonFiniteError)
