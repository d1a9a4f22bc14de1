"""Describes the runs of a sweep for the plan of an experiment, before any of them is executed."""

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
from istar.runs.store import task_spec
from istar.sweeps.sweep import Runs
from istar.sweeps.trials import Overrides, Space

BASE = "Base"


@dataclass
class Planned:
    """A configuration of a plan: runs that differ only in the seed, or those from which a search chooses."""

    config: Config  # config of the first run
    method: str  # as in the report
    grid: str  # name of the grid of the sweep; empty if the sweep has no named grids
    settings: dict[str, Any]  # of `istar.reports.plan_file.flatten_settings`
    ranges: dict[str, Any]  # by key, the values from which a search chooses, or the ends of an interval
    seeds: list[int]
    names: list[str]  # names of the runs, in the order of the seeds; empty for a search
    data: str  # fingerprint of the examples
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
        """Task, model and method of the plan, among whose runs `sweep.seeds` repeats the best."""
        return get_plan_group(self.task, self.model, self.method, self.grid)

    @property
    def is_base(self) -> bool:
        """Whether the configuration is one of Base, with which the others are compared."""
        return strip_method_settings(self.method) == BASE


def configurations(runs: Runs) -> list[Planned]:
    """Return the configurations of a sweep's runs, in their order.

    Raises:
        UserError: if the data or the model of a run cannot be loaded, or a run cannot be used.
    """
    if runs.request.settings.search == "optuna":
        return [planned for grid, space in runs.spaces.items() for planned in _of_search(runs, grid, space)]
    grouped: dict[str, Planned] = {}
    for entry in runs.state.entries:
        if entry.status == "failed":
            raise UserError(f"{entry.error} (a plan identifies its runs by their data and models)")
        planned = _describe(runs, runs.grids[entry.name], runs.trials[entry.name].config)
        known = grouped.setdefault(repr((planned.group, planned.settings, planned.data)), planned)
        known.seeds.append(entry.seed)
        known.names.append(entry.name)
    return list(grouped.values())


def _describe(runs: Runs, grid: str, config: Config) -> Planned:
    """Describe the configuration of a run, without its seeds and names."""
    config = runs.folders.resolve(config)
    runs.folders(config)
    values = to_dict(config)
    method = record_to_row(RunRecord("", "waiting", values))["method"]
    fingerprint, size = runs.folders.fingerprint(config), runs.folders.size(config)
    return Planned(config, method, grid, flatten_settings(values), {}, [], [], fingerprint, size)


def _of_search(runs: Runs, grid: str, space: Space) -> Iterable[Planned]:
    """Describe the runs of a space from which Optuna chooses: one configuration for each choice of config groups.

    The task and the model are part of the groups, or of the keys `task.name` and `model.name`.
    """
    swept = {key: override for key, override in space.items() if override.is_sweep_override()}
    groups = {key: override for key, override in swept.items() if _chooses_group(key)}
    keys = {key: override for key, override in swept.items() if key not in groups and key != "seed"}
    fixed = [override.input_line or "" for key, override in space.items() if key not in swept]
    first = [f"{key}={_values(override)[0]}" for key, override in keys.items()]
    for choice in product(*([f"{key}={value}" for value in _values(override)] for key, override in groups.items())):
        overrides = (*fixed, *choice, *first)
        planned = _describe(runs, grid, runs.config(overrides))
        planned.ranges = {key: _range(runs, overrides, key, override) for key, override in keys.items()}
        seed = swept.get("seed")
        planned.seeds = [planned.config.seed] if seed is None else [int(value) for value in _values(seed)]
        yield planned


def _chooses_group(key: str) -> bool:
    """Whether a key of a space chooses the option of a config group, the task or the model."""
    return ("." not in key and key != "seed") or key in ("task.name", "model.name")


def _values(override: Override) -> list[str]:
    """The values of a key that is swept over, as on the command line; of an interval, its ends."""
    sweep = override.value()
    if isinstance(sweep, IntervalSweep):
        ends = [sweep.start or 0.0, sweep.end or 0.0]
        return [str(int(end)) if "int" in sweep.tags else str(end) for end in ends]
    return [str(value) for value in override.sweep_string_iterator()]


def _range(runs: Runs, overrides: Overrides, key: str, override: Override) -> Any:
    """The values of a key as configs have them, or the ends of its interval."""
    settings = [flatten_settings(to_dict(runs.config((*overrides, f"{key}={value}")))) for value in _values(override)]
    values: list[Any] = [setting.get(key) for setting in settings]
    is_interval = isinstance(override.value(), IntervalSweep)
    return {"low": min(values), "high": max(values)} if is_interval else values


def contents(planned: Sequence[Planned], runs: Runs) -> dict[str, Any]:
    """Return the fields of a plan that follow from its runs; see `istar.reports.plan_file`."""
    settings = runs.request.settings
    common = common_settings([entry.settings for entry in planned], {key for entry in planned for key in entry.ranges})
    is_search = settings.search == "optuna"
    trials = trial_count(planned, settings.trials) if is_search else None
    tasks = list({entry.task: _describe_task(entry.config.task) for entry in planned}.values())
    return {
        "sweep": {
            "name": settings.name,
            "search": settings.search,
            "trials": trials,
            "sampler": settings.sampler if is_search else None,
            "sampler_seed": settings.sampler_seed if is_search else None,
            "pruner": settings.pruner if is_search else None,
            "seeds_of_best": list(settings.seeds),
        },
        "tasks": tasks,
        "models": list(dict.fromkeys(entry.model for entry in planned)),
        "seeds": sorted({seed for entry in planned for seed in entry.seeds}),
        "selection": selection_rule(tasks, settings.seeds, any(entry.grid for entry in planned)),
        "methods": methods(planned, common),
        "budget": budget(planned, settings.seeds, trials, len(runs.state.entries_with("finished"))),
        "settings": common,
        "configurations": [_configuration(entry, common) for entry in planned],
    }


def trial_count(planned: Sequence[Planned], trials: int) -> int:
    """Return the number of trials of a search, which ends early when it has tried all runs of its search space."""
    values = [[entry.seeds, *entry.ranges.values()] for entry in planned]
    if any(isinstance(choice, Mapping) for choices in values for choice in choices):
        return trials
    return min(trials, sum(prod(map(len, choices)) for choices in values))


def _configuration(entry: Planned, common: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "task": entry.task,
        "model": entry.model,
        "method": entry.method,
        "grid": entry.grid,
        "seeds": entry.seeds,
        "settings": {k: v for k, v in entry.settings.items() if k not in common and k not in entry.ranges},
        "ranges": entry.ranges,
        "data": entry.data,
        "names": entry.names,
    }


def _describe_task(config: TaskConfig) -> dict[str, Any]:
    spec = task_spec(config)
    return {
        "name": spec.name,
        "metric": spec.headline,
        "reported_set": spec.validation[0].name,
        "selection_metric": spec.selection_metric,
        "selection_set": spec.selection_set.name,
    }


def common_settings(settings: Sequence[Mapping[str, Any]], excluded: Iterable[str] = ()) -> dict[str, Any]:
    """Return the settings that all configurations have with equal values, without the excluded keys."""
    first, *others = settings
    return {
        key: value
        for key, value in first.items()
        if key not in set(excluded) and all(key in other and other[key] == value for other in others)
    }


def methods(planned: Sequence[Planned], common: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the methods of a plan: the settings in which each differs from others, and the values of its grid.

    A method is that of `istar.reports.plan_file.get_plan_group`, such as I-STAR, or each grid of a sweep with named
    grids.
    `configurations` is the number of its configurations on each task and model, or 0 if a search chooses them.
    """
    grouped: dict[str, list[Planned]] = {}
    for entry in planned:
        grouped.setdefault(entry.group[2], []).append(entry)
    result = []
    for name, entries in grouped.items():
        ranges = {key: values for entry in entries for key, values in entry.ranges.items()}
        keys = dict.fromkeys(key for entry in entries for key in entry.settings if key not in common)
        varied = {key: _distinct(entry.settings.get(key) for entry in entries) for key in keys if key not in ranges}
        counts = {group: sum(entry.group == group for entry in entries) for group in {e.group for e in entries}}
        result.append(
            {
                "method": name,
                "configurations": 0 if ranges else max(counts.values()),
                "settings": {key: values[0] for key, values in varied.items() if len(values) == 1},
                "grid": {key: values for key, values in varied.items() if len(values) > 1} | ranges,
            }
        )
    return result


def _distinct(values: Iterable[Any]) -> list[Any]:
    """Return the values without repetitions, in their order; they need not be hashable."""
    result: list[Any] = []
    for value in values:
        if value not in result:
            result.append(value)
    return result


def selection_rule(tasks: Sequence[Mapping[str, Any]], seeds: Sequence[int], has_grids: bool) -> str:
    """Return in words which epoch and which configuration are reported, and by which set they are chosen.

    Args:
        tasks: the field `tasks` of a plan.
        seeds: seeds with which the best configuration of each method is repeated.
        has_grids: whether the sweep has named grids, of each of which the best is repeated.
    """
    chosen = "; ".join(
        f"{task['selection_metric']} on the set {task['selection_set']}" + f" ({task['name']})" * (len(tasks) > 1)
        for task in tasks
    )
    text = f"The epoch of each run is the one with the best value of {chosen}. "
    if seeds:
        group = "task, model, method and grid" if has_grids else "task, model and method"
        text += (
            f"Of each {group}, the run with the best such value is repeated with the seeds "
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


def comparisons(planned: Sequence[Planned], seeds_of_best: Sequence[int]) -> int:
    """Return the number of comparisons with Base: one for each group of configurations if the best are repeated.

    Otherwise each method with its settings, as the table of all methods of the report has them, is a comparison. Tasks
    and models without Base have none.
    """
    is_by_group = bool(seeds_of_best) or any(entry.ranges for entry in planned)
    pairs = {(entry.task, entry.model) for entry in planned if entry.is_base}
    others = {
        entry.group if is_by_group else (entry.task, entry.model, entry.method)
        for entry in planned
        if not entry.is_base
    }
    return sum((task, model) in pairs for task, model, _ in others)


def pairs_of_seeds(planned: Sequence[Planned], seeds_of_best: Sequence[int]) -> int:
    """Return the number of seeds that every reported configuration has."""
    return min(len({*entry.seeds, *seeds_of_best}) for entry in planned)


def hypotheses(planned: Sequence[Planned], metrics: Mapping[str, str]) -> list[str]:
    """Return a sentence for each method but Base, or one for all methods if there is no Base.

    `metrics` has the headline metric of each task.
    """
    tasks = list(dict.fromkeys(entry.task for entry in planned))
    models = ", ".join(dict.fromkeys(entry.model for entry in planned))
    where = " and ".join(f"the {metrics[task]} on {task}" for task in tasks)
    others = list(dict.fromkeys(entry.group[2] for entry in planned if not entry.is_base))
    if not any(entry.is_base for entry in planned):
        return [f"The configurations of {', '.join(others)} differ in {where} ({models})."]
    if not others:
        return [f"Base has, with each of its configurations, another mean of {where} ({models})."]
    return [f"{name} changes {where} compared with Base over the same seeds ({models})." for name in others]


def budget(
    planned: Sequence[Planned], seeds_of_best: Sequence[int], trials: int | None, finished: int
) -> dict[str, Any]:
    """Return the number of runs, and upper limits for the sums of their epochs and training examples.

    The repetitions of the best configurations, and the trials of a search, count with the longest training of those
    that may be chosen. Training that stops early, or is pruned, needs less.

    Args:
        planned: all configurations.
        seeds_of_best: seeds with which the best configuration of each group is repeated.
        trials: number of trials of a search; None for a grid.
        finished: number of runs that were finished before.
    """
    groups: dict[tuple[str, str, str], list[Planned]] = {}
    for entry in planned:
        groups.setdefault(entry.group, []).append(entry)
    runs: list[tuple[int, int, int]] = []  # number of runs, with the epochs and the training examples of each
    if trials is None:
        runs += [(len(entry.seeds), _epochs(entry), _training_examples(entry)) for entry in planned]
    else:
        runs.append((trials, max(map(_epochs, planned)), max(map(_training_examples, planned))))
    for entries in groups.values():
        more = len(set(seeds_of_best) - {seed for entry in entries for seed in entry.seeds})
        runs.append((more, max(map(_epochs, entries)), max(map(_training_examples, entries))))
    return {
        "runs": sum(count for count, _, _ in runs),
        "epochs": sum(count * epochs for count, epochs, _ in runs),
        "training_examples": sum(count * examples for count, _, examples in runs),
        "finished_before": finished,
    }


def _epochs(entry: Planned) -> int:
    """Return the largest number of epochs of a configuration."""
    values = entry.ranges.get("trainer.max_epochs", [entry.config.trainer.max_epochs])
    return int(values["high"] if isinstance(values, Mapping) else max(values))


def _training_examples(entry: Planned) -> int:
    """Return the largest number of training examples of a run, counted once for each epoch.

    Of a text corpus, examples are documents, and with a number of optimizer steps, blocks of tokens.
    """
    in_epochs = entry.examples * _epochs(entry)
    steps = entry.config.trainer.lightning.get("max_steps")
    if steps is None or steps < 0:
        return in_epochs
    trainer = entry.config.trainer
    devices = trainer.devices if type(trainer.devices) is int and trainer.devices > 0 else 1
    per_step = entry.config.data.batch_size * trainer.accumulate_grad_batches * devices * trainer.num_nodes
    in_steps = steps * per_step
    is_text = task_spec(entry.config.task).is_language_modelling
    return in_steps if is_text else min(in_epochs, in_steps)
