"""The tokens of a batch: their order, and the rows of each group."""

import pytest
import torch

from istar.measures import log2_bins
from istar.sums.rows import Rows, RowsByGroup

TOKENS = torch.tensor([5, 6, 7, 8, 8, 9, 5, 5])
POSITIONS = torch.tensor([1, 2, 1, 1, 2, 1, 2, 3])
GROUPS = torch.tensor([3, 3, 0, 3, 3, 0, 0, 0])
EXPECTED_ORDER = [2, 5, 6, 7, 0, 1, 3, 4]


def test_groups_are_slices_of_the_sorted_rows() -> None:
    batch = Rows.of(GROUPS, TOKENS, POSITIONS)
    assert batch.group_slices == {0: slice(0, 4), 3: slice(4, 8)}
    assert batch.order.tolist() == EXPECTED_ORDER
    assert [EXPECTED_ORDER[row] for row in batch.row_of_point.tolist()] == list(range(8))
    assert batch.type_ids is not None
    assert batch.type_ids.tolist() == TOKENS[EXPECTED_ORDER].tolist()
    assert batch.positions.tolist() == POSITIONS[EXPECTED_ORDER].tolist()
    assert batch.positions is not None
    assert batch.types is not None
    for rows, values in ((batch.types, TOKENS), (batch.groups, GROUPS)):
        sorted_values = values[EXPECTED_ORDER]
        assert rows.groups[rows.indices].tolist() == sorted_values.tolist()
        assert rows.counts.tolist() == [int((values == group).sum()) for group in rows.groups]
        assert sorted_values[rows.order].tolist() == sorted(values.tolist())


def test_points_of_one_group_stay_in_order() -> None:
    batch = Rows.of(torch.zeros_like(TOKENS))
    assert batch.order.tolist() == list(range(8))
    assert batch.group_slices == {0: slice(0, 8)}


def test_position_bins_are_log2_bins() -> None:
    positions = torch.tensor([0, 1, 2, 3, 4, 7, 8, 2**20 - 1, 2**20, 2**52 - 1, 2**52])
    bins = Rows.of(torch.zeros_like(positions), positions=positions).position_bins
    assert bins is not None
    assert torch.equal(bins.groups[bins.indices], log2_bins(positions))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_groups_are_summed(dtype: torch.dtype, device: str) -> None:
    points = torch.randn(60, 5, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    groups = torch.tensor([7, 3, 3, 9, 7, 7]).repeat(10)
    weights = torch.linspace(-1, 2, 60, dtype=dtype, device=device)
    rows = RowsByGroup.of(groups).to(torch.device(device))
    assert rows.groups.tolist() == [3, 7, 9]
    assert rows.counts.tolist() == [20, 30, 10]
    for index, group in enumerate((3, 7, 9)):
        is_member = (groups == group).to(device)
        members, member_weights = points[is_member].double(), weights[is_member].double()
        tolerances = {"rtol": 1e-12, "atol": 0.0} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
        assert torch.equal(rows.membership[index], is_member.float())
        actual = rows.sum_rows(points)[index], rows.sum_rows(points, weights[rows.order])[index]
        expected = members.sum(0), (member_weights[:, None] * members).sum(0)
        for actual_sum, expected_sum in zip(actual, expected, strict=True):
            torch.testing.assert_close(actual_sum.double(), expected_sum, **tolerances)
