"""Whether a series is constant, which leaves its correlations undefined."""

import numpy as np


def is_constant(values: np.ndarray) -> bool:
    """Return whether all values `(n,)` are equal, or differ by rounding errors alone."""
    return bool(np.ptp(values) <= 1e-12 * np.abs(values).max())
