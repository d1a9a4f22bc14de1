"""Departures of runs from the plan of an experiment that `istar plan` wrote: what was planned, and what was done."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pandas as pd

from istar.pages.sheets import Entry, Sheet
from istar.reports.plan_file import (
    Configuration,
    Plan,
    describe_value,
    describe_values,
    family,
    flat_settings,
    group_of,
)
from istar.scores import merit

ALL = "all runs"
_MAX_NAMES = 3  # names of runs that the page shows of a departure; the CSV file has all


@dataclass(frozen=True)
class Departure:
    """Something that was done otherwise than planned."""

    kind: str  # e.g. `missing run` or `changed setting`
    where: str  # task, model and method in words; `all runs` if it concerns no method in particular
    planned: str
    actual: str
    runs: tuple[str, ...] = ()  # names of the runs, or of the planned runs that are missing


@dataclass(frozen=True)
class _Run:
    """What is compared with the plan: a row of the frame of runs, without pandas' marks of missing values."""

    values: Mapping[str, Any]  # the row, where missing values are None
    settings: Mapping[str, Any]  # see `istar.reports.plan_file.flat_settings`

    @property
    def name(self) -> str:
        return str(self.values["name"])

    @property
    def seed(self) -> int:
        return int(self.values["seed"])

    @property
    def status(self) -> str:
        return str(self.values["status"])

    @property
    def task(self) -> str:
        return str(self.values["task"])

    @property
    def model(self) -> str:
        """Last part of the model's name."""
        return str(self.values["model"])

    @property
    def method(self) -> str:
        """Method with its settings, as in the report."""
        return str(self.values["method"])

    @property
    def is_trial(self) -> bool:
        """Whether the run has a result that a search or a selection may use."""
        return self.status in ("finished", "pruned")


@dataclass(frozen=True)
class _Match:
    """A run with the planned configuration that is nearest to it, and what differs."""

    run: _Run
    configuration: Configuration | None = None  # None if the task, the model or the method is not planned
    changed: tuple[str, ...] = ()  # keys of the settings that differ
    unplanned: str = ""  # `task`, `model` or `method` if there is no configuration

    @property
    def group(self) -> tuple[str, str, str]:
        """Group of the configuration; if there is none, task, model and method without its settings."""
        if self.configuration is None:
            return group_of(self.run.task, self.run.model, self.run.method, grid="")
        return self.configuration.group

    @property
    def has_planned_settings(self) -> bool:
        return self.configuration is not None and not self.changed


def departures(plan: Plan, frame: pd.DataFrame) -> list[Departure]:
    """Return all departures of the runs in a frame from a plan; an empty list if there are none.

    A planned run is there if a run has its settings and its seed. A run is compared with the planned configuration of
    its task, model and method (without λ and the other settings) from which it differs in the fewest settings, and
    counts as one of the group of this configuration: in a sweep with named grids, of its grid. Settings that do not
    change the outcome of a run, such as paths, do not count.

    Args:
        plan: from `istar.reports.plan_file.read`.
        frame: `istar.reports.run_frame.Runs.frame`, of runs with any status.
    """
    runs = [_Run(values, _settings(values)) for values in map(_without_nan, frame.to_dict("records"))]
    matches = [_match(plan, run) for run in runs]
    parts = (
        _edited(plan),
        _missing(plan, matches),
        _unplanned(plan, matches),
        _changed(plan, matches),
        _other_data(matches),
        _repeated(plan, matches),
        _trials(plan, matches),
        _unequal_seeds(plan, matches),
        _without_result(plan, matches),
        _other_code(plan, runs),
        _early(plan, runs),
    )
    return [departure for part in parts for departure in part]


def sheet(listed: Sequence[Departure]) -> Sheet:
    """Return the table of departures; without rows if there are none."""
    rows = [
        [Entry(text) for text in (item.kind, item.where, item.planned, item.actual)]
        + [Entry(str(len(item.runs)) if item.runs else "\u2013", number=True), Entry(_some_names(item.runs))]
        for item in listed
    ]
    columns = ["departure", "where", "planned", "actual", "count", "runs"]
    values = [(d.kind, d.where, d.planned, d.actual, len(d.runs), " ".join(d.runs)) for d in listed]
    return Sheet(
        "departures",
        "Departures from the plan",
        "What was done otherwise than the plan says: runs that are missing or were not planned, other settings, seeds, "
        "data and code, runs without a usable result, and runs that began before the plan was written.",
        ("departure", "task, model, method", "planned", "actual", "runs", "names"),
        {"": rows} if rows else {},
        pd.DataFrame(values, columns=columns),
        num_row_headers=2,
    )


def sentence(plan: Plan, listed: Sequence[Departure]) -> str:
    """Return a sentence that counts the departures, or says that there is none."""
    written = plan.written.isoformat(timespec="seconds")
    of_plan = f"The plan was written at {written} by istar {plan.istar_version}"
    if plan.replaces:
        count = len(plan.replaces)
        of_plan += f" and replaced {'an earlier one' if count == 1 else f'{count} earlier ones'}"
    if not listed:
        return f"{of_plan}. The runs do not depart from it."
    count = len(listed)
    return f"{of_plan}. There {'is one departure' if count == 1 else f'are {count} departures'} from it."


def _some_names(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _without_nan(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()}


def _settings(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that identify a run, from the columns of its config keys."""
    config: dict[str, dict[str, Any]] = {}
    for column, value in row.items():
        group, _, key = column.partition(".")
        if key and group != "validation":
            config.setdefault(group, {})[key] = value
    return flat_settings(config)


# ---- the planned configuration of a run


def _match(plan: Plan, run: _Run) -> _Match:
    """Return the configuration from which a run differs in the fewest settings."""
    for configuration in plan.configurations:
        if run.name in configuration.names:
            return _Match(run, configuration)
    of_task = [entry for entry in plan.configurations if entry.task == run.task]
    if not of_task:
        return _Match(run, unplanned="task")
    of_model = [entry for entry in of_task if entry.model == run.model]
    if not of_model:
        return _Match(run, unplanned="model")
    candidates = [entry for entry in of_model if family(entry.method) == family(run.method)]
    if not candidates:
        return _Match(run, unplanned="method")
    varied = {key for configuration in candidates for key in (*configuration.settings, *configuration.ranges)}
    # The settings that all planned runs have in common are compared once.
    common = [key for key in plan.settings.keys() | run.settings.keys() if key not in varied]
    changed = [key for key in common if run.settings.get(key) != plan.settings.get(key)]
    nearest, keys = min(
        ((configuration, _differing(configuration, varied, run)) for configuration in candidates),
        key=lambda item: (len(item[1]), run.seed not in item[0].seeds),
    )
    return _Match(run, nearest, tuple(sorted([*changed, *keys])))


def _differing(configuration: Configuration, keys: Iterable[str], run: _Run) -> list[str]:
    """Return those of the keys in which a run differs from a configuration."""
    return [key for key in keys if not _is_planned(configuration, key, run.settings.get(key))]


def _is_planned(configuration: Configuration, key: str, value: Any) -> bool:
    if key not in configuration.ranges:
        return bool(configuration.settings.get(key) == value)
    choice = configuration.ranges[key]
    if isinstance(choice, Mapping):
        return isinstance(value, int | float) and choice["low"] <= value <= choice["high"]
    return value in choice


# ---- kinds of departures


def _edited(plan: Plan) -> list[Departure]:
    if not plan.is_edited:
        return []
    return [Departure("edited plan", ALL, "the plan as it was written", "its contents do not match their hash")]


def _missing(plan: Plan, matches: Sequence[_Match]) -> list[Departure]:
    """List the planned runs without a run of the same settings and seed, and the repetitions of no configuration."""
    there = {(id(match.configuration), match.run.seed) for match in matches if match.has_planned_settings}
    result = []
    for group, configurations in _by_group(plan).items():
        absent = [
            (seed, name)
            for configuration in configurations
            for seed, name in zip(configuration.seeds, configuration.names, strict=False)
            if (id(configuration), seed) not in there
        ]
        planned = sum(len(configuration.names) for configuration in configurations)
        if absent:
            text = f"{_count(planned - len(absent), 'run')}; missing are {_seeds(seed for seed, _ in absent)}"
            names = tuple(name for _, name in absent)
            result.append(Departure("missing run", _where(group), _count(planned, "run"), text, names))
        repeated = set(plan.seeds_of_best) - {seed for entry in configurations for seed in entry.seeds}
        most = max(({seed for seed in repeated if (id(entry), seed) in there} for entry in configurations), key=len)
        if repeated - most:
            actual = f"without {_seeds(repeated - most)}"
            text = f"the best configuration with {_seeds(plan.seeds_of_best)}"
            result.append(Departure("missing run", _where(group), text, actual))
    return result


def _unplanned(plan: Plan, matches: Sequence[_Match]) -> list[Departure]:
    """List the runs whose task, model, method or seed is not planned."""
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    values = {
        "task": lambda entry: entry.task,
        "model": lambda entry: entry.model,
        "method": lambda entry: family(entry.method),
    }
    for match in matches:
        run = match.run
        if match.unplanned:
            of_plan: Callable[[Configuration], str] = values[match.unplanned]
            planned = _list(dict.fromkeys(map(of_plan, plan.configurations)))
            actual = match.group[("task", "model", "method").index(match.unplanned)]
            key = f"{match.unplanned} that was not planned", _where(match.group), planned, actual
            rows.setdefault(key, []).append(run.name)
        elif match.configuration is not None and run.seed not in {*match.configuration.seeds, *plan.seeds_of_best}:
            planned = _seeds({*match.configuration.seeds, *plan.seeds_of_best})
            key = "seed that was not planned", _where(match.group), planned, _seeds([run.seed])
            rows.setdefault(key, []).append(run.name)
    return [Departure(*key, tuple(names)) for key, names in rows.items()]


def _changed(plan: Plan, matches: Sequence[_Match]) -> list[Departure]:
    """List the settings that differ from all planned configurations, by key, with the planned and the actual value."""
    by_group = _by_group(plan)
    rows: dict[tuple[str, str, str], list[str]] = {}
    for match in matches:
        for key in match.changed:
            assert match.configuration is not None
            actual = match.run.settings.get(key)
            planned = _planned_values(plan, by_group[match.group], key)
            if any(_is_planned(entry, key, actual) for entry in by_group[match.group]) and key not in plan.settings:
                # Other configurations of the method have this value, but not together with the run's other values.
                planned = f"{_planned_values(plan, [match.configuration], key)} with its other settings"
            row = _where(match.group), f"{key}={planned}", f"{key}={describe_value(actual)}"
            rows.setdefault(row, []).append(match.run.name)
    return [Departure("changed setting", *row, tuple(names)) for row, names in rows.items()]


def _planned_values(plan: Plan, configurations: Sequence[Configuration], key: str) -> str:
    if key in plan.settings:
        return describe_value(plan.settings[key])
    for configuration in configurations:
        if key in configuration.ranges:
            return describe_values(configuration.ranges[key])
    return _list(dict.fromkeys(describe_value(configuration.settings.get(key)) for configuration in configurations))


def _other_data(matches: Sequence[_Match]) -> list[Departure]:
    """List the runs with planned settings, but other data or, if their names differ, other weights."""
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for match in matches:
        run, configuration = match.run, match.configuration
        if configuration is None or run.name in configuration.names:
            continue
        fingerprint = run.values.get("fingerprint")
        if fingerprint is not None and fingerprint != configuration.data:
            key = "other data", _where(match.group), f"fingerprint {configuration.data}", f"fingerprint {fingerprint}"
            rows.setdefault(key, []).append(run.name)
        elif match.has_planned_settings and run.seed in configuration.seeds and configuration.names:
            name = configuration.names[configuration.seeds.index(run.seed)]
            key = "other model", _where(match.group), f"run {name}", "same settings, but other weights or tokenizer"
            rows.setdefault(key, []).append(run.name)
    return [Departure(*key, tuple(names)) for key, names in rows.items()]


def _repeated(plan: Plan, matches: Sequence[_Match]) -> list[Departure]:
    """List where not the best configuration, or more than one, was repeated with the seeds of `sweep.seeds`."""
    result = []
    for group, configurations in _by_group(plan).items():
        repeated = set(plan.seeds_of_best) - {seed for entry in configurations for seed in entry.seeds}
        of_group = [match for match in matches if match.group == group and match.has_planned_settings]
        again = {_identity(m.run): m for m in of_group if m.run.seed in repeated}
        if not again:
            continue
        if len(again) > 1:
            names = tuple(match.run.name for match in of_group if match.run.seed in repeated)
            text = f"{len(again)} configurations with these seeds"
            result.append(Departure("repeated configurations", _where(group), "the best alone", text, names))
        tried = [m for m in of_group if m.run.seed not in repeated and m.run.status == "finished"]
        best = max(tried, key=lambda match: _merit(match.run), default=None)
        for identity, match in again.items():
            merits = [_merit(other.run) for other in tried if _identity(other.run) == identity]
            if best is not None and merits and max(merits) < _merit(best.run):
                result.append(
                    Departure(
                        "repeated configurations",
                        _where(group),
                        f"the best: {_describe(best, configurations)}",
                        f"another one: {_describe(match, configurations)}",
                        (match.run.name,),
                    )
                )
    return result


def _merit(run: _Run) -> float:
    """Return the value by which a run is chosen, higher for better runs; the lowest if there is none."""
    value = run.values.get("selection")
    return -math.inf if value is None else merit(str(run.values["metric"]), float(value))


def _describe(match: _Match, configurations: Sequence[Configuration]) -> str:
    """Return the settings of a run in which the planned configurations of its method differ."""
    keys = dict.fromkeys(key for entry in configurations for key in (*entry.settings, *entry.ranges))
    texts = {}
    for key in keys:
        values = {repr(entry.settings.get(key, entry.ranges.get(key))) for entry in configurations}
        if len(values) > 1 or any(key in entry.ranges for entry in configurations):
            texts[key] = f"{key}={describe_value(match.run.settings.get(key))}"
    return ", ".join(texts.values()) or "the only one"


def _trials(plan: Plan, matches: Sequence[_Match]) -> list[Departure]:
    """List the methods with another number of tried configurations than planned; of a search, the number of trials."""
    if plan.trials is not None:
        done = [m.run for m in matches if m.configuration is not None and m.run.is_trial]
        done = [run for run in done if run.seed in {s for c in plan.configurations for s in c.seeds}]
        if len(done) == plan.trials:
            return []
        return [Departure("number of trials", ALL, _count(plan.trials, "trial"), _count(len(done), "trial"))]
    result = []
    for group, configurations in _by_group(plan).items():
        tried = {_identity(match.run) for match in matches if match.group == group and match.run.is_trial}
        # A method without a run is listed as missing.
        if tried and len(tried) != len(configurations):
            planned, actual = (_count(number, "configuration") for number in (len(configurations), len(tried)))
            result.append(Departure("number of trials", _where(group), planned, actual))
    return result


def _unequal_seeds(plan: Plan, matches: Sequence[_Match]) -> list[Departure]:
    """List the tasks and models whose methods have finished runs with different seeds, unless that is planned."""
    result = []
    by_group = _by_group(plan)
    for task, model in dict.fromkeys(group[:2] for group in by_group):
        groups = [group for group in by_group if group[:2] == (task, model)]
        planned = {g: {*plan.seeds_of_best, *(s for c in by_group[g] for s in c.seeds)} for g in groups}
        actual = {
            group: {m.run.seed for m in matches if m.group == group and m.run.status == "finished"} for group in groups
        }
        if len({frozenset(seeds) for seeds in planned.values()}) == 1 < len(set(map(frozenset, actual.values()))):
            text = "; ".join(f"{group[2]}: {_list(seeds) or 'none'}" for group, seeds in actual.items())
            result.append(
                Departure("unequal seeds", f"{task}, {model}", f"{_seeds(planned[groups[0]])} of each method", text)
            )
    return result


def _without_result(plan: Plan, matches: Sequence[_Match]) -> list[Departure]:
    """List the runs that failed, are unfinished, collapsed to constant predictions, or were pruned without a plan."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for match in matches:
        run = match.run
        if run.status == "pruned" and plan.prunes:
            continue
        if run.status != "finished":
            kind, actual = f"{run.status} run", str(run.values.get("error") or run.status)
        elif run.values.get("collapsed") is True:
            kind, actual = "collapsed run", "all predictions are equal"
        else:
            continue
        rows.setdefault((kind, _where(match.group), actual), []).append(run.name)
    return [
        Departure(kind, where, "a usable result", actual, tuple(names)) for (kind, where, actual), names in rows.items()
    ]


def _other_code(plan: Plan, runs: Sequence[_Run]) -> list[Departure]:
    """List the versions and commits of istar, other than the plan's, with which runs were made."""
    versions: dict[str, list[str]] = {}
    commits: dict[str, list[str]] = {}
    planned = _code(plan.code_commit, plan.code_modified)
    for run in runs:
        # An unfinished run has no record yet.
        if run.status == "unfinished":
            continue
        version = str(run.values.get("istar_version") or "not recorded")
        if version != plan.istar_version:
            versions.setdefault(version, []).append(run.name)
        commit = _code(run.values.get("code_commit"), run.values.get("code_modified"))
        # Two states with changes that are not committed may differ.
        if commit != planned or run.values.get("code_modified") is True:
            commits.setdefault(commit, []).append(run.name)
    result = [
        Departure("other version of istar", ALL, plan.istar_version, version, tuple(names))
        for version, names in versions.items()
    ]
    return result + [Departure("other code", ALL, planned, commit, tuple(names)) for commit, names in commits.items()]


def _code(commit: Any, is_modified: Any) -> str:
    if commit is None:
        return "no commit recorded"
    return f"commit {commit}" + (", with changes that are not committed" if is_modified else "")


def _early(plan: Plan, runs: Sequence[_Run]) -> list[Departure]:
    """List the runs that began before the plan was written, and those that do not say when they began."""
    early, unknown = [], []
    for run in runs:
        began = run.values.get("began")
        try:
            if datetime.fromisoformat(str(began)) < plan.written:
                early.append(run)
        except (ValueError, TypeError):
            # No time at all, as in the results of earlier versions, or one without a time zone.
            unknown.append(run)
    written = f"after {plan.written.isoformat(timespec='seconds')}"
    result = []
    if early:
        first = min(str(run.values["began"]) for run in early)
        names = tuple(run.name for run in early)
        result.append(Departure("run before the plan", ALL, written, f"the first at {first}", names))
    if unknown:
        names = tuple(run.name for run in unknown)
        result.append(Departure("unknown beginning", ALL, written, "not recorded", names))
    return result


# ---- words


def _by_group(plan: Plan) -> dict[tuple[str, str, str], list[Configuration]]:
    groups: dict[tuple[str, str, str], list[Configuration]] = {}
    for configuration in plan.configurations:
        groups.setdefault(configuration.group, []).append(configuration)
    return groups


def _identity(run: _Run) -> str:
    """Return a text that is equal for runs with the same settings."""
    return json.dumps(dict(run.settings), sort_keys=True, default=str)


def _where(group: tuple[str, str, str]) -> str:
    return ", ".join(group)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _seeds(seeds: Iterable[int]) -> str:
    numbers = sorted(set(seeds))
    return f"seed{'s' * (len(numbers) != 1)} {_list(numbers)}"


def _list(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))
