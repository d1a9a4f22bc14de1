"""The moments of the union of several layers' points, summed layer by layer as a model computes them.

One pass of a training step has nothing to spare: here each layer costs half a product X^T X, in the precision asked
for, and the sums become float64 once for all layers.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from istar.measures.moments import Moments, full_precision

PANEL = 128
"""Columns whose products with themselves and all columns behind them are taken at once."""
ROWS = 1024
"""Points centered at a time on a CPU, so that they are still in its cache when they are multiplied."""


class Centered(NamedTuple):
    """The points of a layer about a nearby point: `(n, d)` in the precision of the products, and that point, `(d,)`."""

    points: Tensor
    shift: Tensor


@dataclass
class UnionSums:
    r"""Sums of the points of layers, each about a nearby point of its own: n, :math:`r = \sum (x - s)` and, over all
    layers together, :math:`\sum (x - s)(x - s)^T`.

    Args:
        dim: d.
        device: of the points.
        dtype: of the sums: float32, or float64 for points that are float64.
        products: dtype that the centered points are rounded to before they are multiplied: `dtype`, or bfloat16, which
            takes a fifth of the time on hardware that knows it. The products are then added in float32; the covariance
            is off by about 1e-3 of its largest entries, IsoScore by about 1e-4 of itself.
    """

    dim: int
    device: torch.device
    dtype: torch.dtype
    products: torch.dtype
    _total: Tensor = field(init=False)
    _shifts: list[Tensor] = field(init=False, default_factory=list)
    _residuals: list[Tensor] = field(init=False, default_factory=list)
    _counts: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._total = torch.zeros(self.dim, self.dim, dtype=self.dtype, device=self.device)

    def add(self, states: Tensor, index: Tensor | None = None, keep: bool = False) -> Centered | None:
        """Add the points of a layer.

        Args:
            states: `(..., d)`, any floating dtype, without gradient.
            index: which of them count, as row numbers of the states flattened to `(n, d)`; None counts all.
            keep: return them centered.
        """
        states = states.reshape(-1, self.dim)
        count = len(states) if index is None else len(index)
        if count == 0:
            return None
        rows = ROWS if self.device.type == "cpu" else count
        kept = torch.empty(count if keep else min(rows, count), self.dim, dtype=self.products, device=self.device)
        shift: Tensor | None = None
        residual = torch.zeros(self.dim, dtype=self.dtype, device=self.device)
        with full_precision(self.device):
            for first in range(0, count, rows):
                chosen = slice(first, min(first + rows, count))
                block = states[chosen] if index is None else states.index_select(0, index[chosen])
                if shift is None:
                    # Any nearby point will do; what it misses of the mean is in the residual.
                    shift = block.mean(0, dtype=self.dtype)
                centered = kept[chosen] if keep else kept[: len(block)]
                torch.sub(block, shift, out=centered)
                residual += centered.sum(0, dtype=self.dtype)
                _add_gram(self._total, centered)
        assert shift is not None
        self._shifts.append(shift)
        self._residuals.append(residual)
        self._counts.append(count)
        return Centered(kept, shift) if keep else None

    def moments(self) -> Moments:
        r"""Of the union, in float64 (float32 on MPS).

        With :math:`\delta` from the union's mean to each layer's s, the scatter is
        :math:`\sum (x - s)(x - s)^T + \sum_l (\delta_l r_l^T + r_l \delta_l^T + n_l \delta_l \delta_l^T)`.
        """
        moments = Moments(self.dim, self.device)
        if not self._counts:
            return moments
        wide = moments.mean.dtype
        shifts, residuals = torch.stack(self._shifts).to(wide), torch.stack(self._residuals).to(wide)
        counts = shifts.new_tensor(self._counts)
        total = sum(self._counts)
        moments.count = moments.count + total
        moments.mean = (counts @ shifts + residuals.sum(0)) / total
        delta = shifts - moments.mean
        upper = self._total.triu().to(wide)
        cross = delta.T @ (residuals + counts[:, None] / 2 * delta)
        moments.scatter = (upper + upper.triu(1).T) + (cross + cross.T)
        return moments


def _add_gram(total: Tensor, points: Tensor) -> None:
    """Add X^T X to the upper triangle of a matrix; below it anything may come to stand."""
    # A device is faster with one product than with half of it in pieces.
    panel = PANEL if points.device.type == "cpu" else points.shape[1]
    for first in range(0, points.shape[1], panel):
        rows, columns = points[:, first : first + panel], points[:, first:]
        target = total[first : first + panel, first:]
        if points.dtype == total.dtype:
            target.addmm_(rows.T, columns)
        elif points.device.type == "cuda":
            target.add_(torch.mm(rows.T, columns, out_dtype=total.dtype))
        else:
            target.add_(rows.T @ columns)
