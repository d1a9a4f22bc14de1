r"""Contributions of dimensions to the average cosine, and the cosine without some of them or after z-scoring.

Timkey and van Schijndel (*All Bark and No Bite: Rogue Dimensions in Transformer Language Models Obscure
Representational Quality*, EMNLP 2021) show that one to five rogue dimensions can make up nearly all of the average
cosine of a layer, and recommend to standardize each dimension before cosines are compared.

The contributions need one pass over the points. The cosines after a change of the points need all points at once, or a
sample of them, because the change depends on sums over all points: the dimensions to remove, or the mean and the
standard deviation of each dimension. The norms of the changed points cannot be derived from the sums of a first pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures.cosine import AverageCosine
from istar.measures.dimension_moments import DimensionMoments
from istar.measures.numerics import select_rows, upcast_blocks


def cosine_without_dimensions(points: Tensor, dimensions: Sequence[int] | Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the average cosine over all pairs of points without some dimensions, usually the rogue ones.

    A point that is zero in all remaining dimensions counts as a zero vector. A common direction that is spread over
    many dimensions is not removed with a few of them. Not centered.

    Args:
        points: `(..., d)` of any floating dtype; blocks of points are converted to float64 one after the other.
        dimensions: distinct indices of the dimensions to leave out, fewer than d; may be empty. See
            `CosineContributions.top_dimensions`.
        mask: `(...)`, bool or 0/1; points where the mask is 0 are ignored.

    Returns:
        0-d float64 (float32 on MPS), in [-1 / (n - 1), 1].

    Raises:
        UserError: for fewer than 2 points other than zero, values that are not finite, or dimensions that are not
            distinct indices or leave none.

    >>> cosine_without_dimensions(torch.tensor([[9.0, 1.0, 0.0], [9.0, 0.0, 1.0]]), [0]).item()
    0.0
    """
    rows = select_rows(points, mask)
    dim, indices = rows.shape[1], [int(index) for index in dimensions]
    if len(set(indices)) < len(indices) or len(indices) >= dim or not all(0 <= index < dim for index in indices):
        raise UserError(
            f"the dimensions to leave out are {indices}; expected distinct indices from 0 to {dim - 1}, not all"
        )
    cosine = AverageCosine(dim, rows.device)
    index_tensor = torch.tensor(indices, dtype=torch.int64, device=rows.device)
    for block in upcast_blocks(rows):
        cosine.update(block.index_fill(1, index_tensor, 0))
    return cosine.compute()


def standardized_cosine(points: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Compute the average cosine over all pairs of z-scored points, :math:`z_i = (x_i - \mu_i) / \sigma_i`.

    Dimensions with a standard deviation of 0, or so small relative to their mean that it is a rounding error, are left
    out. The z-scores have mean 0, and the average is near 0, unless the lengths of the points depend on their
    directions: what remains measures such an asymmetry and not a common direction. Cosines of single pairs, as in
    similarity tasks, are then comparable.

    Args:
        points: as in `cosine_without_dimensions`.
        mask: as in `cosine_without_dimensions`.

    Returns:
        0-d float64 (float32 on MPS), in [-1 / (n - 1), 1]; near 0 for most clouds, because they are then centered.

    Raises:
        UserError: for fewer than 2 points other than zero, values that are not finite, or points that are all equal.

    >>> shifted = torch.tensor([[101.0, 1.0], [102.0, 1.0], [101.0, 2.0], [102.0, 2.0]])
    >>> round(standardized_cosine(shifted).item(), 6)
    -0.333333
    """
    rows = select_rows(points, mask)
    moments = DimensionMoments.of(rows)
    deviation = moments.deviation(correction=0)
    # The deviation of equal numbers that are not 0 is a rounding error of their mean.
    is_varying = deviation > 16 * torch.finfo(deviation.dtype).eps * moments.mean.abs()
    if not is_varying.any():
        raise UserError("the deviations of all dimensions are 0; expected points that are not all equal")
    scale = torch.where(is_varying, 1 / deviation, 0)
    cosine = AverageCosine(rows.shape[1], rows.device)
    for block in upcast_blocks(rows):
        cosine.update((block - moments.mean) * scale)
    return cosine.compute()


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
        self.squares = self.add_state("squares", torch.zeros_like(self.total), "sum")

    @torch.no_grad()
    def _add_units(self, units: Tensor, is_nonzero: Tensor) -> None:
        super()._add_units(units, is_nonzero)
        self.squares = self.squares + units.square().sum(0)

    def contributions(self) -> Tensor:
        """Return the contributions `(d,)`, each in [-1, 1]. Their sum is `compute()`.

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
