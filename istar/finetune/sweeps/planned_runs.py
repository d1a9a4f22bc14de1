"""The runs of a sweep: their configs, names and states, before and while they are executed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from rich.console import Console
from rich.progress import track

from istar.errors import UserError
from istar.files.outputs import Output
from istar.finetune.config import Config, SweepConfig, WandbConfig, schema
from istar.finetune.execute import extras
from istar.finetune.execute.identify import KeyMaker, name_run, read_finished_run
from istar.finetune.execute.precision import choose_precision
from istar.finetune.sweeps import live_table, trials
from istar.finetune.sweeps.live_table import SweepEntry, SweepState
from istar.finetune.sweeps.trials import Overrides, Trial
from istar.runs.key import RunKey
from istar.runs.labels import Inputs, label_inputs, shorten_model_name
from istar.runs.names import BASE_LABEL, METHOD_NAMES
from istar.runs.record import RunRecord, read_result

_MIN_RUNS_FOR_PROGRESS_BAR = 50  # with at least as many runs, composing their configs shows a progress bar

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
    root: Path  # folder that contains the runs
    compose: Callable[[Overrides], Mapping[str, Any]]  # composes the config of a run from its overrides
    launcher: Launcher | None = None  # executes the runs; None executes them on this machine
    config_loader: ConfigLoader | None = None  # lists the options of config groups for `glob(*)`
    environment: Mapping[str, str] = field(default_factory=dict)  # further variables of the runs' processes


def list_runs(request: SweepRequest, console: Console) -> "SweepRuns":
    """List the runs of a sweep without executing any: all combinations of a grid; nothing for a search."""
    if any(argument.lstrip("+").startswith("run.push_to_hub=") for argument in request.arguments):
        raise UserError("run.push_to_hub is for a single run; istar push uploads a run of a sweep")
    if request.settings.search == "optuna":
        extras.require("sweep.search=optuna", "sweep")
    runs = SweepRuns(request, console)
    if request.settings.search == "grid":
        runs.add_grids()
    return runs


class SweepRuns:
    """The runs of a sweep by name."""

    def __init__(self, request: SweepRequest, console: Console) -> None:
        settings = request.settings
        self.request, self.console = request, console
        grids, loader = settings.grids or {}, request.config_loader
        self.space_by_grid = trials.make_search_spaces(request.arguments, request.params, grids, settings.only, loader)
        sweep_hash = trials.sweep_hash(self.space_by_grid, settings.seeds, settings.search, settings.sampler_seed)
        self.folder = request.root / live_table.SWEEPS_FOLDER / f"{settings.name}-{sweep_hash}"
        self.output = Output(self.folder, "sweep", "", "choose another sweep.name")
        self.state = SweepState(self.folder.name, request.command, str(request.root), settings.jobs)
        if settings.search == "optuna":
            overrides = [override for space in self.space_by_grid.values() for override in space.values()]
            self.state.searched = sorted({o.get_key_element() for o in overrides if o.is_sweep_override()})
        self.planned: dict[str, Trial] = {}
        # Name of the first grid that contains a run of a configuration, by `SweepEntry.configuration`.
        self.grid_by_configuration: dict[str, str] = {}
        self.key_maker = KeyMaker()
        # Keys that runs leave out because their option lacks them, by that option, such as `reg=none`.
        self._keys_left_out: dict[str, list[str]] = {}
        self._name_options = cache(self._compose_options)  # by overrides without values; many runs share them

    def add_grids(self) -> None:
        """Add the runs of all grids.

        Print which keys of the command line some runs ignore, and how many different runs the combinations yield.
        """
        combinations: set[Overrides] = set()
        grid_by_overrides: dict[Overrides, str] = {}
        for grid, space in self.space_by_grid.items():
            for overrides in trials.list_combinations(space):
                combinations.add(overrides)
                grid_by_overrides.setdefault(self.leave_out_keys_without_effect(overrides), grid)
        self.add_runs(list(grid_by_overrides))
        for entry in self.state.entries:
            self.assign_grid(entry, grid_by_overrides[tuple(entry.overrides)])
        parts = [f"{option} ignores {' and '.join(keys)}" for option, keys in self._keys_left_out.items()]
        arguments = self.request.arguments
        given_keys = {argument.lstrip("+").partition("=")[0] for argument in arguments}
        for grid, space in self.space_by_grid.items():
            kept = [space[key].input_line or "" for key in given_keys & space.keys()]
            parts += [f"grid {grid} keeps {text}" for text in sorted(kept) if text not in arguments]
        note = ", ".join(parts)
        if len(combinations) > len(self.state.entries):
            note = f"{len(combinations)} combinations are {len(self.state.entries)} runs{': ' if note else ''}{note}"
        if note:
            self.console.out(note, highlight=False)

    def leave_out_keys_without_effect(self, overrides: Overrides) -> Overrides:
        """Leave out the keys that the options of a run lack, such as `reg.lambda` with `reg=none`.

        A key stays, and is refused when the config is composed, if no option of the sweep has it.
        """
        options = self._find_options(overrides)
        kept_overrides = []
        for text in overrides:
            key = text.partition("=")[0].lstrip("+")
            group = key.partition(".")[0]
            owners = schema.find_options_with_key(key)
            if options.get(group) in owners or not any(other.get(group) in owners for other in self._all_options):
                kept_overrides.append(text)
            elif key not in (keys := self._keys_left_out.setdefault(f"{group}={options[group]}", [])):
                keys.append(key)
        return tuple(kept_overrides)

    def _find_options(self, overrides: Overrides) -> dict[str, str]:
        """Return the chosen option of each group in `schema.OPTIONS_BY_GROUP`, by group."""
        return self._name_options(tuple(text for text in overrides if not trials.sets_value(text)))

    def _compose_options(self, choices: Overrides) -> dict[str, str]:
        config = self.request.compose(choices)
        return {group: schema.find_option(group, config) for group in schema.OPTIONS_BY_GROUP}

    @cached_property
    def _all_options(self) -> list[dict[str, str]]:
        """The result of `_find_options` for each combination of options in the sweep."""
        choice_spaces = [
            {key: override for key, override in space.items() if not trials.sets_value(key)}
            for space in self.space_by_grid.values()
        ]
        return [self._find_options(choices) for space in choice_spaces for choices in trials.list_combinations(space)]

    def add_runs(self, runs: Sequence[Overrides]) -> None:
        is_short = len(runs) < _MIN_RUNS_FOR_PROGRESS_BAR
        for overrides in track(runs, "composing", console=self.console, transient=True, disable=is_short):
            self._plan_run(overrides)
        self._label_inputs()

    def add_run(self, overrides: Overrides) -> Trial:
        """Add the run with the given overrides and return it; a known run is not added twice.

        If the run is finished, its result is taken over. If its data cannot be loaded, it is added as failed. Raises a
        `UserError` if the overrides do not compose.
        """
        trial = self._plan_run(overrides)
        self._label_inputs()
        return trial

    def _plan_run(self, overrides: Overrides) -> Trial:
        overrides = self.leave_out_keys_without_effect(overrides)
        config = self.compose_config(overrides)
        if isinstance(config.logger, WandbConfig) and config.logger.group is None:
            config = replace(config, logger=replace(config.logger, group=self.folder.name))
        error_message, record, key = None, None, None
        try:
            # The processes of the run load the commit that the run is named after.
            config = self.key_maker.resolve(config)
            key = self.key_maker.make(config)
            name = name_run(config, key)
            record = read_finished_run(self.request.root / name, config)
        except UserError as error:
            error_message = str(error)
            name = f"not-started-{len(self.planned) + 1}" if key is None else name_run(config, key)
        if name not in self.planned:
            self.planned[name] = Trial(config, make_entry(name, overrides, config, key), key)
            self.state.entries.append(self.planned[name].entry)
        trial = self.planned[name]
        if record is not None:
            trial.entry.apply_record(record)
            trial.record = record
        if error_message is not None:
            trial.entry.status, trial.entry.error = "failed", error_message
        return trial

    def _label_inputs(self) -> None:
        """Label the tasks and models of all runs again, because each label depends on the other runs."""
        trials_with_inputs = [(trial, _get_inputs(trial)) for trial in self.planned.values()]
        labels = label_inputs(inputs for _, inputs in trials_with_inputs)
        for trial, inputs in trials_with_inputs:
            trial.entry.task, trial.entry.model = labels[inputs]

    def run_name(self, overrides: Overrides) -> str:
        """Return the name of the run with these overrides, or the overrides if its data cannot be loaded."""
        try:
            config = self.compose_config(self.leave_out_keys_without_effect(overrides))
            return name_run(config, self.key_maker.make(config))
        except UserError:
            return " ".join(overrides)

    def compose_config(self, overrides: Overrides) -> Config:
        """Compose the config of a run from its overrides, and resolve its precision if it runs on this machine."""
        config = schema.load(self.request.compose(overrides))
        if self.request.launcher is None:
            return replace(config, trainer=choose_precision(config.trainer))
        # The precision is part of a run's name, but this machine cannot choose it for another one.
        if config.trainer.precision == "auto":
            raise UserError(
                "trainer.precision=auto: the jobs of a launcher may run on another machine than this; name the "
                "precision, for example trainer.precision=bf16-mixed"
            )
        return config

    def compose_sample_config(self) -> Config:
        """Compose a config without the overrides to sweep over, as an example of the runs of a search."""
        space = next(iter(self.space_by_grid.values()))
        fixed = (override.input_line or "" for override in space.values() if not override.is_sweep_override())
        config = self.compose_config(tuple(fixed))
        self.key_maker.make(config)
        return config

    def assign_grid(self, entry: SweepEntry, grid: str) -> None:
        """Assign a run and all runs of its configuration to a grid, unless they belong to another one already."""
        self.grid_by_configuration.setdefault(entry.configuration, grid)

    def find_best_configurations(self) -> list[list[SweepEntry]]:
        entries_by_group: dict[tuple[str, ...], list[SweepEntry]] = {}
        for entry in self.state.entries:
            entries_by_group.setdefault(self.selection_group(entry), []).append(entry)
        return list(filter(None, map(live_table.find_best_configuration, entries_by_group.values())))

    def list_repetitions_of_best(self) -> list[Overrides]:
        """List the overrides that repeat the best configuration of each selection group with each of `sweep.seeds`."""
        return [
            trials.replace_seed(tuple(best_runs[0].overrides), seed)
            for best_runs in self.find_best_configurations()
            for seed in self.request.settings.seeds
        ]

    def selection_group(self, entry: SweepEntry) -> tuple[str, ...]:
        """Return task, model, method and grid of a run; `sweep.seeds` repeats the best configuration of each group."""
        return (*entry.group, self.grid_by_configuration.get(entry.configuration, ""))

    def read_record(self, entry: SweepEntry) -> RunRecord:
        """Return the record of an ended run, from memory if the run was finished when it was added."""
        return self.planned[entry.name].record or read_result(self.request.root / entry.name)


def make_entry(name: str, overrides: Overrides, config: Config, key: RunKey | None) -> SweepEntry:
    """Create the entry of a run that has not started yet; the key is None if it is unknown."""
    task, model = config.task.name, shorten_model_name(config.model.name)
    method = METHOD_NAMES.get(config.reg.name, BASE_LABEL)
    label, method_name, configuration = (
        (method, method, name) if key is None else (key.label, key.method_name, key.configuration)
    )
    return SweepEntry(name, list(overrides), task, model, label, config.seed, method_name, configuration)


def _get_inputs(trial: Trial) -> Inputs:
    task, model, key = trial.config.task, trial.config.model, trial.key
    hashes = (None, None) if key is None else (key.data, key.model)
    return Inputs(task.name, task.data_dir, model.name, model.revision, *hashes)
