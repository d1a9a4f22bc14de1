"""How many pairs of seeds a comparison needs, and how small a difference so many pairs can find.

All functions are about the two-sided paired t-test. Its power for a true mean difference, a standard deviation of the
differences and n pairs comes from the noncentral t distribution (Cohen, *Statistical Power Analysis for the Behavioral
Sciences*, 1988, chapter 2). As in the t-test, pairs must be independent and differences approximately normal.
"""

import math
from bisect import bisect_left

import numpy as np
from scipy import optimize, stats

from istar.errors import UserError
from istar.statistics.arguments import check_positive, check_probability, require_at_least
from istar.statistics.paired import Interval, smallest_sign_flip_p

MAX_PAIRS = 1_000_000
"""Largest number of pairs that `pairs_needed` considers."""


def t_test_power(difference: float, sd: float, pairs: int, alpha: float = 0.05) -> float:
    r"""Compute the probability that the paired t-test gives p < alpha.

    .. math::
        P(|T| > t_{1 - \alpha / 2, n - 1}), \quad T \sim t'_{n - 1}(\sqrt{n} \, |difference| / sd)

    with a quantile of Student's t distribution and the noncentral t distribution :math:`t'`.

    Args:
        difference: true mean difference, in any unit; its sign does not matter.
        sd: standard deviation of the paired differences, in the same unit.
        pairs: number n of pairs.
        alpha: significance level.

    Returns:
        A number in [alpha, 1].

    Raises:
        UserError: if the difference is not finite, `sd` is not positive, there are fewer than 2 pairs, or alpha is not
            in (0, 1).

    >>> round(t_test_power(0.5, 1.0, 34), 4)
    0.8078
    """
    if not math.isfinite(difference):
        raise UserError(f"the difference is {difference}; expected a finite number")
    _check_test_arguments(sd, pairs, alpha)
    return _compute_power(math.sqrt(pairs) * abs(difference) / sd, pairs, alpha)


def _compute_power(noncentrality: float, pairs: int, alpha: float) -> float:
    critical_value = stats.t.isf(alpha / 2, pairs - 1)
    upper_tail = stats.nct.sf(critical_value, pairs - 1, noncentrality)
    # The other tail underflows for a large effect, where SciPy may return NaN.
    lower_tail = np.nan_to_num(stats.nct.cdf(-critical_value, pairs - 1, noncentrality))
    return float(min(1.0, upper_tail + lower_tail))


def smallest_difference(sd: float, pairs: int, alpha: float = 0.05, power: float = 0.8) -> float:
    """Compute the minimum detectable difference: the smallest that the paired t-test finds with the given power.

    A smaller true difference is missed with a probability above `1 - power`. Arguments and unit are as in
    `t_test_power`.

    Raises:
        UserError: as `t_test_power`; also unless alpha < power < 1.
    """
    _check_test_arguments(sd, pairs, alpha)
    _check_power(power, alpha)
    upper_bound = 1.0
    while _compute_power(upper_bound, pairs, alpha) < power:
        upper_bound *= 2
    noncentrality = optimize.brentq(
        lambda candidate: _compute_power(candidate, pairs, alpha) - power, 0.0, upper_bound, xtol=1e-12
    )
    return float(noncentrality * sd / math.sqrt(pairs))


def pairs_needed(difference: float, sd: float, alpha: float = 0.05, power: float = 0.8) -> int:
    """Compute the smallest number of pairs for which the paired t-test finds a true difference with the given power.

    Arguments and unit are as in `t_test_power`.

    Raises:
        UserError: if the difference is 0 or not finite, if more than `MAX_PAIRS` pairs are needed, and as
            `smallest_difference`.

    >>> pairs_needed(0.5, 1.0)
    34
    """
    check_positive(abs(difference), "the size of the difference")
    _check_test_arguments(sd, 2, alpha)
    _check_power(power, alpha)
    # Double the number of pairs until it is large enough, then bisect: the power grows with the number of pairs.
    enough = 2
    while t_test_power(difference, sd, enough, alpha) < power:
        if enough == MAX_PAIRS:
            raise UserError(
                f"a difference of {difference:g} with a standard deviation of {sd:g} needs more than {MAX_PAIRS:,} "
                "pairs; choose a larger difference"
            )
        enough = min(2 * enough, MAX_PAIRS)
    numbers = range(2, enough)
    return 2 + bisect_left(numbers, power, key=lambda pairs: t_test_power(difference, sd, pairs, alpha))


def sd_interval(sd: float, pairs: int, level: float = 0.95) -> Interval:
    r"""Compute the interval of a standard deviation estimated from n normal differences.

    The ends are :math:`s \sqrt{(n - 1) / \chi^2_{q, n - 1}}` for q = (1 + level) / 2 and (1 - level) / 2. For five
    pairs, one end is almost five times the other, so that a number of pairs planned from so few is rough.

    Raises:
        UserError: if `sd` is not positive, there are fewer than 2 pairs, or `level` is not in (0, 1).
    """
    check_positive(sd, "the standard deviation of the differences")
    require_at_least(pairs, 2, "the number of pairs")
    check_probability(level, "the confidence level")
    low, high = (
        sd * math.sqrt((pairs - 1) / stats.chi2.ppf(tail, pairs - 1)) for tail in ((1 + level) / 2, (1 - level) / 2)
    )
    return Interval(low, high)


def pairs_needed_sentence(difference: float, sd: float, alpha: float = 0.05, power: float = 0.8) -> str:
    """Return a sentence that says how many seeds are needed to find a difference.

    Arguments and errors are as in `pairs_needed`.
    """
    pairs = pairs_needed(difference, sd, alpha, power)
    return (
        f"To find a difference of {abs(difference):g} with probability {power:g}, train each method with {pairs} "
        f"seeds, the same for both ({_describe_test(sd, alpha)})."
    )


def smallest_difference_sentence(sd: float, pairs: int, alpha: float = 0.05, power: float = 0.8) -> str:
    """Return a sentence that states the minimum detectable difference for a number of seeds.

    Arguments and errors are as in `smallest_difference`. If the sign-flip test cannot give a p-value below alpha, a
    second sentence states its minimum.
    """
    difference = smallest_difference(sd, pairs, alpha, power)
    text = (
        f"With {pairs} seeds for each method, the same for both, the smallest difference that is found with "
        f"probability {power:g} is {difference:.3g} ({_describe_test(sd, alpha)})."
    )
    minimum_p_value = smallest_sign_flip_p(pairs)
    if minimum_p_value < alpha:
        return text
    return f"{text} The sign-flip test cannot give a p-value below {minimum_p_value:g} with {pairs} pairs."


def _describe_test(sd: float, alpha: float) -> str:
    return f"paired t-test, two-sided, alpha = {alpha:g}, standard deviation of the paired differences {sd:g}"


def _check_test_arguments(sd: float, pairs: int, alpha: float) -> None:
    check_positive(sd, "the standard deviation of the differences")
    require_at_least(pairs, 2, "the number of pairs")
    check_probability(alpha, "alpha")


def _check_power(power: float, alpha: float) -> None:
    check_probability(power, "the power")
    if power <= alpha:
        raise UserError(f"the power is {power:g} and alpha is {alpha:g}; expected a power above alpha, such as 0.8")
