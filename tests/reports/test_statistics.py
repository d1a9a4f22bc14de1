import itertools
import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from istar.reports.statistics import compare_paired, mean_and_std


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


@pytest.mark.parametrize("seed", range(8))
def test_paired_tests_by_hand(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_pairs = 2 + seed
    base_scores = {seed_index: float(random.normal(60, 1)) for seed_index in range(num_pairs)}
    method_scores = {seed_index: value + float(random.normal(0.5, 0.7)) for seed_index, value in base_scores.items()}
    # Only one of the two has each of these seeds.
    base_scores[100], method_scores[200] = 0.0, 99.0
    result = compare_paired(method_scores, base_scores)
    differences = np.array([method_scores[seed_index] - base_scores[seed_index] for seed_index in range(num_pairs)])
    t = differences.mean() / (differences.std(ddof=1) / math.sqrt(num_pairs))
    assert result.num_pairs == num_pairs
    assert result.difference == pytest.approx(differences.mean(), rel=1e-12)
    assert result.t_test.p_value == pytest.approx(2 * stats.t.sf(abs(t), num_pairs - 1), rel=1e-9)
    is_as_extreme = [
        abs(sum(sign * difference for sign, difference in zip(signs, differences, strict=True)))
        >= abs(differences.sum()) - 1e-9
        for signs in itertools.product((1, -1), repeat=num_pairs)
    ]
    assert result.sign_flip.p_value == pytest.approx(sum(is_as_extreme) / 2**num_pairs, rel=1e-12)


def test_sign_flip_is_that_of_scipy() -> None:
    random = np.random.default_rng(3)
    differences = random.normal(0.4, 1, size=9)
    result = compare_paired(dict(enumerate(differences)), dict.fromkeys(range(9), 0.0))
    reference = stats.permutation_test(
        (differences, np.zeros(9)), lambda x, y: (x - y).mean(), permutation_type="samples", n_resamples=np.inf
    )
    assert result.sign_flip.p_value == pytest.approx(reference.pvalue, rel=1e-12)


def test_five_pairs_cannot_be_significant_by_signs_alone() -> None:
    result = compare_paired({seed: 10.0 + seed**2 for seed in range(5)}, dict.fromkeys(range(5), 0.0))
    assert result.sign_flip.p_value == 2 / 2**5


@pytest.mark.parametrize("order", [1, -1])
def test_order_of_seeds_does_not_matter(order: int) -> None:
    method = {1: 61.0, 2: 63.0, 3: 62.5}
    base = dict(sorted({1: 60.0, 2: 60.5, 3: 62.0}.items(), reverse=order < 0))
    assert compare_paired(method, base).t_test.p_value == pytest.approx(
        stats.ttest_rel([61, 63, 62.5], [60, 60.5, 62]).pvalue
    )


def test_why_there_is_no_test() -> None:
    without_pairs = compare_paired({1: 5.0}, {2: 5.0})
    assert (without_pairs.num_pairs, without_pairs.difference) == (0, None)
    assert without_pairs.t_test.p_value is None
    assert without_pairs.t_test.reason == "no test: no common seed"
    with_one_pair = compare_paired({1: 5.0}, {1: 4.0})
    assert (with_one_pair.num_pairs, with_one_pair.difference) == (1, 1.0)
    assert with_one_pair.sign_flip.p_value is None
    assert with_one_pair.sign_flip.reason == "no test: one pair of seeds"
    equal_differences = compare_paired(
        {seed: 0.1 + seed for seed in range(4)}, {seed: float(seed) for seed in range(4)}
    )
    assert equal_differences.t_test.p_value is None
    assert equal_differences.t_test.reason == "no t-test: all differences are equal"
    assert equal_differences.sign_flip.p_value == 2 / 2**4
    zero_differences = compare_paired({1: 3.0, 2: 4.0}, {1: 3.0, 2: 4.0})
    assert (zero_differences.t_test.p_value, zero_differences.sign_flip.p_value) == (None, None)
    assert zero_differences.sign_flip.reason == "no sign-flip test: all differences are 0"
    with_many_pairs = compare_paired({seed: seed % 5 + 0.5 for seed in range(40)}, dict.fromkeys(range(40), 1.0))
    assert with_many_pairs.t_test.p_value is not None
    assert with_many_pairs.sign_flip.reason == "no exact sign-flip test: more than 20 pairs"
