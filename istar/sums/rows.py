"""Groups, types and positions of a batch of points, sorted and counted once for all accumulators."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from istar.measures import log2_bins
from istar.measures.point_groups import RowsByGroup


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
        order = groups.argsort(stable=True)
        rows_by_group = RowsByGroup.of(groups[order])
        ends = rows_by_group.counts.cumsum(0)
        limits = torch.stack([rows_by_group.groups, ends - rows_by_group.counts, ends], 1).tolist()
        sorted_types, sorted_positions = (None if column is None else column[order] for column in (types, positions))
        return cls(
            order=order,
            groups=rows_by_group,
            group_slices={group: slice(start, end) for group, start, end in limits},
            positions=sorted_positions,
            position_bins=None if sorted_positions is None else RowsByGroup.of(log2_bins(sorted_positions)),
            type_ids=sorted_types,
            types=None if sorted_types is None else RowsByGroup.of(sorted_types),
            examples=None if examples is None else RowsByGroup.of(examples[order]),
        )

    def to(self, device: torch.device) -> "Rows":
        """Return a copy on a device; the order stays on the CPU."""
        if device.type == "cpu":
            return self
        columns: dict[str, Any] = {
            name: column.to(device)
            for name, column in vars(self).items()
            if isinstance(column, Tensor | RowsByGroup) and name != "order"
        }
        return replace(self, **columns)

    @property
    def row_of_point(self) -> Tensor:
        """Row of each point, `(n,)`, on the CPU."""
        return self.order.argsort()
