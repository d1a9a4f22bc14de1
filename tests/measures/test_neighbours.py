"""Nearest neighbours against scikit-learn, and hubs, duplicates and contrast against their definitions in numpy."""

import numpy as np
import pytest
import scipy.stats
import torch
from scipy.spatial.distance import cdist
from sklearn.neighbors import NearestNeighbors

from istar.errors import UserError
from istar.measures import find_neighbours, neighbour_measures, neighbours
from tests.measures.test_dimension import DIFFICULT_CLOUDS, gaussian

K = 10


def make_sphere(num_points: int, dim: int) -> torch.Tensor:
    points = gaussian(num_points, dim)
    return points / points.norm(dim=1, keepdim=True)


CLOUDS = {
    "wide": gaussian(300, 200),
    "float32": gaussian(400, 20).float(),
    "float16": gaussian(200, 20).half(),
    "far from the origin": gaussian(300, 20).float() + 1000,
    "copies": torch.cat([gaussian(270, 20), gaussian(270, 20)[:30]]).float(),
    "sphere with a hub": torch.cat([make_sphere(500, 200), torch.full((1, 200), 1e-3).double()]),
    "tiny": gaussian(200, 20).float() * 1e-30,
    "huge": gaussian(200, 20) * 1e200,
}


@pytest.mark.parametrize("points", CLOUDS.values(), ids=CLOUDS)
@pytest.mark.parametrize("tile_length", [37, 10_000])
def test_neighbours_and_their_measures(points: torch.Tensor, tile_length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_TILE_LENGTH", tile_length)
    n, scale = len(points), float(points.double().abs().max())
    wide_points = points.double().numpy() / scale
    distances = cdist(wide_points, wide_points)
    mean_distances = distances.sum(1) / (n - 1)
    np.fill_diagonal(distances, np.inf)
    order = distances.argsort(1, kind="stable")[:, :K]
    nearest_distances = np.take_along_axis(distances, order, 1)

    found = find_neighbours(points, K)
    np.testing.assert_array_equal(found.indices.numpy(), order)
    np.testing.assert_allclose(found.distances.numpy() / scale, nearest_distances, rtol=1e-12)
    is_narrow = points.dtype != torch.float64
    np.testing.assert_allclose(found.mean_distances.numpy() / scale, mean_distances, rtol=3e-6 if is_narrow else 1e-13)
    search = NearestNeighbors(n_neighbors=K, algorithm="brute").fit(wide_points)
    np.testing.assert_allclose(found.distances.numpy() / scale, search.kneighbors()[0], rtol=1e-5, atol=3e-8)

    counts = np.bincount(order.ravel(), minlength=n)
    expected = {
        "hubness": scipy.stats.skew(counts),
        "antihubs": np.mean(counts == 0),
        "near_duplicates": np.mean(nearest_distances[:, 0] < 1e-3 * mean_distances),
        "relative_contrast": mean_distances.mean() / nearest_distances[:, 0].mean(),
    }
    actual = neighbour_measures(points)._asdict()
    assert actual == pytest.approx(expected, rel=1e-6 if is_narrow else 1e-12, abs=0)


def test_a_planted_hub_and_copies_are_found() -> None:
    sphere = make_sphere(1000, 100)
    usual = neighbour_measures(sphere)
    assert abs(usual.hubness) < 1
    assert usual.near_duplicates == 0
    centre = torch.zeros(1, 100).double()  # the nearest to all
    assert neighbour_measures(torch.cat([sphere, centre])).hubness > 20
    copies = sphere[:100] + 1e-6 * gaussian(100, 100)
    assert neighbour_measures(torch.cat([sphere, copies]).float()).near_duplicates == pytest.approx(200 / 1100)


@pytest.mark.parametrize("change", [lambda points: points @ torch.linalg.qr(gaussian(20, 20, seed=3)).Q,
                                    lambda points: points + 5, lambda points: 7 * points],
                         ids=["rotation", "translation", "scale"])  # fmt: skip
def test_rotations_translations_and_scales_change_nothing(change) -> None:
    points = gaussian(300, 20)
    assert neighbour_measures(change(points)) == pytest.approx(neighbour_measures(points), rel=1e-11)


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (
            lambda: find_neighbours(gaussian(5, 2), 5),
            "k is 5 for 5 points; expected at least 1, and at least k",
        ),
        (lambda: find_neighbours(gaussian(5, 2), 0), "k is 0 for 5 points"),
        (lambda: neighbour_measures(gaussian(10, 2)), "k is 10 for 10 points"),
        (lambda: neighbour_measures(torch.full((20, 3), 0.1)), "all 20 points are equal; expected at least two"),
    ],
)
def test_what_is_not_defined_is_refused_in_one_line(compute, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        compute()
    assert "\n" not in str(caught.value)


def test_measures_that_are_not_defined_leave_the_others() -> None:
    pairs = neighbour_measures(gaussian(15, 2).repeat(2, 1))
    assert np.isnan(pairs.relative_contrast)
    assert pairs.near_duplicates == 1
    simplex = neighbour_measures(torch.eye(4), k=3)
    assert np.isnan(simplex.hubness)
    assert (simplex.antihubs, simplex.relative_contrast) == (0, pytest.approx(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("points", "certain_share"),
    [(gaussian(300, 5), 1), (DIFFICULT_CLOUDS["near duplicates"], 1), (DIFFICULT_CLOUDS["scales"], 0.48)],
    ids=["gaussian", "near duplicates", "scales"],
)
def test_neighbours_that_a_narrow_product_is_certain_of_are_the_nearest(points, certain_share, dtype):
    """In float16, rounding errors of the product are larger than many differences of distances."""
    points = points / points.abs().max()
    factors = (points - points.mean(0)).to(dtype)
    found, *_, is_certain = neighbours._find_nearest(points, factors, torch.arange(len(points)), 2, 1.0)
    expected = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").topk(3, largest=False).values
    torch.testing.assert_close(found[is_certain], expected[is_certain, 1:], rtol=1e-13, atol=0)
    if dtype == torch.float32:
        assert is_certain.double().mean().item() == pytest.approx(certain_share, abs=0.02)
    else:
        assert 0.1 < is_certain.double().mean() < 1
