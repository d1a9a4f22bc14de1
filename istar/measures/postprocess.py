r"""Post-processing of embedding matrices: W -> W', `(n, d)`, one row per word.

*Too Much in Common* (Bis et al., 2021), sections 5.1 and 5.2. Each function returns a new matrix of W's dtype and
device. Statistics and differences are float64 (float32 on MPS), a block of rows at a time, so that the only matrix of
W's size is the result. Not differentiable.
"""

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures.moments import full_precision
from istar.measures.rows import check_matrix, directions, norms_of, split_rows, wide_blocks, wide_dtype

Variant = Literal["corrected", "published"]


@torch.no_grad()
def centered(embeddings: Tensor) -> Tensor:
    r""":math:`\tilde w = w - \mu`, :math:`\mu` the mean of the rows (equation 9); a second time changes nothing.

    Args:
        embeddings: W, `(n, d)`, any floating dtype and device.

    Raises:
        UserError: if W is not a floating matrix with rows, or not finite.
    """
    check_matrix(embeddings, "embeddings")
    mean = _mean(embeddings)
    return _rowwise(embeddings, lambda block: block - mean)


@torch.no_grad()
def scaled_centered(embeddings: Tensor) -> Tensor:
    r""":math:`w' = w - \lVert w \rVert \hat\mu`, :math:`\hat\mu` the mean of the rows' unit vectors (section 5.2).

    Every unit vector is shifted alike, :math:`w' = \lVert w \rVert (\hat w - \hat\mu)`, so that the mean of
    :math:`w' / \lVert w \rVert` is zero, though that of w' is not. For rows of equal norm it is `centered`.
    A row of zeros stays; it counts in |V| and adds nothing to the sum.

    Args and Raises as `centered`.
    """
    check_matrix(embeddings, "embeddings")
    total = torch.stack([directions(block)[0].sum(0) for block in wide_blocks(embeddings)]).sum(0)
    mean = total / len(embeddings)
    return _rowwise(embeddings, lambda block: block - norms_of(block)[:, None] * mean)


@torch.no_grad()
def all_but_the_top(embeddings: Tensor, components: int | None = None, variant: Variant = "corrected") -> Tensor:
    r"""Centers and removes the D first principal components :math:`u_j` of the centered rows.

    - "corrected", *Too Much in Common*, equations 9 to 11: :math:`\hat w = \tilde w - \sum_j (u_j^T \tilde w) u_j`.
      The result has mean zero and no extent at all along :math:`u_j`.
    - "published", Mu and Viswanath (2018), algorithm 1: :math:`\hat w = \tilde w - \sum_j (u_j^T w) u_j`, with w before
      centering. The same but for a constant: the mean is :math:`-\sum_j (u_j^T \mu) u_j`.

    Neither is idempotent: the next D components are removed the second time.

    Args:
        embeddings: as in `centered`.
        components: D, from 0 (centering) to d; ceil(d / 100) by default, as in both papers.
        variant: see above.

    Raises:
        UserError: as `centered`, and for D or a variant not among these. If the D-th variance equals the next, the
            directions to remove are arbitrary, but it is not refused.
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
            kept = block - mean
            return kept - (kept if variant == "corrected" else block) @ top @ top.T

        return _rowwise(embeddings, without_top)


def _mean(embeddings: Tensor) -> Tensor:
    # Of the blocks' means, which do not overflow where the sum of all rows would.
    return torch.stack([block.mean(0) * (len(block) / len(embeddings)) for block in wide_blocks(embeddings)]).sum(0)


def _principal_directions(embeddings: Tensor, mean: Tensor) -> Tensor:
    """Eigenvectors of the scatter, `(d, d)`, as columns, largest variance first."""
    scatter = torch.zeros(len(mean), len(mean), dtype=mean.dtype, device=mean.device)
    for block in wide_blocks(embeddings):
        scatter += (block - mean).T @ (block - mean)
    vectors: Tensor = torch.linalg.eigh(scatter).eigenvectors
    return vectors.flip(1)


def _rowwise(embeddings: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """`change` of each wide block, put into a new matrix of W's dtype."""
    result = torch.empty_like(embeddings)
    for block, place in zip(split_rows(embeddings), split_rows(result), strict=True):
        place.copy_(change(block.to(wide_dtype(embeddings.device))))
    return result
