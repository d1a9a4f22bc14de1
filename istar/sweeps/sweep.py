"""Runs a sweep, which `train.py -m` calls: expands the trials, executes the missing ones and compares the results."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import track

from istar import results
from istar.config import Config, SweepConfig, WandbConfig, schema
from istar.errors import LockedError, StoppedError, UserError
from istar.files import is_locked, write_text
from istar.reports import comparison, run_tables
from istar.results import RunRecord
from istar.runs import extras
from istar.runs.resolving import resolve_precision
from istar.runs.store import RunFolders, finished_run
from istar.sweeps import board, cost, pool, trials
from istar.sweeps.board import Board, Entry, SweepState, duration
from istar.sweeps.trials import Overrides, Trial

if TYPE_CHECKING:
    from istar.sweeps.study import Study

SEARCH, SEEDS = "search", "seeds"
_MAX_COMPARED = 24
"""With more configurations than fit into a table and a figure, only the best of each method are compared."""
_PROGRESS_BAR_FROM = 50  # number of runs from which composing them shows a progress bar

CHECK_SECONDS = 1.0
"""How often a sweep checks whether the runs that other processes execute have ended."""

Launcher = Callable[[Sequence[Overrides]], Sequence[RunRecord | UserError]]
"""Executes several runs elsewhere, as Hydra's launchers do; returns the record or the error of each."""


@dataclass(frozen=True)
class SweepRequest:
    """A sweep as requested on the command line."""

    settings: SweepConfig
    arguments: Sequence[str]  # overrides of the command line
    params: Mapping[str, Any]  # values to sweep over by key, from `hydra.sweeper.params`
    command: str  # the command line, for messages that repeat it
    root: Path  # folder that holds the runs
    compose: Callable[[Overrides], DictConfig]  # composes the config of a run from its overrides
    launcher: Launcher | None = None  # executes the runs; None executes them on this machine
    config_loader: ConfigLoader | None = None  # lists the options of config groups for `glob(*)`
    environment: Mapping[str, str] = field(default_factory=dict)  # further variables of the runs' processes


def sweep(request: SweepRequest, console: Console) -> int:
    """Execute the runs of a sweep that are not finished yet, and print a comparison of the results.

    Returns the exit code: 0 if all runs are finished, 1 if any has failed or was stopped.

    Raises:
        UserError: for overrides that do not compose or cannot be searched, before any run has started.
        StoppedError: if a signal has stopped the sweep.
    """
    settings = request.settings
    runs = list_runs(request, console)
    print_plan(runs)
    if settings.dry_run:
        return 0
    with Board(runs.folder, runs.state, console) as live_board:
        if settings.search == "grid":
            run_queue(TrialQueue(runs, live_board))
        else:
            search(runs, live_board)
        if settings.seeds and not (settings.fail_fast and runs.state.entries_with("failed")):
            runs.state.to_come = 0
            runs.add_all(runs.best_with_seeds(), SEEDS)
            run_queue(TrialQueue(runs, live_board))
    return print_results(runs)


def list_runs(request: SweepRequest, console: Console) -> "Runs":
    """The runs of a sweep before any is executed: all combinations of a grid. A search has none yet, only its spaces.

    Raises:
        UserError: for overrides that do not compose or cannot be searched, or if Optuna is not installed.
    """
    if request.settings.search == "optuna":
        extras.require("sweep.search=optuna", "sweep")
    runs = Runs(request, console)
    if request.settings.search == "grid":
        runs.add_grids()
    return runs


class Runs:
    """The runs of a sweep: a trial and an entry of the sweep's state for each name of a run's folder."""

    def __init__(self, request: SweepRequest, console: Console) -> None:
        settings = request.settings
        self.request, self.console = request, console
        # The search spaces by the names of the grids.
        grids, loader = settings.grids or {}, request.config_loader
        self.spaces = trials.spaces(request.arguments, request.params, grids, settings.only, loader)
        digest = trials.identity(self.spaces, settings.seeds, settings.search, settings.sampler_seed)
        self.folder = request.root / board.FOLDER / f"{settings.name}-{digest}"
        self.state = SweepState(self.folder.name, request.command, str(request.root), settings.jobs)
        self.trials: dict[str, Trial] = {}
        self.entries: dict[str, Entry] = {}
        # The grid of each run that one has asked for, by the name of its folder; the first one, if several have.
        self.grids: dict[str, str] = {}
        self.folders = RunFolders()

    def add_grids(self) -> None:
        """Add the runs of all grids."""
        by_overrides: dict[Overrides, str] = {}
        for grid, space in self.spaces.items():
            for overrides in trials.combinations(space):
                by_overrides.setdefault(overrides, grid)
        self.add_all(list(by_overrides), SEARCH)
        for trial in self.trials.values():
            self.grids[trial.name] = by_overrides[trial.overrides]

    def add_all(self, runs: Sequence[Overrides], stage: str) -> None:
        """Add several runs, with a progress bar if there are many."""
        is_short = len(runs) < _PROGRESS_BAR_FROM
        for overrides in track(runs, "composing", console=self.console, transient=True, disable=is_short):
            self.add(overrides, stage)

    def add(self, overrides: Overrides, stage: str) -> Trial:
        """Add a run. A known run moves to the given stage; a finished run keeps its result.

        A run whose data cannot be loaded is added as failed.

        Raises:
            UserError: if the overrides do not compose.
        """
        config = self.config(overrides)
        if isinstance(config.logger, WandbConfig) and config.logger.group is None:
            config = replace(config, logger=replace(config.logger, group=self.folder.name))
        message, record = None, None
        try:
            # The processes of the run load the commit for which the run is named.
            config = self.folders.resolve(config)
            name = self.folders(config).name
            record = self.finished_record(Trial(overrides, config, name))
        except UserError as error:
            message, name = str(error), f"not-started-{len(self.entries) + 1}"
        trial = self.trials.setdefault(name, Trial(overrides, config, name))
        if name not in self.entries:
            self.entries[name] = board.make_entry(trial, stage)
            self.state.entries.append(self.entries[name])
        entry = self.entries[name]
        entry.stage = stage
        if record is not None:
            entry.apply_record(record)
        if message is not None:
            entry.status, entry.error = "failed", message
        return trial

    def name(self, overrides: Overrides) -> str:
        """The name of the run with these overrides; the overrides themselves if its data cannot be loaded."""
        try:
            return self.folders(self.config(overrides)).name
        except UserError:
            return " ".join(overrides)

    def config(self, overrides: Overrides) -> Config:
        """Compose the config of a run, and resolve its precision unless a launcher executes the runs elsewhere.

        Raises:
            UserError: if a launcher would have to choose the precision, which is part of the name of a run.
        """
        config = schema.load(self.request.compose(overrides))
        if self.request.launcher is None:
            return resolve_precision(config)
        if config.trainer.precision == "auto":
            raise UserError(
                "trainer.precision=auto: the jobs of a launcher may run on another machine than this; name the "
                "precision, for example trainer.precision=bf16-mixed"
            )
        return config

    def finished_record(self, trial: Trial) -> RunRecord | None:
        """The record of a trial that is finished and need not be executed again; None if there is none.

        Raises:
            UserError: if the folder holds a result that cannot be used.
        """
        return None if trial.config.run.overwrite else finished_run(self.request.root / trial.name, trial.config)

    def sample_config(self) -> Config:
        """A config with only the values that are not swept over; raises a `UserError` if its data cannot be loaded."""
        space = next(iter(self.spaces.values()))
        fixed = tuple(override.input_line or "" for override in space.values() if not override.is_sweep_override())
        config = self.config(fixed)
        self.folders(config)
        return config

    def best_with_seeds(self) -> list[Overrides]:
        """The overrides of the best finished run of each task, model, method and grid, with each of `sweep.seeds`."""
        best: dict[tuple[str, ...], Entry] = {}
        for entry in self.state.entries_with("finished"):
            key = self.compared_with(entry)
            if key not in best or entry.rank > best[key].rank:
                best[key] = entry
        seeds = self.request.settings.seeds
        return [trials.with_seed(tuple(entry.overrides), seed) for entry in best.values() for seed in seeds]

    def compared_with(self, entry: Entry) -> tuple[str, ...]:
        """Task, model, method and grid: the best of the runs that have these in common is repeated with more seeds."""
        return (*entry.group, self.grids.get(entry.name, ""))

    def record(self, entry: Entry) -> RunRecord:
        """The record of a run that has ended."""
        return results.read(self.request.root / entry.name)


class TrialQueue:
    """Supplies the waiting runs in their order and reports their results to the board; see `pool.TrialSource`.

    A run whose folder another process has locked has the status `elsewhere` until the lock is free. Then the result of
    the other process counts, or the run is executed here if the other process has not finished it.
    """

    def __init__(self, runs: Runs, live_board: Board) -> None:
        self.runs, self.board = runs, live_board
        self._checked = 0.0

    def next(self) -> Trial | None:
        for entry in self.runs.state.entries_with("waiting"):
            trial = self.runs.trials[entry.name]
            if self._is_elsewhere(entry):
                self.set_aside(trial)
            elif not self._take_result(trial):
                return trial
        return None

    def is_waiting(self) -> bool:
        return bool(self.runs.state.entries_with("elsewhere"))

    def set_aside(self, trial: Trial) -> None:
        self.board.set_status(self.runs.entries[trial.name], "elsewhere")

    def _is_elsewhere(self, entry: Entry) -> bool:
        return is_locked(self.runs.request.root / entry.name)

    def _take_result(self, trial: Trial) -> bool:
        """Report the result of a trial that another process has finished; returns whether there is one."""
        try:
            outcome: RunRecord | UserError | None = self.runs.finished_record(trial)
        except UserError as error:
            outcome = error
        if outcome is not None:
            self.ended(trial, outcome)
        return outcome is not None

    def started(self, trial: Trial, log: Path | None) -> None:
        self.board.started(self.runs.entries[trial.name], log)

    def ended(self, trial: Trial, outcome: RunRecord | UserError, status: str | None = None) -> None:
        self.board.ended(self.runs.entries[trial.name], outcome, status)

    def tick(self) -> None:
        if time.monotonic() - self._checked >= CHECK_SECONDS:
            self._checked = time.monotonic()
            for entry in self.runs.state.entries_with("elsewhere"):
                if not self._is_elsewhere(entry):
                    self.board.set_status(entry, "waiting")
        self.board.tick()

    def warn(self, message: str) -> None:
        self.runs.console.out(f"warning: {message}", highlight=False)


class SearchQueue(TrialQueue):
    """Supplies the trials that Optuna suggests and reports their results to Optuna and the board."""

    def __init__(self, runs: Runs, live_board: Board, study: "Study") -> None:
        super().__init__(runs, live_board)
        self._study = study
        self._numbers: dict[str, int] = {}

    def next(self) -> Trial | None:
        while (trial := super().next()) is None:
            suggestion = self._study.ask()
            self.runs.state.to_come = self._study.to_come()
            if suggestion is None:
                return None
            self._add(*suggestion)
        return replace(trial, study=self._study.trial_address(self._numbers[trial.name]))

    def _add(self, number: int, overrides: Overrides) -> None:
        """Add the run of a suggested trial to the waiting ones, or report its outcome to Optuna if it has one."""
        entry = self.runs.entries[self.runs.add(overrides, SEARCH).name]
        self.runs.grids.setdefault(entry.name, self._study.grid(number))
        if entry.status in ("waiting", "stopped"):
            entry.status = "waiting"
            self._numbers[entry.name] = number
        else:
            # The run was finished before the search began, or its data cannot be loaded.
            has_record = entry.status in ("finished", "pruned")
            self._study.tell(number, self.runs.record(entry) if has_record else UserError(entry.error or entry.status))

    def ended(self, trial: Trial, outcome: RunRecord | UserError, status: str | None = None) -> None:
        number = self._numbers.pop(trial.name)
        if status == "stopped":
            self._study.release(number)
        else:
            self._study.tell(number, outcome)
        super().ended(trial, outcome, status)


def search(runs: Runs, live_board: Board) -> None:
    """Execute the trials of an Optuna search; the results of earlier calls count.

    Raises:
        UserError: if a finished trial has no run any more, as its name has changed with the model or the data.
    """
    # Optuna takes seconds to import, and a grid does not need it.
    from istar.sweeps.study import Study

    with closing(Study(runs.request.settings, runs.spaces, runs.folder, runs.name)) as study:
        for number, overrides in study.ended_trials():
            trial = runs.add(overrides, SEARCH)
            entry = runs.entries[trial.name]
            runs.grids.setdefault(entry.name, study.grid(number))
            if entry.status == "waiting":
                if not (runs.request.root / entry.name / results.RESULT).exists():
                    raise UserError(
                        f"{runs.folder} has a finished trial whose run {entry.name} does not exist, because its folder "
                        "is gone or the model or the data have changed; choose another sweep.name to search anew, or "
                        "the earlier commit of a hub model with model.revision"
                    )
                entry.apply_record(runs.record(entry))
        runs.state.to_come = study.to_come()
        run_queue(SearchQueue(runs, live_board, study))


def run_queue(queue: TrialQueue) -> None:
    """Execute the trials of a queue on this machine, or in batches through the launcher, until there are no more."""
    request = queue.runs.request
    settings = request.settings
    if request.launcher is None:
        pool.run_trials(queue, settings, queue.runs.folder / "logs", request.environment)
        return
    # A grid is launched as a whole; a search in batches, because later trials depend on earlier results.
    limit = settings.jobs if isinstance(queue, SearchQueue) else math.inf
    while True:
        batch: list[Trial] = []
        while len(batch) < limit and (trial := queue.next()) is not None:
            queue.started(trial, None)
            batch.append(trial)
        if not batch and not queue.is_waiting():
            return
        if batch:
            with queue.board.ticking():
                outcomes = request.launcher([_launcher_overrides(trial) for trial in batch])
            for trial, outcome in zip(batch, outcomes, strict=True):
                if isinstance(outcome, LockedError):
                    queue.set_aside(trial)
                else:
                    queue.ended(trial, outcome, "stopped" if isinstance(outcome, StoppedError) else None)
        else:
            time.sleep(CHECK_SECONDS)
        queue.tick()


def _launcher_overrides(trial: Trial) -> Overrides:
    """The overrides of a trial, with those whose values only the config of this process has."""
    logger = trial.config.logger
    group = (f"logger.group={logger.group}",) if isinstance(logger, WandbConfig) else ()
    study = (f"sweep.trial='{trial.study}'",) if trial.study else ()
    # The commit of a hub model. Quotes, because a hash may look like a number.
    revision = (f"model.revision='{trial.config.model.revision}'",) if trial.config.model.revision else ()
    return (*trial.overrides, *group, *study, *revision)


def print_plan(runs: Runs) -> None:
    """Print the number of runs and their estimated duration; in a dry run also the overrides of each run."""
    settings, state = runs.request.settings, runs.state
    waiting = state.entries_with("waiting")
    planned = [runs.trials[entry.name].config for entry in waiting]
    names = {runs.compared_with(entry): entry.name for entry in state.entries}
    parts = [f"{state.name}: {len(state.entries)} runs, {len(waiting)} of them to do"]
    if settings.search == "optuna":
        parts = [f"{state.name}: a search of {settings.trials} trials"]
        planned = [runs.sample_config()] * settings.trials
    if settings.seeds:
        parts.append(f"then {len(settings.seeds)} seeds of the best of each of {len(names) or 'the'} methods")
        # The search has run the best configuration with its first seed already.
        other_seeds = set(settings.seeds) - {entry.seed for entry in state.entries}
        planned += [runs.trials[name].config for name in names.values() for _ in other_seeds]
        state.to_come = len(names) * len(other_seeds)
    # Finding the finished runs reads every record of the folder, so it is left out if nothing is planned.
    if planned:
        sizes = [(config, runs.folders.size(config)) for config in planned]
        estimate = cost.estimate(sizes, cost.finished_runs(runs.request.root))
        if estimate.seconds is None:
            parts.append(f"duration unknown: {estimate.basis}")
        else:
            state.expected = estimate.seconds / len(planned)
            time = duration(estimate.seconds / settings.jobs)
            parts.append(f"about {time}, {settings.jobs} at a time ({estimate.basis})")
    runs.console.out("; ".join(parts), highlight=False)
    if settings.dry_run:
        for entry in state.entries:
            runs.console.out(f"  {entry.status}: {' '.join(entry.overrides)}", highlight=False)


def print_results(runs: Runs) -> int:
    """Write and print the comparison of the finished runs, list the failed runs, and return the exit code."""
    console, records = runs.console, [runs.record(entry) for entry in runs.state.entries_with("finished")]
    if records:
        configurations = sum(map(len, run_tables.group_by_task(records).values()))
        if configurations > _MAX_COMPARED or runs.request.settings.seeds:
            records = best_configurations(records, runs.grids)
        write_text(runs.folder / "comparison.md", run_tables.format_comparison_as_markdown(records))
        for suffix in ("png", "svg"):
            comparison.draw_comparison(records, runs.folder / f"comparison.{suffix}")
        console.print(run_tables.build_comparison_table(records))
        console.out(f"{runs.folder / 'comparison.png'} and .svg, .md", highlight=False)
    count = len(runs.state.entries)
    failed, stopped = runs.state.entries_with("failed"), runs.state.entries_with("waiting", "stopped", "elsewhere")
    if failed:
        console.out(f"{len(failed)} of {count} runs failed; the same command runs them again:")
        for entry in failed:
            console.out(f"  {' '.join(entry.overrides)}: {entry.error}", highlight=False)
    elif stopped:
        console.out(f"{len(stopped)} of {count} runs are not done; the same command goes on with them")
    return 1 if failed or stopped else 0


def best_configurations(records: Sequence[RunRecord], grids: Mapping[str, str]) -> list[RunRecord]:
    """The runs, with all seeds, of the best configuration of each task, model, penalty and grid.

    That is the configuration with the most seeds, and among several the one with the highest mean selection value.
    `grids` has the name of the grid by the name of a run; a configuration is of the grid of any of its runs.
    """

    def rank(runs: Sequence[RunRecord]) -> tuple[int, float]:
        return run_tables.selection_sort_key([run.selection_merit for run in runs])

    best: dict[tuple[str, ...], list[RunRecord]] = {}
    for (task, model), configurations in run_tables.group_by_task(records).items():
        for runs in configurations:
            grid = next((grids[run.name] for run in runs if run.name in grids), "")
            key = (task, model, runs[0].config["reg"]["name"], grid)
            if key not in best or rank(runs) > rank(best[key]):
                best[key] = runs
    return [record for runs in best.values() for record in runs]
