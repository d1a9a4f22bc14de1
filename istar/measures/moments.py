"""Streaming count, mean and scatter of a point cloud: the sufficient statistics of every covariance measure."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from istar.errors import UserError

_FULL = {"none", "ieee"}


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products in the dtype of their inputs: no autocast, no TF32 or bfloat16 in place of float32."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    with torch.autocast(device.type, enabled=False):
        if set(before) <= _FULL:
            # As nearly always; a training step comes here once a layer.
            yield
            return
        try:
            legacy = torch.get_float32_matmul_precision()
        except RuntimeError:  # The program uses the settings by backend alone; torch refuses a mix.
            legacy = None
        try:
            if legacy is not None:
                torch.set_float32_matmul_precision("highest")
            for backend in backends:
                backend.fp32_precision = "ieee"
            yield
        finally:
            if legacy is not None:
                torch.set_float32_matmul_precision(legacy)
            for backend, precision in zip(backends, before, strict=True):
                backend.fp32_precision = precision


class Moments:
    r"""Accumulates :math:`n = \sum w_i`, the mean :math:`m = \sum w_i x_i / n` and the scatter
    :math:`M = \sum w_i (x_i - m)(x_i - m)^T` of points that arrive in any number of batches.

    Each batch is summed about its own mean, in float32 or in the points' own dtype if that is wider, and merged
    into float64 accumulators by the parallel formula of Chan, Golub and LeVeque (1979). So neither a mean that is
    many times the deviation nor a long stream costs precision. Differentiable; detach the points for long streams.

    Args:
        dim: d, the number of dimensions, at least 1.
        device: where the accumulators live; points must be on the same device. Devices without float64 (MPS)
            accumulate in float32.

    Attributes:
        count: n, 0-d. mean: m, `(d,)`. scatter: M, `(d, d)`.
    """

    def __init__(self, dim: int, device: torch.device | str | None = None) -> None:
        if dim < 1:
            raise UserError(f"points have {dim} dimensions; expected at least 1")
        device = torch.device(device or "cpu")
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.count = torch.zeros((), dtype=dtype, device=device)
        self.mean = torch.zeros(dim, dtype=dtype, device=device)
        self.scatter = torch.zeros(dim, dim, dtype=dtype, device=device)

    @classmethod
    def of(cls, points: Tensor, mask: Tensor | None = None, weights: Tensor | None = None) -> Self:
        """The moments of one batch; see `update`."""
        if points.dim() < 2:
            raise UserError(f"points have shape {tuple(points.shape)}; expected (n, d)")
        return cls(points.shape[-1], points.device).update(points, mask, weights)

    @property
    def dim(self) -> int:
        return self.mean.shape[0]

    def update(self, points: Tensor, mask: Tensor | None = None, weights: Tensor | None = None) -> Self:
        """Add a batch of points.

        Args:
            points: `(..., d)`, any floating dtype.
            mask: `(...)`, bool or 0/1; points where it is 0 are left out, whatever they hold.
            weights: `(...)`, non-negative; a weight of 2 counts a point twice, 0 leaves it out.

        Returns:
            Itself.

        Raises:
            UserError: on shapes that do not fit, points that are not floating or weights that are negative.
        """
        self._check(points, mask, weights)
        if weights is not None:
            mask = weights > 0 if mask is None else mask.bool() & (weights > 0)
        points = points.reshape(-1, self.dim)
        weights = None if weights is None else weights.reshape(-1)
        if mask is not None:
            kept = mask.reshape(-1).bool()
            points = points[kept]
            weights = None if weights is None else weights[kept]
        if points.shape[0] == 0:
            return self
        with full_precision(points.device):
            self._add(*self._batch(points, weights))
        return self

    def merge(self, other: Self) -> Self:
        """Add what another accumulator has seen, as if its points had been seen here. Returns itself."""
        if other.dim != self.dim:
            raise UserError(f"cannot merge moments of {other.dim} dimensions into moments of {self.dim}")
        self._add(*(own.to(self.scatter) for own in other._sums()))
        return self

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> Self:
        """Replace by the moments of the union over all processes: one all-reduce of 1 + d + d^2 numbers.

        The result is equal on all processes. Not differentiable. Without an initialized process group, or with one
        process, nothing happens. Returns itself.
        """
        if _alone(group):
            return self
        total = self.count * self.mean
        # Sums about the origin are safe here: the accumulators are float64.
        second = self.scatter + torch.outer(total, self.mean)
        packed = torch.cat([self.count.reshape(1), total, second.reshape(-1)]).detach()
        dist.all_reduce(packed, group=group)
        self.count, total, second = packed[0], packed[1 : 1 + self.dim], packed[1 + self.dim :]
        self.mean = total / self.count.clamp(min=torch.finfo(total.dtype).tiny)
        self.scatter = second.reshape(self.dim, self.dim) - torch.outer(total, self.mean)
        return self

    def covariance(self, correction: int = 1) -> Tensor:
        """M / (n - correction), `(d, d)`; the unbiased estimator by default, as in `torch.cov`.

        Raises:
            UserError: with fewer than `correction + 1` points.
        """
        if self.count <= correction:
            needed = correction + 1
            raise UserError(f"{self.count:g} points have no covariance; expected at least {needed} points")
        return self.scatter / (self.count - correction)

    def _batch(self, points: Tensor, weights: Tensor | None) -> tuple[Tensor, ...]:
        return _batch_moments(points, weights, self.scatter.dtype)[:3]

    def _sums(self) -> tuple[Tensor, ...]:
        return self.count, self.mean, self.scatter

    def _add(self, count: Tensor, mean: Tensor, scatter: Tensor, *higher: Tensor) -> None:
        total = self.count + count
        share = count / total.clamp(min=torch.finfo(total.dtype).tiny)
        delta = mean - self.mean
        self.scatter = self.scatter + scatter + torch.outer(delta, delta) * (self.count * share)
        self.mean = self.mean + delta * share
        self.count = total

    def _check(self, points: Tensor, mask: Tensor | None, weights: Tensor | None) -> None:
        if points.dim() < 1 or points.shape[-1] != self.dim:
            raise UserError(f"points have shape {tuple(points.shape)}; expected (..., {self.dim})")
        if not points.is_floating_point():
            raise UserError(f"points are {points.dtype}; expected a floating dtype")
        for name, given in (("mask", mask), ("weights", weights)):
            if given is not None and given.shape != points.shape[:-1]:
                raise UserError(
                    f"{name} has shape {tuple(given.shape)}; expected {tuple(points.shape[:-1])} for points of shape "
                    f"{tuple(points.shape)}"
                )
        if weights is not None and not (weights >= 0).all():
            raise UserError("some weights are negative or NaN; expected how often each point counts")


class FourthMoments(Moments):
    r"""`Moments` that also hold :math:`F = \sum w_i \lVert x_i - m \rVert^4`, by which the variance of a sample
    covariance is known.

    When the mean moves, F takes in the other sums: with y = x - m and a step :math:`\delta` between two means,

    .. math::
        \sum w \lVert y + \delta \rVert^4 = F + 4 \delta^T t + 4 \delta^T M \delta
        + 2 \lVert \delta \rVert^2 \operatorname{tr} M + n \lVert \delta \rVert^4,
        \qquad t = \sum w \lVert y \rVert^2 y,

    so that t is kept, too: 1 + d numbers more, and no pass over d^3 or d^4 of them. Merging is exact.

    Attributes:
        third: t, `(d,)`. fourth: F, 0-d; the others as in `Moments`.
    """

    def __init__(self, dim: int, device: torch.device | str | None = None) -> None:
        super().__init__(dim, device)
        self.third = torch.zeros_like(self.mean)
        self.fourth = torch.zeros_like(self.count)

    def merge(self, other: Self) -> Self:
        """As `Moments.merge`, with moments that hold the fourth-order sum."""
        if not isinstance(other, FourthMoments):
            raise UserError("cannot merge Moments into FourthMoments: they hold no fourth-order sum")
        return super().merge(other)

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> Self:
        """As `Moments.all_reduce`, with a second all-reduce of d + 1 numbers.

        A second one, because fourth powers about the origin would cost twice the digits that squares do: each process
        first moves its sums to the common mean.
        """
        if _alone(group):
            return self
        own, mean, third, fourth = (self.count, self.scatter), self.mean, self.third, self.fourth
        super().all_reduce(group)
        packed = torch.cat([part.reshape(-1) for part in _moved(mean - self.mean, *own, third, fourth)]).detach()
        dist.all_reduce(packed, group=group)
        self.third, self.fourth = packed[:-1], packed[-1]
        return self

    def _batch(self, points: Tensor, weights: Tensor | None) -> tuple[Tensor, ...]:
        *sums, centered, missed = _batch_moments(points, weights, self.scatter.dtype)
        centered = centered - missed.to(centered.dtype)
        return *sums, *_higher_moments(centered, weights, self.scatter.dtype)

    def _sums(self) -> tuple[Tensor, ...]:
        return *super()._sums(), self.third, self.fourth

    def _add(self, count: Tensor, mean: Tensor, scatter: Tensor, *higher: Tensor) -> None:
        own = self._sums()
        super()._add(count, mean, scatter)
        ours, theirs = (
            _moved(mean - self.mean, count, scatter, third, fourth)
            for count, mean, scatter, third, fourth in (own, (count, mean, scatter, *higher))
        )
        self.third, self.fourth = ours[0] + theirs[0], ours[1] + theirs[1]


def _alone(group: dist.ProcessGroup | None) -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1


def _moved(delta: Tensor, count: Tensor, scatter: Tensor, third: Tensor, fourth: Tensor) -> tuple[Tensor, Tensor]:
    """The third and fourth sums of points about a centre that their mean is off by delta; see `FourthMoments`."""
    trace, square, across = scatter.trace(), delta @ delta, scatter @ delta
    moved = third + 2 * across + (trace + count * square) * delta
    return moved, fourth + 4 * delta @ (third + across) + square * (2 * trace + count * square)


def _batch_moments(points: Tensor, weights: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """(n, mean, scatter) of one batch in `dtype`, from products in float32 or the points' wider dtype; and of what they
    are made: the points about a nearby point, and what that misses of the mean.
    """
    points = points.to(torch.promote_types(points.dtype, torch.float32))
    # Any nearby point serves as the shift; what it misses of the mean is put right below.
    shift = points.detach().mean(0)
    centered = points - shift
    if weights is None:
        count = torch.full((), points.shape[0], dtype=dtype, device=points.device)
        weighted = centered
    else:
        weights = weights.to(points.dtype)
        count = weights.sum(dtype=dtype)
        weighted = centered * weights[:, None]
    residual = weighted.sum(0).to(dtype)
    missed = residual / count
    scatter = (weighted.T @ centered).to(dtype) - torch.outer(residual, missed)
    return count, shift.to(dtype) + missed, scatter, centered, missed


def _higher_moments(centered: Tensor, weights: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(third, fourth) of one batch about its mean, in `dtype`."""
    squares = centered.square().sum(-1)
    # Relative to the largest: their products with the points would leave float32 where the scatter does not.
    largest = squares.detach().max().clamp(min=torch.finfo(squares.dtype).tiny)
    relative = squares / largest
    weighted = relative if weights is None else relative * weights.to(relative.dtype)
    largest = largest.to(dtype)
    third = (centered.T @ weighted).to(dtype) * largest
    return third, weighted.to(dtype) @ relative.to(dtype) * largest.square()
