"""Gride, an estimator of the intrinsic dimension of a point cloud as a function of the scale."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures.dimension import Dimension
from istar.measures.input_checks import check_matrix

_DISTANCES_PER_BLOCK = 2**22
"""Number of distances that are computed at once: 32 MiB in float64."""
_TOLERANCE = 1e-12
"""Ratios of distances whose logarithm is below this tolerance count as 1: rounding makes equal distances differ."""


class ScaleDimension(NamedTuple):
    """An estimate of the intrinsic dimension at one scale."""

    n1: int
    """Number of the nearer neighbour; the farther one is number 2 n1."""
    value: float
    """Estimate of the dimension."""
    error: float
    """Standard error of the estimate; see `gride`."""
    distance: float
    """Average distance to the farther neighbour, the scale of the estimate, in the units of the points."""


def gride(points: Tensor, n1: int = 1, n2: int | None = None) -> Dimension:
    r"""Estimate the intrinsic dimension of a cloud from the distances of each point to two of its neighbours.

    The method is Gride (Denti et al., *The generalized ratios intrinsic dimension estimator*, Scientific Reports 12,
    2022). If the density is nearly constant up to the farther neighbour, the ratio :math:`\mu = r_{n_2} / r_{n_1}` of
    the distances to neighbours number :math:`n_2 > n_1` has the density

    .. math::
        f(\mu) = \frac{d (\mu^d - 1)^{n_2 - n_1 - 1}}{\mu^{(n_2 - 1) d + 1} B(n_2 - n_1, n_1)}, \qquad \mu > 1

    with Euler's beta function B. The estimate maximizes the likelihood of all n ratios, with natural logarithms, where
    :math:`(n - 1) \log d` replaces :math:`n \log d`. This is the convention of the authors' package DADApy; it makes
    the estimate unbiased for :math:`n_1 = 1, n_2 = 2`, which is the maximum-likelihood form of TwoNN,
    :math:`(n - 1) / \sum_i \log \mu_i`. `two_nn` fits the same model by least squares without the largest ratios.

    Larger :math:`n_1` measure the cloud at a larger scale, which is less affected by noise and near duplicates, but
    over which the density varies more. In high dimensions, the estimate is too small, because far more points would be
    needed, like that of `two_nn`. It does not change if the cloud is rotated, translated or scaled.

    Duplicates of a point are dropped. Points whose two distances are equal have no likelihood and are left out.

    Args:
        points: `(n, d)` of any floating dtype, on any device; distances are computed in float64, in blocks.
        n1: number of the nearer neighbour, at least 1.
        n2: number of the farther neighbour, at least n1 + 1; by default 2 n1.

    Returns:
        The estimate, a positive number, and its standard error :math:`1 / \sqrt{I}`, where I is the observed Fisher
        information. The error assumes independent ratios; ratios of points that share neighbours are not, so that it is
        too small for large :math:`n_1`. Time O(n² d), memory O(n n2) and the blocks.

    Raises:
        UserError: for points of another shape or dtype or that are not finite, numbers of neighbours that are out of
            range for the number of distinct points, or fewer than 2 points with different distances.

    >>> square = torch.rand(1000, 2, generator=torch.Generator().manual_seed(0))
    >>> round(gride(square, n1=4).value)
    2
    """
    n2 = 2 * n1 if n2 is None else n2
    if not 1 <= n1 < n2:
        raise UserError(f"n1 is {n1} and n2 is {n2}; expected 1 <= n1 < n2")
    distances, _ = _find_neighbour_distances(points, n2)
    return _fit_dimension(distances[:, n1 - 1], distances[:, n2 - 1], n1, n2)


def gride_scales(points: Tensor, max_neighbour: int = 64) -> list[ScaleDimension]:
    r"""Estimate the intrinsic dimension with `gride` at the scales n1 = 1, 2, 4, ..., each with n2 = 2 n1.

    A plateau over several scales is evidence of a dimension; a value that falls steeply from the first scales
    indicates noise or near duplicates at short distances.

    Args:
        points: as in `gride`.
        max_neighbour: largest n2, at least 2. Scales that need more neighbours than there are other points are left
            out.

    Returns:
        One estimate for each scale, in ascending order of n1. The scales share one computation of the distances.

    Raises:
        UserError: see `gride`.
    """
    if max_neighbour < 2:
        raise UserError(f"max_neighbour is {max_neighbour}; expected at least 2")
    distances, scale = _find_neighbour_distances(points, 2, max_neighbour)
    scales = []
    n1 = 1
    while 2 * n1 <= distances.shape[1]:
        near, far = distances[:, n1 - 1], distances[:, 2 * n1 - 1]
        value, error = _fit_dimension(near, far, n1, 2 * n1)
        scales.append(ScaleDimension(n1, value, error, far.mean().item() * scale))
        n1 *= 2
    return scales


def _find_neighbour_distances(
    points: Tensor, min_neighbours: int, max_neighbours: int | None = None
) -> tuple[Tensor, float]:
    """Return the scaled distances `(n, k)` of each distinct point to its k nearest neighbours, and the scale.

    The distances ascend, and are divided by the scale, the largest magnitude of a coordinate. k is `max_neighbours`
    (by default `min_neighbours`), or the number of other distinct points if that is smaller.

    Raises:
        UserError: if there are fewer than `min_neighbours` other distinct points, and as `check_matrix`.
    """
    check_matrix(points, "points")
    points = points.detach()
    # MPS has no float64.
    distinct = (points.cpu() if points.device.type == "mps" else points).double().unique(dim=0)
    if len(distinct) <= min_neighbours:
        raise UserError(
            f"{len(distinct)} distinct points have no {min_neighbours} neighbours each; "
            f"expected at least {min_neighbours + 1}"
        )
    # Scaling keeps the squares of very large or small coordinates in range.
    scale = distinct.abs().max()
    distinct = distinct / scale
    k = min(max_neighbours or min_neighbours, len(distinct) - 1)
    nearest_distances = [
        # The faster mode by matrix products, |x|^2 + |y|^2 - 2xy, loses small distances by cancellation.
        torch.cdist(block, distinct, compute_mode="donot_use_mm_for_euclid_dist").topk(k + 1, largest=False).values
        for block in distinct.split(max(1, _DISTANCES_PER_BLOCK // len(distinct)))
    ]
    # The nearest point of each point is the point itself, at distance 0.
    return torch.cat(nearest_distances)[:, 1:], scale.item()


def _fit_dimension(near: Tensor, far: Tensor, n1: int, n2: int) -> Dimension:
    """Return the maximum-likelihood estimate of the dimension and its standard error; see `gride`.

    `near` and `far` are the distances of the points to their neighbours number n1 and n2, `(n,)` each.
    """
    log_ratios = (far / near).log()
    log_ratios = log_ratios[log_ratios > _TOLERANCE]
    n = len(log_ratios)
    if n < 2:
        raise UserError(f"neighbours {n1} and {n2} of nearly all points are equally far: no dimension is defined")
    num_between, log_ratio_sum = n2 - n1 - 1, float(log_ratios.sum())

    def likelihood_slope(d: float) -> float:
        """Return the derivative of the log-likelihood at dimension d. It decreases from infinity to below 0."""
        between_sum = float((log_ratios / -torch.expm1(-d * log_ratios)).sum())
        return (n - 1) / d + num_between * between_sum - (n2 - 1) * log_ratio_sum

    # Find the root of the slope by bisection in log d, from its exact value for n1 = 1, n2 = 2. Double or halve d until
    # the root is between `low` and `high`.
    low = high = (n - 1) / log_ratio_sum
    while likelihood_slope(low) < 0:
        low /= 2
    while likelihood_slope(high) > 0:
        high *= 2
    # Stop at the precision of float64, also if no number is left between the two.
    while high / low > 1 + 1e-14 and low < (middle := math.sqrt(low * high)) < high:
        low, high = (middle, high) if likelihood_slope(middle) > 0 else (low, middle)
    value = math.sqrt(low * high)
    # The observed Fisher information is minus the second derivative of the log-likelihood.
    between_information = float((log_ratios / (2 * torch.sinh(value * log_ratios / 2))).square().sum())
    information = n / value**2 + num_between * between_information
    return Dimension(value, 1 / math.sqrt(information))
