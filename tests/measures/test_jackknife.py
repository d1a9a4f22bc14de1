"""The error and the correction of the delete-a-group jackknife, against known ones and the formula in numpy."""

import math

import numpy as np
import pytest
import scipy.stats

from istar.measures import jackknife_bias_correction, jackknife_error


@pytest.mark.parametrize("num_groups", [2, 3, 10, 40])
def test_of_a_mean_it_is_the_standard_error_of_the_mean(num_groups):
    groups = np.random.default_rng(num_groups).normal(5, 2, num_groups)
    partial_estimates = [np.delete(groups, index).mean() for index in range(num_groups)]
    assert jackknife_error(partial_estimates) == pytest.approx(scipy.stats.sem(groups), rel=1e-12)


def test_of_a_ratio_it_is_that_of_pseudo_values():
    """Tukey's pseudo-values are G times the estimate of all groups minus G - 1 times each partial estimate."""
    x, y = np.random.default_rng(0).gamma(4, size=(2, 12))
    partial_estimates = [np.delete(y, index).sum() / np.delete(x, index).sum() for index in range(12)]
    pseudo_values = 12 * y.sum() / x.sum() - 11 * np.array(partial_estimates)
    assert jackknife_error(partial_estimates) == pytest.approx(scipy.stats.sem(pseudo_values), rel=1e-12)


def test_shifts_do_not_change_it_and_scales_do():
    partial_estimates = np.random.default_rng(0).normal(size=7)
    error = jackknife_error(partial_estimates.tolist())
    assert jackknife_error((partial_estimates[::-1] + 30).tolist()) == pytest.approx(error, rel=1e-12)
    assert jackknife_error((-4 * partial_estimates).tolist()) == pytest.approx(4 * error, rel=1e-12)
    assert jackknife_error([3.0] * 5) == 0


@pytest.mark.parametrize("left_out", [[], [1.0], [1.0, math.nan, 2.0], [1.0, math.inf]])
def test_it_is_not_defined_for_too_few_or_undefined_estimates(left_out):
    assert math.isnan(jackknife_error(left_out))


def test_it_corrects_a_variance_with_the_divisor_n():
    values = np.random.default_rng(0).normal(5, 2, 12)
    partial_estimates = [np.delete(values, index).var() for index in range(12)]
    corrected = jackknife_bias_correction(values.var(), partial_estimates)
    assert corrected == pytest.approx(values.var(ddof=1), rel=1e-12)


@pytest.mark.parametrize(
    ("value", "left_out"), [(1.0, []), (1.0, [1.0]), (1.0, [1.0, math.nan]), (math.nan, [1.0, 2.0])]
)
def test_a_correction_is_not_defined_for_too_few_or_undefined_estimates(value, left_out):
    assert math.isnan(jackknife_bias_correction(value, left_out))
