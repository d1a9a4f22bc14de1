"""Count, mean and scatter matrix of a batch of points, or of several layers of it, and their gradients."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures.numerics import accumulation_dtype, block_size, full_precision


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
        squares = centered.square().sum(-1)
        # Divide by the largest square, because fourth powers can overflow float32 where the scatter does not.
        # Divide by the smallest positive number if all points are equal or there are none.
        largest_square = torch.cat([squares.detach(), squares.new_full((1,), torch.finfo(squares.dtype).tiny)]).max()
        relative_squares = squares / largest_square
        wide_squares, largest_square = relative_squares.to(mean.dtype), largest_square.to(mean.dtype)
        third = (centered.T @ relative_squares).to(mean.dtype) * largest_square
        fourth = wide_squares @ wide_squares * largest_square.square()
    return BatchMoments(count, mean, scatter, third, fourth)
