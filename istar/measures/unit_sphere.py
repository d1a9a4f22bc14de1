"""Uniformity and alignment of unit vectors, after Wang and Isola (2020)."""

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures.numerics import block_size, check_matrix, full_precision, unit_vectors, upcast_blocks


@torch.no_grad()
def uniformity(points: Tensor) -> float:
    r"""Compute the uniformity of the directions of points, the logarithm of the mean Gaussian potential of all pairs.

    With the unit vectors :math:`u_i = x_i / \lVert x_i \rVert`,

    .. math:: \log \frac{1}{n (n - 1)} \sum_{i \ne j} \exp(-2 \lVert u_i - u_j \rVert^2)

    (Wang and Isola, *Understanding Contrastive Representation Learning through Alignment and Uniformity on the
    Hypersphere*, ICML 2020). It is computed over all pairs of different rows, where the paper's code takes the pairs of
    a batch. Smaller is more uniform. The mean of the directions dominates it: it then says little more than
    `average_cosine`. Zero points, which have no direction, are left out.

    Args:
        points: `(n, d)` of any floating dtype, on any device; computed in float64 (float32 on MPS).

    Returns:
        A number in [-8, 0]: 0 if all directions are equal, and about -4 for random directions in many dimensions. Time
        O(n² d), memory O(n d) and blocks of pairs.

    Raises:
        UserError: if the points are not a finite floating matrix, or fewer than 2 are not zero.

    >>> round(uniformity(torch.eye(5)), 6)
    -4.0
    """
    units = _to_unit_vectors(points, "points")
    n = len(units)
    if n < 2:
        raise UserError(f"{n} of {len(points)} points are not zero; expected at least 2")
    total = units.new_zeros(())
    with full_precision(units.device):
        # A pair is computed once: rows of a block with each other, and with all rows after it.
        for start in range(0, n, length := max(1, 16 * block_size(units.device) // n)):
            block, others = units[start : start + length], units[start + length :]
            # |u - v|^2 = 2 - 2 u v for unit vectors.
            own = (4 * (block @ block.T) - 4).exp_()
            total += own.sum() - own.trace() + 2 * (4 * (block @ others.T) - 4).exp_().sum()
    return float((total / (n * (n - 1))).log())


@torch.no_grad()
def alignment(points: Tensor, pairs: Tensor) -> float:
    r"""Compute the alignment of pairs of points, the mean squared distance of their directions.

    With the unit vectors u of the points and v of their pairs, :math:`\frac1n \sum_i \lVert u_i - v_i \rVert^2` (Wang
    and Isola, *Understanding Contrastive Representation Learning through Alignment and Uniformity on the Hypersphere*,
    ICML 2020, with the exponent 2). Pairs should be alike, such as two paraphrases, so that smaller is better. It is
    also small if all points share a direction: read it together with `uniformity`.

    Args:
        points: `(n, d)` of any floating dtype, on any device; computed in float64 (float32 on MPS).
        pairs: `(n, d)`, on the same device; row i is the pair of row i of the points.

    Returns:
        A number in [0, 4]: 0 for equal and 4 for opposite directions, and 2 on average for unrelated ones about the
        origin.

    Raises:
        UserError: if one of the two is not a finite floating matrix, their shapes differ, or a row is zero.

    >>> alignment(torch.eye(2), torch.tensor([[3.0, 0.0], [2.0, 0.0]]))
    1.0
    """
    units, pair_units = _to_unit_vectors(points, "points"), _to_unit_vectors(pairs, "pairs")
    if points.shape != pairs.shape:
        raise UserError(
            f"pairs have shape {tuple(pairs.shape)}; expected {tuple(points.shape)}, one for each of the points"
        )
    if min(len(units), len(pair_units)) < len(points):
        raise UserError("a point or its pair is zero and has no direction; expected pairs of nonzero points")
    return float((units - pair_units).square().sum(1).mean())


def _to_unit_vectors(points: Tensor, name: str) -> Tensor:
    """Check points `(n, d)` and return the unit vectors of those that are not zero, in float64 (float32 on MPS)."""
    check_matrix(points, name)
    units, is_nonzero = zip(*(unit_vectors(block) for block in upcast_blocks(points)), strict=True)
    return torch.cat(units)[torch.cat(is_nonzero)]
