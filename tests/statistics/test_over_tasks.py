import numpy as np
import pytest
from scipy import stats

from istar.errors import UserError
from istar.statistics.over_tasks import t_interval_over_tasks

DIFFERENCES = ([0.3, 1.2, 0.7], [2.0, 2.9], [-0.4, 0.1, 0.9, 0.2])


def test_the_t_interval_over_tasks_is_that_of_scipy() -> None:
    means = [np.mean(values) for values in DIFFERENCES]
    reference = stats.ttest_1samp(means, 0.0).confidence_interval(0.9)
    assert t_interval_over_tasks(DIFFERENCES, 0.9) == pytest.approx((reference.low, reference.high), rel=1e-12)
    assert t_interval_over_tasks([[mean] for mean in means], 0.9) == pytest.approx(
        (reference.low, reference.high), rel=1e-12
    )


@pytest.mark.slow
def test_intervals_over_tasks_cover_the_mean() -> None:
    """Intervals from six tasks with five seeds cover the mean over all tasks."""
    random = np.random.default_rng(1)
    is_covered = []
    for _ in range(600):
        low, high = t_interval_over_tasks(list(random.normal(random.normal(0, 0.5, (6, 1)), 1, (6, 5))))
        is_covered.append(low <= 0 <= high)
    assert np.mean(is_covered) == pytest.approx(0.95, abs=0.035)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: t_interval_over_tasks([[1.0], [1.0]]), "all mean differences of the tasks are equal"),
        (lambda: t_interval_over_tasks([[1.0], []]), "there are 0 differences of a task"),
        (lambda: t_interval_over_tasks([[1.0]]), "the number of tasks is 1; expected 2 or more"),
    ],
)
def test_arguments_out_of_range(call, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()
