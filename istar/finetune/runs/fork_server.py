"""Starts the runs of a sweep by forking a server process that has already imported the libraries.

The imports take seconds, which each run would otherwise spend again. `python -m istar.finetune.runs.fork_server` with a
file descriptor starts the server. The server never executes a run itself, so every run starts from the state after the
imports, with a log, an environment and a random state of its own.

A process with several threads cannot be forked, because the fork would lose the threads and keep their locks. If the
imports leave threads running (a debugger's or a tracer's), the server reports this and exits, and each run starts in a
fresh process.

`multiprocessing.forkserver` is not used, because it would become the start method within the runs, would import the
caller's script, hides libraries that cannot be imported, and reports exit codes of live processes when the server is
killed.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, Self

from istar.errors import UserError, shorten
from istar.finetune.runs import extras, launch
from istar.finetune.runs.importing import fast_imports

PRELOADED_MODULES = ("istar.finetune.runs.run", "wandb", "transformers.models.bert.modeling_bert")
"""The modules that the server imports before it forks."""
COMMAND = (sys.executable, "-m", "istar.finetune.runs.fork_server")
IMPORT_TIME_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Environment variables that libraries read on import; runs with different values need different servers."""
RANK_VARIABLE_ORDER = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Environment variables from which Lightning reads the rank, in this order."""
_POLL_SECONDS = 0.02
_REFUSAL_KEY = 0
"""Key of the message in which a server says why it cannot fork; requests have the keys 1, 2, ..."""
_FORK_SAFE_THREADS = {"jemalloc_bg_thd"}
"""Threads that may run during a fork: Arrow's allocator only uses it to return memory to the operating system."""


def is_supported() -> bool:
    """Return whether runs can be forked on this platform.

    Windows has no fork, and on macOS a process that has loaded its libraries cannot continue after a fork.
    """
    return sys.platform == "linux"


class ServerPool:
    """Starts the processes of runs like `launch.spawn`, through one server for each set of `IMPORT_TIME_VARIABLES`.

    The servers write stdout and stderr to `log_path`. If a server cannot fork, `warn` is called once with the reason,
    and `launch.spawn` starts all processes, including those that were already requested from the server.
    """

    def __init__(self, log_path: Path, warn: Callable[[str], None]) -> None:
        self._log_path, self._warn = log_path, warn
        self._server_by_variables: dict[tuple[str | None, ...], ForkServer] = {}
        self._has_refused = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for server in self._server_by_variables.values():
            server.close()

    def spawn(self, arguments: Sequence[str], environment: Mapping[str, str], log_path: Path | None) -> launch.Process:
        """Start a process as `launch.Spawn` describes, and replace the server if it has died."""
        server_key = tuple(environment.get(name) for name in IMPORT_TIME_VARIABLES)
        server = self._server_by_variables.get(server_key)
        has_died = server is not None and bool(server.poll_failure())
        if self._has_refused:
            return launch.spawn(arguments, environment, log_path)
        if has_died or server_key not in self._server_by_variables:
            self._server_by_variables[server_key] = ForkServer(environment, self._log_path, self._on_refusal)
        return self._server_by_variables[server_key].spawn(arguments, environment, log_path)

    def _on_refusal(self, reason: str) -> None:
        """Start all further processes without a server, and warn about it the first time."""
        if not self._has_refused:
            self._warn(
                f"{reason}, so that runs cannot be forked: each starts in a fresh process, which takes some seconds "
                "more; sweep.fork=false starts fresh processes from the beginning"
            )
        self._has_refused = True


class ForkServer:
    """The client side of a fork server: starts the server and sends requests to it through a pipe.

    The server has the given environment variables, without a rank, and writes stdout and stderr to `log_path`.
    `on_refusal` is called with the reason if the server cannot fork.
    """

    def __init__(self, environment: Mapping[str, str], log_path: Path, on_refusal: Callable[[str], None]) -> None:
        self._connection, server_end = Pipe()
        self._log_path, self._on_refusal = log_path, on_refusal
        environment = {name: value for name, value in environment.items() if name not in launch.RANK_VARIABLES}
        with server_end, log_path.open("ab") as output:
            command, file_descriptors = [*COMMAND, str(server_end.fileno())], [server_end.fileno()]
            self._process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=file_descriptors,
                start_new_session=True,
                stdout=output,
                stderr=output,
            )
        self.result_by_key: dict[int, int | str] = {}
        """Exit codes of the processes that have ended, and error messages of those that could not be started."""
        self.has_refused = False
        """Whether the server has exited because it cannot fork, in which case it has not started any process."""
        self._num_requests = 0

    def spawn(self, arguments: Sequence[str], environment: Mapping[str, str], log_path: Path | None) -> "ForkedProcess":
        """Request a new process from the server, and return it without waiting for its start."""
        self._num_requests += 1
        self.send(self._num_requests, (list(arguments), dict(environment), None if log_path is None else str(log_path)))
        return ForkedProcess(self, self._num_requests, lambda: launch.spawn(arguments, environment, log_path))

    def send(self, key: int, request: object) -> None:
        """Send a request for a process, or a signal number; if the server is gone, `poll_failure` reports it."""
        with suppress(OSError):
            self._connection.send((key, request))

    def poll_failure(self) -> str:
        """Receive pending results, and return why the server has ended, or an empty string while it runs."""
        try:
            while self._connection.poll():
                key, result = self._connection.recv()
                if key == _REFUSAL_KEY:
                    self.has_refused = True
                    self._on_refusal(result)
                else:
                    self.result_by_key[key] = result
        except (EOFError, OSError):
            exit_code = self._process.wait()
            return f"the process that starts the runs {launch.describe_exit_code(exit_code)} ({self._log_path})"
        return ""

    def close(self) -> None:
        """Close the pipe, which ends the server and its processes."""
        self._connection.close()
        self._process.wait()


class ForkedProcess:
    """A process that a server was asked to fork, with the interface of `launch.Process`.

    Signals go through the server in the order of the calls. So none arrives before the process exists, and none reaches
    an unrelated process that was given the same PID later. If the server cannot fork, `start_fresh` starts the process,
    which then receives the signals sent so far.
    """

    def __init__(self, server: ForkServer, key: int, start_fresh: Callable[[], launch.Process]) -> None:
        self._server, self._key, self._start_fresh = server, key, start_fresh
        self._fresh_process: launch.Process | None = None
        self._sent_signals: list[int] = []
        self.returncode: int | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether the process was started by `start_fresh`."""
        return self._fresh_process is not None

    def poll(self) -> int | None:
        """Return the exit code, which is negative for a signal, or None while the process runs.

        Raises:
            UserError: if the process could not be started, or the server is gone and the exit code is unknown.
        """
        if self.returncode is None:
            self.returncode = self._poll_server() if self._fresh_process is None else self._fresh_process.poll()
        return self.returncode

    def _poll_server(self) -> int | None:
        """Return the exit code that the server has reported, or None; start a fresh process if it cannot fork."""
        failure = self._server.poll_failure()
        if self._server.has_refused:
            with launch.blocked_signals():
                self._fresh_process = self._start_fresh()
            for signal_number in self._sent_signals:
                self._fresh_process.send_signal(signal_number)
            return None
        result = self._server.result_by_key.get(self._key)
        if isinstance(result, str):
            raise UserError(f"the process of the run could not be started: {result}")
        if result is None and failure:
            raise UserError(f"{failure}; the same command resumes from the last checkpoint")
        return result

    def send_signal(self, signal_number: int) -> None:
        """Send a signal to the process, or as soon as the process has started."""
        if self._fresh_process is not None:
            self._fresh_process.send_signal(signal_number)
        else:
            self._sent_signals.append(signal_number)
            self._server.send(self._key, signal_number)

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        """Wait until the process has ended, and return its exit code as `poll` does."""
        while (exit_code := self.poll()) is None:
            time.sleep(_POLL_SECONDS)
        return exit_code


def serve(connection: Connection) -> None:
    """Import the libraries, then fork processes, forward signals and report exit codes until the client is gone.

    If this process cannot be forked, report the reason and return.
    """
    key_by_pid: dict[int, int] = {}
    server_environment = dict(os.environ)
    import_libraries()
    if reason := reason_not_to_fork():
        with suppress(OSError):
            connection.send((_REFUSAL_KEY, reason))
        return
    while True:
        try:
            for pid, exit_code in _collect_ended_children():
                connection.send((key_by_pid.pop(pid), exit_code))
            # Polling needs no SIGCHLD handler, which every fork would have to remove again.
            if not connection.poll(_POLL_SECONDS):
                continue
            key, request = connection.recv()
        except (EOFError, ConnectionError):
            # The client is gone. The forked processes stop when this process, their parent, ends.
            return
        if isinstance(request, int):  # the number of a signal
            for pid in [pid for pid, running_key in key_by_pid.items() if running_key == key]:
                os.kill(pid, request)
            continue
        try:
            key_by_pid[_fork(connection, server_environment, *request)] = key
        except OSError as error:
            connection.send((key, shorten(error)))


def import_libraries() -> None:
    """Import the libraries that runs need."""
    with fast_imports():
        for name in PRELOADED_MODULES:
            import_module(name)
        if extras.is_installed("optuna"):
            import_module("istar.finetune.training.pruning")


def reason_not_to_fork() -> str:
    """Return why this process cannot be forked, or an empty string if it can.

    It cannot if it has several threads or has initialized CUDA, because neither survives a fork.
    """
    import torch

    # A trial fork makes OpenBLAS end its threads, which it restarts only when they are needed.
    child_pid = os.fork()
    if child_pid == 0:
        os._exit(0)
    os.waitpid(child_pid, 0)
    if lost_threads := _threads_lost_by_fork():
        return f"loading the libraries has left threads that a fork would lose: {', '.join(lost_threads)}"
    if torch.cuda.is_initialized():
        return "loading the libraries has begun to use the GPU"
    return ""


def _threads_lost_by_fork() -> list[str]:
    """Return the names of the threads that a fork would lose: all but the main thread and `_FORK_SAFE_THREADS`."""
    python_names = {thread.native_id: thread.name for thread in threading.enumerate()}
    thread_names = []
    for path in Path("/proc/self/task").iterdir():
        thread_id = int(path.name)
        # A thread may end in the meantime.
        with suppress(FileNotFoundError, ProcessLookupError):
            thread_name = python_names.get(thread_id) or (path / "comm").read_text().strip()
            if thread_id != os.getpid() and thread_name not in _FORK_SAFE_THREADS:
                thread_names.append(thread_name)
    return sorted(thread_names)


def _collect_ended_children() -> Iterator[tuple[int, int]]:
    """Yield PID and exit code of each child process that has ended since the last call."""
    with suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            yield child[0], os.waitstatus_to_exitcode(child[1])


def _fork(connection: Connection, server_environment: dict[str, str], *request: Any) -> int:
    """Fork a process that executes the requested run and exits; return its PID in the parent.

    `request` has the last three arguments of `_run_in_child`.
    """
    server_pid = os.getpid()
    # The child starts with blocked signals, like a process of `launch.spawn`, and unblocks them when it is ready.
    with launch.blocked_signals():
        pid = os.fork()
        if pid == 0:
            try:
                connection.close()
                _run_in_child(server_pid, server_environment, *request)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(launch.UNEXPECTED_ERROR)
    return pid


def _run_in_child(
    server_pid: int,
    server_environment: dict[str, str],
    arguments: list[str],
    environment: dict[str, str],
    log_path: str | None,
) -> NoReturn:
    """Execute a run in a forked process, after giving it the session, output, environment and rank of a new process.

    Args:
        server_pid: PID of the server, with whose end this process stops.
        server_environment: environment variables of the server before it imported the libraries.
        arguments: arguments of `launch.main` after the parent's PID.
        environment: environment variables of the run.
        log_path: file for stdout and stderr; None keeps those of the server.
    """
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from numpy import random

    os.setsid()
    if log_path is not None:
        with Path(log_path).open("ab") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
    # Variables that the libraries set on import are in neither mapping and stay.
    for name in server_environment.keys() - environment.keys():
        os.environ.pop(name, None)
    os.environ.update(dict(environment.items() - server_environment.items()))
    # Lightning has read the rank on import, from the server's environment.
    rank_zero_only.rank = next((int(os.environ[key]) for key in RANK_VARIABLE_ORDER if key in os.environ), 0)  # type: ignore[attr-defined]
    # Python reseeds its own generator in a forked child, but not NumPy's.
    random.seed()
    launch.main([str(server_pid), *arguments])


def main(arguments: Sequence[str]) -> NoReturn:
    """Run the server on the connection whose file descriptor is the only argument, then exit."""
    # The server has inherited the blocked signals of the client.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, launch.FORWARDED_SIGNALS)
    [descriptor] = arguments
    serve(Connection(int(descriptor)))
    # Skip the libraries' exit handlers: the server has not used the libraries.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
