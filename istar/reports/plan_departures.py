"""Departures of runs from the plan of an experiment that `istar plan` wrote: what was planned, and what was done."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pandas as pd

from istar.figures.plot import BASE
from istar.pages.sheets import Entry, Sheet
from istar.reports.plan_file import (
    Configuration,
    Plan,
    describe_value,
    describe_values,
    flatten_settings,
    get_plan_group,
    strip_method_settings,
)
from istar.scores import merit

ALL_RUNS = "all runs"
_MAX_SHOWN_NAMES = 3  # names of runs that the page shows of a departure; the CSV file has all


@dataclass(frozen=True)
class Departure:
    """A difference between what was planned and what was done."""

    kind: str  # e.g. `missing run` or `changed setting`
    where: str  # task, model and method in words; `all runs` if it concerns no method in particular
    planned: str
    actual: str
    runs: tuple[str, ...] = ()  # names of the runs, or of the planned runs that are missing


@dataclass(frozen=True)
class _Run:
    """A run that is compared with the plan."""

    row: Mapping[str, Any]  # row of the run in the data frame of runs, where missing values are None
    settings: Mapping[str, Any]  # see `istar.reports.plan_file.flatten_settings`

    @property
    def name(self) -> str:
        return str(self.row["name"])

    @property
    def seed(self) -> int:
        return int(self.row["seed"])

    @property
    def status(self) -> str:
        return str(self.row["status"])

    @property
    def task(self) -> str:
        return str(self.row["task"])

    @property
    def model(self) -> str:
        """Last part of the model's name."""
        return str(self.row["model"])

    @property
    def method(self) -> str:
        """Method with its settings, as in the report."""
        return str(self.row["method"])

    @property
    def is_trial(self) -> bool:
        """Whether the run has a result that a search or a selection may use."""
        return self.status in ("finished", "pruned")


@dataclass(frozen=True)
class _Match:
    """A run, the planned configuration that differs from it in the fewest settings, and the differences."""

    run: _Run
    configuration: Configuration | None = None  # None if the task, the model or the method is not planned
    changed_keys: tuple[str, ...] = ()  # keys of the settings that differ
    unplanned_part: str = ""  # `task`, `model` or `method` if there is no configuration

    @property
    def group(self) -> tuple[str, str, str]:
        """Group of the planned configuration; without one, the run's task, model and method without its settings."""
        if self.configuration is None:
            return get_plan_group(self.run.task, self.run.model, self.run.method, grid="")
        return self.configuration.group

    @property
    def has_planned_settings(self) -> bool:
        """Whether the run has all settings of a planned configuration."""
        return self.configuration is not None and not self.changed_keys


def departures(plan: Plan, frame: pd.DataFrame, reference: str = BASE) -> list[Departure]:
    """Return all departures of the runs in a frame and their comparison from a plan; an empty list if there are none.

    A planned run counts as done if a run has its settings and its seed. A run is compared with the planned
    configuration of the same task, model and method (without λ and the other settings) from which it differs in the
    fewest settings, and belongs to the group of this configuration; in a sweep with named grids, that is the
    configuration's grid. Settings that do not change the outcome of a run, such as paths, are not compared.

    Args:
        plan: from `istar.reports.plan_file.read`.
        frame: `istar.reports.run_frame.Runs.frame`, of runs with any status.
        reference: method with which the report compares the others. A plan compares them with Base.
    """
    rows = map(_replace_nan_by_none, frame.to_dict("records"))
    runs = [_Run(row, _get_identifying_settings(row)) for row in rows]
    matches = [_match_to_plan(plan, run) for run in runs]
    other_reference = Departure("other comparison", "all methods", f"with {BASE}", f"with {reference}")
    departures_by_kind = (
        _find_plan_edit(plan),
        _find_missing_runs(plan, matches),
        _find_unplanned_runs(plan, matches),
        _find_changed_settings(plan, matches),
        _find_other_data_or_weights(matches),
        _find_wrong_repetitions(plan, matches),
        _find_other_numbers_of_trials(plan, matches),
        _find_unequal_seeds(plan, matches),
        _find_runs_without_result(plan, matches),
        _find_other_code(plan, runs),
        _find_early_runs(plan, runs),
        [] if reference == BASE else [other_reference],
    )
    return [departure for departures_of_kind in departures_by_kind for departure in departures_of_kind]


def build_departures_sheet(departures: Sequence[Departure]) -> Sheet:
    """Return the table of departures from a plan; without rows if there are none."""
    rows = [
        [Entry(text) for text in (departure.kind, departure.where, departure.planned, departure.actual)]
        + [
            Entry(str(len(departure.runs)) if departure.runs else "\u2013", number=True),
            Entry(_list_first_names(departure.runs)),
        ]
        for departure in departures
    ]
    columns = ["departure", "where", "planned", "actual", "count", "runs"]
    frame_rows = [
        (
            departure.kind,
            departure.where,
            departure.planned,
            departure.actual,
            len(departure.runs),
            " ".join(departure.runs),
        )
        for departure in departures
    ]
    return Sheet(
        name="departures",
        title="Departures from the plan",
        caption="What was done otherwise than the plan says: runs that are missing or were not planned, other "
        "settings, seeds, data and code, runs without a usable result, and runs that began before the plan was "
        "written.",
        header=("departure", "task, model, method", "planned", "actual", "runs", "names"),
        rows_by_group={"": rows} if rows else {},
        frame=pd.DataFrame(frame_rows, columns=columns),
        num_row_headers=2,
    )


def summarize_departures(plan: Plan, departures: Sequence[Departure]) -> str:
    """Return sentences that say when the plan was written and how many departures from it there are."""
    written_at = plan.written_at.isoformat(timespec="seconds")
    text = f"The plan was written at {written_at} by istar {plan.istar_version}"
    if plan.replaced_hashes:
        num_replaced = len(plan.replaced_hashes)
        text += f" and replaced {'an earlier one' if num_replaced == 1 else f'{num_replaced} earlier ones'}"
    if not departures:
        return f"{text}. The runs do not depart from it."
    count = len(departures)
    return f"{text}. There {'is one departure' if count == 1 else f'are {count} departures'} from it."


def _list_first_names(names: Sequence[str]) -> str:
    """Return the first names as a list in words, and the number of those left out."""
    num_left_out = len(names) - _MAX_SHOWN_NAMES
    return ", ".join(names[:_MAX_SHOWN_NAMES]) + (f" and {num_left_out} more" if num_left_out > 0 else "")


def _replace_nan_by_none(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a row of a data frame with None in place of NaN, by which pandas marks missing values."""
    return {str(key): None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()}


def _get_identifying_settings(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that identify a run, from the columns of its config keys."""
    config: dict[str, dict[str, Any]] = {}
    for column, value in row.items():
        group, _, key = column.partition(".")
        if key and group != "validation":
            config.setdefault(group, {})[key] = value
    return flatten_settings(config)


# ---- the planned configuration of a run


def _match_to_plan(plan: Plan, run: _Run) -> _Match:
    """Match a run to the planned configuration that differs from it in the fewest settings.

    A run whose name is in the plan matches the configuration with this name. A run of an unplanned task, model or
    method matches none.
    """
    for configuration in plan.configurations:
        if run.name in configuration.run_names:
            return _Match(run, configuration)
    task_configurations = [configuration for configuration in plan.configurations if configuration.task == run.task]
    if not task_configurations:
        return _Match(run, unplanned_part="task")
    model_configurations = [configuration for configuration in task_configurations if configuration.model == run.model]
    if not model_configurations:
        return _Match(run, unplanned_part="model")
    method = strip_method_settings(run.method)
    candidates = [
        configuration for configuration in model_configurations if strip_method_settings(configuration.method) == method
    ]
    if not candidates:
        return _Match(run, unplanned_part="method")
    varied_keys = {key for configuration in candidates for key in (*configuration.settings, *configuration.ranges)}

    def compute_distance(configuration: Configuration) -> tuple[int, bool]:
        """Return the number of differing settings and, to break ties, whether the seed of the run is unplanned."""
        num_differing_keys = len(_find_differing_keys(configuration, varied_keys, run))
        return num_differing_keys, run.seed not in configuration.seeds

    # The settings that all planned runs have in common are compared once.
    common_keys = [key for key in plan.settings.keys() | run.settings.keys() if key not in varied_keys]
    changed_common_keys = [key for key in common_keys if run.settings.get(key) != plan.settings.get(key)]
    closest = min(candidates, key=compute_distance)
    changed_varied_keys = _find_differing_keys(closest, varied_keys, run)
    return _Match(run, closest, tuple(sorted([*changed_common_keys, *changed_varied_keys])))


def _find_differing_keys(configuration: Configuration, keys: Iterable[str], run: _Run) -> list[str]:
    return [key for key in keys if not _is_planned_value(configuration, key, run.settings.get(key))]


def _is_planned_value(configuration: Configuration, key: str, value: Any) -> bool:
    """Return whether a setting has the value that a configuration plans, or one in its range."""
    if key not in configuration.ranges:
        return bool(configuration.settings.get(key) == value)
    planned_range = configuration.ranges[key]
    if isinstance(planned_range, Mapping):
        return isinstance(value, int | float) and planned_range["low"] <= value <= planned_range["high"]
    return value in planned_range


# ---- kinds of departures


def _find_plan_edit(plan: Plan) -> list[Departure]:
    """Return a departure if the plan was edited after it was written; otherwise an empty list."""
    if not plan.is_edited:
        return []
    return [
        Departure(
            kind="edited plan",
            where=ALL_RUNS,
            planned="the plan as it was written",
            actual="its contents do not match their hash",
        )
    ]


def _find_missing_runs(plan: Plan, matches: Sequence[_Match]) -> list[Departure]:
    """Return the planned runs that were not run, and the missing repetitions of the best configurations.

    A planned run counts as done if a run has its settings and its seed. According to the plan, the best configuration
    of each group is repeated with the seeds `plan.seeds_of_best`.
    """
    existing_runs = {(id(match.configuration), match.run.seed) for match in matches if match.has_planned_settings}
    departures = []
    for group, configurations in _group_configurations(plan).items():
        missing_runs = [
            (seed, name)
            for configuration in configurations
            for seed, name in zip(configuration.seeds, configuration.run_names, strict=False)
            if (id(configuration), seed) not in existing_runs
        ]
        num_planned = sum(len(configuration.run_names) for configuration in configurations)
        if missing_runs:
            num_existing = _format_count(num_planned - len(missing_runs), "run")
            actual = f"{num_existing}; missing: {_format_seeds(seed for seed, _ in missing_runs)}"
            names = tuple(name for _, name in missing_runs)
            planned = _format_count(num_planned, "run")
            departures.append(Departure("missing run", _format_group(group), planned, actual, names))
        repeated_seeds = _get_repeated_seeds(plan, configurations)
        # The seeds of the configuration that was repeated with the most seeds.
        covered_seeds = max(
            (
                {seed for seed in repeated_seeds if (id(configuration), seed) in existing_runs}
                for configuration in configurations
            ),
            key=len,
        )
        if repeated_seeds - covered_seeds:
            planned = f"the best configuration with {_format_seeds(plan.seeds_of_best)}"
            actual = f"without {_format_seeds(repeated_seeds - covered_seeds)}"
            departures.append(Departure("missing run", _format_group(group), planned, actual))
    return departures


def _find_unplanned_runs(plan: Plan, matches: Sequence[_Match]) -> list[Departure]:
    """Return the runs whose task, model, method or seed is not planned."""
    # Names of runs by the fields `kind`, `where`, `planned` and `actual` of their departure.
    names_by_departure: dict[tuple[str, str, str, str], list[str]] = {}
    get_planned_part: dict[str, Callable[[Configuration], str]] = {
        "task": lambda configuration: configuration.task,
        "model": lambda configuration: configuration.model,
        "method": lambda configuration: strip_method_settings(configuration.method),
    }
    for match in matches:
        run, unplanned_part = match.run, match.unplanned_part
        if unplanned_part:
            planned = _join_with_commas(dict.fromkeys(map(get_planned_part[unplanned_part], plan.configurations)))
            actual = match.group[("task", "model", "method").index(unplanned_part)]
            departure = f"{unplanned_part} that was not planned", _format_group(match.group), planned, actual
            names_by_departure.setdefault(departure, []).append(run.name)
        elif match.configuration is not None and run.seed not in {*match.configuration.seeds, *plan.seeds_of_best}:
            planned = _format_seeds({*match.configuration.seeds, *plan.seeds_of_best})
            departure = "seed that was not planned", _format_group(match.group), planned, _format_seeds([run.seed])
            names_by_departure.setdefault(departure, []).append(run.name)
    return [Departure(*departure, tuple(names)) for departure, names in names_by_departure.items()]


def _find_changed_settings(plan: Plan, matches: Sequence[_Match]) -> list[Departure]:
    """Return the settings in which runs differ from their planned configuration, with the planned and actual value."""
    configurations_by_group = _group_configurations(plan)
    # Names of runs by the fields `where`, `planned` and `actual` of their departure.
    names_by_departure: dict[tuple[str, str, str], list[str]] = {}
    for match in matches:
        for key in match.changed_keys:
            assert match.configuration is not None
            configurations = configurations_by_group[match.group]
            actual = match.run.settings.get(key)
            planned = _describe_planned_values(plan, configurations, key)
            is_in_any_configuration = any(
                _is_planned_value(configuration, key, actual) for configuration in configurations
            )
            if is_in_any_configuration and key not in plan.settings:
                # Other configurations of the method have this value, but not together with the run's other values.
                planned = f"{_describe_planned_values(plan, [match.configuration], key)} with its other settings"
            departure = _format_group(match.group), f"{key}={planned}", f"{key}={describe_value(actual)}"
            names_by_departure.setdefault(departure, []).append(match.run.name)
    return [Departure("changed setting", *departure, tuple(names)) for departure, names in names_by_departure.items()]


def _describe_planned_values(plan: Plan, configurations: Sequence[Configuration], key: str) -> str:
    if key in plan.settings:
        return describe_value(plan.settings[key])
    for configuration in configurations:
        if key in configuration.ranges:
            return describe_values(configuration.ranges[key])
    return _join_with_commas(
        dict.fromkeys(describe_value(configuration.settings.get(key)) for configuration in configurations)
    )


def _find_other_data_or_weights(matches: Sequence[_Match]) -> list[Departure]:
    """Return the runs whose data are not the planned ones, and the runs with other weights or another tokenizer.

    The name of a run depends on its settings, data, weights and tokenizer. A run with a planned configuration and seed,
    the planned data, but another name than planned therefore has other weights or another tokenizer.
    """
    # Names of runs by the fields `kind`, `where`, `planned` and `actual` of their departure.
    names_by_departure: dict[tuple[str, str, str, str], list[str]] = {}
    for match in matches:
        run, configuration = match.run, match.configuration
        if configuration is None or run.name in configuration.run_names:
            continue
        group = _format_group(match.group)
        planned_fingerprint, fingerprint = configuration.data_fingerprint, run.row.get("fingerprint")
        if fingerprint is not None and fingerprint != planned_fingerprint:
            departure = "other data", group, f"fingerprint {planned_fingerprint}", f"fingerprint {fingerprint}"
            names_by_departure.setdefault(departure, []).append(run.name)
        elif match.has_planned_settings and run.seed in configuration.seeds and configuration.run_names:
            planned_name = configuration.run_names[configuration.seeds.index(run.seed)]
            departure = "other model", group, f"run {planned_name}", "same settings, but other weights or tokenizer"
            names_by_departure.setdefault(departure, []).append(run.name)
    return [Departure(*departure, tuple(names)) for departure, names in names_by_departure.items()]


def _find_wrong_repetitions(plan: Plan, matches: Sequence[_Match]) -> list[Departure]:
    """Return the groups in which not the best configuration, or more than one configuration, was repeated.

    According to the plan, only the best configuration of each group is repeated, with the seeds `plan.seeds_of_best`.
    """
    departures = []
    for group, configurations in _group_configurations(plan).items():
        repeated_seeds = _get_repeated_seeds(plan, configurations)
        group_matches = [match for match in matches if match.group == group and match.has_planned_settings]
        repetitions = [match for match in group_matches if match.run.seed in repeated_seeds]
        repetition_by_settings = {_get_settings_key(match.run): match for match in repetitions}
        if not repetitions:
            continue
        if len(repetition_by_settings) > 1:
            names = tuple(match.run.name for match in repetitions)
            actual = f"{len(repetition_by_settings)} configurations with these seeds"
            departures.append(
                Departure("repeated configurations", _format_group(group), "the best alone", actual, names)
            )
        trials = [
            match for match in group_matches if match.run.seed not in repeated_seeds and match.run.status == "finished"
        ]
        best_trial = max(trials, key=lambda match: _get_selection_merit(match.run), default=None)
        for settings_key, repetition in repetition_by_settings.items():
            merits = [
                _get_selection_merit(match.run) for match in trials if _get_settings_key(match.run) == settings_key
            ]
            if best_trial is not None and merits and max(merits) < _get_selection_merit(best_trial.run):
                departures.append(
                    Departure(
                        kind="repeated configurations",
                        where=_format_group(group),
                        planned=f"the best: {_describe_varied_settings(best_trial.run, configurations)}",
                        actual=f"another one: {_describe_varied_settings(repetition.run, configurations)}",
                        runs=(repetition.run.name,),
                    )
                )
    return departures


def _get_repeated_seeds(plan: Plan, configurations: Sequence[Configuration]) -> set[int]:
    """Return the seeds with which only the best of the configurations is repeated."""
    return set(plan.seeds_of_best) - {seed for configuration in configurations for seed in configuration.seeds}


def _get_selection_merit(run: _Run) -> float:
    """Return the value by which a run is chosen, higher for better runs; minus infinity if there is none."""
    value = run.row.get("selection")
    return -math.inf if value is None else merit(str(run.row["metric"]), float(value))


def _describe_varied_settings(run: _Run, configurations: Sequence[Configuration]) -> str:
    keys = dict.fromkeys(
        key for configuration in configurations for key in (*configuration.settings, *configuration.ranges)
    )
    descriptions = []
    for key in keys:
        planned_values = {
            repr(configuration.settings.get(key, configuration.ranges.get(key))) for configuration in configurations
        }
        if len(planned_values) > 1 or any(key in configuration.ranges for configuration in configurations):
            descriptions.append(f"{key}={describe_value(run.settings.get(key))}")
    return ", ".join(descriptions) or "the only one"


def _find_other_numbers_of_trials(plan: Plan, matches: Sequence[_Match]) -> list[Departure]:
    """Return the methods of which another number of configurations was tried than planned.

    For a search, return one departure if the number of its trials is not the planned one.
    """
    if plan.num_trials is not None:
        seeds = {seed for configuration in plan.configurations for seed in configuration.seeds}
        trials = [
            match.run
            for match in matches
            if match.configuration is not None and match.run.is_trial and match.run.seed in seeds
        ]
        if len(trials) == plan.num_trials:
            return []
        planned, actual = _format_count(plan.num_trials, "trial"), _format_count(len(trials), "trial")
        return [Departure("number of trials", ALL_RUNS, planned, actual)]
    departures = []
    for group, configurations in _group_configurations(plan).items():
        tried_settings = {
            _get_settings_key(match.run) for match in matches if match.group == group and match.run.is_trial
        }
        # A method without a run is listed as missing.
        if tried_settings and len(tried_settings) != len(configurations):
            planned = _format_count(len(configurations), "configuration")
            actual = _format_count(len(tried_settings), "configuration")
            departures.append(Departure("number of trials", _format_group(group), planned, actual))
    return departures


def _find_unequal_seeds(plan: Plan, matches: Sequence[_Match]) -> list[Departure]:
    """Return the tasks and models whose methods have finished runs with different seeds, unless that is planned."""
    departures = []
    configurations_by_group = _group_configurations(plan)
    for task, model in dict.fromkeys(group[:2] for group in configurations_by_group):
        groups = [group for group in configurations_by_group if group[:2] == (task, model)]
        planned_seeds = {
            group: {
                *plan.seeds_of_best,
                *(seed for configuration in configurations_by_group[group] for seed in configuration.seeds),
            }
            for group in groups
        }
        actual_seeds = {
            group: {match.run.seed for match in matches if match.group == group and match.run.status == "finished"}
            for group in groups
        }
        is_equal_in_plan = len(set(map(frozenset, planned_seeds.values()))) == 1
        if is_equal_in_plan and len(set(map(frozenset, actual_seeds.values()))) > 1:
            planned = f"{_format_seeds(planned_seeds[groups[0]])} of each method"
            actual = "; ".join(
                f"{group[2]}: {_join_with_commas(seeds) or 'none'}" for group, seeds in actual_seeds.items()
            )
            departures.append(Departure("unequal seeds", f"{task}, {model}", planned, actual))
    return departures


def _find_runs_without_result(plan: Plan, matches: Sequence[_Match]) -> list[Departure]:
    """Return the runs that failed, are unfinished, collapsed to constant predictions, or were pruned.

    Pruned runs are left out if the plan has a pruner.
    """
    # Names of runs by the fields `kind`, `where` and `actual` of their departure.
    names_by_departure: dict[tuple[str, str, str], list[str]] = {}
    for match in matches:
        run = match.run
        if run.status == "pruned" and plan.can_prune:
            continue
        if run.status != "finished":
            kind, actual = f"{run.status} run", str(run.row.get("error") or run.status)
        elif run.row.get("collapsed") is True:
            kind, actual = "collapsed run", "all predictions are equal"
        else:
            continue
        names_by_departure.setdefault((kind, _format_group(match.group), actual), []).append(run.name)
    return [
        Departure(kind, where, "a usable result", actual, tuple(names))
        for (kind, where, actual), names in names_by_departure.items()
    ]


def _find_other_code(plan: Plan, runs: Sequence[_Run]) -> list[Departure]:
    """Return the versions and commits of istar, other than the plan's, with which runs were made."""
    names_by_version: dict[str, list[str]] = {}
    names_by_code: dict[str, list[str]] = {}
    planned_code = _describe_code(plan.code_commit, plan.code_modified)
    for run in runs:
        # An unfinished run has no record yet.
        if run.status == "unfinished":
            continue
        version = str(run.row.get("istar_version") or "not recorded")
        if version != plan.istar_version:
            names_by_version.setdefault(version, []).append(run.name)
        code = _describe_code(run.row.get("code_commit"), run.row.get("code_modified"))
        # Two states of the same commit with uncommitted changes may differ.
        if code != planned_code or run.row.get("code_modified") is True:
            names_by_code.setdefault(code, []).append(run.name)
    other_versions = [
        Departure("other version of istar", ALL_RUNS, plan.istar_version, version, tuple(names))
        for version, names in names_by_version.items()
    ]
    other_code = [
        Departure("other code", ALL_RUNS, planned_code, code, tuple(names)) for code, names in names_by_code.items()
    ]
    return other_versions + other_code


def _describe_code(commit: Any, is_modified: Any) -> str:
    """Return a state of istar's code in words: its commit, and whether it has uncommitted changes."""
    if commit is None:
        return "no commit recorded"
    return f"commit {commit}" + (", with changes that are not committed" if is_modified else "")


def _find_early_runs(plan: Plan, runs: Sequence[_Run]) -> list[Departure]:
    """Return the runs that began before the plan was written, and those that do not say when they began."""
    early_runs, undated_runs = [], []
    for run in runs:
        started_at = run.row.get("began")
        try:
            if datetime.fromisoformat(str(started_at)) < plan.written_at:
                early_runs.append(run)
        except (ValueError, TypeError):
            # No time at all, as in the results of earlier versions, or one without a time zone.
            undated_runs.append(run)
    planned = f"after {plan.written_at.isoformat(timespec='seconds')}"
    departures = []
    if early_runs:
        first_start = min(str(run.row["began"]) for run in early_runs)
        names = tuple(run.name for run in early_runs)
        departures.append(Departure("run before the plan", ALL_RUNS, planned, f"the first at {first_start}", names))
    if undated_runs:
        names = tuple(run.name for run in undated_runs)
        departures.append(Departure("unknown beginning", ALL_RUNS, planned, "not recorded", names))
    return departures


# ---- groups and texts


def _group_configurations(plan: Plan) -> dict[tuple[str, str, str], list[Configuration]]:
    configurations_by_group: dict[tuple[str, str, str], list[Configuration]] = {}
    for configuration in plan.configurations:
        configurations_by_group.setdefault(configuration.group, []).append(configuration)
    return configurations_by_group


def _get_settings_key(run: _Run) -> str:
    """Return a text that is equal for runs with the same settings."""
    return json.dumps(dict(run.settings), sort_keys=True, default=str)


def _format_group(group: tuple[str, str, str]) -> str:
    """Return the task, model and method of a group, separated by commas."""
    return ", ".join(group)


def _format_count(count: int, noun: str) -> str:
    """Return a count with its noun, e.g. `1 run` or `2 runs`."""
    return f"{count} {noun}{'s' * (count != 1)}"


def _format_seeds(seeds: Iterable[int]) -> str:
    """Return the seeds in ascending order, e.g. `seed 3`, `seeds 1, 2` or `seeds 1 to 10, 12`."""
    sorted_seeds = sorted(set(seeds))
    ranges: list[list[int]] = []
    for seed in sorted_seeds:
        if ranges and seed == ranges[-1][-1] + 1:
            ranges[-1].append(seed)
        else:
            ranges.append([seed])
    range_texts = [
        f"{seeds_in_range[0]} to {seeds_in_range[-1]}" if len(seeds_in_range) > 3 else _join_with_commas(seeds_in_range)
        for seeds_in_range in ranges
    ]
    return f"seed{'s' * (len(sorted_seeds) != 1)} {_join_with_commas(range_texts)}"


def _join_with_commas(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))
