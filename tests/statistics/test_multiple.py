import itertools
import math

import numpy as np
import pytest

from istar.errors import UserError
from istar.statistics.multiple import holm


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
    assert holm([None]).sentence() == (
        "p-values are corrected by Holm's method for 0 tests; 1 entry without a p-value is not among them."
    )
    assert holm([0.3]).adjusted == (0.3,)
    assert holm([0.3]).sentence() == "p-values are corrected by Holm's method for 1 test."


def test_the_order_does_not_matter() -> None:
    p_values = [0.2, 0.001, 0.04, 0.04, 0.9]
    expected = dict(zip(p_values, holm(p_values).adjusted, strict=True))
    for order in itertools.permutations(p_values):
        assert holm(order).adjusted == tuple(expected[p] for p in order)


@pytest.mark.parametrize("p", [-0.1, 1.5, math.inf])
def test_no_p_value(p: float) -> None:
    with pytest.raises(UserError, match="is no p-value; expected a number in"):
        holm([0.1, p])
