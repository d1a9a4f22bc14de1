"""The plan of an experiment (`plan.yaml`), which `istar plan` writes before the runs: its fields, writing and reading.

The file contains a hash of its contents, by which a later edit is noticed.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from istar.config.groups import Config, identity_values
from istar.errors import UserError, shorten
from istar.outputs import Output
from istar.parsing import MissingFileError, read_yaml
from istar.statistics import power
from istar.statistics.paired import TESTS, smallest_sign_flip_p

PLAN, TEXT = "plan.yaml", "plan.md"
KIND = "plan of an experiment by istar plan"
FORMAT = 1


@dataclass(frozen=True)
class Configuration:
    """Planned runs that differ only in the seed, or, with `ranges`, the space from which a search chooses."""

    task: str
    model: str  # last part of the model's name
    method: str  # as in the report; of a search, the method of one of its configurations
    grid: str  # name of the grid of the sweep; empty if the sweep has no named grids
    settings: dict[str, Any]  # settings in which the planned configurations differ, by key of the command line
    # Of a search: the keys whose values it chooses, with a list of values, or with the ends `low` and `high`.
    ranges: dict[str, Any]
    seeds: tuple[int, ...]
    run_names: tuple[str, ...]  # name of the run of each seed; empty for a search
    data_fingerprint: str  # fingerprint of the training and validation examples

    @property
    def group(self) -> tuple[str, str, str]:
        """Task, model and method of the plan; see `get_plan_group`."""
        return get_plan_group(self.task, self.model, self.method, self.grid)


@dataclass(frozen=True)
class Plan:
    """The plan of an experiment, as read from its file."""

    written_at: datetime  # with time zone
    istar_version: str
    code_commit: str | None  # commit of istar's git checkout; None if istar did not run from one
    code_modified: bool | None
    settings: dict[str, Any]  # settings that all planned runs have in common
    configurations: tuple[Configuration, ...]
    test: str = "sign-flip"  # test of each method against Base, a key of `paired.TESTS`
    alpha: float = 0.05  # probability of any false difference among all comparisons
    num_trials: int | None = None  # number of trials of a search; None for a grid
    seeds_of_best: tuple[int, ...] = ()  # seeds with which the best run of each group of configurations is repeated
    can_prune: bool = False  # whether a search may stop runs early
    is_edited: bool = False  # whether the contents of the file do not match their hash
    replaced_hashes: tuple[str, ...] = ()  # hashes of the plans that this one has replaced, the earliest first


def strip_method_settings(method: str) -> str:
    """Return a method's name without its settings, which begin with λ.

    >>> strip_method_settings("I-STAR λ=-1 ζ=0.4"), strip_method_settings("Base")
    ('I-STAR', 'Base')
    """
    return method.split(" λ=")[0]


def get_plan_group(task: str, model: str, method: str, grid: str) -> tuple[str, str, str]:
    """Return the group of a run in a plan: its task, model and method, without the settings of the method.

    A sweep repeats the best run of each group with more seeds. In a sweep with named grids, each grid is a method.

    Args:
        task: name of the task.
        model: last part of the model's name.
        method: method with its settings, as in the report.
        grid: name of the grid; empty if the sweep has no named grids.

    >>> get_plan_group("rte", "bert", "I-STAR λ=-1 ζ=0.4", "")
    ('rte', 'bert', 'I-STAR')
    >>> get_plan_group("rte", "bert", "I-STAR λ=-1 ζ=0.4", "istar_-1")
    ('rte', 'bert', 'I-STAR (grid istar_-1)')
    """
    return task, model, strip_method_settings(method) + (f" (grid {grid})" if grid else "")


def flatten_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a config that identify a run, by the key `group.key`.

    The result has neither the seed, nor the names of the task and the model, nor settings that are None. `config` is
    plain data with the keys of the command line.
    """
    groups = {group: group_settings for group, group_settings in config.items() if isinstance(group_settings, Mapping)}
    return {
        f"{group}.{key}": value
        for group, group_settings in identity_values(Config, groups).items()
        for key, value in group_settings.items()
        if value is not None and f"{group}.{key}" != "task.name"
    }


def build_test_fields(
    test: str, alpha: float, num_comparisons: int, num_pairs: int, sd: float | None, target_power: float
) -> dict[str, Any]:
    """Return the fields of a plan on its significance test, its correction, and the minimum detectable difference.

    The minimum detectable difference is that of the paired t-test at alpha divided by the number of comparisons, the
    strictest level of Holm's method. It is None without `sd`, without comparisons, or with fewer than two pairs.

    Args:
        test: a key of `paired.TESTS`.
        alpha: probability of any false difference among all comparisons.
        num_comparisons: number of comparisons with Base.
        num_pairs: number of seeds that both methods of a comparison have.
        sd: standard deviation of the paired differences, in the unit of the metric as tables show it.
        target_power: probability with which the minimum detectable difference is found.

    Raises:
        UserError: if alpha, `sd` or the power is out of range.
    """
    # Checks the arguments also where there is nothing to compute.
    power.smallest_difference(1.0 if sd is None else sd, 2, alpha, target_power)
    strictest_level = alpha / max(1, num_comparisons)
    minimum_detectable_difference = None
    if sd is not None and num_comparisons and num_pairs >= 2:
        minimum_detectable_difference = power.smallest_difference(sd, num_pairs, strictest_level, target_power)
    return {
        "name": TESTS[test],
        "alpha": alpha,
        "correction": "Holm",
        "comparisons": num_comparisons,
        "pairs": num_pairs,
        "sd": sd,
        "power": target_power,
        "smallest_difference": minimum_detectable_difference,
        "smallest_p": smallest_sign_flip_p(num_pairs) if test == "sign-flip" and num_pairs else None,
    }


def compute_digest(contents: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a plan's contents, without the field `hash`, as 64 hexadecimal digits.

    The hash does not depend on the layout of the file, the order of its fields, or its comments.
    """
    hashed_fields = {key: value for key, value in contents.items() if key != "hash"}
    return hashlib.sha256(json.dumps(hashed_fields, sort_keys=True, default=str).encode()).hexdigest()


def check_plan_folder(folder: Path, force: bool) -> None:
    """Raise an error if a plan cannot be written to a folder, for example because there is one already.

    Raises:
        UserError: if there is a plan and `force` is False, and as `istar.outputs.Output.check` does.
    """
    output = Output(folder, "plan")
    if force:
        output.recover()
    elif (folder / PLAN).exists():
        raise UserError(
            f"{folder / PLAN} exists; name another folder with --out, or write a new plan with --force, which keeps "
            "this one under another name"
        )
    else:
        output.check([TEXT])  # a plan.md alone is what a killed call has left, or foreign


def write(contents: Mapping[str, Any], folder: Path, force: bool = False) -> Path:
    """Write `plan.yaml` and `plan.md` into a folder, and return the path of the former.

    With `force`, an earlier plan is kept as `plan.old-1.yaml`, or with the next number that is free, and the new plan
    records the hash of the earlier one.

    Raises:
        UserError: if there is a plan and `force` is False, or if the files cannot be written.
    """
    check_plan_folder(folder, force)
    fields = {**contents, "replaces": _read_replaced_hashes(folder)}
    fields["hash"] = compute_digest(fields)
    yaml_text = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
    # The plan itself is last, so that a folder with plan.yaml has all files.
    files = {**_copy_existing_plan(folder), TEXT: format_as_markdown(fields).encode(), PLAN: yaml_text.encode()}
    Output(folder, "plan").write(files, saved=(TEXT, PLAN) if force else ())
    return folder / PLAN


def _read_replaced_hashes(folder: Path) -> list[str]:
    """Return the hashes of the plans that the plan in a folder has replaced, followed by its own hash.

    The list is empty if the folder has no plan that can be read.
    """
    try:
        existing_plan = _load_fields(folder / PLAN)
    except UserError:
        return []
    return [*map(str, existing_plan.get("replaces") or []), str(existing_plan.get("hash"))]


def _copy_existing_plan(folder: Path) -> dict[str, bytes]:
    """Return the plan in a folder and its Markdown by their new names `plan.old-<n>`, with the first n that is free."""
    contents = {
        name: (folder / name).read_bytes()
        for name in (PLAN, TEXT)
        if (folder / PLAN).exists() and (folder / name).is_file()
    }
    number = 1
    while True:
        copies = {f"{Path(name).stem}.old-{number}{Path(name).suffix}": content for name, content in contents.items()}
        # A killed call may have written some of the copies already.
        if all(not (folder / name).exists() or (folder / name).read_bytes() == copies[name] for name in copies):
            return copies
        number += 1


def read(path: Path) -> Plan:
    """Read the plan of an experiment from its `plan.yaml`.

    Raises:
        UserError: if there is no such file, if it is no plan, or if it was edited such that it lacks a field.
    """
    fields = _load_fields(path)
    try:
        return Plan(
            written_at=_parse_time(fields["written"]),
            istar_version=str(fields["istar_version"]),
            code_commit=fields["code_commit"],
            code_modified=fields["code_modified"],
            settings=dict(fields["settings"]),
            configurations=tuple(map(_parse_configuration, fields["configurations"])),
            test={name: short_name for short_name, name in TESTS.items()}[fields["test"]["name"]],
            alpha=fields["test"]["alpha"],
            num_trials=fields["sweep"]["trials"],
            seeds_of_best=tuple(fields["sweep"]["seeds_of_best"]),
            can_prune=fields["sweep"]["pruner"] not in (None, "none"),
            is_edited=fields.get("hash") != compute_digest(fields),
            replaced_hashes=tuple(fields["replaces"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} was edited such that it is no plan any more: {shorten(repr(error))}") from error


def _load_fields(path: Path) -> dict[str, Any]:
    """Return the fields of a plan as a dictionary, from its file.

    Raises:
        UserError: if there is no such file, or if it is no plan of this version's format.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder; name the file {PLAN} in it")
    try:
        fields = read_yaml(path)
    except MissingFileError as error:
        raise UserError(f"{path}: there is no such plan; istar plan writes one") from error
    if not isinstance(fields, dict) or fields.get("kind") != KIND:
        raise UserError(f"{path} is no plan; expected the {PLAN} that istar plan writes")
    if fields.get("format") != FORMAT:
        raise UserError(f"{path} has format {fields.get('format')}; this version of istar reads {FORMAT}")
    return fields


def _parse_time(text: Any) -> datetime:
    """Parse a time with time zone in ISO 8601.

    Raises:
        ValueError: if the text is no time or has no time zone.
    """
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError(f"{text} has no time zone")
    return time


def _parse_configuration(fields: Mapping[str, Any]) -> Configuration:
    return Configuration(
        task=fields["task"],
        model=fields["model"],
        method=fields["method"],
        grid=str(fields.get("grid") or ""),
        settings=dict(fields["settings"]),
        ranges=dict(fields.get("ranges") or {}),
        seeds=tuple(fields["seeds"]),
        run_names=tuple(fields["names"]),
        data_fingerprint=fields["data"],
    )


def format_as_markdown(contents: Mapping[str, Any]) -> str:
    """Return a plan as Markdown that can be read and published, without the list of its configurations."""
    commit = contents["code_commit"] or "not known"
    modified = ", with changes that are not committed" if contents["code_modified"] else ""
    lines = [
        "# Plan of an experiment",
        "",
        f"Written at {contents['written']} by istar {contents['istar_version']} (commit {commit}{modified}), before "
        "the runs.",
        *(f"It replaces an earlier plan with the hash {digest}." for digest in contents["replaces"]),
        *_format_section("Hypotheses", [f"{number}. {text}" for number, text in enumerate(contents["hypotheses"], 1)]),
    ]
    if contents["hypotheses_generated"]:
        lines += ["", "No hypothesis was given; this was made from the methods."]
    lines += _format_section("Methods", _format_methods(contents["methods"]))
    lines += ["", "Settings that all runs have in common:", "", _format_settings(contents["settings"])]
    lines += _format_section("Tasks, models and seeds", _format_tasks_models_and_seeds(contents))
    lines += _format_section("Selection", [contents["selection"]])
    lines += _format_section("Test", [_describe_test(contents["test"])])
    lines += _format_section("Budget", [_describe_budget(contents["budget"])])
    lines += _format_section("Command", ["```bash", contents["train_command"], "```"])
    lines += ["", f"SHA-256 of the contents of `{PLAN}`: `{contents['hash']}`"]
    return "\n".join(lines) + "\n"


def _format_section(title: str, lines: Sequence[str]) -> list[str]:
    """Return the lines of a Markdown section below its heading."""
    return ["", f"## {title}", "", *lines]


def _format_methods(methods: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a Markdown list of the methods with their settings, as lines."""
    lines = []
    for method in methods:
        num_configurations = method["configurations"]
        configurations_text = (
            f"{num_configurations} configuration{'s' * (num_configurations != 1)}"
            if num_configurations
            else "chosen by a search"
        )
        lines.append(f"- **{method['method']}**, {configurations_text}")
        if method["settings"]:
            lines.append(f"    - fixed: {_format_settings(method['settings'])}")
        for key, values in method["grid"].items():
            lines.append(f"    - `{key}`: {describe_values(values)}")
    return lines


def _format_settings(settings: Mapping[str, Any]) -> str:
    """Return settings as Markdown, e.g. `optim.lr=3e-05`, separated by commas."""
    return ", ".join(f"`{key}={describe_value(value)}`" for key, value in settings.items())


def describe_value(value: Any) -> str:
    """Return the value of a setting as text; None is `not set`.

    >>> describe_value(3.0), describe_value(1e-05), describe_value(True), describe_value(None)
    ('3', '1e-05', 'true', 'not set')
    """
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def describe_values(values: Any) -> str:
    """Return a list of values, or an interval with the ends `low` and `high`, as text.

    >>> describe_values([1, 2]), describe_values({"low": -5.0, "high": 5.0})
    ('1, 2', '-5 to 5')
    """
    if isinstance(values, Mapping):
        return f"{describe_value(values['low'])} to {describe_value(values['high'])}"
    return ", ".join(map(describe_value, values))


def _format_tasks_models_and_seeds(contents: Mapping[str, Any]) -> list[str]:
    lines = [f"- {task['name']}: {task['metric']} on {task['reported_set']}" for task in contents["tasks"]]
    lines.append(f"- models: {', '.join(contents['models'])}")
    lines.append(f"- seeds: {', '.join(map(str, contents['seeds']))}")
    if contents["sweep"]["seeds_of_best"]:
        seeds = ", ".join(map(str, contents["sweep"]["seeds_of_best"]))
        lines.append(f"- seeds with which the best configurations are repeated: {seeds}")
    return lines


def _describe_test(test: Mapping[str, Any]) -> str:
    """Return the sentences of a plan on its significance test and on the smallest difference that it can find.

    `test` has the fields of `build_test_fields`.
    """
    num_comparisons = test["comparisons"]
    if not num_comparisons:
        return "There is no method to compare with Base, so that no test is planned."
    text = (
        f"Each method is compared with Base on each task and model by the two-sided {test['name']} over the seeds that "
        f"both have, at alpha = {test['alpha']:g}. "
    )
    if num_comparisons == 1:
        text += "As there is one comparison, its p-value needs no correction."
    else:
        text += (
            f"The p-values of the {num_comparisons} comparisons are corrected by Holm's method, so that alpha is the "
            "probability of any false difference."
        )
    strictest_level = test["alpha"] / num_comparisons
    if test["sd"] is None:
        text += (
            " The smallest difference that these seeds can find is unknown, because no standard deviation was given."
        )
    elif test["smallest_difference"] is None:
        text += " The smallest difference that can be found is unknown, because there are fewer than two seeds."
    else:
        text += (
            f" With {test['pairs']} seeds and a standard deviation of the paired differences of {test['sd']:g}, the "
            f"smallest difference that is found with probability {test['power']:g} is "
            f"{test['smallest_difference']:.3g} (paired t-test at the level {strictest_level:.3g}"
            f"{', the strictest of the method by Holm' if num_comparisons > 1 else ''})."
        )
    if test["smallest_p"] is not None and test["smallest_p"] >= strictest_level:
        text += (
            f" With {test['pairs']} pairs, the sign-flip test gives no p-value below {test['smallest_p']:g}, so that "
            f"it cannot reach {strictest_level:.3g}: plan more seeds."
        )
    return text


def _describe_budget(budget: Mapping[str, Any]) -> str:
    """Return the sentence of a plan on its numbers of runs, epochs and training examples."""
    text = f"{budget['runs']:,} runs with at most {budget['epochs']:,} epochs"
    if budget["training_examples"] is not None:
        text += f" and at most {budget['training_examples']:,} training examples, counted once for each epoch"
    if budget["finished_before"]:
        text += f". {budget['finished_before']} of the runs were finished before the plan was written"
    return f"{text}."
