"""Statistics over seeds: mean and standard deviation, and paired significance tests of two methods."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

_MAX_SIGN_FLIP_PAIRS = 16
"""The sign-flip test enumerates 2^pairs sign patterns at once, which needs too much memory beyond this number."""


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (ddof = 1) of `count` values.

    `std` is None for fewer than two values, `mean` for none.
    """

    mean: float | None
    std: float | None
    count: int


@dataclass(frozen=True)
class TestResult:
    """A two-sided p-value, or None and the reason why the test does not apply."""

    p_value: float | None
    reason: str = ""


@dataclass(frozen=True)
class PairedComparison:
    """Comparison of a method with a reference over the seeds that both have.

    Attributes:
        pairs: number of common seeds.
        difference: mean of method minus reference over these seeds; None without a common seed.
        t_test: Student's paired t-test.
        sign_flip: exact permutation test that flips the signs of the differences.
    """

    pairs: int
    difference: float | None
    t_test: TestResult
    sign_flip: TestResult


def spread(values: Sequence[float]) -> Spread:
    """Return the mean and the sample standard deviation of the values."""
    if not values:
        return Spread(None, None, 0)
    array = np.asarray(values, dtype=np.float64)
    return Spread(float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else None, len(array))


def compare_paired(method: Mapping[int, float], reference: Mapping[int, float]) -> PairedComparison:
    """Compare two methods seed by seed; seeds that only one of them has are ignored.

    Args:
        method: metric by seed.
        reference: metric by seed of the method to compare with.
    """
    seeds = sorted(method.keys() & reference.keys())
    differences = [method[seed] - reference[seed] for seed in seeds]
    if len(seeds) < 2:
        no_test = TestResult(None, "no test: one pair of seeds" if seeds else "no test: no common seed")
        return PairedComparison(len(seeds), differences[0] if seeds else None, no_test, no_test)
    return PairedComparison(
        len(seeds),
        float(np.mean(differences)),
        _t_test([method[seed] for seed in seeds], [reference[seed] for seed in seeds]),
        _sign_flip_test(differences),
    )


def _t_test(method: Sequence[float], reference: Sequence[float]) -> TestResult:
    differences = np.asarray(method) - np.asarray(reference)
    # If the differences vary by rounding errors only, the t statistic divides by noise.
    if np.ptp(differences) <= 1e-12 * max(1.0, float(np.abs(differences).max())):
        return TestResult(None, "no t-test: all differences are equal")
    return TestResult(float(stats.ttest_rel(method, reference).pvalue))


def _sign_flip_test(differences: Sequence[float]) -> TestResult:
    """Return the share of the 2^n sign patterns whose sum is at least as far from 0 as the observed sum."""
    if len(differences) > _MAX_SIGN_FLIP_PAIRS:
        return TestResult(None, f"no sign-flip test: more than {_MAX_SIGN_FLIP_PAIRS} pairs")
    magnitudes = np.abs(np.asarray(differences, dtype=np.float64))
    if not magnitudes.any():
        return TestResult(None, "no sign-flip test: all differences are 0")
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(magnitudes))))
    # The tolerance counts sums that equal the observed one up to rounding.
    observed = abs(math.fsum(differences)) - 1e-12 * float(magnitudes.sum())
    return TestResult(float((np.abs(signs @ magnitudes) >= observed).mean()))
