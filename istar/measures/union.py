"""The moments of the union of several layers' points, summed layer by layer as a model computes them.

A training step has nothing to spare: here each layer costs half a product X^T X, in the precision asked for, and the
sums become float64 once for all layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from istar.measures.moments import Moments, full_precision
from istar.measures.products import Gram, add_gram

FEW_ON_CPU, FEW = 3 * 2**17, 2**23
"""Bytes of a layer's points that are few. A device that is faster than its host takes more: a layer of BERT-base and 32
texts of 128 tokens in bfloat16."""


class UnionSums:
    r"""Of the points of layers: the number n and :math:`r = \sum (x - s)` of each layer, about a nearby point s of its
    own, and :math:`\sum (x - s)(x - s)^T` of all layers together.

    The sums are float32, or float64 for points that are. With float32 points of 12 layers IsoScore comes out within
    1e-8 of float64's, as `tests/measures/test_union.py` shows.

    Args:
        products: dtype that the centered points are rounded to before they are multiplied; None is that of the sums.
            bfloat16 takes a third of the time where the hardware knows it. Entries of the covariance are then off by
            up to 4e-3 of the product of their two deviations, mostly far less, as errors of many points cancel;
            IsoScore by about 1e-5 of itself, 1e-4 where it is near 0. Its smallest eigenvalues may come out below zero.
    """

    def __init__(self, products: torch.dtype | None = None) -> None:
        self.products = products
        self._gram: Gram | None = None
        self._layers: list[tuple[int, Tensor, Tensor]] = []

    @property
    def count(self) -> int:
        """Points of all layers."""
        return sum(count for count, _, _ in self._layers)

    def add(self, states: Tensor, index: Tensor | None = None, keep: bool = False) -> tuple[Tensor, Tensor] | None:
        """Add the points of a layer; the first layer says how many dimensions there are, where, and of which dtype.

        Args:
            states: `(..., d)`, any floating dtype, without gradient.
            index: which of them count, as row numbers of the states flattened to `(n, d)`; None counts all.
            keep: return them centered, `(n, d)` in the dtype of the products, and what about, `(d,)`.
        """
        dim, device, dtype = states.shape[-1], states.device, torch.promote_types(states.dtype, torch.float32)
        products = self.products or dtype
        if self._gram is None:
            self._gram = Gram(dim, device, dtype, products)
        states = states.reshape(-1, dim)
        count = len(states) if index is None else len(index)
        kept = states.new_empty(count, dim, dtype=products) if keep else None
        shift = _nearby(states, index, dtype)
        residual = torch.zeros_like(shift)
        with full_precision(device):
            for chosen, rows in self._gram.parts(count, kept):
                block = states[chosen] if index is None else states.index_select(0, index[chosen])
                centered = torch.sub(block, shift, out=rows if rows.dtype == dtype else None)
                residual = residual + centered.sum(0)
                if centered is not rows:
                    rows.copy_(centered)
        self._layers.append((count, shift, residual))
        return None if kept is None else (kept, shift)

    def moments(self) -> Moments:
        """Of the union, in float64 (float32 on MPS); at least one layer must have been added."""
        assert self._gram is not None
        with full_precision(self._gram.total.device):
            total = self._gram.finish()
        counts, shifts, residuals = zip(*self._layers, strict=True)
        return _moments(total, counts, torch.stack(shifts), torch.stack(residuals))


class UnionPoints:
    """The points of layers side by side, multiplied at once.

    That is for few points, of which calling a kernel costs more than what it does, and for devices that are faster
    than their host. Sums and products are as in `UnionSums`.

    Args:
        layers: states `(..., d)` of one shape, any floating dtype, without gradient; at least one.
        index: as in `UnionSums.add`.
        products: as in `UnionSums`.

    Attributes:
        points: centered, `(layers, n, d)` in the dtype of the products.
        shifts: what they are centered about, the mean of each layer but for rounding, `(layers, d)`.
    """

    def __init__(
        self, layers: Sequence[Tensor], index: Tensor | None = None, products: torch.dtype | None = None
    ) -> None:
        dtype = torch.promote_types(layers[0].dtype, torch.float32)
        with full_precision(layers[0].device):
            states = torch.stack(list(layers)).flatten(1, -2)
            if index is not None:
                states = states.index_select(1, index)
            self.shifts = states.mean(1, dtype=dtype)
            self.points = torch.empty_like(states, dtype=products or dtype)
            torch.sub(states, self.shifts[:, None], out=self.points)

    def moments(self) -> Moments:
        """As that of `UnionSums`."""
        layers, count, dim = self.points.shape
        total = self.shifts.new_zeros(dim, dim)
        with full_precision(total.device):
            add_gram(total, self.points.view(-1, dim))
        return _moments(total, [count] * layers, self.shifts, self.points.sum(1, dtype=total.dtype))


def are_few(count: int, dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `UnionPoints` is faster for layers of so many points."""
    return count * dim * dtype.itemsize <= (FEW_ON_CPU if device.type == "cpu" else FEW)


def _nearby(states: Tensor, index: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The mean of some 64 points: any point near them all will do, and what it misses is in the residual."""
    every = slice(None, None, (len(states) if index is None else len(index)) // 64 + 1)
    some = states[every] if index is None else states.index_select(0, index[every])
    return some.sum(0, dtype=dtype) / max(len(some), 1)


def _moments(total: Tensor, counts: Sequence[int], shifts: Tensor, residuals: Tensor) -> Moments:
    r"""From the lower triangle of :math:`\sum (x - s)(x - s)^T`, and n, s and r of each layer, `(layers, d)`.

    With :math:`\delta` from the union's mean to each layer's s, the scatter is
    :math:`\sum (x - s)(x - s)^T + \sum_l (\delta_l r_l^T + r_l \delta_l^T + n_l \delta_l \delta_l^T)`.
    """
    moments = Moments(len(total), total.device)
    count = sum(counts)
    if count == 0:
        return moments
    shift, residual = shifts.to(moments.mean), residuals.to(moments.mean)
    each = counts[0] if len(set(counts)) == 1 else shift.new_tensor(counts)[:, None]
    moments.count = moments.count + count
    moments.mean = (each * shift + residual).sum(0) / count
    delta = shift - moments.mean
    # Of which the sum with its own transpose is the scatter.
    half = total.tril().to(moments.scatter.dtype)
    half.diagonal().div_(2)
    half.addmm_(delta.T, residual + each / 2 * delta)
    moments.scatter = half + half.T
    return moments
