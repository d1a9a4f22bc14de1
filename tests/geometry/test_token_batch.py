"""The tokens of a batch: their order, the rows of each part, and the sentences."""

import pytest
import torch

from istar.geometry.collect.token_batch import TokenBatch

#                        group 1   group 0  group 1, no sentence   group 0
TOKENS = torch.tensor([5, 6,       7,       8, 8,                  9, 5, 5])  # fmt: skip
POSITIONS = torch.tensor([1, 2,    1,       1, 2,                  1, 2, 3])  # fmt: skip
GROUPS = torch.tensor([1, 1,       0,       1, 1,                  0, 0, 0])  # fmt: skip
SENTENCES = torch.tensor([4, 4,    2,       -1, -1,                7, 7, 7])  # fmt: skip
EXPECTED_ORDER = [2, 5, 6, 7, 0, 1, 3, 4]


def test_parts_are_slices_of_the_sorted_rows() -> None:
    batch = TokenBatch.of(TOKENS, POSITIONS, GROUPS, SENTENCES, num_groups=2)
    # Parts 0 and 1 are the sentences of both groups, and part 3 the tokens of group 1 without a sentence.
    assert batch.part_slices == {0: slice(0, 4), 1: slice(4, 6), 3: slice(6, 8)}
    assert batch.order.tolist() == EXPECTED_ORDER
    assert [EXPECTED_ORDER[row] for row in batch.find_rows().tolist()] == list(range(8))
    assert batch.token_ids.tolist() == TOKENS[EXPECTED_ORDER].tolist()
    assert batch.positions.tolist() == POSITIONS[EXPECTED_ORDER].tolist()
    for rows, values in (
        (batch.types, TOKENS),
        (batch.groups, GROUPS),
        (batch.parts, torch.tensor([1, 1, 0, 3, 3, 0, 0, 0])),
    ):
        sorted_values = values[EXPECTED_ORDER]
        assert rows.groups[rows.indices].tolist() == sorted_values.tolist()
        assert rows.counts.tolist() == [int((values == group).sum()) for group in rows.groups]
        assert sorted_values[rows.order].tolist() == sorted(values.tolist())


def test_sentences_are_padded_to_the_longest() -> None:
    sentences = TokenBatch.of(TOKENS, POSITIONS, GROUPS, SENTENCES, num_groups=2).sentences
    assert sentences is not None
    # One token, then three tokens, both in group 0, and then two tokens in group 1.
    assert sentences.counts_by_group == {0: 2, 1: 1}
    assert sentences.rows.counts.tolist() == [1, 3, 2]
    assert sentences.longest == 3
    assert sentences.padded_rows.tolist() == [0, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("sentences", [None, torch.full((8,), -1)], ids=["none given", "all negative"])
def test_without_sentences_and_groups_the_tokens_stay_in_order(sentences: torch.Tensor | None) -> None:
    batch = TokenBatch.of(TOKENS, POSITIONS, sentences=sentences)
    assert batch.order.tolist() == list(range(8))
    assert batch.sentences is None
    assert batch.part_slices == {1: slice(0, 8)}
