"""Interval of the average difference over tasks, which are taken as a sample of a larger set of similar tasks."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from istar.statistics.arguments import check_not_constant, require_at_least, to_finite_vector
from istar.statistics.paired import Interval, t_interval


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
