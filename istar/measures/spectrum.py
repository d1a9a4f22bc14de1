"""Singular values, effective rank and participation ratio of a cloud, and moments and outliers of its dimensions."""

from typing import Literal, get_args

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures.moments import Moments
from istar.measures.rows import (
    check_finite,
    check_matrix,
    select_rows,
    wide_blocks,
    wide_dtype,
    wide_vector,
    zero_vector,
)

OutlierRule = Literal["sigma", "mean", "median"]


@torch.no_grad()
def singular_values(points: Tensor | Moments, centered: bool = True) -> Tensor:
    r"""Compute the singular values of a cloud, of its centered points by default.

    The singular values of points are exact. Those of moments are the square roots of the eigenvalues of the scatter
    matrix M, or of :math:`M + n m m^T` if not centered. Moments do not need the points in memory, but singular values
    below 1e-8 of the largest are rounding errors (below 1e-3 to 1e-4 if float32 points were summed).

    Args:
        points: `(n, d)` of any floating dtype, decomposed in float64 (float32 on MPS), or the moments of a cloud.
        centered: subtract the mean first, as PCA does. The squares of the singular values, divided by n - 1, are then
            the variances of the principal components. If not centered, a mean far from the origin adds one large
            singular value, which is easily mistaken for a narrow cone (*Too Much in Common*, section 4.1).

    Returns:
        `(d,)`, descending, in the units of the points; zeros beyond the rank.

    Raises:
        UserError: for points of the wrong shape or dtype, moments without points, or values that are not finite.
    """
    if isinstance(points, Moments):
        if points.count < 1:
            raise UserError("0 points have no singular values; expected at least 1")
        scatter, mean = points.scatter.detach(), points.mean.detach()
        if not centered:
            scatter = scatter + points.count.detach() * torch.outer(mean, mean)
        check_finite(scatter, "the points")
        # Rounding can make eigenvalues that are zero negative.
        squares: Tensor = torch.linalg.eigvalsh(scatter).flip(0).clamp(min=0)
        return squares.sqrt()
    check_matrix(points, "points")
    wide = points.to(wide_dtype(points.device))
    values = torch.linalg.svdvals(wide - wide.mean(0) if centered else wide)
    padded: Tensor = torch.nn.functional.pad(values, (0, points.shape[1] - len(values)))
    return padded


def effective_rank(values: Tensor) -> Tensor:
    r"""Compute the effective rank, the exponential of the entropy of the normalized singular values.

    With :math:`p_i = \sigma_i / \sum_j \sigma_j`, it is :math:`\exp(-\sum_i p_i \log p_i)` (Roy and Vetterli, 2007).

    Args:
        values: singular values `(d,)` in any order. Variances are accepted, too; their effective rank is smaller, so
            reports should say which of the two were used.

    Returns:
        0-d float64 in [1, d]: d if all values are equal, 1 if only one is not zero. Scaling the values does not change
        it. Differentiable if no value is zero.

    Raises:
        UserError: unless the values are `(d,)`, finite, not negative and not all zero.

    >>> round(effective_rank(torch.tensor([2.0, 2.0, 0.0])).item(), 6)
    2.0
    """
    shares = variance_shares(values)
    entropy: Tensor = torch.special.entr(shares).sum()
    return entropy.exp()


def participation_ratio(variances: Tensor) -> Tensor:
    r"""Compute the participation ratio :math:`(\sum_i \lambda_i)^2 / \sum_i \lambda_i^2`.

    If k variances are equal and the others are zero, it is k. For the eigenvalues of a covariance, it is
    1 + (d - 1) IsoScore.

    Args:
        variances: `(d,)` in any order, for example the eigenvalues of a covariance or squared singular values.

    Returns:
        0-d float64 in [1, d]. Scaling the variances does not change it.

    Raises:
        UserError: as `effective_rank`.

    >>> round(participation_ratio(torch.tensor([3.0, 3.0, 3.0, 0.0])).item(), 6)
    3.0
    """
    return 1 / variance_shares(variances).square().sum()


def variance_shares(variances: Tensor) -> Tensor:
    """Divide each value by their sum; the result is `(d,)` in float64, in the given order.

    For the diagonal of a covariance, these are the shares of the total variance in each dimension; for its eigenvalues,
    the shares of the principal components.

    Raises:
        UserError: as `effective_rank`.
    """
    wide = wide_vector(variances, "the vector")
    check_finite(wide, "the values")
    if (wide < 0).any():
        raise UserError(f"the smallest value is {wide.min():g}; expected none below 0")
    largest = wide.detach().amax()
    if largest == 0:
        raise UserError("all values are zero: their shares are not defined")
    # Scaling first keeps the sum of very large numbers in range.
    scaled = wide / largest
    return scaled / scaled.sum()


def outlier_dimensions(
    values: Tensor, k: float = 3.0, rule: OutlierRule = "sigma", reference: Tensor | None = None
) -> Tensor:
    """Return the dimensions whose value is an outlier among all dimensions.

    The literature uses several definitions, of which this function implements three rules:

    - "sigma": the value differs from the mean over dimensions by more than k standard deviations. Kovaleva et al.
      (2021) use this rule with k = 3 for the gains and biases of a LayerNorm, as do Puccetti et al. (2022).
    - "mean": the absolute value exceeds k times the mean absolute reference. Rudman et al. (2023) use this rule with
      k = 5 for variances.
    - "median": the absolute value exceeds k times the median absolute reference.

    Outliers raise the mean and the standard deviation, so that many outliers can hide each other from the first two
    rules, but not from "median". In d dimensions, no value is more than (d - 1) / sqrt(d) standard deviations from the
    mean, so that "sigma" finds no outliers if d is small.

    Args:
        values: `(d,)`, one number per dimension, such as its mean, standard deviation, variance or gain.
        k: threshold factor, above 0.
        rule: see above.
        reference: `(d,)`, values whose mean or median is the typical size; by default `values`. For example,
            `outlier_dimensions(mean, 5, "median", reference=deviation)` compares means with standard deviations.
            Cannot be combined with "sigma".

    Returns:
        Indices in ascending order, int64, on the values' device; empty if there are no outliers.

    Raises:
        UserError: if shapes or dtypes do not match, values are not finite, or an argument has another value.
    """
    if rule not in get_args(OutlierRule):
        raise UserError(f"rule is {rule!r}; expected one of {', '.join(get_args(OutlierRule))}")
    if not k > 0:
        raise UserError(f"k is {k}; expected a number above 0")
    wide = wide_vector(values, "the vector")
    check_finite(wide, "the values")
    if rule == "sigma":
        if reference is not None:
            raise UserError("a reference was given with rule 'sigma'; expected it with 'mean' or 'median' alone")
        centered = wide - wide.mean()
        is_outlier = centered.abs() > k * centered.square().mean().sqrt()
        # Equal values are no outliers, though rounding can make them differ from their mean.
        return (is_outlier & (wide.amax() > wide.amin())).nonzero().squeeze(1)
    sizes = wide if reference is None else wide_vector(reference, "reference")
    check_finite(sizes, "the values of reference")
    if sizes.shape != wide.shape:
        raise UserError(f"reference has shape {tuple(sizes.shape)}; expected {tuple(wide.shape)} like the values")
    typical = sizes.abs().mean() if rule == "mean" else sizes.abs().quantile(0.5)
    return (wide.abs() > k * typical).nonzero().squeeze(1)


class DimensionMoments:
    r"""Accumulates mean, variance, skewness and kurtosis of each dimension over a stream of batches.

    The accumulated sums are :math:`M_p = \sum_i (x_i - m)^p` for p = 2, 3, 4. Each block is summed about its own mean
    and merged by the exact formulas of Pebay (2008). This keeps precision for long streams and for points whose mean is
    much larger than their deviation. Not differentiable.

    Args:
        dim: d, at least 1.
        device: device of the sums; points must be on the same device. Sums are float64 (float32 on MPS).

    Attributes:
        count: n, 0-d.
        mean: m, `(d,)`.
        m2, m3, m4: the sums of powers, `(d,)` each.
    """

    def __init__(self, dim: int, device: torch.device | str | None = None) -> None:
        self.mean = zero_vector(dim, device)
        self.count = self.mean.new_zeros(())
        self.m2, self.m3, self.m4 = (torch.zeros_like(self.mean) for _ in range(3))

    @classmethod
    def of(cls, points: Tensor, mask: Tensor | None = None) -> "DimensionMoments":
        """Create an accumulator from one batch; see `update`."""
        rows = select_rows(points, mask)
        return cls(rows.shape[1], rows.device).update(rows)

    @torch.no_grad()
    def update(self, points: Tensor, mask: Tensor | None = None) -> "DimensionMoments":
        """Add a batch: `points` `(..., d)`, any floating dtype; `mask` `(...)`, bool or 0/1. Returns this accumulator.

        Raises:
            UserError: if shapes do not match, or the points are not floating.
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
        """Add the points of another accumulator of the same dimension. Returns this accumulator."""
        if other.mean.shape != self.mean.shape:
            raise UserError(
                f"cannot merge moments of {other.mean.shape[0]} dimensions into moments of {self.mean.shape[0]}"
            )
        return self._add(*(value.to(self.mean) for value in (other.count, other.mean, other.m2, other.m3, other.m4)))

    def variance(self, correction: int = 1) -> Tensor:
        """Return M_2 / (n - correction), `(d,)`, in squared units of the points.

        Raises:
            UserError: with fewer than `correction + 1` points, or points that are not finite.
        """
        self._check(correction + 1)
        return self.m2 / (self.count - correction)

    def deviation(self, correction: int = 1) -> Tensor:
        """Return the standard deviation, the square root of `variance`, `(d,)`."""
        return self.variance(correction).sqrt()

    def skewness(self) -> Tensor:
        r"""Return :math:`\sqrt n M_3 / M_2^{3/2}`, `(d,)`, not corrected for bias; NaN where all coordinates are equal.

        Raises:
            UserError: without points, or with points that are not finite.
        """
        self._check(1)
        return self.count.sqrt() * self.m3 / self.m2.pow(1.5)

    def kurtosis(self, excess: bool = True) -> Tensor:
        r"""Return :math:`n M_4 / M_2^2`, minus 3 if `excess`, `(d,)`, not corrected for bias.

        The excess kurtosis is at least -2, 0 for a Gaussian and large if a few points are far from the mean. NaN where
        all coordinates are equal.

        Raises:
            UserError: without points, or with points that are not finite.
        """
        self._check(1)
        return self.count * self.m4 / self.m2.square() - (3 if excess else 0)

    def _add(self, count: Tensor, mean: Tensor, m2: Tensor, m3: Tensor, m4: Tensor) -> "DimensionMoments":
        if count == 0:
            return self
        a, b, n = self.count, count, self.count + count
        # Dividing the difference of the means by n keeps powers of the counts in range of float32.
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

    def _check(self, min_count: int) -> None:
        if self.count < min_count:
            raise UserError(f"{self.count:g} points have no such moment; expected at least {min_count}")
        check_finite(torch.stack([self.mean, self.m4]), "the points, or their fourth powers,")
