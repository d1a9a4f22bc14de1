"""Which values to try next, by what the ones before have shown: Optuna's samplers and pruners."""

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
from istar.sweeps.trials import Overrides, Space
from istar.training.pruning import TrialOfStudy

_STATES = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
_OVERRIDES, _WORKER = "overrides", "worker"


class Study:
    """An Optuna study kept in a database, which several calls of the same command may work on at once.

    A trial whose call has died is taken over with its values, so that its run goes on from its checkpoint.

    Args:
        settings: sampler, pruner, number of trials, storage.
        found: the spaces; with several of them, which one is a choice like any other.
        folder: of the sweep.

    Raises:
        UserError: if the storage cannot be used.
    """

    def __init__(self, settings: SweepConfig, found: Mapping[str, Space], folder: Path) -> None:
        optuna.logging.set_verbosity(logging.WARNING)
        self.storage = settings.storage or f"sqlite:///{(folder / 'optuna.db').absolute()}"
        self.name = folder.name
        self._trials, self._spaces, self._folder = settings.trials, found, folder
        self._worker = uuid.uuid4().hex
        try:
            self._study = optuna.create_study(
                study_name=self.name,
                storage=self.storage,
                pruner=_PRUNERS[settings.pruner](),
                direction="maximize",
                load_if_exists=True,
            )
        except Exception as error:
            raise UserError(f"sweep.storage={self.storage} cannot be used: {shorten(error)}") from error
        # Begun again at its seed, a sampler would ask for what it has asked for before.
        begun = len(self._study.get_trials(deepcopy=False))
        self._study.sampler = _SAMPLERS[settings.sampler](seed=settings.sampler_seed + begun)
        self._lock = FileLock(self._place(self._worker))
        Path(self._lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()
        self._own: set[int] = set()
        self._attempts = self.to_come()

    def close(self) -> None:
        """Let others take over what this call has left."""
        self._lock.release()
        Path(self._lock.lock_file).unlink(missing_ok=True)

    def to_come(self) -> int:
        """Trials that nobody has begun."""
        begun = self._with(TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
        return max(0, self._trials - len(begun))

    def ended_trials(self) -> list[tuple[int, Overrides]]:
        """Number and overrides of the trials that earlier calls have ended well."""
        ended = self._with(TrialState.COMPLETE, TrialState.PRUNED)
        return [(trial.number, tuple(trial.user_attrs[_OVERRIDES])) for trial in ended]

    def ask(self) -> tuple[int, Overrides] | None:
        """Number and overrides of a trial to start now: one that was left behind, or a new one; None: enough."""
        for left in self._with(TrialState.RUNNING):
            worker = left.user_attrs.get(_WORKER, "")
            if left.number not in self._own and (worker == self._worker or not self._is_alive(worker)):
                return self._take(self._trial(left.number), left.user_attrs.get(_OVERRIDES))
        if self._attempts < 1 or self.to_come() < 1:
            return None
        self._attempts -= 1
        return self._take(self._study.ask(), None)

    def tell(self, number: int, outcome: RunRecord | UserError) -> None:
        """Hand on what came out of a trial."""
        self._own.discard(number)
        state = _STATES[outcome.status] if isinstance(outcome, RunRecord) else TrialState.FAIL
        # A pruned trial's value is the last that it has reported.
        value = outcome.headline["value"] if state == TrialState.COMPLETE else None  # type: ignore[union-attr]
        self._study.tell(number, value, state)

    def leave(self, number: int) -> None:
        """A trial was stopped and may be taken over."""
        self._own.discard(number)

    def handle(self, number: int) -> str:
        """What the run's process finds its trial by."""
        return str(TrialOfStudy(self.storage, self.name, number))

    def _take(self, trial: optuna.trial.Trial, overrides: Any) -> tuple[int, Overrides]:
        self._own.add(trial.number)
        trial.set_user_attr(_WORKER, self._worker)
        if overrides is None:
            overrides = suggest(trial, self._spaces)
            trial.set_user_attr(_OVERRIDES, list(overrides))
        return trial.number, tuple(overrides)

    def _trial(self, number: int) -> optuna.trial.Trial:
        known = self._study.get_trials(deepcopy=False)[number]
        return optuna.trial.Trial(self._study, known._trial_id)

    def _with(self, *states: TrialState) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=states)

    def _place(self, worker: str) -> str:
        return str(self._folder / "workers" / f"{worker}.lock")

    def _is_alive(self, worker: str) -> bool:
        """Whether the call that took a trial still runs; the operating system frees its lock when it does not."""
        if not worker or not Path(self._place(worker)).exists():
            return False
        lock = FileLock(self._place(worker))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return True
        lock.release()
        return False


def suggest(trial: optuna.trial.Trial, found: Mapping[str, Space]) -> Overrides:
    """A value for each key that is swept over; the choice between spaces is named `grid`."""
    name = trial.suggest_categorical("grid", list(found)) if len(found) > 1 else next(iter(found))
    return tuple(_suggest(trial, override) for override in found[name].values())


def _suggest(trial: optuna.trial.Trial, override: Override) -> str:
    if not override.is_sweep_override():
        return override.input_line or ""
    key, sweep = override.get_key_element(), override.value()
    if isinstance(sweep, IntervalSweep):
        is_log, start, end = "log" in sweep.tags, sweep.start or 0, sweep.end or 0
        # interval(1,5) has floats for ends, int(interval(1,5)) has not.
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
    # Fine-tuning has few epochs: after each of 1, 2, 4, ... the better half goes on.
    "asha": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
}
