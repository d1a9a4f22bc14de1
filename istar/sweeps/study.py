"""Searches with Optuna: which values to try next, given the results of earlier trials."""

import logging
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock, Timeout
from hydra.core.override_parser.types import IntervalSweep, Override
from optuna.trial import FrozenTrial, TrialState

from istar.config import SweepConfig
from istar.errors import UserError, shorten
from istar.results import RunRecord
from istar.runs.private_names import load_trial
from istar.sweeps.trials import Overrides, Space
from istar.training.pruning import TrialOfStudy

_STATES = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
_OVERRIDES, _WORKER = "overrides", "worker"  # keys of the user attributes that a trial has in Optuna's storage


class Study:
    """An Optuna study in a database, on which several workers, calls of the same command, may work at the same time.

    A trial whose worker has died is taken over with its values, so that its run resumes from its checkpoint. With
    several search spaces, given by name, the choice between them is a categorical parameter.

    Raises:
        UserError: if the storage cannot be used.
    """

    def __init__(self, settings: SweepConfig, spaces: Mapping[str, Space], folder: Path) -> None:
        optuna.logging.set_verbosity(logging.WARNING)
        self.storage = settings.storage or f"sqlite:///{(folder / 'optuna.db').absolute()}"
        self.name = folder.name
        self._trials, self._spaces, self._folder = settings.trials, spaces, folder
        self._worker = uuid.uuid4().hex
        pruner = _PRUNERS[settings.pruner]()
        try:
            self._study = optuna.create_study(
                study_name=self.name, storage=self.storage, pruner=pruner, direction="maximize", load_if_exists=True
            )
        except Exception as error:
            raise UserError(f"sweep.storage={self.storage} cannot be used: {shorten(error)}") from error
        # A sampler with the same seed as before would suggest the same values again.
        begun = len(self._study.get_trials(deepcopy=False))
        self._study.sampler = _SAMPLERS[settings.sampler](seed=settings.sampler_seed + begun)
        (folder / "workers").mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self._lock_path(self._worker))
        self._lock.acquire()
        self._running: set[int] = set()
        self._attempts = self.to_come()

    def close(self) -> None:
        """Let other workers take over the unfinished trials of this one."""
        self._lock.release()
        self._lock_path(self._worker).unlink(missing_ok=True)

    def to_come(self) -> int:
        """The number of trials that no worker has started."""
        begun = self._trials_in(TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
        return max(0, self._trials - len(begun))

    def ended_trials(self) -> list[tuple[int, Overrides]]:
        """Number and overrides of the finished and pruned trials."""
        ended = self._trials_in(TrialState.COMPLETE, TrialState.PRUNED)
        return [(trial.number, tuple(trial.user_attrs[_OVERRIDES])) for trial in ended]

    def ask(self) -> tuple[int, Overrides] | None:
        """Number and overrides of a trial to start now: an abandoned trial or a new one; None if there are enough.

        Failed trials are replaced, but one worker starts no more new trials than were missing when it began.
        """
        for trial in self._trials_in(TrialState.RUNNING):
            worker = trial.user_attrs.get(_WORKER, "")
            if trial.number not in self._running and (worker == self._worker or not self._is_alive(worker)):
                return self._start(load_trial(self._study, trial.number), trial.user_attrs.get(_OVERRIDES))
        if self._attempts < 1 or self.to_come() < 1:
            return None
        self._attempts -= 1
        return self._start(self._study.ask(), None)

    def tell(self, number: int, outcome: RunRecord | UserError) -> None:
        """Report the outcome of a trial to Optuna."""
        self._running.discard(number)
        state = _STATES[outcome.status] if isinstance(outcome, RunRecord) else TrialState.FAIL
        # Optuna takes the last reported value as the value of a pruned trial.
        value = outcome.headline["value"] if state == TrialState.COMPLETE else None  # type: ignore[union-attr]
        self._study.tell(number, value, state)

    def release(self, number: int) -> None:
        """Mark a stopped trial as abandoned, so that `ask` returns it again."""
        self._running.discard(number)

    def trial_address(self, number: int) -> str:
        """The value of `sweep.trial` by which the run's process finds the trial in the storage."""
        return str(TrialOfStudy(self.storage, self.name, number))

    def _start(self, trial: optuna.trial.Trial, overrides: Any) -> tuple[int, Overrides]:
        self._running.add(trial.number)
        trial.set_user_attr(_WORKER, self._worker)
        if overrides is None:
            overrides = suggest(trial, self._spaces)
            trial.set_user_attr(_OVERRIDES, list(overrides))
        return trial.number, tuple(overrides)

    def _trials_in(self, *states: TrialState) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=states)

    def _lock_path(self, worker: str) -> Path:
        return self._folder / "workers" / f"{worker}.lock"

    def _is_alive(self, worker: str) -> bool:
        """Whether a worker still runs: the operating system releases its file lock when it dies."""
        if not self._lock_path(worker).exists():
            return False
        try:
            with FileLock(self._lock_path(worker), timeout=0):
                return False
        except Timeout:
            return True


def suggest(trial: optuna.trial.Trial, spaces: Mapping[str, Space]) -> Overrides:
    """Let Optuna choose a value for each key that is swept over; the choice between spaces is the parameter `grid`."""
    name = trial.suggest_categorical("grid", list(spaces)) if len(spaces) > 1 else next(iter(spaces))
    return tuple(_suggest(trial, override) for override in spaces[name].values())


def _suggest(trial: optuna.trial.Trial, override: Override) -> str:
    """Let Optuna choose a value for a key that is swept over; return other overrides as they are."""
    if not override.is_sweep_override():
        return override.input_line or ""
    key, sweep = override.get_key_element(), override.value()
    if isinstance(sweep, IntervalSweep):
        is_log, start, end = "log" in sweep.tags, sweep.start or 0, sweep.end or 0
        # Hydra converts the ends of interval(1,5) to floats, and those of int(interval(1,5)) to integers.
        if "int" in sweep.tags or isinstance(start, int):
            return f"{key}={trial.suggest_int(key, int(start), int(end), log=is_log)}"
        return f"{key}={trial.suggest_float(key, start, end, log=is_log)}"
    return f"{key}={trial.suggest_categorical(key, list(override.sweep_string_iterator()))}"


_SAMPLERS: dict[str, Callable[..., optuna.samplers.BaseSampler]] = {
    "tpe": optuna.samplers.TPESampler,
    "random": optuna.samplers.RandomSampler,
}
_PRUNERS: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
    "none": optuna.pruners.NopPruner,
    "median": optuna.pruners.MedianPruner,
    # Fine-tuning has few epochs, so the better half of the trials continues after 1, 2, 4, ... epochs.
    "asha": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
}
