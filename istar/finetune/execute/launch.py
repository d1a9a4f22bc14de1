"""Starts a run in new processes, one for each device, and waits for them.

`python -m istar.finetune.execute.launch <parent PID> <config.yaml> <folder> [trial]` executes one such process.
Lightning does not start them: it would repeat the command line, which with `-m` belongs to the whole sweep.
"""

import json
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
from typing import NoReturn, Protocol

from omegaconf import OmegaConf

from istar.drawing.robust_output import make_output_robust
from istar.drawing.terminal import make_console
from istar.errors import SHOW_TRACE, LockedError, StoppedError, UserError, mask_secrets, shorten
from istar.files.parsing import read_json, read_yaml
from istar.files.writing import write_text
from istar.finetune.config import Config, TrainerConfig, schema
from istar.finetune.execute.extras import fast_imports
from istar.finetune.execute.identify import resolve_config
from istar.finetune.execute.ranks import RANK_VARIABLES, has_external_launcher
from istar.runs.record import RunRecord, read_result, write_result

UNEXPECTED_ERROR = 1
"""Exit code of a process that ends with any exception except a `UserError`."""
GRACE_SECONDS = 10.0
"""How long the other processes may continue after one has failed."""
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


def processes_to_start(settings: TrainerConfig) -> int:
    """Return the number of processes that a run needs on this machine; 1 means that the current process is enough.

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
    from istar.finetune.training import trainer

    return trainer.count_processes_to_start(trainer.build_bare_trainer(settings))


def _check_process_count(settings: TrainerConfig) -> None:
    num_started = os.environ.get("WORLD_SIZE" if "TORCHELASTIC_RUN_ID" in os.environ else "SLURM_STEP_NUM_TASKS")
    num_expected = settings.devices * settings.num_nodes if isinstance(settings.devices, int) else -1
    if num_expected > 0 and str(num_expected) != num_started:
        raise UserError(
            f"{num_started} processes have been started, but trainer.devices={settings.devices} on trainer.num_nodes="
            f"{settings.num_nodes} are {num_expected}; devices counts the processes of one node"
        )


def _check_rendezvous(settings: TrainerConfig) -> None:
    """Raise a `UserError` if a run on several nodes lacks the environment variables that connect the nodes."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if name not in os.environ]
    if settings.num_nodes > 1 and missing:
        raise UserError(
            f"trainer.num_nodes={settings.num_nodes} needs {', '.join(missing)} in the environment of train.py on every"
            " node, or torchrun or srun, which set them"
        )


def launch(config: Config, num_processes: int, trial: str | None = None) -> RunRecord:
    """Execute a run in new processes, forward signals to them, wait for them, and return the record of the run.

    Args:
        num_processes: number of processes on this machine.
        trial: address of the Optuna trial that may prune the run, as `istar.finetune.training.pruning` reads it.

    Raises:
        UserError: the error of the first process that failed; the other processes are terminated.
        StoppedError: if a signal has stopped the run.
    """
    # All processes load the same commit, even if the branch moves while they start.
    config = resolve_config(config)
    runs: list[RunProcesses] = []
    with forward_signals(runs) as signals:
        with blocked_signals():
            runs.append(RunProcesses(config, num_processes, trial))
            for signal_number in signals:
                runs[0].send_signal(signal_number)
        while not runs[0].has_ended():
            time.sleep(0.05)
    try:
        return runs[0].read_record(signals)
    except StoppedError:
        if signal.SIGUSR2 in signals and callable(signal.getsignal(signal.SIGUSR2)):
            # submitit's handler requeues the job; this must wait until the run has saved its checkpoint.
            signal.raise_signal(signal.SIGUSR2)
        raise


class Process(Protocol):
    """The part of the interface of `subprocess.Popen` that `RunProcesses` needs."""

    def poll(self) -> int | None: ...

    def send_signal(self, signal_number: int, /) -> None: ...

    def wait(self) -> int | None: ...


Spawn = Callable[[Sequence[str], Mapping[str, str], Path | None], Process]
"""Starts a process that calls `execute_process` with these arguments: `spawn` or `forking.ForkedProcess`.

The other arguments are its environment variables and the file for stdout and stderr, which `None` inherits.
"""


def spawn(arguments: Sequence[str], environment: Mapping[str, str], log_path: Path | None) -> "subprocess.Popen[bytes]":
    """Start a new Python interpreter that executes a run, as `Spawn` describes; its imports take seconds."""
    command = [sys.executable, "-m", "istar.finetune.execute.launch", str(os.getpid()), *arguments]
    with log_path.open("ab") if log_path is not None else nullcontext() as output:
        return subprocess.Popen(command, env=environment, start_new_session=True, stdout=output, stderr=output)


class RunProcesses:
    """The processes of a run. Create it within `blocked_signals()`, poll `has_ended`, then call `read_record`."""

    def __init__(
        self,
        config: Config,
        num_processes: int,
        trial: str | None = None,
        extra_variables: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        spawn: Spawn = spawn,
    ) -> None:
        self._temporary_folder = tempfile.TemporaryDirectory(prefix="istar-")
        self._folder = Path(self._temporary_folder.name)
        self._deadline = float("inf")
        self._exit_code_by_failed_rank: dict[int, int] = {}
        config_path = self._folder / "config.yaml"
        write_text(config_path, schema.to_yaml(config))
        arguments = [str(config_path), str(self._folder), *([trial] if trial else [])]
        # Port 0 lets the operating system choose a free port, for the connections to rank 0.
        with socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self._processes: list[Process] = []
        for rank in range(num_processes):
            environment = _make_process_environment(rank, num_processes, config.trainer, port)
            environment |= dict(extra_variables or {})
            self._processes.append(spawn(arguments, environment, log_path))

    def send_signal(self, signal_number: int) -> None:
        for process in self._processes:
            process.send_signal(signal_number)

    def has_ended(self) -> bool:
        """Return whether all processes have ended; kill the rest `GRACE_SECONDS` after one has failed."""
        exit_codes = [process.poll() for process in self._processes]
        self._exit_code_by_failed_rank = {rank: exit_code for rank, exit_code in enumerate(exit_codes) if exit_code}
        # A process that waits for a dead one in a collective would wait until the timeout of the process group.
        if self._exit_code_by_failed_rank and self._deadline == float("inf"):
            self._deadline = time.monotonic() + GRACE_SECONDS
        if None in exit_codes and time.monotonic() <= self._deadline:
            return False
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
        return True

    def read_record(self, signals: Sequence[int]) -> RunRecord:
        """Return the record of an ended run, or raise its error as `launch` does. `signals` were sent to the run."""
        with self._temporary_folder:
            if self._exit_code_by_failed_rank:
                raise _make_run_error(self._folder, self._exit_code_by_failed_rank, len(self._processes), signals)
            return read_result(self._folder)


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
        message, exit_code, stack_trace = "", 0, ""
    except UserError as error:
        message, exit_code, stack_trace = str(error), error.exit_code, mask_secrets(traceback.format_exc())
    except BaseException as error:  # also the SystemExit of a library
        message, exit_code, stack_trace = (
            f"{type(error).__name__}: {shorten(error)}",
            UNEXPECTED_ERROR,
            mask_secrets(traceback.format_exc()),
        )
    if exit_code:
        write_text(
            Path(folder) / f"error-{rank}.json",
            json.dumps({"message": message, "code": exit_code, "trace": stack_trace}),
        )
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit of the interpreter may hang or abort in the destructor of a process group.
    os._exit(exit_code)


def make_import_variables() -> dict[str, str]:
    """Return the environment variables that make a Python process import this copy of istar, and no foreign modules.

    Python puts the working folder first on `sys.path` for `-m` and `-c`, so any `evaluate.py` there would be imported
    instead of the library, even by processes that libraries start; `PYTHONSAFEPATH` forbids this. An empty part of
    `PYTHONPATH` means the working folder, too.
    """
    python_paths = [str(Path(__file__).parents[3]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {"PYTHONPATH": os.pathsep.join(filter(None, python_paths)), "PYTHONSAFEPATH": "1"}


def _make_process_environment(rank: int, num_processes: int, settings: TrainerConfig, port: int) -> dict[str, str]:
    """Return this process's environment with the rank of a new one; `port` is for connections to rank 0."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TORCHELASTIC") and name not in ("SLURM_NTASKS", "HYDRA_FULL_ERROR")
    }
    environment |= make_import_variables()
    if settings.num_nodes == 1:
        environment = {name: value for name, value in environment.items() if name not in RANK_VARIABLES}
    if num_processes > 1 or settings.num_nodes > 1:
        environment["LOCAL_RANK"] = str(rank)
        environment.setdefault("NODE_RANK", "0")
        environment.setdefault("MASTER_ADDR", "127.0.0.1")
        environment.setdefault("MASTER_PORT", str(port))
        # With one thread per core in each process, the processes would compete for the cores.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    return environment


def _make_run_error(
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


@contextmanager
def forward_signals(runs: Sequence[RunProcesses]) -> Iterator[list[int]]:
    """Forward signals to the processes of the runs during the `with` block; yield the growing list of their numbers."""
    received_signals: list[int] = []

    def forward(signal_number: int, frame: FrameType | None) -> None:
        received_signals.append(signal_number)
        for run in runs:
            run.send_signal(signal_number)

    is_main_thread = threading.current_thread() is threading.main_thread()
    previous_handlers = {
        signal_number: signal.signal(signal_number, forward) for signal_number in FORWARDED_SIGNALS if is_main_thread
    }
    try:
        yield received_signals
    finally:
        for signal_number, handler in previous_handlers.items():
            signal.signal(signal_number, handler)


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Delay signals until the end of the `with` block.

    A process that is started in the block inherits the signal mask, and unblocks the signals when it is ready.
    """
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _terminate_with_parent(is_parent_alive: Callable[[], bool]) -> None:
    def terminate_when_parent_ends() -> None:
        while is_parent_alive():
            time.sleep(0.25)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate_when_parent_ends, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1:])
