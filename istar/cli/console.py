"""Helpers that the commands share: the console and the output folder."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from istar.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console


def make_console(**options: Any) -> "Console":
    """Create a rich console; rich is imported here because `istar --help` must work without it."""
    from rich.console import Console

    return Console(**options)


def make_folder(folder: Path) -> None:
    """Create the folder that `--out` names.

    Raises:
        UserError: if the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be made: {error.strerror or error}") from error
