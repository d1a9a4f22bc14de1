"""95% intervals of measures from their standard errors."""

import math
from collections.abc import Mapping

from scipy import special

from istar.geometry.layers import BY_SENTENCE, WITH_ERROR, WITH_ERROR_FROM_SCATTER

JACKKNIFE = (*WITH_ERROR, *WITH_ERROR_FROM_SCATTER, BY_SENTENCE)
"""Measures whose standard error is that of the jackknife over groups of documents."""
NORMAL_QUANTILE = float(special.ndtri(0.975))
"""Half of the length of a 95% interval in standard errors, if the error itself is known well."""


def t_quantile(degrees: int) -> float:
    """Return the 97.5% quantile of Student's t distribution, the half-width of a 95% interval in standard errors.

    Args:
        degrees: degrees of freedom. For fewer than 1 the quantile is not defined, and the result is NaN.

    >>> round(t_quantile(9), 2)
    2.26
    """
    return float(special.stdtrit(degrees, 0.975)) if degrees >= 1 else math.nan


def half_width(figures: Mapping[str, float], name: str, groups: int) -> float:
    """Return half of the length of the 95% interval of a measure, in the units of the measure.

    It is the standard error times the quantile of Student's t distribution with `groups - 1` degrees of freedom for
    errors of the jackknife, and of the normal distribution for other errors, such as that of TwoNN.

    Args:
        figures: measures of a layer, with the errors as `<name>_error`.
        name: name of the measure.
        groups: number of groups of documents.

    Returns:
        NaN if the measure has no error.
    """
    quantile = t_quantile(groups - 1) if name in JACKKNIFE else NORMAL_QUANTILE
    return quantile * figures.get(f"{name}_error", math.nan)
