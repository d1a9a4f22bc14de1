"""Tables of measures and scores as text: CSV files, and result files of lm-evaluation-harness and MTEB."""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from istar.errors import UserError, shorten
from istar.files.parsing import MissingFileError, read_json
from istar.files.writing import refuse_special_file, unescape_cell

_MODEL_FILE = "model_meta.json"
"""File in which MTEB names the model of the result files in the same folder."""
_MISSING_REVISIONS = ("", "None", "no_revision_available", "external")
"""Values that MTEB writes for a model without a revision."""
_DEFAULT_REVISION = "main"


@dataclass(frozen=True)
class Score:
    """A score that a result file of lm-evaluation-harness or MTEB holds."""

    location: str  # the file, for messages
    model: str  # hub id or folder of the model, as the file has it; may be empty
    revision: str  # revision on the hub; empty if the file has none
    task: str  # name of the task, with the metric, filter, split or subset that it needs
    value: float
    standard_error: float = math.nan  # NaN if the file has none


def read_scores(path: Path) -> tuple[pd.DataFrame, list[str]]:
    """Read task scores from a CSV file, a result file of lm-evaluation-harness or MTEB, or a folder of result files.

    - A `.json` file is a result file; see `parse_harness_scores` and `parse_mteb_scores`.
    - A folder stands for the `.json` files in it and in its subfolders. A remark counts those that are no result files.
    - Any other file is a CSV file; see `read_csv_as_text`.

    The table of result files has the columns `model`, `revision`, `task`, `score` and `standard_error`, which may be
    empty. If no file states a revision, each file is taken to be of another checkpoint of the same model, and the last
    part of the model's name is its revision. Otherwise a file without a revision is of revision `main`.

    Returns:
        A table of stripped strings, whose index says where each row is from, and remarks for the user, one line each.

    Raises:
        UserError: if the path cannot be read, or holds no scores in these formats.
    """
    if not path.is_dir() and path.suffix != ".json":
        return read_csv_as_text(path), []
    files = sorted(file for file in path.rglob("*.json") if file.name != _MODEL_FILE) if path.is_dir() else [path]
    scores_by_file = {file: _read_result_file(file) for file in files}
    scores = [score for file_scores in scores_by_file.values() if file_scores is not None for score in file_scores]
    other_files = [str(file) for file, file_scores in scores_by_file.items() if file_scores is None]
    if not scores:
        raise UserError(
            f"{path} holds no scores of lm-evaluation-harness (results by task) or MTEB (task_name, and scores with "
            "main_score); expected such a .json file, a folder of such files, or a CSV file"
        )
    remarks = []
    if other_files:
        more = f" and {len(other_files) - 1} more" if len(other_files) > 1 else ""
        remarks.append(f"left out: {other_files[0]}{more}, which hold no scores of lm-evaluation-harness or MTEB")
    return _to_table(scores), remarks


def _to_table(scores: Sequence[Score]) -> pd.DataFrame:
    """Return a table of strings with a row for each score.

    Missing revisions are filled in as `read_scores` describes.
    """
    has_revisions = any(score.revision for score in scores)
    rows = []
    for score in scores:
        model_name = Path(score.model).name
        revision = score.revision or (_DEFAULT_REVISION if has_revisions else model_name)
        error_text = "" if math.isnan(score.standard_error) else repr(score.standard_error)
        rows.append((model_name if has_revisions else "", revision, score.task, repr(score.value), error_text))
    columns = ["model", "revision", "task", "score", "standard_error"]
    return pd.DataFrame(rows, index=[score.location for score in scores], columns=columns)


def _read_result_file(path: Path) -> list[Score] | None:
    """Return the scores of a result file of lm-evaluation-harness or MTEB, or None if it has another format.

    Raises:
        UserError: if the file cannot be read, or is not JSON.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        return None
    results = content.get("results")
    if isinstance(results, dict) and results and all(isinstance(metrics, dict) for metrics in results.values()):
        return list(parse_harness_scores(content, str(path)))
    scores = content.get("scores")
    if isinstance(content.get("task_name"), str) and isinstance(scores, dict):
        return list(parse_mteb_scores(content, path))
    return None


def parse_harness_scores(content: Mapping[str, Any], location: str) -> Iterator[Score]:
    """Yield the scores of a file that lm-evaluation-harness wrote (`results_<date>.json`, or `--output_path`).

    `results` has the metrics by task, as `acc,none` (metric and filter) or, in files of versions before 0.4, as `acc`,
    and their standard errors as `acc_stderr,none` or `acc_stderr`. A score is named by its task, metric and filter, as
    in `sciq acc` or `gsm8k exact_match strict-match`. The model and its revision are those of `model_args` in `config`,
    either a string such as `pretrained=<name>,revision=<name>` or a mapping; without a name there, the model is
    `model_name`.

    Args:
        content: content of the file.
        location: path of the file, for error messages.
    """
    model_args = content.get("config", {}).get("model_args") if isinstance(content.get("config"), dict) else None
    if isinstance(model_args, str):
        pairs = (part.partition("=") for part in model_args.split(","))
        model_args = {key.strip(): value.strip() for key, _, value in pairs}
    model_args = model_args if isinstance(model_args, dict) else {}
    model = model_args.get("pretrained") or content.get("model_name") or ""
    revision = str(model_args.get("revision") or "")
    for task, metrics in content["results"].items():
        # Since version 0.4 the name of each metric ends in a filter; numbers without a filter are not metrics.
        has_filters = any("," in key for key in metrics)
        for key, value in metrics.items():
            metric, _, filter_name = key.partition(",")
            if metric.endswith("_stderr") or not _is_finite_number(value) or (has_filters and not filter_name):
                continue
            score_name = f"{task} {metric}" if filter_name in ("", "none") else f"{task} {metric} {filter_name}"
            standard_error = metrics.get(f"{metric}_stderr,{filter_name}" if has_filters else f"{metric}_stderr")
            yield Score(
                location,
                str(model),
                revision,
                score_name,
                float(value),
                float(standard_error) if _is_finite_number(standard_error) else math.nan,
            )


def parse_mteb_scores(content: Mapping[str, Any], path: Path) -> Iterator[Score]:
    """Yield the main scores of a file `<task>.json` that MTEB wrote, of version 1.11 or later.

    `scores` has a list for each split, with an entry for each subset of the data. A score is named by its task, and by
    its split and subset unless they are `test` and `default`. The model and its revision are those of
    `model_meta.json` in the same folder or, without that file, those that the folders `<model>/<revision>/<task>.json`
    name.

    Args:
        content: content of the file.
        path: path of the file.
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
            if _is_finite_number(value):
                split_and_subset = (split if split != "test" else "", subset.get("hf_subset", "default"))
                suffixes = [str(name) for name in split_and_subset if name not in ("", "default")]
                yield Score(str(path), model, revision, " ".join([content["task_name"], *suffixes]), float(value))


def _is_finite_number(value: object) -> bool:
    """Return whether a value from a JSON file is a finite number; booleans are no numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_csv_as_text(path: Path) -> pd.DataFrame:
    """Read a CSV file as stripped strings; the index says in which line each row is, for messages.

    Raises:
        UserError: if the file cannot be read, has no rows, two equal columns, or a row of another length.
    """
    # `pandas.read_csv` accepts short rows silently, and does not tell the line numbers of rows after empty lines.
    try:
        refuse_special_file(path)
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            cells_by_location = {}
            for cells in reader:
                if any(cells):
                    cells_by_location[f"{path}, line {reader.line_num}"] = [
                        unescape_cell(cell.strip()) for cell in cells
                    ]
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {shorten(error)}; expected a CSV file") from error
    for name in header:
        if header.count(name) > 1:
            raise UserError(f"{path}: two columns are called {name!r}; expected distinct names")
    if not cells_by_location:
        raise UserError(f"{path} has no rows; expected a header and at least one row")
    for location, cells in cells_by_location.items():
        if len(cells) != len(header):
            raise UserError(f"{location}: the row has {len(cells)} cells; expected {len(header)}, as the header")
    return pd.DataFrame.from_dict(cells_by_location, orient="index", columns=header)
