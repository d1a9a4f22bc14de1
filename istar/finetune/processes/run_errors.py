"""The error of a process of a run, on its way to the process that has started it."""

import json
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from istar.errors import SHOW_TRACE, LockedError, StoppedError, UserError, mask_secrets, shorten
from istar.files.parsing import read_json
from istar.files.writing import write_text

UNEXPECTED_ERROR = 1
"""Exit code of a process that ends with any exception except a `UserError`."""


def write_error(error: BaseException, folder: Path, rank: str) -> int:
    """Write the error that has ended a process for the parent process, and return the exit code of the process."""
    if isinstance(error, UserError):
        message, exit_code = str(error), error.exit_code
    else:
        message, exit_code = f"{type(error).__name__}: {shorten(error)}", UNEXPECTED_ERROR
    stack_trace = mask_secrets("".join(traceback.format_exception(error)))
    content = {"message": message, "code": exit_code, "trace": stack_trace}
    write_text(folder / f"error-{rank}.json", json.dumps(content))
    return exit_code


def read_error(
    folder: Path, exit_code_by_rank: dict[int, int], num_processes: int, signals: Sequence[int]
) -> UserError:
    """Return the error that ended a run: first a `UserError`, then a killing signal, then an unexpected exception.

    The order matters because the failure of one process makes the others fail, too.
    """
    error_by_rank = {
        rank: read_json(path) for rank in exit_code_by_rank if (path := folder / f"error-{rank}.json").exists()
    }
    user_errors = [error for error in error_by_rank.values() if error["code"] != UNEXPECTED_ERROR]
    if user_errors or len(error_by_rank) == len(exit_code_by_rank):
        first_error = (user_errors or list(error_by_rank.values()))[0]
        if SHOW_TRACE or not user_errors:
            print(first_error["trace"], file=sys.stderr, end="")
        return _make_user_error(first_error["message"], first_error["code"])
    rank = min(exit_code_by_rank.keys() - error_by_rank.keys())
    exit_code = exit_code_by_rank[rank]
    if -exit_code in signals:
        name = signal.Signals(-exit_code).name
        return StoppedError(f"stopped by {name} outside of training; run the same command to resume", -exit_code)
    process_label = f"process {rank} of {num_processes}" if num_processes > 1 else "the process of the run"
    end = f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"
    return _make_user_error(f"{process_label} {end}; the same command resumes from the last checkpoint")


def _make_user_error(message: str, exit_code: int = UNEXPECTED_ERROR) -> UserError:
    if exit_code > StoppedError.exit_code:
        return StoppedError(message, exit_code - StoppedError.exit_code)
    if exit_code == LockedError.exit_code:
        return LockedError(message)
    error = UserError(message)
    error.exit_code = exit_code
    return error
