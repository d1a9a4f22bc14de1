"""Correction of p-values for the number of tests in a table."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from istar.errors import UserError


class Holm(NamedTuple):
    """Result of `holm`."""

    adjusted: tuple[float | None, ...]  # in the order of the p-values; None where there was no p-value
    tests: int  # number of p-values in the family
    left_out: int  # number of entries without a p-value

    def sentence(self) -> str:
        """Return a sentence that says how many tests the correction is for, and how many entries have no p-value."""
        text = f"p-values are corrected by Holm's method for {self.tests} test{'s' * (self.tests != 1)}"
        if not self.left_out:
            return f"{text}."
        verb = "entry without a p-value is" if self.left_out == 1 else "entries without a p-value are"
        return f"{text}; {self.left_out} {verb} not among them."


def holm(p_values: Sequence[float | None]) -> Holm:
    r"""Adjust the p-values of a whole table by Holm's step-down method.

    With the m p-values in ascending order, :math:`\tilde p_{(i)} = \max_{j \le i} \min(1, (m - j + 1) p_{(j)})`
    (Holm, *A Simple Sequentially Rejective Multiple Test Procedure*, 1979). Rejecting where
    :math:`\tilde p < \alpha` keeps the probability of any false rejection in the table at most alpha.

    Assumptions: each p-value is valid; their dependence may be any. The family is the whole table: all methods and
    tasks that were tried, not only those with good results.

    Args:
        p_values: one for each entry. None or NaN stands for an entry without a test, which is left out of the family
            and counted in `left_out`.

    Raises:
        UserError: if a p-value is outside [0, 1].

    >>> holm([0.01, None, 0.04]).adjusted
    (0.02, None, 0.04)
    """
    tested_indices = [
        index for index, p_value in enumerate(p_values) if p_value is not None and not math.isnan(p_value)
    ]
    tested_p_values = np.array([p_values[index] for index in tested_indices], dtype=np.float64)
    if invalid_p_values := tested_p_values[(tested_p_values < 0) | (tested_p_values > 1)].tolist():
        raise UserError(
            f"{invalid_p_values[0]} is no p-value; expected a number in [0, 1], or None for an entry without a test"
        )
    order = np.argsort(tested_p_values, kind="stable")
    steps = np.minimum(1.0, np.arange(len(tested_p_values), 0, -1) * tested_p_values[order])
    adjusted: list[float | None] = [None] * len(p_values)
    for position, value in zip(order, np.maximum.accumulate(steps), strict=True):
        adjusted[tested_indices[position]] = float(value)
    return Holm(tuple(adjusted), len(tested_p_values), len(p_values) - len(tested_p_values))
