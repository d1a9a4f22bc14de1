"""The exceptions that are told to the user in one line, and what their messages are made with."""

import difflib
import os
from collections.abc import Iterable
from typing import Self

SHOW_TRACE = os.environ.get("HYDRA_FULL_ERROR") == "1"
"""Whether the user wants stack traces; train.py sets the variable for Hydra's sake later on."""


class UserError(Exception):
    """A mistake in a config, a file or a call, told in one line.

    The message says what was wrong, what was expected and how to mend it. The command line prints it
    without a stack trace and exits with 2; `HYDRA_FULL_ERROR=1` shows where it came from.
    """

    exit_code = 2


class NonFiniteError(UserError):
    """A loss, a gradient or a hidden state is NaN or infinite: the training has diverged."""


class StoppedError(UserError):
    """A signal asked the run to stop; the same command goes on from where it was.

    Args:
        message: what was saved.
        signal_number: which signal; it is added to the exit code, as shells have it.
    """

    exit_code = 128

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code += signal_number

    def __reduce__(self) -> tuple[type[Self], tuple[str, int]]:
        return type(self), (str(self), self.exit_code - StoppedError.exit_code)


def shorten(text: object, length: int = 200) -> str:
    """Fit for a message: one line, not too long."""
    line = " ".join(str(text).split())
    return line if len(line) <= length else f"{line[:length]}..."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest known name, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
