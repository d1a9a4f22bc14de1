"""The TwoNN estimator of the intrinsic dimension of a point cloud."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures.rows import check_finite, row_norms

_DISTANCES_PER_BLOCK = 2**22
"""Number of distances that are computed at once: 32 MiB in float64."""
_NUM_CANDIDATES = 8
"""Number of candidates for the two nearest neighbours of a point: more than two, for near ties and rounding errors."""
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
        points: `(n, d)` of any floating dtype, on any device; distances are computed in float64, in blocks. Near
            duplicates, such as the occurrences of one token in a first layer, lower the estimate: pass one of each.
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
    return float(_fit_slope(_ascending_log_ratios(points, discard), discard))


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
    log_ratios = _ascending_log_ratios(points, discard)
    generator = torch.Generator().manual_seed(seed)
    n = len(log_ratios)
    samples = [torch.randint(n, (n,), generator=generator).to(log_ratios.device) for _ in range(resamples)]
    slopes = torch.stack([_fit_slope(log_ratios[sample].sort().values, discard) for sample in samples])
    return Dimension(float(_fit_slope(log_ratios, discard)), float(slopes.std()))


def _ascending_log_ratios(points: Tensor, discard: float) -> Tensor:
    """Return log(r_2 / r_1) of each distinct point in ascending order, after checking that a slope can be fitted."""
    ratios = _neighbour_ratios(_distinct_points(points))
    n = len(ratios)
    if not 0 <= discard < 1 or int(n * (1 - discard)) < 1:
        raise UserError(f"discard is {discard}; expected a share in [0, 1) that leaves some of {n} points")
    log_ratios = ratios.sort().values.log()
    if log_ratios[_num_kept(n, discard) - 1] < _TOLERANCE:
        raise UserError("the first two neighbours of the points are equally far: their dimension is not defined")
    return log_ratios


def _fit_slope(log_ratios: Tensor, discard: float) -> Tensor:
    """Fit -log(1 - F) = d log(ratio), F the empirical distribution function, to ascending log ratios; return d, 0-d."""
    n = len(log_ratios)
    x = log_ratios[: _num_kept(n, discard)]
    y = -torch.log1p(-torch.arange(1, len(x) + 1, dtype=x.dtype, device=x.device) / n)
    return x @ y / (x @ x)


def _num_kept(n: int, discard: float) -> int:
    """Return how many of n ratios are fitted: not the largest share `discard`, and never the largest one."""
    return min(int(n * (1 - discard)), n - 1)


def _distinct_points(points: Tensor) -> Tensor:
    """Return the points without duplicates, in float64, scaled to a largest coordinate between 1/2 and 1."""
    if points.dim() != 2 or points.shape[1] < 1:
        raise UserError(f"points have shape {tuple(points.shape)}; expected (n, d)")
    if not points.is_floating_point():
        raise UserError(f"points are {points.dtype}; expected a floating dtype")
    points = points.detach()
    # MPS has no float64.
    points = (points.cpu() if points.device.type == "mps" else points).double()
    check_finite(points, "the points")
    distinct = points.unique(dim=0) if len(points) else points
    if len(distinct) < 3:
        raise UserError(f"{len(distinct)} distinct points have no dimension; expected at least 3")
    # Scaling keeps the squares of very large or small coordinates in range; by a power of two, it rounds nothing. The
    # exponent is limited, because the reciprocal of a subnormal power overflows.
    _, exponent = math.frexp(float(distinct.abs().max()))
    return distinct * 2.0 ** -max(exponent, -1000)


def _neighbour_ratios(points: Tensor) -> Tensor:
    """Return the ratio of the distances to the second and first nearest neighbour, for each of n >= 3 distinct points.

    Candidates for the two neighbours are the points with the smallest squared distances by a matrix product,
    |x|^2 + |y|^2 - 2xy, which is fast but loses small distances by cancellation. The distances of the candidates are
    then computed directly. A point whose candidates are not certain to contain its neighbours is compared with all
    others directly.
    """
    # Distances do not depend on the origin; about the mean, the product loses less.
    centered = points - points.mean(0)
    norms = row_norms(centered)
    error_bounds, relative_error = _product_error_bounds(norms, points.shape[1]), _relative_error_bound(points.shape[1])
    num_candidates = min(_NUM_CANDIDATES, len(points) - 1)
    ratios = []
    for rows in torch.arange(len(points), device=points.device).split(max(1, _DISTANCES_PER_BLOCK // len(points))):
        squared_distances = _squared_distances_by_product(centered, norms, rows)
        squared_distances[torch.arange(len(rows), device=points.device), rows] = torch.inf
        estimates, candidates = squared_distances.topk(num_candidates, largest=False)
        two_smallest = _direct_distances(points, rows, candidates).topk(2, largest=False).values
        # Every other point is at least as far away as the last candidate, up to the error of the product.
        is_uncertain = estimates[:, -1] - error_bounds[rows] <= two_smallest[:, 1].square() * (1 + relative_error)
        if num_candidates < len(points) - 1 and is_uncertain.any():
            two_smallest[is_uncertain] = _two_smallest_distances(points, rows[is_uncertain])
        ratios.append(two_smallest[:, 1] / two_smallest[:, 0])
    return torch.cat(ratios)


def _squared_distances_by_product(centered: Tensor, norms: Tensor, rows: Tensor) -> Tensor:
    """Return the squared distances of the points with indices `rows` to all points by a matrix product, `(r, n)`."""
    return norms[rows, None].square() + norms.square() - 2 * centered[rows] @ centered.T


def _direct_distances(points: Tensor, rows: Tensor, others: Tensor) -> Tensor:
    """Return the distances between the points with indices `rows`, `(r,)`, and `others`, `(r, k)`, as `(r, k)`."""
    return torch.stack([row_norms(points[rows] - points[column]) for column in others.T], dim=1)


def _two_smallest_distances(points: Tensor, rows: Tensor) -> Tensor:
    """Return the distances `(r, 2)` of the points with indices `rows` `(r,)` to their two nearest neighbours."""
    distances = torch.cdist(points[rows], points, compute_mode="donot_use_mm_for_euclid_dist")
    distances[torch.arange(len(rows), device=points.device), rows] = torch.inf
    # The distances are computed again, so that all ratios come from the same arithmetic.
    return _direct_distances(points, rows, distances.topk(2, largest=False).indices).sort(1).values


def _relative_error_bound(d: int) -> float:
    """Return a bound of the relative rounding error of a sum of d products and a few more operations."""
    return (d + 8) * torch.finfo(torch.float64).eps


def _product_error_bounds(norms: Tensor, d: int) -> Tensor:
    r"""Return a bound of the errors of each point's squared distances by the matrix product, `(n,)`.

    `norms` are the distances R of the points from the origin, and u is the unit roundoff. Subtracting the origin moves
    a point by at most u R, which changes a squared distance by at most about :math:`2 u (R_i + R_j)^2`. A dot product
    of d terms is off by at most :math:`d u / (1 - d u)` times the product of the norms, in any order of summation, so
    that the sum of the three terms is off by about :math:`(d + 3) u (R_i + R_j)^2`. The bound is twice as large as both
    together, and takes the largest norm for :math:`R_j`.
    """
    return _relative_error_bound(d) * (norms + norms.max()).square()
