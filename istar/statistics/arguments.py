"""Checks of the arguments of statistical functions: finite numbers, of the right shape, in range."""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from istar.errors import UserError

Vector = NDArray[np.float64]


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number; booleans are not numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def to_finite_vector(values: ArrayLike, name: str, min_length: int) -> Vector:
    """Return the values `(n,)` as a float64 vector, after checking that they are finite.

    `name` says in the plural what the values are, for the error message.

    Raises:
        UserError: if the values are not numbers, not one-dimensional, fewer than `min_length`, or not finite.
    """
    try:
        vector = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} are not an array of numbers; expected numbers, and rows of equal length") from error
    if not np.isfinite(vector).all():
        raise UserError(f"{name} include NaN or infinite values; leave those runs out of both methods")
    if vector.ndim != 1:
        raise UserError(f"{name} have the shape {vector.shape}; expected one dimension")
    if len(vector) < min_length:
        raise UserError(f"there are {len(vector)} {name}; expected at least {min_length}")
    return vector


def is_constant(values: Vector, scale: float = 1.0) -> bool:
    """Return whether all values `(n,)` are equal up to rounding errors, so that their standard deviation is only noise.

    Args:
        values: numbers, for example differences of scores.
        scale: size of the numbers that the values are computed from. The default suits scores: their differences count
            as equal within 1e-12, however small they are. 0 means the values' own size.
    """
    return bool(np.ptp(values) <= 1e-12 * max(scale, float(np.abs(values).max())))


def check_not_constant(values: Vector, name: str) -> None:
    """Raise a `UserError` if all values are equal up to rounding errors."""
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


def require_at_least(value: int, minimum: int, name: str) -> None:
    """Raise a `UserError` if a whole number is smaller than its minimum."""
    if value < minimum:
        raise UserError(f"{name} is {value}; expected {minimum} or more")
