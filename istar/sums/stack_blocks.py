"""Sums of the hidden states of several layers over the rows of a batch, a block of states and rows at a time."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from istar.measures.batch_moments import PANEL_ROWS
from istar.measures.numerics import block_size
from istar.sums.rows import Rows

MIN_PRODUCT_ROWS, MAX_PRODUCT_ROWS = 1_024, 4_096
"""Rows of a group in one matrix product, if it has as many. Each product takes the time to add it to sums in float64,
and products of more rows would cost digits of float32."""
STACK_BLOCK = 7 * 2**18
"""Numbers per block on a CPU: 7 MiB in float32, which stay in the shared cache between operations."""


class UpperPanels:
    """The upper panels of symmetric matrices `(d, d)`, packed into one dimension.

    Panel k is rows k w to (k + 1) w, for a panel width w, without the columns to the left of its diagonal block. The
    panels contain each number of the matrix at least once. Their memory, and the time of their product, is little more
    than half of the whole matrix. Devices other than a CPU use one panel, because one large product is faster there.

    Attributes:
        size: number of packed numbers.
    """

    def __init__(self, dim: int, device: torch.device) -> None:
        width = PANEL_ROWS if device.type == "cpu" else dim
        self._dim = dim
        self._rows = [slice(start, min(start + width, dim)) for start in range(0, dim, width)]
        self._sizes = [(rows.stop - rows.start) * (dim - rows.start) for rows in self._rows]
        self.size = sum(self._sizes)

    def _view(self, packed: Tensor) -> Iterator[tuple[slice, Tensor]]:
        for rows, panel in zip(self._rows, packed.split(self._sizes, -1), strict=True):
            yield rows, panel.view(*packed.shape[:-1], -1, self._dim - rows.start)

    def compute_scatter(self, points: Tensor) -> Tensor:
        """Return the packed scatter matrices `(states, size)` of points `(states, n, d)`."""
        packed = points.new_empty(len(points), self.size)
        for rows, panel in self._view(packed):
            torch.bmm(points[..., rows].mT, points[..., rows.start :], out=panel)
        return packed

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the symmetric matrices `(..., d, d)` of packed panels `(..., size)`."""
        matrices = packed.new_empty(*packed.shape[:-1], self._dim, self._dim)
        for rows, panel in self._view(packed):
            matrices[..., rows, rows.start :] = panel
            matrices[..., rows.stop :, rows] = panel[..., rows.stop - rows.start :].mT
        return matrices


class StateSums(NamedTuple):
    """Result of `sum_stack`, with y = x - o for points x and an origin o. Sums are in the dtype of the origins."""

    squared_distances: Tensor  # squared norm of each y, `(states, n)`, in the dtype of the points
    powers: Tensor  # sums of y, y^2, y^3 and y^4 in each dimension, `(states, 4, d)`
    weighted_squares: Tensor  # sums of w^2 y and w^2 y^2 in each dimension, `(states, 2, d)`
    group_vectors: Tensor  # sums of y, |y|^2 y and w y of each group, `(states, 3, groups, d)`
    bin_vectors: Tensor  # sums of w y of each bin of positions that occurs, `(states, bins, d)`


def count_states_in_block(num_rows: int, dim: int, device: torch.device) -> int:
    """Return how many states `(num_rows, dim)` `sum_stack` should get at once."""
    return max(1, _stack_block_size(device) // (min(num_rows, MIN_PRODUCT_ROWS) * dim))


def sum_stack(
    points: Sequence[Tensor],
    origins: Tensor,
    weights: Tensor,
    rows: Rows,
    num_groups: int,
    panels: UpperPanels,
    scatters: Tensor,
    type_rows: Tensor | None = None,
    type_vectors: Sequence[Tensor] = (),
) -> StateSums:
    """Sum the rows of several states.

    Args:
        points: rows of each state, `(n, d)`.
        origins: `(states, d)`, in the dtype of the sums.
        weights: weight w of each row, `(states, n)`, in the dtype of the computation: float32 or float64.
        rows: groups, bins of positions and types of the rows. Groups are counted modulo `num_groups`.
        num_groups: number of groups in the result.
        panels: layout of the scatter matrices.
        scatters: packed scatter matrices about the origins, `(states, groups, size)`, for all groups or one. Those of
            the points are added in place.
        type_rows: row of each point's type in `type_vectors`, `(n,)`; None leaves the types out.
        type_vectors: sums of w y of each type for each state, `(types, d)`. Those of the points are added in place.
    """
    (num_states, num_rows), dim = weights.shape, origins.shape[1]
    ones = torch.ones_like(weights)
    # The squared distances are written to the third row.
    factors = torch.stack([weights.square(), ones, ones, weights], 1)
    if rows.position_bins is not None:
        factors = torch.cat([factors, weights[:, None] * rows.position_bins.membership.to(weights.dtype)], 1)
    block_origins = origins.to(weights.dtype)
    max_rows = min(max(_stack_block_size(origins.device) // (num_states * dim), MIN_PRODUCT_ROWS), MAX_PRODUCT_ROWS)
    blocks = list(_split_groups(rows.group_slices, max_rows))
    differences = weights.new_empty(num_states, num_rows, dim)
    products = weights.new_empty(len(blocks), num_states, factors.shape[1], dim)
    square_products = weights.new_empty(len(blocks), num_states, 2, dim)
    higher_powers = weights.new_empty(2, len(blocks), num_states, dim)
    # All that is computed from a block stays in the cache.
    for index, (group, block) in enumerate(blocks):
        block_factors, y = factors[..., block], differences[:, block]
        for state, origin, difference in zip(points, block_origins, y, strict=True):
            torch.sub(state[block], origin, out=difference)
        scatters[:, group % scatters.shape[1]].add_(panels.compute_scatter(y))
        powers = y.square()
        torch.sum(powers, -1, out=block_factors[:, 2])
        torch.bmm(block_factors, y, out=products[index])
        torch.bmm(block_factors[:, :2], powers, out=square_products[index])
        torch.sum(y * powers, 1, out=higher_powers[0, index])
        torch.sum(powers.square_(), 1, out=higher_powers[1, index])
    if type_rows is not None and rows.types is not None:
        type_weights = weights[:, rows.types.order]
        for total, state_differences, state_weights in zip(type_vectors, differences, type_weights, strict=True):
            total.index_add_(0, type_rows, rows.types.sum_rows(state_differences, state_weights).to(total.dtype))
    block_groups = torch.tensor([group % num_groups for group, _ in blocks], device=origins.device)
    products = products.to(origins.dtype)
    group_vectors = origins.new_zeros(num_groups, num_states, 3, dim).index_add_(0, block_groups, products[:, :, 1:4])
    totals, square_totals = products.sum(0), square_products.sum(0, dtype=origins.dtype)
    return StateSums(
        squared_distances=factors[:, 2],
        powers=torch.stack([totals[:, 1], square_totals[:, 1], *higher_powers.sum(1, dtype=origins.dtype)], 1),
        weighted_squares=torch.stack([totals[:, 0], square_totals[:, 0]], 1),
        group_vectors=group_vectors.permute(1, 2, 0, 3),
        bin_vectors=totals[:, 4:],
    )


def _split_groups(group_slices: Mapping[int, slice], max_rows: int) -> Iterator[tuple[int, slice]]:
    """Yield the group and the rows of each block; a large group is divided into blocks of like length."""
    for group, rows in group_slices.items():
        num_rows = rows.stop - rows.start
        length = math.ceil(num_rows / math.ceil(num_rows / max_rows))
        for start in range(rows.start, rows.stop, length):
            yield group, slice(start, min(start + length, rows.stop))


def _stack_block_size(device: torch.device) -> int:
    return STACK_BLOCK if device.type == "cpu" else block_size(device)
