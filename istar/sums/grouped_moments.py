"""Sums of hidden states about an origin: over all points of a batch, and the moments of each group of documents."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from istar.measures import Accumulator, FourthMoments
from istar.measures.numerics import block_length, zero_vector
from istar.sums.rows import Rows

MAX_RECENT_POINTS = 2_048
"""Number of points of a group after which their scatter matrix, in their dtype, is added to the accumulated one."""
MAX_PRODUCT_POINTS = 4_096
"""Maximum number of points in one matrix product."""
PANEL_WIDTH = 128
"""Number of columns of a panel of a scatter matrix on a CPU; see `UpperPanels`."""


class UpperPanels:
    """The upper panels of symmetric matrices `(d, d)`, packed into one dimension.

    Panel k is rows k w to (k + 1) w, for a panel width w, without the columns to the left of its diagonal block. The
    panels contain each number of the matrix at least once. Their memory, and the time of their product, is little more
    than half of the whole matrix. Devices other than a CPU use one panel, because one large product is faster there.

    Attributes:
        size: number of packed numbers.
    """

    def __init__(self, dim: int, device_type: str) -> None:
        width = PANEL_WIDTH if device_type == "cpu" else dim
        self._dim = dim
        self._rows = [slice(start, min(start + width, dim)) for start in range(0, dim, width)]
        self._sizes = [(rows.stop - rows.start) * (dim - rows.start) for rows in self._rows]
        self.size = sum(self._sizes)

    def _view(self, packed: Tensor) -> Iterator[tuple[slice, Tensor]]:
        for rows, panel in zip(self._rows, packed.split(self._sizes), strict=True):
            yield rows, panel.view(-1, self._dim - rows.start)

    def add_scatter(self, packed: Tensor, points: Tensor) -> None:
        """Add the scatter matrix of points `(n, d)` to packed panels `(size,)`, in place."""
        for rows, panel in self._view(packed):
            panel.addmm_(points[:, rows].T, points[:, rows.start :])

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the symmetric matrix `(d, d)` of packed panels `(size,)`."""
        matrix = packed.new_empty(self._dim, self._dim)
        for rows, panel in self._view(packed):
            matrix[rows, rows.start :] = panel
            matrix[rows.stop :, rows] = panel[:, rows.stop - rows.start :].T
        return matrix


class GroupedMoments(Accumulator):
    """Accumulates the `FourthMoments` of one or more groups of points; a batch may contain points of all groups.

    All sums are about the same `origin`, `(d,)`, so that the sums of batches and groups can be added. The origin should
    be near the mean of the points, and is on their device. Sums over a batch are computed in the dtype of its points,
    and accumulated in float64 (float32 on MPS). A scatter matrix is added to the accumulated one only after
    `MAX_RECENT_POINTS` points, because adding it takes as long as multiplying many points.
    """

    def __init__(self, num_groups: int, origin: Tensor) -> None:
        dim = len(origin)
        self._num_groups = num_groups
        origin = origin.to(zero_vector(dim, origin.device))
        self._panels = UpperPanels(dim, origin.device.type)
        self.origin = self.add_state("origin", origin, "equal")
        self.counts = self.add_state("counts", origin.new_zeros(num_groups), "sum")
        self.totals = self.add_state("totals", origin.new_zeros(num_groups, dim), "sum")
        self.thirds = self.add_state("thirds", origin.new_zeros(num_groups, dim), "sum")
        self.fourths = self.add_state("fourths", origin.new_zeros(num_groups), "sum")
        # Packed scatter matrices.
        self.scatters = self.add_state("scatters", origin.new_zeros(num_groups, self._panels.size), "sum")
        # Machine epsilon of the narrowest dtype used to sum a scatter matrix.
        self.epsilon = self.add_state("epsilon", origin.new_zeros(()), "max")
        # Packed scatter matrix and number of the latest points of each group.
        self._recent_scatters: dict[int, Tensor] = {}
        self._recent_counts: dict[int, int] = {}

    @torch.no_grad()
    def update(self, centered: Tensor, squared_norms: Tensor, rows: Rows) -> None:
        """Add the points of a batch.

        Args:
            centered: differences of the points from the origin, `(n, d)`, float32 or float64, in the order of `rows`.
            squared_norms: squared norms of the differences, `(n,)`.
            rows: groups of the points. An accumulator with one group adds them all to this group.
        """
        groups = rows.groups.groups % self._num_groups
        for sums, batch_sums in (
            (self.counts, rows.groups.counts),
            (self.totals, rows.groups.sum_rows(centered)),
            (self.thirds, rows.groups.sum_rows(centered, squared_norms)),
            # Fourth powers can leave the range of float32.
            (self.fourths, rows.groups.sum_values(squared_norms.to(self.fourths).square())),
        ):
            sums.index_add_(0, groups, batch_sums.to(sums))
        for group, group_rows in rows.group_slices.items():
            for points in centered[group_rows].split(MAX_PRODUCT_POINTS):
                self._add_scatter(group % self._num_groups, points)
        self.epsilon = self.epsilon.clamp(min=torch.finfo(centered.dtype).eps)

    def compute_moments(self) -> FourthMoments:
        """Return the moments of all points."""
        return FourthMoments.about_mean(self.origin, self._sum_groups(slice(None)), self.epsilon)

    def sum_without_each_group(self) -> Iterator[list[Tensor]]:
        """Yield, for each group, the sums over all other points, as `FourthMoments.about_mean` takes them."""
        total = self._sum_groups(slice(None))
        for group in range(self._num_groups):
            group_sums = self._sum_groups(slice(group, group + 1))
            yield [all_groups - one_group for all_groups, one_group in zip(total, group_sums, strict=True)]

    def finish_sums(self) -> None:
        """Add all recent scatter matrices to the accumulated ones."""
        for group in list(self._recent_scatters):
            self._add_recent_scatter(group)

    def _add_scatter(self, group: int, centered: Tensor) -> None:
        """Add the scatter matrix of differences `(n, d)` from the origin to a group's recent scatter matrix."""
        recent_scatter = self._recent_scatters.get(group)
        if recent_scatter is None or recent_scatter.dtype != centered.dtype:
            self._add_recent_scatter(group)
            recent_scatter = centered.new_zeros(self._panels.size)
            self._recent_scatters[group], self._recent_counts[group] = recent_scatter, 0
        self._panels.add_scatter(recent_scatter, centered)
        self._recent_counts[group] += len(centered)
        if self._recent_counts[group] >= MAX_RECENT_POINTS:
            self._add_recent_scatter(group)

    def _add_recent_scatter(self, group: int) -> None:
        if group in self._recent_scatters:
            self.scatters[group].add_(self._recent_scatters.pop(group))

    def _sum_groups(self, groups: slice) -> list[Tensor]:
        """Return the sums about the origin over the points of some groups, as `FourthMoments.about_mean` takes them."""
        self.finish_sums()
        count, total, packed_scatter, third, fourth = (
            sums[groups].sum(0) for sums in (self.counts, self.totals, self.scatters, self.thirds, self.fourths)
        )
        return [count, total, self._panels.unpack(packed_scatter), third, fourth]


class PointSums(NamedTuple):
    """Result of `sum_over_points`, with y = x - o for points x of weight w and an origin o."""

    centered: Tensor  # y of each point, `(n, d)`, in the dtype of the points
    squared_distances: Tensor  # squared norm of each y, `(n,)`, in the dtype of the points
    powers: Tensor  # sums of y, y^2, y^3 and y^4 in each dimension, `(4, d)`, in the dtype of the origin
    weighted: Tensor  # sums of w y, w^2 y and w^2 y^2 in each dimension, `(3, d)`, in the dtype of the origin


def sum_over_points(points: Tensor, origin: Tensor, weights: Tensor) -> PointSums:
    """Compute the differences of points `(n, d)` from an origin `(d,)`, and sums of their powers.

    Points and weights, `(n,)`, are both float32 or both float64. The origin has the dtype of the accumulated sums.
    """
    powers = origin.new_zeros(4, len(origin))
    weighted = origin.new_zeros(3, len(origin))
    centered = torch.empty_like(points)
    squared_distances = torch.empty_like(weights)
    origin = origin.to(points.dtype)
    # All that is computed from a block stays in the cache.
    blocks = (column.split(block_length(points)) for column in (points, centered, squared_distances, weights))
    for x, y, squared_norms, w in zip(*blocks, strict=True):
        torch.sub(x, origin, out=y)
        y2 = y.square()
        torch.sum(y2, 1, out=squared_norms)
        ones = torch.ones_like(w)  # a product with ones takes less time than a sum over the rows
        factors = torch.stack([ones, w.square(), w])
        sum_y, sum_w2_y, sum_w_y = factors @ y
        sum_y2, sum_w2_y2 = factors[:2] @ y2
        powers += torch.stack([sum_y, sum_y2, ones @ (y2 * y), ones @ y2.square()])
        weighted += torch.stack([sum_w_y, sum_w2_y, sum_w2_y2])
    return PointSums(centered, squared_distances, powers, weighted)
