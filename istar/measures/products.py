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
    rows = _block_rows(dim, dtype) if device.type == "cpu" else max(count, 1)
    return (slice(first, min(first + rows, count)) for first in range(0, count, rows))


class Gram:
    r"""The lower half of :math:`X^T X`, of points X that come in portions of any size.

    On a CPU they are gathered in a block, which is multiplied when it is full: oneDNN makes a kernel for each shape
    that it meets and keeps it, and batches of texts have a shape each.

    Args:
        dim: d. device: of the points.
        dtype: of the sums.
        products: dtype of the points, that of the sums or a narrower one.

    Attributes:
        total: `(d, d)`, anything above the diagonal; all points are in it after `finish`.
    """

    def __init__(self, dim: int, device: torch.device, dtype: torch.dtype, products: torch.dtype) -> None:
        self.total = torch.zeros(dim, dim, dtype=dtype, device=device)
        self._products = products
        self._block: Tensor | None = None
        self._filled = 0

    def parts(self, count: int, kept: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
        """So many points in parts: which of them, and the memory `(n, d)` that they are to be written to by the time
        that the next part is asked for.

        Args:
            kept: `(count, d)`, memory to be used for them instead of the block.
        """
        dim, device = len(self.total), self.total.device
        if kept is None and device.type != "cpu":
            kept = self.total.new_empty(count, dim, dtype=self._products)
        if kept is not None:
            for chosen in slices(count, dim, self._products, device):
                yield chosen, kept[chosen]
                add_gram(self.total, kept[chosen])
            return
        first = 0
        while first < count:
            if self._block is None:
                rows = _block_rows(dim, self._products)
                by_columns = by_convolution(device, self._products)
                shape = (dim, rows) if by_columns else (rows, dim)
                block = self.total.new_empty(shape, dtype=self._products)
                self._block = block.T if by_columns else block
            part = self._block[self._filled : self._filled + count - first]
            yield slice(first, first + len(part)), part
            first, self._filled = first + len(part), self._filled + len(part)
            if self._filled == len(self._block):
                self.finish()

    def finish(self) -> Tensor:
        """Multiply what is gathered; returns the total."""
        if self._block is not None and self._filled:
            # torch changes what was made in inference mode nowhere else.
            with torch.inference_mode(self.total.is_inference()):
                add_gram(self.total, self._block[: self._filled])
            self._filled = 0
        return self.total


def _block_rows(dim: int, dtype: torch.dtype) -> int:
    return max(BLOCK // (dim * dtype.itemsize), 1)


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
