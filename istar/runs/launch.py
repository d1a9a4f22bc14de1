"""Starts a run in new processes, one for each device, and waits for them.

`python -m istar.runs.launch <parent PID> <config.yaml> <folder> [trial]` is one such process. Lightning would start
them by repeating the command line, which with `-m` is the command line of the whole sweep.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from socket import socket
from types import FrameType
from typing import Any, NoReturn, Protocol

import yaml
from omegaconf import OmegaConf
from rich.console import Console

from istar import results
from istar.config import Config, TrainerConfig, schema
from istar.errors import SHOW_TRACE, LockedError, StoppedError, UserError, shorten
from istar.files import write_text
from istar.results import RunRecord
from istar.runs.importing import large_imports
from istar.runs.resolving import resolve

UNEXPECTED_ERROR = 1
"""Exit code of a process that ends with any exception but a `UserError`."""
GRACE_SECONDS = 10.0
"""How long the other processes may continue after one has failed."""
RANK_VARIABLES = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "ROLE_RANK", "LOCAL_WORLD_SIZE",
                  "MASTER_ADDR", "MASTER_PORT")  # fmt: skip
"""Environment variables that give a process its rank and the address of rank 0."""
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


def has_external_launcher() -> bool:
    """Whether torchrun or srun has started this process as one of several.

    `SLURM_NTASKS` and `SLURM_PROCID` do not tell: a script under sbatch has them, too, and runs as a single process.
    Only srun sets the variables of a step.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def fix_slurm_detection() -> None:
    """Change the `SLURM_*` variables so that Lightning detects srun if, and only if, srun has started several tasks.

    Lightning reads `SLURM_NTASKS`, which is what the job requested, with or without srun, and ignores SLURM in jobs
    that have a name which salloc gives.
    """
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks == "1":
        os.environ.pop("SLURM_NTASKS", None)
    else:
        os.environ["SLURM_NTASKS"] = tasks
        # Lightning refuses a job without --ntasks-per-node.
        per_node = os.environ.get("SLURM_STEP_TASKS_PER_NODE", tasks)
        os.environ.setdefault("SLURM_NTASKS_PER_NODE", per_node.partition("(")[0])
        os.environ.pop("SLURM_JOB_NAME", None)


def processes_to_start(settings: TrainerConfig) -> int:
    """The number of processes that a run needs on this machine; 1 means that the current process is enough.

    Raises:
        UserError: if an external launcher has started a different number, or Lightning refuses the settings.
    """
    if has_external_launcher():
        _check_process_count(settings)
        return 1
    if settings.devices in (1, "1") and settings.num_nodes == 1:
        return 1
    # A process with these variables, or with MPI, may have been started by hand, by LSF or by mpirun.
    if not {"LOCAL_RANK", "LSB_JOBID"} & os.environ.keys() and find_spec("mpi4py") is None:
        _check_rendezvous(settings)
        # Asking Lightning takes seconds; only the hardware or a scheduler makes it necessary.
        if isinstance(settings.devices, int) and settings.devices > 0:
            return settings.devices
    from istar.training import trainer

    return trainer.count_processes_to_start(trainer.build_bare_trainer(settings))


def _check_process_count(settings: TrainerConfig) -> None:
    """Refuse a number of started processes that would wait for missing ones forever, or train a run twice."""
    started = os.environ.get("WORLD_SIZE" if "TORCHELASTIC_RUN_ID" in os.environ else "SLURM_STEP_NUM_TASKS")
    expected = settings.devices * settings.num_nodes if isinstance(settings.devices, int) else -1
    if expected > 0 and str(expected) != started:
        raise UserError(
            f"{started} processes have been started, but trainer.devices={settings.devices} on trainer.num_nodes="
            f"{settings.num_nodes} are {expected}; devices counts the processes of one node"
        )


def _check_rendezvous(settings: TrainerConfig) -> None:
    """Refuse to run on several nodes without the address of rank 0, where every node would wait for itself."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if name not in os.environ]
    if settings.num_nodes > 1 and missing:
        raise UserError(
            f"trainer.num_nodes={settings.num_nodes} needs {', '.join(missing)} in the environment of train.py on every"
            " node, or torchrun or srun, which set them"
        )


def launch(config: Config, processes: int, trial: str | None = None) -> RunRecord:
    """Execute a run in new processes, forward signals to them, wait for them, and return the record of the run.

    Args:
        config: settings of the run.
        processes: number of processes on this machine.
        trial: the trial of a search that may prune the run, as `istar.training.pruning` reads it.

    Raises:
        UserError: the error of the first process that failed; the other processes are terminated.
        StoppedError: if a signal has stopped the run.
    """
    # All processes load the same commit, even if the branch moves while they start.
    config = resolve(config)
    runs: list[RunProcesses] = []
    with forward_signals(runs) as signals:
        with blocked_signals():
            runs.append(RunProcesses(config, processes, trial))
            for number in signals:
                runs[0].send_signal(number)
        while not runs[0].has_ended():
            time.sleep(0.05)
    try:
        return runs[0].record(signals)
    except StoppedError:
        if signal.SIGUSR2 in signals and callable(signal.getsignal(signal.SIGUSR2)):
            # submitit's handler requeues the job; this must wait until the run has saved its checkpoint.
            signal.raise_signal(signal.SIGUSR2)
        raise


class Process(Protocol):
    """The interface of a process that `RunProcesses` needs, a part of `subprocess.Popen`."""

    returncode: int | Any

    def poll(self) -> int | None: ...

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...

    def wait(self) -> int: ...


Spawn = Callable[[Sequence[str], Mapping[str, str], Path | None], Process]
"""Starts a process which calls `main`: `spawn` or `istar.runs.fork_server.ServerPool.spawn`.

It takes the arguments of `main` after the parent's PID, the environment variables of the process, and the file for
stdout and stderr, where None inherits them.
"""


def spawn(arguments: Sequence[str], environment: Mapping[str, str], log: Path | None) -> "subprocess.Popen[bytes]":
    """Start `main`, as `Spawn` describes, in a new Python interpreter, which takes seconds to import the libraries."""
    command = [sys.executable, "-m", "istar.runs.launch", str(os.getpid()), *arguments]
    with log.open("ab") if log is not None else nullcontext() as output:
        return subprocess.Popen(command, env=environment, start_new_session=True, stdout=output, stderr=output)


class RunProcesses:
    """The processes of a run. Create it within `blocked_signals()`, poll `has_ended`, then call `record`.

    The processes have the environment of this process and `variables`. They write stdout and stderr to the file `log`,
    or inherit both without it.
    """

    def __init__(
        self,
        config: Config,
        processes: int,
        trial: str | None = None,
        variables: Mapping[str, str] | None = None,
        log: Path | None = None,
        spawn: Spawn = spawn,
    ) -> None:
        self._exchange = tempfile.TemporaryDirectory(prefix="istar-")
        self._folder = Path(self._exchange.name)
        self._deadline = float("inf")
        self._failed_ranks: list[int] = []
        self._server_error: UserError | None = None
        settings = self._folder / "config.yaml"
        write_text(settings, yaml.safe_dump(schema.to_dict(config)))
        arguments = [str(settings), str(self._folder), *([trial] if trial else [])]
        with socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self._processes: list[Process] = []
        for rank in range(processes):
            environment = _environment(rank, processes, config.trainer, port) | dict(variables or {})
            self._processes.append(spawn(arguments, environment, log))

    def send_signal(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)

    def has_ended(self) -> bool:
        """Whether all processes have exited; kills the others `GRACE_SECONDS` after one has failed."""
        try:
            codes = [process.poll() for process in self._processes]
            failed = [rank for rank, code in enumerate(codes) if code]
            # A process that waits for a dead one in a collective would wait until the timeout of the process group.
            if failed and self._deadline == float("inf"):
                self._deadline = time.monotonic() + GRACE_SECONDS
            if None not in codes or time.monotonic() > self._deadline:
                self._failed_ranks = failed
                for process in self._processes:
                    process.kill()
                    process.wait()
                return True
        except UserError as error:
            # The fork server is gone, so the exit codes will never be known.
            self._server_error = error
            self.send_signal(signal.SIGKILL)
            return True
        return False

    def record(self, signals: Sequence[int]) -> RunRecord:
        """Return the record of the ended run, which was sent these signals, or raise its error as `launch` does."""
        with self._exchange:
            if self._server_error is not None:
                raise self._server_error
            if self._failed_ranks:
                codes = {rank: self._processes[rank].returncode for rank in self._failed_ranks}
                raise _run_error(self._folder, codes, len(self._processes), signals)
            return results.read(self._folder)


def main(arguments: Sequence[str]) -> NoReturn:
    """Execute a run as one of its processes; leaves the record or the error in the folder of the parent process."""
    parent, config, folder, *trial = arguments
    rank = os.environ.get("LOCAL_RANK", "0")
    # Until the training has installed its handlers, Ctrl-C ends this process without a KeyboardInterrupt.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
    _terminate_with_parent(int(parent))
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    schema.register()
    try:
        with large_imports():
            from istar.runs.run import run

        settings = schema.load(OmegaConf.load(config))  # type: ignore[arg-type]
        record = run(settings, Console(), *trial)
        if rank == "0":
            # The parent does not read the run's folder: on a second node, the result may not be visible there yet.
            results.write(record, Path(folder))
        message, code, trace = "", 0, ""
    except UserError as error:
        message, code, trace = str(error), error.exit_code, traceback.format_exc()
    except Exception as error:
        message, code, trace = f"{type(error).__name__}: {shorten(error)}", UNEXPECTED_ERROR, traceback.format_exc()
    if code:
        write_text(Path(folder) / f"error-{rank}.json", json.dumps({"message": message, "code": code, "trace": trace}))
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit of the interpreter may hang or abort in the destructor of a process group.
    os._exit(code)


def _environment(rank: int, processes: int, settings: TrainerConfig, port: int) -> dict[str, str]:
    """The environment of a run's process: that of this process with other rank variables."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TORCHELASTIC") and name not in ("SLURM_NTASKS", "HYDRA_FULL_ERROR")
    }
    # The process imports this copy of istar, even if another one is installed.
    paths = [str(Path(__file__).parents[2]), environment.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if settings.num_nodes == 1:
        environment = {name: value for name, value in environment.items() if name not in RANK_VARIABLES}
    if processes > 1 or settings.num_nodes > 1:
        environment["LOCAL_RANK"] = str(rank)
        environment.setdefault("NODE_RANK", "0")
        environment.setdefault("MASTER_ADDR", "127.0.0.1")
        environment.setdefault("MASTER_PORT", str(port))
        # With one thread per core in each process, the processes would compete for the cores.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    return environment


def _run_error(folder: Path, codes: dict[int, int], processes: int, signals: Sequence[int]) -> UserError:
    """The error that ended a run: a `UserError`, else the signal that killed a process, else an unexpected exception.

    The order matters because the other processes fail, too, once one is gone. `codes` are the exit codes of the failed
    processes by rank.
    """
    errors = {rank: json.loads(path.read_text()) for rank in codes if (path := folder / f"error-{rank}.json").exists()}
    known = [error for error in errors.values() if error["code"] != UNEXPECTED_ERROR]
    if known or len(errors) == len(codes):
        error = (known or list(errors.values()))[0]
        if SHOW_TRACE or not known:
            print(error["trace"], file=sys.stderr, end="")
        return _user_error(error["message"], error["code"])
    rank = min(codes.keys() - errors.keys())
    code = codes[rank]
    if -code in signals:
        name = signal.Signals(-code).name
        return StoppedError(f"stopped by {name} outside of the training; the same command goes on from there", -code)
    process = f"process {rank} of {processes}" if processes > 1 else "the process of the run"
    return _user_error(f"{process} {describe_exit(code)}; the same command goes on from the last checkpoint")


def describe_exit(code: int) -> str:
    """An exit code in words; negative codes are signals, as in `subprocess`."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _user_error(message: str, code: int = UNEXPECTED_ERROR) -> UserError:
    """The exception for the message and the exit code of a process."""
    if code > StoppedError.exit_code:
        return StoppedError(message, code - StoppedError.exit_code)
    if code == LockedError.exit_code:
        return LockedError(message)
    error = UserError(message)
    error.exit_code = code
    return error


@contextmanager
def forward_signals(runs: Sequence[RunProcesses]) -> Iterator[list[int]]:
    """Forward signals to the processes of the runs; yields the list of the received signals, which grows."""
    signals: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        for run in runs:
            run.send_signal(number)

    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.signal(number, forward) for number in FORWARDED_SIGNALS if is_main}
    try:
        yield signals
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Delay signals until the end of the block; a process started in the block inherits the mask and unblocks them."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _terminate_with_parent(parent: int) -> None:
    """Send SIGTERM to this process when its parent has died."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.25)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1:])
