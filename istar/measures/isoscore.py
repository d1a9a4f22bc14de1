r"""IsoScore and IsoScore\*: how far a covariance is from a multiple of the identity.

*Stable Anisotropic Regularization* (Rudman and Eickhoff, ICLR 2024), Algorithm 1. With the eigenvalues
:math:`\Lambda` of the covariance S, steps 5 to 9 reduce to

.. math::
    \iota(S) = \frac{(\sum \Lambda)^2 / \sum \Lambda^2 - 1}{d - 1}
             = \frac{\operatorname{tr}(S)^2 / \lVert S \rVert_F^2 - 1}{d - 1},

the participation ratio of the spectrum rescaled to [0, 1]. Nothing is decomposed, so value and gradient are exact for
singular and repeated eigenvalues too.
"""

import math
from typing import TypeVar

import torch
from torch import Tensor

from istar.errors import NonFiniteError, UserError
from istar.measures.moments import FourthMoments, Moments

M = TypeVar("M", bound=Moments)


def isoscore(points: Tensor | Moments, mask: Tensor | None = None) -> Tensor:
    """IsoScore of a point cloud: 1 if all directions have equal variance, 0 if one direction has it all.

    With fewer than about ten points per dimension it underestimates the score of the distribution that the points
    come from (the paper's Figure 2); `isoscore_star` is for that.

    Args:
        points: `(..., d)` of any floating dtype, or the moments of a cloud.
        mask: `(...)`, bool or 0/1; points where it is 0 are left out. Not with moments.

    Returns:
        0-d tensor in [0, 1], float64 (float32 on MPS), on the points' device, differentiable.

    Raises:
        UserError: for fewer than 2 points or dimensions, points that are all equal, or values that are not finite.

    >>> cross = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> round(isoscore(cross).item(), 6), round(isoscore(cross * torch.tensor([1.0, 0.0])).item(), 6)
    (1.0, 0.0)
    """
    covariance = _covariance(points, mask)
    _check_spread(covariance, "the covariance of the points")
    return closed_form(covariance)


def isoscore_star(
    points: Tensor | Moments, shrinkage_covariance: Tensor, zeta: float, mask: Tensor | None = None
) -> Tensor:
    r"""IsoScore\* (Algorithm 1): IsoScore of :math:`(1 - \zeta) \operatorname{Cov}(X) + \zeta \Sigma_S`.

    Args:
        points: as in `isoscore`.
        shrinkage_covariance: Sigma_S, `(d, d)`, symmetric positive semi-definite.
        zeta: weight of Sigma_S in [0, 1]; 0 is IsoScore, 1 ignores the points.
        mask: as in `isoscore`.

    Returns:
        As `isoscore`; differentiable in the points and in Sigma_S.

    Raises:
        UserError: as `isoscore`, and for zeta outside [0, 1] or a Sigma_S of the wrong shape or not a covariance.
    """
    covariance = _covariance(points, mask)
    check_covariance(shrinkage_covariance, "the shrinkage covariance")
    shrunk = shrink(covariance, shrinkage_covariance, zeta)
    _check_spread(shrunk, "the shrunk covariance")
    return closed_form(shrunk)


def isoscore_unbiased(points: Tensor | FourthMoments, mask: Tensor | None = None) -> Tensor:
    r"""IsoScore of the distribution that a small sample comes from: both squares in the closed form are unbiased.

    Noise adds to :math:`\lVert C \rVert_F^2` of a sample covariance C, which is why `isoscore` of a few points is too
    low. Himeno and Yamada (2014), *Estimations for some functions of covariance matrix in high dimension under
    non-normality and its applications*, take it out without assuming a distribution: with
    :math:`Q = \sum \lVert x_i - \bar x \rVert^4 / (n - 1)` and :math:`a = (n - 1) / (n (n - 2) (n - 3))`,

    .. math::
        \widehat{\operatorname{tr}(S^2)} &= a \, \bigl((n - 1)(n - 2) \lVert C \rVert_F^2
        + \operatorname{tr}(C)^2 - n Q\bigr) \\
        \widehat{\operatorname{tr}(S)^2} &= a \, \bigl(2 \lVert C \rVert_F^2
        + (n^2 - 3 n + 1) \operatorname{tr}(C)^2 - n Q\bigr)

    The score is (their ratio - 1) / (d - 1), as in the module's formula. A ratio of unbiased estimates is not unbiased
    itself, but nearly so: its bias falls with the variance of the denominator.

    They are the means over all quadruples of distinct points of :math:`((x_i - x_j)^T (x_k - x_l))^2 / 4` and
    :math:`\lVert x_i - x_j \rVert^2 \lVert x_k - x_l \rVert^2 / 4`. So neither is negative, the first is at most the
    second, and the score is never below 0. It can exceed 1, and must, or its mean could not be that of an isotropic
    distribution: nothing is clipped.

    Args:
        points: `(..., d)` of any floating dtype, independent of each other, or `FourthMoments` of a cloud. At least 4.
        mask: as in `isoscore`.

    Returns:
        0-d tensor in [0, inf), float64 (float32 on MPS), on the points' device, differentiable.

    Raises:
        UserError: as `isoscore`, for fewer than 4 points, for moments without the fourth-order sum, and where
            tr(S^2) is estimated as 0, so that there is no ratio: all points but one are equal, or all differences
            of unlike pairs are orthogonal.

    >>> cross = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> round(isoscore_unbiased(cross).item(), 6), round(isoscore_unbiased(cross * torch.tensor([1.0, 0.0])).item(), 6)
    (2.0, 0.0)
    """
    if isinstance(points, Moments) and not isinstance(points, FourthMoments):
        raise UserError("Moments do not hold the fourth-order sum that the unbiased score needs; give FourthMoments")
    moments = _moments(points, mask, FourthMoments)
    _check_unbiased(moments)
    return unchecked_unbiased_score(moments)


def shrinkage_intensity(moments: FourthMoments, shrinkage_covariance: Tensor) -> Tensor:
    r"""The zeta whose :math:`(1 - \zeta) C + \zeta T` has the least expected squared error: `reg.zeta=auto`.

    For a target T that does not depend on the points and C with mean S,

    .. math::
        E \lVert (1 - \zeta) C + \zeta T - S \rVert_F^2 = (1 - \zeta)^2 V + \zeta^2 \lVert T - S \rVert_F^2,
        \qquad V = \sum_{ij} \operatorname{Var}(C_{ij}),

    is least at :math:`\zeta^* = V / (V + \lVert T - S \rVert_F^2) = V / E \lVert C - T \rVert_F^2` (Ledoit and Wolf,
    2004; Schaefer and Strimmer, 2005, equation 7). The second form is estimated by
    :math:`\zeta = \min(1, \hat V / \lVert C - T \rVert_F^2)`. Schaefer and Strimmer's :math:`\hat V`, from the
    products :math:`w_{kij} = y_{ki} y_{kj}` of the centered points, is

    .. math::
        \hat V = \frac{n}{(n-1)^3} \sum_{ij} \sum_k (w_{kij} - \bar w_{ij})^2
        = \frac{n}{(n-1)^3} \Bigl(F - \frac{(n-1)^2}{n} \lVert C \rVert_F^2\Bigr),
        \qquad F = \sum_k \lVert y_k \rVert^4,

    because :math:`\sum_{ij} w_{kij}^2 = \lVert y_k \rVert^4` and :math:`\bar w = (n-1) C / n`. No d^2 variances are
    computed. :math:`\hat V` assumes independent points; if they come in groups that are alike, it is too small.

    Args:
        moments: of the points.
        shrinkage_covariance: T, `(d, d)`.

    Returns:
        0-d tensor in [0, 1], detached, in the moments' dtype, on their device; 0 where C equals T.

    Raises:
        UserError: for fewer than 2 points, points that are all equal, a T that is zero or not finite, or shapes that
            differ.
    """
    covariance = moments.covariance().detach()
    _check_shapes(covariance, shrinkage_covariance)
    _check_spread(covariance, "the covariance of the points")
    _check_spread(shrinkage_covariance, "the shrinkage covariance")
    return unchecked_intensity(moments, shrinkage_covariance)


def unchecked_intensity(moments: FourthMoments, shrinkage_covariance: Tensor) -> Tensor:
    """`shrinkage_intensity` without its checks, which wait for a device; NaN for moments that have no intensity."""
    normalized, trace = _normalized(covariance_or_nan(moments).detach())
    count = moments.count
    fourth = moments.fourth.detach() / trace / trace
    variance = count / (count - 1) ** 3 * fourth - normalized.square().sum() / (count - 1)
    distance = (normalized - shrinkage_covariance.detach().to(normalized) / trace).square().sum()
    return (variance / distance.clamp(min=torch.finfo(distance.dtype).tiny)).clamp(0, 1)


def isoscore_from_covariance(covariance: Tensor) -> Tensor:
    """IsoScore of a covariance `(d, d)`; see `isoscore`.

    Raises:
        UserError: if it is not square, not finite, zero, or not symmetric positive semi-definite to rounding.
    """
    check_covariance(covariance, "the covariance")
    return closed_form(covariance)


def closed_form(covariance: Tensor) -> Tensor:
    """`isoscore_from_covariance` without its checks, which cost O(d^3) and wait for a device.

    NaN for a covariance that is zero or not finite.
    """
    normalized, _ = _normalized(covariance)
    return (1 / normalized.square().sum() - 1) / (covariance.shape[0] - 1)


def shrink(covariance: Tensor, shrinkage_covariance: Tensor, zeta: float) -> Tensor:
    r""":math:`(1 - \zeta) \Sigma_X + \zeta \Sigma_S`, `(d, d)`: step 4 of Algorithm 1.

    Raises:
        UserError: for zeta outside [0, 1] or shapes that differ.
    """
    if not 0 <= zeta <= 1:
        raise UserError(f"zeta is {zeta}; expected a number from 0 (no shrinkage) to 1 (only the shrinkage covariance)")
    _check_shapes(covariance, shrinkage_covariance)
    return (1 - zeta) * covariance + zeta * shrinkage_covariance.to(covariance)


def covariance_or_nan(moments: Moments) -> Tensor:
    """The unbiased covariance `(d, d)`, without waiting for a device; NaN for fewer than 2 points."""
    return moments.scatter / torch.where(moments.count > 1, moments.count - 1, torch.nan)


def unchecked_unbiased_score(moments: FourthMoments) -> Tensor:
    """`isoscore_unbiased` without its checks, which wait for a device; NaN for moments that have no unbiased score."""
    squared_norm, squared_trace = _unbiased_estimates(moments)
    return (squared_trace / squared_norm - 1) / (moments.dim - 1)


def _unbiased_estimates(moments: FourthMoments) -> tuple[Tensor, Tensor]:
    r"""The estimates of :math:`tr(S^2)` and :math:`tr(S)^2`, both divided by :math:`a \operatorname{tr}(C)^2`.

    The first is NaN where it is not defined.
    """
    n = torch.where(moments.count < 4, torch.nan, moments.count)
    normalized, trace = _normalized(moments.scatter / (n - 1))
    q = moments.fourth / (n - 1) / trace / trace
    norm = normalized.square().sum()
    noisy = (n - 1) * (n - 2) * norm + 1
    squared_norm = noisy - n * q
    squared_trace = 2 * norm + n.square() - 3 * n + 1 - n * q
    # A smaller rest is the rounding of sums in float32.
    squared_norm = torch.where(squared_norm.detach() > 1e-6 * noisy.detach(), squared_norm, torch.nan)
    return squared_norm, squared_trace


def _check_unbiased(moments: FourthMoments) -> None:
    if moments.count < 4:
        raise UserError(f"{moments.count:g} points have no unbiased score; expected at least 4 points")
    _check_spread(moments.covariance(), "the covariance of the points")
    squared_norm, _ = _unbiased_estimates(moments)
    if not torch.isfinite(squared_norm):
        raise UserError(
            "the squared norm of the covariance is estimated as 0, so the unbiased score is not defined; more points, "
            "or points that are not all but one equal, have one"
        )


def check_covariance(covariance: Tensor, name: str) -> None:
    """Refuse a matrix that is not symmetric positive semi-definite to the rounding of float32.

    Raises:
        UserError: also for what is no square floating matrix, is zero, or is not finite.
    """
    if not isinstance(covariance, Tensor):
        raise UserError(f"{name} is a {type(covariance).__name__}; expected a tensor (d, d)")
    if not covariance.is_floating_point():
        raise UserError(f"{name} is {covariance.dtype}; expected a floating dtype")
    if covariance.dim() != 2 or covariance.shape[0] != covariance.shape[1]:
        raise UserError(f"{name} has shape {tuple(covariance.shape)}; expected (d, d)")
    _check_spread(covariance, name)
    # Also for float64, whose covariances are often sums over float32 points.
    rounding = math.sqrt(torch.finfo(torch.float32).eps)
    matrix, _ = _normalized(covariance.detach())
    if (matrix - matrix.T).abs().max() > rounding * matrix.diagonal().max():
        raise UserError(f"{name} is not symmetric; expected a covariance")
    matrix.diagonal().add_(rounding)
    if torch.linalg.cholesky_ex(matrix).info.item() != 0:
        raise UserError(f"{name} has negative eigenvalues; expected a covariance (positive semi-definite)")


def _covariance(points: Tensor | Moments, mask: Tensor | None) -> Tensor:
    return _moments(points, mask, Moments).covariance()


def _moments(points: Tensor | M, mask: Tensor | None, kind: type[M]) -> M:
    if isinstance(points, Tensor):
        return kind.of(points, mask)
    if mask is not None:
        raise UserError("a mask was given with moments; give it to Moments.update, with the points")
    return points


def _check_shapes(covariance: Tensor, shrinkage_covariance: Tensor) -> None:
    if covariance.shape != shrinkage_covariance.shape:
        raise UserError(
            f"the shrinkage covariance has shape {tuple(shrinkage_covariance.shape)}; expected "
            f"{tuple(covariance.shape)} like the covariance of the points"
        )


def _check_spread(covariance: Tensor, name: str) -> None:
    dim = covariance.shape[0]
    if dim < 2:
        raise UserError(f"isotropy needs at least 2 dimensions; {name} has {dim}")
    if not torch.isfinite(covariance.detach()).all():
        raise NonFiniteError(f"{name} is not finite; look for NaN or infinite values in the points")
    if covariance.detach().trace() <= 0:
        raise UserError(f"{name} is zero (all points are equal): its isotropy is not defined")


def _normalized(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """S / tr(S) and tr(S): dividing first keeps the squares of very large or small covariances in range.

    In float64 (float32 on MPS): float32 sums over d^2 squares lose five digits, float16 traces overflow.
    """
    wide = covariance.to(torch.float32 if covariance.device.type == "mps" else torch.float64)
    trace = wide.diagonal().sum()
    return wide / trace, trace
