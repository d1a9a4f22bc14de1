"""Evenly spaced layers, which include the first and the last one, and the rows of ridgelines."""

import itertools
import math
from fractions import Fraction

import pytest

from istar.figures.spacing import evenly_spaced, stack_ridges


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


def test_names_and_other_numbers_of_items() -> None:
    assert evenly_spaced("abcdefg", 3) == ["a", "d", "g"]
    assert evenly_spaced(["only"]) == ["only"]
    assert evenly_spaced([]) == []


def test_each_ridge_has_a_row_and_fills_it() -> None:
    rows = stack_ridges([(0.0, 4.0, 2.0), (0.0, math.nan, 100.0), (0.0, 0.0, 0.0)])
    assert rows[0] == pytest.approx([2, 2.85, 2.425])
    assert rows[1] == pytest.approx([1, math.nan, 1.85], nan_ok=True)
    assert rows[2] == [0, 0, 0]
