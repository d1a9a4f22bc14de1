"""Standard output of all commands: any text, in any encoding, even to a reader that ends early."""

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

CLOSED_PIPE_EXIT_CODE = 141
"""Exit code of a process that the signal SIGPIPE has ended, as shells report it."""


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
