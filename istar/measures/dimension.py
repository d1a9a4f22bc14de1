"""The TwoNN estimator of the intrinsic dimension of a point cloud."""

from typing import NamedTuple

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures.rows import check_finite

_BLOCK = 2**22
"""Distances per block: 32 MiB in float64."""
_TOLERANCE = 1e-12
"""Ratios of distances whose logarithm is below this tolerance count as 1."""


def two_nn(points: Tensor, discard: float = 0.1) -> float:
    r"""Estimate the intrinsic dimension of a point cloud from distances between nearest neighbours.

    The method is that of *Estimating the intrinsic dimension of datasets by a minimal neighborhood information* (Facco
    et al., 2017). If the density is nearly constant up to the second neighbour, the ratio of the two distances,
    :math:`\mu = r_2 / r_1`, has the distribution function :math:`F(\mu) = 1 - \mu^{-d}`. Then d is the slope of
    :math:`-\log(1 - F(\mu))` over :math:`\log\mu`. This function fits the slope by least squares through the origin,
    with :math:`F(\mu_{(i)}) = i / n` for the i-th smallest of n ratios.

    Duplicates of a point are dropped, because their distance to the nearest neighbour is 0.

    Args:
        points: `(n, d)` of any floating dtype, on any device; distances are computed in float64, in blocks.
        discard: share of the largest ratios to leave out, in [0, 1). The largest ratio is always left out, because
            F is 1 there.

    Returns:
        d, a positive number that does not change if the cloud is rotated, translated or scaled.

    Raises:
        UserError: for fewer than 3 distinct points, values that are not finite, a `discard` that leaves no point, or
            points whose two nearest neighbours are all at the same distance, as in a lattice.

    >>> square = torch.rand(2000, 2, generator=torch.Generator().manual_seed(0))
    >>> round(two_nn(square)), round(two_nn(square @ torch.randn(2, 50, generator=torch.Generator().manual_seed(1))))
    (2, 2)
    """
    return float(_slope(_log_ratios(points, discard), discard))


class Dimension(NamedTuple):
    """An estimate of the intrinsic dimension, and its standard error."""

    value: float
    error: float


def two_nn_with_error(points: Tensor, discard: float = 0.1, resamples: int = 200, seed: int = 0) -> Dimension:
    """Estimate the intrinsic dimension with `two_nn`, and the standard error of the estimate by a bootstrap.

    The error is the standard deviation of the estimate over bootstrap samples of the ratios of distances. It assumes
    independent points. It does not include the bias of small samples, whose nearest neighbours are farther away, so
    that the estimate describes the cloud at a larger scale.

    Args:
        points: as in `two_nn`, like `discard`.
        resamples: number of bootstrap samples.
        seed: seed of the bootstrap's random generator.

    Raises:
        UserError: see `two_nn`.
    """
    log_ratios = _log_ratios(points, discard)
    generator = torch.Generator().manual_seed(seed)
    n = len(log_ratios)
    samples = [torch.randint(n, (n,), generator=generator).to(log_ratios.device) for _ in range(resamples)]
    slopes = torch.stack([_slope(log_ratios[sample].sort().values, discard) for sample in samples])
    return Dimension(float(_slope(log_ratios, discard)), float(slopes.std()))


def _log_ratios(points: Tensor, discard: float) -> Tensor:
    """Return log(r_2 / r_1) of each distinct point in ascending order, after checking that a slope can be fitted."""
    ratios = _neighbour_ratios(_distinct_points(points))
    n = len(ratios)
    if not 0 <= discard < 1 or int(n * (1 - discard)) < 1:
        raise UserError(f"discard is {discard}; expected a share in [0, 1) that leaves some of {n} points")
    log_ratios = ratios.sort().values.log()
    if log_ratios[_num_kept(n, discard) - 1] < _TOLERANCE:
        raise UserError("the first two neighbours of the points are equally far: their dimension is not defined")
    return log_ratios


def _slope(log_ratios: Tensor, discard: float) -> Tensor:
    """Fit -log(1 - F) = d log(ratio) to ascending log ratios and return d, 0-d."""
    n = len(log_ratios)
    x = log_ratios[: _num_kept(n, discard)]
    y = -torch.log1p(-torch.arange(1, len(x) + 1, dtype=x.dtype, device=x.device) / n)
    return x @ y / (x @ x)


def _num_kept(n: int, discard: float) -> int:
    """Number of ratios that the fit uses, out of n."""
    return min(int(n * (1 - discard)), n - 1)


def _distinct_points(points: Tensor) -> Tensor:
    """Return the points without duplicates, in float64, scaled to a largest coordinate of 1."""
    if points.dim() != 2 or points.shape[1] < 1:
        raise UserError(f"points have shape {tuple(points.shape)}; expected (n, d)")
    if not points.is_floating_point():
        raise UserError(f"points are {points.dtype}; expected a floating dtype")
    points = points.detach()
    # MPS has no float64.
    wide = (points.cpu() if points.device.type == "mps" else points).double()
    check_finite(wide, "the points")
    distinct = wide.unique(dim=0) if len(wide) else wide
    if len(distinct) < 3:
        raise UserError(f"{len(distinct)} distinct points have no dimension; expected at least 3")
    # Scaling keeps the squares of very large or small coordinates in range.
    return distinct / distinct.abs().max()


def _neighbour_ratios(points: Tensor) -> Tensor:
    """Return the ratio of the distances to the second and to the first neighbour, for each point."""
    rows = max(1, _BLOCK // len(points))
    nearest = [
        # The faster mode by matrix products, |x|^2 + |y|^2 - 2xy, loses small distances by cancellation.
        torch.cdist(block, points, compute_mode="donot_use_mm_for_euclid_dist").topk(3, largest=False).values
        for block in points.split(rows)
    ]
    # The first of the three nearest points is the point itself.
    _, first, second = torch.cat(nearest).T
    ratios: Tensor = second / first
    return ratios
