"""Groups, types and positions of a batch of points, sorted and counted once for all accumulators."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class RowsByGroup:
    """The rows of a batch by group, for sums over the rows of each group.

    It depends on the groups alone: the hidden states of all layers at the same tokens share it.
    """

    groups: Tensor
    """The k groups that occur, ascending, `(k,)`, int64."""
    counts: Tensor
    """Number of rows of each, `(k,)`, int64."""
    indices: Tensor
    """Index in `groups` of the group of each row, `(n,)`, int64."""
    order: Tensor
    """Indices of the rows, sorted by group, `(n,)`, int64."""

    @classmethod
    def of(cls, groups: Tensor) -> Self:
        """Create from the group of each row, integers `(n,)` on the CPU. Rows of the same group keep their order."""
        occurring_groups, indices, counts = np.unique(groups.numpy(), return_inverse=True, return_counts=True)
        columns = (occurring_groups, counts, indices, indices.argsort(kind="stable"))
        return cls(*map(torch.from_numpy, columns))

    def to(self, device: torch.device) -> "RowsByGroup":
        """Return a copy on a device."""
        return RowsByGroup(*(column.to(device) for column in (self.groups, self.counts, self.indices, self.order)))

    def sum_rows(self, points: Tensor, sorted_weights: Tensor | None = None) -> Tensor:
        """Return the sum of the rows `(n, d)` of each group, times their weights, `(k, d)`, in the order of `groups`.

        Points, and weights `(n,)` in `order`, are both float32 or both float64, as is the result. Not differentiable.
        """
        # A weighted sum of rows of a matrix is a bag of embeddings in torch, which needs no copy of the rows.
        sums: Tensor = F.embedding_bag(self.order, points, self._starts, mode="sum", per_sample_weights=sorted_weights)
        return sums

    @cached_property
    def _starts(self) -> Tensor:
        return self.counts.cumsum(0) - self.counts

    @cached_property
    def membership(self) -> Tensor:
        """1 where a row belongs to a group, else 0, `(k, n)`, float32."""
        return (self.indices == torch.arange(len(self.groups), device=self.indices.device)[:, None]).float()


@dataclass(frozen=True)
class Rows:
    """Groups, types, positions and examples of a batch of points, in the order in which accumulators get the points.

    Attributes:
        order: index of the point at each row, `(n,)`, on the CPU. The rows are sorted by group.
        groups: rows of each group of examples. Points of different groups are independent of each other.
        group_slices: the rows of each group as a slice, by group.
        positions: position of each row's point in its example, from 0, `(n,)`, or None.
        position_bins: rows of each of the `log2_bins` of the positions, or None without positions.
        type_ids: type of each row's point, such as the id of its token, `(n,)`, or None.
        types: rows of each type, or None without types.
        examples: rows of each example that is kept for comparisons, or None if no examples are kept.
    """

    order: Tensor
    groups: RowsByGroup
    group_slices: dict[int, slice]
    positions: Tensor | None = None
    position_bins: RowsByGroup | None = None
    type_ids: Tensor | None = None
    types: RowsByGroup | None = None
    examples: RowsByGroup | None = None

    @classmethod
    def of(
        cls,
        groups: Tensor,
        types: Tensor | None = None,
        positions: Tensor | None = None,
        examples: Tensor | None = None,
    ) -> "Rows":
        """Sort and count points by their groups, types, positions and examples, integers `(n,)` on the CPU."""
        order = groups.numpy().argsort(kind="stable")
        sorted_groups, sorted_types, sorted_positions, sorted_examples = (
            None if column is None else torch.from_numpy(column.numpy()[order])
            for column in (groups, types, positions, examples)
        )
        assert sorted_groups is not None
        rows_by_group = RowsByGroup.of(sorted_groups)
        counts = rows_by_group.counts.numpy()
        ends = counts.cumsum()
        limits = zip(rows_by_group.groups.numpy().tolist(), (ends - counts).tolist(), ends.tolist(), strict=True)
        return cls(
            order=torch.from_numpy(order),
            groups=rows_by_group,
            group_slices={group: slice(start, end) for group, start, end in limits},
            positions=sorted_positions,
            position_bins=None if sorted_positions is None else RowsByGroup.of(_find_log2_bins(sorted_positions)),
            type_ids=sorted_types,
            types=None if sorted_types is None else RowsByGroup.of(sorted_types),
            examples=None if sorted_examples is None else RowsByGroup.of(sorted_examples),
        )

    def to(self, device: torch.device) -> "Rows":
        """Return a copy on a device; the order stays on the CPU."""
        if device.type == "cpu":
            return self
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, column in columns.items():
            if isinstance(column, Tensor | RowsByGroup) and name != "order":
                columns[name] = column.to(device)
        return Rows(**columns)

    def has_example_below(self, number: int) -> bool:
        """Return whether a row is of one of the first examples. It is for rows on the CPU."""
        return self.examples is not None and bool(self.examples.groups.numpy()[0] < number)

    @cached_property
    def row_of_point(self) -> Tensor:
        """Row of each point, `(n,)`, on the CPU."""
        return torch.from_numpy(self.order.numpy().argsort())


def _find_log2_bins(positions: Tensor) -> Tensor:
    """Return the `log2_bins` of positions on the CPU."""
    _, exponents = np.frexp(positions.numpy())
    return torch.from_numpy(exponents.astype(np.int64))
