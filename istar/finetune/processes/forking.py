"""Starts the processes of a sweep's runs by forking a server that has already imported the libraries.

Each run would otherwise spend seconds on the imports. The server is `multiprocessing`'s; it never executes a run
itself, so every run starts from the state after the imports.
"""

import gc
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path

import torch

from istar.errors import UserError, shorten
from istar.finetune.processes import child, process_signals, ranks

PRELOADED_MODULES = ["istar.finetune.processes.preloaded"]
"""Modules that the server imports."""


def is_supported() -> bool:
    """Return whether runs can be forked on this platform.

    Windows cannot fork, and on macOS a process that has loaded its libraries cannot continue after a fork.
    """
    return sys.platform == "linux"


def start_server(environment: Mapping[str, str]) -> None:
    """Start the server with these environment variables unless it is running; do not wait for its imports.

    Stop signals are blocked in the server, which ends together with the last of the processes that use it.
    """
    previous_environment = dict(os.environ)
    with process_signals.blocked_signals():
        _replace_environment(environment)
        try:
            multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED_MODULES)
            forkserver.ensure_running()
        finally:
            _replace_environment(previous_environment)


class ForkedProcess:
    """A fork of the server that executes a run. The class is a `launch.Spawn`; an object is a `launch.Process`.

    Raises a `UserError` if the server cannot fork, for example because an import has ended it.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log_path: Path | None) -> None:
        start_server(environment)
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_run_in_child, args=(arguments, dict(environment), log_path))
        try:
            self._process.start()
        except (OSError, EOFError) as error:
            raise UserError(
                f"the process of the run cannot be forked: {shorten(error) or type(error).__name__}; "
                "sweep.fork=false starts a new interpreter for each run"
            ) from error

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, signal_number: int) -> None:
        if self._process.exitcode is None and self._process.pid is not None:
            os.kill(self._process.pid, signal_number)

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode


def _replace_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _run_in_child(arguments: Sequence[str], environment: Mapping[str, str], log_path: Path | None) -> None:
    import numpy as np
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    # The garbage collector need not traverse the objects of the libraries.
    gc.freeze()
    # A forked process would otherwise start its own processes, such as data loaders', through the server.
    multiprocessing.set_start_method(None, force=True)
    os.setsid()
    if log_path is not None:
        with log_path.open("ab") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
    # Lightning and torch have read these variables on import, from the server's environment.
    rank_zero_only.rank = ranks.find_rank(environment)  # type: ignore[attr-defined]
    num_threads = environment.get("OMP_NUM_THREADS")
    if num_threads is not None and num_threads != os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(num_threads))
    _replace_environment(environment)
    # Python reseeds its own generator in a forked process, but not NumPy's.
    np.random.seed()
    sweep, server_pid = multiprocessing.parent_process(), os.getppid()
    child.execute_process(
        arguments, is_parent_alive=lambda: sweep is not None and sweep.is_alive() and os.getppid() == server_pid
    )
