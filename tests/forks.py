"""Start processes as forks of a server that has imported the libraries, since an import takes each process seconds.

The server imports from the folder that pytest was started in. tests/cli/test_train.py tests `train.py` itself, as a
user starts it.
"""

import gc
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch.multiprocessing import start_processes

import istar
from istar.cli.main import train_main
from istar.finetune.processes import child, launch, ranks
from istar.finetune.processes.forking import is_supported
from istar.finetune.processes.process_signals import FORWARDED_SIGNALS
from istar.finetune.sweeps import pool

REPOSITORY = Path(__file__).resolve().parents[1]
METHOD = "forkserver" if is_supported() else "spawn"
"""The start method of `multiprocessing`. Only on Linux can a process that has loaded the libraries be forked."""
IMPORT_TIME_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Environment variables that libraries read on import."""


def forking() -> BaseContext:
    """Return the context of `multiprocessing` whose processes are forks of the server; only on Linux, see `METHOD`."""
    context = multiprocessing.get_context(METHOD)
    context.set_forkserver_preload(["tests.preloaded"])
    # The server finds the module of the tests only from here, and would start without it in silence.
    if METHOD == "forkserver":
        with chdir(REPOSITORY):
            forkserver.ensure_running()
    return context


def works_in_a_fork(environment: Mapping[str, str]) -> bool:
    """Return whether all variables that the libraries read on import have the same values as in this process."""
    return not any(
        os.environ.get(name) != value
        for name, value in environment.items()
        if name in IMPORT_TIME_VARIABLES or name.startswith("HF_")
    )


def train(arguments: Sequence[str], folder: Path, environment: Mapping[str, str], files: Sequence[Path]) -> None:
    """Do what `python train.py` does in a folder with this environment; stdout and stderr go to the two files.

    The processes that the run starts are forks, too. Tests find them by the files that they keep open: the file of
    this process's stdout, even if their own stdout is another file, and a file next to it that is named after their
    rank.
    """
    assert Path(istar.__file__).is_relative_to(REPOSITORY), f"the server has imported {istar.__file__}"
    os.chdir(folder)
    for descriptor, path in enumerate(files, start=1):
        with path.open("ab") as file:
            os.dup2(file.fileno(), descriptor)
    marker_descriptor = os.dup(1)
    _adopt_environment(environment)

    def start(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes] | ForkedInterpreter":
        if works_in_a_fork(options["env"]):
            return ForkedInterpreter(command, marker_descriptor, files[0], **options)
        return subprocess.Popen(command, **options)

    launch.subprocess = SimpleNamespace(Popen=start)  # type: ignore[assignment]
    # The runs of a sweep start like those of `launch`; a server in this process would import the libraries again.
    pool.is_supported = lambda: False
    sys.exit(train_main(arguments, "python train.py"))


class ForkedInterpreter:
    """A fork of this process in place of a new interpreter, with the part of `subprocess.Popen` that istar uses.

    It keeps nothing of what the call of `train.py` has set up so far: neither its signal handlers, nor its logging,
    nor Hydra's state.
    """

    def __init__(
        self,
        command: Sequence[str],
        marker_descriptor: int,
        marker_file: Path,
        env: Mapping[str, str],
        stdout: Any,
        stderr: Any,
        start_new_session: bool,
    ) -> None:
        assert start_new_session
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                for file, descriptor in ((stdout, 1), (stderr, 2)):
                    if file is not None:
                        os.dup2(file.fileno(), descriptor)
                _close_files({0, 1, 2, marker_descriptor})
                _forget_the_call()
                _adopt_environment(env)
                if "LOCAL_RANK" in env:
                    os.open(marker_file.with_suffix(f".rank{env['LOCAL_RANK']}"), os.O_CREAT)
                child.main(command[3:])
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _adopt_environment(environment: Mapping[str, str]) -> None:
    """Replace the environment by these variables, and set the rank that Lightning reads from them on import."""
    os.environ.clear()
    os.environ.update(environment)
    rank_zero_only.rank = ranks.find_rank(environment)  # type: ignore[attr-defined]


def _forget_the_call() -> None:
    """Reset signal handlers, Hydra's state and logging to those of a new interpreter."""
    for number in FORWARDED_SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None
    for logger in [logging.root, *map(logging.getLogger, logging.root.manager.loggerDict)]:
        logger.handlers.clear()
        logger.disabled, logger.propagate = False, True
        logger.setLevel(logging.WARNING if logger is logging.root else logging.NOTSET)


def _close_files(descriptors_to_keep: set[int]) -> None:
    """Close all files but these, which are those that a new interpreter would have."""
    for descriptor in [int(path.name) for path in Path("/dev/fd").iterdir()]:
        if descriptor not in descriptors_to_keep:
            # The descriptor of the folder that was listed is closed already.
            with suppress(OSError):
                os.close(descriptor)


def _compute_and_save(
    rank: int, compute: Callable[..., object], arguments: tuple[Any, ...], world_size: int, folder: str
) -> None:
    # With LOCAL_RANK set, Lightning does not start processes and joins the existing process group.
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    torch.set_num_threads(1)
    gc.freeze()  # No collection visits the objects of the imported libraries, as in tests/conftest.py.
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    torch.save(compute(rank, *arguments), f"{folder}/{rank}.pt")
    dist.barrier()
    # Skip the interpreter's shutdown, in which the remains of a process group may abort.
    os._exit(0)


def compute_in_group(
    compute: Callable[..., object], arguments: tuple[Any, ...], world_size: int, folder: Path
) -> list[Any]:
    """Call `compute(rank, *arguments)` in each process of a gloo process group, and return the results by rank."""
    run_in_processes(_compute_and_save, (compute, arguments, world_size, str(folder)), world_size)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]


@contextmanager
def process_group(rank: int, num_ranks: int, store: str) -> Iterator[None]:
    """Join a gloo group within a fork of `run_in_processes`, and end the process when all have left the context."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    yield
    dist.barrier()
    # Skip the shutdown of the interpreter, in which the process group may abort.
    os._exit(0)


def run_in_processes(function: Callable[..., object], arguments: tuple[object, ...], processes: int) -> None:
    """Call `function(rank, *arguments)` in several forks at the same time; raises the error of a fork that fails."""
    forking()
    start_processes(function, arguments, processes, start_method=METHOD)
