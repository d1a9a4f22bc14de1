"""The one exception for mistakes that the user can mend."""


class UserError(Exception):
    """A mistake in a config, a file or a call, told in one line.

    The message says what was wrong, what was expected and how to mend it. The command line prints it
    without a stack trace and exits with 2; `HYDRA_FULL_ERROR=1` shows where it came from.
    """


def shorten(text: object, length: int = 200) -> str:
    """Fit for a message: one line, not too long."""
    line = " ".join(str(text).split())
    return line if len(line) <= length else f"{line[:length]}..."
