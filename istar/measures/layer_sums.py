"""Sums over the points of several layers, from which the moments of a stream of batches follow."""

from collections.abc import Sequence

import torch
from torch import Tensor

from istar.measures.batch_moments import BatchMoments, layers_per_stack, multiply_by_itself, stack_rows
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
        sums = torch.cat([_stack([layer]).sum(1, dtype=dtype) for layer in layers])
        self._origins = sums / sums.new_tensor(count_points(layers)).clamp(min=1)[:, None]
        self._counts = [0] * len(layers)
        self._totals = torch.zeros_like(sums, dtype=accumulation_dtype(sums.device))
        self._scatter = self._totals.new_zeros(sums.shape[1], sums.shape[1])

    def add(self, layers: LayerPoints) -> None:
        """Add a batch. Small layers of the same shape, dtype and indices are stacked."""
        are_alike = len({(points.shape, points.dtype, id(indices)) for points, indices in layers}) == 1
        length = layers_per_stack(layers[0][0]) if are_alike else 1
        stacks = [slice(start, start + length) for start in range(0, len(layers), length)]
        totals = torch.empty_like(self._origins)
        with full_precision(totals.device):
            for stack in stacks:
                centered = _stack(layers[stack]) - self._origins[stack, None]
                torch.sum(centered, 1, out=totals[stack])
                self._scatter += multiply_by_itself(centered.flatten(0, 1), totals.dtype)
        self._totals += totals
        self._counts = [total + count for total, count in zip(self._counts, count_points(layers), strict=True)]

    def moments(self) -> Moments:
        """Return the moments of the points of all layers together."""
        counts = self._totals.new_tensor(self._counts)
        shifts = self._totals / counts.clamp(min=1)[:, None]
        scatter = self._scatter.addmm(shifts.T, self._totals, alpha=-1)
        moments = merge_moments([BatchMoments(counts, self._origins + shifts, scatter)])
        moments.epsilon.fill_(torch.finfo(self._origins.dtype).eps)
        return moments


def count_points(layers: LayerPoints) -> list[int]:
    """Return the number of points of each layer. The host knows it, and so does not wait for a GPU."""
    return [points.shape[:-1].numel() if indices is None else len(indices) for points, indices in layers]


def _stack(layers: LayerPoints) -> Tensor:
    """Return the points `(k, n, d)` of k layers with the same indices."""
    return stack_rows([points for points, _ in layers], layers[0][1])
