"""Task scores from result files of lm-evaluation-harness and MTEB, or from CSV tables with a row per checkpoint."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from istar.errors import UserError, shorten
from istar.files.folders import list_visible
from istar.files.parsing import MissingFileError, read_json
from istar.files.writing import unescape_cell
from istar.models.hub import is_hub_id
from istar.models.saved_checkpoints import step_from_name
from istar.runs.labels import shorten_model_name
from istar.statistics.arguments import is_finite
from istar.texts.readers import iterate_csv

CHECKPOINT_COLUMNS = ["model", "revision", "step"]
"""Columns that identify a checkpoint, in all tables of this package."""
_ADAPTER_ARGUMENTS = ("peft", "lora_local_path", "delta", "steer_path")
"""Arguments of lm-evaluation-harness that name what changes a model."""
_MODEL_FILE = "model_meta.json"
"""Name of the file where MTEB names the model of the result files in the same folder."""
_MISSING_REVISIONS = ("None", "no_revision_available", "external")
"""Values that MTEB writes for a model without a revision."""
_DEFAULT_REVISION = "main"
_DECIMAL_COMMA = r"^([-+]?(?:0|\d{4,}|\d+(?!,\d{3}$))),(\d+(?:[eE][-+]?\d+)?)$"
"""Pattern of a number with a comma that does not separate thousands, unlike the comma in 45,123."""


class Score(NamedTuple):
    """A score in a result file of lm-evaluation-harness or MTEB."""

    model: str  # hub id or folder of the model, as in the file; may be empty
    revision: str  # revision on the hub; empty if the file lacks it
    task: str  # name of the task, with the metric, filter, split or subset that it needs
    score: float
    standard_error: float = math.nan  # NaN if the file lacks it


def read_scores(path: Path) -> tuple[pd.DataFrame, list[str]]:
    """Read task scores from a CSV file, a result file of lm-evaluation-harness or MTEB, or a folder of result files.

    - A `.json` file is a result file; see `parse_harness_scores` and `parse_mteb_scores`.
    - A folder means all `.json` files in it and in its subfolders.
    - Any other file is a CSV file with a column for each task, or with the columns `task` and `score` and, optionally,
      `standard_error`; see `read_checkpoint_table`.

    If no result file states a revision, each file is of another checkpoint of the same model, and the last part of the
    model's name is its revision. Otherwise a file without a revision is of revision `main`.

    The table has a row for each score, with `CHECKPOINT_COLUMNS`, `task`, `score` and `standard_error`. The list has
    remarks for the user. Raises a `UserError` if the path cannot be read, or lacks scores in these formats.
    """
    if not path.is_dir() and path.suffix != ".json":
        return _read_csv_scores(path), []
    files = [file for file in list_visible(path, "**/*.json") if file.name != _MODEL_FILE] if path.is_dir() else [path]
    scores_by_file = {file: _read_result_file(file) for file in files}
    located_scores = [(str(file), score) for file, scores in scores_by_file.items() for score in scores]
    if not located_scores:
        raise UserError(
            f"{path} holds no scores of lm-evaluation-harness (results by task) or MTEB (task_name, and scores with "
            "main_score); expected such a .json file, a folder of such files, or a CSV file"
        )
    locations, scores = zip(*located_scores, strict=True)
    table = pd.DataFrame(scores, index=locations).assign(step="")
    if (table["revision"] == "").all():
        table["revision"], table["model"] = [shorten_model_name(name) for name in table["model"]], ""
    table["revision"] = table["revision"].replace("", _DEFAULT_REVISION)
    table = _to_numbers(_complete_checkpoint_columns(table), "task", "score")
    foreign_files = [str(file) for file, scores in scores_by_file.items() if not scores]
    return table, [f"left out, because it has no scores: {file}" for file in foreign_files]


def _read_csv_scores(path: Path) -> pd.DataFrame:
    table = read_checkpoint_table(path)
    if not {"task", "score"} <= set(table):
        return to_long_format(table, CHECKPOINT_COLUMNS, "task", "score").assign(standard_error=math.nan)
    errors = table.get("standard_error", pd.Series("", table.index))
    table["standard_error"] = [_parse_cell(text, f"{location}: standard_error") for location, text in errors.items()]
    return _to_numbers(table[[*CHECKPOINT_COLUMNS, "task", "score", "standard_error"]], "task", "score")


def _read_result_file(path: Path) -> list[Score]:
    content = read_json(path)
    if not isinstance(content, dict):
        return []
    results, scores = content.get("results"), content.get("scores")
    if isinstance(results, dict) and all(isinstance(metrics, dict) for metrics in results.values()):
        return list(parse_harness_scores(content))
    if isinstance(content.get("task_name"), str) and isinstance(scores, dict):
        return list(parse_mteb_scores(content, path))
    return []


def parse_harness_scores(content: Mapping[str, Any]) -> Iterator[Score]:
    """Yield the scores of a file that lm-evaluation-harness wrote (`results_<date>.json`, or `--output_path`).

    `results` has the metrics by task, as `acc,none` (metric and filter) or, in files of versions before 0.4, as `acc`,
    and their standard errors as `acc_stderr,none` or `acc_stderr`. A score is named by its task, metric and filter, as
    in `sciq acc` or `gsm8k exact_match strict-match`. The model and its revision are in `model_args` in `config`, a
    string such as `pretrained=<name>,revision=<name>` or a mapping; without a name there, the model is `model_name`. A
    subfolder is part of the name. An adapter there is the model, which has the revision only if it is on the hub.
    """
    config = content.get("config")
    model_args = config.get("model_args") if isinstance(config, dict) else None
    if isinstance(model_args, str):
        pairs = (part.partition("=") for part in model_args.split(","))
        model_args = {key.strip(): value.strip(" '\"") for key, _, value in pairs if value.strip() != "None"}
    model_args = model_args if isinstance(model_args, dict) else {}
    adapter = next((str(model_args[key]) for key in _ADAPTER_ARGUMENTS if model_args.get(key)), "")
    names = (model_args.get("pretrained") or content.get("model_name"), model_args.get("subfolder"))
    model = adapter or "/".join(str(name) for name in names if name)
    is_folder = adapter and (model_args.get("lora_local_path") or not is_hub_id(adapter))
    revision = "" if is_folder else str(model_args.get("revision") or "")
    # Since version 0.4 the name of each metric ends in a filter; numbers without a filter are not metrics.
    keys = {*content, *(key for metrics in content["results"].values() for key in metrics)}
    has_filters = not keys.isdisjoint(("configs", "alias", "sample_len")) or any("," in key for key in keys)
    for task, metrics in content["results"].items():
        for key, value in metrics.items():
            metric, _, filter_name = key.partition(",")
            if metric.endswith("_stderr") or not is_finite(value) or (has_filters and not filter_name):
                continue
            standard_error = metrics.get(f"{metric}_stderr,{filter_name}" if has_filters else f"{metric}_stderr")
            yield Score(
                model=model,
                revision=revision,
                task=f"{task} {metric}" if filter_name in ("", "none") else f"{task} {metric} {filter_name}",
                score=float(value),
                standard_error=float(standard_error) if is_finite(standard_error) else math.nan,
            )


def parse_mteb_scores(content: Mapping[str, Any], path: Path) -> Iterator[Score]:
    """Yield the main scores of a file `<task>.json` that MTEB wrote, of version 1.11 or later.

    `scores` has a list for each split, with an entry for each subset of the data. A score is named by its task, and by
    its split and subset unless they are `test` and `default`. The model and its revision are in `model_meta.json` in
    the same folder or, without that file, in the path `<model>/<revision>/<task>.json`.
    """
    try:
        metadata = read_json(path.parent / _MODEL_FILE)
    except MissingFileError:
        metadata = {"name": path.absolute().parent.parent.name, "revision": path.absolute().parent.name}
    metadata = metadata if isinstance(metadata, dict) else {}
    # The names of the folders have two underscores in place of a slash.
    model = str(metadata.get("name") or "").replace("__", "/")
    revision = str(metadata.get("revision") or "")
    revision = "" if revision in _MISSING_REVISIONS else revision
    for split, subsets in content["scores"].items():
        for subset in subsets if isinstance(subsets, list) else ():
            value: Any = subset.get("main_score") if isinstance(subset, dict) else None
            if is_finite(value):
                split_and_subset = (split if split != "test" else "", subset.get("hf_subset", "default"))
                suffixes = [str(name) for name in split_and_subset if name not in ("", "default")]
                yield Score(model, revision, " ".join([content["task_name"], *suffixes]), float(value))


def read_checkpoint_table(path: Path) -> pd.DataFrame:
    """Read a CSV file as stripped text, with all `CHECKPOINT_COLUMNS`; columns that the file lacks are empty.

    The index says where each row is, for error messages. A model is named by the last part of its name: a folder and a
    hub id are the same model. A step is a number or, without one, the n of a revision `step<n>`; NaN if it is unknown.
    Numbers may have decimal commas, if none has a decimal point and not all commas may separate thousands.

    Raises a `UserError` if the file cannot be read, is not a table, has a column without a name, or lacks both columns
    `revision` and `step`.
    """
    records = iterate_csv(path)
    header = [name.strip() for name in next(records, (0, []))[1]]
    rows = {f"{path}, line {line}": [unescape_cell(cell.strip()) for cell in cells] for line, cells in records}
    if not rows:
        raise UserError(f"{path} has no rows; expected a header and at least one row")
    for location, row in rows.items():
        if len(row) != len(header):
            raise UserError(f"{location}: the row has {len(row)} cells; expected {len(header)}, as the header")
    if "" in header:
        raise UserError(
            f"{path}: column {header.index('') + 1} is unnamed; expected names for all columns; if it is the index of "
            "pandas, write the file with index=False"
        )
    if repeated := {name for name in header if header.count(name) > 1}:
        raise UserError(f"{path}: two columns are called {min(repeated)!r}; expected distinct names")
    table = pd.DataFrame.from_dict(rows, orient="index", columns=header)
    if not {"revision", "step"} & set(header):
        raise UserError(f"{path} has no column revision or step; expected one that names the checkpoints")
    texts = "\n".join(cell for row in rows.values() for cell in row)
    if re.search(_DECIMAL_COMMA, texts, re.M) and not re.search(r"^[-+]?\d*\.\d*([eE][-+]?\d+)?$", texts, re.M):
        columns = table.columns.difference(["model", "revision"])
        patterns = {name: _DECIMAL_COMMA if name == "step" else r"^([-+]?\d+),([\deE+-]+)$" for name in columns}
        table = table.replace(patterns, r"\1.\2", regex=True)
    return _complete_checkpoint_columns(table)


def _complete_checkpoint_columns(table: pd.DataFrame) -> pd.DataFrame:
    table = table.assign(**{name: "" for name in CHECKPOINT_COLUMNS if name not in table})
    table["model"] = [shorten_model_name(name) for name in table["model"]]
    table["step"] = [
        _parse_step(step, location) if step else step_from_name(revision)
        for location, step, revision in zip(table.index, table["step"], table["revision"], strict=True)
    ]
    return table.astype({"step": float})


def _parse_step(text: str, location: str) -> float:
    if re.fullmatch(r"\d{1,3}(\.\d{3})+", text):
        raise UserError(f"{location}: step is {text}; expected a whole number, without separators of thousands")
    return _parse_cell(text, f"{location}: step")


def _parse_cell(text: str, location: str) -> float:
    """Return the number in a cell, or NaN if it is empty; else raise a `UserError` that begins with `location`."""
    try:
        return float(text or np.nan)
    except ValueError:
        raise UserError(f"{location} is {shorten(text, 60)!r}; expected a number or nothing") from None


def to_long_format(table: pd.DataFrame, key_columns: Sequence[str], name: str, value: str) -> pd.DataFrame:
    """Return a row for each finite number of a table: the keys, the column's name (`name`) and the number (`value`).

    Raises a `UserError` if all columns are keys, a cell is not a number, or a checkpoint has two numbers.
    """
    if not set(table) - set(key_columns):
        raise UserError(f"{table.index[0]}: there is no column of numbers; expected at least one")
    numbers = table.melt(list(key_columns), var_name=name, value_name=value, ignore_index=False)
    return _to_numbers(numbers, name, value)


def _to_numbers(long_table: pd.DataFrame, name: str, value: str) -> pd.DataFrame:
    """Return a table in long format with `value` as numbers, without the rows that lack one."""
    numbers = [
        _parse_cell(text, f"{location}: {label}")
        for location, label, text in zip(long_table.index, long_table[name], long_table[value], strict=True)
    ]
    long_table = long_table.assign(**{value: numbers})[np.isfinite(numbers)]
    repeated = long_table[long_table.duplicated([key for key in long_table if key not in (value, "standard_error")])]
    for location, row in repeated.iterrows():
        raise UserError(f"{location}: there is a second number for {row[name]} of this checkpoint")
    return long_table
