"""Runs as rows of tables: their columns, and groups of the runs that a table compares."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from istar.runs.identity import (
    Inputs,
    configuration_hash,
    identifies_run,
    label_inputs,
    label_method,
    shorten_model_name,
)
from istar.runs.record import RunRecord

RUN_COLUMNS = (
    "name", "status", "task", "model", "method", "seed", "metric", "value", "selection", "epoch", "constant",
    "collapsed", "isoscore_before", "isoscore_after", "seconds", "skipped_steps", "error", "fingerprint",
    "began", "istar_version", "code_commit", "code_modified",
)  # fmt: skip
"""Columns of every data frame of runs; see `Runs.frame`."""


def get_inputs(record: RunRecord) -> Inputs:
    """Return the data and the model that a run starts from; their fingerprints are unknown of an unfinished run."""
    task, model = record.config["task"], record.config["model"]
    names = task["name"], task.get("data_dir"), model["name"], model.get("revision")
    return Inputs(*names, record.data.get("fingerprint"), record.model_identity)


def record_to_row(record: RunRecord) -> dict[str, Any]:
    """Return the row of a run in a data frame of runs, without the column `folder`; see `Runs.frame`.

    Task and model have their short names; see `istar.runs.identity.label_inputs` for the labels among other runs.
    """
    config, headline = record.config, record.headline
    isoscore_before, isoscore_after = (record.isotropy.get(stage, {}).get("union") for stage in ("before", "after"))
    column_values = (
        record.name,
        record.status,
        config["task"]["name"],
        shorten_model_name(config["model"]["name"]),
        label_method(record.config),
        config["seed"],
        headline.get("metric"),
        headline.get("value"),
        record.selection_value,
        headline.get("epoch"),
        record.baseline.get(headline.get("metric", "")),
        any(record.collapsed.values()) if record.collapsed else None,
        isoscore_before,
        isoscore_after,
        record.timing.get("total"),
        record.skipped_steps,
        record.error,
        record.data.get("fingerprint"),
        record.timing.get("began"),
        record.versions.get("istar"),
        record.code_commit,
        record.code_modified,
    )
    metrics = {f"validation.{name}": value for name, value in record.metrics.items()}
    settings = {key: value for key, value in _flatten(config).items() if "." in key}
    return {**dict(zip(RUN_COLUMNS, column_values, strict=True)), **metrics, **settings}


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dictionaries by key as on the command line, `model.config.hidden_size`."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        is_nested = isinstance(value, dict) and value
        values |= _flatten(value, f"{prefix}{key}.") if is_nested else {f"{prefix}{key}": value}
    return values


def describe_smoke_runs(count: int) -> str:
    """Return a sentence that says how many smoke runs were left out."""
    runs = "1 smoke run is" if count == 1 else f"{count} smoke runs are"
    return f"{runs} not counted (debug=smoke or trainer.fast_dev_run): smoke runs only test a config"


class Configuration(NamedTuple):
    """Runs that differ in the seed only."""

    label: str  # the method, and the settings that differ from others of the same method: `I-STAR λ=-1 ζ=0.4 lr=1e-05`
    runs: list[RunRecord]


def group_by_task(records: Sequence[RunRecord]) -> dict[tuple[str, str], list[Configuration]]:
    """Group runs by the labels of task and model, then by configuration, in the order of `records`.

    See `istar.runs.identity.label_inputs` and `configuration_hash`.
    """
    runs_by_task: dict[tuple[str, str], dict[str, list[RunRecord]]] = {}
    labels = label_inputs(map(get_inputs, records))
    for record in records:
        configuration = configuration_hash(record.config, record.data.get("fingerprint", ""), record.model_identity)
        runs_by_task.setdefault(labels[get_inputs(record)], {}).setdefault(configuration, []).append(record)
    return {
        task_and_model: list(
            map(Configuration, _make_labels(runs_by_configuration.values()), runs_by_configuration.values())
        )
        for task_and_model, runs_by_configuration in runs_by_task.items()
    }


def _make_labels(configurations: Iterable[Sequence[RunRecord]]) -> list[str]:
    rows = [record_to_row(runs[0]) for runs in configurations]
    keys_by_method = {
        method: find_distinctive_settings(row for row in rows if row["method"] == method)
        for method in dict.fromkeys(row["method"] for row in rows)
    }
    return [
        " ".join([row["method"], *(_format_setting(key, row[key]) for key in keys_by_method[row["method"]])])
        for row in rows
    ]


def _format_setting(key: str, value: Any) -> str:
    """Return a setting without its group, but the option of a group with it: `lr=1e-05`, `optim=SGD`."""
    name = key.removesuffix(".name").rpartition(".")[2]
    return f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"


def find_distinctive_settings(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the config keys in which runs of the same task, model and method differ; rows are as of `record_to_row`.

    Keys that do not identify a run, such as `run.root`, are left out: the labels of task and model tell paths apart.
    Keys that some runs of a method lack are left out too, because they belong to another option.
    """
    rows_by_method: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        rows_by_method.setdefault((row["task"], row["model"], row["method"]), []).append(row)
    groups = list(rows_by_method.values())
    differing = {
        key: None
        for group in groups
        for key in group[0]
        if "." in key and all(key in row for row in group) and len({str(row[key]) for row in group}) > 1
    }
    return [key for key in differing if identifies_run(key)]


class Candidate(Protocol):
    """A finished run, with what decides between its configuration and others; see `RunRecord` for the properties."""

    @property
    def selection_merit(self) -> float: ...

    @property
    def validation_examples(self) -> int: ...


def selection_sort_key(runs: Sequence[Candidate]) -> tuple[int, int, float]:
    """Return the sort key of a configuration, higher for better ones, from its runs, one for each seed.

    The configuration with the most seeds is the best; among equals, the one with the largest validation set, then the
    best mean. A larger validation set goes before, because a part of one may have a better mean by chance. The mean is
    over the headline metric on the set that chose the epochs.
    """
    num_examples = max(run.validation_examples for run in runs)
    return len(runs), num_examples, fmean(run.selection_merit for run in runs)
