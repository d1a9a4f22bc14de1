"""A run in processes of its own: as many as it has devices, started afresh from its resolved config and watched.

`python -m istar.launch <config.yaml> <folder>` is one such process. A run that train.py starts by itself must not be
started again from the command line, as Lightning would do: with `-m` that is the command line of the whole sweep.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import yaml
from omegaconf import OmegaConf
from rich.console import Console

from istar import results, schema
from istar.config import Config, TrainerConfig
from istar.errors import UserError, shorten
from istar.files import write_text
from istar.results import RunRecord

UNFORESEEN = 1
"""Exit code of an error that is no mistake of the user's."""
GRACE_SECONDS = 10.0
"""How long the other processes may go on when one has ended badly."""
_TORCHRUN = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "ROLE_RANK", "LOCAL_WORLD_SIZE",
             "MASTER_ADDR", "MASTER_PORT")  # fmt: skip


def processes_to_start(settings: TrainerConfig) -> int:
    """How many processes a run needs that are not there yet; 1: this one will do.

    Raises:
        UserError: if the trainer refuses its settings.
    """
    if settings.devices in (1, "1") and settings.num_nodes == 1:
        return 1
    from istar.training.trainer import processes_to_start

    return processes_to_start(settings)


def is_one_of_many() -> bool:
    """Whether torchrun or srun has started this process beside others."""
    return "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def launch(config: Config, processes: int, show_trace: bool = False) -> RunRecord:
    """Carry out a run in fresh processes and wait for them.

    Args:
        config: of the run.
        processes: how many on this machine.
        show_trace: with the stack trace, if it fails.

    Returns:
        The run's record.

    Raises:
        UserError: what ended the first of the processes that ended badly; the others are ended, too.
        StoppedError: if a signal, which is handed on to the processes, has stopped it.
    """
    with tempfile.TemporaryDirectory(prefix="istar-") as name:
        folder = Path(name)
        write_text(folder / "config.yaml", yaml.safe_dump(schema.to_dict(config)))
        command = [sys.executable, "-m", "istar.launch", str(folder / "config.yaml"), name]
        port = _free_port()
        started = [
            subprocess.Popen(command, env=_environment(rank, processes, config.trainer, port), start_new_session=True)
            for rank in range(processes)
        ]
        with _handing_on_signals(started):
            bad = _wait(started)
        if bad:
            raise _error(folder, {rank: started[rank].returncode for rank in bad}, processes, show_trace)
        return results.read(Path((folder / "run").read_text()))


def main(arguments: Sequence[str]) -> int:
    """One process of a run: leaves the run's folder, or what went wrong, in files for the one that started it."""
    config, folder = arguments
    rank = os.environ.get("LOCAL_RANK", "0")
    _end_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    schema.register()
    try:
        from istar.run import place, run

        settings = schema.load(OmegaConf.load(config))  # type: ignore[arg-type]
        record = run(settings, Console())
        if rank == "0":
            write_text(Path(folder) / "run", str(place(settings, record)))
        return 0
    except UserError as error:
        message, code, trace = str(error), error.exit_code, traceback.format_exc()
    except Exception as error:
        message, code, trace = f"{type(error).__name__}: {shorten(error)}", UNFORESEEN, traceback.format_exc()
    write_text(Path(folder) / f"error-{rank}.json", json.dumps({"message": message, "code": code, "trace": trace}))
    # Not through the exit of the interpreter, where a process group without its other processes may hang.
    os._exit(code)


def _environment(rank: int, processes: int, settings: TrainerConfig, port: int) -> dict[str, str]:
    """This process's own without what torchrun or srun have left there, and the place among the others."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TORCHELASTIC") and name not in ("SLURM_NTASKS", "HYDRA_FULL_ERROR")
    }
    if settings.num_nodes == 1:
        kept = {name: value for name, value in kept.items() if name not in _TORCHRUN}
    if processes > 1 or settings.num_nodes > 1:
        own = {"LOCAL_RANK": str(rank), "NODE_RANK": kept.get("NODE_RANK", "0")}
        own |= {"MASTER_ADDR": kept.get("MASTER_ADDR", "127.0.0.1"), "MASTER_PORT": kept.get("MASTER_PORT", str(port))}
        # With as many threads as cores in each of them, they would stand in each other's way.
        threads = max(1, (os.cpu_count() or 1) // processes)
        kept |= own | {"OMP_NUM_THREADS": kept.get("OMP_NUM_THREADS", str(threads))}
    return kept


def _wait(started: Sequence["subprocess.Popen[bytes]"]) -> list[int]:
    """The numbers of the processes that ended badly by themselves, after the end of all."""
    deadline = float("inf")
    while any(process.poll() is None for process in started):
        bad = [rank for rank, process in enumerate(started) if process.returncode]
        if bad and deadline == float("inf"):
            deadline = time.monotonic() + GRACE_SECONDS
        if time.monotonic() > deadline:
            for process in started:
                process.kill()
                process.wait()
            return bad
        time.sleep(0.05)
    return [rank for rank, process in enumerate(started) if process.returncode]


def _error(folder: Path, codes: dict[int, int], processes: int, show_trace: bool) -> UserError:
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
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    which = f"process {rank} of {processes}" if processes > 1 else "the process of the run"
    return _user_error(f"{which} {how}; the same command goes on from the last checkpoint", UNFORESEEN)


def _user_error(message: str, code: int) -> UserError:
    error = UserError(message)
    error.exit_code = code
    return error


@contextmanager
def _handing_on_signals(started: Sequence["subprocess.Popen[bytes]"]) -> Iterator[None]:
    def hand_on(number: int, frame: FrameType | None) -> None:
        for process in started:
            process.send_signal(number)

    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT) if is_main else ()
    before = {number: signal.signal(number, hand_on) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with_parent() -> None:
    """Stop as by SIGTERM when the process that waits for this one is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _free_port() -> int:
    from socket import socket

    with socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
