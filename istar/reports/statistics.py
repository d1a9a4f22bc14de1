"""What seeds can tell: a spread, and whether two methods differ by more than their seeds do."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

_MOST_PAIRS = 16
"""2^16 sign patterns are enumerated at once; so many seeds need no exact test."""


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (ddof = 1) of `count` values; `std` is None for one value, `mean` for none."""

    mean: float | None
    std: float | None
    count: int


@dataclass(frozen=True)
class Test:
    """A two-sided p, or why there is none."""

    p: float | None
    why: str = ""


@dataclass(frozen=True)
class Paired:
    """Two methods with the same seeds.

    Attributes:
        pairs: seeds that both have.
        difference: mean of method minus reference over them, None without a pair.
        t_test: Student's paired t-test.
        sign_flip: exact permutation test that flips the signs of the differences.
    """

    pairs: int
    difference: float | None
    t_test: Test
    sign_flip: Test


def spread(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation of the values."""
    if not values:
        return Spread(None, None, 0)
    array = np.asarray(values, dtype=np.float64)
    return Spread(float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else None, len(array))


def paired(method: Mapping[int, float], reference: Mapping[int, float]) -> Paired:
    """Compare a method with a reference, seed by seed.

    Args:
        method: value by seed.
        reference: the same of what it is compared with; seeds that only one of them has do not count.
    """
    seeds = sorted(method.keys() & reference.keys())
    differences = [method[seed] - reference[seed] for seed in seeds]
    if len(seeds) < 2:
        why = "no test: one pair of seeds" if seeds else "no test: no common seed"
        return Paired(len(seeds), differences[0] if seeds else None, Test(None, why), Test(None, why))
    values = [method[seed] for seed in seeds], [reference[seed] for seed in seeds]
    return Paired(len(seeds), float(np.mean(differences)), _t_test(*values), _sign_flip(differences))


def _t_test(method: Sequence[float], reference: Sequence[float]) -> Test:
    differences = np.asarray(method) - np.asarray(reference)
    # Differences that are equal but for rounding have a t of no meaning.
    if np.ptp(differences) <= 1e-12 * max(1.0, float(np.abs(differences).max())):
        return Test(None, "no t-test: all differences are equal")
    return Test(float(stats.ttest_rel(method, reference).pvalue))


def _sign_flip(differences: Sequence[float]) -> Test:
    """p = share of the 2^n sign patterns whose sum is as far from 0 as that of the differences."""
    if len(differences) > _MOST_PAIRS:
        return Test(None, f"no sign-flip test: more than {_MOST_PAIRS} pairs")
    sizes = np.abs(np.asarray(differences, dtype=np.float64))
    if not sizes.any():
        return Test(None, "no sign-flip test: all differences are 0")
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(sizes))))
    observed = abs(math.fsum(differences)) - 1e-12 * float(sizes.sum())
    return Test(float((np.abs(signs @ sizes) >= observed).mean()))
