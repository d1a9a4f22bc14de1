"""The standard error of a measure, and its correction for bias, from groups of documents."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class ValueWithError(NamedTuple):
    """The value of a measure and its standard error."""

    value: float
    error: float


def jackknife_error(estimates: Sequence[float]) -> float:
    r"""Compute the standard error of an estimate by the delete-a-group jackknife.

    The data are divided into G groups of about equal size that are independent of each other. With the estimate
    :math:`\theta_{(g)}` from all groups but g, and the mean :math:`\bar\theta` of these G estimates, the standard error
    is

    .. math::
        \sqrt{\frac{G - 1}{G} \sum_{g=1}^G (\theta_{(g)} - \bar\theta)^2}

    (Tukey, 1958; Kott, *The delete-a-group jackknife*, Journal of Official Statistics 17, 2001). The interval of
    :math:`t_{G-1}` errors on either side of the estimate, where t is a quantile of Student's distribution with G - 1
    degrees of freedom (2.26 for 95% and 10 groups), covers the true value with about the nominal probability if the
    estimate is a smooth function of sums over many documents, and its bias is small. Points within a group may depend
    on each other in any way. For the mean of groups of equal size, it is the standard error of the mean of the groups.

    Args:
        estimates: the estimate without each group, in any order.

    Returns:
        The standard error, in the units of the estimate. NaN for fewer than 2 estimates, or if one is not finite.

    >>> jackknife_error([1.0, 2.0, 3.0])
    1.1547005383792515
    """
    num_groups = len(estimates)
    if num_groups < 2 or not all(map(math.isfinite, estimates)):
        return math.nan
    mean = math.fsum(estimates) / num_groups
    return math.sqrt((num_groups - 1) / num_groups * math.fsum((estimate - mean) ** 2 for estimate in estimates))


def jackknife_bias_correction(value: float, estimates: Sequence[float]) -> float:
    r"""Correct an estimate for its bias by the delete-a-group jackknife.

    With the estimate :math:`\theta` from all G groups, and the estimate :math:`\theta_{(g)}` from all groups but g, the
    result is

    .. math:: G \theta - (G - 1) \frac1G \sum_{g=1}^G \theta_{(g)}

    (Quenouille, *Notes on bias in estimation*, Biometrika 43, 1956). It removes a bias that is proportional to 1 / n.
    The groups are as in `jackknife_error`.

    Args:
        value: the estimate from all groups.
        estimates: the estimate without each group, in any order.

    Returns:
        The corrected estimate; NaN for fewer than 2 estimates, or if a number is not finite.

    >>> jackknife_bias_correction(2.5, [2.0, 2.0])
    3.0
    """
    num_groups = len(estimates)
    if num_groups < 2 or not all(map(math.isfinite, (value, *estimates))):
        return math.nan
    return num_groups * value - (num_groups - 1) * math.fsum(estimates) / num_groups
