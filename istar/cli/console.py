"""Checks of options that the commands share."""

import argparse

from istar.errors import UserError


def check_minima(options: argparse.Namespace, **minima: int) -> None:
    """Raise a `UserError` if an option has a value below its minimum.

    `minima` has the minimum of each option by name. Options that are None are not checked.
    """
    for name, minimum in minima.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise UserError(f"--{name.replace('_', '-')} {value} is too small; expected {minimum} or more")
