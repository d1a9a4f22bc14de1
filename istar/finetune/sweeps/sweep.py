"""Runs a sweep for `train.py -m`: executes the missing runs and compares the results."""

import logging
import math
import shlex
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from istar.drawing.pictures import render_files
from istar.drawing.terminal import with_wide_text
from istar.errors import LockedError, StoppedError, UserError
from istar.files.writing import is_locked, lock_folder
from istar.finetune.config import WandbConfig
from istar.finetune.execute.identify import read_finished_run
from istar.finetune.sweeps import comparison, pool
from istar.finetune.sweeps.comparison import ConfigurationsByTask
from istar.finetune.sweeps.live_table import Board, SweepEntry, format_best_line
from istar.finetune.sweeps.planned_runs import SweepRequest, SweepRuns, list_runs
from istar.finetune.sweeps.sweep_plan import make_plan, print_plan
from istar.finetune.sweeps.trials import Overrides, Trial
from istar.runs.record import CONFIG, RESULT, RunRecord, read_result
from istar.runs.run_rows import describe_smoke_runs, group_by_task, selection_sort_key

if TYPE_CHECKING:
    from istar.finetune.sweeps.study import Study

log = logging.getLogger(__name__)

_MAX_COMPARED_CONFIGURATIONS = 24
"""Number of configurations that fit into a table and a figure. Of more, only the best ones of each method are shown."""

CHECK_INTERVAL_SECONDS = 1.0
"""Seconds between two checks whether runs in other processes have ended."""


def run_sweep(request: SweepRequest, console: Console) -> int:
    """Execute the runs of a sweep that are not finished yet, compare all results, and return the exit code.

    The exit code is 0 if all runs are finished, and 1 if any has failed or was stopped. In a dry run, it is 1 if any
    run cannot be started.

    Raises:
        UserError: for overrides that do not compose or cannot be searched, before any run has started.
        LockedError: if another process writes to the folder of the sweep for 10 seconds.
        StoppedError: if a signal has stopped the sweep.
    """
    settings = request.settings
    runs = list_runs(request, console)
    plan = make_plan(runs)
    print_plan(runs, plan)
    runs.state.to_come, runs.state.expected = plan.num_repetitions, plan.seconds_per_run
    if settings.dry_run:
        return 1 if runs.state.entries_with("failed") else 0
    # Several commands may share a search and its folder.
    with lock_folder(runs.folder):
        runs.output.check(() if runs.output.has_manifest else runs.output.list_names())
        runs.output.write({})
    with Board(runs.folder, runs.state, console) as live_board:
        if settings.search == "grid":
            run_queue(TrialQueue(runs, live_board))
        else:
            run_search(runs, live_board)
        if settings.seeds and not (settings.fail_fast and runs.state.entries_with("failed")):
            runs.state.to_come = 0
            runs.add_runs(runs.list_repetitions_of_best())
            run_queue(TrialQueue(runs, live_board))
    return print_results(runs)


class TrialQueue:
    """Supplies the waiting runs in their order and reports their results to the board.

    If another process has locked a run's folder, the run has the status `elsewhere` until the lock is free. Then the
    other process's result is taken over or, if the other process has not finished the run, it is executed here.
    """

    def __init__(self, runs: SweepRuns, live_board: Board) -> None:
        self.runs, self.board = runs, live_board
        self._checked_at = 0.0

    def next_trial(self) -> Trial | None:
        """Return the next waiting trial that no other process executes or has finished, or None."""
        for entry in self.runs.state.entries_with("waiting"):
            trial = self.runs.planned[entry.name]
            if self._is_elsewhere(entry):
                self.set_aside(trial)
            elif not self._report_if_finished(trial):
                return trial
        return None

    def is_waiting(self) -> bool:
        """Return whether other processes execute trials, so that `next_trial` may return another one later."""
        return bool(self.runs.state.entries_with("elsewhere"))

    def set_aside(self, trial: Trial) -> None:
        self.board.set_status(trial.entry, "elsewhere")

    def _is_elsewhere(self, entry: SweepEntry) -> bool:
        return is_locked(self.runs.request.root / entry.name)

    def _read_finished(self, trial: Trial) -> RunRecord | None:
        return read_finished_run(self.runs.request.root / trial.name, trial.config)

    def _report_if_finished(self, trial: Trial) -> bool:
        try:
            outcome: RunRecord | UserError | None = self._read_finished(trial)
        except UserError as error:
            outcome = error
        if outcome is not None:
            self.on_ended(trial, outcome)
        return outcome is not None

    def report_finished(self, batch: Iterable[Trial]) -> None:
        """Report the running trials that have finished, while a launcher still executes the others."""
        for trial in batch:
            with suppress(UserError):  # the launcher returns it
                if trial.entry.status == "running" and (record := self._read_finished(trial)) is not None:
                    self.on_ended(trial, record)

    def on_started(self, trial: Trial, log_path: Path | None) -> None:
        self.board.record_start(trial.entry, log_path)

    def on_ended(self, trial: Trial, outcome: RunRecord | UserError, status: str | None = None) -> None:
        """Record the outcome of a trial; `status` is given if it does not follow from the outcome."""
        self.board.record_end(trial.entry, outcome, status)

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
        trial.optuna_trial = self._study.trial_address(self._trial_number_by_run[trial.name])
        return trial

    def is_waiting(self) -> bool:
        return super().is_waiting() or self._study.is_waiting()

    def _add_suggested_trial(self, trial_number: int, overrides: Overrides) -> None:
        """Add a trial that Optuna suggests as waiting, or report its outcome if its run already has one."""
        entry = self.runs.add_run(overrides).entry
        self.runs.assign_grid(entry, self._study.grid_of_trial(trial_number))
        if entry.status in ("waiting", "stopped"):
            entry.status = "waiting"
            self._trial_number_by_run[entry.name] = trial_number
        else:
            # The run was finished before the search began, or its data cannot be loaded.
            has_record, error = entry.status in ("finished", "pruned"), UserError(entry.error or entry.status)
            self._study.tell(trial_number, self.runs.read_record(entry) if has_record else error)

    def on_ended(self, trial: Trial, outcome: RunRecord | UserError, status: str | None = None) -> None:
        """Report the outcome of a trial to Optuna and to the board.

        A stopped trial is released instead. The trial of a killed process stays unfinished, so that a later call
        resumes it; this call does not, because the process may be killed again.
        """
        trial_number = self._trial_number_by_run.pop(trial.name)
        if status == "stopped":
            self._study.release(trial_number)
        elif isinstance(outcome, RunRecord):
            self._study.tell(trial_number, outcome)
        elif self._has_failed(trial, outcome):
            self._study.tell(trial_number, outcome)
            outcome = UserError(f"{outcome}; the same command tries other values")
        super().on_ended(trial, outcome, status)

    def _has_failed(self, trial: Trial, error: UserError) -> bool:
        """Return whether a run has failed by itself; a process that was killed leaves no record of a failure."""
        folder = self.runs.request.root / trial.name
        try:
            return read_result(folder).status == "failed"
        except UserError:
            # Mistakes that are found before the training leave no record either.
            return error.exit_code == UserError.exit_code and not (folder / CONFIG).exists()


def run_search(runs: SweepRuns, live_board: Board) -> None:
    """Execute the trials of an Optuna search, which includes the results of earlier and of concurrent calls.

    Raises:
        UserError: if a finished trial's run is gone, e.g. because its name has changed with the model or the data.
    """
    # Optuna takes seconds to import, and a grid does not need it.
    from istar.finetune.sweeps.study import Study

    with closing(Study(runs.request.settings, runs.space_by_grid, runs.folder, runs.run_name)) as study:
        _add_ended_trials(runs, study)
        runs.state.to_come = study.num_trials_left()
        run_queue(SearchQueue(runs, live_board, study))
        _add_ended_trials(runs, study)


def _add_ended_trials(runs: SweepRuns, study: "Study") -> None:
    for trial_number, overrides in study.ended_trials():
        entry = runs.add_run(overrides).entry
        runs.assign_grid(entry, study.grid_of_trial(trial_number))
        if entry.status == "waiting":
            if not (runs.request.root / entry.name / RESULT).exists():
                raise UserError(
                    f"{runs.folder} has a finished trial, but its run {entry.name} does not exist, because its folder "
                    "is gone or the model or the data have changed; choose another sweep.name for a new search, or "
                    "the earlier commit of a hub model with model.revision"
                )
            entry.apply_record(runs.read_record(entry))


def run_queue(queue: TrialQueue) -> None:
    """Execute the trials of a queue on this machine, or in batches through the launcher, until the queue is empty."""
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
            with queue.board.ticking(partial(queue.report_finished, batch)):
                outcomes = request.launcher([_make_launcher_overrides(trial) for trial in batch])
            for trial, outcome in zip(batch, outcomes, strict=True):
                if trial.entry.status == "finished":
                    continue
                if isinstance(outcome, LockedError):
                    queue.set_aside(trial)
                else:
                    queue.on_ended(trial, outcome, "stopped" if isinstance(outcome, StoppedError) else None)
        else:
            time.sleep(CHECK_INTERVAL_SECONDS)
        queue.tick()


def _make_launcher_overrides(trial: Trial) -> Overrides:
    """Return the overrides of a trial for a launcher, including values that only this process has set."""
    logger = trial.config.logger
    logger_overrides = (f"logger.group={logger.group}",) if isinstance(logger, WandbConfig) else ()
    address_overrides = (f"sweep.trial='{trial.optuna_trial}'",) if trial.optuna_trial else ()
    # The commit of a hub model. Quotes, because a hash may look like a number.
    revision_overrides = (f"model.revision='{trial.config.model.revision}'",) if trial.config.model.revision else ()
    return (*trial.entry.overrides, *logger_overrides, *address_overrides, *revision_overrides)


def print_results(runs: SweepRuns) -> int:
    """Write and print the comparison of the finished runs, list the failed runs, and return the exit code."""
    console, finished = runs.console, [runs.read_record(entry) for entry in runs.state.entries_with("finished")]
    records = [record for record in finished if not record.is_smoke]
    if len(records) < len(finished):
        console.out(describe_smoke_runs(len(finished) - len(records)), highlight=False)
    if records:
        groups: ConfigurationsByTask = group_by_task(records)
        if runs.request.settings.search == "optuna":
            groups = {
                task_and_model: sorted(group, key=lambda trial: selection_sort_key(trial.runs), reverse=True)
                for task_and_model, group in groups.items()
            }
        if sum(map(len, groups.values())) > _MAX_COMPARED_CONFIGURATIONS or runs.request.settings.seeds:
            best_names = {entry.name for best_runs in runs.find_best_configurations() for entry in best_runs}
            groups = {
                task_and_model: [configuration for configuration in group if configuration.runs[0].name in best_names]
                for task_and_model, group in groups.items()
            }
        markdown = comparison.format_comparison_as_markdown(groups).encode()
        contents = {"comparison.md": markdown}
        plot_by_name = {plot.name: plot for plot in comparison.build_comparison_plots(groups)}
        for name, files in render_files(plot_by_name, runs.folder, ("png", "svg")).items():
            contents |= {f"{name}.{suffix}": content for suffix, content in files.items()}
        with lock_folder(runs.folder):
            runs.output.write(contents)
        console.print(with_wide_text(comparison.build_comparison_table(groups)))
        console.out(f"{runs.folder}: {', '.join(contents)}", highlight=False)
        if runs.request.settings.search == "optuna":
            for line in describe_best_trials(runs):
                console.out(line, highlight=False)
    num_runs = len(runs.state.entries)
    failed_entries = runs.state.entries_with("failed")
    unfinished_entries = runs.state.entries_with("waiting", "stopped", "elsewhere")
    # In a search, each error says what the same command does.
    advice = "" if runs.request.settings.search == "optuna" else "; the same command runs them again"
    for is_started, finding in ((False, "could not be started"), (True, f"failed{advice}")):
        entries = [entry for entry in failed_entries if (entry.started is not None) == is_started]
        if entries:
            console.out(f"{len(entries)} of {num_runs} runs {finding}:")
        for entry in entries:
            console.out(f"  {' '.join(entry.overrides)}: {entry.error}", highlight=False)
    if unfinished_entries and not failed_entries:
        console.out(f"{len(unfinished_entries)} of {num_runs} runs are not done; run the same command to resume them")
    return 1 if failed_entries or unfinished_entries else 0


def describe_best_trials(runs: SweepRuns) -> list[str]:
    """Return two lines for each task, model, method and grid: the best trial of a search, and its command."""
    program = runs.request.command.partition(" -")[0]
    lines = []
    for best_runs in runs.find_best_configurations():
        lines.append(f"best trial: {format_best_line(runs.state, best_runs)}; its command:")
        lines.append(f"  {program} {shlex.join(best_runs[0].overrides)}")
    return lines
