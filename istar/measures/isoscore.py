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

import torch
from torch import Tensor

from istar.errors import NonFiniteError, UserError
from istar.measures.moments import Moments


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
    return closed_form(_covariance(points, mask), "the covariance of the points")


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
    return closed_form(shrink(covariance, shrinkage_covariance, zeta), "the shrunk covariance")


def isoscore_from_covariance(covariance: Tensor) -> Tensor:
    """IsoScore of a covariance `(d, d)`; see `isoscore`.

    Raises:
        UserError: if it is not square, not finite, zero, or not symmetric positive semi-definite to rounding.
    """
    check_covariance(covariance, "the covariance")
    return closed_form(covariance, "the covariance")


def closed_form(covariance: Tensor, name: str = "the covariance") -> Tensor:
    """`isoscore_from_covariance` without the tests of symmetry and sign that cost O(d^3): for sums of squares."""
    _check_spread(covariance, name)
    normalized, _ = _normalized(covariance)
    return (1 / normalized.square().sum() - 1) / (covariance.shape[0] - 1)


def shrink(covariance: Tensor, shrinkage_covariance: Tensor, zeta: float) -> Tensor:
    r""":math:`(1 - \zeta) \Sigma_X + \zeta \Sigma_S`, `(d, d)`: step 4 of Algorithm 1.

    Raises:
        UserError: for zeta outside [0, 1] or shapes that differ.
    """
    if not 0 <= zeta <= 1:
        raise UserError(f"zeta is {zeta}; expected a number from 0 (no shrinkage) to 1 (only the shrinkage covariance)")
    if covariance.shape != shrinkage_covariance.shape:
        raise UserError(
            f"the shrinkage covariance has shape {tuple(shrinkage_covariance.shape)}; expected "
            f"{tuple(covariance.shape)} like the covariance of the points"
        )
    return (1 - zeta) * covariance + zeta * shrinkage_covariance.to(covariance)


def isoscore_gradient(covariance: Tensor) -> Tensor:
    r"""The derivative of IsoScore by the covariance, `(d, d)`, symmetric, in the covariance's dtype.

    With t = tr(S), R = S / t and f = ||R||_F^2: :math:`\partial\iota/\partial S = \frac{2}{(d-1)\,t f}(I - R/f)`.
    Zero where S is a multiple of the identity, the maximum. Inputs are not checked.
    """
    normalized, trace = _normalized(covariance)
    squared_norm = normalized.square().sum()
    scale = 2 / ((covariance.shape[0] - 1) * trace * squared_norm)
    gradient = normalized * -(scale / squared_norm)
    gradient.diagonal().add_(scale)
    return gradient.to(covariance.dtype)


def check_covariance(covariance: Tensor, name: str) -> None:
    """Refuse what is not a covariance: the closed form needs symmetric positive semi-definite input."""
    if covariance.dim() != 2 or covariance.shape[0] != covariance.shape[1]:
        raise UserError(f"{name} has shape {tuple(covariance.shape)}; expected (d, d)")
    _check_spread(covariance, name)
    rounding = math.sqrt(torch.finfo(torch.promote_types(covariance.dtype, torch.float32)).eps)
    matrix, _ = _normalized(covariance.detach())
    if (matrix - matrix.T).abs().max() > rounding * matrix.diagonal().max():
        raise UserError(f"{name} is not symmetric; expected a covariance")
    matrix.diagonal().add_(rounding)
    if torch.linalg.cholesky_ex(matrix).info.item() != 0:
        raise UserError(f"{name} has negative eigenvalues; expected a covariance (positive semi-definite)")


def _covariance(points: Tensor | Moments, mask: Tensor | None) -> Tensor:
    if isinstance(points, Moments):
        if mask is not None:
            raise UserError("a mask was given with moments; give it to Moments.update, with the points")
        return points.covariance()
    return Moments.of(points, mask).covariance()


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
