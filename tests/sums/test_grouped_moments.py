"""Moments of groups of documents, against sums over the points of each group."""

import pytest
import torch
from torch import Tensor

from istar.measures import FourthMoments
from istar.sums import grouped_moments
from istar.sums.grouped_moments import GroupedMoments
from istar.sums.rows import Rows

NUM_GROUPS, NUM_POINTS = 3, 50


def make_points(dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return correlated points `(NUM_POINTS, dim)` and the group of each."""
    generator = torch.Generator().manual_seed(seed)
    points = (
        torch.randn(NUM_POINTS, 5, generator=generator).double() @ torch.randn(5, dim, generator=generator).double()
    )
    return points + 2, torch.randint(NUM_GROUPS, (NUM_POINTS,), generator=generator)


def add_points(moments: GroupedMoments, points: Tensor, groups: Tensor) -> None:
    """Add points in any order about an origin of ones."""
    batch = Rows.of(groups)
    centered = (points - 1)[batch.order]
    moments.update(centered, centered.square().sum(1), batch)


def assert_moments_of(moments: FourthMoments, points: Tensor) -> None:
    """Assert that moments are those of points, computed naively."""
    deviations = points - points.mean(0)
    squared_norms = (deviations**2).sum(1)
    expected = (points.mean(0), deviations.T @ deviations, squared_norms @ deviations, (squared_norms**2).sum())
    assert moments.count == len(points)
    for actual, value in zip((moments.mean, moments.scatter, moments.third, moments.fourth), expected, strict=True):
        torch.testing.assert_close(actual, value, rtol=1e-11, atol=1e-11 * float(value.abs().max()))


@pytest.mark.parametrize("max_recent_points", [1, 10, 1000])
@pytest.mark.parametrize("panel_width", [1, 3, 100], ids="panels of {}".format)
@pytest.mark.parametrize(("dim", "max_product_points"), [(1, 100), (8, 3)])
def test_moments_of_all_points_and_without_each_group(
    monkeypatch: pytest.MonkeyPatch, dim: int, max_product_points: int, panel_width: int, max_recent_points: int
) -> None:
    monkeypatch.setattr(grouped_moments, "PANEL_WIDTH", panel_width)
    monkeypatch.setattr(grouped_moments, "MAX_PRODUCT_POINTS", max_product_points)
    monkeypatch.setattr(grouped_moments, "MAX_RECENT_POINTS", max_recent_points)
    points, groups = make_points(dim)
    moments = GroupedMoments(NUM_GROUPS, torch.ones(dim))
    for batch_points, batch_groups in zip(points.split(12), groups.split(12), strict=True):
        add_points(moments, batch_points, batch_groups)
    assert_moments_of(moments.compute_moments(), points)
    sums_without_each = list(moments.sum_without_each_group())
    for group, sums in enumerate(sums_without_each):
        without_group = FourthMoments.about_mean(moments.origin, sums, moments.epsilon)
        assert_moments_of(without_group, points[groups != group])
    assert len(sums_without_each) == NUM_GROUPS


def test_more_dimensions_than_a_panel_has() -> None:
    dim = 2 * grouped_moments.PANEL_WIDTH + 9
    points, groups = make_points(dim)
    moments = GroupedMoments(1, torch.ones(dim))
    add_points(moments, points, groups)
    assert_moments_of(moments.compute_moments(), points)


def test_points_of_inference_mode_have_moments_outside_of_it() -> None:
    dim = grouped_moments.PANEL_WIDTH + 1
    points, groups = make_points(dim)
    moments = GroupedMoments(NUM_GROUPS, torch.ones(dim))
    with torch.inference_mode():
        add_points(moments, points, groups)
    moments.state_dict()
    assert_moments_of(moments.compute_moments(), points)
