"""Spacing of what a figure shows: evenly spaced items, steps on a logarithmic axis, and the rows of ridgelines."""

import itertools
import math
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
MAX_ITEMS = 5
"""Most layers in a figure."""
_FIRST, _MIN_GROWTH = 4, 1.9
"""Number of steps that decide about a logarithmic axis, and the least ratio of two of them; 512 to 1000 is 1.95."""


def evenly_spaced(items: Sequence[T], count: int = MAX_ITEMS) -> list[T]:
    """Choose at most `count` items, evenly spaced from the first to the last.

    Of n items, the i-th of `count` is at i (n - 1) / (count - 1), and a half rounds up. The arithmetic is exact.
    """
    if len(items) <= count:
        return list(items)
    gaps = count - 1
    return [items[(2 * number * (len(items) - 1) + gaps) // (2 * gaps)] for number in range(count)]


def are_log_spaced(steps: Sequence[int]) -> bool:
    """Return whether steps of a training suit a logarithmic axis: the first four above 0 about double, or grow faster.

    Steps at equal distances n, 2n, 3n, 4n do not. The first four decide, because a logarithmic schedule may go on in
    equal distances, as that of Pythia does after step 1000.
    """
    first = sorted(step for step in steps if step > 0)[:_FIRST]
    return len(first) == _FIRST and all(step >= _MIN_GROWTH * previous for previous, step in itertools.pairwise(first))


def ridges(curves: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the curves of a ridgeline plot: each has a row, the first one on top, and its maximum fills most of it.

    The row of curve i of n begins at height n - 1 - i, and its maximum is 0.85 above. Values are at least 0, or NaN.
    """
    rows = []
    for number, curve in enumerate(curves):
        highest = max((value for value in curve if math.isfinite(value)), default=0.0)
        scale = 0.85 / highest if highest > 0 else 0.0
        rows.append([len(curves) - 1 - number + scale * value for value in curve])
    return rows
