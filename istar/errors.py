"""Exceptions that are shown to the user as one line, helpers for their messages, and checks of options."""

import difflib
import inspect
import math
import os
import re
import signal
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import Any, Self

SHOW_TRACE = os.environ.get("HYDRA_FULL_ERROR") == "1"
"""Whether the user set `HYDRA_FULL_ERROR=1` to see stack traces. Read at import, before `istar train` sets it."""


class UserError(Exception):
    """An error in a config, a file or a call that the user can correct.

    The message is one line that says what is wrong, what is expected and how to correct it. The command line prints the
    message without a stack trace and exits with code 2; `HYDRA_FULL_ERROR=1` shows the stack trace.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(mask_secrets(message))


class OptionError(UserError):
    """A refused value of an option. The message begins with the name of the option: `zeta=2 is outside [0, 1]`.

    A config that sets this option puts the name of its group before the message: `reg.zeta=2 ...`.
    """


class NonFiniteError(UserError):
    """A loss, a gradient or a point is NaN or infinite, usually because training has diverged."""


class LockedError(UserError):
    """Another process executes the run and has locked its folder.

    The exit code is `EX_TEMPFAIL` of `sysexits.h`: the same command succeeds later.
    """

    exit_code = 75


class StoppedError(UserError):
    """A signal stopped the run; the same command resumes it.

    Args:
        message: line for the user that says what was saved.
        signal_number: number of the signal. The exit code is 128 plus this number, as in shells.
    """

    exit_code = 128

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code += signal_number

    def __reduce__(self) -> tuple[type[Self], tuple[str, int]]:
        return type(self), (str(self), self.exit_code - StoppedError.exit_code)


class NamedOptions:
    """A base class for options; an unknown or a surplus one raises a `UserError` that names those that exist."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        signature = inspect.signature(cls.__init__)
        try:
            signature.bind_partial(None, *args, **options)
        except TypeError as error:
            _, *known = signature.parameters
            hint = next((did_you_mean(name, known) for name in options if name not in known), "")
            names = ", ".join(known).replace("weight", "weight (lambda)", 1)
            raise UserError(f"{cls.__name__}: {error}{hint}; expected {names}") from None
        return super().__new__(cls)


def describe_stop(signal_number: int) -> str:
    """Return `interrupted` for Ctrl-C, and `stopped by SIGTERM` or the like for another signal."""
    return "interrupted" if signal_number == signal.SIGINT else f"stopped by {signal.Signals(signal_number).name}"


def float_or_nan(function: Callable[[], Any]) -> float:
    """Return the result of a function as a float, or NaN if it raises a `UserError` because the value is undefined."""
    try:
        return float(function())
    except UserError:
        return math.nan


def explain_system_error(error: BaseException) -> str:
    """Return a line for the user if an error is due to a disk, a file system or the memory, or else ""."""
    text = shorten(error)
    if isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text.lower():
        return f"there is not enough memory{f' ({text})' if text else ''}; use a smaller batch, text or model"
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        reason = error.strerror or text
        name = f"{shorten(error.filename)}: " if error.filename is not None else ""
        return f"{name}{reason}"
    # Writers in Rust, such as safetensors, raise special types.
    return text if "(os error " in text else ""


def shorten(text: object, max_length: int = 200) -> str:
    """Convert any object to one line of printable text without secrets, truncated after `max_length` characters."""
    one_line = mask_secrets(" ".join(str(text).split()))
    one_line = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in one_line)
    return one_line if len(one_line) <= max_length else f"{one_line[:max_length]}..."


def mask_secrets(text: str) -> str:
    """Replace the passwords in URLs and the values of secret variables in a text by `***`.

    >>> mask_secrets("postgresql://me:pass@host/db?password=pass WANDB_API_KEY=0123")
    'postgresql://me:***@host/db?password=*** WANDB_API_KEY=***'
    """
    return _SECRET.sub(lambda match: f"{match[1] or match[2] or match[3]}***", text)


_SECRET = re.compile(
    r"(://[^\s:@/]*:)[^\s'\"]+(?=@)"  # the password in a URL; may contain an unescaped / or @
    r"|((?i:[?&;](?:password|passwd|pwd|token|api_?key|secret)=))[^\s&;'\"]+"
    r"|(\b[A-Z0-9_]*(?:KEY|TOKEN|PASSWORD|PASSWD|SECRET)=)[^\s'\"]+"
)
"""A secret, with the text before it in one of the groups."""


def did_you_mean(word: str, known_words: Iterable[str], cutoff: float = 0.5) -> str:
    """Return `; did you mean X?` with the most similar known word, or an empty string if none is similar.

    Similar words have a ratio of `difflib.SequenceMatcher` of at least `cutoff`.
    """
    similar_words = difflib.get_close_matches(str(word), list(known_words), n=1, cutoff=cutoff)
    return f"; did you mean {similar_words[0]}?" if similar_words else ""


def check_at_least(minimum: int, option: str, value: int | None) -> None:
    """Raise an `OptionError` if the value of an option is not an integer or is below the minimum. None is allowed."""
    if not isinstance(value, Integral | None):
        raise OptionError(f"{option}={value!r} is not a whole number; expected {minimum} or more")
    if value is not None and value < minimum:
        raise OptionError(f"{option}={value} is too small; expected {minimum} or more")


def check_range(option: str, value: float, minimum: float, *, is_exclusive: bool = False) -> None:
    """Raise an `OptionError` unless a value is finite and at least the minimum (above it if `is_exclusive`)."""
    if not ((minimum < value if is_exclusive else minimum <= value) and value < math.inf):
        bound = "above" if is_exclusive else "of at least"
        raise OptionError(f"{option}={value:g}; expected a finite number {bound} {minimum:g}")


def check_one_of(option: str, value: str, allowed: Sequence[str]) -> None:
    """Raise an `OptionError` if the value of an option is not allowed; the message suggests the most similar one."""
    if value not in allowed:
        raise OptionError(
            f"{option}={value} is not known{did_you_mean(value, allowed)}; expected one of {', '.join(allowed)}"
        )


def check_type(argument: str, value: object, expected: type, example: str) -> None:
    """Raise a `UserError` with an example unless the value of an argument is an instance of a class."""
    if not isinstance(value, expected):
        raise UserError(f"{argument} is {shorten(repr(value), 60)}; expected a {expected.__name__}, such as {example}")


def check_names(function: str, names: Sequence[str]) -> None:
    """Raise a `UserError` unless all arguments of a function that takes names are texts, for example for a list."""
    for name in names:
        if not isinstance(name, str):
            raise UserError(f'{name} is a {type(name).__name__}; expected names: {function}("inter_sim", ...)')


def check_number_or_word(option: str, value: object, word: str) -> None:
    """Raise an `OptionError` unless the value of an option is a number or `word`."""
    if value != word and (isinstance(value, bool) or not isinstance(value, Real)):
        raise OptionError(f"{option}={value} is neither a number nor {word}")
