"""Spacing of what a figure shows: evenly spaced items, logarithmic axes, and the rows of ridgelines."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
MAX_ITEMS = 5
"""Most layers in a figure."""
_NUM_FIRST_STEPS, _MIN_GROWTH = 4, 1.9
"""Number of steps that decide about a logarithmic axis, and the least ratio of two of them; 512 to 1000 is 1.95."""
_MAX_LINEAR_RATIO = 10.0
"""Largest ratio of two values on a linear axis; with a larger one, the smaller values would look alike."""


def evenly_spaced(items: Sequence[T], count: int = MAX_ITEMS) -> list[T]:
    """Return at most `count` items, evenly spaced from the first to the last.

    Of n items, item i of the result, counted from 0, is that at index i (n - 1) / (count - 1), rounded to the nearest
    integer and up at a half. The arithmetic is exact.
    """
    if len(items) <= count:
        return list(items)
    num_gaps = count - 1
    return [items[(2 * index * (len(items) - 1) + num_gaps) // (2 * num_gaps)] for index in range(count)]


def are_log_spaced(steps: Sequence[int]) -> bool:
    """Return whether training steps suit a logarithmic axis: each of the first four above 0 about doubles or more.

    Steps at equal distances n, 2n, 3n, 4n do not suit one. Only the first four count, because a logarithmic schedule
    may continue at equal distances, as that of Pythia does after step 1000.
    """
    first_steps = sorted(step for step in steps if step > 0)[:_NUM_FIRST_STEPS]
    is_complete = len(first_steps) == _NUM_FIRST_STEPS
    return is_complete and all(step >= _MIN_GROWTH * previous for previous, step in itertools.pairwise(first_steps))


def need_log_axis(values: Iterable[float]) -> bool:
    """Return whether values need a logarithmic axis: all are positive, and the largest is above 10 times the smallest.

    Values that are not finite do not count.
    """
    finite_values = [value for value in values if math.isfinite(value)]
    return bool(finite_values) and 0 < _MAX_LINEAR_RATIO * min(finite_values) < max(finite_values)


def stack_ridges(curves: Sequence[Sequence[float]]) -> list[list[float]]:
    """Scale and shift curves for a ridgeline plot: each has its own row, the first curve on top.

    The row of curve i of n begins at height n - 1 - i, and the curve's maximum is 0.85 above. Values are at least 0, or
    NaN.
    """
    rows = []
    for index, curve in enumerate(curves):
        highest = max((value for value in curve if math.isfinite(value)), default=0.0)
        scale = 0.85 / highest if highest > 0 else 0.0
        rows.append([len(curves) - 1 - index + scale * value for value in curve])
    return rows
