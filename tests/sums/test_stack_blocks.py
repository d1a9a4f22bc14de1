"""Sums of blocks of states, against sums over the points of each group in float64."""

import pytest
import torch
from torch import Tensor

from istar.measures import log2_bins
from istar.sums import stack_blocks
from istar.sums.rows import Rows
from istar.sums.stack_blocks import UpperPanels, sum_stack

NUM_GROUPS, NUM_POINTS, NUM_STATES = 3, 50, 2


def make_points(dim: int) -> tuple[Tensor, Tensor]:
    """Return correlated points `(NUM_STATES, NUM_POINTS, dim)`, and the group of each row, in ascending order."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(NUM_STATES, NUM_POINTS, 5, generator=generator).double()
    points = factors @ torch.randn(5, dim, generator=generator).double() + 2
    return points, torch.randint(NUM_GROUPS, (NUM_POINTS,), generator=generator).sort().values


def assert_sums(points: Tensor, groups: Tensor, num_scatters: int = NUM_GROUPS) -> None:
    """Assert that the sums of points about an origin of ones are those of a naive computation."""
    num_states, _, dim = points.shape
    panels = UpperPanels(dim, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(points.shape[:2], generator=generator).double()
    positions = torch.arange(len(groups)) % 4  # in bins 0, 1, 2 and 2
    types = torch.randint(7, groups.shape, generator=generator)
    rows = Rows.of(groups, types, positions)
    type_vectors = torch.ones(num_states, 7, dim).double()
    scatters = torch.ones(num_states, num_scatters, panels.size, dtype=torch.float64)
    assert rows.types is not None
    sums = sum_stack(
        list(points), torch.ones(num_states, dim).double(), weights, rows, NUM_GROUPS, panels, scatters,
        rows.types.groups, list(type_vectors),
    )  # fmt: skip
    y = points - 1
    squared = y.square().sum(-1)

    def check(actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11 * float(expected.abs().max()))

    check(sums.squared_distances, squared)
    check(sums.powers, torch.stack([(y**power).sum(1) for power in (1, 2, 3, 4)], 1))
    check(sums.weighted_squares, torch.stack([(weights[..., None] ** 2 * y**power).sum(1) for power in (1, 2)], 1))
    weighted = weights[..., None] * y
    for group in range(NUM_GROUPS):
        factors = torch.stack([torch.ones_like(weights), squared, weights], 1)[..., groups == group]
        check(sums.group_vectors[:, :, group], factors @ y[:, groups == group])
    check(sums.bin_vectors, torch.stack([weighted[:, log2_bins(positions) == index].sum(1) for index in range(3)], 1))
    check(type_vectors, torch.stack([weighted[:, types == index].sum(1) + 1 for index in range(7)], 1))
    for group in range(num_scatters):
        members = y[:, groups % num_scatters == group]
        check(panels.unpack(scatters[:, group]), members.mT @ members + 1)


@pytest.mark.parametrize("num_scatters", [1, NUM_GROUPS])
@pytest.mark.parametrize("panel_width", [1, 3, 100], ids="panels of {}".format)
@pytest.mark.parametrize(("dim", "max_rows"), [(1, 100), (8, 3)])
def test_sums_of_all_points_and_of_each_group(
    monkeypatch: pytest.MonkeyPatch, dim: int, max_rows: int, panel_width: int, num_scatters: int
) -> None:
    monkeypatch.setattr(stack_blocks, "PANEL_ROWS", panel_width)
    monkeypatch.setattr(stack_blocks, "MAX_PRODUCT_ROWS", max_rows)
    assert_sums(*make_points(dim), num_scatters)


def test_more_dimensions_than_a_panel_has() -> None:
    assert_sums(*make_points(2 * stack_blocks.PANEL_ROWS + 9))


def test_groups_may_be_missing() -> None:
    points, groups = make_points(4)
    assert_sums(points, groups.clamp(max=1))
    assert_sums(points, torch.full_like(groups, 2))


def test_sums_of_inference_mode_go_on_outside_of_it() -> None:
    points, groups = make_points(3)
    panels = UpperPanels(3, torch.device("cpu"))
    scatters = torch.zeros(NUM_STATES, 1, panels.size, dtype=torch.float64)
    weights = torch.ones(NUM_STATES, NUM_POINTS).double()
    arguments = (torch.ones(NUM_STATES, 3).double(), weights, Rows.of(groups), 1, panels, scatters)
    with torch.inference_mode():
        sum_stack(list(points.clone()), *arguments)
    sum_stack(list(points), *arguments)
    y = points - 1
    torch.testing.assert_close(panels.unpack(scatters)[:, 0], 2 * y.mT @ y)
