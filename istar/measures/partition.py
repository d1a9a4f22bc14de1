r"""The isotropy measure I(W) of an embedding matrix, the ratio of extreme values of its partition function.

The partition function is :math:`Z(c) = \sum_w \exp(c^T w)`, summed over the rows w of the embedding matrix W. The
measure is :math:`I(W) = \min_c Z(c) / \max_c Z(c)`, where c runs over the unit eigenvectors of :math:`W^T W` (Arora et
al., 2016; Mu and Viswanath, 2018; *Too Much in Common*, equations 7 and 8; *Anisotropy is Not Inherent to
Transformers*, equations 3 and 4).
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures.numerics import check_tensor, full_precision, upcast_blocks
from istar.measures.spectrum import decompose_rows

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
    check_tensor(embeddings, "embeddings")
    with full_precision(embeddings.device):
        eigenvectors = decompose_rows(embeddings, ["raw"])["raw"].vectors
        log_z = eigenvectors.new_full((2, len(eigenvectors)), -math.inf)
        for block in upcast_blocks(embeddings):
            log_z = add_to_log_partition_function(log_z, block @ eigenvectors)
    log_z = log_z if signs == "both" else log_z[0]
    log_z_min, log_z_max = log_z.min().item(), log_z.max().item()
    return PartitionIsotropy(math.exp(log_z_min - log_z_max), signs, log_z_min, log_z_max)


def add_to_log_partition_function(log_z: Tensor, products: Tensor) -> Tensor:
    """Add rows to log Z(c), the first row of `log_z` `(2, d)`, and log Z(-c), the second.

    `products` are the inner products of the rows with each direction c, `(n, d)`.
    """
    added = torch.stack([products.logsumexp(0), (-products).logsumexp(0)])
    return torch.logaddexp(log_z, added.to(log_z.dtype))
