"""Panels on the rows of a matrix: the groups by which projected rows are coloured."""

import pytest

from istar.drawing.matrix_panels import group_rows, make_projection_panels, make_spectrum_line


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
