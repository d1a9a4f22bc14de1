"""Helpers that the commands share: the console, the output folder and checks of options."""

import argparse
from pathlib import Path

from istar.errors import UserError
from istar.terminal import make_console as make_console


def make_folder(folder: Path) -> None:
    """Create the folder that `--out` names, or raise a `UserError` if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be made: {error.strerror or error}") from error


def check_minima(options: argparse.Namespace, **minima: int) -> None:
    """Raise a `UserError` if an option has a value below its minimum.

    `minima` has the minimum of each option by name. Options that are None are not checked.
    """
    for name, minimum in minima.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise UserError(f"--{name.replace('_', '-')} {value} is too small; expected {minimum} or more")
