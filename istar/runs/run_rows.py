"""Runs as rows of tables: their columns, and groups of the runs that a table compares."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from istar.runs.key import LABELLED_SETTINGS, flatten_settings
from istar.runs.labels import Inputs, label_inputs, shorten_model_name
from istar.runs.names import BASE, BASE_LABEL
from istar.runs.record import RunRecord

RUN_COLUMNS = (
    "name", "status", "task", "model", "method", "seed", "metric", "value", "selection", "epoch", "constant",
    "collapsed", "isoscore_before", "isoscore_after", "seconds", "skipped_steps", "error", "fingerprint",
    "began", "istar_version", "code_commit", "code_modified",
)  # fmt: skip
"""Columns of every data frame of runs; see `istar.reports.run_frame.Runs`."""
_SETTINGS_OF_INPUTS = ("task.limit_train", "task.limit_validation", "model.tokenizer")
"""Config keys that matter, but that are in a run's key only through its data and its model.

The labels of tasks and models do not contain them, unlike `task.data_dir`, `model.name` and `model.revision`.
"""


def get_inputs(record: RunRecord) -> Inputs:
    """Return the data and the model that a run starts from."""
    task, model = record.config["task"], record.config["model"]
    names = task["name"], task.get("data_dir"), model["name"], model.get("revision")
    return Inputs(*names, record.key.data, record.key.model)


def record_to_row(record: RunRecord) -> dict[str, Any]:
    """Return the row of a run in a data frame of runs, without the column `folder`.

    Task and model have their short names; see `istar.runs.labels.label_inputs` for the labels among other runs.
    """
    config, headline = record.config, record.headline
    isoscore_before, isoscore_after = (record.isotropy.get(stage, {}).get("union") for stage in ("before", "after"))
    metric = headline.get("metric")
    column_values = (
        record.name, record.status, config["task"]["name"], shorten_model_name(config["model"]["name"]),
        record.key.label, config["seed"], metric, headline.get("value"), record.selection_value, headline.get("epoch"),
        record.baseline.get(metric or ""), any(record.collapsed.values()) if record.collapsed else None,
        isoscore_before, isoscore_after, record.timing.get("total"), record.skipped_steps, record.error,
        record.key.data, record.timing.get("began"), record.versions.get("istar"), record.code_commit,
        record.code_modified,
    )  # fmt: skip
    metrics = {f"validation.{name}": value for name, value in record.metrics.items()}
    settings = {key: value for key, value in flatten_settings(config).items() if "." in key}
    return {**dict(zip(RUN_COLUMNS, column_values, strict=True)), **metrics, **settings}


def describe_smoke_runs(count: int) -> str:
    """Return a sentence that says how many smoke runs were left out."""
    runs = "1 smoke run is" if count == 1 else f"{count} smoke runs are"
    return f"{runs} not counted (debug=smoke or trainer.fast_dev_run): smoke runs only test a config"


class Configuration(NamedTuple):
    """Runs that differ in the seed only."""

    label: str  # the method, and settings that differ between runs of this method: `I-STAR λ=-1 ζ=0.4 lr=1e-05`
    runs: list[RunRecord]


def group_by_task(records: Sequence[RunRecord]) -> dict[tuple[str, str], list[Configuration]]:
    """Group runs by the labels of task and model, then by configuration, in the order of `records`.

    See `istar.runs.labels.label_inputs` and `RunKey.configuration`.
    """
    runs_by_task: dict[tuple[str, str], dict[str, list[RunRecord]]] = {}
    labels = label_inputs(map(get_inputs, records))
    for record in records:
        runs_by_configuration = runs_by_task.setdefault(labels[get_inputs(record)], {})
        runs_by_configuration.setdefault(record.key.configuration, []).append(record)
    return {
        task_and_model: _label_configurations(list(runs_by_configuration.values()))
        for task_and_model, runs_by_configuration in runs_by_task.items()
    }


def _label_configurations(configurations: Sequence[list[RunRecord]]) -> list[Configuration]:
    rows = [record_to_row(runs[0]) for runs in configurations]
    matters = list_settings_that_matter(runs[0] for runs in configurations)
    keys_by_method = {
        method: find_distinctive_settings((row for row in rows if _get_method(row) == method), matters)
        for method in dict.fromkeys(map(_get_method, rows))
    }
    labels = [
        " ".join([row["method"], *(_format_setting(key, row[key]) for key in keys_by_method[_get_method(row)])])
        for row in rows
    ]
    return list(map(Configuration, labels, configurations))


def _get_method(row: Mapping[str, Any]) -> str:
    """Return the method of a run without its settings, so that trials of a search belong to one method."""
    return BASE if row["method"] == BASE_LABEL else str(row["reg.name"])


def _format_setting(key: str, value: Any) -> str:
    """Return a setting in words, without its group: `lr=1e-05`; for the option of a group `optim=SGD`."""
    name = key.removesuffix(".name").rpartition(".")[2]
    return f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"


def list_settings_that_matter(records: Iterable[RunRecord]) -> set[str]:
    """Return the config keys that change the outcome of a run, except those in the labels of task and model."""
    return {*_SETTINGS_OF_INPUTS, *(key for record in records for key in flatten_settings(record.key.settings))}


def find_distinctive_settings(rows: Iterable[Mapping[str, Any]], matters: Collection[str]) -> list[str]:
    """Return the config keys among `matters` in which runs of the same task, model and method differ.

    `rows` are results of `record_to_row`. Settings in the label of the method, such as `reg.lambda`, are left out. So
    are keys that some runs of a method lack, because they belong to another option of their group.
    """
    rows_by_method: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        rows_by_method.setdefault((row["task"], row["model"], _get_method(row)), []).append(row)
    differing = {
        key: None
        for group in rows_by_method.values()
        for key in group[0]
        if "." in key and all(key in row for row in group) and len({str(row[key]) for row in group}) > 1
    }
    return [key for key in differing if key in matters and key not in LABELLED_SETTINGS]


class Candidate(Protocol):
    """A finished run, with the values that choose between configurations; see `RunRecord`."""

    @property
    def selection_merit(self) -> float: ...

    @property
    def validation_examples(self) -> int: ...


def selection_sort_key(runs: Sequence[Candidate]) -> tuple[int, int, float]:
    """Return the sort key of a configuration from its runs, one for each seed; better configurations have higher keys.

    The configuration with the most seeds is the best; among equals, the one with the largest validation set, then the
    one with the best mean of the headline metric on the set that chose the epochs. The size of the validation set comes
    before the mean, because a small part of a set may have a better mean by chance.
    """
    num_examples = max(run.validation_examples for run in runs)
    return len(runs), num_examples, fmean(run.selection_merit for run in runs)
