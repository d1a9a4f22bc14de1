"""All runs below a folder as a pandas frame with one row per run of any status."""

import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pandas as pd
from rich.cells import cell_len
from rich.table import Table

from istar.errors import UserError
from istar.files.outputs import Output
from istar.files.writing import to_csv
from istar.runs import run_rows
from istar.runs.labels import Inputs, label_inputs
from istar.runs.names import format_metric, format_number, merit
from istar.runs.record import CONFIG, RESULT, RunRecord, check_runs_folder, read_result, read_unfinished

_REPLACED_SUFFIX = re.compile(r"\.old-\d+$")  # suffix of a run folder replaced by `run.overwrite=true`
_FOLDERS_WITHOUT_RUNS = ("multirun", "sweeps")
MAIN_COLUMNS = (
    "name", "task", "model", "method", "seed", "metric", "value", "constant", "epoch", "isoscore_before",
    "isoscore_after", "seconds", "status", "error",
)  # fmt: skip
"""Columns of `Runs.frame` that `istar results` prints by default; see also `list_default_columns`."""
_LEAST_IMPORTANT_COLUMNS = ("seconds", "epoch", "constant")
_SHARED_COLUMNS = ("task", "model", "metric", "seed", "status")
_DROPPED_COLUMNS = ("error", "name", "model", "status", "isoscore_before", "metric", "task", "isoscore_after")
"""A narrow terminal lacks the least important columns. If that is not enough, the names of runs lose their hash; then
columns of one value move into the title; then the last ones are dropped, and the settings that differ, seed and method.
"""
_RUN_HASH = re.compile(r"-[0-9a-f]{12}$")  # the end of a run's name, see `istar.finetune.execute.identify.name_run`
_TABLE = "table of runs"
_METRIC_COLUMNS = ("value", "constant", "selection")
_FORMAT_SPECS = {"isoscore_before": ".4f", "isoscore_after": ".4f", "seconds": ".0f", "epoch": ".0f"}
_COLUMN_GAP = 2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Runs:
    """The runs below a folder."""

    # One row per run. Columns: `folder`, `RUN_COLUMNS`, `validation.<name>` for each metric, and each config key as on
    # the command line. `status` is finished, failed, pruned or unfinished; `value` is the headline metric on the
    # validation set, as a fraction; `constant` is the same for a constant prediction; `selection` is the value for
    # model selection (on held-out data if there are any). `began` is the start in UTC, in ISO 8601.
    frame: pd.DataFrame
    read_errors: dict[str, str]  # error message by folder, for folders that could not be read as a run
    records: dict[str, RunRecord] = field(default_factory=dict)  # complete records by folder; empty unless requested
    num_smoke: int = 0  # number of smoke runs, which have no row and no record
    settings_that_matter: frozenset[str] = frozenset()  # config keys that change the outcome of some of the runs


def read_runs(
    root: Path, keep_records: bool = False, excluded: Path | None = None, left_out: Sequence[str] = ()
) -> Runs:
    """Read every run below a folder, at any depth, except runs replaced by `run.overwrite=true` and smoke runs.

    Warnings name each folder that cannot be read as a run, except `excluded`, such as an output folder, and count the
    smoke runs.
    `left_out` has patterns of run names, such as `rte-*-dropout-*`, to leave out.
    `keep_records` includes the complete records with all epochs and layers, about 50 kB per run.

    Raises:
        UserError: if `root` is not a folder, or a pattern is of no run.
    """
    check_runs_folder(root)
    rows: list[dict[str, Any]] = []
    inputs: list[Inputs] = []  # of each row
    read_errors: dict[str, str] = {}
    records: dict[str, RunRecord] = {}
    num_smoke, settings_that_matter = 0, set[str]()
    visited_folders = {root}
    run_folders = list(_find_run_folders(root, read_errors))
    for pattern in left_out:
        if not any(fnmatch(folder.name, pattern) for folder in run_folders):
            raise UserError(f"--exclude {pattern}: no run below {root} is called so; a pattern has a *")
    for folder in run_folders:
        visited_folders |= {folder, *folder.parents}
        if any(fnmatch(folder.name, pattern) for pattern in left_out):
            continue
        try:
            record = read_result(folder) if (folder / RESULT).exists() else read_unfinished(folder)
            if record.is_smoke:
                num_smoke += 1
                continue
            rows.append({"folder": str(folder), **run_rows.record_to_row(record)})
            inputs.append(run_rows.get_inputs(record))
            settings_that_matter |= run_rows.list_settings_that_matter([record])
            if keep_records:
                records[str(folder)] = record
        except UserError as error_of_run:
            read_errors[str(folder)] = str(error_of_run)
    # Folders inside a run, such as `model/`, are not expected to contain runs.
    for folder in [] if root in run_folders else sorted(root.iterdir()):
        if folder.is_dir() and _can_hold_runs(folder.name) and folder not in visited_folders:
            read_errors.setdefault(str(folder), f"{folder} holds no run")
    if excluded is not None:
        read_errors = {path: error for path, error in read_errors.items() if Path(path).resolve() != excluded.resolve()}
    for error in read_errors.values():
        log.warning("not read: %s", error)
    if num_smoke:
        log.warning(run_rows.describe_smoke_runs(num_smoke))
    labels = label_inputs(inputs)
    for row, run_inputs in zip(rows, inputs, strict=True):
        row["task"], row["model"] = labels[run_inputs]
    frame = pd.DataFrame(rows, columns=None if rows else ["folder", *run_rows.RUN_COLUMNS])
    return Runs(frame, read_errors, records, num_smoke, frozenset(settings_that_matter))


def load_runs(folder: str | Path = "runs") -> pd.DataFrame:
    """Return all runs below a folder as a data frame with a row for each run, for notebooks; see `Runs.frame`.

    >>> import istar
    >>> runs = istar.load_runs("runs")  # doctest: +SKIP
    >>> runs.groupby("method")["value"].mean()  # doctest: +SKIP

    Raises:
        UserError: if `folder` is not a folder.
    """
    return read_runs(Path(folder)).frame


def check_export(path: Path) -> None:
    """Check, before any work is done, that `export_frame` can write a table to a file.

    Raises:
        UserError: if the suffix is not a known format, or if a file exists that `export_frame` did not write.
    """
    if path.suffix not in _WRITERS:
        raise UserError(f"{path}: the suffix decides the format; expected one of {', '.join(_WRITERS)}")
    Output(path.parent, _TABLE).check([path.name])


def export_frame(frame: pd.DataFrame, path: Path) -> None:
    """Write a data frame as CSV, Parquet or JSON (a list of objects), depending on the suffix of `path`.

    Raises:
        UserError: if a file would be replaced that this function did not write, or the file cannot be written.
    """
    # Parquet needs one type per column; lists and mixed columns (reg.layers, trainer.devices) are written as text.
    frame = frame.map(lambda value: str(value) if isinstance(value, list | dict) else value)
    for column in frame:
        if frame[column].dtype == object and frame[column].map(type).nunique() > 1:
            frame[column] = frame[column].map(lambda value: None if pd.isna(value) else str(value))
    Output(path.parent, _TABLE).write({path.name: _WRITERS[path.suffix](frame)})


_WRITERS: dict[str, Callable[[pd.DataFrame], bytes]] = {
    ".csv": lambda frame: to_csv(frame).encode(),
    ".parquet": lambda frame: frame.to_parquet(index=False),
    ".json": lambda frame: frame.to_json(orient="records", indent=2).encode(),
}


def _find_run_folders(root: Path, read_errors: dict[str, str]) -> Iterator[Path]:
    def record_error(error: OSError) -> None:
        read_errors[str(error.filename)] = f"{error.filename}: cannot be read: {error.strerror}"

    for path, folder_names, file_names in os.walk(root, onerror=record_error):
        if RESULT in file_names or CONFIG in file_names:
            # os.walk descends into the folders left in this list.
            folder_names.clear()
            yield Path(path)
        folder_names[:] = sorted(folder_name for folder_name in folder_names if _can_hold_runs(folder_name))


def _can_hold_runs(folder_name: str) -> bool:
    is_excluded = folder_name.startswith(".") or folder_name in _FOLDERS_WITHOUT_RUNS
    return not is_excluded and not _REPLACED_SUFFIX.search(folder_name)


def sort_runs(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """Sort runs by a column, the best first: numbers from the highest, but losses from the lowest; texts by letters."""
    keys = frame[column]
    if column in _METRIC_COLUMNS:
        keys = pd.Series(
            [merit(str(metric), value) for metric, value in zip(frame["metric"], keys.astype(float), strict=True)],
            index=frame.index,
        )
    order = keys.sort_values(ascending=keys.dtype.kind not in "if", na_position="last", kind="stable").index
    return frame.loc[order]


def list_default_columns(frame: pd.DataFrame, settings_that_matter: Collection[str]) -> list[str]:
    """Return `MAIN_COLUMNS` and, after the method, the settings that matter in which runs of the same method differ."""
    after_method = MAIN_COLUMNS.index("method") + 1
    rows = [
        # The frame has NaN for a key that a run lacks.
        {str(key): value for key, value in row.items() if not (isinstance(value, float) and math.isnan(value))}
        for row in frame.to_dict("records")
    ]
    settings = run_rows.find_distinctive_settings(rows, settings_that_matter)
    return [*MAIN_COLUMNS[:after_method], *settings, *MAIN_COLUMNS[after_method:]]


def build_runs_table(
    frame: pd.DataFrame, columns: Sequence[str], width: int, defaults: Sequence[str]
) -> tuple[Table, list[str]]:
    """Return a table of runs that is at most `width` wide, and the names of the columns that it lacks for this reason.

    Without `columns`, the table begins with the columns among `defaults`, from `list_default_columns`, that have
    values, and loses the least important ones until it fits, as `_LEAST_IMPORTANT_COLUMNS`
    says. Of the given `columns` it loses none: their cells are folded, and never cut.
    """
    # pandas marks missing values as NaN, which would be printed as a word.
    runs = frame.astype(object).where(frame.notna(), None).to_dict("records")
    shown = columns or [column for column in defaults if column == "name" or frame[column].notna().any()]
    settings = [column for column in defaults if column not in MAIN_COLUMNS]
    cells_by_column = {column: [_format_run_cell(run, column) for run in runs] for column in shown}
    dropped: list[str] = []
    shared: list[str] = []  # values in the title

    def is_too_wide() -> bool:
        widths = [max(map(cell_len, [*column.split("_"), *cells])) for column, cells in cells_by_column.items()]
        return not columns and sum(widths) + _COLUMN_GAP * (len(widths) - 1) > width

    def drop_while_too_wide(names: Sequence[str]) -> None:
        for column in names:
            if column in cells_by_column and is_too_wide():
                del cells_by_column[column]
                dropped.append(column)

    drop_while_too_wide(_LEAST_IMPORTANT_COLUMNS)
    if is_too_wide():
        cells_by_column["name"] = [_RUN_HASH.sub("", name) for name in cells_by_column["name"]]
        dropped.append("the hash of name")
    if is_too_wide():
        of_one_value = [column for column in _SHARED_COLUMNS if len(set(cells_by_column.get(column, ()))) == 1]
        cells_of_one_value = {column: cells_by_column.pop(column)[0] for column in of_one_value}
        shared = [
            f"seed {cell}" if column == "seed" else cell
            for column, cell in cells_of_one_value.items()
            if column != "status"  # the counts name it
        ]
    drop_while_too_wide((*_DROPPED_COLUMNS, *settings, "seed", "method"))
    counts = ", ".join(f"{count} {status}" for status, count in frame["status"].value_counts().items())
    title = f"{len(frame)} run{'s' * (len(frame) != 1)}: {counts} (metrics in percent, except losses)"
    title = " · ".join([title, *shared])
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, _COLUMN_GAP, 0, 0))
    for column in cells_by_column:
        is_number = frame[column].dtype.kind in "if"
        table.add_column(column.replace("_", "\n"), justify="right" if is_number else "left", overflow="fold")
    for cells in zip(*cells_by_column.values(), strict=True):
        table.add_row(*cells)
    return table, dropped


def _format_run_cell(run: Mapping[Any, Any], column: str) -> str:
    value = run[column]
    if column in _METRIC_COLUMNS:
        return format_metric(run["metric"], value) + " (collapsed)" * (column == "value" and run["collapsed"] is True)
    if column.startswith("validation."):
        return format_metric(column.removeprefix("validation."), value)
    if value is None or isinstance(value, float):
        return format_number(value, _FORMAT_SPECS.get(column, "g"))
    return str(value)
