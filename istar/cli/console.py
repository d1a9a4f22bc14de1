"""Helpers that the commands share: the console and checks of options."""

import argparse
from typing import TYPE_CHECKING, Any

from istar.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console


def make_console(**options: Any) -> "Console":
    """Create a rich console; rich is imported here because `istar --help` must work without it."""
    from rich.console import Console

    return Console(**options)


def check_minima(options: argparse.Namespace, **minima: int) -> None:
    """Raise a `UserError` if an option has a value below its minimum.

    `minima` has the minimum of each option by name. Options that are None are not checked.
    """
    for name, minimum in minima.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise UserError(f"--{name.replace('_', '-')} {value} is too small; expected {minimum} or more")
