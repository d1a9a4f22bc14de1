"""Statistics over seeds: mean and standard deviation, and paired significance tests of two methods."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from istar.statistics import paired
from istar.statistics.arguments import is_constant


@dataclass(frozen=True)
class MeanAndStd:
    """Mean and sample standard deviation (ddof = 1) of some values."""

    mean: float | None  # None if there is no value
    std: float | None  # None for fewer than two values
    count: int


@dataclass(frozen=True)
class TestResult:
    """Result of a significance test: a two-sided p-value, or None and the reason why the test does not apply."""

    p_value: float | None
    reason: str = ""  # empty if there is a p-value


@dataclass(frozen=True)
class PairedComparison:
    """Comparison of a method with a reference over the seeds that both have."""

    num_pairs: int  # number of common seeds
    difference: float | None  # mean of method minus reference over these seeds; None without a common seed
    t_test: TestResult  # Student's paired t-test
    sign_flip: TestResult  # exact permutation test that flips the signs of the differences


def mean_and_std(values: Sequence[float]) -> MeanAndStd:
    """Return the mean and the sample standard deviation (ddof = 1) of the values."""
    if not values:
        return MeanAndStd(None, None, 0)
    std = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return MeanAndStd(float(np.mean(values)), std, len(values))


def compare_paired(method: Mapping[int, float], reference: Mapping[int, float]) -> PairedComparison:
    """Compare a method with a reference by paired tests over the seeds that both have.

    Args:
        method: metric of the method by seed.
        reference: metric of the reference by seed.
    """
    seeds = sorted(method.keys() & reference.keys())
    method_scores = np.array([method[seed] for seed in seeds])
    reference_scores = np.array([reference[seed] for seed in seeds])
    differences = method_scores - reference_scores
    if len(seeds) < 2:
        no_test = TestResult(None, "no test: one pair of seeds" if seeds else "no test: no common seed")
        return PairedComparison(len(seeds), float(differences[0]) if seeds else None, no_test, no_test)
    if is_constant(differences):
        t_test = TestResult(None, "no t-test: all differences are equal")
    else:
        t_test = TestResult(paired.t_test(differences))
    return PairedComparison(len(seeds), float(differences.mean()), t_test, _run_sign_flip_test(differences))


def _run_sign_flip_test(differences: np.ndarray) -> TestResult:
    """Return the result of the exact permutation test that flips the signs of the differences."""
    if len(differences) > paired.MAX_EXACT_PAIRS:
        return TestResult(None, f"no exact sign-flip test: more than {paired.MAX_EXACT_PAIRS} pairs")
    if not differences.any():
        return TestResult(None, "no sign-flip test: all differences are 0")
    return TestResult(paired.sign_flip_test(differences).p_value)
