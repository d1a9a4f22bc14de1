"""Evenly spaced layers, logarithmic axes, and panels on the rows of a matrix."""

import itertools
import math
from fractions import Fraction

import pytest

from istar.drawing.panel_drawing import stack_ridges
from istar.drawing.plot import evenly_spaced, group_rows, make_projection_panels, make_spectrum_line, need_log_axis


@pytest.mark.parametrize("count", range(1, 101))
def test_every_depth_is_divided_evenly(count: int) -> None:
    selected = evenly_spaced(range(count))
    if count <= 5:
        assert selected == list(range(count))
        return
    # A half rounds up at each position, never to the even neighbour.
    assert selected == [math.floor(Fraction(position * (count - 1), 4) + Fraction(1, 2)) for position in range(5)]
    assert (selected[0], selected[-1], len(set(selected))) == (0, count - 1, 5)
    gaps = [after - before for before, after in itertools.pairwise(selected)]
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.5, 16.0], True),
        ([1.0, 10.0], False),
        ([1.0, 10.1], True),
        ([0.0, 16.0], False),
        ([-0.5, 0.5, 16.0], False),
        ([math.nan, 0.5, math.inf, 0.6], False),
        ([3.0], False),
        ([], False),
    ],
)
def test_positive_values_above_a_ratio_of_ten_need_a_logarithmic_axis(values: list[float], expected: bool) -> None:
    assert need_log_axis(values) == expected


def test_each_ridge_has_a_row_and_fills_it() -> None:
    rows = stack_ridges([(0.0, 4.0, 2.0), (0.0, math.nan, 100.0), (0.0, 0.0, 0.0)])
    assert rows[0] == pytest.approx([2, 2.85, 2.425])
    assert rows[1] == pytest.approx([1, math.nan, 1.85], nan_ok=True)
    assert rows[2] == [0, 0, 0]


def test_colours_show_the_frequency_if_it_is_known() -> None:
    ids = [0, 10, 20, 30]
    groups, explanation = group_rows(ids, [0, 5, 9, 1])
    assert list(groups) == ["most frequent quarter", "second", "third", "rarest quarter", "not in the texts"]
    assert groups["not in the texts"].tolist() == [0]
    assert "frequency in these texts" in explanation
    for counts in ([0, 0, 0, 1], None):
        groups, explanation = group_rows(ids, counts)
        assert sorted(index for indices in groups.values() for index in indices) == [0, 1, 2, 3]
        assert "the colour is the id" in explanation


def test_a_matrix_of_one_dimension_has_no_projection() -> None:
    rows = {"ids": [0, 1], "raw": [[1.0, 2.0]], "centered": [[-0.5, 0.5]]}
    assert make_projection_panels(rows, None, "input")[0] == []


def test_singular_values_that_are_rounding_errors_are_left_out() -> None:
    line = make_spectrum_line("raw", [2.0, 1.0, 1e-9], 1e-6)
    assert (line.x, line.y) == ((1, 2), pytest.approx((2.0, 1.0)))


def test_kept_items_are_among_the_evenly_spaced_ones() -> None:
    states = ["embeddings", *(f"layer_{number}" for number in range(1, 7)), "pooled"]
    assert evenly_spaced(states, kept=["pooled"]) == ["embeddings", "layer_2", "layer_4", "layer_6", "pooled"]
    assert evenly_spaced(states[:3], kept=["pooled"]) == states[:3]
