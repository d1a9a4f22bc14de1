"""The one exception for mistakes that the user can mend, and what its messages are made with."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in a config, a file or a call, told in one line.

    The message says what was wrong, what was expected and how to mend it. The command line prints it
    without a stack trace and exits with 2; `HYDRA_FULL_ERROR=1` shows where it came from.
    """


def shorten(text: object, length: int = 200) -> str:
    """Fit for a message: one line, not too long."""
    line = " ".join(str(text).split())
    return line if len(line) <= length else f"{line[:length]}..."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest known name, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
