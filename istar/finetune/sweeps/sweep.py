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

from istar.drawing.terminal import format_duration
from istar.errors import LockedError, StoppedError, UserError
from istar.files.outputs import Output
from istar.files.writing import is_locked
from istar.finetune.runs import extras
from istar.finetune.runs.finished_runs import read_finished_run
from istar.finetune.runs.identify import RunFolders, resolve_precision
from istar.finetune.sweeps import comparison_figure, comparison_table, cost, live_table, pool, trials
from istar.finetune.sweeps.live_table import Board, SweepEntry, SweepState
from istar.finetune.sweeps.trials import Overrides, Trial
from istar.records import results
from istar.records.config import Config, SweepConfig, WandbConfig, schema
from istar.records.results import RunRecord
from istar.records.run_rows import group_by_task, selection_sort_key

if TYPE_CHECKING:
    from istar.finetune.sweeps.study import Study

SEARCH_STAGE, SEEDS_STAGE = "search", "seeds"
_MAX_COMPARED_CONFIGURATIONS = 24
"""Number of configurations that fit into a table and a figure. Of more, only the best ones of each method are shown."""
_MIN_RUNS_FOR_PROGRESS_BAR = 50  # number of runs from which a progress bar is shown while their configs are composed

CHECK_INTERVAL_SECONDS = 1.0
"""How often a sweep checks whether the runs that other processes execute have ended."""

Launcher = Callable[[Sequence[Overrides]], Sequence[RunRecord | UserError]]
"""Type of a function that executes several runs elsewhere, as Hydra's launchers do.

It takes the overrides of each run and returns the record or the error of each.
"""


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


def run_sweep(request: SweepRequest, console: Console) -> int:
    """Execute the runs of a sweep that are not finished yet, compare all results, and return the exit code.

    The exit code is 0 if all runs are finished, and 1 if any has failed or was stopped.

    Raises:
        UserError: for overrides that do not compose or cannot be searched, before any run has started.
        StoppedError: if a signal has stopped the sweep.
    """
    settings = request.settings
    runs = list_runs(request, console)
    print_plan(runs)
    if settings.dry_run:
        return 0
    runs.output.check(() if runs.output.has_manifest else runs.output.list_names())
    runs.output.write({})
    with Board(runs.folder, runs.state, console) as live_board:
        if settings.search == "grid":
            run_queue(TrialQueue(runs, live_board))
        else:
            run_search(runs, live_board)
        if settings.seeds and not (settings.fail_fast and runs.state.entries_with("failed")):
            runs.state.to_come = 0
            runs.add_runs(runs.list_repetitions_of_best(), SEEDS_STAGE)
            run_queue(TrialQueue(runs, live_board))
    return print_results(runs)


def list_runs(request: SweepRequest, console: Console) -> "SweepRuns":
    """List the runs of a sweep without executing any: all combinations of a grid; a search has none before it starts.

    Raises:
        UserError: for overrides that do not compose or cannot be searched, or if Optuna is not installed.
    """
    if request.settings.search == "optuna":
        extras.require("sweep.search=optuna", "sweep")
    runs = SweepRuns(request, console)
    if request.settings.search == "grid":
        runs.add_grids()
    return runs


class SweepRuns:
    """The runs of a sweep: for the name of each run, a trial and an entry of the sweep's state."""

    def __init__(self, request: SweepRequest, console: Console) -> None:
        settings = request.settings
        self.request, self.console = request, console
        grids, loader = settings.grids or {}, request.config_loader
        self.space_by_grid = trials.make_search_spaces(request.arguments, request.params, grids, settings.only, loader)
        sweep_hash = trials.sweep_hash(self.space_by_grid, settings.seeds, settings.search, settings.sampler_seed)
        self.folder = request.root / live_table.SWEEPS_FOLDER / f"{settings.name}-{sweep_hash}"
        self.output = Output(self.folder, "sweep", "", "choose another sweep.name")
        self.state = SweepState(self.folder.name, request.command, str(request.root), settings.jobs)
        self.trial_by_name: dict[str, Trial] = {}
        self.entry_by_name: dict[str, SweepEntry] = {}
        # Name of the grid that contains each run, by the name of the run; the first grid if several contain the run.
        self.grid_by_run: dict[str, str] = {}
        self.run_folders = RunFolders()

    def add_grids(self) -> None:
        """Add the runs of all grids."""
        grid_by_overrides: dict[Overrides, str] = {}
        for grid, space in self.space_by_grid.items():
            for overrides in trials.list_combinations(space):
                grid_by_overrides.setdefault(overrides, grid)
        self.add_runs(list(grid_by_overrides), SEARCH_STAGE)
        for trial in self.trial_by_name.values():
            self.grid_by_run[trial.name] = grid_by_overrides[trial.overrides]

    def add_runs(self, runs: Sequence[Overrides], stage: str) -> None:
        """Add the runs with the given overrides, with a progress bar if there are many."""
        is_short = len(runs) < _MIN_RUNS_FOR_PROGRESS_BAR
        for overrides in track(runs, "composing", console=self.console, transient=True, disable=is_short):
            self.add_run(overrides, stage)

    def add_run(self, overrides: Overrides, stage: str) -> Trial:
        """Add the run with the given overrides and return its trial; a known run is moved to the given stage.

        If the run is finished, its result is taken over. A run whose data cannot be loaded is added as failed.

        Raises:
            UserError: if the overrides do not compose.
        """
        config = self.compose_config(overrides)
        if isinstance(config.logger, WandbConfig) and config.logger.group is None:
            config = replace(config, logger=replace(config.logger, group=self.folder.name))
        error_message, record = None, None
        try:
            # The processes of the run load the commit for which the run is named.
            config = self.run_folders.resolve(config)
            name = self.run_folders.find(config).name
            record = self.read_finished_record(Trial(overrides, config, name))
        except UserError as error:
            error_message, name = str(error), f"not-started-{len(self.entry_by_name) + 1}"
        trial = self.trial_by_name.setdefault(name, Trial(overrides, config, name))
        if name not in self.entry_by_name:
            self.entry_by_name[name] = live_table.make_entry(trial, stage)
            self.state.entries.append(self.entry_by_name[name])
        entry = self.entry_by_name[name]
        entry.stage = stage
        if record is not None:
            entry.apply_record(record)
        if error_message is not None:
            entry.status, entry.error = "failed", error_message
        return trial

    def run_name(self, overrides: Overrides) -> str:
        """Return the name of the run with these overrides, or the overrides if its data cannot be loaded."""
        try:
            return self.run_folders.find(self.compose_config(overrides)).name
        except UserError:
            return " ".join(overrides)

    def compose_config(self, overrides: Overrides) -> Config:
        """Compose the config of a run from its overrides, and resolve its precision if it runs on this machine.

        Raises:
            UserError: if a launcher executes the runs and `trainer.precision` is `auto`. The precision is part of a
                run's name, but this machine cannot choose it for another one.
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

    def read_finished_record(self, trial: Trial) -> RunRecord | None:
        """Read the record of a trial that is finished and need not be executed again, or return None.

        Raises:
            UserError: if the folder holds a result that cannot be used.
        """
        return read_finished_run(self.request.root / trial.name, trial.config)

    def compose_sample_config(self) -> Config:
        """Compose a config with only the overrides that are not swept over, as an example of the runs of a search.

        Raises:
            UserError: if the data of the config cannot be loaded.
        """
        space = next(iter(self.space_by_grid.values()))
        fixed_overrides = tuple(
            override.input_line or "" for override in space.values() if not override.is_sweep_override()
        )
        config = self.compose_config(fixed_overrides)
        self.run_folders.find(config)
        return config

    def list_repetitions_of_best(self) -> list[Overrides]:
        """List the overrides by which the best run of each selection group is repeated with each of `sweep.seeds`."""
        best_by_group: dict[tuple[str, ...], SweepEntry] = {}
        for entry in self.state.entries_with("finished"):
            key = self.selection_group(entry)
            if key not in best_by_group or entry.selection_merit > best_by_group[key].selection_merit:
                best_by_group[key] = entry
        seeds = self.request.settings.seeds
        return [trials.replace_seed(tuple(entry.overrides), seed) for entry in best_by_group.values() for seed in seeds]

    def selection_group(self, entry: SweepEntry) -> tuple[str, ...]:
        """Return task, model, method and grid of a run; the best run of each such group is repeated with more seeds."""
        return (*entry.group, self.grid_by_run.get(entry.name, ""))

    def read_record(self, entry: SweepEntry) -> RunRecord:
        """Read the record of a run that has ended."""
        return results.read(self.request.root / entry.name)


class TrialQueue:
    """Supplies the waiting runs in their order and reports their results to the board, as a `pool.TrialSource`.

    A run whose folder another process has locked has the status `elsewhere` until the lock is free. Then the result of
    the other process is taken over or, if the other process has not finished the run, it is executed here.
    """

    def __init__(self, runs: SweepRuns, live_board: Board) -> None:
        self.runs, self.board = runs, live_board
        self._checked_at = 0.0

    def next_trial(self) -> Trial | None:
        """Return the next waiting trial that no other process executes or has finished, or None if there is none."""
        for entry in self.runs.state.entries_with("waiting"):
            trial = self.runs.trial_by_name[entry.name]
            if self._is_elsewhere(entry):
                self.set_aside(trial)
            elif not self._report_if_finished(trial):
                return trial
        return None

    def is_waiting(self) -> bool:
        """Return whether other processes still execute some of the runs."""
        return bool(self.runs.state.entries_with("elsewhere"))

    def set_aside(self, trial: Trial) -> None:
        """Record that another process executes the run of a trial."""
        self.board.set_status(self.runs.entry_by_name[trial.name], "elsewhere")

    def _is_elsewhere(self, entry: SweepEntry) -> bool:
        """Return whether another process executes the run, and so holds the lock of its folder."""
        return is_locked(self.runs.request.root / entry.name)

    def _report_if_finished(self, trial: Trial) -> bool:
        try:
            outcome: RunRecord | UserError | None = self.runs.read_finished_record(trial)
        except UserError as error:
            outcome = error
        if outcome is not None:
            self.on_ended(trial, outcome)
        return outcome is not None

    def on_started(self, trial: Trial, log_path: Path | None) -> None:
        """Show on the board that a trial has started, with its output in the file `log_path`."""
        self.board.record_start(self.runs.entry_by_name[trial.name], log_path)

    def on_ended(self, trial: Trial, outcome: RunRecord | UserError, status: str | None = None) -> None:
        """Show the outcome of a trial on the board; `status` is given if it does not follow from the outcome."""
        self.board.record_end(self.runs.entry_by_name[trial.name], outcome, status)

    def tick(self) -> None:
        """Update the board, and check every second whether runs that other processes execute have ended."""
        if time.monotonic() - self._checked_at >= CHECK_INTERVAL_SECONDS:
            self._checked_at = time.monotonic()
            for entry in self.runs.state.entries_with("elsewhere"):
                if not self._is_elsewhere(entry):
                    self.board.set_status(entry, "waiting")
        self.board.tick()


class SearchQueue(TrialQueue):
    """Supplies the trials that Optuna suggests, and reports their results to Optuna and the board."""

    def __init__(self, runs: SweepRuns, live_board: Board, study: "Study") -> None:
        super().__init__(runs, live_board)
        self._study = study
        self._trial_number_by_run: dict[str, int] = {}

    def next_trial(self) -> Trial | None:
        """Return the next waiting trial, or else one that Optuna suggests; None if no more trials are needed."""
        while (trial := super().next_trial()) is None:
            suggestion = self._study.ask()
            self.runs.state.to_come = self._study.num_trials_left()
            if suggestion is None:
                return None
            self._add_suggested_trial(*suggestion)
        return replace(trial, optuna_trial=self._study.trial_address(self._trial_number_by_run[trial.name]))

    def _add_suggested_trial(self, trial_number: int, overrides: Overrides) -> None:
        """Add the run of a trial that Optuna suggests as waiting, or report its outcome if it already has one."""
        entry = self.runs.entry_by_name[self.runs.add_run(overrides, SEARCH_STAGE).name]
        self.runs.grid_by_run.setdefault(entry.name, self._study.grid_of_trial(trial_number))
        if entry.status in ("waiting", "stopped"):
            entry.status = "waiting"
            self._trial_number_by_run[entry.name] = trial_number
        else:
            # The run was finished before the search began, or its data cannot be loaded.
            has_record = entry.status in ("finished", "pruned")
            self._study.tell(
                trial_number, self.runs.read_record(entry) if has_record else UserError(entry.error or entry.status)
            )

    def on_ended(self, trial: Trial, outcome: RunRecord | UserError, status: str | None = None) -> None:
        """Report the outcome of a trial to Optuna and to the board; a stopped trial is released instead."""
        trial_number = self._trial_number_by_run.pop(trial.name)
        if status == "stopped":
            self._study.release(trial_number)
        else:
            self._study.tell(trial_number, outcome)
        super().on_ended(trial, outcome, status)


def run_search(runs: SweepRuns, live_board: Board) -> None:
    """Execute the trials of an Optuna search, which includes the results of earlier calls.

    Raises:
        UserError: if the run of a finished trial no longer exists, for example because its name has changed with the
            model or the data.
    """
    # Optuna takes seconds to import, and a grid does not need it.
    from istar.finetune.sweeps.study import Study

    with closing(Study(runs.request.settings, runs.space_by_grid, runs.folder, runs.run_name)) as study:
        for trial_number, overrides in study.ended_trials():
            trial = runs.add_run(overrides, SEARCH_STAGE)
            entry = runs.entry_by_name[trial.name]
            runs.grid_by_run.setdefault(entry.name, study.grid_of_trial(trial_number))
            if entry.status == "waiting":
                if not (runs.request.root / entry.name / results.RESULT).exists():
                    raise UserError(
                        f"{runs.folder} has a finished trial whose run {entry.name} does not exist, because its folder "
                        "is gone or the model or the data have changed; choose another sweep.name to search anew, or "
                        "the earlier commit of a hub model with model.revision"
                    )
                entry.apply_record(runs.read_record(entry))
        runs.state.to_come = study.num_trials_left()
        run_queue(SearchQueue(runs, live_board, study))


def run_queue(queue: TrialQueue) -> None:
    """Execute the trials of a queue on this machine, or in batches through the launcher, until there are no more."""
    request = queue.runs.request
    settings = request.settings
    if request.launcher is None:
        pool.run_trials(queue, settings, queue.runs.folder / "logs", request.environment)
        return
    # A grid is launched as a whole; a search in batches, because later trials depend on earlier results.
    max_batch_size = settings.jobs if isinstance(queue, SearchQueue) else math.inf
    while True:
        batch: list[Trial] = []
        while len(batch) < max_batch_size and (trial := queue.next_trial()) is not None:
            queue.on_started(trial, None)
            batch.append(trial)
        if not batch and not queue.is_waiting():
            return
        if batch:
            with queue.board.ticking():
                outcomes = request.launcher([_make_launcher_overrides(trial) for trial in batch])
            for trial, outcome in zip(batch, outcomes, strict=True):
                if isinstance(outcome, LockedError):
                    queue.set_aside(trial)
                else:
                    queue.on_ended(trial, outcome, "stopped" if isinstance(outcome, StoppedError) else None)
        else:
            time.sleep(CHECK_INTERVAL_SECONDS)
        queue.tick()


def _make_launcher_overrides(trial: Trial) -> Overrides:
    """Return the overrides with which a launcher executes a trial, including values that only this process has set."""
    logger = trial.config.logger
    logger_overrides = (f"logger.group={logger.group}",) if isinstance(logger, WandbConfig) else ()
    address_overrides = (f"sweep.trial='{trial.optuna_trial}'",) if trial.optuna_trial else ()
    # The commit of a hub model. Quotes, because a hash may look like a number.
    revision_overrides = (f"model.revision='{trial.config.model.revision}'",) if trial.config.model.revision else ()
    return (*trial.overrides, *logger_overrides, *address_overrides, *revision_overrides)


def print_plan(runs: SweepRuns) -> None:
    """Print the number of runs and their estimated duration; in a dry run also the overrides of each run."""
    settings, state = runs.request.settings, runs.state
    waiting_entries = state.entries_with("waiting")
    planned_configs = [runs.trial_by_name[entry.name].config for entry in waiting_entries]
    run_name_by_group = {runs.selection_group(entry): entry.name for entry in state.entries}
    message_parts = [f"{state.name}: {len(state.entries)} runs, {len(waiting_entries)} of them to do"]
    if settings.search == "optuna":
        message_parts = [f"{state.name}: a search of {settings.trials} trials"]
        planned_configs = [runs.compose_sample_config()] * settings.trials
    if settings.seeds:
        message_parts.append(
            f"then {len(settings.seeds)} seeds of the best of each of {len(run_name_by_group) or 'the'} methods"
        )
        # The search has run the best configuration with its first seed already.
        other_seeds = set(settings.seeds) - {entry.seed for entry in state.entries}
        planned_configs += [runs.trial_by_name[name].config for name in run_name_by_group.values() for _ in other_seeds]
        state.to_come = len(run_name_by_group) * len(other_seeds)
    # Reading the records of all finished runs takes time, so it is skipped if nothing is planned.
    if planned_configs:
        configs_with_sizes = [(config, runs.run_folders.num_training_examples(config)) for config in planned_configs]
        estimate = cost.estimate_duration(configs_with_sizes, cost.read_finished_runs(runs.request.root))
        if estimate.seconds is None:
            message_parts.append(f"duration unknown: {estimate.basis}")
        else:
            state.expected = estimate.seconds / len(planned_configs)
            duration_text = format_duration(estimate.seconds / settings.jobs)
            message_parts.append(f"about {duration_text}, {settings.jobs} at a time ({estimate.basis})")
    runs.console.out("; ".join(message_parts), highlight=False)
    if settings.dry_run:
        for entry in state.entries:
            runs.console.out(f"  {entry.status}: {' '.join(entry.overrides)}", highlight=False)


def print_results(runs: SweepRuns) -> int:
    """Write and print the comparison of the finished runs, list the failed runs, and return the exit code."""
    console, records = runs.console, [runs.read_record(entry) for entry in runs.state.entries_with("finished")]
    if records:
        num_configurations = sum(map(len, group_by_task(records).values()))
        if num_configurations > _MAX_COMPARED_CONFIGURATIONS or runs.request.settings.seeds:
            records = select_best_configurations(records, runs.grid_by_run)
        markdown = comparison_table.format_comparison_as_markdown(records).encode()
        runs.output.write({"comparison.md": markdown, **comparison_figure.draw_comparison(records)})
        console.print(comparison_table.build_comparison_table(records))
        console.out(f"{runs.folder / 'comparison.png'} and .svg, .md", highlight=False)
    num_runs = len(runs.state.entries)
    failed_entries = runs.state.entries_with("failed")
    unfinished_entries = runs.state.entries_with("waiting", "stopped", "elsewhere")
    if failed_entries:
        console.out(f"{len(failed_entries)} of {num_runs} runs failed; the same command runs them again:")
        for entry in failed_entries:
            console.out(f"  {' '.join(entry.overrides)}: {entry.error}", highlight=False)
    elif unfinished_entries:
        console.out(f"{len(unfinished_entries)} of {num_runs} runs are not done; run the same command to resume them")
    return 1 if failed_entries or unfinished_entries else 0


def select_best_configurations(records: Sequence[RunRecord], grid_by_run: Mapping[str, str]) -> list[RunRecord]:
    """Return the runs, with all seeds, of the best configuration of each task, model, penalty and grid.

    That is the configuration with the most seeds and, among several, the one with the highest mean selection value.
    `grid_by_run` has the name of the grid by the name of a run; a configuration belongs to the grid of any of its
    runs.
    """

    def selection_rank(runs: Sequence[RunRecord]) -> tuple[int, float]:
        """Return a rank that is higher for better configurations, given the runs of a configuration."""
        return selection_sort_key([run.selection_merit for run in runs])

    best_by_key: dict[tuple[str, ...], list[RunRecord]] = {}
    for (task, model), configurations in group_by_task(records).items():
        for runs in configurations:
            grid = next((grid_by_run[run.name] for run in runs if run.name in grid_by_run), "")
            key = (task, model, runs[0].config["reg"]["name"], grid)
            if key not in best_by_key or selection_rank(runs) > selection_rank(best_by_key[key]):
                best_by_key[key] = runs
    return [record for runs in best_by_key.values() for record in runs]
