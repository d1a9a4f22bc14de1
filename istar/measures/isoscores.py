r"""IsoScore, IsoScore\* and the unbiased IsoScore. They are 1 for a covariance proportional to the identity.

*Stable Anisotropic Regularization* (Rudman and Eickhoff, ICLR 2024) defines the first two in Algorithm 1. With the
eigenvalues :math:`\Lambda` of the covariance S, steps 5 to 9 of the algorithm reduce to

.. math::
    \iota(S) = \frac{(\sum \Lambda)^2 / \sum \Lambda^2 - 1}{d - 1}
             = \frac{\operatorname{tr}(S)^2 / \lVert S \rVert_F^2 - 1}{d - 1},

the participation ratio of the spectrum, rescaled to [0, 1]. This module uses the second form, which needs no
eigendecomposition. Value and gradient are therefore exact even for singular covariances and repeated eigenvalues.
"""

import math
from typing import TypeVar

import torch
from torch import Tensor

from istar.errors import NonFiniteError, UserError
from istar.measures.moments import FourthMoments, Moments
from istar.measures.numerics import accumulation_dtype, check_points, is_rounding

MomentsT = TypeVar("MomentsT", bound=Moments)


def isoscore(points: Tensor | Moments, mask: Tensor | None = None) -> Tensor:
    """Compute the IsoScore of a point cloud: 1 if all directions have equal variance, 0 if one direction has it all.

    With fewer than about ten points per dimension, the result underestimates the IsoScore of the distribution that the
    points come from (Rudman and Eickhoff, 2024, Figure 2). For such small samples, use `isoscore_star` or
    `isoscore_unbiased`.

    Args:
        points: `(..., d)` of any floating dtype, or the moments of a cloud.
        mask: `(...)`, bool or 0/1; points where the mask is 0 are ignored. Cannot be combined with moments.

    Returns:
        0-d tensor in [0, 1], float64 (float32 on MPS), on the points' device, differentiable.

    Raises:
        UserError: for fewer than 2 points or dimensions, points that are all equal, or values that are not finite.

    >>> cross = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> round(isoscore(cross).item(), 6), round(isoscore(cross * torch.tensor([1.0, 0.0])).item(), 6)
    (1.0, 0.0)
    """
    return unchecked_isoscore(_compute_nonzero_covariance(_to_moments(points, mask, Moments)))


def isoscore_star(
    points: Tensor | Moments, shrinkage_covariance: Tensor, zeta: float, mask: Tensor | None = None
) -> Tensor:
    r"""Compute IsoScore\*, the IsoScore of :math:`(1 - \zeta) \operatorname{Cov}(X) + \zeta \Sigma_S`.

    It is defined in Algorithm 1 of *Stable Anisotropic Regularization* (Rudman and Eickhoff, ICLR 2024).

    Args:
        points: as in `isoscore`.
        shrinkage_covariance: Sigma_S, `(d, d)`, symmetric positive semi-definite.
        zeta: weight of Sigma_S in [0, 1]; 0 gives IsoScore, 1 ignores the points.
        mask: as in `isoscore`.

    Returns:
        As `isoscore`; differentiable in the points and in Sigma_S.

    Raises:
        UserError: as `isoscore`, and for zeta outside [0, 1] or a Sigma_S of the wrong shape or not a covariance.
    """
    covariance = _to_moments(points, mask, Moments).covariance()
    check_covariance(shrinkage_covariance, "the shrinkage covariance")
    shrunk = shrink(covariance, shrinkage_covariance, zeta)
    _check_nonzero_trace(shrunk, "the shrunk covariance")
    return unchecked_isoscore(shrunk)


def isoscore_unbiased(points: Tensor | FourthMoments, mask: Tensor | None = None) -> Tensor:
    r"""Estimate the IsoScore of the distribution that a small sample comes from, without a shrinkage covariance.

    Sampling noise adds to :math:`\lVert C \rVert_F^2` of a sample covariance C, so that `isoscore` of a few points is
    too low. Himeno and Yamada (2014), *Estimations for some functions of covariance matrix in high dimension under
    non-normality and its applications*, give unbiased estimates of both terms of the closed form for any distribution
    with finite fourth moments. With :math:`Q = \sum \lVert x_i - \bar x \rVert^4 / (n - 1)` and
    :math:`a = (n - 1) / (n (n - 2) (n - 3))`, the estimates are

    .. math::
        \widehat{\operatorname{tr}(S^2)} &= a \, \bigl((n - 1)(n - 2) \lVert C \rVert_F^2
        + \operatorname{tr}(C)^2 - n Q\bigr) \\
        \widehat{\operatorname{tr}(S)^2} &= a \, \bigl(2 \lVert C \rVert_F^2
        + (n^2 - 3 n + 1) \operatorname{tr}(C)^2 - n Q\bigr)

    The score is (ratio of the second to the first - 1) / (d - 1). A ratio of unbiased estimates is not unbiased
    itself, but its bias vanishes as n grows. The two estimates are means of :math:`((x_i - x_j)^T (x_k - x_l))^2 / 4`
    and :math:`\lVert x_i - x_j \rVert^2 \lVert x_k - x_l \rVert^2 / 4` over quadruples of distinct points, so that the
    score is at least 0. It can exceed 1 and is not clipped, because clipping would bias it for isotropic distributions.

    Args:
        points: at least 4 independent points, `(..., d)` of any floating dtype, or the `FourthMoments` of a cloud.
        mask: as in `isoscore`.

    Returns:
        0-d tensor in [0, inf), float64 (float32 on MPS), on the points' device, differentiable.

    Raises:
        UserError: as `isoscore`, for fewer than 4 points, for `Moments` without the fourth moment, and if the estimate
            of tr(S^2) is 0, because all points but one are equal, or because the differences :math:`x_i - x_j` of
            disjoint pairs are all orthogonal.

    >>> cross = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> round(isoscore_unbiased(cross).item(), 6), round(isoscore_unbiased(cross * torch.tensor([1.0, 0.0])).item(), 6)
    (2.0, 0.0)
    """
    if isinstance(points, Moments) and not isinstance(points, FourthMoments):
        raise UserError("Moments do not hold the fourth-order sum that the unbiased score needs; give FourthMoments")
    moments = _to_moments(points, mask, FourthMoments)
    if moments.count < 4:
        raise UserError(f"{moments.count:g} points have no unbiased score; expected at least 4 points")
    _compute_nonzero_covariance(moments)
    score = unchecked_isoscore_unbiased(moments)
    if not torch.isfinite(score):
        raise UserError(
            "the squared norm of the covariance is estimated as 0, so the unbiased score is not defined; use more "
            "points, or points of which more than one differ from the others"
        )
    return score


def shrinkage_intensity(moments: FourthMoments, shrinkage_covariance: Tensor) -> Tensor:
    r"""Estimate the zeta in [0, 1] that minimizes the expected squared error of the shrunk covariance.

    The shrunk covariance is :math:`(1 - \zeta) C + \zeta T`, with the sample covariance C of the points and the
    shrinkage covariance T. `reg.zeta=auto` uses this estimate.

    If T does not depend on the points, and S = E[C], then the expected squared error
    :math:`(1 - \zeta)^2 V + \zeta^2 \lVert T - S \rVert_F^2`, with :math:`V = \sum_{ij} \operatorname{Var}(C_{ij})`,
    is minimal at :math:`\zeta^* = V / (V + \lVert T - S \rVert_F^2) = V / E \lVert C - T \rVert_F^2` (Ledoit and Wolf,
    2004; Schaefer and Strimmer, 2005, equation 7). The last expression is estimated by
    :math:`\zeta = \min(1, \hat V / \lVert C - T \rVert_F^2)`. Schaefer and Strimmer compute
    :math:`\hat V` from the products :math:`w_{kij} = y_{ki} y_{kj}` of the centered points y as

    .. math::
        \hat V = \frac{n}{(n-1)^3} \sum_{ij} \sum_k (w_{kij} - \bar w_{ij})^2
        = \frac{n}{(n-1)^3} \Bigl(F - \frac{(n-1)^2}{n} \lVert C \rVert_F^2\Bigr),
        \qquad F = \sum_k \lVert y_k \rVert^4,

    because :math:`\sum_{ij} w_{kij}^2 = \lVert y_k \rVert^4` and :math:`\bar w = (n-1) C / n`. The expression with F
    avoids computing d^2 variances. :math:`\hat V` assumes independent points; it is too small for points in correlated
    groups, such as the tokens of one sentence.

    Args:
        moments: second and fourth moments of the points.
        shrinkage_covariance: T, `(d, d)`.

    Returns:
        0-d tensor in [0, 1], detached, in the moments' dtype, on their device. It is 1 if C equals T, unless the
        estimate of V is 0; then it is 0.

    Raises:
        UserError: for fewer than 2 points, points that are all equal, a T that is zero or not finite, or shapes that
            differ.
    """
    _check_same_shape(_compute_nonzero_covariance(moments), shrinkage_covariance)
    _check_nonzero_trace(shrinkage_covariance, "the shrinkage covariance")
    return unchecked_shrinkage_intensity(moments, shrinkage_covariance)


def unchecked_shrinkage_intensity(moments: FourthMoments, shrinkage_covariance: Tensor) -> Tensor:
    """Compute `shrinkage_intensity` without checks, so that the host does not wait for a GPU; NaN replaces errors."""
    # V and the squared distance of `shrinkage_intensity` are both divided by the squared trace, which cancels.
    normalized, trace = _divide_by_trace(covariance_or_nan(moments).detach())
    count = moments.count
    scaled_fourth = moments.fourth.detach() / trace / trace
    variance = count / (count - 1) ** 3 * scaled_fourth - normalized.square().sum() / (count - 1)
    squared_distance = (normalized - shrinkage_covariance.detach().to(normalized) / trace).square().sum()
    return (variance / squared_distance.clamp(min=torch.finfo(squared_distance.dtype).tiny)).clamp(0, 1)


def isoscore_from_covariance(covariance: Tensor) -> Tensor:
    """Compute the IsoScore of a covariance matrix `(d, d)`; see `isoscore`.

    Raises:
        UserError: if the matrix is not square, not finite, zero, or not symmetric positive semi-definite (to rounding).
    """
    check_covariance(covariance, "the covariance")
    return unchecked_isoscore(covariance)


def unchecked_isoscore(covariance: Tensor) -> Tensor:
    """Compute `isoscore_from_covariance` without its O(d^3) checks; NaN for a covariance that is zero or not finite."""
    normalized, _ = _divide_by_trace(covariance)
    return (1 / normalized.square().sum() - 1) / (covariance.shape[0] - 1)


def shrink(covariance: Tensor, shrinkage_covariance: Tensor, zeta: float) -> Tensor:
    r"""Return the shrunk covariance :math:`(1 - \zeta) \Sigma_X + \zeta \Sigma_S`, `(d, d)`, of IsoScore\*.

    Raises:
        UserError: for zeta outside [0, 1] or shapes that differ.
    """
    if not 0 <= zeta <= 1:
        raise UserError(f"zeta is {zeta}; expected a number from 0 (no shrinkage) to 1 (only the shrinkage covariance)")
    _check_same_shape(covariance, shrinkage_covariance)
    return (1 - zeta) * covariance + zeta * shrinkage_covariance.to(covariance)


def covariance_or_nan(moments: Moments) -> Tensor:
    """Return the unbiased covariance `(d, d)`, or NaN for fewer than 2 points. The host does not wait for a GPU."""
    return moments.scatter / torch.where(moments.count > 1, moments.count - 1, torch.nan)


def unchecked_isoscore_unbiased(moments: FourthMoments) -> Tensor:
    """Compute `isoscore_unbiased` without checks, so that the host does not wait for a GPU; NaN replaces errors.

    The moments may have leading dimensions, those of the result.
    """
    n = torch.where(moments.count < 4, torch.nan, moments.count)
    covariance = moments.scatter / (n - 1)[..., None, None]
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
    normalized = covariance / trace[..., None, None]  # as in `_divide_by_trace`
    fourth_term = moments.fourth / (n - 1) / trace / trace
    sample_norm = normalized.square().sum((-2, -1))
    # The estimates of tr(S^2) and tr(S)^2 in `isoscore_unbiased`, both divided by tr(C)^2 and by the factor a.
    uncorrected_norm = (n - 1) * (n - 2) * sample_norm + 1
    squared_norm = uncorrected_norm - n * fourth_term
    squared_trace = 2 * sample_norm + n.square() - 3 * n + 1 - n * fourth_term
    # A smaller estimate of tr(S^2) may be nothing but the rounding error of sums in float32.
    squared_norm = torch.where(squared_norm.detach() > 1e-6 * uncorrected_norm.detach(), squared_norm, torch.nan)
    return (squared_trace / squared_norm - 1) / (moments.dim - 1)


def check_covariance(covariance: Tensor, name: str) -> None:
    """Raise `UserError` unless a tensor is a covariance matrix; `name` names it in the message.

    A covariance is `(d, d)`, floating, finite, not zero, and symmetric positive semi-definite up to the rounding of
    float32.
    """
    if not isinstance(covariance, Tensor):
        raise UserError(f"{name} is a {type(covariance).__name__}; expected a tensor (d, d)")
    if not covariance.is_floating_point():
        raise UserError(f"{name} is {covariance.dtype}; expected a floating dtype")
    if covariance.dim() != 2 or covariance.shape[0] != covariance.shape[1]:
        raise UserError(f"{name} has shape {tuple(covariance.shape)}; expected (d, d)")
    _check_nonzero_trace(covariance, name)
    # The tolerance fits float32 even for float64 matrices, which are often sums over float32 points.
    tolerance = math.sqrt(torch.finfo(torch.float32).eps)
    normalized, _ = _divide_by_trace(covariance.detach())
    if (normalized - normalized.T).abs().max() > tolerance * normalized.diagonal().max():
        raise UserError(f"{name} is not symmetric; expected a covariance")
    # The Cholesky decomposition fails if an eigenvalue is below minus the tolerance.
    normalized.diagonal().add_(tolerance)
    if torch.linalg.cholesky_ex(normalized).info.item() != 0:
        raise UserError(f"{name} has negative eigenvalues; expected a covariance (positive semi-definite)")


def _to_moments(points: Tensor | MomentsT, mask: Tensor | None, moments_class: type[MomentsT]) -> MomentsT:
    if not isinstance(points, Moments):
        check_points(points)
        # Sums in float32, as of an accumulator, would lose the small points next to a few very large ones.
        return moments_class.of(points.to(accumulation_dtype(points.device)), mask)
    if mask is not None:
        raise UserError("a mask was given with moments; give it to Moments.update, with the points")
    return points


def _compute_nonzero_covariance(moments: Moments) -> Tensor:
    covariance = moments.covariance()
    squared_mean = moments.mean.square().sum()
    _check_nonzero_trace(covariance, "the covariance of the points", squared_mean, moments.epsilon)
    return covariance


def _check_same_shape(covariance: Tensor, shrinkage_covariance: Tensor) -> None:
    if covariance.shape != shrinkage_covariance.shape:
        raise UserError(
            f"the shrinkage covariance has shape {tuple(shrinkage_covariance.shape)}; expected "
            f"{tuple(covariance.shape)} like the covariance of the points"
        )


def _check_nonzero_trace(
    covariance: Tensor, name: str, squared_mean: Tensor | None = None, epsilon: Tensor | float = 0.0
) -> None:
    dim = covariance.shape[0]
    if dim < 2:
        raise UserError(f"isotropy needs at least 2 dimensions; {name} has {dim}")
    if not torch.isfinite(covariance.detach()).all():
        raise NonFiniteError(f"{name} is not finite; look for NaN, infinite or too large values in the points")
    trace = covariance.detach().diagonal().sum()  # torch 2.10 has no trace in half precision.
    if is_rounding(trace, trace.new_zeros(()) if squared_mean is None else squared_mean, epsilon):
        raise UserError(
            f"{name} is zero, as all points are equal or differ by too little for their dtype: its isotropy is not "
            "defined; give other points, or multiply them by a constant"
        )


def _divide_by_trace(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return a covariance S divided by its trace, and the trace, in float64 (float32 on MPS).

    Dividing by the trace keeps the squares of very large or small covariances in range. float32 sums of d^2 squares
    would lose five digits, and float16 traces would overflow.
    """
    covariance = covariance.to(accumulation_dtype(covariance.device))
    trace = covariance.diagonal().sum()
    return covariance / trace, trace
