"""The TwoNN estimator of the intrinsic dimension of a point cloud."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures.input_checks import check_finite, row_norms

_DISTANCES_PER_BLOCK = 2**22
"""Number of distances that are computed at once: 32 MiB in float64."""
_NUM_CANDIDATES = 16
"""Candidates for the two nearest neighbours of a point: many, because rounding changes the order of near duplicates."""
_TOLERANCE = 1e-12
"""Ratios of distances whose logarithm is below this tolerance count as 1: rounding makes equal distances differ."""


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
    return float(_fit_slope(_compute_sorted_log_ratios(points, discard), discard))


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
        points: as in `two_nn`.
        discard: as in `two_nn`.
        resamples: number of bootstrap samples.
        seed: seed of the bootstrap's random generator.

    Raises:
        UserError: see `two_nn`.
    """
    log_ratios = _compute_sorted_log_ratios(points, discard)
    generator = torch.Generator().manual_seed(seed)
    n = len(log_ratios)
    # Random numbers come from the CPU, so that they are equal on all devices.
    samples = torch.randint(n, (resamples, n), generator=generator).to(log_ratios.device)
    # The ratios are in ascending order, so those of a sample are too if its indices are.
    slopes = _fit_slope(log_ratios[samples.sort(dim=1).values], discard)
    return Dimension(float(_fit_slope(log_ratios, discard)), float(slopes.std()))


def _compute_sorted_log_ratios(points: Tensor, discard: float) -> Tensor:
    """Return log(r_2 / r_1) in ascending order, for the distances of each distinct point to its two nearest neighbours.

    Raises:
        UserError: if no slope can be fitted to these numbers, see `two_nn`.
    """
    ratios = _compute_neighbour_ratios(_find_distinct_points(points))
    n = len(ratios)
    if not 0 <= discard < 1 or int(n * (1 - discard)) < 1:
        raise UserError(f"discard is {discard}; expected a share in [0, 1) that leaves some of {n} points")
    log_ratios = ratios.sort().values.log()
    if log_ratios[_count_fitted_ratios(n, discard) - 1] < _TOLERANCE:
        raise UserError("the first two neighbours of the points are equally far: their dimension is not defined")
    return log_ratios


def _fit_slope(log_ratios: Tensor, discard: float) -> Tensor:
    """Return the dimension d, `(...)`, of the least-squares fit -log(1 - F) = d log(ratio) to log ratios `(..., n)`.

    The log ratios are in ascending order, and F is their empirical distribution function. The largest ones, a share of
    `discard`, are left out.
    """
    n = log_ratios.shape[-1]
    x = log_ratios[..., : _count_fitted_ratios(n, discard)]
    y = -torch.log1p(-torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device) / n)
    slopes: Tensor = x @ y / x.square().sum(-1)
    return slopes


def _count_fitted_ratios(n: int, discard: float) -> int:
    """Return how many of n ratios enter the fit: all but the largest share `discard`, and never the largest ratio."""
    return min(int(n * (1 - discard)), n - 1)


def _find_distinct_points(points: Tensor) -> Tensor:
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


def _compute_neighbour_ratios(points: Tensor) -> Tensor:
    """Return the ratio of the distances to the second and first nearest neighbour, for each of n >= 3 distinct points.

    Candidates for the two neighbours are the points with the smallest squared distances by a matrix product in float64,
    |x|^2 + |y|^2 - 2xy, which is fast but loses the smallest distances by cancellation. The distances of the candidates
    are then computed from the differences x - y. A group of more than 16 points whose distances vanish in the product,
    at about 1e-8 of the cloud's size, may therefore get neighbours that are not the nearest.
    """
    # Distances do not depend on the origin; about the mean, the product loses fewer digits.
    centered = points - points.mean(0)
    squared_norms = centered.square().sum(1)
    num_candidates = min(_NUM_CANDIDATES, len(points) - 1)
    ratios = []
    for indices in torch.arange(len(points), device=points.device).split(max(1, _DISTANCES_PER_BLOCK // len(points))):
        squared_distances = torch.addmm(squared_norms, centered[indices], centered.T, alpha=-2)
        squared_distances += squared_norms[indices, None]
        # A point is not its own neighbour.
        squared_distances[torch.arange(len(indices), device=points.device), indices] = torch.inf
        candidates = squared_distances.topk(num_candidates, largest=False).indices
        differences = [row_norms(points[indices] - points[neighbours]) for neighbours in candidates.T]
        nearest, second = torch.stack(differences).topk(2, dim=0, largest=False).values
        ratios.append(second / nearest)
    return torch.cat(ratios)
