r"""The isotropy measure I(W) of an embedding matrix, the ratio of extreme values of its partition function.

The partition function is :math:`Z(c) = \sum_w \exp(c^T w)`, summed over the rows w of the embedding matrix W. The
measure is :math:`I(W) = \min_c Z(c) / \max_c Z(c)`, where c runs over the unit eigenvectors of :math:`W^T W` (Arora et
al., 2016; Mu and Viswanath, 2018; *Too Much in Common*, equations 7 and 8; *Anisotropy is Not Inherent to
Transformers*, equations 3 and 4).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures.norms import norm_summary
from istar.measures.numerics import accumulation_dtype, check_matrix, full_precision, upcast_blocks
from istar.measures.spectrum import singular_values

MAX_ROWS = 2_000
"""Most rows of a matrix in a figure of its projection."""
Signs = Literal["as_computed", "both"]


@dataclass(frozen=True)
class PartitionIsotropy:
    """I(W) and how it was computed.

    Attributes:
        value: I(W), in [0, 1]; 0 only if the ratio underflows.
        signs: convention for the signs of the eigenvectors; see `partition_isotropy`.
        log_z_min, log_z_max: logarithms of the smallest and the largest Z(c).
    """

    value: float
    signs: Signs
    log_z_min: float
    log_z_max: float


@torch.no_grad()
def partition_isotropy(embeddings: Tensor, signs: Signs = "as_computed") -> PartitionIsotropy:
    r"""Compute I(W) of an embedding matrix with log-sum-exp, so that no exponential overflows.

    An eigenvector is defined up to its sign, but Z(c) and Z(-c) differ unless the mean of the rows is zero. The papers
    take the sign that the eigensolver returns, so that their values depend on the LAPACK build. Use `signs="both"` for
    values that are compared with each other: it takes the extremes over c and -c, does not depend on the build, and
    gives at most the value of the papers' convention.

    If eigenvalues are equal, their eigenvectors are arbitrary within the common eigenspace.

    Args:
        embeddings: W, `(n, d)`, one row per word, any floating dtype and device.
        signs: "as_computed", the papers' convention, or "both": minimum and maximum over c and -c.

    Returns:
        The value in [0, 1], 1 if Z is constant, with its convention and the logarithms of the two extremes.
        Time O(n d^2 + d^3); memory beyond W: a few matrices `(d, d)` and blocks of 2 MiB (32 MiB on a GPU).

    Raises:
        UserError: if W is not a finite floating matrix with rows, or an argument has another value.

    >>> cross = torch.cat([torch.eye(3), -torch.eye(3)])
    >>> partition_isotropy(cross).value, partition_isotropy(cross + 1, signs="both").value < 0.2
    (1.0, True)
    """
    if signs not in get_args(Signs):
        raise UserError(f"signs is {signs!r}; expected one of {', '.join(get_args(Signs))}")
    check_matrix(embeddings, "embeddings")
    with full_precision(embeddings.device):
        eigenvectors = _compute_gram_eigenvectors(embeddings)
        log_z = _compute_log_partition_function(embeddings, eigenvectors, both_signs=signs == "both")
    log_z_min, log_z_max = log_z.min().item(), log_z.max().item()
    return PartitionIsotropy(math.exp(log_z_min - log_z_max), signs, log_z_min, log_z_max)


def _compute_gram_eigenvectors(embeddings: Tensor) -> Tensor:
    # Scaling keeps the squares of very large or small numbers in range; a power of two adds no rounding error.
    largest = max(block.abs().amax().item() for block in upcast_blocks(embeddings))
    scale = 2.0 ** -max(-1000, min(1000, math.frexp(largest)[1]))
    dim = embeddings.shape[1]
    gram = embeddings.new_zeros(dim, dim, dtype=accumulation_dtype(embeddings.device))
    for block in upcast_blocks(embeddings):
        scaled = block * scale
        gram += scaled.T @ scaled
    vectors: Tensor = torch.linalg.eigh(gram).eigenvectors
    return vectors


def _compute_log_partition_function(embeddings: Tensor, directions: Tensor, both_signs: bool) -> Tensor:
    """Return log Z(c) for each column c of `directions`, `(d,)`; `both_signs` appends log Z(-c), `(2 d,)`."""
    log_z = directions.new_full((directions.shape[1] * (2 if both_signs else 1),), -math.inf)
    for block in upcast_blocks(embeddings):
        inner_products = block @ directions
        block_log_z = inner_products.logsumexp(0)
        if both_signs:
            block_log_z = torch.cat([block_log_z, (-inner_products).logsumexp(0)])
        log_z = torch.logaddexp(log_z, block_log_z)
    return log_z


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
