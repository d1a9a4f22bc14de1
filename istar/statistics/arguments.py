"""Checks of the arguments of the statistics: finite numbers, of the right shape, in range."""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from istar.errors import UserError

Vector = NDArray[np.float64]


def finite_vector(values: ArrayLike, name: str, at_least: int) -> Vector:
    """Return the values as a float64 vector.

    Args:
        values: one-dimensional.
        name: what the values are, for the message.
        at_least: smallest number of values.

    Raises:
        UserError: if the values are not one-dimensional, too few, or not finite.
    """
    vector = finite_array(values, name)
    if vector.ndim != 1:
        raise UserError(f"{name} have the shape {vector.shape}; expected one dimension")
    if len(vector) < at_least:
        raise UserError(f"there are {len(vector)} {name}; expected at least {at_least}")
    return vector


def finite_array(values: ArrayLike, name: str) -> NDArray[np.float64]:
    """Return the values as a float64 array.

    Raises:
        UserError: if the values are no numbers or not finite.
    """
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} are not an array of numbers; expected numbers, and rows of equal length") from error
    if not np.isfinite(array).all():
        raise UserError(f"{name} include NaN or infinite values; leave those runs out of both methods")
    return array


def is_constant(values: Vector) -> bool:
    """Return whether the values differ by rounding errors at most, so that their standard deviation is only noise.

    Differences of scores have the rounding errors of the scores, which are of the order of 1, so that values within
    1e-12 of each other count as equal however small they are. `istar.geometry.constant` is for series of any scale.
    """
    return bool(np.ptp(values) <= 1e-12 * max(1.0, float(np.abs(values).max())))


def check_varied(values: Vector, name: str) -> None:
    """Raise a `UserError` if all values are equal."""
    if is_constant(values):
        raise UserError(f"all {name} are equal, so that they do not show how much they vary; expected different values")


def check_probability(value: float, name: str) -> None:
    """Raise a `UserError` unless the value lies strictly between 0 and 1."""
    if not 0 < value < 1:
        raise UserError(f"{name} is {value}; expected a number between 0 and 1")


def check_positive(value: float, name: str) -> None:
    """Raise a `UserError` unless the value is a finite number above 0."""
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{name} is {value}; expected a finite number above 0")


def check_at_least(value: int, minimum: int, name: str) -> None:
    """Raise a `UserError` if a whole number is smaller than its minimum."""
    if value < minimum:
        raise UserError(f"{name} is {value}; expected {minimum} or more")


def check_choice(value: str, choices: tuple[Any, ...], name: str) -> None:
    """Raise a `UserError` unless the value is one of the choices."""
    if value not in choices:
        raise UserError(f"{name} is {value!r}; expected one of {', '.join(choices)}")
