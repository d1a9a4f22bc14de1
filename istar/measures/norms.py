"""Norms of a cloud's points and of its mean, streamed, and of the parameters of a LayerNorm."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from istar.errors import NonFiniteError, UserError
from istar.measures.rows import check_dim, check_finite, norms_of, select_rows, wide_blocks, wide_dtype
from istar.measures.spectrum import outlier_dimensions


@dataclass(frozen=True)
class NormSummary:
    r"""Norms of n points, in the points' own units.

    Attributes:
        count: n.
        average: :math:`\frac{1}{n} \sum_i \lVert x_i \rVert_2`.
        mean_vector: :math:`\lVert \mu \rVert_2`, the norm of the mean :math:`\mu`; at most the average.
        ratio: mean_vector / average, in [0, 1] (*Too Much in Common*, Table 1); 0 for a cloud of zeros.
        smallest: the smallest norm. largest: the largest.
        edges: of the histogram's bins, ascending; empty without a histogram.
        histogram: points in each bin, one fewer than edges. Bins hold their lower edge, the last one both.
        below: points below the first edge. above: points above the last.
    """

    count: int
    average: float
    mean_vector: float
    ratio: float
    smallest: float
    largest: float
    edges: tuple[float, ...] = ()
    histogram: tuple[int, ...] = ()
    below: int = 0
    above: int = 0


@dataclass(frozen=True)
class LayerNormSummary:
    r"""The gain g and bias b of a LayerNorm of d dimensions.

    Attributes:
        gain: :math:`\lVert g \rVert_2 / \sqrt d` (*Anisotropy is Not Inherent to Transformers*, equation 8).
        bias: :math:`\lVert b \rVert_2 / \sqrt d`.
        ratio: bias / gain; small in isotropic models. Infinite if only the gain is zero, NaN if both are.
        bias_over_gain: :math:`\sum_i b_i / g_i` (equation 9) over the dimensions with :math:`g_i \ne 0`: if it is
            not 0, all outputs lie on one side of a hyperplane through the origin.
        zero_gains: how many dimensions have :math:`g_i = 0`, which that sum leaves out.
        outlier_gains: dimensions whose gain is an outlier; see `outlier_dimensions`. outlier_biases: whose bias is.
    """

    gain: float
    bias: float
    ratio: float
    bias_over_gain: float
    zero_gains: int
    outlier_gains: tuple[int, ...]
    outlier_biases: tuple[int, ...]


def norm_summary(points: Tensor, mask: Tensor | None = None, edges: Sequence[float] = ()) -> NormSummary:
    """Norms of one cloud; see `Norms`, which streams.

    Args:
        points: `(..., d)` of any floating dtype, on any device.
        mask: `(...)`, bool or 0/1; points where it is 0 are left out.
        edges: of the histogram's bins, ascending.

    Raises:
        UserError: as `Norms`.

    >>> norm_summary(torch.tensor([[3.0, 4.0], [3.0, -4.0]])).ratio
    0.6
    """
    rows = select_rows(points, mask)
    return Norms(rows.shape[1], edges, rows.device).update(rows).compute()


class Norms:
    """Accumulates norms, the mean vector and a histogram over any number of batches; merges. Not differentiable.

    Args:
        dim: d, at least 1.
        edges: of the histogram's bins, ascending; none, no histogram.
        device: where the sums live; points must be on the same device. Sums are float64 (float32 on MPS).

    Attributes:
        count: points. norm_total: sum of their norms. total: their sum, `(d,)`. smallest, largest: of the norms.
        bins: points below the first edge, in each bin, above the last edge: `(len(edges) + 1,)`.
    """

    def __init__(self, dim: int, edges: Sequence[float] = (), device: torch.device | str | None = None) -> None:
        check_dim(dim)
        edges = tuple(float(edge) for edge in edges)
        ascending = all(low < high for low, high in itertools.pairwise(edges))
        if len(edges) == 1 or not ascending or not all(map(math.isfinite, edges)):
            raise UserError(f"edges are {list(edges)}; expected at least 2 ascending numbers, or none")
        device = torch.device(device or "cpu")
        dtype = wide_dtype(device)
        self.edges = torch.tensor(edges, dtype=dtype, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.norm_total = torch.zeros((), dtype=dtype, device=device)
        self.total = torch.zeros(dim, dtype=dtype, device=device)
        self.smallest = torch.full((), math.inf, dtype=dtype, device=device)
        self.largest = torch.full((), -math.inf, dtype=dtype, device=device)
        self.bins = torch.zeros(len(edges) + 1 if edges else 0, dtype=torch.int64, device=device)

    @torch.no_grad()
    def update(self, points: Tensor, mask: Tensor | None = None) -> "Norms":
        """Add a batch: `points` `(..., d)`, `mask` `(...)`. Returns itself.

        Raises:
            UserError: on shapes that do not fit or points that are not floating.
        """
        rows = select_rows(points, mask, self.total.shape[0])
        for block in wide_blocks(rows) if len(rows) else ():
            norms = norms_of(block)
            self.count += len(norms)
            self.norm_total += norms.sum()
            self.total += block.sum(0)
            self.smallest = torch.minimum(self.smallest, norms.min())
            self.largest = torch.maximum(self.largest, norms.max())
            if len(self.edges):
                self.bins += self._binned(norms)
        return self

    def merge(self, other: "Norms") -> "Norms":
        """Add what another accumulator with the same edges has seen. Returns itself."""
        if other.total.shape != self.total.shape:
            raise UserError(
                f"cannot merge norms of {other.total.shape[0]} dimensions into norms of {self.total.shape[0]}"
            )
        if not torch.equal(other.edges.to(self.edges), self.edges):
            raise UserError("cannot merge histograms with other edges; give both accumulators the same")
        self.count += other.count.to(self.count)
        self.norm_total += other.norm_total.to(self.norm_total)
        self.total += other.total.to(self.total)
        self.smallest = torch.minimum(self.smallest, other.smallest.to(self.smallest))
        self.largest = torch.maximum(self.largest, other.largest.to(self.largest))
        self.bins += other.bins.to(self.bins)
        return self

    def compute(self) -> NormSummary:
        """The norms so far.

        Raises:
            UserError: without any point, or with points that were not finite.
        """
        if self.count == 0:
            raise UserError("0 points have no norms; expected at least 1")
        if not (self.norm_total.isfinite() and self.total.isfinite().all()):
            raise NonFiniteError("the points are not finite; look for NaN or infinite values in them")
        average = (self.norm_total / self.count).item()
        mean_vector = norms_of(self.total[None] / self.count).item()
        below, *inner, above = self.bins.tolist() or (0, 0)
        return NormSummary(
            count=int(self.count),
            average=average,
            mean_vector=mean_vector,
            # Rounding alone can take points that all point one way above 1.
            ratio=min(mean_vector / average, 1.0) if average > 0 else 0.0,
            smallest=self.smallest.item(),
            largest=self.largest.item(),
            edges=tuple(self.edges.tolist()),
            histogram=tuple(inner),
            below=below,
            above=above,
        )

    def _binned(self, norms: Tensor) -> Tensor:
        places = torch.bucketize(norms, self.edges, right=True)
        # The last bin holds its upper edge too, as in numpy.
        places[norms == self.edges[-1]] -= 1
        return places.bincount(minlength=len(self.bins))


@torch.no_grad()
def layer_norm_summary(weight: Tensor, bias: Tensor | None = None, k: float = 3.0) -> LayerNormSummary:
    """The norms of a LayerNorm's gain and bias, how far they can shift the outputs, and their outliers.

    Args:
        weight: g, `(d,)`, any floating dtype and device; computed in float64 on the CPU.
        bias: b, `(d,)`; None, as in RMSNorm and in norms without bias, is zero.
        k: an outlier is more than k deviations from the mean over the dimensions; Kovaleva et al. (2021) take 3.

    Raises:
        UserError: if shapes or dtypes do not fit, there are no dimensions, or values are not finite.
    """
    gain = _parameter(weight, "weight")
    shift = torch.zeros_like(gain) if bias is None else _parameter(bias, "bias")
    if shift.shape != gain.shape:
        raise UserError(f"bias has shape {tuple(shift.shape)}; expected {tuple(gain.shape)} like the weight")
    gain_norm, bias_norm = norms_of(torch.stack([gain, shift])) / math.sqrt(len(gain))
    used = gain != 0
    return LayerNormSummary(
        gain=gain_norm.item(),
        bias=bias_norm.item(),
        ratio=(bias_norm / gain_norm).item(),
        bias_over_gain=(shift[used] / gain[used]).sum().item(),
        zero_gains=int((~used).sum()),
        outlier_gains=tuple(outlier_dimensions(gain, k).tolist()),
        outlier_biases=tuple(outlier_dimensions(shift, k).tolist()),
    )


def _parameter(values: Tensor, name: str) -> Tensor:
    if values.dim() != 1 or not len(values):
        raise UserError(f"{name} has shape {tuple(values.shape)}; expected (d,)")
    if not values.is_floating_point():
        raise UserError(f"{name} is {values.dtype}; expected a floating dtype")
    check_finite(values, f"the values of {name}")
    return values.detach().cpu().double()
