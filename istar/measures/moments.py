"""Count, mean and scatter matrix of point clouds, for single batches and for streams of batches."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures.accumulator import Accumulator
from istar.measures.numerics import (
    accumulation_dtype,
    block_size,
    check_one_per_point,
    check_points,
    full_precision,
    zero_vector,
)


class BatchMoments(NamedTuple):
    """Moments of a batch of points, or of k batches of equal size; `third` and `fourth` may be missing."""

    size: Tensor
    """Number of points of each batch, 0-d or `(k,)`."""
    mean: Tensor
    """Mean m of each batch, `(d,)` or `(k, d)`."""
    scatter: Tensor
    """Scatter matrix about the mean, summed over the batches, `(d, d)`."""
    third: Tensor | None = None
    """Sum of |x - m|^2 (x - m) over one batch, `(d,)`."""
    fourth: Tensor | None = None
    """Sum of |x - m|^4 over one batch, 0-d."""


def mask_to_indices(mask: Tensor | None) -> Tensor | None:
    """Convert a mask, bool or 0/1, to the row indices `(n,)` of its nonzero entries in points flattened to `(n, d)`.

    Returns None without a mask, or if all its entries are nonzero. On a GPU, this call waits for the device, so it is
    made once per forward pass, and all layers use the same indices.
    """
    if mask is None:
        return None
    indices = mask.reshape(-1).nonzero().squeeze(1)
    return None if len(indices) == mask.numel() else indices


def mean_and_scatter(points: Tensor, mask: Tensor | None = None, indices: Tensor | None = None) -> BatchMoments:
    r"""Compute the mean :math:`m = \sum x_i / n` and the scatter :math:`M = \sum (x_i - m)(x_i - m)^T` of n points.

    Differentiable in the points, any number of times. Let :math:`g = \partial L / \partial m` and
    :math:`G = \partial L / \partial M` be the incoming gradients. The gradient with respect to a point is

    .. math::
        \frac{\partial L}{\partial x_i} = \frac{g}{n} + (G + G^T)(x_i - m)

    The dependence of M on :math:`x_i` through the mean contributes nothing, because
    :math:`\sum (x_i - m) = 0`. The backward pass is therefore one matrix product.

    Args:
        points: `(..., d)`, any floating dtype.
        mask: `(...)`, bool or 0/1. Points where the mask is 0 are ignored, even if they are NaN; their gradient is 0.
        indices: result of `mask_to_indices`, in place of a mask.

    Returns:
        n and m in float64 (float32 on MPS); M in float32, or in float64 for float64 points. All are on the points'
        device. The mean and scatter of an empty batch are 0.
    """
    points, indices = _flatten_points(points, mask, indices)
    size, means, scatter = _mean_and_scatter([points], indices, None)[:3]
    return BatchMoments(size[0], means[0], scatter)


def mean_and_scatter_of_layers(
    layers: Sequence[Tensor], indices: Sequence[Tensor | None], matmul_dtype: torch.dtype | None = None
) -> list[BatchMoments]:
    r"""Compute `mean_and_scatter` of each layer, with fewer and larger operations for small layers, and on a GPU.

    Consecutive layers of the same shape, dtype, device and indices, with or without gradients, are stacked, up to
    `layers_per_block`. A GPU waits for the host in a step of a small model; the twelve layers of BERT-base then take as
    many operations as two.

    Args:
        layers: points `(..., d)` of each layer.
        indices: for each layer, the result of `mask_to_indices`; layers that share it are stacked.
        matmul_dtype: dtype of the factors in the two large matrix products: M in the forward pass and
            :math:`(x_i - m)(G + G^T)` in the backward pass. None uses the dtype of M. With bfloat16, the products are
            two to three times as fast on hardware that supports it, IsoScore has a relative error of about 1e-5, and a
            second derivative raises `UserError`.

    Returns:
        The moments of each block, for `merge_moments`.

    Raises:
        UserError: in a second backward pass, if `matmul_dtype` is narrower than the dtype of M.
    """
    blocks: list[tuple[list[Tensor], Tensor | None]] = []
    latest_kind: Any = None
    for layer, layer_indices in zip(layers, indices, strict=True):
        # A layer without a gradient would cost a product in the backward pass for nothing.
        kind = layer.shape, layer.dtype, layer.device, layer.requires_grad, id(layer_indices)
        if kind == latest_kind and len(blocks[-1][0]) < layers_per_block(layer):
            blocks[-1][0].append(layer)
        else:
            blocks.append(([layer], layer_indices))
        latest_kind = kind
    return [_mean_and_scatter(block, block_indices, matmul_dtype) for block, block_indices in blocks]


def layers_per_block(layer: Tensor) -> int:
    """Return how many layers like this one are stacked: as many as fit into a block of `block_size`, at least 1."""
    return max(1, block_size(layer.device) // max(1, layer.numel()))


def _mean_and_scatter(
    layers: Sequence[Tensor], indices: Tensor | None, matmul_dtype: torch.dtype | None
) -> BatchMoments:
    """Return the moments of layers of the same shape, of which `indices` are the rows that count."""
    flat_layers = [layer if layer.dim() == 2 else layer.reshape(-1, layer.shape[-1]) for layer in layers]
    num_points, device = len(flat_layers[0]) if indices is None else len(indices), layers[0].device
    sizes = torch.full((len(layers),), num_points, dtype=accumulation_dtype(device), device=device)
    return BatchMoments(sizes, *_MeanAndScatter.apply(indices, matmul_dtype, *flat_layers))


def _flatten_points(points: Tensor, mask: Tensor | None, indices: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if points.dim() != 2:  # `reshape` would add an operation to the autograd graph in any case.
        points = points.reshape(-1, points.shape[-1])
    return points, mask_to_indices(mask) if indices is None else indices


class _MeanAndScatter(torch.autograd.Function):
    """Autograd function of `mean_and_scatter`, for k layers of points `(n, d)` and the indices of those that count.

    It returns the means `(k, d)` and the sum of the scatter matrices `(d, d)`. Plain autograd would need two products
    in the backward pass, and would save a centered copy of the points. This function needs one product, and saves only
    the points, which the model keeps anyway.
    """

    @staticmethod
    def forward(
        ctx: Any, indices: Tensor | None, matmul_dtype: torch.dtype | None, *layers: Tensor
    ) -> tuple[Tensor, Tensor]:
        device = layers[0].device
        with full_precision(device):
            points = _stack_rows(layers, indices)
            num_layers, num_points, dim = points.shape
            dtype = torch.promote_types(points.dtype, torch.float32)
            share = 1 / max(num_points, 1)  # The mean of an empty batch is 0.
            shifts = points.mean(1, dtype=dtype) if num_points else points.new_zeros(num_layers, dim, dtype=dtype)
            centered = _subtract(points, shifts, is_view=num_layers == 1 and indices is None)
            factors = (centered if matmul_dtype is None else centered.to(matmul_dtype)).flatten(0, 1)
            scatter = _matmul(factors.T, factors, dtype)
            # `shifts` equal the means only up to rounding; correct the means and the scatter for the difference.
            residuals = centered.sum(1)
            means = shifts.to(accumulation_dtype(device)).add(residuals, alpha=share)
            scatter.addmm_(residuals.T, residuals, alpha=-share)
        ctx.is_rounded = factors.dtype != dtype
        # Rounded factors take half the memory of float32 points, which a model under autocast does not keep itself.
        ctx.save_for_backward(indices, means, *([factors] if ctx.is_rounded else layers))
        ctx.shape, ctx.dtype, ctx.share = (num_layers, *layers[0].shape), points.dtype, share
        return means, scatter

    @staticmethod
    def backward(ctx: Any, grad_means: Tensor, grad_scatter: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.is_rounded and torch.is_grad_enabled():
            raise UserError("products in bfloat16 have no second derivative; use compute='float32'")
        indices, means, *saved = ctx.saved_tensors
        dtype = torch.promote_types(ctx.dtype, torch.float32)
        num_layers, _, dim = ctx.shape
        with full_precision(means.device):
            if ctx.is_rounded:
                [factors] = saved
            else:
                is_view = num_layers == 1 and indices is None
                factors = _subtract(_stack_rows(saved, indices), means.to(dtype), is_view).flatten(0, 1)
            symmetric_grad = (grad_scatter + grad_scatter.T).to(factors.dtype)
            gradient = _matmul(factors, symmetric_grad, dtype).view(num_layers, -1, dim)
            gradient = gradient.add_(grad_means.to(dtype)[:, None], alpha=ctx.share).to(ctx.dtype)
            if indices is not None:
                gradient = gradient.new_zeros(ctx.shape).index_copy_(1, indices, gradient)
        return None, None, *gradient.unbind()


def _stack_rows(layers: Sequence[Tensor], indices: Tensor | None) -> Tensor:
    """Return the rows of layers `(n, d)` at the indices, or all, as `(k, rows, d)`; a view of a single layer."""
    selected = [_select_rows(layer, indices) for layer in layers]
    return selected[0][None] if len(selected) == 1 else torch.stack(selected)


def _subtract(points: Tensor, means: Tensor, is_view: bool) -> Tensor:
    """Return points `(k, n, d)` minus means `(k, d)`: in place, unless the points are a view or of a narrower dtype."""
    if is_view or points.dtype != means.dtype:
        return points - means[:, None]
    return points.sub_(means[:, None])


def _select_rows(points: Tensor, indices: Tensor | None) -> Tensor:
    return points if indices is None else points.index_select(0, indices)


def _matmul(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix product in `dtype`. On CUDA, products of factors of a narrower dtype are also summed in it."""
    if left.dtype == dtype:
        return left @ right
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def fourth_moments(points: Tensor, mask: Tensor | None = None, indices: Tensor | None = None) -> BatchMoments:
    r"""Compute `mean_and_scatter` and the sums :math:`t = \sum \lVert x_i - m \rVert^2 (x_i - m)` and
    :math:`F = \sum \lVert x_i - m \rVert^4`.

    Returns the result of `mean_and_scatter` with t `(d,)` as `third` and F (0-d) as `fourth`, both in float64 (float32
    on MPS). Plain autograd computes the gradients of t and F, and saves copies of the points.
    """
    count, mean, scatter = mean_and_scatter(points, mask, indices=indices)[:3]
    points, indices = _flatten_points(points, mask, indices)
    with full_precision(points.device):
        centered = _select_rows(points, indices) - mean.to(torch.promote_types(points.dtype, torch.float32))
        third, fourth = _sum_third_and_fourth_powers(centered, mean.dtype)
    return BatchMoments(count, mean, scatter, third, fourth)


def _sum_third_and_fourth_powers(centered: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the sums of |y|^2 y, `(d,)`, and of |y|^4, 0-d, over centered points y, in `dtype`."""
    squares = centered.square().sum(-1)
    # Divide by the largest square, because fourth powers can overflow float32 where the scatter does not.
    # Divide by the smallest positive number if all points are equal or there are none.
    largest_square = torch.cat([squares.detach(), squares.new_full((1,), torch.finfo(squares.dtype).tiny)]).max()
    relative_squares = squares / largest_square
    largest_square = largest_square.to(dtype)
    third = (centered.T @ relative_squares).to(dtype) * largest_square
    wide_squares = relative_squares.to(dtype)
    fourth = wide_squares @ wide_squares * largest_square.square()
    return third, fourth


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
    counts = torch.cat([batch.size.reshape(-1) for batch in batches])
    means = torch.cat([batch.mean.reshape(-1, widths[0]) for batch in batches])
    moments = Moments(widths[0], means.device)
    narrowest = max(torch.finfo(batch.scatter.dtype).eps for batch in batches)
    moments.epsilon = moments.epsilon.clamp(min=narrowest)
    moments.count = counts.sum()
    moments.mean = counts @ means / torch.where(moments.count > 0, moments.count, 1)
    differences = means - moments.mean
    with full_precision(means.device):
        moments.scatter = differences.T @ (counts[:, None] * differences)
    moments.scatter = add_matrices(moments.scatter, [batch.scatter for batch in batches])
    return moments


def add_matrices(total: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Return `total` plus all matrices of the same shape, in the dtype of `total`.

    Differentiable, any number of times. The gradient is converted to the dtype of the matrices once, and not once for
    each of them, as it is by `total + matrix`.
    """
    total = _AddMatrices.apply(total, *matrices)
    return total


class _AddMatrices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, *matrices: Tensor) -> Tensor:
        ctx.dtypes = [matrix.dtype for matrix in matrices]
        total = total.clone()
        for matrix in matrices:
            total += matrix
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        gradients = {dtype: gradient.to(dtype) for dtype in set(ctx.dtypes)}
        return gradient, *(gradients[dtype] for dtype in ctx.dtypes)


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

    count: Tensor
    mean: Tensor
    scatter: Tensor
    epsilon: Tensor

    def __init__(self, dim: int, device: torch.device | str | None = None) -> None:
        zeros = zero_vector(dim, device)
        self.add_state("count", zeros.new_zeros(()), "sum")
        self.add_state("mean", zeros, "mean")
        self.add_state("scatter", zeros.new_zeros(dim, dim), "central")
        self.add_state("epsilon", zeros.new_zeros(()), "max")

    @classmethod
    def of(cls, points: Tensor, mask: Tensor | None = None) -> Self:
        """Create an accumulator from one batch; see `update`."""
        if points.dim() < 2:
            raise UserError(f"points have shape {tuple(points.shape)}; expected (n, d)")
        return cls(points.shape[-1], points.device).update(points, mask)

    @property
    def dim(self) -> int:
        """The number of dimensions d."""
        return self.mean.shape[0]

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

    def _compute_batch_moments(self, points: Tensor, mask: Tensor | None) -> BatchMoments:
        return mean_and_scatter(points, mask)

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

    third: Tensor
    fourth: Tensor

    def __init__(self, dim: int, device: torch.device | str | None = None) -> None:
        super().__init__(dim, device)
        self.add_state("third", torch.zeros_like(self.mean), "central")
        self.add_state("fourth", torch.zeros_like(self.count), "central")

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
            origin: o, `(d,)`.
            sums: n, :math:`\sum y`, M', t' and F', in the dtype of the accumulators.
            epsilon: machine epsilon of the narrowest dtype used to sum a batch, 0-d.
        """
        count, total, scatter, third, fourth = sums
        moments = cls(len(origin), scatter.device)
        shift = total / torch.where(count > 0, count, 1)
        squared_distance, trace, scatter_shift = shift @ shift, scatter.trace(), scatter @ shift
        moments.count, moments.mean, moments.epsilon = count, origin.to(total) + shift, epsilon
        moments.scatter = torch.addr(scatter, -count * shift, shift)
        moments.third = third - 2 * scatter_shift - (trace - 2 * count * squared_distance) * shift
        moments.fourth = (
            fourth + 4 * shift @ (scatter_shift - third) + squared_distance * (2 * trace - 3 * count * squared_distance)
        )
        return moments

    def recenter(self, mean: Tensor) -> dict[str, Tensor]:
        """Return the scatter matrix, t and F about another center."""
        third, fourth = _recenter(BatchMoments(self.count, self.mean, self.scatter, self.third, self.fourth), mean)
        return {**super().recenter(mean), "third": third, "fourth": fourth}

    def _compute_batch_moments(self, points: Tensor, mask: Tensor | None) -> BatchMoments:
        return fourth_moments(points, mask)

    def add_batch(self, batch: BatchMoments) -> None:
        """Add the points of a batch by their moments, the result of `fourth_moments`."""
        previous = BatchMoments(self.count, self.mean, self.scatter, self.third, self.fourth)
        super().add_batch(batch)
        (third, fourth), (batch_third, batch_fourth) = _recenter(previous, self.mean), _recenter(batch, self.mean)
        self.third, self.fourth = third + batch_third, fourth + batch_fourth


def _recenter(batch: BatchMoments, center: Tensor) -> tuple[Tensor, Tensor]:
    """Return the third and fourth moments of a batch about `center` instead of its mean; see `FourthMoments`."""
    assert batch.third is not None
    assert batch.fourth is not None
    delta = batch.mean - center
    count, scatter = batch.size, batch.scatter.to(delta.dtype)
    trace, squared_distance, scatter_delta = scatter.trace(), delta @ delta, scatter @ delta
    third = batch.third + 2 * scatter_delta + (trace + count * squared_distance) * delta
    third_term = 4 * delta @ (batch.third + scatter_delta)
    fourth = batch.fourth + third_term + squared_distance * (2 * trace + count * squared_distance)
    return third, fourth
