import math

import numpy as np
import pytest
from scipy import integrate, stats

from istar.errors import UserError
from istar.statistics import power as power_module
from istar.statistics.paired import t_test
from istar.statistics.power import pairs_needed, sd_interval, smallest_difference, t_test_power


def power_by_integration(difference: float, sd: float, pairs: int, alpha: float) -> float:
    """Return P(|Z + shift| > t s), integrated over the sample's s = sqrt(chi-square / degrees)."""
    shift, degrees = math.sqrt(pairs) * difference / sd, pairs - 1
    limit = stats.t.isf(alpha / 2, degrees)

    def integrand(s: float) -> float:
        tails = stats.norm.sf(limit * s - shift) + stats.norm.cdf(-limit * s - shift)
        return float(tails * stats.chi.pdf(s * math.sqrt(degrees), degrees) * math.sqrt(degrees))

    parts = [integrate.quad(integrand, a, b, epsabs=1e-12)[0] for a, b in ((0, 0.5), (0.5, 1), (1, 2), (2, 12))]
    return sum(parts)


@pytest.mark.parametrize(
    ("difference", "pairs", "alpha"), [(0.0, 5, 0.05), (0.5, 5, 0.2), (-1.5, 5, 0.05), (0.4, 34, 0.01), (3.0, 3, 0.05)]
)
def test_power_is_the_integral(difference: float, pairs: int, alpha: float) -> None:
    expected = power_by_integration(difference, 1.3, pairs, alpha)
    assert t_test_power(difference, 1.3, pairs, alpha) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize(("effect", "pairs"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10)])
def test_numbers_of_pairs_of_gpower(effect: float, pairs: int) -> None:
    """The numbers are those of G*Power for Cohen's effect sizes, power 0.8 and a two-sided alpha of 0.05."""
    assert pairs_needed(effect, 1.0) == pairs
    assert pairs_needed(-7 * effect, 7.0) == pairs


@pytest.mark.parametrize(("effect", "power"), [(0.07, 0.8), (0.3, 0.5), (0.9, 0.95), (2.5, 0.8), (30.0, 0.5)])
def test_one_pair_less_is_too_few(effect: float, power: float) -> None:
    pairs = pairs_needed(effect, 1.0, power=power)
    assert t_test_power(effect, 1.0, pairs) >= power
    assert pairs == 2 or t_test_power(effect, 1.0, pairs - 1) < power


@pytest.mark.parametrize(
    ("pairs", "alpha", "power"), [(2, 0.05, 0.8), (2, 0.001, 0.9), (5, 0.05, 0.06), (20, 0.05, 0.8), (1000, 0.001, 0.9)]
)
def test_the_smallest_difference_has_the_power(pairs: int, alpha: float, power: float) -> None:
    difference = smallest_difference(2.1, pairs, alpha, power)
    assert t_test_power(difference, 2.1, pairs, alpha) == pytest.approx(power, abs=1e-7)
    assert smallest_difference(21.0, pairs, alpha, power) == pytest.approx(10 * difference, rel=1e-9)


@pytest.mark.slow
def test_power_by_simulation() -> None:
    random = np.random.default_rng(0)
    difference = smallest_difference(1.0, 5)
    rejection_rate = np.mean([t_test(random.normal(difference, 1, 5)) < 0.05 for _ in range(5_000)])
    assert rejection_rate == pytest.approx(0.8, abs=4 * math.sqrt(0.16 / 5_000))


@pytest.mark.parametrize("pairs", [2, 5, 30])
def test_the_interval_of_a_standard_deviation(pairs: int) -> None:
    """If the true deviation is an end of the interval, 2.5% of samples have one as extreme as the observed one."""
    low, high = sd_interval(2.0, pairs)
    degrees = pairs - 1
    assert stats.chi2.sf(degrees * 4.0 / low**2, degrees) == pytest.approx(0.025, rel=1e-9)
    assert stats.chi2.cdf(degrees * 4.0 / high**2, degrees) == pytest.approx(0.025, rel=1e-9)


def test_the_sentences() -> None:
    assert power_module.pairs_needed_sentence(-0.5, 1.0) == (
        "To find a difference of 0.5 with probability 0.8, train each method with 34 seeds, the same for both (paired "
        "t-test, two-sided, alpha = 0.05, standard deviation of the paired differences 1)."
    )
    sentence_of_ten_pairs = power_module.smallest_difference_sentence(1.0, 10)
    assert f"is {smallest_difference(1.0, 10):.3g} (" in sentence_of_ten_pairs
    assert "sign-flip" not in sentence_of_ten_pairs
    sentence_of_five_pairs = power_module.smallest_difference_sentence(1.0, 5)
    assert sentence_of_five_pairs.endswith("The sign-flip test cannot give a p-value below 0.0625 with 5 pairs.")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pairs_needed(0.0, 1.0), "the size of the difference is 0.0"),
        (lambda: pairs_needed(1.0, 0.0), "standard deviation of the differences is 0.0"),
        (lambda: pairs_needed(1e-5, 1.0), "needs more than 1,000,000 pairs; choose a larger difference"),
        (lambda: pairs_needed(1.0, 1.0, alpha=5), "alpha is 5"),
        (lambda: pairs_needed(1.0, 1.0, power=0.04), "expected a power above alpha"),
        (lambda: smallest_difference(1.0, 1), "the number of pairs is 1"),
        (lambda: smallest_difference(1.0, 5, power=1.0), "the power is 1.0"),
        (lambda: t_test_power(math.inf, 1.0, 5), "the difference is inf; expected a finite number"),
        (lambda: sd_interval(1.0, 1), "the number of pairs is 1"),
    ],
)
def test_arguments_out_of_range(call, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()
