"""95% intervals of measures from their standard errors."""

import math
from collections.abc import Mapping

from scipy import special

from istar.geometry.collect.layers import COVARIANCE_MEASURES_WITH_ERROR, MEASURES_WITH_ERROR, SCORE_BY_SENTENCE

JACKKNIFE_MEASURES = (*MEASURES_WITH_ERROR, *COVARIANCE_MEASURES_WITH_ERROR, SCORE_BY_SENTENCE)
"""Measures whose standard error is that of the jackknife over groups of documents."""
NORMAL_QUANTILE = float(special.ndtri(0.975))
"""Half-width of a 95% interval in standard errors, if the standard error itself is known well."""


def t_quantile(degrees: int) -> float:
    """Return the 97.5% quantile of Student's t distribution: the half-width of a 95% interval in standard errors.

    Args:
        degrees: degrees of freedom. For fewer than 1 the quantile is not defined, and the result is NaN.

    >>> round(t_quantile(9), 2)
    2.26
    """
    return float(special.stdtrit(degrees, 0.975)) if degrees >= 1 else math.nan


def interval_half_width(measures: Mapping[str, float], name: str, num_groups: int) -> float:
    """Return the half-width of the 95% interval of a measure, in the units of the measure.

    It is the standard error times a quantile. For errors of the jackknife, this is the quantile of Student's t
    distribution with `num_groups - 1` degrees of freedom; for other errors, such as that of TwoNN, it is that of the
    normal distribution.

    Args:
        measures: measures of a layer by name, with their standard errors as `<name>_error`.
        name: name of the measure.
        num_groups: number of groups of documents of the jackknife.

    Returns:
        The half-width; NaN if the measure has no error.
    """
    quantile = t_quantile(num_groups - 1) if name in JACKKNIFE_MEASURES else NORMAL_QUANTILE
    return quantile * measures.get(f"{name}_error", math.nan)
