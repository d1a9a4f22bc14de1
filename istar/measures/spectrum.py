r"""Singular values, effective rank, participation ratio; what single dimensions hold, and which are outliers."""

from typing import Literal, get_args

import torch
from torch import Tensor

from istar.errors import NonFiniteError, UserError
from istar.measures.moments import Moments
from istar.measures.rows import check_dim, check_finite, check_matrix, select_rows, wide_blocks, wide_dtype

OutlierRule = Literal["sigma", "mean", "median"]


@torch.no_grad()
def singular_values(points: Tensor | Moments, centered: bool = True) -> Tensor:
    r"""Singular values of a cloud, largest first: of X, or of X less its mean.

    From moments they are the roots of the eigenvalues of the scatter M, or of :math:`M + n m m^T` for the raw ones:
    the points need not be kept, but what is below 1e-8 of the largest is rounding (below 1e-3 to 1e-4 where float32
    points were summed). From points they are exact.

    Args:
        points: `(n, d)` of any floating dtype, decomposed in float64 (float32 on MPS), or the moments of a cloud.
        centered: about the mean (the spectrum of PCA; squared and divided by n - 1, the variances of the components)
            or about the origin. A mean far from the origin adds one large value, which a plot of the raw ones shows
            as a cone (*Too Much in Common*, section 4.1).

    Returns:
        `(d,)`, descending, at least 0, in the points' units; zeros beyond the rank.

    Raises:
        UserError: for points of the wrong shape or dtype, moments without points, or values that are not finite.
    """
    if isinstance(points, Moments):
        return _from_moments(points, centered)
    check_matrix(points, "points")
    wide = points.to(wide_dtype(points.device))
    values = torch.linalg.svdvals(wide - wide.mean(0) if centered else wide)
    padded: Tensor = torch.nn.functional.pad(values, (0, points.shape[1] - len(values)))
    return padded


def effective_rank(values: Tensor) -> Tensor:
    r""":math:`\exp(-\sum_i p_i \log p_i)` with :math:`p_i = \sigma_i / \sum_j \sigma_j` (Roy and Vetterli, 2007).

    Args:
        values: the singular values `(d,)`, any order. Of the variances instead, it is the entropy rank of PCA, which
            is smaller: say which was taken.

    Returns:
        0-d, in [1, d]: d if all are equal, 1 if one is all; unchanged by scale. Float64, differentiable where no
        value is zero.

    Raises:
        UserError: unless they are `(d,)`, finite, not negative and not all zero.

    >>> round(effective_rank(torch.tensor([2.0, 2.0, 0.0])).item(), 6)
    2.0
    """
    shares = variance_shares(values)
    entropy: Tensor = torch.special.entr(shares).sum()
    return entropy.exp()


def participation_ratio(variances: Tensor) -> Tensor:
    r""":math:`(\sum_i \lambda_i)^2 / \sum_i \lambda_i^2`: how many equal variances would be as concentrated.

    Of the eigenvalues of a covariance it is 1 + (d - 1) IsoScore.

    Args:
        variances: `(d,)`, any order: eigenvalues of a covariance, or singular values squared.

    Returns:
        0-d, in [1, d], float64; unchanged by scale.

    Raises:
        UserError: as `effective_rank`.

    >>> round(participation_ratio(torch.tensor([3.0, 3.0, 3.0, 0.0])).item(), 6)
    3.0
    """
    return 1 / variance_shares(variances).square().sum()


def variance_shares(variances: Tensor) -> Tensor:
    """Each value over their sum, `(d,)`, in the given order, float64.

    Of a covariance's diagonal: the share of the variance that each dimension holds. Of its eigenvalues: the share of
    each principal component.

    Raises:
        UserError: as `effective_rank`.
    """
    wide = _per_dimension(variances, "values")
    if (wide < 0).any():
        raise UserError(f"the smallest value is {wide.min():g}; expected none below 0")
    largest = wide.detach().amax()
    if largest == 0:
        raise UserError("all values are zero: their shares are not defined")
    # The sum of very large numbers is out of range.
    scaled = wide / largest
    return scaled / scaled.sum()


def outlier_dimensions(
    values: Tensor, k: float = 3.0, rule: OutlierRule = "sigma", reference: Tensor | None = None
) -> Tensor:
    """Dimensions whose value stands out from the others'.

    The literature has no one definition; each of its kinds is a rule here:

    - "sigma": more than k standard deviations from the mean, both over the dimensions. Kovaleva et al. (2021) with
      k = 3 for the gains and biases of a LayerNorm; Puccetti et al. (2022) build on theirs.
    - "mean": absolutely more than k times the mean absolute reference. Rudman et al. (2023) with k = 5 for variances.
    - "median": absolutely more than k times the median absolute reference, which outliers do not move.

    With d dimensions no value is more than (d - 1) / sqrt(d) deviations from the mean, so that "sigma" finds nothing
    in few dimensions, and many outliers hide each other; "median" has neither weakness.

    Args:
        values: `(d,)`, one number per dimension: mean, deviation, variance, gain.
        k: how many times, above 0.
        rule: see above.
        reference: `(d,)`, what the typical size is taken from; the values themselves by default. Means are compared
            with the deviations: `outlier_dimensions(mean, 5, "median", reference=deviation)`. Not with "sigma".

    Returns:
        Indices, ascending, int64, on the values' device; possibly none.

    Raises:
        UserError: on shapes or dtypes that do not fit, values that are not finite, or an argument not among these.
    """
    if rule not in get_args(OutlierRule):
        raise UserError(f"rule is {rule!r}; expected one of {', '.join(get_args(OutlierRule))}")
    if not k > 0:
        raise UserError(f"k is {k}; expected a number above 0")
    wide = _per_dimension(values, "values")
    if rule == "sigma":
        if reference is not None:
            raise UserError("a reference was given with rule 'sigma'; expected it with 'mean' or 'median' alone")
        centered = wide - wide.mean()
        far = centered.abs() > k * centered.square().mean().sqrt()
        # Equal values differ from their mean by rounding alone.
        return (far & (wide.amax() > wide.amin())).nonzero().squeeze(1)
    sizes = wide if reference is None else _per_dimension(reference, "reference")
    if sizes.shape != wide.shape:
        raise UserError(f"reference has shape {tuple(sizes.shape)}; expected {tuple(wide.shape)} like the values")
    typical = sizes.abs().mean() if rule == "mean" else sizes.abs().quantile(0.5)
    return (wide.abs() > k * typical).nonzero().squeeze(1)


class DimensionMoments:
    r"""Accumulates each dimension's mean and its sums of powers :math:`M_p = \sum_i (x_i - m)^p`, p = 2, 3, 4.

    Each block is summed about its own mean and merged exactly by the formulas of Pebay (2008), so that neither a mean
    of many deviations nor a long stream costs precision. Not differentiable.

    Args:
        dim: d, at least 1.
        device: where the sums live; points must be on the same device. They are float64 (float32 on MPS).

    Attributes:
        count: n, 0-d. mean: `(d,)`. m2, m3, m4: `(d,)`.
    """

    def __init__(self, dim: int, device: torch.device | str | None = None) -> None:
        check_dim(dim)
        device = torch.device(device or "cpu")
        self.count = torch.zeros((), dtype=wide_dtype(device), device=device)
        self.mean = torch.zeros(dim, dtype=wide_dtype(device), device=device)
        self.m2, self.m3, self.m4 = (torch.zeros_like(self.mean) for _ in range(3))

    @classmethod
    def of(cls, points: Tensor, mask: Tensor | None = None) -> "DimensionMoments":
        """The moments of one batch; see `update`."""
        rows = select_rows(points, mask)
        return cls(rows.shape[1], rows.device).update(rows)

    @torch.no_grad()
    def update(self, points: Tensor, mask: Tensor | None = None) -> "DimensionMoments":
        """Add a batch: `points` `(..., d)`, any floating dtype; `mask` `(...)`, bool or 0/1. Returns itself.

        Raises:
            UserError: on shapes that do not fit or points that are not floating.
        """
        rows = select_rows(points, mask, self.mean.shape[0])
        for block in wide_blocks(rows) if len(rows) else ():
            mean = block.mean(0)
            centered = block - mean
            squares = centered.square()
            powers = (squares.sum(0), (squares * centered).sum(0), squares.square().sum(0))
            self._add(mean.new_tensor(len(block)), mean, *powers)
        return self

    def merge(self, other: "DimensionMoments") -> "DimensionMoments":
        """Add what another accumulator has seen, as if its points had been seen here. Returns itself."""
        if other.mean.shape != self.mean.shape:
            raise UserError(
                f"cannot merge moments of {other.mean.shape[0]} dimensions into moments of {self.mean.shape[0]}"
            )
        return self._add(*(value.to(self.mean) for value in (other.count, other.mean, other.m2, other.m3, other.m4)))

    def variance(self, correction: int = 1) -> Tensor:
        """M_2 / (n - correction), `(d,)`, in squared units of the points.

        Raises:
            UserError: with fewer than `correction + 1` points, or points that were not finite.
        """
        self._check(correction + 1)
        return self.m2 / (self.count - correction)

    def deviation(self, correction: int = 1) -> Tensor:
        """The root of `variance`, `(d,)`."""
        return self.variance(correction).sqrt()

    def skewness(self) -> Tensor:
        r""":math:`\sqrt n M_3 / M_2^{3/2}`, `(d,)`, not corrected for bias; NaN where all points are equal.

        Raises:
            UserError: without points, or with points that were not finite.
        """
        self._check(1)
        return self.count.sqrt() * self.m3 / self.m2.pow(1.5)

    def kurtosis(self, excess: bool = True) -> Tensor:
        r""":math:`n M_4 / M_2^2`, less 3 if `excess`, `(d,)`: 0 for a Gaussian, large where few points are far out.

        Not corrected for bias; at least -2 (or 1); NaN where all points are equal.

        Raises:
            UserError: without points, or with points that were not finite.
        """
        self._check(1)
        return self.count * self.m4 / self.m2.square() - (3 if excess else 0)

    def _add(self, count: Tensor, mean: Tensor, m2: Tensor, m3: Tensor, m4: Tensor) -> "DimensionMoments":
        if count == 0:
            return self
        a, b, n = self.count, count, self.count + count
        # d / n rather than d: the powers of the counts would be out of range in float32.
        delta = (mean - self.mean) / n
        weight = a * b * delta.square() * n
        self.m4 = (
            self.m4
            + m4
            + weight * delta.square() * (a * a - a * b + b * b)
            + 6 * delta.square() * (a * a * m2 + b * b * self.m2)
            + 4 * delta * (a * m3 - b * self.m3)
        )
        self.m3 = self.m3 + m3 + weight * delta * (a - b) + 3 * delta * (a * m2 - b * self.m2)
        self.m2 = self.m2 + m2 + weight
        self.mean = self.mean + delta * b
        self.count = n
        return self

    def _check(self, needed: int) -> None:
        if self.count < needed:
            raise UserError(f"{self.count:g} points have no such moment; expected at least {needed}")
        if not (self.mean.isfinite().all() and self.m4.isfinite().all()):
            raise NonFiniteError("the points, or their fourth powers, are not finite; look for NaN or infinite values")


def _from_moments(moments: Moments, centered: bool) -> Tensor:
    if moments.count < 1:
        raise UserError("0 points have no singular values; expected at least 1")
    scatter, mean = moments.scatter.detach(), moments.mean.detach()
    if not centered:
        scatter = scatter + moments.count.detach() * torch.outer(mean, mean)
    check_finite(scatter, "the points")
    # Rounding makes zero eigenvalues negative.
    values: Tensor = torch.linalg.eigvalsh(scatter).flip(0).clamp(min=0).sqrt()
    return values


def _per_dimension(values: Tensor, name: str) -> Tensor:
    """One number per dimension, float64."""
    if values.dim() != 1 or not len(values):
        raise UserError(f"{name} have shape {tuple(values.shape)}; expected (d,)")
    if not values.is_floating_point():
        raise UserError(f"{name} are {values.dtype}; expected a floating dtype")
    check_finite(values, name)
    return values.to(wide_dtype(values.device))
