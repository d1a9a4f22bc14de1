import itertools
import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from istar.errors import UserError
from istar.statistics.paired import (
    RESAMPLES,
    compute_p_value,
    holm,
    mean_and_std,
    sign_flip_test,
    smallest_sign_flip_p,
    t_interval,
    t_test,
)

DARWIN = (49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48)
"""Darwin's maize, crossed minus self-fertilized plants, in eighths of an inch."""
SLEEP = (1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4)
"""Additional hours of sleep, from which Student computed the first paired t-test (1908)."""


def test_fishers_example() -> None:
    """Fisher, The Design of Experiments, section 21: 863 of 32,768 patterns on either side."""
    assert sign_flip_test(DARWIN) == 2 * 863 / 2**15


@pytest.mark.parametrize("count", range(1, 11))
def test_sign_flips_are_enumerated_as_by_scipy(count: int) -> None:
    differences = np.random.default_rng(count).normal(0.4, 1, count)
    sums = [abs(np.dot(signs, differences)) for signs in itertools.product((1, -1), repeat=count)]
    expected = np.mean(np.array(sums) >= abs(differences.sum()) - 1e-10)
    assert sign_flip_test(differences) == pytest.approx(expected, rel=1e-12)
    if count > 1:
        reference = stats.permutation_test([differences], np.sum, permutation_type="samples", n_resamples=2**count)
        assert sign_flip_test(differences) == pytest.approx(reference.pvalue, rel=1e-12)
        assert compute_p_value(list(differences), "sign-flip") == pytest.approx(expected, rel=1e-12)
        t_reference = stats.ttest_1samp(differences, 0.0).pvalue
        assert compute_p_value(list(differences), "t") == pytest.approx(t_reference, rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_rounding_errors_do_not_break_ties(seed: int) -> None:
    """Differences of accuracies are multiples of one number, so that many patterns of signs have equal sums."""
    steps = np.random.default_rng(seed).integers(-4, 5, 12)
    assert sign_flip_test(steps / 277 * 0.1) == sign_flip_test(steps)


def test_random_patterns_approach_the_exact_p_value() -> None:
    differences = np.random.default_rng(5).integers(-6, 11, 30)
    # The distribution of the sum for all 2^30 patterns: a convolution for each difference.
    sums = {0: 1}
    for size in differences:
        sums = {
            total: sums.get(total - int(size), 0) + sums.get(total + int(size), 0)
            for total in {total + sign * int(size) for total in sums for sign in (1, -1)}
        }
    total = sum(sums.values())
    assert total == 2**30
    exact = sum(count for value, count in sums.items() if abs(value) >= abs(differences.sum())) / total
    result = sign_flip_test(differences)
    assert abs(result - exact) < 4 * math.sqrt(exact * (1 - exact) / RESAMPLES)
    assert result == sign_flip_test(differences)


def test_random_patterns_never_give_zero() -> None:
    assert sign_flip_test(np.full(60, 1.0)) == 1 / (RESAMPLES + 1)


def test_sign_flips_without_a_difference() -> None:
    assert sign_flip_test([0.0, 0.0, 0.0]) == 1
    assert sign_flip_test(np.zeros(40)) == 1


@pytest.mark.parametrize("pairs", range(1, 8))
def test_the_smallest_p_is_reached_if_all_differences_agree(pairs: int) -> None:
    assert sign_flip_test(2.0 ** np.arange(pairs)) == smallest_sign_flip_p(pairs)


@pytest.mark.parametrize("scale", [-1.0, 1e-9, 1e9])
def test_sign_flips_do_not_depend_on_unit_and_direction(scale: float) -> None:
    differences = np.random.default_rng(2).normal(0.5, 1, 11)
    assert sign_flip_test(scale * differences) == sign_flip_test(differences)


def test_students_example() -> None:
    """R's t.test prints these numbers for its data set `sleep`: t = -4.0621, p = 0.002833, 0.7001142 to 2.4598858."""
    assert t_test(SLEEP) == pytest.approx(0.002833, abs=5e-7)
    assert t_interval(SLEEP) == pytest.approx((0.7001142, 2.4598858), abs=5e-8)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("count", [2, 5, 20])
def test_intervals_by_hand(count: int, level: float) -> None:
    differences = np.random.default_rng(count).normal(1, 2, count)
    margin = stats.t.isf((1 - level) / 2, count - 1) * differences.std(ddof=1) / math.sqrt(count)
    expected = (differences.mean() - margin, differences.mean() + margin)
    assert t_interval(differences, level) == pytest.approx(expected, rel=1e-12)


def test_the_interval_moves_and_scales_with_the_differences() -> None:
    differences = np.random.default_rng(4).normal(0, 1, 8)
    low, high = t_interval(differences)
    assert t_interval(3 * differences + 10) == pytest.approx((3 * low + 10, 3 * high + 10), rel=1e-9)
    assert t_interval(-differences) == pytest.approx((-high, -low), rel=1e-12)


@pytest.mark.parametrize("function", [t_test, t_interval])
@pytest.mark.parametrize(
    ("differences", "message"),
    [
        ([1.0], "there are 1 paired differences; expected at least 2"),
        ([1.0, math.nan], "include NaN"),
        ([[1.0, 2.0]], "expected one dimension"),
        (["a", "b"], "not an array of numbers"),
        ([0.1 + 0.2, 0.3, 0.3], "all paired differences are equal"),
    ],
)
def test_differences_without_an_answer(function, differences, message: str) -> None:
    with pytest.raises(UserError, match=message):
        function(differences)


def test_arguments_out_of_range() -> None:
    with pytest.raises(UserError, match="the confidence level is 95; expected a number between 0 and 1"):
        t_interval(SLEEP, 95)
    with pytest.raises(UserError, match="there are 0 paired differences"):
        sign_flip_test([])
    with pytest.raises(UserError, match="the number of pairs is 0"):
        smallest_sign_flip_p(0)


def adjust_by_closed_test(p_values: list[float]) -> list[float]:
    """Return the p-values of Bonferroni's closed test, which rejects a hypothesis if it rejects every set with it."""
    indices = range(len(p_values))
    sets = [subset for size in indices for subset in itertools.combinations(indices, size + 1)]
    return [
        max(min(1.0, len(subset) * min(p_values[member] for member in subset)) for subset in sets if index in subset)
        for index in indices
    ]


def test_a_published_example() -> None:
    """Four p-values of a textbook are adjusted to 0.005 x 4, 0.01 x 3, 0.03 x 2, and for 0.04 to the maximum so far."""
    assert holm([0.01, 0.04, 0.03, 0.005]).adjusted == pytest.approx((0.03, 0.06, 0.06, 0.02), rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_holm_closes_bonferronis_test(seed: int) -> None:
    p_values = (np.random.default_rng(seed).uniform(size=1 + seed) ** 3).tolist()
    p_values.append(p_values[0])
    assert holm(p_values).adjusted == pytest.approx(adjust_by_closed_test(p_values), rel=1e-12)


def test_entries_without_a_test_are_no_part_of_the_family() -> None:
    result = holm([None, 0.02, math.nan, 0.01])
    assert result.adjusted == (None, 0.02, None, 0.02)
    assert (result.tests, result.left_out) == (2, 2)
    assert result.sentence() == (
        "p-values are corrected by Holm's method for 2 tests; 2 entries without a p-value are not among them."
    )


def test_few_entries() -> None:
    assert holm([]).adjusted == ()
    assert "for 0 tests; 1 entry without a p-value is not" in holm([None]).sentence()
    assert holm([0.3]).adjusted == (0.3,)


def test_the_order_does_not_matter() -> None:
    p_values = [0.2, 0.001, 0.04, 0.04, 0.9]
    expected = dict(zip(p_values, holm(p_values).adjusted, strict=True))
    for order in itertools.permutations(p_values):
        assert holm(order).adjusted == tuple(expected[p] for p in order)


@pytest.mark.parametrize("p", [-0.1, 1.5, math.inf])
def test_no_p_value(p: float) -> None:
    with pytest.raises(UserError, match="is no p-value; expected a number in"):
        holm([0.1, p])


@pytest.mark.parametrize("seed", range(5))
def test_spread_is_that_of_pandas(seed: int) -> None:
    values = np.random.default_rng(seed).normal(60, 3, size=2 + seed).tolist()
    result = mean_and_std(values)
    assert result.mean == pytest.approx(pd.Series(values).mean(), rel=1e-14)
    assert result.std == pytest.approx(pd.Series(values).std(ddof=1), rel=1e-12)
    assert result.count == len(values)


def test_spread_of_few() -> None:
    assert mean_and_std([]).mean is None
    assert (mean_and_std([3.0]).mean, mean_and_std([3.0]).std, mean_and_std([3.0]).count) == (3.0, None, 1)


@pytest.mark.parametrize("test", ["t", "sign-flip"])
def test_where_a_test_is_not_defined(test: str) -> None:
    assert [compute_p_value(differences, test) for differences in ([], [1.0])] == [None, None]
    # The t-test is not defined for equal differences.
    assert compute_p_value([0.5] * 4, test) == {"t": None, "sign-flip": 2 / 2**4}[test]
    assert compute_p_value([0.0, 0.0], test) == {"t": None, "sign-flip": 1.0}[test]
