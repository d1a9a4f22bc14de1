"""Correlations of two series with other variables held constant."""

import math
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

from istar.errors import UserError
from istar.statistics.arguments import (
    Vector,
    check_at_least,
    check_choice,
    check_probability,
    to_finite_array,
    to_finite_vector,
)

Method = Literal["pearson", "spearman"]


class PartialCorrelation(NamedTuple):
    """Result of `partial_correlation`."""

    value: float  # in [-1, 1]
    low: float | None  # ends of the interval; None with fewer than 4 points more than covariates
    high: float | None
    p_value: float  # two-sided, of no correlation
    points: int
    covariates: int


def partial_correlation(
    x: ArrayLike, y: ArrayLike, covariates: ArrayLike, method: Method = "pearson", level: float = 0.95
) -> PartialCorrelation:
    r"""Correlate x and y after the linear part that k covariates explain has been removed from both.

    The value is Pearson's correlation of the residuals of two least-squares regressions on the covariates and a
    constant, which equals :math:`-P_{xy} / \sqrt{P_{xx} P_{yy}}` with P the inverse of the correlation matrix
    (Anderson, *An Introduction to Multivariate Statistical Analysis*). With `spearman`, all variables are
    ranked first. The interval is Fisher's, :math:`\tanh(\operatorname{artanh} r \pm z \, s)` with z the normal quantile
    at (1 + level) / 2 and :math:`s^2 = 1 / (n - 3 - k)`, for Spearman 1.06 times as large (Fieller, Hartley and
    Pearson, 1957). The p-value comes from :math:`t = r \sqrt{(n - 2 - k) / (1 - r^2)}` with n - 2 - k degrees of
    freedom.

    Assumptions: independent points; linear effects of the covariates (on the ranks for Spearman); joint normality for
    the interval and the p-value. Points that are neighbours in time, such as the checkpoints of a training, are not
    independent. What is held constant are the given covariates and no others.

    Args:
        x: values of one variable, `(n,)`.
        y: values of the other variable, `(n,)`.
        covariates: values of the k covariates, `(n,)` or `(n, k)`; k may be 0.
        method: `pearson` or `spearman`.
        level: confidence level.

    Raises:
        UserError: if the lengths differ, a value is not finite, there are fewer than k + 3 points, the covariates
            depend on one another linearly, or they (or a constant) explain x or y completely.

    >>> round(partial_correlation([2, 4, 15, 20], [1, 2, 3, 4], [0, 0, 1, 1]).value, 6)
    0.919145
    """
    check_choice(method, get_args(Method), "the method of correlation")
    check_probability(level, "the confidence level")
    x_values, y_values = _to_series(x, y, min_length=3)
    covariate_table = _to_covariate_table(covariates, len(x_values))
    num_points, num_covariates = covariate_table.shape
    points_name = f"the number of points, with {num_covariates} covariate{'s' * (num_covariates != 1)},"
    check_at_least(num_points, num_covariates + 3, points_name)
    if method == "spearman":
        x_values, y_values = stats.rankdata(x_values), stats.rankdata(y_values)
        covariate_table = stats.rankdata(covariate_table, axis=0)
    residuals = [
        _compute_residuals(values, covariate_table, name) for values, name in ((x_values, "x"), (y_values, "y"))
    ]
    value = _compute_pearson(*residuals)
    degrees_of_freedom = num_points - 2 - num_covariates
    t = value * math.sqrt(degrees_of_freedom / (1 - value**2)) if abs(value) < 1 else math.inf
    p_value = float(2 * stats.t.sf(abs(t), degrees_of_freedom))
    if degrees_of_freedom < 2 or abs(value) == 1:
        return PartialCorrelation(value, None, None, p_value, num_points, num_covariates)
    variance_factor = 1.06 if method == "spearman" else 1.0
    margin = float(special.ndtri((1 + level) / 2)) * math.sqrt(variance_factor / (degrees_of_freedom - 1))
    center = math.atanh(value)
    low, high = math.tanh(center - margin), math.tanh(center + margin)
    return PartialCorrelation(value, low, high, p_value, num_points, num_covariates)


def _to_series(x: ArrayLike, y: ArrayLike, min_length: int) -> tuple[Vector, Vector]:
    """Return two series as vectors; raise a `UserError` unless they are finite, long enough and of equal length."""
    x_values, y_values = to_finite_vector(x, "values of x", min_length), to_finite_vector(y, "values of y", min_length)
    if len(x_values) != len(y_values):
        raise UserError(f"x has {len(x_values)} values and y has {len(y_values)}; expected one of each for every point")
    return x_values, y_values


def _to_covariate_table(covariates: ArrayLike, num_points: int) -> NDArray[np.float64]:
    """Return the covariates as a table `(num_points, k)`; raise a `UserError` if they have another number of points."""
    table = to_finite_array(covariates, "covariates")
    if table.size == 0:
        return np.empty((num_points, 0))
    table = table[:, None] if table.ndim == 1 else table
    if table.ndim != 2 or len(table) != num_points:
        raise UserError(
            f"the covariates have the shape {table.shape}; expected a row for each of the {num_points} points"
        )
    return table


def _compute_residuals(values: Vector, covariates: NDArray[np.float64], name: str) -> Vector:
    """Return the residuals of a linear regression of the values on the covariates and a constant.

    `name` is the name of the variable, for the error message.
    """
    spread = covariates.std(axis=0)
    is_varied = spread > 1e-12 * np.abs(covariates).max(axis=0, initial=0.0)
    # A constant covariate becomes a column of zeros, which lowers the rank.
    design = np.where(is_varied, (covariates - covariates.mean(axis=0)) / np.where(is_varied, spread, 1.0), 0.0)
    if np.linalg.matrix_rank(design, tol=1e-10 * math.sqrt(len(values))) < design.shape[1]:
        raise UserError("a covariate is constant or a linear function of the others; leave it out")
    deviations = values - values.mean()
    residuals: Vector = deviations - design @ np.linalg.lstsq(design, deviations, rcond=None)[0]
    if np.linalg.norm(residuals) <= 1e-10 * np.linalg.norm(values):
        raise UserError(f"{name} is constant or a linear function of the covariates, so that nothing of it is left")
    return residuals


def _compute_pearson(first: Vector, second: Vector) -> float:
    """Return Pearson's correlation of two series, in [-1, 1]."""
    first, second = first - first.mean(), second - second.mean()
    return float(np.clip(first @ second / np.sqrt((first @ first) * (second @ second)), -1.0, 1.0))
