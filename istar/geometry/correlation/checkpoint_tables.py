"""CSV tables with a row per checkpoint of a training, such as `trajectory.csv`, and their numbers in long format."""

from collections.abc import Sequence
from pathlib import Path, PurePath

import numpy as np
import pandas as pd

from istar.errors import UserError, shorten
from istar.files.writing import unescape_cell
from istar.inputs.readers import iterate_csv
from istar.inputs.saved_checkpoints import step_from_name

CHECKPOINT_COLUMNS = ["model", "revision", "step"]
"""Columns that identify a checkpoint, in all tables of this package."""


def read_table(path: Path) -> pd.DataFrame:
    """Read a CSV file as stripped text, with all `CHECKPOINT_COLUMNS`; columns that the file lacks are empty.

    The index says where each row is, for error messages. A model is named by the last part of its name: a folder and a
    hub id are the same model. A step is a number or, without one, the n of a revision `step<n>`; NaN if it is unknown.

    Raises:
        UserError: if the file cannot be read, is not a table, or has neither a column `revision` nor a column `step`.
    """
    records = iterate_csv(path)
    header = [name.strip() for name in next(records, (0, []))[1]]
    rows = {f"{path}, line {line}": [unescape_cell(cell.strip()) for cell in cells] for line, cells in records}
    if not rows:
        raise UserError(f"{path} has no rows; expected a header and at least one row")
    for location, row in rows.items():
        if len(row) != len(header):
            raise UserError(f"{location}: the row has {len(row)} cells; expected {len(header)}, as the header")
    if repeated := {name for name in header if header.count(name) > 1}:
        raise UserError(f"{path}: two columns are called {min(repeated)!r}; expected distinct names")
    table = pd.DataFrame.from_dict(rows, orient="index", columns=header)
    if not {"revision", "step"} & set(header):
        raise UserError(f"{path} has no column revision or step; expected one that names the checkpoints")
    return complete_checkpoint_columns(table)


def complete_checkpoint_columns(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table with all `CHECKPOINT_COLUMNS`, short names of models, and steps as numbers; see `read_table`."""
    table = table.assign(**{name: "" for name in CHECKPOINT_COLUMNS if name not in table})
    table["model"] = [PurePath(name).name for name in table["model"]]
    table["step"] = [
        parse_number(step, f"{location}: step") if step else step_from_name(revision)
        for location, step, revision in zip(table.index, table["step"], table["revision"], strict=True)
    ]
    return table.astype({"step": float})


def parse_number(text: str, location: str) -> float:
    """Return the number that a cell states, or NaN if the cell is empty; `location` begins the error message.

    Raises:
        UserError: if the text is not a number.
    """
    try:
        return float(text or np.nan)
    except ValueError:
        raise UserError(f"{location} is {shorten(text, 60)!r}; expected a number or nothing") from None


def to_long_format(table: pd.DataFrame, key_columns: Sequence[str], name: str, value: str) -> pd.DataFrame:
    """Return a row for each finite number of a table: the keys, the column's name (`name`) and the number (`value`).

    Raises:
        UserError: if there are no columns of numbers, a cell is not a number, or a checkpoint has two numbers.
    """
    if not set(table) - set(key_columns):
        raise UserError(f"{table.index[0]}: there is no column of numbers; expected at least one")
    numbers = table.melt(list(key_columns), var_name=name, value_name=value, ignore_index=False)
    return to_numbers(numbers, name, value)


def to_numbers(long_table: pd.DataFrame, name: str, value: str) -> pd.DataFrame:
    """Return a table in long format with the column `value` as numbers, without the rows that have none.

    Raises:
        UserError: if a cell is not a number, or a checkpoint has two numbers for the same `name`.
    """
    numbers = [
        parse_number(text, f"{location}: {label}")
        for location, label, text in zip(long_table.index, long_table[name], long_table[value], strict=True)
    ]
    long_table = long_table.assign(**{value: numbers})[np.isfinite(numbers)]
    repeated = long_table[long_table.duplicated([key for key in long_table if key not in (value, "standard_error")])]
    for location, row in repeated.iterrows():
        raise UserError(f"{location}: there is a second number for {row[name]} of this checkpoint")
    return long_table
