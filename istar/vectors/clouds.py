"""Opening clouds of points: tensors, arrays, data frames, lists and files."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from istar.errors import NonFiniteError, UserError, shorten
from istar.vectors.cloud import MIN_CLOUD_POINTS, Cloud, check_cloud, cloud_of_array, cloud_of_slices, cloud_of_tensor
from istar.vectors.vector_files import open_vector_file

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

PointSource: TypeAlias = "Tensor | np.ndarray[Any, Any] | pd.DataFrame | Sequence[Any] | Mapping[str, Any] | str | Path"
"""Tensor, array, data frame of floating columns, list of rows, file of vectors, or several of these by name."""


def open_clouds(points: PointSource, key: str | Sequence[str] | None = None) -> list[Cloud]:
    """Return the clouds of a source of points, or of several sources by name. Files are opened, but not read yet.

    Sources are tensors on any device, arrays (also memory-mapped), data frames, lists of rows, whatever NumPy converts,
    and files: .npy, .npz, .safetensors, .pt, .pth, .parquet and .jsonl. A single source is called `points`, and a
    matrix of a file has the name of its key, or of the file if there are no keys.

    Args:
        points: floating numbers, `(n, d)`, with n of 4 or more and d of 2 or more. `vectors.parquet:column` names a
            file with a key.
        key: the key of a matrix in a file, or several. Needed if the file has more than one matrix.

    Raises:
        UserError: for another shape or dtype, an empty mapping, an unknown key, or a file that cannot be read. Points
            that are not finite are not noticed: see `check_finite_rows`.
    """
    if isinstance(points, str | Path):
        return open_vector_file(points, key)
    if key is not None:
        raise UserError(f"key={key!r} needs a file; expected no key for points in memory")
    if not isinstance(points, Mapping):
        return [cloud_in_memory("points", points, MIN_CLOUD_POINTS)]
    if not points:
        raise UserError("the mapping has no clouds; expected at least one name with points")
    return [_open_named(str(name), source) for name, source in points.items()]


def check_finite_rows(cloud: Cloud) -> None:
    """Read a cloud and raise a `NonFiniteError` if rows have NaN or infinity: how many rows, and which is the first."""
    num_points = num_bad = 0
    first_bad = None
    for block in cloud.read_blocks(cloud.block_length):
        bad_rows = (~block.isfinite().all(1)).nonzero()[:, 0]
        if len(bad_rows) and first_bad is None:
            first_bad = num_points + int(bad_rows[0])
        num_points, num_bad = num_points + len(block), num_bad + len(bad_rows)
    if first_bad is not None:
        verb = "is" if num_bad == 1 else "are"
        raise NonFiniteError(
            f"{cloud.name}: {num_bad} of {num_points} rows {verb} not finite, the first at index {first_bad}; "
            "expected finite numbers, so leave such rows out"
        )


def cloud_in_memory(label: str, points: Any, min_points: int = 0) -> Cloud:
    """Return the cloud of a tensor, an array, a data frame or a list, of at least `min_points` points.

    Raises:
        UserError: as `open_clouds`. The message begins with the label.
    """
    if isinstance(points, Sequence) and not isinstance(points, str) and points and isinstance(points[0], Tensor):
        points = _convert(label, torch.stack, list(points))
    if isinstance(points, Tensor):
        return cloud_of_tensor(label, points, min_points)
    if is_frame(points):
        return _cloud_of_frame(label, points, min_points)
    import numpy as np

    # A masked value becomes NaN; any other array stays as it is.
    array = _convert(label, lambda source: np.ma.filled(source, np.nan), points)
    if array.dtype == object:
        name = type(points).__name__
        raise UserError(f"{label}: a {name} of objects; expected numbers (n, d); numpy.stack joins a list of vectors")
    return cloud_of_array(label, array, min_points)


def is_frame(points: object) -> bool:
    """Return whether this is a pandas data frame, without importing pandas."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(points, pandas.DataFrame)


def _open_named(name: str, source: PointSource) -> Cloud:
    if not isinstance(source, str | Path):
        return cloud_in_memory(name, source, MIN_CLOUD_POINTS)
    clouds = open_vector_file(source)
    if len(clouds) != 1:
        raise UserError(f"{source} has {len(clouds)} clouds; expected one for the name {name}")
    return dataclasses.replace(clouds[0], name=name)


def _cloud_of_frame(label: str, frame: "pd.DataFrame", min_points: int) -> Cloud:
    import numpy as np

    others = [str(column) for column, dtype in frame.dtypes.items() if getattr(dtype, "kind", "") != "f"]
    if others:
        raise UserError(
            f"{label}: {len(others)} of {frame.shape[1]} columns are not floating: {shorten(', '.join(others), 60)}; "
            'expected floating columns; choose some, or convert them with .astype("float32"); '
            "numpy.stack joins a column of vectors"
        )
    # Columns of pandas' own dtypes name the dtype of NumPy; a missing value becomes NaN.
    dtype = np.result_type(*(getattr(dtype, "numpy_dtype", dtype) for dtype in frame.dtypes), np.float16)
    check_cloud(label, frame.shape, dtype, True, "", min_points)

    def read_rows(start: int, stop: int) -> Tensor:
        rows = frame.iloc[start:stop].to_numpy(dtype, copy=True, na_value=np.nan)
        return torch.from_numpy(np.ascontiguousarray(rows))

    return cloud_of_slices(label, frame.shape, read_rows)


def _convert(label: str, convert: Any, points: Any) -> Any:
    try:
        return convert(points)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"{label}: not a matrix ({shorten(error, 80)}); expected rows of equal length") from error
