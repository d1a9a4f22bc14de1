r"""I(W): how constant the partition function Z(c) is over directions c.

:math:`Z(c) = \sum_w \exp(c^T w)` over the rows w of an embedding matrix W and
:math:`I(W) = \min_c Z(c) / \max_c Z(c)` (Arora et al., 2016; Mu and Viswanath, 2018; *Too Much in Common*, equations 7
and 8; *Anisotropy is Not Inherent to Transformers*, equations 3 and 4), c over the unit eigenvectors of
:math:`W^T W`, its columns.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures.moments import full_precision
from istar.measures.rows import check_matrix, wide_blocks, wide_dtype

Signs = Literal["as_computed", "both"]


@dataclass(frozen=True)
class PartitionIsotropy:
    """I(W) and how it was computed.

    Attributes:
        value: I(W), in [0, 1]; 0 only where the ratio is below the smallest number.
        signs: the convention; see `partition_isotropy`.
        log_z_min: log of the smallest Z(c). log_z_max: log of the largest.
    """

    value: float
    signs: Signs
    log_z_min: float
    log_z_max: float


@torch.no_grad()
def partition_isotropy(
    embeddings: Tensor, signs: Signs = "as_computed", dtype: torch.dtype = torch.float64
) -> PartitionIsotropy:
    r"""I(W) of an embedding matrix, in log-sum-exp, so that no exponential overflows.

    The papers take the eigenvectors with the sign that the eigensolver happens to give them, though Z(c) and Z(-c)
    differ as soon as the mean of the rows is not zero. Their values are therefore those of one LAPACK build. Values
    to compare with each other want `signs="both"`, which is at most as large and does not depend on the build.

    Where eigenvalues are equal, the eigenvectors themselves are arbitrary within their common space.

    Args:
        embeddings: W, `(n, d)`, one row per word, any floating dtype and device.
        signs: "as_computed", the papers' convention, or "both": minimum and maximum over c and -c.
        dtype: of the products with W; float32 is enough for four digits. Their sum, the eigenvectors and the
            logarithms are float64 whatever it is (float32 on MPS).

    Returns:
        The value in [0, 1], 1 if Z is constant, its convention, and the logarithms that it is the ratio of.
        Time O(n d^2 + d^3); memory beyond W: some matrices `(d, d)` and blocks of 2 MiB (32 on a GPU).

    Raises:
        UserError: if W is not a floating matrix with rows, not finite, or an argument is not one of these.

    >>> cross = torch.cat([torch.eye(3), -torch.eye(3)])
    >>> partition_isotropy(cross).value, partition_isotropy(cross + 1, signs="both").value < 0.2
    (1.0, True)
    """
    if signs not in get_args(Signs):
        raise UserError(f"signs is {signs!r}; expected one of {', '.join(get_args(Signs))}")
    if dtype not in (torch.float32, torch.float64):
        raise UserError(f"dtype is {dtype}; expected torch.float32 or torch.float64")
    check_matrix(embeddings, "embeddings")
    if embeddings.device.type == "mps":
        dtype = torch.float32
    with full_precision(embeddings.device):
        directions = _eigenvectors(embeddings, dtype)
        log_z = _log_partition(embeddings, directions.to(dtype), both=signs == "both")
    low, high = log_z.min().item(), log_z.max().item()
    return PartitionIsotropy(math.exp(low - high), signs, low, high)


def _eigenvectors(embeddings: Tensor, dtype: torch.dtype) -> Tensor:
    """Those of W^T W, `(d, d)`, as columns."""
    # Squares of very large or small numbers are out of range; a power of two changes no digit of the others.
    largest = max(block.abs().amax().item() for block in wide_blocks(embeddings))
    scale = 2.0 ** -max(-1000, min(1000, math.frexp(largest)[1]))
    dim = embeddings.shape[1]
    gram = embeddings.new_zeros(dim, dim, dtype=wide_dtype(embeddings.device))
    for block in wide_blocks(embeddings):
        scaled = (block * scale).to(dtype)
        gram += scaled.T @ scaled
    vectors: Tensor = torch.linalg.eigh(gram).eigenvectors
    return vectors


def _log_partition(embeddings: Tensor, directions: Tensor, both: bool) -> Tensor:
    """log Z(c) for each column c, `(d,)`, or for c and -c, `(2 d,)`."""
    wide = wide_dtype(embeddings.device)
    log_z = torch.full((directions.shape[1] * (2 if both else 1),), -math.inf, dtype=wide, device=embeddings.device)
    for block in wide_blocks(embeddings, directions.dtype):
        scores = (block @ directions).to(wide)
        part = scores.logsumexp(0)
        if both:
            part = torch.cat([part, (-scores).logsumexp(0)])
        log_z = torch.logaddexp(log_z, part)
    return log_z
