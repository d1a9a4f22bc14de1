"""Measures of a matrix with a point in each row, such as an embedding matrix, and its projection onto a plane."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from istar.measures.input_checks import upcast_blocks
from istar.measures.norms import norm_summary
from istar.measures.partition import partition_isotropy
from istar.measures.spectrum import singular_values

MAX_ROWS = 2_000
"""Most rows of a matrix in a figure of its projection."""


def measure_matrix(matrix: Tensor) -> dict[str, Any]:
    """Measure a matrix `(n, d)`: I(W) with both conventions for the eigenvectors' signs, norms and singular values."""
    norms = norm_summary(matrix)
    as_computed, both = (partition_isotropy(matrix, signs) for signs in ("as_computed", "both"))
    return {
        "rows": matrix.shape[0],
        "dimensions": matrix.shape[1],
        "partition_isotropy_as_computed": as_computed.value,
        "partition_isotropy_both": both.value,
        "average_norm": norms.average,
        "mean_vector_norm": norms.mean_vector,
        "norm_ratio": norms.ratio,
        "singular_values": round_digits(singular_values(matrix, centered=False).tolist()),
    }


def round_digits(values: Iterable[float], digits: int = 8) -> list[float]:
    """Round numbers to significant digits, for smaller files. The default keeps all digits of float32."""
    return [float(f"{value:.{digits}g}") for value in values]


@torch.no_grad()
def project_rows(matrix: Tensor, max_rows: int = MAX_ROWS) -> dict[str, Any]:
    """Project evenly spaced rows of a matrix `(n, d)` onto its first two singular directions, raw and centered.

    Returns:
        A dictionary with the `ids` of at most `max_rows` rows, and their coordinates by axis, `raw` and `centered`.
    """
    row_ids = torch.linspace(0, len(matrix) - 1, min(max_rows, len(matrix)), dtype=torch.float64).round().long()
    mean = torch.stack([block.sum(0) for block in upcast_blocks(matrix)]).sum(0) / len(matrix)
    rows = matrix[row_ids.to(matrix.device)].to(mean)
    projection: dict[str, Any] = {"ids": row_ids.tolist()}
    for form, origin in (("raw", torch.zeros_like(mean)), ("centered", mean)):
        coordinates = (rows - origin) @ _compute_first_singular_vectors(matrix, origin)
        projection[form] = [round_digits(column, 4) for column in coordinates.T.tolist()]
    return projection


def _compute_first_singular_vectors(matrix: Tensor, origin: Tensor) -> Tensor:
    """Return the first two right singular vectors `(d, 2)` of the rows of a matrix minus the origin."""
    scatter: Any = sum((block - origin).T @ (block - origin) for block in upcast_blocks(matrix))
    axes: Tensor = torch.linalg.eigh(scatter)[1][:, [-1, -2][: len(scatter)]]
    # The sign of an eigenvector is arbitrary. It is fixed by making the largest coordinate positive.
    directions: Tensor = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
    return directions
