import math

import numpy as np
import pytest
from scipy import stats

from istar.errors import UserError
from istar.statistics.tasks import friedman, nemenyi_critical_difference, t_interval_over_tasks

C45 = np.array(
    [
        [0.763, 0.768, 0.771, 0.798],
        [0.599, 0.591, 0.590, 0.569],
        [0.954, 0.971, 0.968, 0.967],
        [0.628, 0.661, 0.654, 0.657],
        [0.882, 0.888, 0.886, 0.898],
        [0.936, 0.931, 0.916, 0.931],
        [0.661, 0.668, 0.609, 0.685],
        [0.583, 0.583, 0.563, 0.625],
        [0.775, 0.838, 0.866, 0.875],
        [1.000, 1.000, 1.000, 1.000],
        [0.940, 0.962, 0.965, 0.962],
        [0.619, 0.666, 0.614, 0.669],
        # The paper ranks the last two of these second and third: they are equal in print only.
        [0.972, 0.981, 0.9751, 0.975],
        [0.957, 0.978, 0.946, 0.970],
    ]
)
"""Areas under the ROC curve of C4.5, C4.5+m, C4.5+cf and C4.5+m+cf on 14 data sets (Demšar, 2006, Table 6)."""


def test_demsars_example() -> None:
    """The numbers are those of Section 3.2.2: average ranks, chi-square 9.28, F 3.69 and critical values."""
    result = friedman(C45)
    assert result.average_ranks == pytest.approx([3.143, 2.000, 2.893, 1.964], abs=5e-4)
    # Demšar does not correct for ties: the variance of the ranks is smaller than the formula assumes.
    chi_square = result.chi_square * np.var(stats.rankdata(C45, axis=1)) / np.var([1, 2, 3, 4])
    assert chi_square == pytest.approx(9.28, abs=5e-3)
    assert 13 * chi_square / (14 * 3 - chi_square) == pytest.approx(3.69, abs=5e-3)
    assert result.f > stats.f.isf(0.05, 3, 39) == pytest.approx(2.85, abs=5e-3)
    assert result.f_p == pytest.approx(stats.f.sf(result.f, 3, 39), rel=1e-12)
    assert nemenyi_critical_difference(4, 14) == pytest.approx(1.25, abs=5e-3)
    assert nemenyi_critical_difference(4, 14, alpha=0.1) == pytest.approx(1.12, abs=5e-3)


@pytest.mark.parametrize(
    ("alpha", "values"),
    [
        (0.05, (1.960, 2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164)),
        (0.10, (1.645, 2.052, 2.291, 2.459, 2.589, 2.693, 2.780, 2.855, 2.920)),
    ],
)
def test_demsars_critical_values(alpha: float, values: tuple[float, ...]) -> None:
    """The critical values are those of Table 5a for 2 to 10 methods."""
    for methods, value in enumerate(values, start=2):
        difference = nemenyi_critical_difference(methods, 6, alpha)
        assert difference * math.sqrt(36 / (methods * (methods + 1))) == pytest.approx(value, abs=1.1e-3)


def make_scores_with_ties(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 6, (7 + seed, 3 + seed)).astype(float)


@pytest.mark.parametrize("seed", range(4))
def test_friedman_is_that_of_scipy(seed: int) -> None:
    scores = make_scores_with_ties(seed)
    reference = stats.friedmanchisquare(*scores.T)
    result = friedman(scores)
    assert (result.chi_square, result.chi_square_p) == pytest.approx((reference.statistic, reference.pvalue), rel=1e-10)


@pytest.mark.parametrize("seed", range(4))
def test_iman_and_davenport_is_an_analysis_of_variance_of_ranks(seed: int) -> None:
    ranks = stats.rankdata(make_scores_with_ties(seed), axis=1)
    tasks, methods = ranks.shape
    between = sum(tasks * (ranks[:, j].mean() - ranks.mean()) ** 2 for j in range(methods))
    total = sum((rank - ranks.mean()) ** 2 for rank in ranks.ravel())
    # All tasks have the same average rank, so their sum of squares is 0.
    f = (between / (methods - 1)) / ((total - between) / ((methods - 1) * (tasks - 1)))
    assert friedman(make_scores_with_ties(seed)).f == pytest.approx(f, rel=1e-10)


def test_ranks() -> None:
    assert friedman([[0.9, 0.7, 0.9, 0.1]] * 2).average_ranks.tolist() == [1.5, 3.0, 1.5, 4.0]


def test_only_the_order_within_a_task_counts() -> None:
    transformed_scores = np.exp(C45) * np.arange(1, 15)[:, None]
    assert friedman(transformed_scores).chi_square == pytest.approx(friedman(C45).chi_square, rel=1e-12)


def test_all_tasks_agree() -> None:
    result = friedman([[1.0, 2.0, 3.0]] * 5)
    assert (result.chi_square, result.f, result.f_p) == (10.0, math.inf, 0.0)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([[1.0, 2.0]], "the number of tasks is 1; expected 2 or more"),
        ([[1.0], [2.0]], "the number of methods is 1; expected 2 or more"),
        ([1.0, 2.0], "expected a row for each task"),
        ([[1.0, math.nan], [1.0, 2.0]], "scores include NaN"),
        ([[1.0, 2.0], [1.0]], "rows of equal length"),
        ([[1.0, 1.0], [2.0, 2.0]], "all methods have equal scores on every task"),
    ],
)
def test_scores_without_an_answer(scores, message: str) -> None:
    with pytest.raises(UserError) as error:
        friedman(scores)
    assert message in str(error.value)


# ---- the average difference

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
        (lambda: nemenyi_critical_difference(1, 9), "the number of methods is 1"),
        (lambda: nemenyi_critical_difference(3, 9, 0.0), "alpha is 0.0"),
    ],
)
def test_arguments_out_of_range(call, message: str) -> None:
    with pytest.raises(UserError) as error:
        call()
    assert message in str(error.value)
