"""A run in processes of its own: as many as it has devices, started afresh from its resolved config and watched.

`python -m istar.runs.launch <parent> <config.yaml> <folder> [trial]` is one such process. A run that train.py starts by
itself must not be started again from the command line, as Lightning would do: with `-m` that is the command line of the
whole sweep.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

import yaml
from omegaconf import OmegaConf
from rich.console import Console

from istar import results
from istar.config import Config, TrainerConfig, schema
from istar.errors import StoppedError, UserError, shorten
from istar.files import write_text
from istar.results import RunRecord
from istar.runs.importing import large_imports

UNFORESEEN = 1
"""Exit code of an error that is no mistake of the user's."""
GRACE_SECONDS = 10.0
"""How long the other processes may go on when one has ended badly."""
TORCHRUN = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "ROLE_RANK", "LOCAL_WORLD_SIZE",
             "MASTER_ADDR", "MASTER_PORT")  # fmt: skip
"""Variables that say which one of several processes this is, and where they meet."""
PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


def is_one_of_many() -> bool:
    """Whether torchrun or srun has started this process beside others.

    A script under sbatch has `SLURM_NTASKS`, `SLURM_PROCID` and the like as well, although there is one of it; the
    variables of a step are set by srun alone.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def tell_slurm_apart() -> None:
    """Make Lightning see srun where it is, and only there.

    It goes by `SLURM_NTASKS`, which is what the job asked for, with or without srun, and looks away in jobs with a name
    that salloc gives.
    """
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks == "1":
        os.environ.pop("SLURM_NTASKS", None)
    else:
        os.environ["SLURM_NTASKS"] = tasks
        # Without --ntasks-per-node Lightning would refuse.
        per_node = os.environ.get("SLURM_STEP_TASKS_PER_NODE", tasks)
        os.environ.setdefault("SLURM_NTASKS_PER_NODE", per_node.partition("(")[0])
        os.environ.pop("SLURM_JOB_NAME", None)


def processes_to_start(settings: TrainerConfig) -> int:
    """How many processes a run needs that are not there yet; 1: this one will do.

    Raises:
        UserError: if there are too few or too many already, or the trainer refuses its settings.
    """
    if is_one_of_many():
        _check_number(settings)
        return 1
    if settings.devices in (1, "1") and settings.num_nodes == 1:
        return 1
    if not _may_be_placed():
        _check_meeting(settings)
        # Seconds faster than Lightning, which has to be asked for what only the hardware or a scheduler knows.
        if isinstance(settings.devices, int) and settings.devices > 0:
            return settings.devices
    from istar.training import trainer

    return trainer.processes_to_start(trainer.bare_trainer(settings))


def _check_number(settings: TrainerConfig) -> None:
    """Refuse what would wait for processes that never come, or run twice."""
    there = os.environ.get("WORLD_SIZE" if "TORCHELASTIC_RUN_ID" in os.environ else "SLURM_STEP_NUM_TASKS")
    wanted = settings.devices * settings.num_nodes if isinstance(settings.devices, int) else -1
    if wanted > 0 and str(wanted) != there:
        raise UserError(
            f"{there} processes have been started, but trainer.devices={settings.devices} on trainer.num_nodes="
            f"{settings.num_nodes} are {wanted}; devices counts the processes of one node"
        )


def _may_be_placed() -> bool:
    """Whether this process may be one of several by other means than torchrun and srun: by hand, LSF or MPI."""
    return bool({"LOCAL_RANK", "LSB_JOBID"} & os.environ.keys()) or find_spec("mpi4py") is not None


def _check_meeting(settings: TrainerConfig) -> None:
    """Refuse several nodes that do not know where to meet, before each of them waits at a place of its own."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if name not in os.environ]
    if settings.num_nodes > 1 and missing:
        raise UserError(
            f"trainer.num_nodes={settings.num_nodes} needs {', '.join(missing)} in the environment of train.py on every"
            " node, or torchrun or srun, which set them"
        )


def launch(config: Config, processes: int, show_trace: bool = False, search: str | None = None) -> RunRecord:
    """Carry out a run in fresh processes and wait for them.

    Args:
        config: of the run.
        processes: how many on this machine.
        show_trace: with the stack trace, if it fails.
        search: the trial of a search that may prune the run; see `istar.training.pruning`.

    Returns:
        The run's record.

    Raises:
        UserError: what ended the first of the processes that ended badly; the others are ended, too.
        StoppedError: if a signal, which is handed on to the processes, has stopped it.
    """
    runs: list[StartedRun] = []
    with handing_on_signals(runs) as signals:
        with held_back():
            runs.append(StartedRun(config, processes, search))
            for number in signals:
                runs[0].send_signal(number)
        while not runs[0].has_ended():
            time.sleep(0.05)
    try:
        return runs[0].record(signals, show_trace)
    except StoppedError:
        if signal.SIGUSR2 in signals and callable(signal.getsignal(signal.SIGUSR2)):
            # submitit listens to it, and queues the job again; only now is the run saved.
            signal.raise_signal(signal.SIGUSR2)
        raise


def in_queue() -> bool:
    """Whether submitit has started this process: as one job of many."""
    return "SUBMITIT_EXECUTOR" in os.environ


def wait_for_slurm() -> None:
    """In a job of SLURM that has been asked to end: wait for it to do so.

    It queues a pre-empted job again only if that has not ended by itself in its time of grace.
    """
    while os.environ.get("SUBMITIT_EXECUTOR") == "slurm":
        time.sleep(1)


class Process(Protocol):
    """What a run needs of each of its processes; `Popen` has it."""

    returncode: int | Any

    def poll(self) -> int | None:
        """Exit code; None while it runs."""

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...

    def wait(self) -> int: ...


class Starter(Protocol):
    """Starts a process: `fresh`, or `istar.runs.fork_server.Servers.start`."""

    def __call__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path | None) -> Process:
        """Start `main` there.

        Args:
            arguments: of `main`, behind the parent.
            environment: of the process.
            log: file that takes what it prints; None leaves it to the terminal.
        """


def fresh(arguments: Sequence[str], environment: Mapping[str, str], log: Path | None) -> "subprocess.Popen[bytes]":
    """Start a new Python, which loads all libraries: some seconds."""
    command = [sys.executable, "-m", "istar.runs.launch", str(os.getpid()), *arguments]
    with log.open("ab") if log is not None else nullcontext() as output:
        return subprocess.Popen(command, env=environment, start_new_session=True, stdout=output, stderr=output)


class StartedRun:
    """A run in processes of its own that nobody waits for yet; to be started within `held_back()`.

    Args:
        config: of the run.
        processes: how many on this machine.
        search: see `launch`.
        variables: of the environment, beside those of this process.
        log: file that takes what the processes print; None leaves it to the terminal.
        start: how a process is started.
    """

    def __init__(
        self,
        config: Config,
        processes: int,
        search: str | None = None,
        variables: Mapping[str, str] | None = None,
        log: Path | None = None,
        start: Starter = fresh,
    ) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="istar-")
        self._folder = Path(self._place.name)
        self._deadline = float("inf")
        self._bad: list[int] = []
        self._lost: UserError | None = None
        write_text(self._folder / "config.yaml", yaml.safe_dump(schema.to_dict(config)))
        arguments = [str(self._folder / "config.yaml"), str(self._folder), *([search] if search else [])]
        port = _free_port()
        self._processes: list[Process] = []
        for rank in range(processes):
            environment = _environment(rank, processes, config.trainer, port) | dict(variables or {})
            self._processes.append(start(arguments, environment, log))

    def send_signal(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)

    def has_ended(self) -> bool:
        """Whether all processes have; when one has ended badly, the others may go on for `GRACE_SECONDS`."""
        try:
            return self._have_ended()
        except UserError as error:
            self._lost = error
            self.send_signal(signal.SIGKILL)
            return True

    def _have_ended(self) -> bool:
        # All of them are asked every time: one that waits for another that is dead will wait for long.
        codes = [process.poll() for process in self._processes]
        bad = [rank for rank, code in enumerate(codes) if code]
        if None not in codes:
            self._bad = self._bad or bad
            return True
        if bad and self._deadline == float("inf"):
            self._deadline = time.monotonic() + GRACE_SECONDS
        if time.monotonic() > self._deadline:
            self._bad = bad
            for process in self._processes:
                process.kill()
                process.wait()
        return bool(self._bad)

    def record(self, signals: Sequence[int], show_trace: bool = False) -> RunRecord:
        """What came out of it, when it has ended.

        Args:
            signals: that the processes were sent.
            show_trace: with the stack trace, if it failed.

        Raises:
            UserError: see `launch`.
        """
        with self._place:
            if self._lost is not None:
                raise self._lost
            if self._bad:
                codes = {rank: self._processes[rank].returncode for rank in self._bad}
                raise _error(self._folder, codes, len(self._processes), signals, show_trace)
            return results.read(self._folder)


def main(arguments: Sequence[str]) -> NoReturn:
    """One process of a run: leaves the record, or what went wrong, in files for the one that started it."""
    parent, config, folder, *search = arguments
    rank = os.environ.get("LOCAL_RANK", "0")
    # Until the training listens, Ctrl-C ends this process as it would end one that is not Python.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    _end_with(int(parent))
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    schema.register()
    try:
        with large_imports():
            from istar.runs.run import run

        settings = schema.load(OmegaConf.load(config))  # type: ignore[arg-type]
        record = run(settings, Console(), *search)
        if rank == "0":
            # Not where the run lies: on another node than the first, its result may not have been written yet.
            results.write(record, Path(folder))
        message, code, trace = "", 0, ""
    except UserError as error:
        message, code, trace = str(error), error.exit_code, traceback.format_exc()
    except Exception as error:
        message, code, trace = f"{type(error).__name__}: {shorten(error)}", UNFORESEEN, traceback.format_exc()
    if code:
        write_text(Path(folder) / f"error-{rank}.json", json.dumps({"message": message, "code": code, "trace": trace}))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through the exit of the interpreter, where what is left of a process group may hang or abort.
    os._exit(code)


def _environment(rank: int, processes: int, settings: TrainerConfig, port: int) -> dict[str, str]:
    """This process's own without what torchrun or srun have left there, and the place among the others."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TORCHELASTIC") and name not in ("SLURM_NTASKS", "HYDRA_FULL_ERROR")
    }
    # The same code as here, wherever another istar may be installed.
    kept["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [kept.get("PYTHONPATH")])])
    if settings.num_nodes == 1:
        kept = {name: value for name, value in kept.items() if name not in TORCHRUN}
    if processes > 1 or settings.num_nodes > 1:
        own = {"LOCAL_RANK": str(rank), "NODE_RANK": kept.get("NODE_RANK", "0")}
        own |= {"MASTER_ADDR": kept.get("MASTER_ADDR", "127.0.0.1"), "MASTER_PORT": kept.get("MASTER_PORT", str(port))}
        # With as many threads as cores in each of them, they would stand in each other's way.
        threads = max(1, (os.cpu_count() or 1) // processes)
        kept |= own | {"OMP_NUM_THREADS": kept.get("OMP_NUM_THREADS", str(threads))}
    return kept


def _error(folder: Path, codes: dict[int, int], processes: int, signals: Sequence[int], show_trace: bool) -> UserError:
    """What ended the run: a mistake of the user's, else a process that was killed, else an unforeseen error.

    In this order, because the other processes fail, too, once one is gone.
    """
    told = {rank: json.loads(path.read_text()) for rank in codes if (path := folder / f"error-{rank}.json").exists()}
    for left in sorted(told.values(), key=lambda left: left["code"] == UNFORESEEN):
        if left["code"] == UNFORESEEN and len(told) < len(codes):
            break
        if show_trace or left["code"] == UNFORESEEN:
            print(left["trace"], file=sys.stderr, end="")
        return _user_error(left["message"], left["code"])
    rank = min(codes.keys() - told.keys())
    code = codes[rank]
    if -code in signals:
        name = signal.Signals(-code).name
        return StoppedError(f"stopped by {name} outside of the training; the same command goes on from there", -code)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    which = f"process {rank} of {processes}" if processes > 1 else "the process of the run"
    return _user_error(f"{which} {how}; the same command goes on from the last checkpoint", UNFORESEEN)


def _user_error(message: str, code: int) -> UserError:
    """The exception that a process has left with."""
    if code > StoppedError.exit_code:
        return StoppedError(message, code - StoppedError.exit_code)
    error = UserError(message)
    error.exit_code = code
    return error


@contextmanager
def handing_on_signals(runs: Sequence[StartedRun]) -> Iterator[list[int]]:
    """Signals go to the processes of the runs; which ones there were is in the list."""
    signals: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        for run in runs:
            run.send_signal(number)

    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, hand_on) for number in PASSED_ON if is_main}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def held_back() -> Iterator[None]:
    """Signals wait until the block is over, here, and in a process started in it until that is ready for them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with(parent: int) -> None:
    """Stop as by SIGTERM when the process that waits for this one is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.25)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _free_port() -> int:
    from socket import socket

    with socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    main(sys.argv[1:])
