"""Start train.py in separate processes that tests can find, signal and kill."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from tests.forks import forking, train, works_in_a_fork
from tests.waiting import SECONDS, until

if not Path("/proc").is_dir():
    pytest.skip("processes are found in /proc", allow_module_level=True)

REPOSITORY = Path(__file__).resolve().parents[1]
MARK = "ISTAR_TEST_JOB"
Result = TypeVar("Result")
NOT_THE_TESTS = re.compile(r"SLURM|TORCHELASTIC|MASTER_|(LOCAL_|NODE_|GROUP_)?RANK$|WORLD_SIZE|HYDRA_FULL_ERROR")


@dataclass(frozen=True)
class Done:
    """The exit code and the output of a process that has ended."""

    code: int
    stdout: str
    stderr: str

    def lines(self) -> list[str]:
        """Return the lines of stderr without the usual warnings of small runs and of runs that resume."""
        usual = re.compile(
            r"was interrupted; it resumes from step-|fewer than reg\.num_points|before training\. Above 0\.2"
        )
        return [line for line in self.stderr.splitlines() if not usual.search(line)]

    def line(self) -> str:
        """Return the only one of `lines`."""
        [line] = self.lines()
        return line

    def well(self) -> "Done":
        """Assert that the process has succeeded without a warning, and return this object."""
        assert (self.code, self.lines()) == (0, [])
        assert "Warning" not in self.stdout
        return self


FORKS = threading.Lock()
"""Held to start a fork or to read its exit code, because `multiprocessing` polls all processes at each start."""


class Fork:
    """A fork that runs train.py, with the part of the interface of `subprocess.Popen` that tests need.

    Attributes:
        returncode: the exit code, once `poll` or `wait` has returned it.
    """

    def __init__(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], files: Sequence[Path]
    ) -> None:
        self._process = forking().Process(target=train, args=(arguments, folder, environment, files))
        with FORKS:
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with FORKS:
            self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float = SECONDS) -> int:
        until(lambda: self.poll() is not None, timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Job:
    """A call of train.py, in a new interpreter or, without one, in a fork.

    Its descendant processes are found by a unique mark. It is in their environment, or in the name of a file that they
    keep open, since the environment that the system shows for a fork is that of the server.
    """

    def __init__(
        self, folder: Path, interpreter: Sequence[str], arguments: Sequence[str], environment: dict[str, str]
    ) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.files = [folder.resolve() / f"{self.mark}.{kind}" for kind in ("stdout", "stderr")]
        self.before = newest(folder)
        folder.mkdir(exist_ok=True)
        environment = {**environment, MARK: self.mark}
        self.process: Fork | subprocess.Popen[bytes]
        with self.files[0].open("w") as stdout, self.files[1].open("w") as stderr:
            if interpreter:
                command = [*interpreter, str(REPOSITORY / "train.py"), *arguments]
                self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=stdout, stderr=stderr)
            else:
                self.process = Fork(arguments, folder, environment, self.files)

    def wait(self) -> Done:
        code = self.process.wait(SECONDS)
        return Done(code, *(file.read_text() for file in self.files))

    def until(self, condition: Callable[[], bool]) -> "Job":
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert self.process.poll() is None, self.wait()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return self

    def until_it_trains(self) -> "Job":
        """Wait for a new checkpoint."""
        return self.until(lambda: newest(self.folder) > self.before)

    def send(self, number: int) -> "Job":
        self.process.send_signal(number)
        return self

    def pids(self) -> list[int]:
        """Return the PIDs of all its processes that still exist."""
        return [
            int(process.name)
            for process in Path("/proc").glob("[0-9]*")
            if f"{MARK}={self.mark}" in environ(process) or self.files[0] in open_files(process)
        ]

    def rank(self, rank: int) -> int:
        """Return the PID of the process with this rank."""
        [pid] = [
            pid
            for pid in self.pids()
            for process in [Path(f"/proc/{pid}")]
            if f"LOCAL_RANK={rank}" in environ(process)
            or self.files[0].with_suffix(f".rank{rank}") in open_files(process)
        ]
        return pid

    def until_it_is_gone(self) -> None:
        """Wait until none of the processes is left."""
        until(lambda: not self.pids())

    def kill(self) -> None:
        while pids := self.pids():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.process.poll()
            time.sleep(0.05)
        self.process.wait()


Start = Callable[..., Job]


def environ(process: Path) -> list[str]:
    """Return the environment of a process, given by its folder in /proc, as `NAME=value`; none if it has ended."""
    try:
        return (process / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def open_files(process: Path) -> set[Path]:
    """Return the paths of the files that a process, given by its folder in /proc, has open; none if it has ended."""
    paths = set()
    with suppress(OSError):
        for link in (process / "fd").iterdir():
            with suppress(OSError):
                paths.add(link.readlink())
    return paths


def newest(folder: Path) -> int:
    """Return the step of the newest checkpoint, or 0 if there is none."""
    paths = folder.glob("runs/*/checkpoints/step-*.ckpt")
    return max((int(path.stem.removeprefix("step-")) for path in paths), default=0)


def at_once(*calls: Callable[[], Result]) -> list[Result]:
    """Make the calls at the same time, each in a thread, and return their results in order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@contextmanager
def starting(cache: Path) -> Iterator[Start]:
    """Yield `start(folder, *arguments, **environment)`, which runs train.py; its processes are killed afterwards.

    It runs in a fork, unless `python` has arguments for a new interpreter, which come before the script, or one of the
    variables has an effect only in a new interpreter.
    """
    jobs: list[Job] = []
    base_environment = {name: value for name, value in os.environ.items() if not NOT_THE_TESTS.match(name)}
    # The temporary files of a killed parent are deleted with the cache.
    base_environment |= {
        "TMPDIR": str(cache),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200",
        "OMP_NUM_THREADS": "1",
        "ISTAR_CACHE": str(cache),
    }

    def start(folder: Path, *arguments: str, python: Sequence[str] = (), **environment: str) -> Job:
        needs_interpreter = python or not works_in_a_fork({**base_environment, **environment})
        interpreter = [sys.executable, *python] if needs_interpreter else []
        jobs.append(Job(folder, interpreter, arguments, {**base_environment, **environment}))
        return jobs[-1]

    try:
        yield start
    finally:
        for job in jobs:
            job.kill()
