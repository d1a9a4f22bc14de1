"""Searches with Optuna, which chooses the values to try next by the results of earlier trials."""

import getpass
import logging
import os
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
from sklearn.model_selection import ParameterGrid

from istar.errors import UserError, shorten
from istar.finetune.config import SweepConfig
from istar.finetune.sweeps.trials import Overrides, SearchSpace
from istar.finetune.training.pruning import PRUNER_ATTRIBUTE, TrialReference, load_trial, open_storage
from istar.runs.record import RunRecord

_STATE_BY_STATUS = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
_FOLDER_ID = "folder_id"  # user attribute of a study
# Keys of a trial's user attributes in Optuna's storage.
_OVERRIDES, _WORKER, _RUN, _DUPLICATE = "overrides", "worker", "run", "is_duplicate"
_MAX_DUPLICATES = 5
"""After this number of duplicates in a row, the sampler is replaced by a random choice."""
MAX_RANDOM_DUPLICATES = 50
"""After this number of duplicates in a row, a space with continuous intervals counts as exhausted."""
_MAX_LISTED_COMBINATIONS = 10_000
"""Largest number of combinations to list for untried ones; larger search spaces count as continuous."""


class Study:
    """An Optuna study in a database that several workers (calls of the same command) can use concurrently.

    If a worker has died, another one takes over its trial with the same values, so that the run resumes from its
    checkpoint. With several search spaces, the choice between them is a categorical parameter.

    No two trials have the same run. Optuna often suggests the same values again. If their run is running or has ended,
    in any worker, the suggestion is dropped. It remains in the storage with the state FAIL and the attribute
    `is_duplicate`, because Optuna's trials cannot be deleted.

    Args:
        space_by_grid: search spaces by the names of their grids.
        folder: folder of the sweep.
        run_name: maps the overrides of a trial to a name that is equal for equal runs.

    Raises a `UserError` if the storage cannot be used, or the study's runs are in another folder.
    """

    def __init__(
        self,
        settings: SweepConfig,
        space_by_grid: Mapping[str, SearchSpace],
        folder: Path,
        run_name: Callable[[Overrides], str],
    ) -> None:
        optuna.logging.set_verbosity(logging.WARNING)
        self.storage = settings.storage or f"sqlite:///{(folder / 'optuna.db').absolute()}"
        self.name = folder.name
        self._max_trials, self._space_by_grid = settings.trials, space_by_grid
        self._folder, self._run_name = folder, run_name
        self._worker_id = uuid.uuid4().hex
        try:
            self._optuna_storage = open_storage(self.storage)
            self._study = optuna.create_study(
                study_name=self.name, storage=self._optuna_storage, direction="maximize", load_if_exists=True
            )
            self._study.set_user_attr(PRUNER_ATTRIBUTE, settings.pruner)
        except Exception as error:
            raise UserError(f"sweep.storage={self.storage} cannot be used: {shorten(error)}") from error
        # A sampler with the same seed as before would suggest the same values again.
        num_started = len(self._study.get_trials(deepcopy=False))
        seed = settings.sampler_seed + num_started
        self._study.sampler = _SAMPLER_BY_NAME[settings.sampler](seed)
        self._random_sampler, self._random_generator = optuna.samplers.RandomSampler(seed), random.Random(seed)
        (folder / "workers").mkdir(parents=True, exist_ok=True)
        self._storage_file = (folder / f"storage-{getpass.getuser()}.url").absolute()
        _write_secret(self._storage_file, self.storage)
        self._lock = FileLock(self._lock_path(self._worker_id))
        self._lock.acquire()
        # Only one worker at a time asks for a trial, so that no two start the same run.
        self._ask_lock = FileLock(self._lock_path("asking"))
        self._check_folder()
        self._running_trials: set[int] = set()
        self._tried_runs: set[str] = set()
        self._is_exhausted = False
        self._num_new_trials_allowed = self._max_trials
        self._num_new_trials_allowed = self.num_trials_left()  # without those that have been started already

    def _check_folder(self) -> None:
        """Raise a `UserError` if the study belongs to another folder: its workers would seem dead from this one."""
        with self._ask_lock:
            folder_id = self._study.user_attrs.get(_FOLDER_ID)
            if folder_id is None:
                self._study.set_user_attr(_FOLDER_ID, self._worker_id)
                (self._folder / "workers" / self._worker_id).touch()
            elif not (self._folder / "workers" / folder_id).exists():
                self.close()
                raise UserError(
                    f"{self.name} in sweep.storage={self.storage} is a search in another folder than {self._folder}; "
                    "all its commands need the same run.root; choose another sweep.name for a new search"
                )

    def close(self) -> None:
        """Let other workers take over the unfinished trials of this one."""
        self._lock.release()
        self._lock_path(self._worker_id).unlink(missing_ok=True)

    def num_trials_left(self) -> int:
        """Return the number of new trials that this worker may start, if no other worker does.

        Failed trials are replaced, but a worker starts no more trials than were missing when it was created. If all
        runs of the search space have been tried, the number is 0.
        """
        if self._is_exhausted:
            return 0
        started_trials = self._get_trials(TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
        return max(0, min(self._num_new_trials_allowed, self._max_trials - len(started_trials)))

    def ended_trials(self) -> list[tuple[int, Overrides]]:
        ended_trials = self._get_trials(TrialState.COMPLETE, TrialState.PRUNED)
        return [(trial.number, tuple(trial.user_attrs[_OVERRIDES])) for trial in ended_trials]

    def is_waiting(self) -> bool:
        """Return whether other workers execute trials, which this worker would take over if they died."""
        return any(trial.number not in self._running_trials for trial in self._get_trials(TrialState.RUNNING))

    def ask(self) -> tuple[int, Overrides] | None:
        """Start an abandoned trial or a new one, and return its number and overrides.

        Returns None if no abandoned trial exists and `num_trials_left` is 0.
        """
        with self._ask_lock:
            for trial in self._get_trials(TrialState.RUNNING):
                worker_id = trial.user_attrs.get(_WORKER, "")
                if trial.number not in self._running_trials and (
                    worker_id == self._worker_id or not self._is_worker_alive(worker_id)
                ):
                    abandoned_trial = load_trial(self._study, self._optuna_storage, trial.number)
                    if (suggestion := self._start_trial(abandoned_trial, trial.user_attrs.get(_OVERRIDES))) is not None:
                        return suggestion
            if self.num_trials_left() < 1:
                return None
            suggestion = self._ask_for_new_run()
            self._num_new_trials_allowed -= 1
            self._is_exhausted = suggestion is None
            return suggestion

    def _ask_for_new_run(self) -> tuple[int, Overrides] | None:
        """Start a new trial, and return its number and overrides; None if every possible run has been tried."""
        for _ in range(_MAX_DUPLICATES):
            if (suggestion := self._start_trial(self._study.ask())) is not None:
                return suggestion
        combinations = list_parameters(self._space_by_grid)
        if combinations is None:
            return self._ask_for_random_run()
        # What has failed in other calls is tried again.
        tried = [
            trial.params
            for trial in self._study.get_trials(deepcopy=False)
            if trial.state != TrialState.FAIL or trial.user_attrs.get(_WORKER) == self._worker_id
        ]
        self._random_generator.shuffle(combinations)
        for parameters in combinations:
            if parameters not in tried:
                self._study.enqueue_trial(parameters)
                if (suggestion := self._start_trial(self._study.ask())) is not None:
                    return suggestion
        return None

    def _ask_for_random_run(self) -> tuple[int, Overrides] | None:
        """Start a new trial with random values; None if `MAX_RANDOM_DUPLICATES` suggestions in a row are duplicates."""
        sampler = self._study.sampler
        self._study.sampler = self._random_sampler
        try:
            for _ in range(MAX_RANDOM_DUPLICATES):
                if (suggestion := self._start_trial(self._study.ask())) is not None:
                    return suggestion
        finally:
            self._study.sampler = sampler
        return None

    def grid_of_trial(self, trial_number: int) -> str:
        trial = self._study.get_trials(deepcopy=False)[trial_number]
        return str(trial.params.get("grid", next(iter(self._space_by_grid))))

    def tell(self, trial_number: int, outcome: RunRecord | UserError) -> None:
        self._running_trials.discard(trial_number)
        state = _STATE_BY_STATUS[outcome.status] if isinstance(outcome, RunRecord) else TrialState.FAIL
        # Optuna takes the last reported value as the value of a pruned trial. Both are merits, which are maximized.
        value = outcome.selection_merit if state == TrialState.COMPLETE else None  # type: ignore[union-attr]
        self._study.tell(trial_number, value, state)

    def release(self, trial_number: int) -> None:
        """Mark a stopped trial as abandoned, so that `ask` returns it again."""
        self._running_trials.discard(trial_number)
        [trial] = [trial for trial in self._get_trials(TrialState.RUNNING) if trial.number == trial_number]
        self._tried_runs.discard(trial.user_attrs[_RUN])

    def trial_address(self, trial_number: int) -> str:
        """Return the value of `sweep.trial` that lets the process of the run find the trial in the storage."""
        return str(TrialReference(str(self._storage_file), self.name, trial_number))

    def _start_trial(
        self, trial: optuna.trial.Trial, overrides: Sequence[str] | None = None
    ) -> tuple[int, Overrides] | None:
        """Mark a trial as started by this worker, and return its number and overrides; None if a duplicate was dropped.

        Without `overrides`, Optuna suggests them.
        """
        trial.set_user_attr(_WORKER, self._worker_id)
        trial_overrides = suggest_overrides(trial, self._space_by_grid) if overrides is None else tuple(overrides)
        run_name = self._run_name(trial_overrides)
        started_trials = self._get_trials(TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
        other_runs = {other.user_attrs.get(_RUN, "") for other in started_trials if other.number != trial.number}
        is_duplicate = run_name in self._tried_runs | other_runs
        trial.set_user_attr(_OVERRIDES, list(trial_overrides))
        trial.set_user_attr(_RUN, run_name)
        if is_duplicate:
            trial.set_user_attr(_DUPLICATE, True)
            self._study.tell(trial.number, state=TrialState.FAIL)
            return None
        self._tried_runs.add(run_name)
        self._running_trials.add(trial.number)
        return trial.number, trial_overrides

    def _get_trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=states)

    def _lock_path(self, worker_id: str) -> Path:
        return self._folder / "workers" / f"{worker_id}.lock"

    def _is_worker_alive(self, worker_id: str) -> bool:
        """Return whether a worker still runs; the operating system releases its file lock when it dies."""
        if not self._lock_path(worker_id).exists():
            return False
        try:
            with FileLock(self._lock_path(worker_id), timeout=0):
                return False
        except Timeout:
            return True


def _write_secret(path: Path, text: str) -> None:
    """Write a text to a file that only its owner can read, unless the file has this text already."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)


def suggest_overrides(trial: optuna.trial.Trial, space_by_grid: Mapping[str, SearchSpace]) -> Overrides:
    """Let Optuna choose a grid and values for its swept keys; return the overrides of the run."""
    grid_name = next(iter(space_by_grid))
    if len(space_by_grid) > 1:
        grid_name = trial.suggest_categorical("grid", list(space_by_grid))
    return tuple(_suggest_override(trial, override) for override in space_by_grid[grid_name].values())


def list_parameters(space_by_grid: Mapping[str, SearchSpace]) -> list[dict[str, Any]] | None:
    """List the Optuna parameters of all combinations of values in all search spaces.

    Returns None if a key has a continuous interval, or there are more than `_MAX_LISTED_COMBINATIONS` combinations.
    """
    values_by_key: list[dict[str, Any]] = []  # of each search space
    for grid_name, space in space_by_grid.items():
        swept = [override for override in space.values() if override.is_sweep_override()]
        grid = {"grid": [grid_name]} if len(space_by_grid) > 1 else {}
        values_by_key.append(grid | {override.get_key_element(): _list_values(override) for override in swept})
    if any(None in values.values() for values in values_by_key):
        return None
    combinations = ParameterGrid(values_by_key)
    return list(combinations) if len(combinations) <= _MAX_LISTED_COMBINATIONS else None


def _list_values(override: Override) -> Sequence[int | str] | None:
    """Return all values of a swept key, as Optuna stores them, or None for a continuous interval."""
    sweep = override.value()
    if not isinstance(sweep, IntervalSweep):
        return list(override.sweep_string_iterator())
    return range(int(sweep.start or 0), int(sweep.end or 0) + 1) if _is_integer_interval(sweep) else None


def _is_integer_interval(sweep: IntervalSweep) -> bool:
    """Return whether an interval is over integers, like `int(interval(1,5))`; Hydra makes `interval(1,5)` floats."""
    return "int" in sweep.tags or isinstance(sweep.start, int)


def _suggest_override(trial: optuna.trial.Trial, override: Override) -> str:
    """Return a swept key's override with a value that Optuna chooses; other overrides are unchanged."""
    if not override.is_sweep_override():
        return override.input_line or ""
    key, sweep = override.get_key_element(), override.value()
    if not isinstance(sweep, IntervalSweep):
        return f"{key}={trial.suggest_categorical(key, _list_values(override) or [])}"
    is_log, start, end = "log" in sweep.tags, sweep.start or 0, sweep.end or 0
    if _is_integer_interval(sweep):
        return f"{key}={trial.suggest_int(key, int(start), int(end), log=is_log)}"
    # Tables, commands and configs show the value, so it has few digits.
    rounded = float(f"{trial.suggest_float(key, start, end, log=is_log):.4g}")
    return f"{key}={min(max(rounded, start), end)}"


def _make_tpe_sampler(seed: int) -> optuna.samplers.BaseSampler:
    """Create a TPE sampler that avoids the values of running trials."""
    with warnings.catch_warnings():
        # Optuna 4 calls `constant_liar` experimental; it is the default of Optuna 5.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


_SAMPLER_BY_NAME: dict[str, Callable[[int], optuna.samplers.BaseSampler]] = {
    "tpe": _make_tpe_sampler,
    "random": optuna.samplers.RandomSampler,
}
