"""TwoNN against the paper's steps and scikit-dimension (slow), and its invariances."""

import math

import numpy as np
import pytest
import torch

from istar.errors import NonFiniteError, UserError
from istar.measures import dimension, two_nn, two_nn_with_error
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


@pytest.mark.parametrize("discard", [0.1, 0.5])
@pytest.mark.parametrize("make_points", CLOUDS.values(), ids=CLOUDS)
def test_it_is_the_papers_steps(make_points, discard):
    points = make_points(150)
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
    "change",
    [
        lambda points: embed_with_rotation(points, 12),
        lambda points: points + 100,
        lambda points: 1e-6 * points,
        lambda points: 1e200 * points,
        lambda points: 1e-200 * points,
        lambda points: points.flip(0),
        lambda points: torch.cat([points, points[:50], points[:7]]),
    ],
    ids=["rotation", "translation", "scale", "huge", "minute", "order", "duplicates"],
)
def test_what_does_not_change_it(change):
    points = gaussian(300, 5)
    assert two_nn(change(points)) == pytest.approx(two_nn(points), rel=1e-8)


@pytest.mark.parametrize("num_rows", [1, 7, 299])
def test_blocks_do_not_change_it(monkeypatch, num_rows):
    points = gaussian(300, 5)
    expected = two_nn(points)
    monkeypatch.setattr(dimension, "_DISTANCES_PER_BLOCK", num_rows * len(points))
    assert two_nn(points) == expected


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


@pytest.mark.parametrize("num_rows", [7, 125])
@pytest.mark.parametrize("points", DIFFICULT_CLOUDS.values(), ids=DIFFICULT_CLOUDS)
def test_neighbours_are_those_of_all_distances(monkeypatch, points, num_rows):
    monkeypatch.setattr(dimension, "_DISTANCES_PER_BLOCK", num_rows * len(points))
    distinct_points = np.unique(points.numpy(), axis=0)
    expected = []
    for index, point in enumerate(distinct_points):
        first_distance, second_distance = sorted(
            math.dist(point, other) for other in np.delete(distinct_points, index, axis=0)
        )[:2]
        expected.append(second_distance / first_distance)
    ratios = dimension._compute_neighbour_ratios(dimension._find_distinct_points(points))
    np.testing.assert_allclose(ratios.numpy(), expected, rtol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_points_are_measured_in_float64(dtype):
    """Far from the origin, distances keep their precision, which matrix products of narrow points would lose."""
    points = (gaussian(300, 5) + 8).to(dtype)
    assert two_nn(points) == two_nn(points.double())
    distinct_points = points.double().unique(dim=0)
    assert two_nn(points) == pytest.approx(oracles.two_nn(distinct_points.numpy()), rel=1e-10)


def test_without_discarding_the_last_point_has_no_finite_place():
    points = gaussian(50, 3)
    assert two_nn(points, 0) == pytest.approx(two_nn(points, 0.02), rel=1e-12)
    assert math.isfinite(two_nn(points, 0))


def test_it_changes_neither_points_nor_random_numbers():
    points = gaussian(50, 3).requires_grad_()
    points_before, rng_state = points.detach().clone(), torch.get_rng_state()
    two_nn(points)
    assert torch.equal(points.detach(), points_before)
    assert torch.equal(torch.get_rng_state(), rng_state)


WITH_NAN = gaussian(5, 3)
WITH_NAN[2, 1] = math.nan
LATTICE = torch.cartesian_prod(*2 * [torch.arange(1, 6, dtype=torch.float64) / 7])
INVALID_CALLS = {
    "empty": (lambda: two_nn(torch.ones(0, 3)), UserError, "0 distinct points have no dimension; expected at least 3"),
    "two": (lambda: two_nn(torch.tensor([[0.0], [1.0]]).repeat(9, 1)), UserError, "^2 distinct points"),
    "equal": (lambda: two_nn(torch.full((77, 3), 0.1)), UserError, "^1 distinct points"),
    "shape": (lambda: two_nn(torch.ones(5)), UserError, r"shape \(5,\); expected \(n, d\)"),
    "no dimension": (lambda: two_nn(torch.ones(5, 0)), UserError, r"shape \(5, 0\)"),
    "integers": (lambda: two_nn(torch.ones(5, 3).long()), UserError, "int64; expected a floating dtype"),
    "nan": (lambda: two_nn(WITH_NAN), NonFiniteError, "not finite"),
    "infinite": (lambda: two_nn(WITH_NAN.nan_to_num(nan=math.inf)), NonFiniteError, "not finite"),
    "negative": (lambda: two_nn(gaussian(9, 3), -0.1), UserError, r"discard is -0\.1"),
    "all": (lambda: two_nn(gaussian(9, 3), 1.0), UserError, r"discard is 1\.0"),
    "nearly all": (lambda: two_nn(gaussian(9, 3), 0.95), UserError, "leaves some of 9 points"),
    "lattice": (lambda: two_nn(LATTICE), UserError, "equally far"),
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
