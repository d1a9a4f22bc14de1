"""Starts a run in new processes, one for each device, and waits for them.

Lightning does not start them: it would repeat the command line, which with `-m` belongs to the whole sweep.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from istar.errors import StoppedError
from istar.files.writing import write_text
from istar.finetune.config import Config, TrainerConfig, schema
from istar.finetune.execute.identify import resolve_config
from istar.finetune.processes.child import read_error
from istar.finetune.processes.openmp import let_threads_sleep
from istar.finetune.processes.process_signals import blocked_signals, forward_signals
from istar.finetune.processes.ranks import RANK_VARIABLES
from istar.runs.record import RunRecord, read_result

GRACE_SECONDS = 10.0
"""How long the other processes may continue after one has failed."""


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
"""Starts a process that calls `child.execute_process` with these arguments: `spawn` or `forking.ForkedProcess`.

The other arguments are its environment variables, and the file for stdout and stderr; with `None` it inherits both.
"""


def spawn(arguments: Sequence[str], environment: Mapping[str, str], log_path: Path | None) -> "subprocess.Popen[bytes]":
    """Start a new Python interpreter that executes a run, as `Spawn` describes; its imports take seconds."""
    command = [sys.executable, "-m", "istar.finetune.processes.child", str(os.getpid()), *arguments]
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
        self._store: dist.TCPStore | None = None
        if num_processes > 1 and config.trainer.num_nodes == 1:
            # The operating system chooses a free port, and this process keeps it, as rank 0 could not.
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: list[Process] = []
        for rank in range(num_processes):
            environment = _make_process_environment(rank, num_processes, config.trainer, self._store)
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
                raise read_error(self._folder, self._exit_code_by_failed_rank, len(self._processes), signals)
            return read_result(self._folder)


def make_import_variables() -> dict[str, str]:
    """Return the environment variables that make a Python process import this copy of istar, and no foreign modules.

    Python puts the working folder first on `sys.path` for `-m` and `-c`, so any `evaluate.py` there would be imported
    instead of the library, even by processes that libraries start; `PYTHONSAFEPATH` forbids this. An empty part of
    `PYTHONPATH` means the working folder, too.
    """
    python_paths = [str(Path(__file__).parents[3]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {"PYTHONPATH": os.pathsep.join(filter(None, python_paths)), "PYTHONSAFEPATH": "1"}


def _make_process_environment(
    rank: int, num_processes: int, settings: TrainerConfig, store: dist.TCPStore | None
) -> dict[str, str]:
    """Return the environment of a new process: this one's, with the new rank and the address of the store.

    The ranks find each other through the store. Without one, this environment already has the address of rank 0.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TORCHELASTIC") and name not in ("SLURM_NTASKS", "HYDRA_FULL_ERROR")
    }
    environment |= make_import_variables()
    let_threads_sleep(environment)
    if settings.num_nodes == 1:
        environment = {name: value for name, value in environment.items() if name not in RANK_VARIABLES}
    if num_processes > 1 or settings.num_nodes > 1:
        environment["LOCAL_RANK"] = str(rank)
        environment.setdefault("NODE_RANK", "0")
        # With one thread per core in each process, the processes would compete for the cores.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    if store is not None:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        # torchrun's variable, with which rank 0 uses this store and creates none.
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return environment
