"""The tokens of a batch: their order, and the rows of each group."""

import torch

from istar.sums.rows import Rows

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
