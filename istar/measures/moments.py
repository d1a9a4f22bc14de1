"""Streaming count, mean and scatter of a point cloud: the sufficient statistics of every covariance measure."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from istar.errors import UserError
from istar.measures.processes import sum_over_processes, world_size

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


class CloudMoments(NamedTuple):
    """Moments of one cloud of points: see `mean_and_scatter` for the first three, `fourth_moments` for the others."""

    size: Tensor
    mean: Tensor
    scatter: Tensor
    third: Tensor | None = None
    fourth: Tensor | None = None


def counted_rows(mask: Tensor | None) -> Tensor | None:
    """Row numbers of the points that a mask counts, in points flattened to `(n, d)`; None if it counts all.

    The host waits for a device here, so compute them once for all layers.

    Args:
        mask: any shape, bool or 0/1; None counts all points.
    """
    if mask is None:
        return None
    rows = mask.reshape(-1).nonzero().squeeze(1)
    return None if len(rows) == mask.numel() else rows


def mean_and_scatter(
    points: Tensor,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    products: torch.dtype | None = None,
    rows: Tensor | None = None,
) -> CloudMoments:
    r"""Mean :math:`m = \sum w_i x_i / n` and scatter :math:`M = \sum w_i (x_i - m)(x_i - m)^T`, :math:`n = \sum w_i`.

    Differentiable in the points, as often as needed. With the incoming gradients g of m and G of M, and because the
    weighted points sum to zero about their mean, the gradient by a point is

    .. math::
        \frac{\partial L}{\partial x_i} = w_i \left(\frac{g}{n} + (x_i - m)(G + G^T)\right)

    Args:
        points: `(..., d)`, any floating dtype.
        mask: `(...)`, bool or 0/1. Points where it is 0 do not count, whatever they hold, and their gradient is 0.
        weights: `(...)`, non-negative; 1 for every point by default. Points of weight 0 do not count.
        products: dtype of the factors in the two large products, :math:`M` here and :math:`(x_i - m)(G + G^T)` in the
            backward pass; None takes the dtype of the sums. bfloat16 is two to three times as fast on hardware that
            supports it, and shifts IsoScore by about 1e-5 of itself. It has no second derivative.
        rows: `counted_rows` of a mask, instead of the mask; not with weights.

    Returns:
        n and m in float64 (float32 on MPS), M in float32, or in float64 for float64 points, all on the points' device.
        A cloud without points has mean 0 and scatter 0.

    Raises:
        UserError: in a second backward pass, if `products` is narrower than the sums.
    """
    points, rows, weights = _counted(points, mask, weights, rows)
    dtype = accumulator_dtype(points.device)
    if weights is None:
        number = len(points) if rows is None else len(rows)
        count = torch.full((), number, dtype=dtype, device=points.device)
    else:
        count = weights.sum(dtype=dtype)
    mean, scatter = _MeanAndScatter.apply(points, rows, weights, count, products)
    return CloudMoments(count, mean, scatter)


def _counted(
    points: Tensor, mask: Tensor | None, weights: Tensor | None, rows: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Points `(n, d)`, the rows that count, and their weights `(rows, 1)`."""
    points = points.reshape(-1, points.shape[-1])
    if weights is None:
        return points, counted_rows(mask) if rows is None else rows, None
    is_positive = weights > 0
    rows = counted_rows(is_positive if mask is None else is_positive & mask.bool())
    weights = weights.reshape(-1, 1).to(torch.promote_types(points.dtype, torch.float32))
    return points, rows, _select(weights, rows)


class _MeanAndScatter(torch.autograd.Function):
    """`mean_and_scatter` of those rows of points `(n, d)` that count.

    Plain autograd would compute two products in the backward pass, one for each factor of the scatter, and would keep a
    centered copy of the points. This function computes one product and keeps the points, which a model keeps anyway.
    """

    @staticmethod
    def forward(
        ctx: Any,
        points: Tensor,
        rows: Tensor | None,
        weights: Tensor | None,
        count: Tensor,
        products: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        with full_precision(points.device):
            # An empty cloud has mean 0.
            count = torch.where(count > 0, count, 1)
            counted = _select(points, rows)
            dtype = torch.promote_types(points.dtype, torch.float32)
            shift = (_weighted(counted, weights).sum(0, dtype=dtype) / count).to(dtype)
            centered = counted - shift
            factors = centered.to(products or dtype)
            scatter = _product(_weighted(factors, weights).T, factors, dtype)
            # `shift` is the mean but for rounding, which these corrections undo.
            residual = _weighted(centered, weights).sum(0)
            offset = residual / count
            mean = shift.to(count.dtype) + offset
            scatter -= torch.outer(residual, offset)
        ctx.is_rounded = factors.dtype != dtype
        # Rounded factors take half the memory of the points, which models under autocast do not keep themselves.
        ctx.save_for_backward(factors if ctx.is_rounded else points, rows, weights, count, mean)
        ctx.shape, ctx.dtype = points.shape, points.dtype
        return mean, scatter

    @staticmethod
    def backward(ctx: Any, grad_mean: Tensor, grad_scatter: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.is_rounded and torch.is_grad_enabled():
            raise UserError("products in bfloat16 have no second derivative; use compute='float32'")
        points, rows, weights, count, mean = ctx.saved_tensors
        wide = torch.promote_types(ctx.dtype, torch.float32)
        with full_precision(points.device):
            factors = points if ctx.is_rounded else _select(points, rows) - mean.to(wide)
            symmetric = (grad_scatter + grad_scatter.T).to(factors.dtype)
            shift = (grad_mean / count).to(wide)
            if ctx.is_rounded:
                gradient = _product(factors, symmetric, wide).add_(shift)
            else:
                gradient = torch.addmm(shift, factors, symmetric)
            gradient = _weighted(gradient, weights).to(ctx.dtype)
            if rows is not None:
                gradient = gradient.new_zeros(ctx.shape).index_copy(0, rows, gradient)
        return gradient, None, None, None, None


def _select(points: Tensor, rows: Tensor | None) -> Tensor:
    return points if rows is None else points.index_select(0, rows)


def _weighted(points: Tensor, weights: Tensor | None) -> Tensor:
    return points if weights is None else points * weights.to(points.dtype)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Matrix product in `dtype`, of factors that may be narrower; CUDA also sums the narrower ones in `dtype`."""
    if left.dtype != dtype and left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def fourth_moments(
    points: Tensor, mask: Tensor | None = None, weights: Tensor | None = None, rows: Tensor | None = None
) -> CloudMoments:
    r"""`mean_and_scatter`, and the higher sums that `FourthMoments` holds.

    The gradient of :math:`t = \sum w_i \lVert x_i - m \rVert^2 (x_i - m)` and
    :math:`F = \sum w_i \lVert x_i - m \rVert^4` is plain autograd's, which keeps copies of the points.

    Args: as in `mean_and_scatter`.

    Returns:
        As `mean_and_scatter`, with t `(d,)` and F (0-d) in float64 (float32 on MPS).
    """
    count, mean, scatter = mean_and_scatter(points, mask, weights, rows=rows)[:3]
    points, rows, weights = _counted(points, mask, weights, rows)
    with full_precision(points.device):
        centered = _select(points, rows) - mean.to(torch.promote_types(points.dtype, torch.float32))
        third, fourth = _higher_moments(centered, None if weights is None else weights.squeeze(1), mean.dtype)
    return CloudMoments(count, mean, scatter, third, fourth)


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


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
        dtype = accumulator_dtype(device)
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
        if points.numel() > 0:
            self._add(self._of_batch(points, mask, weights))
        return self

    def merge(self, other: Self) -> Self:
        """Add what another accumulator has seen, as if its points had been seen here. Returns itself."""
        if other.dim != self.dim:
            raise UserError(f"cannot merge moments of {other.dim} dimensions into moments of {self.dim}")
        cloud = other.cloud()
        higher = (each if each is None else each.to(self.scatter) for each in (cloud.third, cloud.fourth))
        self._add(CloudMoments(*(each.to(self.scatter) for each in cloud[:3]), *higher))
        return self

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> Self:
        """Replace the moments by those of the union over all processes: one all-reduce of 1 + d + d^2 numbers.

        The result is equal on all processes, and differentiable as `sum_over_processes` is. Without an initialized
        process group, or with one process, nothing happens.

        Returns:
            Itself.
        """
        if world_size(group) == 1:
            return self
        total = self.count * self.mean
        # Sums about the origin are safe here: the accumulators are float64.
        second = self.scatter + torch.outer(total, self.mean)
        packed = sum_over_processes(torch.cat([self.count.reshape(1), total, second.reshape(-1)]), group)
        self.count, total, second = packed[0], packed[1 : 1 + self.dim], packed[1 + self.dim :]
        self.mean = total / torch.where(self.count > 0, self.count, 1)
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

    def _of_batch(self, points: Tensor, mask: Tensor | None, weights: Tensor | None) -> CloudMoments:
        return mean_and_scatter(points, mask, weights)

    def cloud(self) -> CloudMoments:
        """The moments as a tuple."""
        return CloudMoments(self.count, self.mean, self.scatter)

    def _add(self, cloud: CloudMoments) -> None:
        count, mean, scatter = cloud[:3]
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
        if world_size(group) == 1:
            return self
        before = self.cloud()
        super().all_reduce(group)
        moved = _moved(before.mean - self.mean, before)
        packed = sum_over_processes(torch.cat([part.reshape(-1) for part in moved]), group)
        self.third, self.fourth = packed[:-1], packed[-1]
        return self

    def _of_batch(self, points: Tensor, mask: Tensor | None, weights: Tensor | None) -> CloudMoments:
        return fourth_moments(points, mask, weights)

    def cloud(self) -> CloudMoments:
        return CloudMoments(self.count, self.mean, self.scatter, self.third, self.fourth)

    def _add(self, cloud: CloudMoments) -> None:
        before = self.cloud()
        super()._add(cloud)
        here, there = (_moved(part.mean - self.mean, part) for part in (before, cloud))
        self.third, self.fourth = here[0] + there[0], here[1] + there[1]


def merge_clouds(clouds: Sequence[CloudMoments]) -> Moments:
    """The moments of the union of several clouds of the same dimension; at least one cloud.

    Equals merging the clouds one after the other, with one pass over each scatter instead of several.

    Returns:
        `Moments`, or `FourthMoments` if the clouds have a fourth moment.

    Raises:
        UserError: if the clouds differ in their dimension.
    """
    widths = sorted({cloud.mean.shape[0] for cloud in clouds})
    if len(widths) > 1:
        raise UserError(f"the layers have {widths} dimensions; expected the same in all, so choose other layers")
    if clouds[0].fourth is not None:
        union = FourthMoments(clouds[0].mean.shape[0], clouds[0].mean.device)
        for cloud in clouds:
            union._add(cloud)
        return union
    counts = torch.stack([cloud.size for cloud in clouds])
    means = torch.stack([cloud.mean for cloud in clouds])
    moments = Moments(means.shape[1], means.device)
    moments.count = counts.sum()
    moments.mean = counts @ means / torch.where(moments.count > 0, moments.count, 1)
    distances = means - moments.mean
    with full_precision(means.device):
        moments.scatter = distances.T @ (counts[:, None] * distances)
    for cloud in clouds:
        moments.scatter = moments.scatter + cloud.scatter
    return moments


def _moved(delta: Tensor, cloud: CloudMoments) -> tuple[Tensor, Tensor]:
    """The third and fourth sums of a cloud about a centre that is `delta` away from its mean; see `FourthMoments`."""
    assert cloud.third is not None
    assert cloud.fourth is not None
    count, scatter = cloud.size, cloud.scatter.to(delta.dtype)
    trace, square, across = scatter.trace(), delta @ delta, scatter @ delta
    third = cloud.third + 2 * across + (trace + count * square) * delta
    return third, cloud.fourth + 4 * delta @ (cloud.third + across) + square * (2 * trace + count * square)


def _higher_moments(centered: Tensor, weights: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(third, fourth) of one batch about its mean, in `dtype`."""
    squares = centered.square().sum(-1)
    # Relative to the largest: their products with the points would leave float32 where the scatter does not.
    # No points at all, or equal ones, have a largest square, too: the smallest number there is.
    largest = torch.cat([squares.detach(), squares.new_full((1,), torch.finfo(squares.dtype).tiny)]).max()
    relative = squares / largest
    weighted = relative if weights is None else relative * weights.to(relative.dtype)
    largest = largest.to(dtype)
    third = (centered.T @ weighted).to(dtype) * largest
    return third, weighted.to(dtype) @ relative.to(dtype) * largest.square()
