"""The two matrix products that covariances and their gradients consist of, at the speed of the hardware.

On CPUs torch multiplies float32 matrices by MKL, which on those not made by Intel reaches half the speed of oneDNN. The
way to oneDNN that torch leaves open is the convolution with kernels of one pixel, which is the same product.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

PANEL = 128
"""Columns of X whose products with themselves and all columns behind them are taken at once."""
BLOCK = 3 * 2**20
"""Bytes of the points that are centered at a time on a CPU, to be in its cache still when they are multiplied."""


def by_convolution(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of points like these are taken as convolutions."""
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()


def slices(count: int, dim: int, dtype: torch.dtype, device: torch.device) -> Iterator[slice]:
    """So many points `(dim,)` in blocks of `BLOCK` bytes; at once on other devices than CPUs, where kernels cost."""
    rows = max(BLOCK // (dim * dtype.itemsize) if device.type == "cpu" else count, 1)
    return (slice(first, min(first + rows, count)) for first in range(0, count, rows))


def times_transposed(left: Tensor, right: Tensor) -> Tensor:
    """A B^T of A `(m, k)` and B `(n, k)`, contiguous, as `(m, n)`."""
    if not by_convolution(left.device, left.dtype):
        return left @ right.T
    # Pixels in a column, their channels side by side in memory.
    image = left.view(1, len(left), 1, -1).permute(0, 3, 1, 2)
    product = torch.nn.functional.conv2d(image, right.view(*right.shape, 1, 1))
    return product.permute(0, 2, 3, 1).reshape(len(left), len(right))


def add_gram(total: Tensor, points: Tensor) -> None:
    r"""Add :math:`X^T X` to the lower triangle of `total`: about half of the product.

    Args:
        total: `(d, d)`; above the diagonal anything may come to stand.
        points: X `(n, d)`, fastest with contiguous columns where `by_convolution`, else with contiguous rows; of
            total's dtype, or bfloat16, whose products are rounded to it on a CPU before they are added.
    """
    # A device is faster with the whole product than with half of it in pieces.
    panel = PANEL if points.device.type == "cpu" else points.shape[1]
    for first in range(0, points.shape[1], panel):
        below, columns = points[:, first:], points[:, first : first + panel]
        target = total[first:, first : first + panel]
        if by_convolution(points.device, points.dtype):
            target.add_(times_transposed(below.T.contiguous(), columns.T.contiguous()))
        elif points.dtype == total.dtype:
            target.addmm_(below.T, columns)
        elif points.device.type == "cuda":
            target.add_(torch.mm(below.T, columns, out_dtype=total.dtype))
        else:
            target.add_(below.T @ columns)
