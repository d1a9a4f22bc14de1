"""Output of commands, runs and sweeps in a terminal."""

from typing import Any

from rich.console import Console, Group
from rich.progress import Progress
from rich.table import Table
from rich.text import Text


def make_console(**options: Any) -> Console:
    """Create a rich console that shows strings as they are, even in tables: `[cpu]` and `:x:` are not markup."""
    return Console(markup=False, emoji=False, highlight=False, **options)


def make_progress(console: Console | None) -> Progress:
    """Create bars with percentages and the time to go, which are shown in a terminal until they end."""
    return Progress(console=console, disable=console is None or not console.is_terminal, transient=True)


def with_wide_text(table: Table) -> Group:
    """Return a table with its title above and its caption below, both wrapped at the width of the terminal."""
    title, caption = (str(text) if text else "" for text in (table.title, table.caption))
    table.title = table.caption = None
    return Group(*([Text(title)] if title else []), table, *([Text(caption)] if caption else []))


def format_duration(seconds: float | None) -> str:
    """Format a duration in the two largest units: 45 s, 12 min, 3 h 5 min, 2 d 4 h; `-` for None."""
    if seconds is None:
        return "-"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"
