"""Kernel density estimates of a sample of numbers, for figures."""

import numpy as np
import scipy.stats

from istar.statistics.arguments import is_constant

NUM_POINTS = 200
"""Number of points at which a density is computed."""


def estimate_density(values: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    r"""Estimate the density of nonnegative numbers by Gaussian kernels.

    .. math:: \hat f(x) = \frac{1}{n h} \sum_i \varphi\left(\frac{x - v_i}{h}\right), \quad h = s n^{-1/5},

    where :math:`\varphi` is the standard normal density and s the standard deviation (ddof = 1): Scott's bandwidth.

    Args:
        values: `(n,)`, for example norms.

    Returns:
        `NUM_POINTS` evenly spaced positions from three bandwidths below the smallest value, but not below 0, to three
        above the largest, and the density at each, per unit of the values. None if all values are equal, or there are
        fewer than 2, because such a sample has no bandwidth.
    """
    if len(values) < 2 or is_constant(values):
        return None
    kernel = scipy.stats.gaussian_kde(values)
    margin = 3 * float(np.sqrt(kernel.covariance[0, 0]))
    positions = np.linspace(max(0.0, values.min() - margin), values.max() + margin, NUM_POINTS)
    return positions, kernel(positions)
