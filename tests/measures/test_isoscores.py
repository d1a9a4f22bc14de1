import math

import pytest
import torch
from IsoScore import IsoScore as Published
from torch.testing import assert_close

from istar.errors import UserError
from istar.measures import Moments, isoscore, isoscore_from_covariance, isoscore_star, shrink
from istar.measures.isoscores import unchecked_isoscore
from tests.oracles import algorithm_1, algorithm_2, steps_6_to_9

CLOSE = {"rtol": 1e-10, "atol": 1e-10}

# (n, d, ratio of the largest to the smallest deviation); the last two have singular covariances
CLOUDS = [(50, 2, 1), (200, 10, 1), (200, 10, 1e4), (300, 30, 1e6), (12, 30, 1), (2, 30, 1e3)]


def cloud(n, d, ratio=1.0, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(n, d, generator=generator, dtype=torch.float64)
    rotation, _ = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
    deviations = torch.logspace(0, -math.log10(ratio), d, dtype=torch.float64)
    return ((points * deviations) @ rotation + rotation[0]).to(dtype)


def covariance(d, ratio=3.0, seed=1):
    return torch.cov(cloud(5 * d, d, ratio, seed).T)


def value_and_gradient(function, points):
    points = points.detach().clone().requires_grad_()
    value = function(points)
    return value.detach(), torch.autograd.grad(value, points)[0]


@pytest.mark.parametrize("spectrum", [torch.linalg.svdvals, torch.linalg.eigvalsh])
@pytest.mark.parametrize("zeta", [0.0, 0.2])
@pytest.mark.parametrize(("n", "d", "ratio"), CLOUDS)
def test_isoscore_star_and_its_gradient_are_algorithm_1(n, d, ratio, zeta, spectrum):
    points, shrinkage = cloud(n, d, ratio), covariance(d)
    actual = value_and_gradient(lambda x: isoscore_star(x, shrinkage, zeta), points)
    expected = value_and_gradient(lambda x: algorithm_1(x, shrinkage, zeta, spectrum), points)
    assert_close(actual, expected, **CLOSE)
    assert expected[1].norm() > 1e-6 or (n == 2 and zeta == 0)  # two points are a line, the minimum


@pytest.mark.parametrize(("n", "d", "ratio"), CLOUDS)
def test_isoscore_and_its_gradient_are_algorithm_1_without_shrinkage(n, d, ratio):
    points = cloud(n, d, ratio)
    assert_close(value_and_gradient(isoscore, points), value_and_gradient(algorithm_1, points), **CLOSE)


@pytest.mark.parametrize(("n", "d", "ratio"), CLOUDS[:4])
def test_isoscore_is_algorithm_2(n, d, ratio):
    points = cloud(n, d, ratio)
    assert_close(isoscore(points).item(), algorithm_2(points.numpy()), **CLOSE)


@pytest.mark.parametrize(("n", "d", "ratio"), CLOUDS)
def test_values_are_those_of_the_published_package(n, d, ratio):
    """To 1e-6: the package takes the square root of d in float32."""
    points, shrinkage = cloud(n, d, ratio), covariance(d)
    tolerance = {"rtol": 0, "atol": 1e-6}
    points_array = points.numpy()
    assert_close(isoscore(points).item(), Published.IsoScore(points_array).item(), **tolerance)
    assert_close(
        isoscore_from_covariance(shrinkage).item(), Published.IsoScore_cov(shrinkage.numpy()).item(), **tolerance
    )
    for zeta in (0.0, 0.2, 0.8, 1.0):
        expected = Published.IsoScore_star(points_array, shrinkage, zeta).item()
        assert_close(isoscore_star(points, shrinkage, zeta).item(), expected, **tolerance)


@pytest.mark.parametrize("score", [isoscore, lambda points: isoscore_star(points, covariance(4), 0.3)])
def test_gradients_are_those_of_finite_differences(score):
    points = cloud(7, 4, 10).requires_grad_()
    assert torch.autograd.gradcheck(score, points)
    assert torch.autograd.gradgradcheck(score, points, fast_mode=True)


def test_gradient_by_the_shrinkage_covariance_is_that_of_finite_differences():
    points, root = cloud(7, 4), cloud(4, 4, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda root: isoscore_star(points, root @ root.T, 0.3), root)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_closed_form_has_the_derivative_by_the_covariance(dtype, scale):
    matrix = (scale * covariance(6)).to(dtype).requires_grad_()
    (expected,) = torch.autograd.grad(steps_6_to_9(torch.linalg.eigvalsh(matrix.double())), matrix)
    (gradient,) = torch.autograd.grad(unchecked_isoscore(matrix), matrix)
    assert gradient.dtype == dtype
    assert torch.equal(gradient, gradient.T)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-6
    assert (gradient - expected).norm() < tolerance * expected.norm()


def test_the_closed_form_has_no_gradient_at_the_maximum():
    matrix = (3 * torch.eye(5, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.grad(unchecked_isoscore(matrix), matrix)[0].abs().max() < 1e-16


FIGURE_2 = torch.tensor([10.0, 6, 4, 4] + [1] * 764)


def expected_score(zeta, n, shrinkage_n):
    """Return the score for E||S||^2 = ||Sigma||^2 + (||Sigma||^2 + tr(Sigma)^2) / (n - 1) of Gaussian samples."""
    trace, squares = FIGURE_2.sum().item(), FIGURE_2.square().sum().item()
    noise = ((1 - zeta) ** 2 / (n - 1) + zeta**2 / (shrinkage_n - 1)) * (squares + trace**2)
    return (trace**2 / (squares + noise) - 1) / 767


@pytest.mark.slow
def test_figure_2_of_the_paper():
    """Small samples underestimate the true score, 0.867, and less so with a larger n or zeta."""
    generator = torch.Generator().manual_seed(0)

    def sample(n):
        return torch.randn(n, 768, generator=generator) * FIGURE_2.sqrt()

    true_score = isoscore_from_covariance(torch.diag(FIGURE_2)).item()
    assert round(true_score, 3) == 0.867
    large_moments = Moments(768)
    for _ in range(15):
        large_moments.update(sample(5000))
    sigma = large_moments.covariance()
    assert abs(isoscore(large_moments).item() - true_score) < 0.012
    assert abs(isoscore(large_moments).item() - expected_score(1.0, 2, 75_000)) < 0.004

    zetas = (0.0, 0.2, 0.4, 0.6, 0.8)
    scores = {}
    for n in (300, 700):
        moments = Moments.of(sample(n))
        scores[n] = [isoscore_star(moments, sigma, zeta).item() for zeta in zetas]
        assert scores[n] == sorted(scores[n])
        assert scores[n][-1] < true_score
        assert scores[n] == pytest.approx([expected_score(zeta, n, 75_000) for zeta in zetas], abs=0.004)
    assert all(score_of_300 < score_of_700 for score_of_300, score_of_700 in zip(scores[300], scores[700], strict=True))
    assert scores[300][0] < 0.3  # far below the truth
    assert true_score - scores[700][-1] < 0.05


@pytest.mark.parametrize("score", [isoscore, lambda points: isoscore_star(points, covariance(10), 0.3)])
def test_translation_changes_nothing(score):
    points = cloud(100, 10, 100)
    assert_close(score(points + 1000 * torch.arange(10)), score(points), **CLOSE)


@pytest.mark.parametrize("scale", [-1, 1e-6, 1e10, 1e15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scale_changes_neither_score_nor_relative_gradient_and_overflows_nothing(dtype, scale):
    points = cloud(100, 10, 10, dtype=dtype)
    value, gradient = value_and_gradient(isoscore, points)
    scaled_value, scaled_gradient = value_and_gradient(isoscore, scale * points)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    assert_close(scaled_value, value, rtol=tolerance, atol=0)
    assert_close(scale * scaled_gradient, gradient, rtol=100 * tolerance, atol=tolerance)
    scaled_score = isoscore_star(scale * points, scale**2 * covariance(10).to(dtype), 0.3)
    assert_close(scaled_score, isoscore_star(points, covariance(10).to(dtype), 0.3), rtol=tolerance, atol=0)


def test_rotation_changes_nothing():
    points, shrinkage = cloud(100, 10, 100), covariance(10)
    rotation, _ = torch.linalg.qr(cloud(10, 10, seed=5))
    assert_close(isoscore(points @ rotation), isoscore(points), **CLOSE)
    rotated = isoscore_star(points @ rotation, rotation.T @ shrinkage @ rotation, 0.4)
    assert_close(rotated, isoscore_star(points, shrinkage, 0.4), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_score_lies_between_0_for_a_line_and_1_for_equal_variances(dtype):
    axes = torch.cat([torch.eye(6), -torch.eye(6)]).to(dtype)
    assert_close(isoscore(axes).item(), 1.0, rtol=0, atol=1e-6)
    line = torch.arange(9).to(dtype)[:, None] * torch.tensor([1, -2, 4]).to(dtype)
    assert_close(isoscore(line).item(), 0.0, rtol=0, atol=1e-6)
    for seed in range(10):
        assert 0 < isoscore(cloud(9, 6, 10.0**seed, seed, dtype)) < 1


def test_k_equal_variances_of_d_score_k_minus_1_over_d_minus_1():
    for k in range(1, 8):
        matrix = torch.diag((torch.arange(7) < k).double())
        assert_close(isoscore_from_covariance(matrix).item(), (k - 1) / 6, **CLOSE)


def test_zeta_0_is_isoscore_and_zeta_1_ignores_the_points():
    points, shrinkage = cloud(40, 6, 10), covariance(6)
    with_zeta_0 = value_and_gradient(lambda x: isoscore_star(x, shrinkage, 0), points)
    assert_close(with_zeta_0, value_and_gradient(isoscore, points), rtol=0, atol=1e-15)
    value, gradient = value_and_gradient(lambda x: isoscore_star(x, shrinkage, 1), points)
    assert_close(value, isoscore_from_covariance(shrinkage), **CLOSE)
    assert not gradient.any()


def test_shrink_is_step_4():
    sample, shrinkage = covariance(4, seed=3), covariance(4)
    assert_close(shrink(sample, shrinkage, 0.2), 0.8 * sample + 0.2 * shrinkage, rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_result_is_float64_and_gradient_has_the_dtype_of_the_points(dtype):
    points = cloud(50, 5, dtype=dtype)
    value, gradient = value_and_gradient(isoscore, points)
    assert (value.dtype, gradient.dtype) == (torch.float64, dtype)
    exact, exact_gradient = value_and_gradient(algorithm_1, points.double())
    assert abs(value - exact) < 1e-6
    assert (gradient - exact_gradient).norm() < torch.finfo(dtype).eps * 10 * exact_gradient.norm()


@pytest.mark.parametrize("scale", [1.0, 3e4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_covariance_of_half_precision_is_scored_in_full(dtype, scale):
    matrix = (scale * torch.diag(torch.linspace(0.1, 2, 64))).to(dtype)
    exact = steps_6_to_9(matrix.diagonal().double())
    assert_close(isoscore_from_covariance(matrix), exact, **CLOSE)


def test_singular_covariances_are_covariances():
    for n in (2, 5, 12):
        shrinkage = torch.cov(cloud(n, 30, seed=4).T)
        isoscore_from_covariance(shrinkage)
        isoscore_from_covariance(shrinkage.float())
        isoscore_star(cloud(9, 30), shrinkage, 0.5)


def make_symmetric_matrix(*eigenvalues):
    rotation, _ = torch.linalg.qr(cloud(len(eigenvalues), len(eigenvalues)))
    matrix = rotation @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ rotation.T
    return (matrix + matrix.T) / 2


EYE = torch.eye(3, dtype=torch.float64)
INVALID_CALLS = [
    (lambda: isoscore(cloud(1, 3)), "1 points have no covariance; expected at least 2 points"),
    (lambda: isoscore(cloud(5, 3)[:, :1]), "at least 2 dimensions; the covariance of the points has 1"),
    (lambda: isoscore(torch.full((77, 3), 0.1)), "all points are equal"),
    (lambda: isoscore(cloud(1, 3).expand(77, 3)), "all points are equal"),
    (lambda: isoscore(Moments.of(cloud(1, 3).expand(7, 3)).update(cloud(1, 3).expand(5, 3))), "points are equal"),
    (lambda: isoscore(Moments.of(cloud(1, 59).float().expand(110, 59))), "points are equal"),
    (lambda: isoscore(cloud(5, 3), [1, 1, 1, 1, 0]), "mask: expected a tensor instead of a list"),
    (lambda: isoscore_star(torch.full((5, 3), torch.nan), EYE, 0.5), "the shrunk covariance is not finite"),
    (lambda: isoscore(Moments.of(cloud(5, 3)), torch.ones(5)), "mask was given with moments"),
    (lambda: isoscore_star(cloud(5, 3), EYE, -0.1), r"zeta is -0\.1; expected a number from 0"),
    (lambda: isoscore_star(cloud(5, 3), EYE, 1.1), r"zeta is 1\.1"),
    (lambda: isoscore_star(cloud(5, 3), EYE, math.nan), "zeta is nan"),
    (lambda: isoscore_star(cloud(5, 3), torch.eye(4), 0.5), r"shape \(4, 4\); expected \(3, 3\)"),
    (lambda: isoscore_star(cloud(5, 3), torch.ones(3), 0.5), r"shape \(3,\); expected \(d, d\)"),
    (
        lambda: isoscore_star(cloud(5, 3), make_symmetric_matrix(1, 1, -0.1), 0.5),
        "the shrinkage covariance has negative eigen",
    ),
    (lambda: isoscore_star(cloud(5, 3), 0 * EYE, 0.5), "the shrinkage covariance is zero"),
    (lambda: isoscore_star(cloud(5, 3), EYE * torch.nan, 0.5), "the shrinkage covariance is not finite"),
    (lambda: isoscore_from_covariance(torch.ones(3, 4)), r"shape \(3, 4\); expected \(d, d\)"),
    (lambda: isoscore_from_covariance(torch.ones(2, 3, 3)), r"shape \(2, 3, 3\); expected \(d, d\)"),
    (lambda: isoscore_from_covariance(0 * EYE), "is zero"),
    (lambda: isoscore_from_covariance(make_symmetric_matrix(1, 1, -1e-3)), "negative eigenvalues"),
    (lambda: isoscore_from_covariance(EYE + 1e-3 * torch.ones(3, 3).triu(1)), "not symmetric"),
    (lambda: isoscore_from_covariance(EYE.float() + 1e-2 * torch.ones(3, 3).triu(1)), "not symmetric"),
    (lambda: isoscore_from_covariance(EYE * torch.inf), "not finite"),
]


@pytest.mark.parametrize(("call", "message"), INVALID_CALLS, ids=[str(i) for i in range(len(INVALID_CALLS))])
def test_what_has_no_score_is_refused_in_one_line(call, message):
    with pytest.raises(UserError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_sums_over_float32_points_are_covariances_in_float64_too():
    """Matrix products in float32 would be symmetric and have zero eigenvalues only up to the rounding of float32."""
    for seed in range(30):
        points = torch.randn(12, 5, generator=torch.Generator().manual_seed(seed)).tanh() @ torch.ones(5, 7)
        sigma = Moments.of(points + 1e-3 * cloud(12, 7).float()).covariance()
        assert sigma.dtype == torch.float64
        assert 0 <= isoscore_from_covariance(sigma) < 0.01
