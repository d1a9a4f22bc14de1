"""Tables of measures and scores as text: CSV files, and result files of lm-evaluation-harness and MTEB."""

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from istar.errors import UserError, shorten

_MODEL_META = "model_meta.json"
"""File of MTEB with the model of the result files in its folder."""
_NO_REVISIONS = ("", "None", "no_revision_available", "external")
"""What MTEB writes for a model without a revision."""
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
    """Read scores as stripped strings, and remarks for the user, one line each. The index says where each row is.

    - A `.json` file: a result file of lm-evaluation-harness or MTEB, see `harness_scores` and `mteb_scores`.
    - A folder: the `.json` files in it and in its subfolders, of which a remark counts those that are no result files.
    - Another file: CSV, see `read_csv`.

    Result files have the columns `model`, `revision`, `task`, `score` and `standard_error`, which may be empty. If none
    of them states a revision, each is of another checkpoint of the same model: the last part of the model's name is
    then the revision. Otherwise a file without a revision is of revision `main`.

    Raises:
        UserError: if the path cannot be read, or holds no scores in these formats.
    """
    if not path.is_dir() and path.suffix != ".json":
        return read_csv(path), []
    files = sorted(file for file in path.rglob("*.json") if file.name != _MODEL_META) if path.is_dir() else [path]
    by_file = {file: _result_scores(file) for file in files}
    scores = [score for found in by_file.values() if found is not None for score in found]
    foreign = [str(file) for file, found in by_file.items() if found is None]
    if not scores:
        raise UserError(
            f"{path} holds no scores of lm-evaluation-harness (results by task) or MTEB (task_name, and scores with "
            "main_score); expected such a .json file, a folder of such files, or a CSV file"
        )
    remarks = []
    if foreign:
        others = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        remarks.append(f"left out: {foreign[0]}{others}, which hold no scores of lm-evaluation-harness or MTEB")
    return _to_cells(scores), remarks


def _to_cells(scores: Sequence[Score]) -> pd.DataFrame:
    """Return a row of strings for each score; see `read_scores` for the revisions."""
    has_revisions = any(score.revision for score in scores)
    rows = []
    for score in scores:
        name = Path(score.model).name
        revision = score.revision or (_DEFAULT_REVISION if has_revisions else name)
        error = "" if math.isnan(score.standard_error) else repr(score.standard_error)
        rows.append((name if has_revisions else "", revision, score.task, repr(score.value), error))
    columns = ["model", "revision", "task", "score", "standard_error"]
    return pd.DataFrame(rows, index=[score.location for score in scores], columns=columns)


def _result_scores(path: Path) -> list[Score] | None:
    """Read a result file; None if it has another format."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {shorten(error)}; expected a JSON file") from error
    if not isinstance(values, dict):
        return None
    results = values.get("results")
    if isinstance(results, dict) and results and all(isinstance(figures, dict) for figures in results.values()):
        return list(harness_scores(values, str(path)))
    scores = values.get("scores")
    if isinstance(values.get("task_name"), str) and isinstance(scores, dict):
        return list(mteb_scores(values, path))
    return None


def harness_scores(values: Mapping[str, Any], location: str) -> Iterator[Score]:
    """Yield the scores of a file that lm-evaluation-harness wrote (`results_<date>.json`, or `--output_path`).

    `results` has the metrics by task, as `acc,none` (metric and filter) or, in files of versions before 0.4, as `acc`,
    and their standard errors as `acc_stderr,none` or `acc_stderr`. A task is called `sciq acc`, or
    `gsm8k exact_match strict-match` with a filter. The model and its revision are those of `model_args` in `config`, a
    text such as `pretrained=<name>,revision=<name>` or a table; without a name there, the model is `model_name`.
    """
    arguments = values.get("config", {}).get("model_args") if isinstance(values.get("config"), dict) else None
    if isinstance(arguments, str):
        pairs = (part.partition("=") for part in arguments.split(","))
        arguments = {key.strip(): value.strip() for key, _, value in pairs}
    arguments = arguments if isinstance(arguments, dict) else {}
    model = arguments.get("pretrained") or values.get("model_name") or ""
    revision = str(arguments.get("revision") or "")
    for task, figures in values["results"].items():
        # Versions since 0.4 have a filter in the name of each metric, and numbers of another kind without one.
        has_filters = any("," in key for key in figures)
        for key, value in figures.items():
            metric, _, filtered = key.partition(",")
            if metric.endswith("_stderr") or not _is_number(value) or (has_filters and not filtered):
                continue
            name = f"{task} {metric}" if filtered in ("", "none") else f"{task} {metric} {filtered}"
            error = figures.get(f"{metric}_stderr,{filtered}" if has_filters else f"{metric}_stderr")
            yield Score(
                location, str(model), revision, name, float(value), float(error) if _is_number(error) else math.nan
            )


def mteb_scores(values: Mapping[str, Any], path: Path) -> Iterator[Score]:
    """Yield the main scores of a file `<task>.json` that MTEB wrote, of version 1.11 or later.

    `scores` has a list for each split, with an entry for each subset of the data. A score is called by the task alone,
    for another split than `test` and another subset than `default` with their names. The model and its revision are
    those of `model_meta.json` in the same folder or, without that file, those that the folders
    `<model>/<revision>/<task>.json` name.
    """
    try:
        meta = json.loads((path.parent / _MODEL_META).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        meta = {"name": path.absolute().parent.parent.name, "revision": path.absolute().parent.name}
    meta = meta if isinstance(meta, dict) else {}
    # The names of the folders have two underscores in place of a slash.
    model = str(meta.get("name") or "").replace("__", "/")
    revision = str(meta.get("revision") or "")
    revision = "" if revision in _NO_REVISIONS else revision
    for split, entries in values["scores"].items():
        for entry in entries if isinstance(entries, list) else ():
            value: Any = entry.get("main_score") if isinstance(entry, dict) else None
            if _is_number(value):
                parts = (split if split != "test" else "", entry.get("hf_subset", "default"))
                extra = [str(part) for part in parts if part not in ("", "default")]
                yield Score(str(path), model, revision, " ".join([values["task_name"], *extra]), float(value))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_csv(path: Path) -> pd.DataFrame:
    """Read a CSV file as stripped strings. The index says where each row is, for messages.

    Raises:
        UserError: if the file cannot be read, has no rows, two equal columns, or a row of another length.
    """
    # `pandas.read_csv` accepts short rows silently, and has no line numbers behind empty lines.
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            rows = {}
            for row in reader:
                if any(row):
                    rows[f"{path}, line {reader.line_num}"] = [cell.strip() for cell in row]
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {shorten(error)}; expected a CSV file") from error
    for name in header:
        if header.count(name) > 1:
            raise UserError(f"{path}: two columns are called {name!r}; expected distinct names")
    if not rows:
        raise UserError(f"{path} has no rows; expected a header and at least one row")
    for location, row in rows.items():
        if len(row) != len(header):
            raise UserError(f"{location}: the row has {len(row)} cells; expected {len(header)}, as the header")
    return pd.DataFrame.from_dict(rows, orient="index", columns=header)
