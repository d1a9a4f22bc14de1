"""The synthetic cloud of Figure 2."""

import numpy as np

from istar.reports.stability import sample_covariance


def test_sampled_covariances_have_the_mean_and_the_variance_of_gaussian_points() -> None:
    """Mean diag(s^2); variance (s_i^2 s_j^2 + [i = j] s_i^4) / (n - 1), the Wishart distribution's."""
    deviations, num_points, num_draws = np.array([2.0, 1.0, 0.5]), 9, 20_000
    random = np.random.default_rng(1)
    draws = np.array([sample_covariance(num_points, deviations, random) for _ in range(num_draws)])
    assert (draws == draws.transpose(0, 2, 1)).all()
    variances = np.outer(deviations**2, deviations**2) * (1 + np.eye(3)) / (num_points - 1)
    # Six standard errors: a false alarm in a billion.
    assert (np.abs(draws.mean(0) - np.diag(deviations**2)) < 6 * np.sqrt(variances / num_draws)).all()
    fourth = ((draws - draws.mean(0)) ** 4).mean(0)
    assert (np.abs(draws.var(0) - variances) < 6 * np.sqrt((fourth - variances**2) / num_draws)).all()
