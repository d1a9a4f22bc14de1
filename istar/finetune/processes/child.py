"""A process of a run: `python -m istar.finetune.processes.child <parent PID> <config.yaml> <folder> [trial]`."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from omegaconf import OmegaConf

from istar.drawing.robust_output import make_output_robust
from istar.drawing.terminal import make_console
from istar.files.parsing import read_yaml
from istar.finetune.config import schema
from istar.finetune.execute.extras import fast_imports
from istar.finetune.processes.process_signals import FORWARDED_SIGNALS
from istar.finetune.processes.run_errors import write_error
from istar.runs.record import write_result


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


if __name__ == "__main__":
    main(sys.argv[1:])
