"""Executes trials on this machine, several of them in parallel, each with separate processes and GPUs."""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from istar.errors import LockedError, StoppedError, UserError, describe_stop
from istar.finetune.config import SweepConfig, TrainerConfig
from istar.finetune.processes.forking import ForkedProcess, is_supported
from istar.finetune.processes.launch import RunProcesses, Spawn, spawn
from istar.finetune.processes.process_signals import blocked_signals, forward_signals
from istar.finetune.processes.ranks import processes_to_start
from istar.finetune.sweeps.trials import Trial
from istar.runs.record import RunRecord


class TrialSource(Protocol):
    """Supplies trials, and takes their outcomes."""

    def next_trial(self) -> Trial | None: ...

    def is_waiting(self) -> bool: ...

    def set_aside(self, trial: Trial) -> None: ...

    def on_started(self, trial: Trial, log_path: Path | None) -> None: ...

    def on_ended(self, trial: Trial, outcome: RunRecord | UserError, status: str | None = None) -> None: ...

    def tick(self) -> None: ...


def run_trials(
    source: TrialSource, settings: SweepConfig, log_folder: Path, environment: Mapping[str, str] | None = None
) -> None:
    """Execute trials, `settings.jobs` of them in parallel, until the source is exhausted and all have ended.

    The processes write their output to files in `log_folder`, and have the additional variables of `environment`. With
    `settings.fail_fast`, a failure stops all trials. Raises a `StoppedError` if a signal has stopped the sweep; the
    signal was forwarded to the running trials.
    """
    log_folder.mkdir(parents=True, exist_ok=True)
    pool = _TrialPool(source, settings, log_folder, environment or {})
    with forward_signals(pool.runs) as signals:
        while pool.fill_slots(signals):
            pool.collect_ended(signals)
            source.tick()
            time.sleep(0.05)
    if signals:
        raise StoppedError(f"{describe_stop(signals[0])}; run the same command to resume", signals[0])


class _TrialPool:
    """Runs trials in parallel, one at a time in each of the `settings.jobs` slots."""

    def __init__(
        self, source: TrialSource, settings: SweepConfig, log_folder: Path, environment: Mapping[str, str]
    ) -> None:
        self.runs: list[RunProcesses] = []
        self._source, self._settings, self._log_folder, self._environment = source, settings, log_folder, environment
        # A new interpreter costs seconds for every run; a forked process does not.
        self._spawn: Spawn = ForkedProcess if settings.fork and is_supported() else spawn
        self._running_by_slot: dict[int, tuple[Trial, RunProcesses]] = {}
        self._gpus = list_visible_gpus() if settings.jobs > 1 else []
        self._is_stopping = False

    def fill_slots(self, signals: Sequence[int]) -> bool:
        """Start a trial in each free slot, and return whether any trial is running or waited for.

        Once a stop signal is in `signals`, no more trials start.
        """
        for slot in range(self._settings.jobs):
            while slot not in self._running_by_slot and not signals and not self._is_stopping:
                trial = self._source.next_trial()
                if trial is None:
                    break
                self._start(slot, trial)
        may_start = not signals and not self._is_stopping
        return bool(self._running_by_slot) or (may_start and self._source.is_waiting())

    def collect_ended(self, signals: Sequence[int]) -> None:
        for slot, (trial, run) in list(self._running_by_slot.items()):
            if run.has_ended():
                del self._running_by_slot[slot]
                self.runs.remove(run)
                self._report(trial, run, signals)

    def _start(self, slot: int, trial: Trial) -> None:
        log_path = self._log_folder / f"{trial.name}.log"
        try:
            extra_variables = make_slot_environment(slot, self._settings.jobs, trial.config.trainer, self._gpus)
            extra_variables.update(self._environment)
            num_processes = processes_to_start(trial.config.trainer)
            with blocked_signals():
                arguments = trial.optuna_trial, extra_variables, log_path, self._spawn
                run = RunProcesses(trial.config, num_processes, *arguments)
                self.runs.append(run)
        except UserError as error:
            self._report_failure(trial, error)
            return
        self._running_by_slot[slot] = trial, run
        self._source.on_started(trial, log_path)

    def _report(self, trial: Trial, run: RunProcesses, signals: Sequence[int]) -> None:
        try:
            self._source.on_ended(trial, run.read_record(signals))
        except LockedError:
            self._source.set_aside(trial)
        except UserError as error:
            # If the sweep itself was not stopped, a stopped trial counts as failed, and the sweep continues.
            if isinstance(error, StoppedError) and (signals or self._is_stopping):
                self._source.on_ended(trial, error, "stopped")
            else:
                self._report_failure(trial, error)

    def _report_failure(self, trial: Trial, error: UserError) -> None:
        """Report a failed trial's error to its source; with `fail_fast`, stop all running trials."""
        self._source.on_ended(trial, error)
        if self._settings.fail_fast:
            self._is_stopping = True
            for run in self.runs:
                run.send_signal(signal.SIGTERM)


def list_visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, in the notation of CUDA_VISIBLE_DEVICES."""
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is not None:
        return [name for name in visible_devices.split(",") if name.strip()]
    return [str(index) for index in range(torch.cuda.device_count())]


def make_slot_environment(slot: int, num_jobs: int, settings: TrainerConfig, gpus: Sequence[str]) -> dict[str, str]:
    """Return environment variables that give a slot its share of the GPUs, or else of the CPU threads.

    With more jobs than GPUs, several jobs share a GPU. Raises a `UserError` if `trainer.devices` is not a number of
    devices.
    """
    if num_jobs == 1:
        return {}
    if not str(settings.devices).isdigit() or int(settings.devices) == 0:
        raise UserError(
            f"trainer.devices={settings.devices}: with sweep.jobs above 1 say how many devices a run gets, not which"
        )
    num_devices = int(settings.devices)
    if gpus and settings.accelerator in ("auto", "gpu", "cuda"):
        # dict.fromkeys removes duplicates, which occur if a job needs more GPUs than there are.
        gpus_of_slot = dict.fromkeys(gpus[(slot * num_devices + index) % len(gpus)] for index in range(num_devices))
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus_of_slot)}
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // (num_jobs * num_devices)))}
