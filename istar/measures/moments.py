"""Accumulators of the count, the mean and the scatter matrix of points over streams of batches."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures.accumulator import Accumulator
from istar.measures.batch_moments import BatchMoments, fourth_moments, mean_and_scatter
from istar.measures.numerics import check_one_per_point, check_points, full_precision, zero_vector


def merge_moments(batches: Sequence[BatchMoments]) -> "Moments":
    """Return the moments of the union of at least one batch: `FourthMoments` if the batches have a fourth moment.

    It needs one pass over each scatter matrix. Batches of different dimensions raise `UserError`.
    """
    widths = sorted({batch.scatter.shape[0] for batch in batches})
    if len(widths) > 1:
        raise UserError(f"the layers have {widths} dimensions; expected the same in all, so choose other layers")
    if batches[0].fourth is not None:
        merged = FourthMoments(widths[0], batches[0].mean.device)
        for batch in batches:
            merged.add_batch(batch)
        return merged
    moments = Moments(widths[0], batches[0].mean.device)
    means = torch.cat([batch.mean.reshape(-1, widths[0]).to(moments.mean) for batch in batches])
    sizes = [batch.size * means.new_ones(batch.mean.numel() // widths[0]) for batch in batches]
    counts = torch.cat(sizes)
    narrowest = max(torch.finfo(batch.scatter.dtype).eps for batch in batches)
    moments.epsilon = moments.epsilon.clamp(min=narrowest)
    moments.count = counts.sum()
    moments.mean = counts @ means / torch.where(moments.count > 0, moments.count, 1)
    differences = means - moments.mean
    with full_precision(means.device):
        moments.scatter = differences.T @ (counts[:, None] * differences)
    for batch in batches:
        moments.scatter = moments.scatter + batch.scatter
    return moments


class Moments(Accumulator):
    r"""Accumulates the count n, the mean :math:`m = \sum x_i / n` and the scatter matrix
    :math:`M = \sum (x_i - m)(x_i - m)^T` of a stream of batches.

    Each batch is summed about its own mean, in float32 or in the points' own dtype if that is wider. The sums are then
    merged into float64 accumulators by the parallel formula of Chan, Golub and LeVeque (1979). This keeps precision
    for long streams, and if the mean is much larger than the deviation. Differentiable; detach the points of long
    streams, or memory grows with every batch.

    Args:
        dim: d, the number of dimensions, at least 1.
        device: device of the accumulators; points must be on the same device. On MPS, the accumulators are float32.

    Attributes:
        count: n, 0-d.
        mean: m, `(d,)`.
        scatter: M, `(d, d)`.
        epsilon: machine epsilon of the narrowest dtype used to sum a batch, 0-d; 0 without batches.
    """

    _compute_batch_moments = staticmethod(mean_and_scatter)

    def __init__(self, dim: int, device: torch.device | str | None = None) -> None:
        zeros = zero_vector(dim, device)
        self.count = self.add_state("count", zeros.new_zeros(()), "sum")
        self.mean = self.add_state("mean", zeros, "mean")
        self.scatter = self.add_state("scatter", zeros.new_zeros(dim, dim), "central")
        self.epsilon = self.add_state("epsilon", zeros.new_zeros(()), "max")

    @classmethod
    def of(cls, points: Tensor, mask: Tensor | None = None) -> Self:
        """Create an accumulator from one batch; see `update`."""
        check_points(points)
        return cls(points.shape[-1], points.device).update(points, mask)

    @property
    def dim(self) -> int:
        """The number of dimensions d."""
        return self.mean.shape[-1]

    def update(self, points: Tensor, mask: Tensor | None = None) -> Self:
        """Add a batch of points. Returns this accumulator.

        Args:
            points: `(..., d)`, any floating dtype.
            mask: `(...)`, bool or 0/1; points where the mask is 0 are ignored, even if they are NaN.

        Raises:
            UserError: if shapes do not match, or the points are not floating.
        """
        check_points(points, self.dim)
        check_one_per_point(mask, "mask", points)
        if points.numel() > 0:
            self.add_batch(self._compute_batch_moments(points, mask))
        return self

    def covariance(self, correction: int = 1) -> Tensor:
        """Return M / (n - correction), `(d, d)`. The default is the unbiased estimator, as in `torch.cov`.

        Raises:
            UserError: for fewer than `correction + 1` points.
        """
        if self.count <= correction:
            needed = correction + 1
            raise UserError(f"{self.count:g} points have no covariance; expected at least {needed} points")
        return self.scatter / (self.count - correction)

    def recenter(self, mean: Tensor) -> dict[str, Tensor]:
        r"""Return the scatter matrix about another center c, :math:`M + n (m - c)(m - c)^T`."""
        delta = self.mean - mean
        return {"scatter": torch.addr(self.scatter, self.count * delta, delta)}

    def add_batch(self, batch: BatchMoments) -> None:
        """Add the points of a batch by their moments, the result of `mean_and_scatter`."""
        count, mean, scatter = batch[:3]
        total = self.count + count
        share = count / total.clamp(min=torch.finfo(total.dtype).tiny)
        delta = mean - self.mean
        # The sum of both scatter matrices and of (self.count * share) delta delta^T, in two passes over the matrices.
        self.scatter = torch.addr(self.scatter + scatter, delta * (self.count * share), delta)
        self.mean = self.mean + delta * share
        self.count = total
        self.epsilon = self.epsilon.clamp(min=torch.finfo(scatter.dtype).eps)


class FourthMoments(Moments):
    r"""Accumulates, in addition to `Moments`, the fourth moment :math:`F = \sum \lVert x_i - m \rVert^4`.

    F gives the variance of the sample covariance. When two batches are merged, the mean moves by some
    :math:`\delta`, and with y = x - m for each point x, F becomes

    .. math::
        \sum \lVert y + \delta \rVert^4 = F + 4 \delta^T t + 4 \delta^T M \delta
        + 2 \lVert \delta \rVert^2 \operatorname{tr} M + n \lVert \delta \rVert^4,
        \qquad t = \sum \lVert y \rVert^2 y.

    The accumulator therefore also keeps t. Merging is exact and needs d + 1 more numbers than `Moments`.

    Attributes:
        count, mean, scatter, epsilon: as in `Moments`.
        third: t, `(d,)`.
        fourth: F, 0-d.
    """

    _compute_batch_moments = staticmethod(fourth_moments)

    def __init__(self, dim: int, device: torch.device | str | None = None) -> None:
        super().__init__(dim, device)
        self.third = self.add_state("third", torch.zeros_like(self.mean), "central")
        self.fourth = self.add_state("fourth", torch.zeros_like(self.count), "central")

    @classmethod
    def about_mean(cls, origin: Tensor, sums: Sequence[Tensor], epsilon: Tensor) -> Self:
        r"""Create an accumulator from sums over points about an origin instead of about their mean.

        With the differences y = x - o from the origin, the shift :math:`\delta = \sum y / n` of the mean, and the
        sums :math:`M' = \sum y y^T`, :math:`t' = \sum \lVert y \rVert^2 y` and
        :math:`F' = \sum \lVert y \rVert^4`, the moments about the mean are

        .. math::
            M &= M' - n \delta \delta^T, \qquad
            t = t' - 2 M' \delta - (\operatorname{tr} M' - 2 n \lVert \delta \rVert^2) \delta, \\
            F &= F' - 4 \delta^T t' + 4 \delta^T M' \delta + 2 \lVert \delta \rVert^2 \operatorname{tr} M'
            - 3 n \lVert \delta \rVert^4.

        The farther the origin is from the mean, relative to the deviation of the points, the more digits are lost.

        Args:
            origin: o, `(..., d)`. All may have leading dimensions, for the moments of several clouds at once.
            sums: n, :math:`\sum y`, M', t' and F', in the dtype of the accumulators.
            epsilon: machine epsilon of the narrowest dtype used to sum a batch, `(...)`.
        """
        count, total, scatter, third, fourth = sums
        moments = cls(1, scatter.device)
        shift = total / torch.where(count > 0, count, 1)[..., None]
        squared_distance, trace = shift.square().sum(-1), scatter.diagonal(dim1=-2, dim2=-1).sum(-1)
        scatter_shift = (scatter @ shift[..., None]).squeeze(-1)
        moments.count, moments.mean, moments.epsilon = count, origin.to(total) + shift, epsilon
        moments.scatter = torch.addcmul(
            scatter, count[..., None, None] * shift[..., None], shift[..., None, :], value=-1
        )
        factor = trace - 2 * count * squared_distance
        moments.third = third - 2 * scatter_shift - factor[..., None] * shift
        moments.fourth = (
            fourth
            + 4 * (shift * (scatter_shift - third)).sum(-1)
            + squared_distance * (2 * trace - 3 * count * squared_distance)
        )
        return moments

    def recenter(self, mean: Tensor) -> dict[str, Tensor]:
        """Return the scatter matrix, t and F about another center."""
        third, fourth = _recenter(BatchMoments(self.count, self.mean, self.scatter, self.third, self.fourth), mean)
        return {**super().recenter(mean), "third": third, "fourth": fourth}

    def add_batch(self, batch: BatchMoments) -> None:
        """Add the points of a batch by their moments, the result of `fourth_moments`."""
        previous = BatchMoments(self.count, self.mean, self.scatter, self.third, self.fourth)
        super().add_batch(batch)
        (third, fourth), (batch_third, batch_fourth) = _recenter(previous, self.mean), _recenter(batch, self.mean)
        self.third, self.fourth = third + batch_third, fourth + batch_fourth


def _recenter(batch: BatchMoments, center: Tensor) -> tuple[Tensor, Tensor]:
    assert batch.third is not None
    assert batch.fourth is not None
    delta = batch.mean - center
    count, scatter = batch.size, batch.scatter.to(delta.dtype)
    trace, squared_distance, scatter_delta = scatter.trace(), delta @ delta, scatter @ delta
    third = batch.third + 2 * scatter_delta + (trace + count * squared_distance) * delta
    third_term = 4 * delta @ (batch.third + scatter_delta)
    fourth = batch.fourth + third_term + squared_distance * (2 * trace + count * squared_distance)
    return third, fourth
