r"""Post-processing of embedding matrices W, `(n, d)` with one row per word: centering and removal of top components.

The methods are from *Too Much in Common* (Bis et al., 2021), sections 5.1 and 5.2. Each function returns a new
matrix of W's dtype and device. Statistics and differences are computed in float64 (float32 on MPS), a block of rows at
a time, so that the result is the only new matrix of W's size. Not differentiable.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures import numerics
from istar.measures.spectrum import decompose_rows

Variant = Literal["corrected", "published"]


@torch.no_grad()
def centered(embeddings: Tensor) -> Tensor:
    r"""Subtract the mean :math:`\mu` of the rows from each row, :math:`\tilde w = w - \mu`.

    See *Too Much in Common*, equation 9.

    Args:
        embeddings: W, `(n, d)`, any floating dtype and device.

    Raises:
        UserError: if W is not a finite floating matrix with rows.
    """
    numerics.check_matrix(embeddings, "embeddings")
    mean = numerics.mean_row(embeddings)
    return numerics.map_rows(embeddings, lambda block: block - mean)


@torch.no_grad()
def scaled_centered(embeddings: Tensor) -> Tensor:
    r"""Subtract the mean direction from each row, scaled by the row's norm (*Too Much in Common*, section 5.2).

    The result is :math:`w' = w - \lVert w \rVert \hat\mu = \lVert w \rVert (\hat w - \hat\mu)`, where
    :math:`\hat\mu` is the mean of the unit vectors :math:`\hat w`. The mean of :math:`w' / \lVert w \rVert` is zero,
    but the mean of w' is not. If all rows have the same norm, the result equals `centered`. Zero rows do not change;
    they count as zero vectors in the mean.

    The argument and the errors are as in `centered`.
    """
    numerics.check_matrix(embeddings, "embeddings")
    unit_sums = [numerics.unit_vectors(block)[0].sum(0) for block in numerics.upcast_blocks(embeddings)]
    mean_direction = torch.stack(unit_sums).sum(0) / len(embeddings)
    return numerics.map_rows(embeddings, lambda block: block - numerics.row_norms(block)[:, None] * mean_direction)


@torch.no_grad()
def all_but_the_top(embeddings: Tensor, components: int | None = None, variant: Variant = "corrected") -> Tensor:
    r"""Center the rows and remove their first D principal components :math:`u_j`.

    The results of the two variants differ by a constant vector:

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
    numerics.check_matrix(embeddings, "embeddings")
    components = count_top_components(embeddings.shape[1], components)
    with numerics.full_precision(embeddings.device):
        spectrum = decompose_rows(embeddings, ["centered"])["centered"]
        mean, top_directions = spectrum.origin, spectrum.vectors[:, :components]

        if variant == "corrected":
            return numerics.map_rows(embeddings, lambda block: remove_directions(block - mean, top_directions))
        return numerics.map_rows(embeddings, lambda block: remove_directions(block, top_directions) - mean)


def remove_directions(rows: Tensor, directions: Tensor) -> Tensor:
    """Return rows `(n, d)` without their projections onto orthonormal directions, the columns of a matrix `(d, D)`."""
    return rows - rows @ directions @ directions.T


def count_top_components(dim: int, components: int | None = None) -> int:
    """Return the number of components that `all_but_the_top` removes: ceil(d / 100), or what is given, up to d."""
    if components is None:
        return math.ceil(dim / 100)
    if not 0 <= components <= dim:
        raise UserError(f"components is {components}; expected 0 to {dim}, the number of dimensions")
    return components
