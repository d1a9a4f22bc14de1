"""Intrinsic dimension: how many coordinates a cloud needs locally, however many it lies in."""

from typing import NamedTuple

import torch
from torch import Tensor

from istar.errors import NonFiniteError, UserError

_BLOCK = 2**22
"""Distances computed at a time: 32 MiB."""
_EQUALLY_FAR = 1e-12
"""Logarithm of a ratio of distances that is 1 to rounding."""


def two_nn(points: Tensor, discard: float = 0.1) -> float:
    r"""Intrinsic dimension of a point cloud from the distances to the first two neighbours of each point.

    *Estimating the intrinsic dimension of datasets by a minimal neighborhood information* (Facco et al., 2017): where
    the density hardly changes up to the second neighbour, :math:`\mu = r_2 / r_1` has the distribution
    :math:`F(\mu) = 1 - \mu^{-d}`. So d is the slope of the least squares line through the origin of
    :math:`-\log(1 - F(\mu))` over :math:`\log\mu`, with :math:`F(\mu_{(i)}) = i / n` for the i-th smallest of n.

    Points that are equal in all coordinates count once, as they have no first distance.

    Args:
        points: `(n, d)` of any floating dtype, on any device; distances are computed in float64, in blocks.
        discard: share of the largest ratios that are left out, in [0, 1). The very largest never counts: F is 1 there.

    Returns:
        d, above 0. Unchanged by rotation, translation and scale.

    Raises:
        UserError: for fewer than 3 distinct points, values that are not finite, a `discard` that leaves no point, or
            points whose two neighbours are all equally far (a lattice), which have no slope.

    >>> square = torch.rand(2000, 2, generator=torch.Generator().manual_seed(0))
    >>> round(two_nn(square)), round(two_nn(square @ torch.randn(2, 50, generator=torch.Generator().manual_seed(1))))
    (2, 2)
    """
    return float(_slope(_logarithms(points, discard), discard))


class Dimension(NamedTuple):
    """An intrinsic dimension and the standard error that its sample leaves."""

    value: float
    error: float


def two_nn_with_error(points: Tensor, discard: float = 0.1, resamples: int = 200, seed: int = 0) -> Dimension:
    """`two_nn` of a sample, and by how much another sample of the same size would differ from it.

    The error is the standard deviation of the estimate over bootstrap samples of the ratios of distances. It holds for
    points drawn independently of each other; a smaller sample also has farther neighbours, and so sees the cloud at a
    larger scale, of which the error knows nothing.

    Args:
        points: see `two_nn`.
        discard: see `two_nn`.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Raises:
        UserError: see `two_nn`.
    """
    logarithms = _logarithms(points, discard)
    generator = torch.Generator().manual_seed(seed)
    n = len(logarithms)
    drawn = [torch.randint(n, (n,), generator=generator).to(logarithms.device) for _ in range(resamples)]
    slopes = torch.stack([_slope(logarithms[numbers].sort().values, discard) for numbers in drawn])
    return Dimension(float(_slope(logarithms, discard)), float(slopes.std()))


def _logarithms(points: Tensor, discard: float) -> Tensor:
    """log(r_2 / r_1) of each distinct point, ascending."""
    ratios = _neighbour_ratios(_distinct(points))
    n = len(ratios)
    if not 0 <= discard < 1 or int(n * (1 - discard)) < 1:
        raise UserError(f"discard is {discard}; expected a share in [0, 1) that leaves some of {n} points")
    x = ratios.sort().values.log()
    if x[_kept(n, discard) - 1] < _EQUALLY_FAR:
        raise UserError("the first two neighbours of the points are equally far: their dimension is not defined")
    return x


def _slope(logarithms: Tensor, discard: float) -> Tensor:
    n = len(logarithms)
    x = logarithms[: _kept(n, discard)]
    y = -torch.log1p(-torch.arange(1, len(x) + 1, dtype=x.dtype, device=x.device) / n)
    return x @ y / (x @ x)


def _kept(n: int, discard: float) -> int:
    return min(int(n * (1 - discard)), n - 1)


def _distinct(points: Tensor) -> Tensor:
    """The points in float64 and of size 1, each one once."""
    if points.dim() != 2 or points.shape[1] < 1:
        raise UserError(f"points have shape {tuple(points.shape)}; expected (n, d)")
    if not points.is_floating_point():
        raise UserError(f"points are {points.dtype}; expected a floating dtype")
    points = points.detach()
    # MPS has no float64.
    wide = (points.cpu() if points.device.type == "mps" else points).double()
    if not wide.isfinite().all():
        raise NonFiniteError("the points are not finite; look for NaN or infinite values in them")
    distinct = wide.unique(dim=0) if len(wide) else wide
    if len(distinct) < 3:
        raise UserError(f"{len(distinct)} distinct points have no dimension; expected at least 3")
    # The squares of very large or small coordinates are out of range.
    return distinct / distinct.abs().max()


def _neighbour_ratios(points: Tensor) -> Tensor:
    """Distance to the second neighbour over that to the first, of each point."""
    rows = max(1, _BLOCK // len(points))
    nearest = [
        # Not by matrix products, which lose the small distances: |x|^2 + |y|^2 - 2xy cancels.
        torch.cdist(block, points, compute_mode="donot_use_mm_for_euclid_dist").topk(3, largest=False).values
        for block in points.split(rows)
    ]
    # The nearest of all is the point itself.
    _, first, second = torch.cat(nearest).T
    ratios: Tensor = second / first
    return ratios
