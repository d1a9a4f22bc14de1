"""The tokens of a batch, sorted and counted once for the accumulators of all layers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from istar.measures import log2_bins
from istar.measures.point_groups import RowsByGroup


@dataclass(frozen=True)
class Sentences:
    """The sentences of a batch. Their tokens are the batch's first rows.

    Attributes:
        rows: rows of each sentence; the sentences are numbered from 0 in the order of the rows.
        padded_rows: index of each row among the rows of sentences that are padded to the longest, `(n,)`.
        longest: number of rows of the longest sentence.
        counts_by_group: number of sentences by group of documents, groups ascending.
    """

    rows: RowsByGroup
    padded_rows: Tensor
    longest: int
    counts_by_group: dict[int, int]

    @classmethod
    def of(cls, numbers: Tensor, groups: Tensor, device: torch.device) -> "Sentences":
        """Describe sentences by the sentence number and the document's group of each row, on the CPU."""
        _, sentence_of_row, lengths = numbers.unique_consecutive(return_inverse=True, return_counts=True)
        first_rows = lengths.cumsum(0) - lengths
        longest = int(lengths.max())
        row_in_sentence = torch.arange(len(numbers), device=numbers.device) - first_rows[sentence_of_row]
        occurring_groups, num_sentences = groups[first_rows].unique_consecutive(return_counts=True)
        return cls(
            rows=RowsByGroup.of(sentence_of_row).to(device),
            padded_rows=(sentence_of_row * longest + row_in_sentence).to(device),
            longest=longest,
            counts_by_group=dict(zip(occurring_groups.tolist(), num_sentences.tolist(), strict=True)),
        )


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of a batch as all layers' accumulators need them.

    A part of a batch is the tokens of one group of documents in sentences, or its other tokens. The rows of the batch
    are its tokens sorted by part, with the parts of sentences first, so that each part is a slice.

    Attributes:
        order: index of the token at each row, `(n,)`, on the CPU.
        token_ids: id of each row's token, `(n,)`.
        positions: position of each row's token in the model's input, from 0, `(n,)`.
        types: rows of each token id.
        position_bins: rows of each of the `log2_bins` of the positions.
        groups: rows of each group of documents.
        parts: rows of each part. Part g has the tokens of group g that belong to a sentence, and part `num_groups + g`
            its other tokens.
        part_slices: the rows of each part as a slice, by part.
        sentences: the sentences; None if no token belongs to one.
        num_groups: number of groups of documents.
    """

    order: Tensor
    token_ids: Tensor
    positions: Tensor
    types: RowsByGroup
    position_bins: RowsByGroup
    groups: RowsByGroup
    parts: RowsByGroup
    part_slices: dict[int, slice]
    sentences: Sentences | None
    num_groups: int

    @classmethod
    def of(
        cls,
        token_ids: Tensor,
        positions: Tensor,
        groups: Tensor | None = None,
        sentences: Tensor | None = None,
        num_groups: int = 1,
        device: torch.device | None = None,
    ) -> "TokenBatch":
        """Sort and count the tokens of a batch on the CPU, and move the result to a device, by default the CPU.

        All tensors are `(n,)`. Positions are in the model's input, from 0. `groups` are of the tokens' documents, from
        0 to `num_groups` - 1; None puts all in group 0. Sentence numbers are unique within the batch. The tokens of a
        sentence are consecutive, in the same group, and all in this batch. Tokens with a negative number belong to no
        sentence, and None is a negative number for all.
        """
        device = device or torch.device("cpu")
        groups = torch.zeros_like(token_ids) if groups is None else groups
        sentences = torch.full_like(token_ids, -1) if sentences is None else sentences
        part_of_token = groups + num_groups * (sentences < 0)
        order = part_of_token.argsort(stable=True)
        token_ids, positions, groups = token_ids[order], positions[order], groups[order]
        sentences, part_of_row = sentences[order], part_of_token[order]
        parts = RowsByGroup.of(part_of_row)
        ends = parts.counts.cumsum(0).tolist()
        num_sentence_rows = int((sentences >= 0).sum())
        return cls(
            order=order,
            token_ids=token_ids.to(device),
            positions=positions.to(device),
            types=RowsByGroup.of(token_ids).to(device),
            position_bins=RowsByGroup.of(log2_bins(positions)).to(device),
            groups=RowsByGroup.of(groups).to(device),
            parts=parts.to(device),
            part_slices={
                part: slice(end - count, end)
                for part, count, end in zip(parts.groups.tolist(), parts.counts.tolist(), ends, strict=True)
            },
            sentences=Sentences.of(sentences[:num_sentence_rows], groups[:num_sentence_rows], device)
            if num_sentence_rows
            else None,
            num_groups=num_groups,
        )

    def find_rows(self) -> Tensor:
        """Return the row of each token, in the order of the tokens given to `of`, `(n,)`, on the CPU."""
        return self.order.argsort()
