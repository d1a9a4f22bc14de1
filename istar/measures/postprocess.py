r"""Post-processing of embedding matrices W, `(n, d)` with one row per word: centering and removal of top components.

The methods are those of *Too Much in Common* (Bis et al., 2021), sections 5.1 and 5.2. Each function returns a new
matrix of W's dtype and device. Statistics and differences are computed in float64 (float32 on MPS), a block of rows at
a time, so that the result is the only new matrix of W's size. Not differentiable.
"""

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures.moments import full_precision
from istar.measures.rows import check_matrix, row_norms, split_rows, unit_vectors, wide_blocks, wide_dtype

Variant = Literal["corrected", "published"]


@torch.no_grad()
def centered(embeddings: Tensor) -> Tensor:
    r"""Subtract the mean :math:`\mu` of the rows from each row, :math:`\tilde w = w - \mu` (equation 9).

    Args:
        embeddings: W, `(n, d)`, any floating dtype and device.

    Raises:
        UserError: if W is not a finite floating matrix with rows.
    """
    check_matrix(embeddings, "embeddings")
    mean = _mean(embeddings)
    return _rowwise(embeddings, lambda block: block - mean)


@torch.no_grad()
def scaled_centered(embeddings: Tensor) -> Tensor:
    r"""Subtract the mean direction from each row, scaled by the row's norm (section 5.2).

    The result is :math:`w' = w - \lVert w \rVert \hat\mu = \lVert w \rVert (\hat w - \hat\mu)`, where
    :math:`\hat\mu` is the mean of the unit vectors :math:`\hat w`. The mean of :math:`w' / \lVert w \rVert` is zero,
    but the mean of w' is not. If all rows have the same norm, the result equals `centered`. Zero rows do not change;
    they count as zero vectors in the mean.

    Args and Raises as `centered`.
    """
    check_matrix(embeddings, "embeddings")
    total = torch.stack([unit_vectors(block)[0].sum(0) for block in wide_blocks(embeddings)]).sum(0)
    mean = total / len(embeddings)
    return _rowwise(embeddings, lambda block: block - row_norms(block)[:, None] * mean)


@torch.no_grad()
def all_but_the_top(embeddings: Tensor, components: int | None = None, variant: Variant = "corrected") -> Tensor:
    r"""Center the rows and remove their first D principal components :math:`u_j`.

    There are two variants, whose results differ by a constant vector:

    - "corrected", *Too Much in Common*, equations 9 to 11: :math:`\hat w = \tilde w - \sum_j (u_j^T \tilde w) u_j`.
      The result has mean zero and no variance along :math:`u_j`.
    - "published", Mu and Viswanath (2018), algorithm 1: :math:`\hat w = \tilde w - \sum_j (u_j^T w) u_j`, with w before
      centering. The mean of the result is :math:`-\sum_j (u_j^T \mu) u_j`.

    Neither variant is idempotent: a second call removes the next D components.

    Args:
        embeddings: as in `centered`.
        components: D, from 0 (centering) to d; ceil(d / 100) by default, as in both papers.
        variant: see above.

    Raises:
        UserError: as `centered`, and for D or a variant that has another value. If the D-th variance equals the next
            one, the removed directions are arbitrary, which is not an error.
    """
    if variant not in get_args(Variant):
        raise UserError(f"variant is {variant!r}; expected one of {', '.join(get_args(Variant))}")
    check_matrix(embeddings, "embeddings")
    dim = embeddings.shape[1]
    components = math.ceil(dim / 100) if components is None else components
    if not 0 <= components <= dim:
        raise UserError(f"components is {components}; expected 0 to {dim}, the number of dimensions")
    with full_precision(embeddings.device):
        mean = _mean(embeddings)
        top = _principal_directions(embeddings, mean)[:, :components]

        def without_top(block: Tensor) -> Tensor:
            centered_block = block - mean
            return centered_block - (centered_block if variant == "corrected" else block) @ top @ top.T

        return _rowwise(embeddings, without_top)


def _mean(embeddings: Tensor) -> Tensor:
    # The weighted means of the blocks do not overflow where the sum of all rows would.
    return torch.stack([block.mean(0) * (len(block) / len(embeddings)) for block in wide_blocks(embeddings)]).sum(0)


def _principal_directions(embeddings: Tensor, mean: Tensor) -> Tensor:
    """Return the eigenvectors of the scatter matrix as columns `(d, d)`, largest variance first."""
    scatter = torch.zeros(len(mean), len(mean), dtype=mean.dtype, device=mean.device)
    for block in wide_blocks(embeddings):
        scatter += (block - mean).T @ (block - mean)
    vectors: Tensor = torch.linalg.eigh(scatter).eigenvectors
    return vectors.flip(1)


def _rowwise(embeddings: Tensor, transform: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function to blocks of rows in float64, and return the results as a new matrix of W's dtype."""
    result = torch.empty_like(embeddings)
    for block, target in zip(split_rows(embeddings), split_rows(result), strict=True):
        target.copy_(transform(block.to(wide_dtype(embeddings.device))))
    return result
