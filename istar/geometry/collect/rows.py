"""The tokens of a batch, sorted and counted once for the accumulators of all layers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from istar.measures import log2_bins
from istar.measures.point_groups import RowsByGroup


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of a batch as all layers' accumulators need them.

    The rows of the batch are its tokens sorted by group of documents, so that each group is a slice.

    Attributes:
        order: index of the token at each row, `(n,)`, on the CPU.
        token_ids: id of each row's token, `(n,)`.
        positions: position of each row's token in the model's input, from 0, `(n,)`.
        types: rows of each token id.
        position_bins: rows of each of the `log2_bins` of the positions.
        groups: rows of each group of documents.
        group_slices: the rows of each group of documents as a slice, by group.
    """

    order: Tensor
    token_ids: Tensor
    positions: Tensor
    types: RowsByGroup
    position_bins: RowsByGroup
    groups: RowsByGroup
    group_slices: dict[int, slice]

    @classmethod
    def of(
        cls, token_ids: Tensor, positions: Tensor, groups: Tensor | None = None, device: torch.device | None = None
    ) -> "TokenBatch":
        """Sort and count the tokens of a batch on the CPU, and move the result to a device, by default the CPU.

        All tensors are `(n,)`. Positions are in the model's input, from 0. `groups` are of the tokens' documents; None
        puts all in group 0.
        """
        device = device or torch.device("cpu")
        groups = torch.zeros_like(token_ids) if groups is None else groups
        order = groups.argsort(stable=True)
        token_ids, positions = token_ids[order], positions[order]
        rows_by_group = RowsByGroup.of(groups[order])
        ends = rows_by_group.counts.cumsum(0)
        limits = torch.stack([rows_by_group.groups, ends - rows_by_group.counts, ends], 1).tolist()
        return cls(
            order=order,
            token_ids=token_ids.to(device),
            positions=positions.to(device),
            types=RowsByGroup.of(token_ids).to(device),
            position_bins=RowsByGroup.of(log2_bins(positions)).to(device),
            groups=rows_by_group.to(device),
            group_slices={group: slice(start, end) for group, start, end in limits},
        )
