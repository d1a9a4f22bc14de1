"""Estimators of the intrinsic dimension of a point cloud from distances between nearest neighbours: TwoNN and Gride."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures.neighbours import search_pairs
from istar.measures.numerics import check_matrix

_TOLERANCE = 1e-12
"""Ratios of distances with a logarithm below this count as 1: rounding makes equal distances differ."""


class Dimension(NamedTuple):
    """An estimate of the intrinsic dimension, and its standard error."""

    value: float
    error: float


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


def two_nn(points: Tensor, discard: float = 0.1) -> float:
    r"""Estimate the intrinsic dimension of a point cloud from distances between nearest neighbours.

    The method is from *Estimating the intrinsic dimension of datasets by a minimal neighborhood information* (Facco
    et al., 2017). If the density is nearly constant up to the second neighbour, the ratio of the two distances,
    :math:`\mu = r_2 / r_1`, has the distribution function :math:`F(\mu) = 1 - \mu^{-d}`. Then d is the slope of
    :math:`-\log(1 - F(\mu))` over :math:`\log\mu`. This function fits the slope by least squares through the origin,
    with :math:`F(\mu_{(i)}) = i / n` for the i-th smallest of n ratios.

    Duplicates of a point are dropped, because their distance to the nearest neighbour is 0.

    Args:
        points: `(n, d)` of any floating dtype, on any device; distances are exact to float64, in blocks. Near
            duplicates, such as the occurrences of one token in a first layer, lower the estimate: pass one of each.
        discard: share of the largest ratios to leave out, in [0, 1). The largest ratio is always left out, because
            F is 1 there.

    Returns:
        d, a positive number that does not change if the cloud is rotated, translated or scaled.

    Raises:
        UserError: for fewer than 3 distinct points, values that are not finite, a `discard` that leaves no point, or
            points with two equally distant nearest neighbours each, as in a lattice.

    >>> square = torch.rand(2000, 2, generator=torch.Generator().manual_seed(0))
    >>> round(two_nn(square)), round(two_nn(square @ torch.randn(2, 50, generator=torch.Generator().manual_seed(1))))
    (2, 2)
    """
    return float(_fit_slope(_compute_sorted_log_ratios(points, discard), discard))


def two_nn_with_error(points: Tensor, discard: float = 0.1, resamples: int = 200, seed: int = 0) -> Dimension:
    """Estimate the intrinsic dimension with `two_nn`, and the standard error of the estimate by a bootstrap.

    The error is the standard deviation of the estimate over bootstrap samples of the ratios of distances. It assumes
    independent points. It does not include the bias of small samples: their nearest neighbours are farther away, so the
    estimate describes the cloud at a larger scale.

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
    samples = torch.randint(n, (resamples, n), generator=generator, device="cpu").to(log_ratios.device)
    # The ratios are in ascending order, and so is a sample that repeats each as often as it was drawn.
    counts = torch.zeros_like(samples).scatter_add_(1, samples, torch.ones_like(samples))
    resampled = log_ratios.repeat(resamples).repeat_interleave(counts.flatten(), output_size=counts.numel())
    slopes = _fit_slope(resampled.view(resamples, n), discard)
    return Dimension(float(_fit_slope(log_ratios, discard)), float(slopes.std()))


def _compute_sorted_log_ratios(points: Tensor, discard: float) -> Tensor:
    """Return log(r_2 / r_1), ascending, for the distances of each distinct point to its two nearest neighbours."""
    distances = _find_neighbour_distances(points, 2)
    ratios = distances[:, 1] / distances[:, 0]
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
    needed, as is `two_nn`. It does not change if the cloud is rotated, translated or scaled.

    Duplicates of a point are dropped. Points whose two distances are equal have no likelihood and are left out.

    Args:
        points: `(n, d)` of any floating dtype, on any device; distances are exact to float64, in blocks.
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
    distances = _find_neighbour_distances(points, n2)
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
    distances = _find_neighbour_distances(points, 2, max_neighbour)
    scales = []
    n1 = 1
    while 2 * n1 <= distances.shape[1]:
        near, far = distances[:, n1 - 1], distances[:, 2 * n1 - 1]
        value, error = _fit_dimension(near, far, n1, 2 * n1)
        scales.append(ScaleDimension(n1, value, error, far.mean().item()))
        n1 *= 2
    return scales


def _find_neighbour_distances(points: Tensor, min_neighbours: int, max_neighbours: int | None = None) -> Tensor:
    """Return the ascending distances `(n, k)` of each distinct point to its k nearest neighbours, in float64.

    k is `max_neighbours` (by default `min_neighbours`), or the number of other distinct points if that is smaller.
    Raises a `UserError` if there are fewer than `min_neighbours`, and as `check_matrix`.
    """
    check_matrix(points, "points")
    points = points.detach()
    # MPS has no float64.
    distinct = _find_distinct_rows((points.cpu() if points.device.type == "mps" else points).double())
    n = len(distinct)
    if n <= min_neighbours:
        raise UserError(
            f"{n} distinct points have no {min_neighbours} neighbours each; expected at least {min_neighbours + 1}"
        )
    return search_pairs(distinct, min(max_neighbours or min_neighbours, n - 1), torch.float32).distances


def _find_distinct_rows(rows: Tensor) -> Tensor:
    """Return the distinct rows `(k, d)` of float64 rows `(n, d)`, in any order.

    The bits of each row are hashed, because sorting whole rows takes longer. Different hashes mean different rows.
    """
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(2**62, rows.shape[1:], generator=generator, device="cpu").to(rows.device)
    hashes = ((rows + 0.0).view(torch.int64) * factors).sum(1).sort().values  # adding 0 makes a zero of -0
    return rows.unique(dim=0) if (hashes[1:] == hashes[:-1]).any() else rows


def _fit_dimension(near: Tensor, far: Tensor, n1: int, n2: int) -> Dimension:
    """`near` and `far` are the distances of the points to their neighbours number n1 and n2, `(n,)` each."""
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
    # Stop at the precision of float64, or if no number is left between the two.
    while high / low > 1 + 1e-14 and low < (middle := math.sqrt(low * high)) < high:
        low, high = (middle, high) if likelihood_slope(middle) > 0 else (low, middle)
    value = math.sqrt(low * high)
    # The observed Fisher information is minus the second derivative of the log-likelihood.
    between_information = float((log_ratios / (2 * torch.sinh(value * log_ratios / 2))).square().sum())
    information = n / value**2 + num_between * between_information
    return Dimension(value, 1 / math.sqrt(information))
