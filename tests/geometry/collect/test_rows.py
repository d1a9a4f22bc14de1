"""The tokens of a batch: their order, and the rows of each group."""

import torch

from istar.geometry.collect.rows import TokenBatch

TOKENS = torch.tensor([5, 6, 7, 8, 8, 9, 5, 5])
POSITIONS = torch.tensor([1, 2, 1, 1, 2, 1, 2, 3])
GROUPS = torch.tensor([3, 3, 0, 3, 3, 0, 0, 0])
EXPECTED_ORDER = [2, 5, 6, 7, 0, 1, 3, 4]


def test_groups_are_slices_of_the_sorted_rows() -> None:
    batch = TokenBatch.of(TOKENS, POSITIONS, GROUPS)
    assert batch.group_slices == {0: slice(0, 4), 3: slice(4, 8)}
    assert batch.order.tolist() == EXPECTED_ORDER
    assert [EXPECTED_ORDER[row] for row in batch.order.argsort().tolist()] == list(range(8))
    assert batch.token_ids.tolist() == TOKENS[EXPECTED_ORDER].tolist()
    assert batch.positions.tolist() == POSITIONS[EXPECTED_ORDER].tolist()
    for rows, values in ((batch.types, TOKENS), (batch.groups, GROUPS)):
        sorted_values = values[EXPECTED_ORDER]
        assert rows.groups[rows.indices].tolist() == sorted_values.tolist()
        assert rows.counts.tolist() == [int((values == group).sum()) for group in rows.groups]
        assert sorted_values[rows.order].tolist() == sorted(values.tolist())


def test_without_groups_the_tokens_stay_in_order() -> None:
    batch = TokenBatch.of(TOKENS, POSITIONS)
    assert batch.order.tolist() == list(range(8))
    assert batch.group_slices == {0: slice(0, 8)}
