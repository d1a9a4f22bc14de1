"""Half-widths of 95% intervals, against scipy's distributions."""

import math

import pytest
import scipy.stats

from istar.geometry.collect.intervals import JACKKNIFE_MEASURES, interval_half_width, t_quantile


@pytest.mark.parametrize("groups", [2, 3, 10, 40])
def test_the_jackknife_has_students_quantile_and_other_errors_the_normal_one(groups: int) -> None:
    measures = {"isoscore": 0.3, "isoscore_error": 0.02, "two_nn": 9.0, "two_nn_error": 0.5}
    low, high = scipy.stats.t.interval(0.95, groups - 1, loc=0.3, scale=0.02)
    assert interval_half_width(measures, "isoscore", groups) == pytest.approx((high - low) / 2, rel=1e-12)
    low, high = scipy.stats.norm.interval(0.95, loc=9, scale=0.5)
    assert interval_half_width(measures, "two_nn", groups) == pytest.approx((high - low) / 2, rel=1e-12)


def test_there_is_no_interval_without_an_error_or_groups() -> None:
    assert math.isnan(interval_half_width({"isoscore": 0.3}, "isoscore", 10))
    for name in JACKKNIFE_MEASURES:
        assert math.isnan(interval_half_width({f"{name}_error": 0.1}, name, 0))
    assert math.isnan(t_quantile(0))
