"""A cloud of points that is read in blocks, and the checks of its shape and dtype."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from istar.errors import UserError

if TYPE_CHECKING:
    import numpy as np

MIN_CLOUD_POINTS = 4
"""Fewest points that are measured."""
_BLOCK_NUMBERS = 2**21
"""Numbers per block: 16 MiB in float64. Reading a .parquet file needs several times the memory of a block."""


@dataclass(frozen=True)
class Cloud:
    """Points of equal width, which may be too many for the memory.

    The blocks are floating, `(n, dim)`, in the dtype and on the device of the source. They share no memory with the
    source unless it is a tensor.
    """

    name: str
    num_points: int | None  # None for .jsonl, where only reading tells
    dim: int
    read_blocks: Callable[[int], Iterator[Tensor]]  # all points in order, at most this many at a time; repeatable
    read_spread_rows: Callable[[int], Tensor]  # at most this many points, from all over the source where it can seek

    @property
    def block_length(self) -> int:
        """A number of points per block that keeps a block at 16 MiB in float64 or below, at least 1."""
        return max(1, _BLOCK_NUMBERS // self.dim)


def cloud_of_slices(name: str, shape: Sequence[int], read_rows: Callable[[int, int], Tensor]) -> Cloud:
    """Make a cloud from `read_rows(start, stop)`, which returns these rows of a matrix of the given shape."""
    num_points, dim = shape

    def read_blocks(max_points: int) -> Iterator[Tensor]:
        for start in range(0, max(1, num_points), max_points):  # of no points, one empty block
            yield read_rows(start, min(start + max_points, num_points))

    def read_spread_rows(max_points: int) -> Tensor:
        num_rows = min(max_points, num_points)
        return torch.cat([read_rows(row, row + 1) for row in spread(num_rows, num_points)])

    return Cloud(name, num_points, dim, read_blocks, read_spread_rows)


def cloud_of_tensor(name: str, points: Tensor, min_points: int = 0) -> Cloud:
    """Make a cloud from a tensor on any device. Raises a `UserError` if it is not dense, or as `check_cloud` does."""
    if points.layout != torch.strided or points.is_nested:
        raise UserError(f"{name}: a sparse or nested tensor; expected a dense one, as from .to_dense()")
    if points.is_meta:
        raise UserError(f"{name}: a tensor on the device meta, which has no values; expected a device with memory")
    check_cloud(name, points.shape, points.dtype, points.is_floating_point(), ".float()", min_points)
    values = points.detach()
    return cloud_of_slices(name, points.shape, lambda start, stop: values[start:stop])


def cloud_of_array(name: str, points: "np.ndarray[Any, Any]", min_points: int = 0) -> Cloud:
    """Make a cloud from an array of any strides and byte order. Raises a `UserError` as `check_cloud` does."""
    import numpy as np

    # torch lacks NumPy's longer floats.
    is_floating = points.dtype.kind == "f" and points.dtype.itemsize <= 8
    check_cloud(name, points.shape, points.dtype, is_floating, '.astype("float32")', min_points)
    dtype = points.dtype.newbyteorder("=")
    # torch takes only arrays that may be written to and whose addresses ascend, so the rows are copied.
    return cloud_of_slices(
        name, points.shape, lambda start, stop: torch.from_numpy(np.array(points[start:stop], dtype, order="C"))
    )


def spread(count: int, total: int) -> list[int]:
    """Return `count` distinct indices below `total`, evenly spread and ascending; both ends if there are several.

    >>> spread(3, 9)
    [0, 4, 8]
    """
    return [round(place * (total - 1) / max(1, count - 1)) for place in range(count)]


def check_cloud(
    label: str, shape: Sequence[int], dtype: object, is_floating: bool, cast: str, min_points: int = 0
) -> None:
    """Raise a `UserError` unless values of this shape and dtype are points `(n, d)`. The message begins with the label.

    `cast` is the call that converts integers, such as `.float()`.
    """
    if len(shape) != 2:
        fix = f"; .reshape(-1, {shape[-1]}) makes each place a row" if len(shape) == 3 else ""
        raise UserError(f"{label}: the shape is {tuple(shape)}; expected (n, d){fix}")
    if not is_floating:
        fix = f"; convert integers with {cast}" if "int" in str(dtype) or "bool" in str(dtype) else ""
        raise UserError(f"{label}: the dtype is {dtype}; expected floating numbers{fix}")
    if shape[1] < 2:
        raise UserError(f"{label}: the shape is {tuple(shape)}; expected points of width 2 or more")
    if shape[0] < min_points:
        raise UserError(f"{label}: {shape[0]} points are too few; expected {min_points} or more")
