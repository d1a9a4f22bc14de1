"""Starts the runs of a sweep by forking a server process that has already imported the libraries.

The imports take seconds, which each run would otherwise spend again. `python -m istar.runs.fork_server` with a file
descriptor is the server. The server never executes a run itself, so every run starts from the state that the imports
leave, with a log, an environment and a random state of its own.

A process with several threads cannot be forked: the fork would lose the threads and keep their locks. If the imports
leave threads (a debugger's, a tracer's), the server says so and exits, and fresh processes execute the runs.

`multiprocessing.forkserver` does not fit: it would become the start method within the runs, would import the caller's
script, hides libraries that cannot be imported, and reports exit codes of live processes when the server is killed.
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
from istar.runs import extras, launch
from istar.runs.importing import large_imports

PRELOADED_MODULES = ("istar.runs.run", "wandb", "transformers.models.bert.modeling_bert")
"""The modules that the server imports before it forks."""
COMMAND = (sys.executable, "-m", "istar.runs.fork_server")
IMPORT_TIME_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Variables that libraries read on import: runs with different values of them need different servers."""
RANK_KEYS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Variables that Lightning reads a rank from, in this order."""
_POLL_SECONDS = 0.02
_REFUSAL = 0
"""The key of the message by which a server says why it cannot fork; requests have the keys 1, 2, ..."""
_FORK_SAFE_THREADS = {"jemalloc_bg_thd"}
"""Threads that may run during a fork: Arrow's allocator only uses it to return memory to the operating system."""


def is_supported() -> bool:
    """Whether runs can be forked on this platform.

    Windows has no fork, and on macOS a process that has loaded its libraries cannot continue after a fork.
    """
    return sys.platform == "linux"


class ServerPool:
    """Starts the processes of runs like `launch.spawn`, through one server for each set of `IMPORT_TIME_VARIABLES`.

    The servers write their stdout and stderr to the file `log`. If a server cannot fork, `warn` is called once with a
    line that says why, and `launch.spawn` starts all processes, including those that the server has not started.
    """

    def __init__(self, log: Path, warn: Callable[[str], None]) -> None:
        self._log, self._warn = log, warn
        self._servers: dict[tuple[str | None, ...], Server] = {}
        self._has_refused = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for server in self._servers.values():
            server.close()

    def spawn(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path | None) -> launch.Process:
        """Start a process as `launch.Spawn` describes, and replace the server if it has died."""
        key = tuple(environment.get(name) for name in IMPORT_TIME_VARIABLES)
        has_died = key in self._servers and bool(self._servers[key].failure())
        if self._has_refused:
            return launch.spawn(arguments, environment, log)
        if has_died or key not in self._servers:
            self._servers[key] = Server(environment, self._log, self._on_refusal)
        return self._servers[key].spawn(arguments, environment, log)

    def _on_refusal(self, reason: str) -> None:
        """Start all further processes fresh, and warn of it the first time."""
        if not self._has_refused:
            self._warn(
                f"{reason}, so that runs cannot be forked: each starts in a fresh process, which takes some seconds "
                "more; sweep.fork=false starts fresh processes from the beginning"
            )
        self._has_refused = True


class Server:
    """The client side of a fork server: starts the server and sends requests to it through a pipe.

    The server has the given environment variables, without a rank, and writes stdout and stderr to the file `log`.
    `on_refusal` is called with the reason if the server cannot fork.
    """

    def __init__(self, environment: Mapping[str, str], log: Path, on_refusal: Callable[[str], None]) -> None:
        self._connection, remote = Pipe()
        self._log, self._on_refusal = log, on_refusal
        environment = {name: value for name, value in environment.items() if name not in launch.RANK_VARIABLES}
        with remote, log.open("ab") as output:
            command, files = [*COMMAND, str(remote.fileno())], [remote.fileno()]
            self._process = subprocess.Popen(
                command, env=environment, pass_fds=files, start_new_session=True, stdout=output, stderr=output
            )
        self.results: dict[int, int | str] = {}
        """The exit codes of the processes that have ended, or error messages of those that have not started."""
        self.has_refused = False
        """Whether the server has exited because it cannot fork. It has started no process then."""
        self._started = 0

    def spawn(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path | None) -> "ForkedProcess":
        """Request a new process from the server."""
        self._started += 1
        self.send(self._started, (list(arguments), dict(environment), None if log is None else str(log)))
        return ForkedProcess(self, self._started, lambda: launch.spawn(arguments, environment, log))

    def send(self, key: int, request: object) -> None:
        """Send a request for a process, or a signal number; if the server is gone, `failure` reports it."""
        with suppress(OSError):
            self._connection.send((key, request))

    def failure(self) -> str:
        """Receive pending results; returns why the server has ended, or an empty string while it runs."""
        try:
            while self._connection.poll():
                key, result = self._connection.recv()
                if key == _REFUSAL:
                    self.has_refused = True
                    self._on_refusal(result)
                else:
                    self.results[key] = result
        except (EOFError, OSError):
            code = self._process.wait()
            return f"the process that starts the runs {launch.describe_exit(code)} ({self._log})"
        return ""

    def close(self) -> None:
        """Close the pipe, whereupon the server and its processes end."""
        self._connection.close()
        self._process.wait()


class ForkedProcess:
    """A process that a server was asked to fork, with the interface of `launch.Process`.

    Signals go through the server in the order of the calls. So none arrives before the process exists, and none reaches
    an unrelated process that has got the same PID later. If the server cannot fork, `start_fresh` starts the process,
    which then gets the signals sent so far.
    """

    def __init__(self, server: Server, key: int, start_fresh: Callable[[], launch.Process]) -> None:
        self._server, self._key, self._start_fresh = server, key, start_fresh
        self._fresh: launch.Process | None = None
        self._signals: list[int] = []
        self.returncode: int | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether the process was started by `start_fresh`."""
        return self._fresh is not None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs.

        Raises:
            UserError: if the process could not be started, or the server is gone and the exit code is unknown.
        """
        if self.returncode is None:
            self.returncode = self._poll_server() if self._fresh is None else self._fresh.poll()
        return self.returncode

    def _poll_server(self) -> int | None:
        """What `poll` returns for a process of the server; starts a fresh one if the server cannot fork."""
        failure = self._server.failure()
        if self._server.has_refused:
            with launch.blocked_signals():
                self._fresh = self._start_fresh()
            for number in self._signals:
                self._fresh.send_signal(number)
            return None
        result = self._server.results.get(self._key)
        if isinstance(result, str):
            raise UserError(f"the process of the run could not be started: {result}")
        if result is None and failure:
            raise UserError(f"{failure}; the same command goes on from the last checkpoint")
        return result

    def send_signal(self, number: int) -> None:
        if self._fresh is not None:
            self._fresh.send_signal(number)
        else:
            self._signals.append(number)
            self._server.send(self._key, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(_POLL_SECONDS)
        return code


def serve(connection: Connection) -> None:
    """Import the libraries, then fork processes, forward signals and report exit codes until the client is gone.

    If the process cannot be forked, the function only reports the reason.
    """
    keys: dict[int, int] = {}
    server_environment = dict(os.environ)
    preload()
    if refusal := reason_not_to_fork():
        with suppress(OSError):
            connection.send((_REFUSAL, refusal))
        return
    while True:
        try:
            for pid, code in _reap():
                connection.send((keys.pop(pid), code))
            # Polling needs no SIGCHLD handler, which every fork would have to remove again.
            if not connection.poll(_POLL_SECONDS):
                continue
            key, request = connection.recv()
        except (EOFError, ConnectionError):
            # The client is gone. The forked processes stop because their parent, this process, ends.
            return
        if isinstance(request, int):
            for pid in [pid for pid, other in keys.items() if other == key]:
                os.kill(pid, request)
            continue
        try:
            keys[_fork(connection, server_environment, *request)] = key
        except OSError as error:
            connection.send((key, shorten(error)))


def preload() -> None:
    """Import the libraries that runs need."""
    with large_imports():
        for name in PRELOADED_MODULES:
            import_module(name)
        if extras.is_installed("optuna"):
            import_module("istar.training.pruning")


def reason_not_to_fork() -> str:
    """Why a fork of this process would not work: it has several threads or has initialized CUDA; else an empty string.

    Neither threads nor a CUDA context survive a fork.
    """
    import torch

    # A fork makes OpenBLAS end its threads; it starts them again only when they are needed.
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    if threads := _other_threads():
        return f"loading the libraries has left threads that a fork would lose: {', '.join(threads)}"
    if torch.cuda.is_initialized():
        return "loading the libraries has begun to use the GPU"
    return ""


def _other_threads() -> list[str]:
    """The names of the threads that a fork would lose: all but the main thread and those in `_FORK_SAFE_THREADS`."""
    python_names = {thread.native_id: thread.name for thread in threading.enumerate()}
    names = []
    for path in Path("/proc/self/task").iterdir():
        thread = int(path.name)
        # A thread may end in the meantime.
        with suppress(FileNotFoundError, ProcessLookupError):
            name = python_names.get(thread) or (path / "comm").read_text().strip()
            if thread != os.getpid() and name not in _FORK_SAFE_THREADS:
                names.append(name)
    return sorted(names)


def _reap() -> Iterator[tuple[int, int]]:
    """PID and exit code of each child that has ended since the last call."""
    with suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            yield child[0], os.waitstatus_to_exitcode(child[1])


def _fork(connection: Connection, server_environment: dict[str, str], *request: Any) -> int:
    """Fork. Returns the child's PID in the parent; the child executes the run and exits."""
    server = os.getpid()
    # The child starts with blocked signals, like a process of `launch.spawn`, and unblocks them when it is ready.
    with launch.blocked_signals():
        pid = os.fork()
        if pid == 0:
            try:
                connection.close()
                _run_in_child(server, server_environment, *request)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(launch.UNEXPECTED_ERROR)
    return pid


def _run_in_child(
    server: int, server_environment: dict[str, str], arguments: list[str], environment: dict[str, str], log: str | None
) -> NoReturn:
    """Give the child the session, output, environment, rank and random state of a new process; then execute the run."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from numpy import random

    os.setsid()
    if log is not None:
        with Path(log).open("ab") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
    # Variables that the libraries set on import are in neither mapping and stay.
    for name in server_environment.keys() - environment.keys():
        os.environ.pop(name, None)
    os.environ.update(dict(environment.items() - server_environment.items()))
    # Lightning has read the rank on import, from the server's environment.
    rank_zero_only.rank = next((int(os.environ[key]) for key in RANK_KEYS if key in os.environ), 0)  # type: ignore[attr-defined]
    # Python reseeds its own generator in a forked child, but not NumPy's.
    random.seed()
    launch.main([str(server), *arguments])


def main(arguments: Sequence[str]) -> NoReturn:
    """Run the server on the connection whose file descriptor is the only argument."""
    # The server has inherited the blocked signals of the client.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, launch.FORWARDED_SIGNALS)
    [descriptor] = arguments
    serve(Connection(int(descriptor)))
    # Skip the libraries' exit handlers: the server has not used the libraries.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
