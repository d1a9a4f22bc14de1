r"""The dimensions behind the average cosine: their contributions, and the cosine without them or after z-scoring.

Timkey and van Schijndel (*All Bark and No Bite: Rogue Dimensions in Transformer Language Models Obscure
Representational Quality*, EMNLP 2021) show that one to five rogue dimensions can make up nearly all of the average
cosine of a layer, and recommend to standardize each dimension before cosines are compared.

`CosineContributions` needs one pass. The cosines after a change of the points need a second pass over the same points,
or a sample of them, because the change depends on sums over all points: the dimensions to remove, or the mean and the
standard deviation of each dimension. The norms of the changed points cannot be derived from the sums of a first pass.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures.cosine import AverageCosine
from istar.measures.input_checks import check_finite, select_rows, upcast_blocks, upcast_vector
from istar.measures.spectrum import DimensionMoments


def cosine_contributions(points: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Compute the contribution of each dimension to the average cosine, `(d,)`; see `CosineContributions`.

    Args:
        points: `(..., d)` of any floating dtype; blocks of points are converted to float64 one after the other.
        mask: `(...)`, bool or 0/1; points where the mask is 0 are ignored.

    Raises:
        UserError: for fewer than 2 points other than zero, or values that are not finite.

    >>> cosine_contributions(torch.tensor([[1.0, 1.0], [5.0, 5.0]])).round(decimals=6).tolist()
    [0.5, 0.5]
    """
    rows = select_rows(points, mask)
    return CosineContributions(rows.shape[1], rows.device).update(rows).contributions()


def cosine_without_dimensions(points: Tensor, dimensions: Sequence[int] | Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the average cosine of points without some dimensions; see `CosineWithoutDimensions`.

    Args:
        points: as in `cosine_contributions`.
        dimensions: indices of the dimensions to leave out.
        mask: as in `cosine_contributions`.

    Returns:
        0-d float64 (float32 on MPS), in [-1 / (n - 1), 1].

    Raises:
        UserError: as `cosine_contributions`, or if the dimensions are not distinct indices that leave one dimension.

    >>> cosine_without_dimensions(torch.tensor([[9.0, 1.0, 0.0], [9.0, 0.0, 1.0]]), [0]).item()
    0.0
    """
    rows = select_rows(points, mask)
    return CosineWithoutDimensions(rows.shape[1], dimensions, rows.device).update(rows).compute()


def standardized_cosine(points: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the average cosine after z-scoring each dimension with the moments of the same points, in two passes.

    See `StandardizedCosine` for streams, whose moments a first pass computes.

    Args:
        points: as in `cosine_contributions`.
        mask: as in `cosine_contributions`.

    Returns:
        0-d float64 (float32 on MPS), in [-1 / (n - 1), 1]; near 0 for most clouds, because they are then centered.

    Raises:
        UserError: as `cosine_contributions`.

    >>> shifted = torch.tensor([[101.0, 1.0], [102.0, 1.0], [101.0, 2.0], [102.0, 2.0]])
    >>> round(standardized_cosine(shifted).item(), 6)
    -0.333333
    """
    rows = select_rows(points, mask)
    moments = DimensionMoments.of(rows)
    return StandardizedCosine(moments.mean, moments.deviation(correction=0)).update(rows).compute()


class CosineContributions(AverageCosine):
    r"""Accumulates, in addition to `AverageCosine`, the sum of the squares of each coordinate of the unit vectors.

    The contribution of dimension i to the cosine of u and v is :math:`u_i v_i / (\lVert u \rVert \lVert v \rVert)`; its
    average over pairs of points is :math:`CC(f_i)` of Timkey and van Schijndel (2021). They sample random
    pairs. This class averages over all pairs of different points, which is exact in one pass: with the sums
    :math:`S_i = \sum_a \hat x_{a,i}` and :math:`Q_i = \sum_a \hat x_{a,i}^2`,

    .. math::
        CC(f_i) = \frac{S_i^2 - Q_i}{n (n - 1)}, \qquad \sum_i CC(f_i) = \text{InterSim}

    The points are not centered. Contributions describe the basis: they change under rotation, unlike their sum. A
    dimension of large variance but mean 0 contributes next to nothing. Not differentiable.

    Args:
        dim: d, at least 1.
        device: device of the sums; points must be on the same device. Sums are float64 (float32 on MPS).

    Attributes:
        count, zeros, total: as in `AverageCosine`.
        squares: Q, `(d,)`.
    """

    def __init__(self, dim: int, device: torch.device | str | None = None) -> None:
        super().__init__(dim, device)
        self.squares = torch.zeros_like(self.total)

    @torch.no_grad()
    def update(self, points: Tensor, mask: Tensor | None = None) -> Self:
        """Add a batch: `points` `(..., d)`, `mask` `(...)`. Returns this accumulator.

        Raises:
            UserError: if shapes do not match, or the points are not floating.
        """
        super().update(points, mask)
        return self

    def _add_units(self, units: Tensor, is_nonzero: Tensor) -> None:
        """Add the unit vectors `(n, d)` of points, and a mask `(n,)` that is false where a point is zero."""
        super()._add_units(units, is_nonzero)
        self.squares = self.squares + units.square().sum(0)

    @torch.no_grad()
    def add_sums(self, total: Tensor, squares: Tensor, count: Tensor, zeros: Tensor) -> None:
        """Add points by the sums over their unit vectors.

        Args:
            total: sum of the unit vectors, `(d,)`.
            squares: sum of the squares of each coordinate of the unit vectors, `(d,)`.
            count: number of nonzero points, 0-d.
            zeros: number of zero points, 0-d.
        """
        self.total = self.total + total
        self.squares = self.squares + squares
        self.count = self.count + count
        self.zeros = self.zeros + zeros

    def merge(self, other: AverageCosine) -> Self:
        """Add the sums of another accumulator of the same dimension. Returns this accumulator."""
        if not isinstance(other, CosineContributions):
            raise UserError("cannot merge an AverageCosine into CosineContributions: it holds no sums of squares")
        super().merge(other)
        self.squares = self.squares + other.squares.to(self.squares)
        return self

    def contributions(self) -> Tensor:
        """Return the contributions `(d,)`, each in [-1, 1], whose sum is `compute()`.

        `top_share(contributions, k)` is the share of the average cosine that the k largest contribute.

        Raises:
            UserError: for fewer than 2 points other than zero, or points that are not finite.
        """
        self._check_sums(min_count=2)
        return (self.total.square() - self.squares) / (self.count * (self.count - 1))

    def top_dimensions(self, k: int) -> Tensor:
        """Return the k dimensions that contribute most, by descending contribution: int64 `(k,)`.

        Raises:
            UserError: as `contributions`, or if k is not 1 to d.
        """
        if not 1 <= k <= self.dim:
            raise UserError(f"k is {k}; expected 1 to {self.dim}, the number of dimensions")
        # A stable sort makes the choice among equal contributions the same on all devices.
        return self.contributions().argsort(descending=True, stable=True)[:k]


class CosineWithoutDimensions(AverageCosine):
    r"""Accumulates the sums of `AverageCosine` over points without some dimensions, usually the rogue ones.

    `compute()` is the average cosine over all pairs of different points in the remaining d - k dimensions (Timkey and
    van Schijndel, 2021). The dimensions must be known first, for example from
    `CosineContributions.top_dimensions` in an earlier pass or on a sample. Not centered. A point that is zero in all
    remaining dimensions counts as a zero vector. A common direction that is spread over many dimensions is not
    removed with a few of them.

    Args:
        dim: d, the number of dimensions of the points, at least 2.
        dimensions: distinct indices of the dimensions to leave out, fewer than d; may be empty.
        device: device of the sums; points must be on the same device.

    Attributes:
        dimensions: the dimensions that are left out, ascending.
        count, zeros, total: as in `AverageCosine`; the total is 0 in these dimensions.

    Raises:
        UserError: for other dimensions.
    """

    def __init__(self, dim: int, dimensions: Sequence[int] | Tensor, device: torch.device | str | None = None) -> None:
        super().__init__(dim, device)
        indices = [int(index) for index in dimensions]
        if len(set(indices)) < len(indices) or len(indices) >= dim or not all(0 <= index < dim for index in indices):
            raise UserError(
                f"the dimensions to leave out are {indices}; expected distinct indices from 0 to {dim - 1}, not all"
            )
        self.dimensions = torch.tensor(sorted(indices), dtype=torch.int64, device=self.total.device)

    def update(self, points: Tensor, mask: Tensor | None = None) -> Self:
        """Add a batch: `points` `(..., d)` with all dimensions, `mask` `(...)`. Returns this accumulator.

        Raises:
            UserError: if shapes do not match, or the points are not floating.
        """
        for block in upcast_blocks(select_rows(points, mask, self.dim)):
            super().update(block.index_fill(1, self.dimensions, 0))
        return self

    def merge(self, other: AverageCosine) -> Self:
        """Add the sums of another accumulator without the same dimensions. Returns this accumulator."""
        if not isinstance(other, CosineWithoutDimensions) or other.dimensions.tolist() != self.dimensions.tolist():
            raise UserError("cannot merge cosines without other dimensions; give both accumulators the same")
        super().merge(other)
        return self


class StandardizedCosine(AverageCosine):
    r"""Accumulates the sums of `AverageCosine` over z-scored points, :math:`z_i = (x_i - \mu_i) / \sigma_i`.

    `compute()` is the average cosine over all pairs of different z-scored points (Timkey and van Schijndel, 2021,
    who call it standardization). The mean and the standard deviation must be known first: from a `DimensionMoments` of
    an earlier pass over the same points, or approximately from a sample. With the moments of the same points, the
    z-scores have mean 0, and the average is near 0, unless the lengths of the points depend on their directions: what
    remains measures such an asymmetry and not a common direction. Cosines of single pairs, as in similarity tasks, are
    then comparable.

    Args:
        mean: `(d,)`, mean of each dimension, floating; its device is that of the sums.
        deviation: `(d,)`, standard deviation of each dimension. Dimensions whose deviation is 0, or so small relative
            to their mean that it is a rounding error, are left out.

    Attributes:
        mean, scale: mean, and 1 / deviation or 0, `(d,)` each.
        count, zeros, total: as in `AverageCosine`, of the z-scored points.

    Raises:
        UserError: if the shapes differ, a value is not finite, a deviation is negative or all are 0.
    """

    def __init__(self, mean: Tensor, deviation: Tensor) -> None:
        self.mean = upcast_vector(mean, "mean").detach()
        deviation = upcast_vector(deviation, "deviation").detach().to(self.mean)
        check_finite(self.mean, "the means")
        check_finite(deviation, "the deviations")
        if deviation.shape != self.mean.shape:
            raise UserError(
                f"deviation has shape {tuple(deviation.shape)}; expected {tuple(self.mean.shape)} like the mean"
            )
        # The deviation of equal numbers that are not 0 is a rounding error of their mean.
        is_varying = deviation > 16 * torch.finfo(deviation.dtype).eps * self.mean.abs()
        if (deviation < 0).any() or not is_varying.any():
            raise UserError("the deviations are negative or all 0; expected those of points that are not all equal")
        self.scale = torch.where(is_varying, 1 / deviation, 0)
        super().__init__(len(self.mean), self.mean.device)

    def update(self, points: Tensor, mask: Tensor | None = None) -> Self:
        """Add a batch: `points` `(..., d)` before z-scoring, `mask` `(...)`. Returns this accumulator.

        Raises:
            UserError: if shapes do not match, or the points are not floating.
        """
        for block in upcast_blocks(select_rows(points, mask, self.dim)):
            super().update((block - self.mean) * self.scale)
        return self

    def merge(self, other: AverageCosine) -> Self:
        """Add the sums of another accumulator with the same mean and deviation. Returns this accumulator."""
        if (
            not isinstance(other, StandardizedCosine)
            or not torch.equal(other.mean.to(self.mean), self.mean)
            or not torch.equal(other.scale.to(self.scale), self.scale)
        ):
            raise UserError("cannot merge cosines of other z-scores; give both accumulators the same moments")
        super().merge(other)
        return self
