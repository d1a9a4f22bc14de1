"""Comparison of several methods over several tasks: ranks, tests of ranks, and intervals of the average difference.

`t_interval_over_tasks` takes the tasks as a sample of a larger set of similar tasks, and makes a statement about that
set.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from istar.errors import UserError
from istar.statistics.arguments import (
    Vector,
    check_not_constant,
    check_probability,
    require_at_least,
    to_finite_array,
    to_finite_vector,
)
from istar.statistics.paired import Interval, t_interval


class Friedman(NamedTuple):
    """Result of `friedman`."""

    average_ranks: Vector  # (methods,); 1 is the best
    chi_square: float  # Friedman's statistic
    chi_square_p: float  # its p-value, by chi-square with k - 1 degrees of freedom
    f: float  # statistic of Iman and Davenport; infinite if all tasks rank the methods alike
    f_p: float  # its p-value, by F with k - 1 and (k - 1)(n - 1) degrees of freedom


def friedman(scores: ArrayLike) -> Friedman:
    r"""Test whether k methods perform alike over n tasks, with the correction of Iman and Davenport.

    With the average ranks :math:`R_j`,

    .. math::
        \chi^2_F = \frac{12 n}{k (k + 1)} \Big[ \sum_j R_j^2 - \frac{k (k + 1)^2}{4} \Big], \quad
        F_F = \frac{(n - 1) \chi^2_F}{n (k - 1) - \chi^2_F}

    (Demšar, *Statistical Comparisons of Classifiers over Multiple Data Sets*, JMLR 2006, section 3.2.2; Iman and
    Davenport, 1980). :math:`\chi^2_F` is divided by :math:`1 - \sum (t^3 - t) / (n k (k^2 - 1))`, where t are the sizes
    of the groups of equal scores within a task; Demšar's formula leaves this out. It is then :math:`n (k - 1)` times
    the share of the ranks' variance that lies between the methods, which is how it is computed. The chi-square
    distribution is conservative for few tasks, so that :math:`F_F` is preferred.

    Assumptions: the tasks are independent; scores are compared within tasks only. The number of tasks counts, not the
    number of seeds. With fewer than about ten tasks, both p-values are approximate.

    Args:
        scores: `(tasks, methods)`, one score for each, usually a mean over seeds. The highest score has rank 1, so
            negate losses; equal scores share the average of their ranks.

    Raises:
        UserError: if the scores are not finite, not two-dimensional, or of fewer than 2 methods or 2 tasks, and if all
            methods are equal on every task.
    """
    score_table = to_finite_array(scores, "scores")
    if score_table.ndim != 2:
        raise UserError(
            f"the scores have the shape {score_table.shape}; expected a row for each task, a column for each method"
        )
    num_tasks, num_methods = score_table.shape
    require_at_least(num_tasks, 2, "the number of tasks")
    require_at_least(num_methods, 2, "the number of methods")
    ranks = stats.rankdata(-score_table, axis=1)
    average_ranks = ranks.mean(axis=0)
    expected_rank = (num_methods + 1) / 2
    between_methods = num_tasks * np.sum((average_ranks - expected_rank) ** 2)
    total = np.sum((ranks - expected_rank) ** 2)
    if total == 0:
        raise UserError("all methods have equal scores on every task, so that there are no ranks to compare")
    # Rounding errors may leave the share slightly above 1.
    share = min(float(between_methods / total), 1.0)
    chi_square = num_tasks * (num_methods - 1) * share
    f = (num_tasks - 1) * share / (1 - share) if 1 - share > 1e-9 else math.inf
    return Friedman(
        average_ranks,
        chi_square,
        float(stats.chi2.sf(chi_square, num_methods - 1)),
        f,
        float(stats.f.sf(f, num_methods - 1, (num_methods - 1) * (num_tasks - 1))),
    )


def nemenyi_critical_difference(methods: int, tasks: int, alpha: float = 0.05) -> float:
    r"""Compute the critical difference of Nemenyi's test: how far the average ranks of two methods must differ.

    .. math::
        CD = q_\alpha \sqrt{k (k + 1) / (6 n)}

    for k methods and n tasks. :math:`q_\alpha` is the quantile of the studentized range for k groups and infinitely
    many degrees of freedom, divided by :math:`\sqrt 2` (Nemenyi, 1963; Demšar, JMLR 2006, section 3.2.2 and Table 5a).
    The test compares all pairs of methods, after a Friedman test that rejects. It keeps the probability of any false
    difference at alpha.

    Raises:
        UserError: for fewer than 2 methods or 2 tasks, or if alpha is not in (0, 1).

    >>> round(nemenyi_critical_difference(4, 14), 2)
    1.25
    """
    require_at_least(methods, 2, "the number of methods")
    require_at_least(tasks, 2, "the number of tasks")
    check_probability(alpha, "alpha")
    quantile = stats.studentized_range.ppf(1 - alpha, methods, np.inf) / np.sqrt(2)
    return float(quantile * np.sqrt(methods * (methods + 1) / (6 * tasks)))


def t_interval_over_tasks(differences: Sequence[ArrayLike], level: float = 0.95) -> Interval:
    """Compute Student's interval of the average difference, with each task as one observation.

    The observations are the mean differences of the tasks over their seeds. Their spread includes the noise of the
    seeds, which is therefore not added again.

    Assumptions: the tasks are an independent sample of the tasks in question, and their mean differences are
    approximately normal and comparable in size, as percentage points of accuracies are. Losses or perplexities do not
    belong in one average with them.

    Args:
        differences: one sequence for each task: its paired differences by seed, or only their mean, as a sequence of
            one.
        level: confidence level.

    Raises:
        UserError: for fewer than 2 tasks, a task without a difference, values that are not finite, equal means on all
            tasks, or a level that is not in (0, 1).
    """
    require_at_least(len(differences), 2, "the number of tasks")
    means = np.array([to_finite_vector(values, "differences of a task", 1).mean() for values in differences])
    check_not_constant(means, "mean differences of the tasks")
    return t_interval(means, level)
