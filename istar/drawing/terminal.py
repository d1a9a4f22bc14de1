"""Output of all commands, runs and sweeps: any text, in any encoding, even to a reader that ends early."""

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

CLOSED_PIPE_EXIT_CODE = 141
"""Exit code of a process that the signal SIGPIPE has ended, as shells report it."""


def make_console(**options: Any) -> "Console":
    """Create a rich console that shows strings as they are, even in tables: `[cpu]` and `:x:` are not markup.

    rich is imported here because `istar --help` must work without it.
    """
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, **options)


def make_progress(console: "Console | None") -> "Progress":
    """Create bars with percentages and the time to go, which are shown in a terminal until they end."""
    from rich.progress import Progress

    return Progress(console=console, disable=console is None or not console.is_terminal, transient=True)


def make_output_robust() -> None:
    """Make standard output accept any text.

    A character that its encoding lacks is printed as a question mark. If the output is closed, as by `>&-`, all text is
    discarded.
    """
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    elif isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")


def run_with_robust_output(command: Callable[[], int]) -> int:
    """Execute a command, and return its exit code.

    If the reader of the output, such as `head`, ends first, the command ends without a message and with
    `CLOSED_PIPE_EXIT_CODE`. See also `make_output_robust`.
    """
    make_output_robust()
    try:
        try:
            return command()
        finally:
            # Output that is still buffered must fail here and not when the interpreter ends, even after `--help`.
            sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes the output once more when it ends, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE_EXIT_CODE


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
