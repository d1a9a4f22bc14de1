"""Moments of the single dimensions of a cloud, and outliers among the dimensions."""

from typing import Literal, Self, get_args

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures.accumulator import Accumulator
from istar.measures.numerics import check_finite, is_rounding, select_rows, upcast_blocks, upcast_vector, zero_vector

OutlierRule = Literal["sigma", "mean", "median"]


def outlier_dimensions(
    values: Tensor, k: float = 3.0, rule: OutlierRule = "sigma", reference: Tensor | None = None
) -> Tensor:
    """Return the indices of the dimensions with an outlying value.

    Three rules from the literature are available:

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
        reference: `(d,)`, values with the typical size as their mean or median; by default `values`. For example,
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
    values = upcast_vector(values, "the vector")
    if rule == "sigma":
        if reference is not None:
            raise UserError("a reference was given with rule 'sigma'; expected it with 'mean' or 'median' alone")
        centered = values - values.mean()
        is_outlier = centered.abs() > k * centered.square().mean().sqrt()
        # Rounding can make equal values differ from their mean; they are not outliers.
        return (is_outlier & (values.amax() > values.amin())).nonzero().squeeze(1)
    reference = values if reference is None else upcast_vector(reference, "reference")
    if reference.shape != values.shape:
        raise UserError(f"reference has shape {tuple(reference.shape)}; expected {tuple(values.shape)} like the values")
    typical_size = reference.abs().mean() if rule == "mean" else reference.abs().quantile(0.5)
    return (values.abs() > k * typical_size).nonzero().squeeze(1)


class DimensionMoments(Accumulator):
    r"""Accumulates mean, variance, skewness and kurtosis of each dimension over a stream of batches.

    The accumulated sums are :math:`M_p = \sum_i (x_i - m)^p` for p = 2, 3, 4. Each block is summed about its own mean
    and then about the mean of all points (Pebay, 2008). This keeps precision for long streams, and if the mean is much
    larger than the deviation. Not differentiable.

    Args:
        dim: d, at least 1.
        device: device of the sums; points must be on the same device. Sums are float64 (float32 on MPS).

    Attributes:
        count: n, 0-d.
        mean: m, `(d,)`.
        m2, m3, m4: the sums of powers, `(d,)` each.
    """

    def __init__(self, dim: int, device: torch.device | str | None = None) -> None:
        zeros = zero_vector(dim, device)
        self.count = self.add_state("count", zeros.new_zeros(()), "sum")
        self.mean = self.add_state("mean", zeros, "mean")
        self.m2 = self.add_state("m2", torch.zeros_like(zeros), "central")
        self.m3 = self.add_state("m3", torch.zeros_like(zeros), "central")
        self.m4 = self.add_state("m4", torch.zeros_like(zeros), "central")

    @classmethod
    def of(cls, points: Tensor, mask: Tensor | None = None) -> Self:
        """Create an accumulator from one batch; see `update`."""
        rows = select_rows(points, mask)
        return cls(rows.shape[1], rows.device).update(rows)

    @classmethod
    def about_mean(cls, origin: Tensor, count: Tensor, power_sums: Tensor) -> Self:
        r"""Create an accumulator from sums of powers of the differences of points from an origin near their mean.

        With the power sums :math:`P_p = \sum_i (x_i - o)^p` about the origin o, and the shift :math:`\delta = m - o` of
        the mean,

        .. math::
            M_2 = P_2 - n \delta^2, \quad M_3 = P_3 - 3 \delta P_2 + 2 n \delta^3, \quad
            M_4 = P_4 - 4 \delta P_3 + 6 \delta^2 P_2 - 3 n \delta^4.

        The farther the origin is from the mean, relative to the standard deviation, the more digits are lost.

        Args:
            origin: o, `(..., d)`. All may have leading dimensions, for the moments of several clouds at once.
            count: number n of points, `(...)`.
            power_sums: :math:`P_1` to :math:`P_4`, `(..., 4, d)`, in the dtype of the sums.
        """
        moments = cls(origin.shape[-1], origin.device)
        p1, p2, p3, p4 = power_sums.unbind(-2)
        moments.count = count.to(p1)
        count = moments.count[..., None]
        shift = p1 / count.clamp(min=1)
        moments.mean = origin + shift
        # Rounding must not make a sum of squares negative.
        moments.m2 = (p2 - count * shift.square()).clamp(min=0)
        moments.m3 = p3 - 3 * shift * p2 + 2 * count * shift.pow(3)
        moments.m4 = (p4 - 4 * shift * p3 + 6 * shift.square() * p2 - 3 * count * shift.pow(4)).clamp(min=0)
        return moments

    @torch.no_grad()
    def update(self, points: Tensor, mask: Tensor | None = None) -> Self:
        """Add a batch: `points` `(..., d)`, any floating dtype; `mask` `(...)`, bool or 0/1. Returns this accumulator.

        Raises:
            UserError: if shapes do not match, or the points are not floating.
        """
        rows = select_rows(points, mask, self.mean.shape[0])
        for block in upcast_blocks(rows) if len(rows) else ():
            mean = block.mean(0)
            powers = block - mean
            sums = torch.stack([torch.zeros_like(mean), *((powers**power).sum(0) for power in (2, 3, 4))])
            self.merge(type(self).about_mean(mean, mean.new_tensor(len(block)), sums))
        return self

    def recenter(self, mean: Tensor) -> dict[str, Tensor]:
        r"""Return the sums of the powers of :math:`x - c = (x - m) + \delta`, the differences from another center c."""
        delta, n = self.mean - mean, self.count
        return {
            "m2": self.m2 + n * delta.square(),
            "m3": self.m3 + 3 * delta * self.m2 + n * delta.pow(3),
            "m4": self.m4 + 4 * delta * self.m3 + 6 * delta.square() * self.m2 + n * delta.pow(4),
        }

    def variance(self, correction: int = 1) -> Tensor:
        """Return the variance M_2 / (n - correction) of each dimension, `(d,)`, in squared units of the points.

        Raises:
            UserError: with fewer than `correction + 1` points, or points that are not finite.
        """
        self._check_sums(min_count=correction + 1)
        return self.m2 / (self.count[..., None] - correction)

    def deviation(self, correction: int = 1) -> Tensor:
        """Return the standard deviation, the square root of `variance`, `(d,)`."""
        return self.variance(correction).sqrt()

    def skewness(self) -> Tensor:
        r"""Return the skewness of each dimension, :math:`\sqrt n M_3 / M_2^{3/2}`, `(d,)`, not corrected for bias.

        NaN where all coordinates are equal.

        Raises:
            UserError: without points, or with points that are not finite.
        """
        self._check_sums(min_count=1)
        return self.count[..., None].sqrt() * self.m3 / self.m2.pow(1.5)

    def kurtosis(self, excess: bool = True) -> Tensor:
        r"""Return the kurtosis of each dimension, :math:`n M_4 / M_2^2`, minus 3 if `excess`, `(d,)`.

        It is not corrected for bias. The excess kurtosis is at least -2, 0 for a Gaussian and large if a few points are
        far from the mean. NaN where all coordinates are equal.

        Raises:
            UserError: without points, or with points that are not finite.
        """
        self._check_sums(min_count=1)
        return self.count[..., None] * self.m4 / self.m2.square() - (3 if excess else 0)

    def _check_sums(self, min_count: int) -> None:
        if (self.count < min_count).any():
            raise UserError(f"{self.count.min():g} points have no such moment; expected at least {min_count}")
        check_finite(torch.stack([self.mean, self.m4]), "the points, or their fourth powers,")


def outlier_severity(points: Tensor | DimensionMoments) -> Tensor:
    r"""Compute how far the mean of a cloud is from the origin, :math:`\lVert m \rVert / \sqrt{\operatorname{tr} C}`.

    C is the population covariance, with the divisor n, so that the square is the squared norm of the mean divided by
    the mean squared distance of the points from the mean. It says nearly the same as the norm ratio: with the severity
    s, the norm of the mean is :math:`1 / \sqrt{1 + 1 / s^2}` of the root mean square of the norms.

    Args:
        points: `(n, d)` of any floating dtype, or the moments of the dimensions of a cloud.

    Returns:
        0-d float64 (float32 on MPS), at least 0. Scaling the points does not change it.

    Raises:
        UserError: for points of another shape or dtype or that are not finite, and if all points are equal.

    >>> round(outlier_severity(torch.tensor([[2.0, 1.0], [4.0, 1.0]])).item(), 6)
    3.162278
    """
    moments = points if isinstance(points, DimensionMoments) else DimensionMoments.of(points)
    total_variance, squared_norm = moments.variance(correction=0).sum(), moments.mean.square().sum()
    if is_rounding(total_variance, squared_norm, torch.finfo(squared_norm.dtype).eps):
        raise UserError("all points are equal: their mean has no deviations to compare it with; expected other points")
    return (squared_norm / total_variance).sqrt()
