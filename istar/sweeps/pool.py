"""The runs of a sweep on this machine, N at a time, each in processes and with GPUs of its own."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from istar.config import TrainerConfig
from istar.errors import StoppedError, UserError
from istar.results import RunRecord
from istar.runs import fork_server
from istar.runs.launch import StartedRun, Starter, fresh, handing_on_signals, held_back, processes_to_start
from istar.sweeps.trials import Trial


class Source(Protocol):
    """Where trials come from and what became of them goes to."""

    def next(self) -> Trial | None:
        """One to start now; None if there is none, now that these are running."""

    def started(self, trial: Trial, log: Path) -> None:
        """It has been."""

    def ended(self, trial: Trial, outcome: RunRecord | UserError, status: str | None = None) -> None:
        """It has; the status is given where the outcome does not tell it."""

    def tick(self) -> None:
        """Time goes by."""


@dataclass(frozen=True)
class Settings:
    """How runs are carried out.

    Attributes:
        jobs: at a time.
        fail_fast: one that fails stops all.
        show_trace: print the stack trace of one that fails.
        logs: folder for what the processes print.
    """

    jobs: int
    fail_fast: bool
    show_trace: bool
    logs: Path


def carry_out(source: Source, settings: Settings) -> None:
    """Run what the source gives until it gives nothing more.

    Raises:
        StoppedError: when a signal has stopped it; the runs under way have been asked to save what they have.
    """
    settings.logs.mkdir(parents=True, exist_ok=True)
    with _starter(settings) as start:
        _carry_out(source, settings, start)


def _carry_out(source: Source, settings: Settings, start: Starter) -> None:
    pool = _Pool(source, settings, start)
    with handing_on_signals(pool.runs) as signals:
        while pool.fill(signals):
            pool.empty(signals)
            source.tick()
            time.sleep(0.05)
    if signals:
        name = signal.Signals(signals[0]).name
        raise StoppedError(f"stopped by {name}; the same command goes on", signals[0])


@contextmanager
def _starter(settings: Settings) -> Iterator[Starter]:
    """Forks where that can be done: a fresh process costs seconds of a sweep's every run."""
    if not fork_server.is_possible():
        yield fresh
        return
    with fork_server.Servers(settings.logs / "server.log") as servers:
        yield servers.start


class _Pool:
    def __init__(self, source: Source, settings: Settings, start: Starter) -> None:
        self.runs: list[StartedRun] = []
        self._source, self._settings, self._starter = source, settings, start
        self._slots: dict[int, tuple[Trial, StartedRun]] = {}
        self._gpus = visible_gpus() if settings.jobs > 1 else []
        self._is_over = False

    def fill(self, signals: Sequence[int]) -> bool:
        """Give each free slot a run; False when there is nothing to wait for any more."""
        for slot in range(self._settings.jobs):
            while slot not in self._slots and not signals and not self._is_over:
                trial = self._source.next()
                if trial is None:
                    break
                self._start(slot, trial)
        return bool(self._slots)

    def empty(self, signals: Sequence[int]) -> None:
        """Take leave of the runs that have ended."""
        for slot, (trial, run) in list(self._slots.items()):
            if run.has_ended():
                del self._slots[slot]
                self.runs.remove(run)
                self._end(trial, run, signals)

    def _start(self, slot: int, trial: Trial) -> None:
        log = self._settings.logs / f"{trial.name}.log"
        try:
            variables = share(slot, self._settings.jobs, trial.config.trainer, self._gpus)
            processes = processes_to_start(trial.config.trainer)
        except UserError as error:
            self._failed(trial, error)
            return
        with held_back():
            run = StartedRun(trial.config, processes, trial.study, variables, log, self._starter)
            self.runs.append(run)
        self._slots[slot] = trial, run
        self._source.started(trial, log)

    def _end(self, trial: Trial, run: StartedRun, signals: Sequence[int]) -> None:
        try:
            self._source.ended(trial, run.record(signals, self._settings.show_trace))
        except StoppedError as error:
            if not signals and not self._is_over:
                # Somebody has stopped this one alone.
                self._failed(trial, error)
            else:
                self._source.ended(trial, error, "stopped")
        except UserError as error:
            self._failed(trial, error)

    def _failed(self, trial: Trial, error: UserError) -> None:
        self._source.ended(trial, error)
        if self._settings.fail_fast:
            self._is_over = True
            for run in self.runs:
                run.send_signal(signal.SIGTERM)


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def share(slot: int, jobs: int, settings: TrainerConfig, gpus: Sequence[str]) -> dict[str, str]:
    """What a slot's runs get of the machine, as variables of their environment: GPUs, else threads.

    With more jobs than GPUs, several of them share one.

    Raises:
        UserError: if the trainer does not say how many devices it wants.
    """
    if jobs == 1:
        return {}
    count = device_count(settings)
    if gpus and settings.accelerator in ("auto", "gpu", "cuda"):
        own = dict.fromkeys(gpus[(slot * count + number) % len(gpus)] for number in range(count))
        return {"CUDA_VISIBLE_DEVICES": ",".join(own)}
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // (jobs * count)))}


def device_count(settings: TrainerConfig) -> int:
    """How many devices a run wants.

    Raises:
        UserError: if that is left to the hardware or the devices are named.
    """
    if isinstance(settings.devices, int) and settings.devices > 0:
        return settings.devices
    if isinstance(settings.devices, str) and settings.devices.isdigit() and int(settings.devices) > 0:
        return int(settings.devices)
    raise UserError(
        f"trainer.devices={settings.devices}: with sweep.jobs above 1 say how many devices a run gets, not which"
    )
