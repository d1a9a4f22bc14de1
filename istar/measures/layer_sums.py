"""Sums over the points of several layers, from which the moments of a stream of batches follow."""

from collections.abc import Sequence

import torch
from torch import Tensor

from istar.measures.batch_moments import BatchMoments, layers_per_block
from istar.measures.moments import Moments, merge_moments
from istar.measures.numerics import accumulation_dtype, full_precision

LayerPoints = Sequence[tuple[Tensor, Tensor | None]]
"""Points `(..., d)` of each layer, and the indices of the rows that count, see `mask_to_indices`; None: all count."""


class LayerSums:
    """Sums over the points of k layers about a fixed origin for each layer, for the moments of all points together.

    Batches are added and not merged, which takes few operations. An origin is the mean of the layer in the first batch,
    so that means far from 0 cost no digits. The sums of a batch are float32 (float64 for float64 points), and the sums
    over batches are float64 (float32 on MPS). They have no gradients.

    Args:
        layers: the first batch, with at least one point. It decides on the origins and is not added.
    """

    def __init__(self, layers: LayerPoints) -> None:
        dtype = torch.float64 if torch.float64 in {points.dtype for points, _ in layers} else torch.float32
        sums = torch.cat([_stack_rows([layer]).sum(1, dtype=dtype) for layer in layers])
        self._origins = sums / sums.new_tensor(count_points(layers)).clamp(min=1)[:, None]
        self._counts = [0] * len(layers)
        self._totals = torch.zeros_like(sums, dtype=accumulation_dtype(sums.device))
        self._upper_scatter = self._totals.new_zeros(sums.shape[1], sums.shape[1])

    def add(self, layers: LayerPoints) -> None:
        """Add a batch. Small layers of the same shape, dtype and indices are stacked, as many as fit into a block."""
        are_alike = len({(points.shape, points.dtype, id(indices)) for points, indices in layers}) == 1
        block_length = layers_per_block(layers[0][0]) if are_alike else 1
        totals = torch.empty_like(self._origins)
        upper_scatter = torch.zeros_like(self._upper_scatter, dtype=totals.dtype)
        with full_precision(totals.device):
            for start in range(0, len(layers), block_length):
                block = slice(start, start + block_length)
                centered = _stack_rows(layers[block]) - self._origins[block, None]
                torch.sum(centered, 1, out=totals[block])
                _add_upper_product(upper_scatter, centered.flatten(0, 1))
        self._totals += totals
        self._upper_scatter += upper_scatter
        self._counts = [total + count for total, count in zip(self._counts, count_points(layers), strict=True)]

    def moments(self) -> Moments:
        """Return the moments of the points of all layers together."""
        counts = self._totals.new_tensor(self._counts)
        shifts = self._totals / counts.clamp(min=1)[:, None]
        scatter = self._upper_scatter.triu() + self._upper_scatter.triu(1).T
        scatter.addmm_(shifts.T, self._totals, alpha=-1)
        moments = merge_moments([BatchMoments(counts, self._origins + shifts, scatter)])
        moments.epsilon.fill_(torch.finfo(self._origins.dtype).eps)
        return moments


def count_points(layers: LayerPoints) -> list[int]:
    """Return the number of points of each layer. The host knows it, and so does not wait for a GPU."""
    return [points.shape[:-1].numel() if indices is None else len(indices) for points, indices in layers]


def _stack_rows(layers: LayerPoints) -> Tensor:
    """Return the points `(k, n, d)` of k layers with the same indices."""
    flat_layers = [points.flatten(0, -2) for points, _ in layers]
    stacked = flat_layers[0][None] if len(layers) == 1 else torch.stack(flat_layers)
    indices = layers[0][1]
    return stacked if indices is None else stacked.index_select(1, indices)


def _add_upper_product(total: Tensor, factors: Tensor) -> None:
    """Add F^T F of the factors F `(n, d)` to the upper triangle of `total` `(d, d)`.

    The product is symmetric, so its lower left quarter is left out.
    """
    half = factors.shape[1] // 2
    total[:half].addmm_(factors[:, :half].T, factors)
    total[half:, half:].addmm_(factors[:, half:].T, factors[:, half:])
