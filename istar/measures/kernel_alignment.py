r"""Linear centered kernel alignment (CKA) of two representations of the same points, debiased.

CKA compares the similarities that two representations see between points: between layers of one model, between models
of different widths, or between a model before and after fine-tuning (Kornblith et al., *Similarity of Neural Network
Representations Revisited*, ICML 2019). It is the Hilbert-Schmidt independence criterion (HSIC) of the two, divided by
the geometric mean of the HSIC of each with itself. The usual estimator of HSIC is biased: with fewer points than
dimensions, unrelated representations seem similar. This module uses the unbiased estimator of Song et al. (*Feature
Selection via Dependence Maximization*, JMLR 2012, equation 5), as Nguyen et al. (*Do Wide and Deep Networks Learn the
Same Things?*, ICLR 2021, equations 2 and 3) do within minibatches.

The n points have the kernel matrices :math:`K_{ij} = x_i^T x_j` and :math:`L_{ij} = y_i^T y_j` in the two
representations. With zero diagonals, :math:`\tilde K = K - \mathrm{diag}(K)` and
:math:`\tilde L = L - \mathrm{diag}(L)`, the unbiased estimator of HSIC is

.. math:: \frac{1}{n (n - 3)} \left[\mathrm{tr}(\tilde K \tilde L)
    + \frac{1^T \tilde K 1 \; 1^T \tilde L 1}{(n - 1)(n - 2)} - \frac{2}{n - 2} 1^T \tilde K \tilde L 1\right].

Its three terms are functions of sums over points, which need :math:`O(d_x d_y)` memory instead of :math:`O(n^2)`.
"""

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures.jackknife import ValueWithError, jackknife_error
from istar.measures.numerics import accumulation_dtype, check_finite, select_rows


def cka(first: Tensor, second: Tensor) -> float:
    """Compute the debiased linear CKA of two representations of the same n points.

    Args:
        first: `(n, d_x)` of any floating dtype; sums are accumulated in float64 (float32 on MPS).
        second: `(n, d_y)`, on the same device; row i represents the same point as row i of `first`.

    Returns:
        The CKA, at most 1. It is 1 for equal representations, and 0 on average for unrelated ones, so that negative
        values occur. It does not change if a representation is rotated, translated or scaled.

    Raises:
        UserError: for fewer than 4 points, different numbers of points, values that are not finite, or a
            representation with an unbiased HSIC of 0, such as points that are all equal, or all equally far from
            each other, like the corners of a simplex.

    >>> generator = torch.Generator().manual_seed(0)
    >>> points = torch.randn(500, 8, generator=generator)
    >>> rotation = torch.linalg.qr(torch.randn(8, 8, generator=generator)).Q
    >>> round(cka(points, 3 * points @ rotation + 1), 4)
    1.0
    >>> round(cka(points, torch.randn(500, 8, generator=generator)), 1)
    0.0
    """
    first, second = _center_points(first), _center_points(second)
    if len(first) != len(second):
        raise UserError(
            f"the representations have {len(first)} and {len(second)} points; expected equally many in both"
        )
    if len(first) < 4:
        raise UserError(f"CKA of {len(first)} points is not defined; expected at least 4")
    hsics = []
    for name, points in (("first", first), ("second", second)):
        check_finite(points, "the points")
        hsic, term_size = _estimate_hsic(points, points)
        hsics.append(hsic)
        # An HSIC of 0 has a rounding error of either sign.
        if not hsic > _RELATIVE_ROUNDING_ERROR * term_size:
            raise UserError(
                f"the unbiased HSIC of the {name} representation with itself is 0, up to rounding: CKA is not "
                "defined, as for points that are all equal or all equally far from each other; give other points"
            )
    return float(_estimate_hsic(first, second)[0] / (hsics[0] * hsics[1]).sqrt())


_RELATIVE_ROUNDING_ERROR = 1e-12
"""Largest rounding error of an HSIC, relative to the size of its terms."""


def cka_with_error(first: Tensor, second: Tensor, groups: int | Tensor = 10) -> ValueWithError:
    """Compute `cka` of two representations, and its standard error by the jackknife.

    The error is `istar.measures.jackknife_error` of the CKA without each group of points. Points of different groups
    are assumed to be independent, such as the mean states of different documents.

    Args:
        first: as in `cka`.
        second: as in `cka`.
        groups: G, at least 2; point i, counted from 0, is in group i mod G. Or the group of each point, `(n,)`, of G
            different ones. The time is G + 1 times the time of `cka`.

    Raises:
        UserError: as `cka`, even if it is only undefined without a group, and for a number of groups outside of 2 to n,
            or groups of another number of points.

    >>> generator = torch.Generator().manual_seed(0)
    >>> points = torch.randn(500, 8, generator=generator)
    >>> value, error = cka_with_error(points, points + torch.randn(500, 8, generator=generator))
    >>> abs(value - 0.5) < 3 * error < 0.1
    True
    """
    value, num_points = cka(first, second), len(first)
    if isinstance(groups, Tensor) and groups.shape != (num_points,):
        raise UserError(f"groups have the shape {tuple(groups.shape)}; expected ({num_points},), one for each point")
    num_groups = len(groups.unique()) if isinstance(groups, Tensor) else groups
    if not 2 <= num_groups <= num_points:
        raise UserError(f"groups is {num_groups}; expected 2 to {num_points}, the number of points")
    if isinstance(groups, Tensor):
        group_of_point = groups.to(first.device)
    else:
        group_of_point = torch.arange(num_points, device=first.device) % groups
    values_without_group = [
        cka(first[group_of_point != group], second[group_of_point != group]) for group in group_of_point.unique()
    ]
    return ValueWithError(value, jackknife_error(values_without_group))


def _center_points(points: Tensor) -> Tensor:
    """CKA does not change, but its rounding errors, in float64 (float32 on MPS), are smaller."""
    points = select_rows(points)
    points = points.to(accumulation_dtype(points.device))
    return points - points.mean(0)


def _estimate_hsic(xs: Tensor, ys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the unbiased estimate, and the typical size of its terms, to which the rounding error is proportional."""
    n = len(xs)
    x_squares, y_squares = xs.square().sum(1), ys.square().sum(1)
    x_total, y_total, outer, products = xs.sum(0), ys.sum(0), xs.T @ ys, x_squares @ y_squares
    # tr(K L), (1^T K 1) (1^T L 1) and 1^T K L 1, with zero diagonals.
    trace_term = outer.square().sum() - products
    total_term = (x_total.square().sum() - x_squares.sum()) * (y_total.square().sum() - y_squares.sum())
    # 1^T K L 1 is the sum over i of (x_i^T sum(x) - |x_i|^2) (y_i^T sum(y) - |y_i|^2).
    row_term = x_total @ outer @ y_total - x_total @ (y_squares @ xs) - y_total @ (x_squares @ ys) + products
    hsic = (trace_term + total_term / ((n - 1) * (n - 2)) - 2 * row_term / (n - 2)) / (n * (n - 3))
    return hsic, products / n**2
