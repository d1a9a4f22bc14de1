"""What the commands share: a console to print on and a folder to write to."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from istar.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console


def make_console(**options: Any) -> "Console":
    """A console of rich, which is imported here so that `istar --help` needs nothing but Python."""
    from rich.console import Console

    return Console(**options)


def make_folder(folder: Path) -> None:
    """Make the folder that `--out` names.

    Raises:
        UserError: if that is not possible.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be made: {error.strerror or error}") from error
