"""Starts the runs of a sweep by forking a server process that has already imported the libraries.

Importing them takes seconds, which each run would otherwise spend again. `python -m istar.runs.fork_server` with a
file descriptor is the server. It never runs anything itself, so that every run begins in the state that the imports
leave behind; a run has a separate log, environment and source of random numbers. `multiprocessing.forkserver` is not
used: it would become the start method within the runs, would import the caller's script, hides libraries that cannot
be imported, and reports an exit code for runs that are still alive when the server is killed.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, Self

from istar.errors import UserError, shorten
from istar.runs import extras, launch
from istar.runs.importing import large_imports

LIBRARIES = (
    "istar.runs.run",
    "wandb",
    "transformers.models.bert.modeling_bert",
    "torch.utils.data._utils.worker",
)
"""What a run imports sooner or later."""
COMMAND = (sys.executable, "-m", "istar.runs.fork_server")
READ_AT_LOAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Variables that libraries read when they are loaded: a server is for one value of them."""
_LOOK_SECONDS = 0.02
_READY_TO_FORK = {"jemalloc_bg_thd"}
"""Threads whose library knows of forks: that of Arrow's memory, which only returns some to the system in time."""


def is_possible() -> bool:
    """Whether runs can be forked here; elsewhere each is a fresh process.

    On macOS a process that has loaded its libraries cannot go on behind a fork, and Windows has none.
    """
    return sys.platform == "linux"


class Servers:
    """Starts processes of runs as `launch.fresh` does, each from a server for its environment.

    Args:
        log: file that takes what the servers themselves have to say.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._servers: dict[tuple[str | None, ...], Server] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for server in self._servers.values():
            server.close()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path | None) -> "Forked":
        """A process of a run; one server that has died is replaced.

        Args:
            arguments: for `launch.main`, behind the parent.
            environment: of the process.
            log: file that takes what it prints.
        """
        kind = tuple(environment.get(name) for name in READ_AT_LOAD)
        if kind not in self._servers or self._servers[kind].obstacle():
            self._servers[kind] = Server(environment, self._log)
        return self._servers[kind].start(arguments, environment, log)


class Server:
    """The other end of a server, in the process that wants runs.

    Args:
        environment: in which it loads the libraries.
        log: file that takes what it prints.
    """

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self._connection, there = Pipe()
        self._log = log
        # A place among other processes is a run's, not the server's.
        own = {name: value for name, value in environment.items() if name not in launch.TORCHRUN}
        with there, log.open("ab") as output:
            self._process = subprocess.Popen(
                [*COMMAND, str(there.fileno())],
                env=own,
                pass_fds=[there.fileno()],
                start_new_session=True,
                stdout=output,
                stderr=output,
            )
        self._outcomes: dict[int, int | str] = {}
        self._started = 0

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path | None) -> "Forked":
        self._started += 1
        self.tell(self._started, (list(arguments), dict(environment), None if log is None else str(log)))
        return Forked(self, self._started)

    def tell(self, key: int, what: object) -> None:
        """Ask it for a process, or to send a signal to one; should it be gone, `outcome` says so."""
        try:
            self._connection.send((key, what))
        except OSError:
            return

    def outcome(self, key: int) -> int | None:
        """Exit code of a process that has ended, a signal's as a negative number.

        Raises:
            UserError: if it could not be started, or the server is gone and so nobody will ever know.
        """
        obstacle = self.obstacle()
        told = self._outcomes.get(key)
        if isinstance(told, str):
            raise UserError(f"the process of the run could not be started: {told}")
        if told is None and obstacle:
            raise UserError(f"{obstacle}; the same command goes on from the last checkpoint")
        return told

    def obstacle(self) -> str:
        """Why it starts no more processes; empty if it does."""
        try:
            while self._connection.poll():
                key, told = self._connection.recv()
                self._outcomes[key] = told
            return ""
        except (EOFError, OSError):
            code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the process that starts the runs {how} ({self._log})"

    def close(self) -> None:
        """Let it end, and with it what it has started."""
        self._connection.close()
        self._process.wait()


class Forked:
    """A process of a run, with the methods of `Popen` that `launch.StartedRun` needs.

    It is asked for and signalled through the server alone, in the order of the calls: no signal comes before the
    process does, and none goes to another that has got its number.
    """

    def __init__(self, server: Server, key: int) -> None:
        self._server, self._key = server, key
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs.

        Raises:
            UserError: see `Server.outcome`.
        """
        if self.returncode is None:
            self.returncode = self._server.outcome(self._key)
        return self.returncode

    def send_signal(self, number: int) -> None:
        self._server.tell(self._key, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(_LOOK_SECONDS)
        return code


def serve(connection: Connection) -> None:
    """Start processes, hand signals to them and report how they end, until nobody asks any more."""
    keys: dict[int, int] = {}
    own = dict(os.environ)
    load()
    while True:
        try:
            for pid, code in _ended():
                connection.send((keys.pop(pid), code))
            # A look now and then, not the signal of a child's end: that would be one more thing to undo in a run.
            if not connection.poll(_LOOK_SECONDS):
                continue
            key, wanted = connection.recv()
        except (EOFError, ConnectionError):
            # Whoever asked is gone, and the processes will notice that this one is, too.
            return
        if isinstance(wanted, int):
            for pid in [pid for pid, other in keys.items() if other == key]:
                os.kill(pid, wanted)
            continue
        try:
            keys[_fork(connection, own, *wanted)] = key
        except OSError as error:
            connection.send((key, shorten(error)))


def load() -> None:
    """Import what runs need, and make sure that the process can be forked behind that.

    Raises:
        RuntimeError: if a library has begun to work: its threads, and what it holds of a GPU, no fork would have.
    """
    with large_imports():
        for name in LIBRARIES:
            import_module(name)
        if extras.is_installed("optuna"):
            # Which is for searches; a grid does without.
            import_module("istar.training.pruning")
    import torch

    # OpenBLAS ends its threads when it sees a fork, and starts them when it needs them; nobody does here.
    probe = os.fork()
    if probe == 0:
        os._exit(0)
    os.waitpid(probe, 0)
    threads = sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    if len([name for name in threads if name not in _READY_TO_FORK]) > 1 or threading.active_count() > 1:
        raise RuntimeError(f"loading the libraries has left threads: {threads}, {threading.enumerate()}")
    if torch.cuda.is_initialized():
        raise RuntimeError("loading the libraries has begun to use the GPU")


def _ended() -> Iterator[tuple[int, int]]:
    """Number and exit code of the processes that have ended since the last call."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def _fork(connection: Connection, own: Mapping[str, str], *wanted: Any) -> int:
    """The number of the new process, here; there it becomes the run's and never returns."""
    server = os.getpid()
    # It is born with the signals held back, as one started by `launch.fresh` is.
    with launch.held_back():
        pid = os.fork()
        if pid == 0:
            try:
                connection.close()
                _become(server, own, *wanted)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(launch.UNFORESEEN)
    return pid


def _become(
    server: int, own: Mapping[str, str], arguments: Sequence[str], environment: Mapping[str, str], log: str | None
) -> NoReturn:
    """Turn a fork of the server into what `python -m istar.runs.launch` would be in this environment."""
    from lightning.fabric.utilities import rank_zero
    from numpy import random

    os.setsid()
    if log is not None:
        with Path(log).open("ab") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
    # What the libraries have set while they were loaded stays.
    for name in own.keys() - environment.keys():
        os.environ.pop(name, None)
    os.environ.update(dict(environment.items() - own.items()))
    # Read by Lightning when it is loaded.
    rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0  # type: ignore[attr-defined]
    # Python does so for its own numbers.
    random.seed()
    launch.main([str(server), *arguments])


def main(arguments: Sequence[str]) -> NoReturn:
    """The server: its one argument is the number under which it finds its end of the connection."""
    # Whoever has started it held them back.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, launch.PASSED_ON)
    [descriptor] = arguments
    serve(Connection(int(descriptor)))
    # The libraries' farewells are for those who have used them.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
