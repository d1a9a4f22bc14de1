"""Clouds of points that are read in blocks, and the clouds of tensors, arrays, data frames and lists."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from istar.errors import NonFiniteError, UserError, shorten
from istar.measures.numerics import spread_indices

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


def cloud_in_memory(name: str, points: Any) -> Cloud:
    """Return the cloud of a tensor, an array, a data frame or a list, with any number of points.

    Raises a `UserError` as `istar.vectors.vector_files.open_clouds`; it begins with the name.
    """
    try:
        values = _to_tensor_or_array(name, points)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"{name}: not a matrix ({shorten(error, 80)}); expected rows of equal length") from error
    if isinstance(values, Tensor):
        return _cloud_of_tensor(name, values)
    if values.dtype == object:
        kind = type(points).__name__
        if hasattr(points, "toarray"):  # a sparse matrix of SciPy
            raise UserError(f"{name}: a {kind}, which is sparse; expected a dense array, as from .toarray()")
        raise UserError(f"{name}: a {kind} of objects; expected numbers (n, d); numpy.stack joins a list of vectors")
    return _cloud_of_array(name, values)


def _to_tensor_or_array(name: str, points: Any) -> "Tensor | np.ndarray[Any, Any]":
    """Convert whatever is neither of the two. Missing and masked values become NaN."""
    if isinstance(points, Tensor):
        return points
    if isinstance(points, Sequence) and points and isinstance(points[0], Tensor):
        return torch.stack(list(points))
    import numpy as np

    if not is_frame(points):
        return np.ma.filled(points, np.nan)
    others = [str(column) for column, dtype in points.dtypes.items() if getattr(dtype, "kind", "") != "f"]
    if others:
        raise UserError(
            f"{name}: {len(others)} of {points.shape[1]} columns are not floating: {shorten(', '.join(others), 60)}; "
            'expected floating columns; choose some, or convert them with .astype("float32"); '
            "numpy.stack joins a column of vectors"
        )
    # Columns of pandas' own dtypes name the dtype of NumPy.
    dtype = np.result_type(*(getattr(dtype, "numpy_dtype", dtype) for dtype in points.dtypes), np.float16)
    return points.to_numpy(dtype, na_value=np.nan)


def is_frame(points: object) -> bool:
    """Return whether this is a pandas data frame, without importing pandas."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(points, pandas.DataFrame)


def _cloud_of_tensor(name: str, points: Tensor) -> Cloud:
    if points.layout != torch.strided or points.is_nested:
        raise UserError(f"{name}: a sparse or nested tensor; expected a dense one, as from .to_dense()")
    if points.is_meta:
        raise UserError(f"{name}: a tensor on the device meta, which has no values; expected a device with memory")
    check_matrix_of_points(name, points.shape, points.dtype, points.is_floating_point(), ".float()")
    values = points.detach()
    return _cloud_of_rows(name, points.shape, lambda index: values[index])


def _cloud_of_array(name: str, points: "np.ndarray[Any, Any]") -> Cloud:
    import numpy as np

    # torch lacks NumPy's longer floats.
    is_floating = points.dtype.kind == "f" and points.dtype.itemsize <= 8
    check_matrix_of_points(name, points.shape, points.dtype, is_floating, '.astype("float32")')
    dtype = points.dtype.newbyteorder("=")
    # torch takes only arrays that may be written to and whose addresses ascend, so the rows are copied.
    return _cloud_of_rows(name, points.shape, lambda index: torch.from_numpy(np.array(points[index], dtype, order="C")))


def _cloud_of_rows(name: str, shape: Sequence[int], read: Callable[[slice | list[int]], Tensor]) -> Cloud:
    """Make a cloud from a function that returns some rows of a matrix of the given shape."""
    num_points, dim = shape

    def read_blocks(max_points: int) -> Iterator[Tensor]:
        for start in range(0, max(1, num_points), max_points):  # of no points, one empty block
            yield read(slice(start, start + max_points))

    return Cloud(name, num_points, dim, read_blocks, lambda max_points: read(spread_indices(max_points, num_points)))


def check_matrix_of_points(label: str, shape: Sequence[int], dtype: object, is_floating: bool, cast: str) -> None:
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


def check_count(label: str, num_points: int | None) -> None:
    """Raise a `UserError` for fewer than `MIN_CLOUD_POINTS` points. The message begins with the label."""
    if num_points is not None and num_points < MIN_CLOUD_POINTS:
        raise UserError(f"{label}: {num_points} points are too few; expected {MIN_CLOUD_POINTS} or more")


def check_finite_rows(cloud: Cloud) -> None:
    """Read a cloud and raise a `NonFiniteError` if rows have NaN or infinity: how many rows, and which is the first."""
    is_finite = torch.cat([block.isfinite().all(1) for block in cloud.read_blocks(cloud.block_length)])
    bad_rows = (~is_finite).nonzero()[:, 0]
    if len(bad_rows):
        verb = "is" if len(bad_rows) == 1 else "are"
        raise NonFiniteError(
            f"{cloud.name}: {len(bad_rows)} of {len(is_finite)} rows {verb} not finite, the first at index "
            f"{bad_rows[0]}; expected finite numbers, so leave such rows out"
        )
