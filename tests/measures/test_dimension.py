"""TwoNN against the paper's steps, Gride against a numerical maximum of the paper's likelihood, both against
scikit-dimension (slow), and their invariances."""

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import scipy.special
import torch

from istar.errors import UserError
from istar.measures import Dimension, dimension, gride, gride_scales, neighbours, two_nn, two_nn_with_error
from tests import oracles


def embed_with_rotation(points, dim, seed=9):
    """Return the points embedded in `dim` dimensions with a random rotation."""
    generator = torch.Generator().manual_seed(seed)
    rotation, _ = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
    return torch.nn.functional.pad(points, (0, dim - points.shape[1])) @ rotation


def cube(n, d, seed=0):
    return torch.rand(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gaussian(n, d, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sphere(n, d, seed=0):
    """Return points on the unit sphere, a surface of d dimensions in d + 1."""
    points = gaussian(n, d + 1, seed)
    return points / points.norm(dim=1, keepdim=True)


CLOUDS = {
    "line": lambda n: embed_with_rotation(cube(n, 1), 2),
    "cube": lambda n: cube(n, 3),
    "sphere": lambda n: sphere(n, 2),
    "embedded gaussian": lambda n: embed_with_rotation(gaussian(n, 4), 30),
    "wide gaussian": lambda n: gaussian(n, 30),
}


@pytest.mark.parametrize(
    ("make_points", "discard"), [*((make_points, 0.1) for make_points in CLOUDS.values()), (CLOUDS["cube"], 0.5)]
)
def test_it_is_the_papers_steps(make_points, discard):
    points = make_points(80)
    assert two_nn(points, discard) == pytest.approx(oracles.two_nn(points.numpy(), discard), rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("make_points", CLOUDS.values(), ids=CLOUDS)
def test_it_is_what_scikit_dimension_computes(make_points):
    skdim = pytest.importorskip("skdim.id", reason="scikit-dimension is part of the extra 'nightly'")
    points = make_points(700)
    expected = skdim.TwoNN(discard_fraction=0.1).fit(points.numpy()).dimension_
    assert two_nn(points) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(("name", "expected"), [("line", 1), ("cube", 3), ("sphere", 2), ("embedded gaussian", 4)])
def test_it_finds_the_dimension_that_a_cloud_was_made_with(name, expected):
    assert two_nn(CLOUDS[name](3000)) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        (lambda points: embed_with_rotation(points, 12), 1),
        (lambda points: points + 100, 1),
        (lambda points: 1e-6 * points, 1e-6),
        (lambda points: 1e200 * points, 1e200),
        (lambda points: 1e-200 * points, 1e-200),
        (lambda points: points.flip(0), 1),
        (lambda points: torch.cat([points, points[:50], points[:7]]), 1),
    ],
    ids=["rotation", "translation", "scale", "huge", "minute", "order", "duplicates"],
)
def test_what_does_not_change_it(change, factor):
    points = gaussian(300, 5)
    assert two_nn(change(points)) == pytest.approx(two_nn(points), rel=1e-8)
    for scale, expected in zip(gride_scales(change(points), 16), gride_scales(points, 16), strict=True):
        assert scale.value == pytest.approx(expected.value, rel=1e-8)
        assert scale.error == pytest.approx(expected.error, rel=1e-8)
        assert scale.distance == pytest.approx(factor * expected.distance, rel=1e-9)


@pytest.mark.parametrize("num_rows", [7, 69])
def test_blocks_do_not_change_it(monkeypatch, num_rows):
    points = gaussian(70, 5)
    expected, expected_scales = two_nn(points), gride_scales(points, 16)
    monkeypatch.setattr(neighbours, "_TILE_LENGTH", num_rows)
    assert two_nn(points) == expected
    assert gride_scales(points, 16) == expected_scales


def make_clusters(n, size, distance, d=5):
    """Return clusters of `size` points each, whose diameter is about `distance`."""
    centers = gaussian(n // size, d).repeat_interleave(size, 0)
    return centers + distance * gaussian(len(centers), d, seed=1)


def append_outlier(points):
    return torch.cat([points, torch.full((1, points.shape[1]), 1e9, dtype=points.dtype)])


DIFFICULT_CLOUDS = {
    "near duplicates": make_clusters(120, 2, 1e-9),
    "many near duplicates": make_clusters(120, 15, 1e-9),
    "minute clusters": make_clusters(120, 15, 1e-14) - gaussian(120 // 15, 5)[0],
    "huge offset": gaussian(120, 5) + 1e10,
    "huge offset and near duplicates": make_clusters(120, 15, 1e-5) + 1e8,
    "outlier": append_outlier(gaussian(120, 5)),
    "outlier and near duplicates": append_outlier(make_clusters(120, 15, 1e-4)),
    "duplicates": torch.cat([gaussian(60, 5), gaussian(60, 5)[:30]]),
    "nearly a lattice": torch.cartesian_prod(*3 * [torch.arange(5).double() ** 2]) + 1e-13 * gaussian(125, 3),
    "few points": gaussian(5, 3),
    "scales": gaussian(120, 5) * torch.logspace(-9, 0, 120, dtype=torch.float64)[:, None],
}


@pytest.mark.parametrize("points", DIFFICULT_CLOUDS.values(), ids=DIFFICULT_CLOUDS)
def test_neighbours_are_those_of_all_distances(monkeypatch, points):
    """In tiles of seven rows."""
    monkeypatch.setattr(neighbours, "_TILE_LENGTH", 7)
    distinct_points = np.unique(points.numpy(), axis=0)
    expected = []
    for index, point in enumerate(distinct_points):
        first_distance, second_distance = sorted(
            math.dist(point, other) for other in np.delete(distinct_points, index, axis=0)
        )[:2]
        expected.append(second_distance / first_distance)
    distances = dimension._find_neighbour_distances(points, 2)
    ratios = (distances[:, 1] / distances[:, 0]).sort().values.numpy()  # the points are in any order
    np.testing.assert_allclose(ratios, np.sort(expected), rtol=1e-14)


def test_without_discarding_the_last_point_has_no_finite_place():
    points = gaussian(50, 3)
    assert two_nn(points, 0) == pytest.approx(two_nn(points, 0.02), rel=1e-12)
    assert math.isfinite(two_nn(points, 0))


def test_it_changes_neither_points_nor_random_numbers():
    points = gaussian(50, 3).requires_grad_()
    points_before, rng_state = points.detach().clone(), torch.get_rng_state()
    two_nn(points)
    gride(points)
    assert torch.equal(points.detach(), points_before)
    assert torch.equal(torch.get_rng_state(), rng_state)


WITH_NAN = gaussian(5, 3)
WITH_NAN[2, 1] = math.nan
LATTICE = torch.cartesian_prod(*2 * [torch.arange(1, 6, dtype=torch.float64) / 7])
INVALID_CALLS = {
    "two": (lambda: two_nn(torch.tensor([[0.0], [1.0]]).repeat(9, 1)), UserError, "^2 distinct points"),
    "equal": (lambda: two_nn(torch.full((77, 3), 0.1)), UserError, "^1 distinct points"),
    "negative": (lambda: two_nn(gaussian(9, 3), -0.1), UserError, r"discard is -0\.1"),
    "all": (lambda: two_nn(gaussian(9, 3), 1.0), UserError, r"discard is 1\.0"),
    "nearly all": (lambda: two_nn(gaussian(9, 3), 0.95), UserError, "leaves some of 9 points"),
    "lattice": (lambda: two_nn(LATTICE), UserError, "equally far"),
    "gride: two": (lambda: gride(torch.tensor([[0.0], [1.0]]).repeat(9, 1)), UserError, "2 distinct points have no 2"),
    "gride: few": (lambda: gride(gaussian(9, 3), 8), UserError, "9 distinct points have no 16 neighbours each"),
    "gride: n1": (lambda: gride(gaussian(9, 3), 0), UserError, "n1 is 0 and n2 is 0"),
    "gride: n2": (lambda: gride(gaussian(9, 3), 2, 2), UserError, "n1 is 2 and n2 is 2; expected 1 <= n1 < n2"),
    "gride: lattice": (lambda: gride(LATTICE), UserError, "equally far"),
    "gride: scales": (lambda: gride_scales(gaussian(9, 3), 1), UserError, "max_neighbour is 1"),
}


@pytest.mark.parametrize(("call", "error", "message"), INVALID_CALLS.values(), ids=INVALID_CALLS)
def test_what_has_no_dimension_is_refused_in_one_line(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_the_oracle_is_exact_where_the_answer_is_known():
    """Three points on a line at 0, 1 and 3: ratios 3, 2 and 3/2; the largest is left out."""
    x, y = np.log([1.5, 2.0]), np.log([1.5, 3.0])
    points = np.array([[0.0], [1.0], [3.0]])
    assert oracles.two_nn(points) == pytest.approx(x @ y / (x @ x))
    assert two_nn(torch.from_numpy(points)) == pytest.approx(x @ y / (x @ x))


@pytest.mark.slow
def test_the_error_is_that_of_other_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    estimates = [two_nn_with_error(torch.randn(500, 6, generator=generator)) for _ in range(40)]
    spread = torch.tensor([estimate.value for estimate in estimates]).std().item()
    assert sum(estimate.error for estimate in estimates) / len(estimates) == pytest.approx(spread, rel=0.35)
    points = torch.randn(500, 6, generator=generator)
    assert two_nn_with_error(points).value == two_nn(points)
    assert two_nn_with_error(points) == two_nn_with_error(points)
    estimate_of_8000 = two_nn_with_error(torch.randn(8000, 6, generator=generator))
    # Sixteen times the points have a quarter of the error.
    assert estimate_of_8000.error == pytest.approx(estimates[0].error / 4, rel=0.4)


GRIDE_CLOUDS = {
    "line": lambda n: embed_with_rotation(torch.rand(n, 1, generator=torch.Generator().manual_seed(1)).double(), 2),
    "square": lambda n: torch.rand(n, 2, generator=torch.Generator().manual_seed(2)).double(),
    "embedded gaussian": lambda n: embed_with_rotation(gaussian(n, 4), 30),
    "wide gaussian": lambda n: gaussian(n, 30),
}


def naive_ratios(points, n1, n2):
    """Return the ratios of the distances of each point to its neighbours `n2` and `n1`, point by point."""
    values = []
    for i, point in enumerate(points):
        distances = sorted(math.dist(point, other) for j, other in enumerate(points) if j != i)
        values.append(distances[n2 - 1] / distances[n1 - 1])
    return np.array(values)


def log_likelihood(d, mu, n1, n2):
    """Return the log of the paper's density, summed over points, with (n - 1) log d in place of n log d."""
    log_density = (
        math.log(d)
        + (n2 - n1 - 1) * np.log(mu**d - 1)
        - ((n2 - 1) * d + 1) * np.log(mu)
        - scipy.special.betaln(n2 - n1, n1)
    )
    return float(log_density.sum()) - math.log(d)


@pytest.mark.parametrize(
    ("name", "n1", "n2"),
    [("line", 2, 4), ("square", 8, 16), ("embedded gaussian", 1, 5), ("wide gaussian", 1, 2), ("wide gaussian", 3, 4)],
)
def test_it_is_the_maximum_of_the_likelihood(name, n1, n2):
    points = GRIDE_CLOUDS[name](80)
    mu = naive_ratios(points.numpy(), n1, n2)
    optimum = scipy.optimize.minimize_scalar(
        lambda d: -log_likelihood(d, mu, n1, n2), bounds=(0.05, 100), method="bounded", options={"xatol": 1e-10}
    )
    estimate = gride(points, n1, n2)
    assert estimate.value == pytest.approx(optimum.x, rel=2e-6)
    assert log_likelihood(estimate.value, mu, n1, n2) >= -optimum.fun - 1e-9
    # The second derivative of the paper's likelihood, which has n log d.
    step = 1e-3 * estimate.value
    values = [
        log_likelihood(estimate.value + k * step, mu, n1, n2) + math.log(estimate.value + k * step) for k in (-1, 0, 1)
    ]
    information = -(values[0] - 2 * values[1] + values[2]) / step**2
    assert estimate.error == pytest.approx(1 / math.sqrt(information), rel=1e-4)


def test_the_density_of_the_oracle_integrates_to_one():
    for n1, n2, d in [(1, 2, 3.0), (2, 4, 5.0), (4, 8, 2.0)]:
        total, _ = scipy.integrate.quad(
            lambda mu, n1=n1, n2=n2, d=d: math.exp(log_likelihood(d, np.array([mu]), n1, n2)) * d, 1, np.inf
        )
        assert total == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("make_points", GRIDE_CLOUDS.values(), ids=GRIDE_CLOUDS)
def test_neighbours_1_and_2_have_a_closed_form(make_points):
    points = make_points(120)
    mu = naive_ratios(points.numpy(), 1, 2)
    estimate = gride(points)
    assert estimate.value == pytest.approx((len(mu) - 1) / np.log(mu).sum(), rel=1e-10)
    assert estimate.error == pytest.approx(estimate.value / math.sqrt(len(mu)), rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("make_points", GRIDE_CLOUDS.values(), ids=GRIDE_CLOUDS)
def test_gride_is_what_scikit_dimension_computes(make_points):
    skdim = pytest.importorskip("skdim.id", reason="scikit-dimension is part of the extra 'nightly'")
    points = make_points(500)
    expected = skdim.GRIDE(multiscale=True, range_max=64).fit(points.numpy())
    scales = gride_scales(points)
    assert [scale.n1 for scale in scales] == expected.scales_.tolist()
    assert [scale.value for scale in scales] == pytest.approx(expected.dimension_scales_.tolist(), rel=1e-7)
    assert [scale.error for scale in scales] == pytest.approx(expected.error_scales_.tolist(), rel=1e-7)
    assert [scale.distance for scale in scales] == pytest.approx(expected.radius_scales_.tolist(), rel=1e-9)


@pytest.mark.parametrize(("name", "expected"), [("line", 1), ("square", 2), ("embedded gaussian", 4)])
def test_gride_finds_the_dimension_that_a_cloud_was_made_with(name, expected):
    points = GRIDE_CLOUDS[name](1500)
    scales = gride_scales(points, 16)
    assert [scale.n1 for scale in scales] == [1, 2, 4, 8]
    for scale in scales:
        assert scale.value == pytest.approx(expected, rel=0.12)
        assert 0 < scale.error < 0.05 * scale.value
    assert scales[0].value == pytest.approx(two_nn(points), rel=0.1)


def test_noise_raises_the_dimension_at_short_distances_alone():
    """A square with noise in 10 dimensions: the first scale sees the noise, the last one the square."""
    points = embed_with_rotation(GRIDE_CLOUDS["square"](1500), 10)
    noisy = points + 0.01 * gaussian(1500, 10, seed=4)
    values = [scale.value for scale in gride_scales(noisy, 256)]
    assert values[0] > 1.5 * values[-1]
    assert values[-1] == pytest.approx(2, rel=0.2)


def test_scales_are_single_estimates_with_their_distance():
    points = GRIDE_CLOUDS["embedded gaussian"](60)
    scales = gride_scales(points, 40)
    assert [scale.n1 for scale in scales] == [1, 2, 4, 8, 16]
    for n1, value, error, distance in scales:
        assert Dimension(value, error) == gride(points, n1)
        neighbour_distances = [sorted(math.dist(x, y) for y in points.tolist())[2 * n1] for x in points.tolist()]
        assert distance == pytest.approx(np.mean(neighbour_distances), rel=1e-12)
    # 60 points have 59 neighbours each.
    assert [scale.n1 for scale in gride_scales(points, 1000)] == [1, 2, 4, 8, 16]


@pytest.mark.slow
def test_the_error_of_gride_is_that_of_other_samples():
    estimates = [gride(gaussian(300, 3, seed)) for seed in range(60)]
    spread = np.std([estimate.value for estimate in estimates], ddof=1)
    assert np.mean([estimate.error for estimate in estimates]) == pytest.approx(spread, rel=0.35)
