"""A process of a run: `python -m istar.finetune.processes.child <parent PID> <config.yaml> <folder> [trial]`."""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from omegaconf import OmegaConf

from istar.drawing.robust_output import make_output_robust
from istar.drawing.terminal import make_console
from istar.errors import SHOW_TRACE, LockedError, StoppedError, UserError, describe_stop, mask_secrets, shorten
from istar.files.parsing import read_json, read_yaml
from istar.files.writing import write_text
from istar.finetune.config import schema
from istar.finetune.execute.extras import fast_imports
from istar.finetune.processes.process_signals import FORWARDED_SIGNALS
from istar.runs.record import write_result

UNEXPECTED_ERROR = 1
"""Exit code of a process that ends with any exception except a `UserError`."""


def main(arguments: Sequence[str]) -> NoReturn:
    """Execute a run in this interpreter; the first argument is the parent's PID."""
    parent_pid, *process_arguments = arguments
    execute_process(process_arguments, is_parent_alive=lambda: os.getppid() == int(parent_pid))


def execute_process(arguments: Sequence[str], is_parent_alive: Callable[[], bool]) -> NoReturn:
    """Execute a run as one of its processes, write the record or the error for the parent process, and exit.

    `arguments` are the config file, the folder for the record or the error, and optionally the trial. If
    `is_parent_alive`, which is called repeatedly, returns False, SIGTERM stops the run.
    """
    config_path, folder, *trial = arguments
    rank = os.environ.get("LOCAL_RANK", "0")
    # Until the training has installed its handlers, Ctrl-C ends this process without a `KeyboardInterrupt`.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
    _terminate_with_parent(is_parent_alive)
    make_output_robust()
    schema.register()
    try:
        with fast_imports():
            from tqdm import tqdm

            from istar.finetune.execute.run import run

        # By default, progress bars share a lock between processes. `os._exit` would leave its semaphore behind, with a
        # warning, where processes are not forked by default: on macOS, and from Python 3.14 on.
        tqdm.set_lock(threading.RLock())
        config = schema.load(OmegaConf.create(read_yaml(Path(config_path))))
        record = run(config, make_console(), *trial)
        if rank == "0":
            # The parent does not read the run's folder: on a second node, the result may not be visible there yet.
            write_result(record, Path(folder))
        exit_code = 0
    except BaseException as error:  # also the SystemExit of a library
        exit_code = write_error(error, Path(folder), rank)
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit of the interpreter may hang or abort in the destructor of a process group.
    os._exit(exit_code)


def _terminate_with_parent(is_parent_alive: Callable[[], bool]) -> None:
    def terminate_when_parent_ends() -> None:
        while is_parent_alive():
            time.sleep(0.25)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate_when_parent_ends, daemon=True).start()


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
        stop = describe_stop(-exit_code)
        return StoppedError(f"{stop} outside of training; run the same command to resume", -exit_code)
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


if __name__ == "__main__":
    main(sys.argv[1:])
