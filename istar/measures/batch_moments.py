"""Count, mean and scatter matrix of a batch of points, or of several layers of it, and their gradients."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures.numerics import BLOCK, accumulation_dtype, full_precision, matmul_precision

Precision = Literal["float32", "tf32", "bf16"]
"""Precision of the factors in products of points; float64 points are never rounded to float32 or tf32."""
MAX_STACKED_LAYER = 2**22
"""Numbers of a layer from which it is not copied into a stack: its operations take longer than their launches."""
STACK_ON_DEVICES = 2**26
"""Numbers of a stack of layers on devices other than a CPU, where it is `BLOCK`."""
PANEL_ROWS = 128
"""Rows of a symmetric product that a CPU computes at once, from their diagonal block on."""


class BatchMoments(NamedTuple):
    """Moments of a batch of points, or of k batches of equal size; `third` and `fourth` may be missing."""

    size: int | Tensor
    """Number of points of each batch: an integer, or a tensor, 0-d or `(k,)`."""
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
        n as an integer; m in float64 (float32 on MPS); M in float32, or in float64 for float64 points. Both are on the
        points' device. The mean and scatter of an empty batch are 0.
    """
    indices = mask_to_indices(mask) if indices is None else indices
    moments = _compute_moments([points], indices, "float32", is_exact=True)
    return moments._replace(mean=moments.mean[0])


def mean_and_scatter_of_layers(
    layers: Sequence[Tensor], rows: Sequence[Tensor | None], precision: Precision = "float32"
) -> list[BatchMoments]:
    r"""Compute the moments of each layer for a penalty, with few and large operations.

    Consecutive layers of the same shape, dtype, device and rows, with or without gradients, are stacked, up to
    `layers_per_stack`. A GPU waits for the host in a step of a small model; the twelve layers of BERT-base then take as
    many operations as one.

    Args:
        layers: points `(..., d)` of each layer.
        rows: for each layer, the points `(n, d)` that count: their indices, as `mask_to_indices` returns them, or a
            bool mask `(n,)`, with which the shapes in a compiled graph do not depend on the data; None for all.
        precision: of the factors in the two large matrix products: M in the forward pass and
            :math:`(x_i - m)(G + G^T)` in the backward pass. `tf32` is float32 on hardware without it. With bf16, the
            products are two to three times as fast on hardware that supports it, and IsoScore has a relative error of
            about 1e-5.

    Returns:
        The moments of each stack: the means `(k, d)` of its k layers, and the sum of their scatter matrices, both
        float32, or float64 for float64 points. The rounding of the means changes M by less than M's own rounding.

    Raises:
        UserError: in a second backward pass with bf16.
    """
    stacks: list[tuple[list[Tensor], Tensor | None]] = []
    latest_kind: Any = None
    num_free_places = 0
    for layer, layer_rows in zip(layers, rows, strict=True):
        # A layer without a gradient would cost a product in the backward pass for nothing.
        kind = layer.shape, layer.dtype, layer.device, layer.requires_grad
        if num_free_places and kind == latest_kind and layer_rows is stacks[-1][1]:
            stacks[-1][0].append(layer)
        else:
            stacks.append(([layer], layer_rows))
            latest_kind, num_free_places = kind, layers_per_stack(layer)
        num_free_places -= 1
    return [_compute_moments(stack, stack_rows, precision, is_exact=False) for stack, stack_rows in stacks]


def layers_per_stack(layer: Tensor) -> int:
    """Return how many layers like this one are stacked, at least 1."""
    if layer.numel() >= MAX_STACKED_LAYER:
        return 1
    limit = BLOCK if layer.device.type == "cpu" else STACK_ON_DEVICES
    return max(1, limit // max(1, layer.numel()))


def _compute_moments(
    layers: Sequence[Tensor], rows: Tensor | None, precision: Precision, is_exact: bool
) -> BatchMoments:
    """Return the moments of layers of the same shape as a stack; the arguments are as in `_MeanAndScatter`."""
    size: int | Tensor = layers[0].shape[:-1].numel() if rows is None else len(rows)
    if rows is not None and rows.dtype == torch.bool:
        size = rows.sum()
    return BatchMoments(size, *_MeanAndScatter.apply(rows, size, precision, is_exact, *layers))


class _MeanAndScatter(torch.autograd.Function):
    """Autograd function of the moments of k layers of points `(..., d)`, of which `size` count in each layer.

    It returns the means `(k, d)` and the sum of the scatter matrices `(d, d)`. Plain autograd would need two products
    in the backward pass, and would save a centered copy of the points. This function needs one product, and saves only
    the points, which the model keeps anyway. With `is_exact`, the means have the dtype and precision of accumulators.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor | None, size: int | Tensor, precision: Precision, is_exact: bool, *layers: Tensor
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(layers[0].dtype, torch.float32)
        share: Any = 1 / max(size, 1) if isinstance(size, int) else 1 / size.clamp(min=1).to(dtype)  # a mean of 0
        with matmul_precision(layers[0].device, precision):
            points = stack_rows(layers, rows)
            is_counted = isinstance(size, int) and size > 0
            means = points.mean(1, dtype=dtype) if is_counted else points.sum(1, dtype=dtype) * share
            factors = _center(points, means, rows, precision, is_owned=len(layers) > 1 or rows is not None)
            scatter = multiply_by_itself(factors.flatten(0, 1), dtype)
            if is_exact:
                # Correct the means and the scatter for the rounding errors of the means.
                residuals = factors.sum(1)
                means = means.to(accumulation_dtype(means.device)).add(residuals, alpha=share)
                scatter.addmm_(residuals.T, residuals, alpha=-share)
        # Rounded factors take half the memory of float32 points, which a model under autocast does not keep itself.
        ctx.save_for_backward(rows, means, *([factors] if precision == "bf16" else layers))
        ctx.options = precision, share, dtype, (len(layers), *layers[0].shape), layers[0].dtype
        return means, scatter

    @staticmethod
    def backward(ctx: Any, grad_means: Tensor, grad_scatter: Tensor) -> tuple[Tensor | None, ...]:
        precision, share, dtype, shape, layer_dtype = ctx.options
        if precision == "bf16" and torch.is_grad_enabled():
            raise UserError("products in bf16 have no second derivative; use compute='float32'")
        rows, means, *saved = ctx.saved_tensors
        with matmul_precision(means.device, precision):
            if precision == "bf16":
                [factors] = saved
            else:
                is_owned = len(saved) > 1 or rows is not None
                factors = _center(stack_rows(saved, rows), means.to(dtype), rows, precision, is_owned)
            rounded = {"out": factors.new_empty(grad_scatter.shape)} if precision == "bf16" else {}
            symmetric_grad = torch.add(grad_scatter, grad_scatter.T, **rounded)
            gradient = _matmul(factors.flatten(0, 1), symmetric_grad, dtype).view(factors.shape)
            alpha, shift = (share, grad_means) if isinstance(share, float) else (1, grad_means * share)
            gradient = gradient.add_(shift.to(dtype)[:, None], alpha=alpha).to(layer_dtype)
            if rows is not None and rows.dtype == torch.bool:
                gradient = gradient.masked_fill_(~rows[:, None], 0)
            elif rows is not None:
                gradient = gradient.new_zeros(shape).flatten(1, -2).index_copy_(1, rows, gradient)
        return None, None, None, None, *gradient.view(shape).unbind()


def stack_rows(layers: Sequence[Tensor], rows: Tensor | None) -> Tensor:
    """Return layers `(..., d)` as `(k, rows, d)`: the rows at indices, or all, with zeros where a mask is false.

    Without rows, a single contiguous layer is not copied.
    """
    points = layers[0][None] if len(layers) == 1 else torch.stack(list(layers))
    points = points.flatten(1, -2)
    if rows is None:
        return points
    return points.masked_fill(~rows[:, None], 0) if rows.dtype == torch.bool else points.index_select(1, rows)


def _center(points: Tensor, means: Tensor, rows: Tensor | None, precision: Precision, is_owned: bool) -> Tensor:
    """Return points `(k, n, d)` minus means `(k, d)`, with zeros where a mask `rows` is false.

    The result is bfloat16, or has the dtype of the means. It may overwrite points that are owned.
    """
    if precision == "bf16":
        centered = torch.sub(points, means[:, None], out=points.new_empty(points.shape, dtype=torch.bfloat16))
    elif is_owned and points.dtype == means.dtype:
        centered = points.sub_(means[:, None])
    else:
        centered = points - means[:, None]
    return centered.masked_fill_(~rows[:, None], 0) if rows is not None and rows.dtype == torch.bool else centered


def multiply_by_itself(factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the symmetric product F^T F `(d, d)` of factors `(n, d)` in `dtype`.

    A CPU computes little more than its upper half, which takes two thirds of the time at width 768. It uses `mm`,
    because the batched products of `istar.sums.stack_blocks.UpperPanels` are slow in bfloat16.
    """
    width = factors.shape[1]
    if factors.device.type != "cpu" or width <= PANEL_ROWS or torch.compiler.is_compiling():
        return _matmul(factors.T, factors, dtype)
    product = factors.new_empty(width, width)
    for start in range(0, width, PANEL_ROWS):
        end = start + PANEL_ROWS
        torch.mm(factors[:, start:end].T, factors[:, start:], out=product[start:end, start:])
        product[end:, start:end] = product[start:end, end:].T
    return product.to(dtype)


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
    indices = mask_to_indices(mask) if indices is None else indices
    points = points.reshape(-1, points.shape[-1])
    count, mean, scatter = mean_and_scatter(points, indices=indices)[:3]
    with full_precision(points.device):
        selected = points if indices is None else points.index_select(0, indices)
        centered = selected - mean.to(torch.promote_types(points.dtype, torch.float32))
        squares = centered.square().sum(-1)
        # Divide by the largest square, because fourth powers can overflow float32 where the scatter does not.
        # Divide by the smallest positive number if all points are equal or there are none.
        largest_square = torch.cat([squares.detach(), squares.new_full((1,), torch.finfo(squares.dtype).tiny)]).max()
        relative_squares = squares / largest_square
        wide_squares, largest_square = relative_squares.to(mean.dtype), largest_square.to(mean.dtype)
        third = (centered.T @ relative_squares).to(mean.dtype) * largest_square
        fourth = wide_squares @ wide_squares * largest_square.square()
    return BatchMoments(count, mean, scatter, third, fourth)
