"""Describes the planned runs of a sweep for the file of `istar plan`, before any of them is executed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override

from istar.config import Config, TaskConfig
from istar.config.schema import to_dict
from istar.errors import UserError
from istar.reports.plan_file import flatten_settings, get_plan_group, strip_method_settings
from istar.reports.run_frame import record_to_row
from istar.results import RunRecord
from istar.runs.store import find_task_spec
from istar.sweeps.sweep import SweepRuns
from istar.sweeps.trials import Overrides, SearchSpace

BASE = "Base"


@dataclass
class PlannedConfiguration:
    """A configuration of a plan: runs that differ only in the seed, or the runs from which a search chooses."""

    config: Config  # config of the first run
    method: str  # label of the method with its hyperparameters, as in reports
    grid: str  # name of the grid of the sweep; empty if the sweep has no named grids
    settings: dict[str, Any]  # settings by key, from `istar.reports.plan_file.flatten_settings`
    ranges: dict[str, Any]  # by key, the values from which a search chooses, or the ends of an interval
    seeds: list[int]
    names: list[str]  # names of the runs, in the order of the seeds; empty for a search
    data: str  # hash of the training and validation examples
    examples: int  # number of training examples

    @property
    def task(self) -> str:
        """Name of the task."""
        return self.config.task.name

    @property
    def model(self) -> str:
        """Last part of the model's name."""
        return Path(self.config.model.name).name

    @property
    def group(self) -> tuple[str, str, str]:
        """Task, model and method of the plan; `sweep.seeds` repeats the best run of each such group."""
        return get_plan_group(self.task, self.model, self.method, self.grid)

    @property
    def is_base(self) -> bool:
        """Whether the method is Base, with which the others are compared."""
        return strip_method_settings(self.method) == BASE


def list_planned_configurations(runs: SweepRuns) -> list[PlannedConfiguration]:
    """Group the runs of a sweep into configurations, in the order of the runs.

    Raises:
        UserError: if the data or the model of a run cannot be loaded, or a run cannot be used.
    """
    if runs.request.settings.search == "optuna":
        return [
            planned
            for grid, space in runs.space_by_grid.items()
            for planned in _describe_search_configurations(runs, grid, space)
        ]
    configuration_by_key: dict[str, PlannedConfiguration] = {}
    for entry in runs.state.entries:
        if entry.status == "failed":
            raise UserError(f"{entry.error} (a plan identifies its runs by their data and models)")
        planned = _describe_configuration(runs, runs.grid_by_run[entry.name], runs.trial_by_name[entry.name].config)
        configuration = configuration_by_key.setdefault(repr((planned.group, planned.settings, planned.data)), planned)
        configuration.seeds.append(entry.seed)
        configuration.names.append(entry.name)
    return list(configuration_by_key.values())


def _describe_configuration(runs: SweepRuns, grid: str, config: Config) -> PlannedConfiguration:
    """Describe the configuration of a run, with empty lists of seeds and names."""
    config = runs.run_folders.resolve(config)
    runs.run_folders.find(config)
    values = to_dict(config)
    method = record_to_row(RunRecord("", "waiting", values))["method"]
    fingerprint, size = runs.run_folders.fingerprint(config), runs.run_folders.num_training_examples(config)
    return PlannedConfiguration(config, method, grid, flatten_settings(values), {}, [], [], fingerprint, size)


def _describe_search_configurations(runs: SweepRuns, grid: str, space: SearchSpace) -> Iterable[PlannedConfiguration]:
    """Yield the configurations of a search space from which Optuna chooses, one for each choice of config groups.

    The keys `task.name` and `model.name` count as config groups.
    """
    swept_overrides = {key: override for key, override in space.items() if override.is_sweep_override()}
    group_overrides = {key: override for key, override in swept_overrides.items() if _is_group_choice(key)}
    key_overrides = {
        key: override for key, override in swept_overrides.items() if key not in group_overrides and key != "seed"
    }
    fixed_overrides = [override.input_line or "" for key, override in space.items() if key not in swept_overrides]
    # A config needs some value for each key; the plan describes these keys by their ranges instead.
    first_values = [f"{key}={_list_swept_values(override)[0]}" for key, override in key_overrides.items()]
    for choice in product(
        *([f"{key}={value}" for value in _list_swept_values(override)] for key, override in group_overrides.items())
    ):
        overrides = (*fixed_overrides, *choice, *first_values)
        planned = _describe_configuration(runs, grid, runs.compose_config(overrides))
        planned.ranges = {
            key: _find_search_range(runs, overrides, key, override) for key, override in key_overrides.items()
        }
        seed = swept_overrides.get("seed")
        planned.seeds = [planned.config.seed] if seed is None else [int(value) for value in _list_swept_values(seed)]
        yield planned


def _is_group_choice(key: str) -> bool:
    """Return whether a key of a search space chooses the option of a config group, the task or the model."""
    return ("." not in key and key != "seed") or key in ("task.name", "model.name")


def _list_swept_values(override: Override) -> list[str]:
    """Return the values of a key that is swept over, as on the command line; for an interval, its two ends."""
    sweep = override.value()
    if isinstance(sweep, IntervalSweep):
        ends = [sweep.start or 0.0, sweep.end or 0.0]
        return [str(int(end)) if "int" in sweep.tags else str(end) for end in ends]
    return [str(value) for value in override.sweep_string_iterator()]


def _find_search_range(runs: SweepRuns, overrides: Overrides, key: str, override: Override) -> Any:
    """Return the values of a key in the composed configs, or the ends `low` and `high` if it has an interval.

    `overrides` are those of the other keys, and `override` is that of the key in the search space.
    """
    settings_by_value = [
        flatten_settings(to_dict(runs.compose_config((*overrides, f"{key}={value}"))))
        for value in _list_swept_values(override)
    ]
    values: list[Any] = [settings.get(key) for settings in settings_by_value]
    is_interval = isinstance(override.value(), IntervalSweep)
    return {"low": min(values), "high": max(values)} if is_interval else values


def make_plan_fields(configurations: Sequence[PlannedConfiguration], runs: SweepRuns) -> dict[str, Any]:
    """Return the fields of a plan file that follow from its runs; see `istar.reports.plan_file`."""
    settings = runs.request.settings
    common_settings = find_common_settings(
        [configuration.settings for configuration in configurations],
        {key for configuration in configurations for key in configuration.ranges},
    )
    is_search = settings.search == "optuna"
    num_trials = count_trials(configurations, settings.trials) if is_search else None
    task_fields = list(
        {configuration.task: _describe_task(configuration.config.task) for configuration in configurations}.values()
    )
    return {
        "sweep": {
            "name": settings.name,
            "search": settings.search,
            "trials": num_trials,
            "sampler": settings.sampler if is_search else None,
            "sampler_seed": settings.sampler_seed if is_search else None,
            "pruner": settings.pruner if is_search else None,
            "seeds_of_best": list(settings.seeds),
        },
        "tasks": task_fields,
        "models": list(dict.fromkeys(configuration.model for configuration in configurations)),
        "seeds": sorted({seed for configuration in configurations for seed in configuration.seeds}),
        "selection": describe_selection_rule(
            task_fields, settings.seeds, any(configuration.grid for configuration in configurations)
        ),
        "methods": describe_methods(configurations, common_settings),
        "budget": compute_budget(configurations, settings.seeds, num_trials, len(runs.state.entries_with("finished"))),
        "settings": common_settings,
        "configurations": [
            _make_configuration_field(configuration, common_settings) for configuration in configurations
        ],
    }


def count_trials(configurations: Sequence[PlannedConfiguration], max_trials: int) -> int:
    """Return the number of trials of a search: `max_trials`, or fewer if its search space has fewer runs."""
    values_by_configuration = [
        [configuration.seeds, *configuration.ranges.values()] for configuration in configurations
    ]
    # An interval, whose range is a mapping of its ends, has any number of values.
    if any(isinstance(values, Mapping) for values_of_keys in values_by_configuration for values in values_of_keys):
        return max_trials
    return min(max_trials, sum(prod(map(len, values_of_keys)) for values_of_keys in values_by_configuration))


def _make_configuration_field(
    configuration: PlannedConfiguration, common_settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a configuration as the plan file has it, without the settings that all configurations share."""
    return {
        "task": configuration.task,
        "model": configuration.model,
        "method": configuration.method,
        "grid": configuration.grid,
        "seeds": configuration.seeds,
        "settings": {
            key: value
            for key, value in configuration.settings.items()
            if key not in common_settings and key not in configuration.ranges
        },
        "ranges": configuration.ranges,
        "data": configuration.data,
        "names": configuration.names,
    }


def _describe_task(config: TaskConfig) -> dict[str, Any]:
    """Return a task as the plan file has it: its name, its metrics and the data sets that they are measured on."""
    spec = find_task_spec(config)
    return {
        "name": spec.name,
        "metric": spec.headline,
        "reported_set": spec.validation[0].name,
        "selection_metric": spec.selection_metric,
        "selection_set": spec.selection_set.name,
    }


def find_common_settings(settings: Sequence[Mapping[str, Any]], excluded: Iterable[str] = ()) -> dict[str, Any]:
    """Return the settings that have equal values in all configurations, except those with excluded keys."""
    first_settings, *other_settings = settings
    return {
        key: value
        for key, value in first_settings.items()
        if key not in set(excluded)
        and all(key in settings_of_other and settings_of_other[key] == value for settings_of_other in other_settings)
    }


def describe_methods(configurations: Sequence[PlannedConfiguration], common: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Describe each method of a plan: the settings in which it differs from others, and the values of its grid.

    A method is the last part of a configuration's group, such as I-STAR or, in a sweep with named grids, a grid. The
    field `configurations` is the number of its configurations on each task and model, or 0 if a search chooses them.
    `common` are the settings that all configurations share.
    """
    configurations_by_method: dict[str, list[PlannedConfiguration]] = {}
    for configuration in configurations:
        configurations_by_method.setdefault(configuration.group[2], []).append(configuration)
    method_fields = []
    for method, method_configurations in configurations_by_method.items():
        ranges = {
            key: values for configuration in method_configurations for key, values in configuration.ranges.items()
        }
        differing_keys = dict.fromkeys(
            key for configuration in method_configurations for key in configuration.settings if key not in common
        )
        values_by_key = {
            key: _remove_duplicates(configuration.settings.get(key) for configuration in method_configurations)
            for key in differing_keys
            if key not in ranges
        }
        count_by_group = {
            group: sum(configuration.group == group for configuration in method_configurations)
            for group in {configuration.group for configuration in method_configurations}
        }
        method_fields.append(
            {
                "method": method,
                "configurations": 0 if ranges else max(count_by_group.values()),
                "settings": {key: values[0] for key, values in values_by_key.items() if len(values) == 1},
                "grid": {key: values for key, values in values_by_key.items() if len(values) > 1} | ranges,
            }
        )
    return method_fields


def _remove_duplicates(values: Iterable[Any]) -> list[Any]:
    """Return the distinct values in the order of their first occurrence; they need not be hashable."""
    distinct_values: list[Any] = []
    for value in values:
        if value not in distinct_values:
            distinct_values.append(value)
    return distinct_values


def describe_selection_rule(tasks: Sequence[Mapping[str, Any]], seeds: Sequence[int], has_grids: bool) -> str:
    """Describe which epoch and which configuration are reported, and on which data set they are chosen.

    Args:
        tasks: the field `tasks` of a plan.
        seeds: seeds with which the best configuration of each method is repeated.
        has_grids: whether the sweep has named grids, so that the best configuration of each grid is repeated.
    """
    selection_values = "; ".join(
        f"{task['selection_metric']} on the set {task['selection_set']}" + f" ({task['name']})" * (len(tasks) > 1)
        for task in tasks
    )
    text = f"The epoch of each run is the one with the best value of {selection_values}. "
    if seeds:
        group_label = "task, model, method and grid" if has_grids else "task, model and method"
        text += (
            f"Of each {group_label}, the run with the best such value is repeated with the seeds "
            f"{', '.join(map(str, seeds))}, and its configuration is reported."
        )
    else:
        text += (
            "Of each task, model and method, the configuration with the most seeds is reported, among equals the one "
            "with the best mean of such values."
        )
    if any(task["selection_set"] == task["reported_set"] for task in tasks):
        text += (
            " The set that chooses is also the one on which results are reported, so that the best of several "
            "configurations looks better than it is; task.validation_fraction holds out other data for the choice."
        )
    return text


def count_comparisons(configurations: Sequence[PlannedConfiguration], seeds_of_best: Sequence[int]) -> int:
    """Count the comparisons of methods with Base on the same task and model.

    If the best configurations are repeated with further seeds, each group of configurations is compared with Base once.
    Otherwise, each method with its hyperparameters is compared. Tasks and models without Base have no comparisons.
    """
    is_by_group = bool(seeds_of_best) or any(configuration.ranges for configuration in configurations)
    pairs_with_base = {
        (configuration.task, configuration.model) for configuration in configurations if configuration.is_base
    }
    other_methods = {
        configuration.group if is_by_group else (configuration.task, configuration.model, configuration.method)
        for configuration in configurations
        if not configuration.is_base
    }
    return sum((task, model) in pairs_with_base for task, model, _ in other_methods)


def count_seed_pairs(configurations: Sequence[PlannedConfiguration], seeds_of_best: Sequence[int]) -> int:
    """Return the number of seeds that every reported configuration has, which is the number of paired differences."""
    return min(len({*configuration.seeds, *seeds_of_best}) for configuration in configurations)


def make_hypotheses(configurations: Sequence[PlannedConfiguration], metric_by_task: Mapping[str, str]) -> list[str]:
    """Write a hypothesis as a sentence for each method but Base, or one sentence for all methods without Base.

    `metric_by_task` has the headline metric of each task.
    """
    tasks = list(dict.fromkeys(configuration.task for configuration in configurations))
    models = ", ".join(dict.fromkeys(configuration.model for configuration in configurations))
    scores = " and ".join(f"the {metric_by_task[task]} on {task}" for task in tasks)
    other_methods = list(
        dict.fromkeys(configuration.group[2] for configuration in configurations if not configuration.is_base)
    )
    if not any(configuration.is_base for configuration in configurations):
        return [f"The configurations of {', '.join(other_methods)} differ in {scores} ({models})."]
    if not other_methods:
        return [f"Base has, with each of its configurations, another mean of {scores} ({models})."]
    return [f"{name} changes {scores} compared with Base over the same seeds ({models})." for name in other_methods]


def compute_budget(
    configurations: Sequence[PlannedConfiguration],
    seeds_of_best: Sequence[int],
    num_trials: int | None,
    num_finished: int,
) -> dict[str, Any]:
    """Compute the number of runs, and upper limits for their total epochs and training examples.

    Repetitions of the best configurations and trials of a search count as the longest training that may be chosen.
    Training that stops early or is pruned needs less.

    Args:
        configurations: all configurations.
        seeds_of_best: seeds with which the best configuration of each group is repeated.
        num_trials: number of trials of a search; None for a grid.
        num_finished: number of runs that were finished before.
    """
    configurations_by_group: dict[tuple[str, str, str], list[PlannedConfiguration]] = {}
    for configuration in configurations:
        configurations_by_group.setdefault(configuration.group, []).append(configuration)
    planned_runs: list[tuple[int, int, int]] = []  # number of runs; epochs and training examples of each
    if num_trials is None:
        planned_runs += [
            (len(configuration.seeds), _find_max_epochs(configuration), _compute_max_training_examples(configuration))
            for configuration in configurations
        ]
    else:
        planned_runs.append(
            (
                num_trials,
                max(map(_find_max_epochs, configurations)),
                max(map(_compute_max_training_examples, configurations)),
            )
        )
    for group_configurations in configurations_by_group.values():
        num_repetitions = len(
            set(seeds_of_best) - {seed for configuration in group_configurations for seed in configuration.seeds}
        )
        planned_runs.append(
            (
                num_repetitions,
                max(map(_find_max_epochs, group_configurations)),
                max(map(_compute_max_training_examples, group_configurations)),
            )
        )
    return {
        "runs": sum(num_runs for num_runs, _, _ in planned_runs),
        "epochs": sum(num_runs * epochs for num_runs, epochs, _ in planned_runs),
        "training_examples": sum(num_runs * examples for num_runs, _, examples in planned_runs),
        "finished_before": num_finished,
    }


def _find_max_epochs(configuration: PlannedConfiguration) -> int:
    """Return the largest number of epochs that a run of a configuration may have."""
    epochs_range = configuration.ranges.get("trainer.max_epochs", [configuration.config.trainer.max_epochs])
    return int(epochs_range["high"] if isinstance(epochs_range, Mapping) else max(epochs_range))


def _compute_max_training_examples(configuration: PlannedConfiguration) -> int:
    """Return the largest number of training examples of a run, counted once for each epoch.

    The examples of a text corpus are documents or, if the number of optimizer steps is limited, blocks of tokens.
    """
    num_examples_in_epochs = configuration.examples * _find_max_epochs(configuration)
    max_steps = configuration.config.trainer.lightning.get("max_steps")
    if max_steps is None or max_steps < 0:
        return num_examples_in_epochs
    trainer = configuration.config.trainer
    num_devices = trainer.devices if type(trainer.devices) is int and trainer.devices > 0 else 1
    num_examples_per_step = (
        configuration.config.data.batch_size * trainer.accumulate_grad_batches * num_devices * trainer.num_nodes
    )
    num_examples_in_steps = max_steps * num_examples_per_step
    is_text_corpus = find_task_spec(configuration.config.task).is_language_modelling
    return num_examples_in_steps if is_text_corpus else min(num_examples_in_epochs, num_examples_in_steps)
