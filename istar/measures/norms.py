"""Norms of the points and of the mean of a cloud, and norms of the parameters of a LayerNorm."""

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from istar.errors import UserError
from istar.measures.accumulator import Accumulator
from istar.measures.dimension_moments import outlier_dimensions
from istar.measures.numerics import check_finite, row_norms, select_rows, upcast_blocks, upcast_vector, zero_vector


@dataclass(frozen=True)
class NormSummary:
    r"""Norms of n points, in the units of the points.

    Attributes:
        count: n.
        average: average norm, :math:`\frac{1}{n} \sum_i \lVert x_i \rVert_2`.
        mean_vector: norm of the mean :math:`\mu` of the points, :math:`\lVert \mu \rVert_2`; at most the average.
        ratio: mean_vector / average, in [0, 1] (*Too Much in Common*, Table 1); 0 if all points are zero.
        smallest, largest: smallest and largest norm.
        edges: edges of the histogram's bins, ascending; empty without a histogram.
        histogram: number of norms in each of the `len(edges) - 1` bins. A bin includes its lower edge; the last bin
            also includes its upper edge.
        below, above: number of norms below the first edge and above the last edge.
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
        bias_over_gain: :math:`\sum_i b_i / g_i` (equation 9) over the dimensions with :math:`g_i \ne 0`. If the sum
            is not 0, all outputs lie on one side of a hyperplane through the origin.
        zero_gains: number of dimensions with :math:`g_i = 0`, which are not in the sum.
        outlier_gains, outlier_biases: dimensions with an outlying gain or bias; see `outlier_dimensions`.
    """

    gain: float
    bias: float
    ratio: float
    bias_over_gain: float
    zero_gains: int
    outlier_gains: tuple[int, ...]
    outlier_biases: tuple[int, ...]


def norm_summary(points: Tensor, mask: Tensor | None = None, edges: Sequence[float] = ()) -> NormSummary:
    """Summarize the norms of one cloud; see `Norms` for streams of batches.

    Args:
        points: `(..., d)` of any floating dtype, on any device.
        mask: `(...)`, bool or 0/1; points where the mask is 0 are ignored.
        edges: as in `Norms`.

    Raises:
        UserError: as `Norms`, `Norms.update` and `Norms.compute`.

    >>> norm_summary(torch.tensor([[3.0, 4.0], [3.0, -4.0]])).ratio
    0.6
    """
    rows = select_rows(points, mask)
    return Norms(rows.shape[1], edges, rows.device).update(rows).compute()


class Norms(Accumulator):
    """Accumulates the norms, their histogram and the mean of a stream of batches. Not differentiable.

    Args:
        dim: d, at least 1.
        edges: edges of the histogram's bins, ascending; no histogram without edges.
        device: device of the sums; points must be on the same device. Sums are float64 (float32 on MPS).

    Attributes:
        count: number of points.
        norm_total: sum of the norms.
        total: sum of the points, `(d,)`.
        smallest, largest: smallest and largest norm.
        bins: number of norms below the first edge, in each bin, and above the last edge: `(len(edges) + 1,)`.
    """

    def __init__(self, dim: int, edges: Sequence[float] = (), device: torch.device | str | None = None) -> None:
        zeros = zero_vector(dim, device)
        edges = tuple(float(edge) for edge in edges)
        are_ascending = all(low < high for low, high in itertools.pairwise(edges))
        if len(edges) == 1 or not are_ascending or not all(map(math.isfinite, edges)):
            raise UserError(f"edges are {list(edges)}; expected at least 2 ascending numbers, or none")
        self.edges = self.add_state("edges", zeros.new_tensor(edges), "equal")
        self.count = self.add_state("count", zeros.new_zeros((), dtype=torch.int64), "sum")
        self.norm_total = self.add_state("norm_total", zeros.new_zeros(()), "sum")
        self.total = self.add_state("total", zeros, "sum")
        self.smallest = self.add_state("smallest", zeros.new_full((), math.inf), "min")
        self.largest = self.add_state("largest", zeros.new_full((), -math.inf), "max")
        self.bins = self.add_state("bins", zeros.new_zeros(len(edges) + 1 if edges else 0, dtype=torch.int64), "sum")

    @torch.no_grad()
    def update(self, points: Tensor, mask: Tensor | None = None) -> Self:
        """Add a batch: `points` `(..., d)`, `mask` `(...)`. Returns this accumulator.

        Raises:
            UserError: if shapes do not match, or the points are not floating.
        """
        rows = select_rows(points, mask, self.total.shape[0])
        for block in upcast_blocks(rows) if len(rows) else ():
            norms = row_norms(block)
            self.count = self.count + len(norms)
            self.norm_total = self.norm_total + norms.sum()
            self.total = self.total + block.sum(0)
            self.smallest = torch.minimum(self.smallest, norms.min())
            self.largest = torch.maximum(self.largest, norms.max())
            if len(self.edges):
                self.bins = self.bins + count_in_bins(norms, self.edges).long()
        return self

    def compute(self) -> NormSummary:
        """Return the summary of all points added so far.

        Raises:
            UserError: without points, or with points that are not finite.
        """
        if self.count == 0:
            raise UserError("0 points have no norms; expected at least 1")
        # No coordinate of the total is larger than the sum of the norms.
        check_finite(self.norm_total[None], "the points")
        average = (self.norm_total / self.count).item()
        mean_vector = row_norms(self.total[None] / self.count).item()
        below, *inner, above = self.bins.tolist() or (0, 0)
        return NormSummary(
            count=int(self.count),
            average=average,
            mean_vector=mean_vector,
            # If all points have the same direction, rounding can lift the ratio above 1.
            ratio=min(mean_vector / average, 1.0) if average > 0 else 0.0,
            smallest=self.smallest.item(),
            largest=self.largest.item(),
            edges=tuple(self.edges.tolist()),
            histogram=tuple(inner),
            below=below,
            above=above,
        )


def count_in_bins(norms: Tensor, edges: Tensor) -> Tensor:
    """Count the norms `(..., n)` below the first of k ascending edges, in each bin, and above the last.

    Returns the counts `(..., k + 1)` in the dtype of the norms. The host does not wait for a GPU.
    """
    # The last bin includes its upper edge, as in numpy.histogram.
    bins = torch.bucketize(norms, edges, right=True) - (norms == edges[-1]).long()
    counts = norms.new_zeros(*norms.shape[:-1], len(edges) + 1)
    return counts.scatter_add_(-1, bins, torch.ones_like(norms))


@torch.no_grad()
def norm_parameters(norm: nn.Module, dim: int) -> tuple[Tensor, Tensor] | None:
    r"""Measure the gain g and the bias b of a normalization :math:`g \odot n(x) + b` from its outputs.

    :math:`n(x)` divides x, or x minus its mean, by its root mean square. It leaves a vector v with mean 0 and mean
    square 1 as it is, so that g and b follow from the outputs for v and -v. Modules store the gain in different ways:
    Gemma, for example, multiplies by 1 + weight.

    Returns:
        The gain and the bias, `(dim,)` each, float64 on the CPU. None if the module is not a normalization of vectors
        `(dim,)`: it takes other inputs, or its output depends on their scale.
    """
    unit = torch.ones(dim, dtype=torch.float64, device="cpu")
    unit[1::2] = -1
    if dim % 2:
        unit[-3:] = unit.new_tensor([1.0, 1.0, -2.0]) / math.sqrt(2)
    # A large power of 2 makes the epsilon of the norm negligible, and products lose no digits.
    inputs = 2.0**12 * torch.stack([unit, -unit])
    try:
        # A module's dictionaries hold its weights. What else it carries is not copied: accelerate's hook holds all
        # offloaded weights. The forward of the class is without such hooks.
        shared = {id(value): value for value in vars(norm).values() if not isinstance(value, dict)}
        forward = partial(type(norm).forward, copy.deepcopy(norm, shared).cpu().double())
        outputs, scaled_outputs = forward(inputs[None])[0], forward(4 * inputs[None])[0]
        if not torch.allclose(outputs, scaled_outputs, rtol=1e-5, atol=0):
            return None
        plus, minus = outputs.double()
    except Exception:  # the types depend on what the module expects
        return None
    return (plus - minus) / (2 * unit), (plus + minus) / 2


@torch.no_grad()
def layer_norm_summary(weight: Tensor, bias: Tensor | None = None, k: float = 3.0) -> LayerNormSummary:
    """Summarize the gain and the bias of a LayerNorm: their norms, their ratios and their outlier dimensions.

    Args:
        weight: the gain g, `(d,)`, any floating dtype and device; computations are float64 on the CPU.
        bias: the bias b, `(d,)`; None means zero, as in RMSNorm and in norms without bias.
        k: an outlier is more than k standard deviations from the mean over the dimensions; Kovaleva et al. (2021)
            use 3.

    Raises:
        UserError: if shapes or dtypes do not match, there are no dimensions, or values are not finite.
    """
    gain = upcast_vector(weight.cpu(), "weight")
    bias = torch.zeros_like(gain) if bias is None else upcast_vector(bias.cpu(), "bias")
    if bias.shape != gain.shape:
        raise UserError(f"bias has shape {tuple(bias.shape)}; expected {tuple(gain.shape)} like the weight")
    gain_size, bias_size = row_norms(torch.stack([gain, bias])) / math.sqrt(len(gain))
    is_nonzero = gain != 0
    return LayerNormSummary(
        gain=gain_size.item(),
        bias=bias_size.item(),
        ratio=(bias_size / gain_size).item(),
        bias_over_gain=(bias[is_nonzero] / gain[is_nonzero]).sum().item(),
        zero_gains=int((~is_nonzero).sum()),
        outlier_gains=tuple(outlier_dimensions(gain, k).tolist()),
        outlier_biases=tuple(outlier_dimensions(bias, k).tolist()),
    )
