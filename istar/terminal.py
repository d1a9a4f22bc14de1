"""The console that all commands, runs and sweeps print to."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def make_console(**options: Any) -> "Console":
    """Create a rich console that shows every string as it is, also in tables: `[cpu]` and `:x:` are not markup.

    rich is imported here because `istar --help` must work without it.
    """
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, **options)
