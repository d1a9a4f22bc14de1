"""Searches with Optuna: which values to try next, given the results of earlier trials."""

import logging
import math
import random
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
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
from istar.training.pruning import PRUNER_ATTRIBUTE, TrialReference

_STATES = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
# Keys of the user attributes that a trial has in Optuna's storage.
_OVERRIDES, _WORKER, _RUN, _DUPLICATE = "overrides", "worker", "run", "is_duplicate"
_MAX_DUPLICATES = 5
"""After this number of duplicates in a row, the sampler is replaced by a random choice."""
MAX_RANDOM_DUPLICATES = 50
"""After this number of duplicates in a row, a space with continuous intervals counts as exhausted."""


class Study:
    """An Optuna study in a database, on which several workers, calls of the same command, may work at the same time.

    A trial whose worker has died is taken over with its values, so that its run resumes from its checkpoint. With
    several search spaces, given by name, the choice between them is a categorical parameter.

    The trials have different runs: Optuna often suggests values again, and a suggestion whose run is running or has
    ended, in whichever worker, is dropped. It remains in the storage with the state FAIL and the attribute
    `is_duplicate`, because Optuna's trials cannot be deleted.

    Args:
        settings: settings of the sweep.
        spaces: search spaces by name.
        folder: folder of the sweep.
        run_name: maps the overrides of a trial to a name that is equal for equal runs.

    Raises:
        UserError: if the storage cannot be used.
    """

    def __init__(
        self,
        settings: SweepConfig,
        spaces: Mapping[str, Space],
        folder: Path,
        run_name: Callable[[Overrides], str],
    ) -> None:
        optuna.logging.set_verbosity(logging.WARNING)
        self.storage = settings.storage or f"sqlite:///{(folder / 'optuna.db').absolute()}"
        self.name = folder.name
        self._trials, self._spaces, self._folder, self._run_name = settings.trials, spaces, folder, run_name
        self._worker = uuid.uuid4().hex
        try:
            self._study = optuna.create_study(
                study_name=self.name, storage=self.storage, direction="maximize", load_if_exists=True
            )
            self._study.set_user_attr(PRUNER_ATTRIBUTE, settings.pruner)
        except Exception as error:
            raise UserError(f"sweep.storage={self.storage} cannot be used: {shorten(error)}") from error
        # A sampler with the same seed as before would suggest the same values again.
        begun = len(self._study.get_trials(deepcopy=False))
        seed = settings.sampler_seed + begun
        self._study.sampler = _SAMPLERS[settings.sampler](seed)
        self._random_sampler, self._random = optuna.samplers.RandomSampler(seed), random.Random(seed)
        (folder / "workers").mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self._lock_path(self._worker))
        self._lock.acquire()
        # Workers ask one after the other, so that no two start the same run.
        self._asking = FileLock(self._lock_path("asking"))
        self._running: set[int] = set()
        self._tried_runs: set[str] = set()
        self._tried_overrides: set[Overrides] = set()
        self._is_exhausted = False
        self._attempts = self.to_come()

    def close(self) -> None:
        """Let other workers take over the unfinished trials of this one."""
        self._lock.release()
        self._lock_path(self._worker).unlink(missing_ok=True)

    def to_come(self) -> int:
        """The number of trials that no worker has started; 0 if all runs of the search space have been tried."""
        if self._is_exhausted:
            return 0
        begun = self._trials_in(TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
        return max(0, self._trials - len(begun))

    def ended_trials(self) -> list[tuple[int, Overrides]]:
        """Number and overrides of the finished and pruned trials."""
        ended = self._trials_in(TrialState.COMPLETE, TrialState.PRUNED)
        return [(trial.number, tuple(trial.user_attrs[_OVERRIDES])) for trial in ended]

    def ask(self) -> tuple[int, Overrides] | None:
        """Number and overrides of a trial to start now: an abandoned trial or a new one; None if there are enough.

        No two trials have the same run, so that there are also enough when all runs of the search space have been
        tried. Failed trials are replaced, but one worker starts no more new trials than were missing when it began.
        """
        with self._asking:
            for trial in self._trials_in(TrialState.RUNNING):
                worker = trial.user_attrs.get(_WORKER, "")
                if trial.number not in self._running and (worker == self._worker or not self._is_alive(worker)):
                    abandoned = load_trial(self._study, trial.number)
                    if (suggestion := self._start(abandoned, trial.user_attrs.get(_OVERRIDES))) is not None:
                        return suggestion
            if self._attempts < 1 or self.to_come() < 1:
                return None
            suggestion = self._ask_for_new_run()
            self._attempts -= 1
            self._is_exhausted = suggestion is None
            return suggestion

    def _ask_for_new_run(self) -> tuple[int, Overrides] | None:
        """Start a new trial; None if every run of the search space has been tried."""
        for _ in range(_MAX_DUPLICATES):
            if (suggestion := self._start(self._study.ask())) is not None:
                return suggestion
        size = space_size(self._spaces)
        if size is None:
            return self._ask_at_random()
        while (parameters := self._untried_parameters(size)) is not None:
            self._study.enqueue_trial(parameters)
            if (suggestion := self._start(self._study.ask())) is not None:
                return suggestion
        return None

    def _ask_at_random(self) -> tuple[int, Overrides] | None:
        """Start a new trial with random values; None if `MAX_RANDOM_DUPLICATES` of them have been tried."""
        sampler = self._study.sampler
        self._study.sampler = self._random_sampler
        try:
            for _ in range(MAX_RANDOM_DUPLICATES):
                if (suggestion := self._start(self._study.ask())) is not None:
                    return suggestion
        finally:
            self._study.sampler = sampler
        return None

    def _untried_parameters(self, size: int) -> dict[str, Any] | None:
        """Random Optuna parameters whose overrides have not been tried, in a space of the given size; None if all have.

        Each call that returns parameters must be followed by a trial with them, which counts as tried.
        """
        ended = self._trials_in(TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
        tried = self._tried_overrides | {tuple(trial.user_attrs.get(_OVERRIDES, ())) for trial in ended}
        # One combination more than have been tried contains one that has not.
        for index in self._random.sample(range(size), min(size, len(tried) + 1)):
            parameters, overrides = combination(self._spaces, index)
            if overrides not in tried:
                return parameters
        return None

    def grid(self, number: int) -> str:
        """The name of the search space from which a trial has its values."""
        trial = self._study.get_trials(deepcopy=False)[number]
        return str(trial.params.get("grid", next(iter(self._spaces))))

    def tell(self, number: int, outcome: RunRecord | UserError) -> None:
        """Report the outcome of a trial to Optuna."""
        self._running.discard(number)
        state = _STATES[outcome.status] if isinstance(outcome, RunRecord) else TrialState.FAIL
        # Optuna takes the last reported value as the value of a pruned trial. Both are merits, which are maximized.
        value = outcome.selection_merit if state == TrialState.COMPLETE else None  # type: ignore[union-attr]
        self._study.tell(number, value, state)

    def release(self, number: int) -> None:
        """Mark a stopped trial as abandoned, so that `ask` returns it again."""
        self._running.discard(number)
        [trial] = [trial for trial in self._trials_in(TrialState.RUNNING) if trial.number == number]
        self._tried_runs.discard(trial.user_attrs[_RUN])

    def trial_address(self, number: int) -> str:
        """The value of `sweep.trial` by which the run's process finds the trial in the storage."""
        return str(TrialReference(self.storage, self.name, number))

    def _start(self, trial: optuna.trial.Trial, overrides: Sequence[str] | None = None) -> tuple[int, Overrides] | None:
        """Mark a trial as started by this worker, with these overrides or else with new ones that Optuna suggests.

        Returns its number and overrides, or None if it was dropped as a duplicate.
        """
        trial.set_user_attr(_WORKER, self._worker)
        values = suggest(trial, self._spaces) if overrides is None else tuple(overrides)
        run = self._run_name(values)
        is_duplicate = run in self._tried_runs | self._runs_of_others(trial.number)
        self._tried_overrides.add(values)
        trial.set_user_attr(_OVERRIDES, list(values))
        trial.set_user_attr(_RUN, run)
        if is_duplicate:
            trial.set_user_attr(_DUPLICATE, True)
            self._study.tell(trial.number, state=TrialState.FAIL)
            return None
        self._tried_runs.add(run)
        self._running.add(trial.number)
        return trial.number, values

    def _runs_of_others(self, number: int) -> set[str]:
        """The names of the runs of all trials but one that are running or have a result."""
        trials = self._trials_in(TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
        return {trial.user_attrs.get(_RUN, "") for trial in trials if trial.number != number}

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


def space_size(spaces: Mapping[str, Space]) -> int | None:
    """The number of combinations of values in all search spaces; None if a value is from a continuous interval."""
    sizes = []
    for space in spaces.values():
        values = [_values(override) for override in space.values() if override.is_sweep_override()]
        if None in values:
            return None
        sizes.append(math.prod(len(choices) for choices in values if choices is not None))
    return sum(sizes)


def combination(spaces: Mapping[str, Space], index: int) -> tuple[dict[str, Any], Overrides]:
    """The combination of values with an index below `space_size`: its Optuna parameters and its overrides."""
    for name, space in spaces.items():
        size = space_size({name: space})
        assert size is not None
        if index >= size:
            index -= size
            continue
        parameters: dict[str, Any] = {"grid": name} if len(spaces) > 1 else {}
        overrides = []
        for override in space.values():
            values = _values(override) if override.is_sweep_override() else None
            if values is None:
                overrides.append(override.input_line or "")
                continue
            index, position = divmod(index, len(values))
            parameters[override.get_key_element()] = values[position]
            overrides.append(f"{override.get_key_element()}={values[position]}")
        return parameters, tuple(overrides)
    raise IndexError(index)


def _values(override: Override) -> Sequence[int | str] | None:
    """All values of a key that is swept over, as Optuna has them; None for a continuous interval."""
    sweep = override.value()
    if not isinstance(sweep, IntervalSweep):
        return list(override.sweep_string_iterator())
    return range(int(sweep.start or 0), int(sweep.end or 0) + 1) if _is_integer(sweep) else None


def _is_integer(sweep: IntervalSweep) -> bool:
    """Whether an interval is one of integers, like `int(interval(1,5))`; Hydra converts `interval(1,5)` to floats."""
    return "int" in sweep.tags or isinstance(sweep.start, int)


def _suggest(trial: optuna.trial.Trial, override: Override) -> str:
    """Let Optuna choose a value for a key that is swept over; return other overrides as they are."""
    if not override.is_sweep_override():
        return override.input_line or ""
    key, sweep = override.get_key_element(), override.value()
    if not isinstance(sweep, IntervalSweep):
        return f"{key}={trial.suggest_categorical(key, _values(override) or [])}"
    is_log, start, end = "log" in sweep.tags, sweep.start or 0, sweep.end or 0
    if _is_integer(sweep):
        return f"{key}={trial.suggest_int(key, int(start), int(end), log=is_log)}"
    return f"{key}={trial.suggest_float(key, start, end, log=is_log)}"


def _tpe_sampler(seed: int) -> optuna.samplers.BaseSampler:
    """The TPE sampler that keeps away from the values of running trials."""
    with warnings.catch_warnings():
        # Optuna 4 calls `constant_liar` experimental; it is the default of Optuna 5.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


_SAMPLERS: dict[str, Callable[[int], optuna.samplers.BaseSampler]] = {
    "tpe": _tpe_sampler,
    "random": optuna.samplers.RandomSampler,
}
