"""Joining measures of checkpoints with the scores of the same checkpoints, for `istar correlate`."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from istar.errors import UserError, did_you_mean, shorten
from istar.geometry.collect.trajectory import KEY_COLUMNS
from istar.geometry.correlation.score_files import read_csv_as_text, read_scores
from istar.inputs.saved_checkpoints import step_from_name

POOLED = "all models"
"""Name of all models together, if their checkpoints are pooled."""
SourceAndLayer = tuple[str, str]
"""Text that a measure is of, and layer."""


@dataclass(frozen=True)
class Selection:
    """Which rows and columns are correlated, what is held constant, and the settings of the bootstrap."""

    # Column to join by. None stands for `revision` if both files have that column, otherwise for `step`.
    by: Literal["revision", "step"] | None = None
    measures: tuple[str, ...] = ()  # columns of measures to correlate; all if empty
    layers: tuple[str, ...] = ()  # layers to correlate; all if empty
    sources: tuple[str, ...] = ()  # texts to correlate; all if empty
    tasks: tuple[str, ...] = ()  # tasks to correlate, or the first words of their names; all if empty
    omit: tuple[str, ...] = ()  # revisions or steps to leave out, such as the untrained model, as in the paper
    model: str = ""  # model of all scores, in place of those that the scores name; empty for these
    covariates: tuple[str, ...] = ()  # columns of either file that partial correlations hold constant
    pool: bool = False  # whether the checkpoints of all models are the points of one correlation
    resamples: int = 2_000  # number of bootstrap resamples
    seed: int = 0  # seed of the bootstrap
    # Number of neighbouring checkpoints that are drawn together; 0 stands for
    # `istar.statistics.correlation.automatic_block_length`, and None draws single checkpoints.
    block_length: int | None = None

    @property
    def has_row_filter(self) -> bool:
        """Whether the user has selected measures, layers or sources."""
        return bool(self.measures or self.layers or self.sources)


@dataclass(frozen=True)
class JoinedData:
    """Measures and task scores of the same points, which are checkpoints named by their revision or step.

    `measures` and `scores` have a row for each number, with the columns `KEY_COLUMNS`, `point` (the revision or the
    step), `name` (of the measure or the task) and `value`.
    """

    models: list[str]  # models that both files have
    measures: pd.DataFrame
    scores: pd.DataFrame
    task_names: list[str]  # also those of tasks without a number
    # Values of the columns that are held constant, by column, then by model, source, layer and point. Those that come
    # from the file of scores have an empty source and layer, and apply to all sources and layers.
    covariate_values: Mapping[str, Mapping[tuple[Any, ...], float]]
    step_by_point: Mapping[tuple[str, Any], int]  # step of each point of the measures that has one, by model and point
    # All scores of these models at checkpoints with a known step, also those without measures: `model`, `task`,
    # `step`, `score` and `standard_error`, NaN if it is unknown.
    scores_by_step: pd.DataFrame
    remarks: list[str]  # warnings for the user, one line each

    def covariate_matrix(self, model: str, place: SourceAndLayer, points: Sequence[Any]) -> np.ndarray:
        """Return the values held constant at each point, `(points, covariates)`; NaN where they are unknown."""
        rows = []
        for point in points:
            keys = ((model, *place, point), (model, "", "", point))
            rows.append([
                next((value_by_key[key] for key in keys if key in value_by_key), math.nan)
                for value_by_key in self.covariate_values.values()
            ])  # fmt: skip
        return np.array(rows, dtype=float).reshape(len(points), len(self.covariate_values))


def join_measures_and_scores(measures_path: Path, scores_path: Path, selection: Selection) -> JoinedData:
    """Read a table of measures and the task scores of the same checkpoints, and keep the rows of the selection.

    Raises:
        UserError: if a file cannot be read or lacks a column, or if the files have no point in common.
    """
    score_table, remarks = read_scores(scores_path)
    tables = {measures_path: read_csv_as_text(measures_path), scores_path: score_table}
    key_column = selection.by or ("revision" if all("revision" in table for table in tables.values()) else "step")
    for path, table in tables.items():
        _check_joinable(table, path, key_column)
    keyed_tables = {path: _add_keys(table, key_column) for path, table in tables.items()}
    covariate_rows = _select_covariates(keyed_tables, selection.covariates)
    skipped_columns = [name for name in selection.covariates if name not in selection.measures]
    measure_rows = _to_long_format(
        keyed_tables[measures_path], measures_path, "measures", selection.measures, skipped_columns
    )
    score_rows = _to_long_format(
        keyed_tables[scores_path], scores_path, "scores", selected_columns=(), skipped_columns=selection.covariates
    ).assign(source="", layer="")
    _check_known("--layer", selection.layers, measure_rows["layer"], measures_path)
    _check_known("--source", selection.sources, measure_rows["source"], measures_path)
    score_rows = _select_tasks(score_rows, selection.tasks, scores_path)
    if selection.model:
        _check_known("--model", [selection.model], measure_rows["model"], measures_path)
        score_rows["model"] = selection.model
    labels = [rows[column] for rows in (measure_rows, score_rows) for column in ("revision", "step")]
    _check_known("--omit", selection.omit, pd.concat(labels), measures_path)
    models, model_remarks = _find_common_models(
        measure_rows, score_rows, measures_path, scores_path, list(covariate_rows.values())
    )
    measure_rows, score_rows = (_drop_omitted(rows, selection) for rows in (measure_rows, score_rows))
    remarks += model_remarks + _warn_of_equal_weights(measure_rows)
    scores_by_step = _make_score_table(score_rows, measure_rows)
    if selection.pool:
        for rows in (measure_rows, score_rows, *covariate_rows.values()):
            rows["point"] = rows["model"] + " " + rows["point"].astype(str)
            rows["model"] = POOLED
        models = [POOLED]
    if selection.layers:
        measure_rows = measure_rows[measure_rows["layer"].isin(selection.layers)]
    if selection.sources:
        measure_rows = measure_rows[measure_rows["source"].isin(selection.sources)]
    measures, scores = _parse_values(measure_rows), _parse_values(score_rows)
    if measures.merge(scores, on=["model", "point"]).empty:
        # Revisions with different names may have the same step.
        hint = "; --by step joins by the steps in the names" if key_column == "revision" else ""
        raise UserError(
            f"no {key_column} in common: the measures have {_join_first_names(measures['point'])}, the scores "
            f"{_join_first_names(scores['point'])}{hint}"
        )
    return JoinedData(
        models,
        measures,
        scores,
        # Tasks without a number keep their rows, with zero points.
        list(score_rows["name"].unique()),
        {name: _get_value_by_key(rows) for name, rows in covariate_rows.items()},
        _parse_step_by_point(measure_rows),
        scores_by_step,
        remarks,
    )


def _check_joinable(table: pd.DataFrame, path: Path, by: str) -> None:
    """Check that a file has the column to join by, which is `revision` or `step`.

    Raises:
        UserError: if the file does not have the column.
    """
    # The step may also be named in the revision.
    if by not in table and not (by == "step" and "revision" in table):
        expected = "revision" if by == "revision" else "revision or step"
        raise UserError(f"{path} has no column {expected}; expected one to join by")


def _add_keys(table: pd.DataFrame, by: str) -> pd.DataFrame:
    """Return a table with all of `KEY_COLUMNS`, empty where the file lacks them, and with the column `point`.

    The point is the revision or the step, depending on `by`. The names of all other columns get a prefix.
    """
    columns = [str(name) for name in table if name not in KEY_COLUMNS]
    keys = table.reindex(columns=list(KEY_COLUMNS), fill_value="")
    # A folder and a hub id of the same model have the same last part.
    keys["model"] = [Path(model).name for model in keys["model"]]
    keys["point"] = keys["revision"]
    if by == "step":
        labels = keys["step"].where(keys["step"] != "", keys["revision"])
        keys["point"] = [_parse_step(label, str(location)) for location, label in labels.items()]
    return pd.concat([keys, table[columns].add_prefix(_VALUE_PREFIX)], axis=1)


_VALUE_PREFIX = "value: "
"""Prefix of the columns that are no keys; without it they could have the name of a key, such as `point`."""


def _to_long_format(
    table: pd.DataFrame, path: Path, noun: str, selected_columns: Sequence[str], skipped_columns: Sequence[str]
) -> pd.DataFrame:
    """Return one row for each cell that is no key, in the order of the file; the index says where the cell is.

    Args:
        table: table of `_add_keys`.
        path: file of the table, for error messages.
        noun: what the cells are, for error messages.
        selected_columns: columns of the cells; all if empty.
        skipped_columns: columns that are left out.

    Returns:
        The keys; `name`, the cell's column, or its task if the file has the columns `task` and `score`; and the `text`
        of the cell. With these columns, also `standard_error`, empty if the file has no such column.
    """
    columns = [name.removeprefix(_VALUE_PREFIX) for name in map(str, table) if name.startswith(_VALUE_PREFIX)]
    columns = [name for name in columns if name not in skipped_columns]
    if not columns:
        raise UserError(f"{path} has no column of {noun}; expected at least one")
    _check_known("--measure", selected_columns, columns, path)
    keys = table[[*KEY_COLUMNS, "point"]]
    if {"task", "score"} <= set(columns):
        tasks, texts = table[f"{_VALUE_PREFIX}task"], table[f"{_VALUE_PREFIX}score"]
        errors = table.get(f"{_VALUE_PREFIX}standard_error", "")
        return keys.assign(name=tasks, text=texts, standard_error=errors)
    row_numbers = range(len(table))
    frames = [
        keys.assign(name=name, text=table[_VALUE_PREFIX + name], row=row_numbers)
        for name in selected_columns or columns
    ]
    return pd.concat(frames).sort_values("row", kind="stable").drop(columns="row")


def _select_covariates(tables: Mapping[Path, pd.DataFrame], names: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Return the rows of each column that is held constant, with the `value` as a number.

    If both files have a column of this name, that of the file of measures, the first of `tables`, is used. `step` may
    also be the step that the name of a revision states.

    Raises:
        UserError: if neither file has a column of this name.
    """
    rows_by_name = {}
    measures_path, scores_path = tables
    for name in names:
        for path, table in tables.items():
            column = name if name in KEY_COLUMNS else _VALUE_PREFIX + name
            if name in KEY_COLUMNS and not (name == "step" and (table["step"] + table["revision"] != "").any()):
                continue
            if column in table:
                rows = table[[*KEY_COLUMNS, "point"]].assign(name=name, text=table[column])
                if name == "step":
                    labels = rows["step"].where(rows["step"] != "", rows["revision"])
                    rows["text"] = [str(_parse_step(label, str(location))) for location, label in labels.items()]
                rows = rows if path == measures_path else rows.assign(source="", layer="")
                rows_by_name[name] = _parse_values(rows, refuse_duplicates=False)
                break
        else:
            known_names = [
                column.removeprefix(_VALUE_PREFIX) for table in tables.values() for column in map(str, table)
            ]
            raise UserError(
                f"--given {name}: neither {measures_path} nor {scores_path} has such a column of numbers"
                f"{did_you_mean(name, known_names)}"
            )
    return rows_by_name


def _get_value_by_key(rows: pd.DataFrame) -> dict[tuple[Any, ...], float]:
    """Return the values of a column by model, source, layer and point.

    Raises:
        UserError: if a point has several values.
    """
    value_by_key: dict[tuple[Any, ...], float] = {}
    columns = (rows[name] for name in ("model", "source", "layer", "point", "name", "value"))
    for location, *key, name, value in zip(rows.index, *columns, strict=True):
        if value_by_key.setdefault(tuple(key), value) != value:
            raise UserError(f"{location}: {name} has another value for the same point; expected one for each point")
    return value_by_key


def _parse_step(label: str, location: str) -> int:
    """Return the step that a label states, as a number or as `step<n>`.

    Raises:
        UserError: if the label states no step.
    """
    step = _try_parse_step(label)
    if step is None:
        raise UserError(f"{location}: {shorten(label, 60)!r} is no step; expected a number, or a name such as step1000")
    return step


def _try_parse_step(label: str) -> int | None:
    """Return the step that a label states, as a number or as `step<n>`, or None if it states no step."""
    try:
        return int(float(label))
    except (ValueError, OverflowError):
        return step_from_name(label)


def _parse_step_by_point(rows: pd.DataFrame) -> dict[tuple[str, Any], int]:
    distinct_rows = rows.drop_duplicates(["model", "point"])
    labels = distinct_rows["step"].where(distinct_rows["step"] != "", distinct_rows["revision"])
    step_by_point = {
        (model, point): _try_parse_step(label)
        for model, point, label in zip(distinct_rows["model"], distinct_rows["point"], labels, strict=True)
    }
    return {key: step for key, step in step_by_point.items() if step is not None}


def _make_score_table(score_rows: pd.DataFrame, measure_rows: pd.DataFrame) -> pd.DataFrame:
    """Return the table of scores by model, task and step, for `JoinedData.scores_by_step`.

    The step of a score is the one that its row states, or else that of the measures of the same point.
    """
    step_by_point = {**_parse_step_by_point(measure_rows), **_parse_step_by_point(score_rows)}
    scores = _parse_values(score_rows)
    standard_errors = scores["standard_error"] if "standard_error" in scores else pd.Series("", scores.index)
    table = pd.DataFrame({
        "model": scores["model"],
        "task": scores["name"],
        "step": [step_by_point.get(key) for key in zip(scores["model"], scores["point"], strict=True)],
        "score": scores["value"],
        "standard_error": pd.to_numeric(standard_errors, errors="coerce"),
    })  # fmt: skip
    table = table[table["model"].isin(set(measure_rows["model"]))]
    return table.dropna(subset=["step"]).sort_values("step", kind="stable")


def _check_known(option: str, names: Iterable[str], known_names: Iterable[str], path: Path) -> None:
    """Check that the names given to a command-line option are among those that a file has.

    Raises:
        UserError: if the file does not have one of the names.
    """
    known_names = list(dict.fromkeys(known_names))
    for name in names:
        if name not in known_names:
            raise UserError(f"{option} {name}: {path} has no such value{did_you_mean(name, known_names)}")


def _select_tasks(score_rows: pd.DataFrame, tasks: Sequence[str], path: Path) -> pd.DataFrame:
    """Return the rows of the selected tasks, each given by its name or by the first words of its name; all if empty.

    Raises:
        UserError: if the file has no such task.
    """
    if not tasks:
        return score_rows
    known = score_rows["name"].unique()
    matches_by_task = {task: [name for name in known if name == task or name.startswith(f"{task} ")] for task in tasks}
    for task, matches in matches_by_task.items():
        _check_known("--task", [] if matches else [task], known, path)
    selected = {name for matches in matches_by_task.values() for name in matches}
    return score_rows[score_rows["name"].isin(selected)].copy()


def _find_common_models(
    measure_rows: pd.DataFrame,
    score_rows: pd.DataFrame,
    measures_path: Path,
    scores_path: Path,
    covariate_rows: Sequence[pd.DataFrame],
) -> tuple[list[str], list[str]]:
    """Return the models that both files have, and a remark for each model that only one file has.

    The rows of a file that names no model are changed in place: they get the single model of the other file. So do rows
    of covariates without a model.

    Raises:
        UserError: if the files have no model in common, or if one names no model and the other several.
    """
    files = ((measure_rows, measures_path), (score_rows, scores_path))
    for (rows, path), (other_rows, other_path) in (files, files[::-1]):
        models = rows["model"].unique()
        if (other_rows["model"] == "").all():
            if len(models) > 1:
                raise UserError(f"{path} has several models, but {other_path} has no column model; add the column")
            other_rows["model"] = models[0]
    for rows in covariate_rows:
        if (rows["model"] == "").all():
            rows["model"] = measure_rows["model"].iloc[0]
    measured_models, scored_models = (list(rows["model"].unique()) for rows in (measure_rows, score_rows))
    common_models = [model for model in measured_models if model in scored_models]
    if not common_models:
        raise UserError(
            f"no model in common: {measures_path} has {_join_first_names(measured_models)}, {scores_path} has "
            f"{_join_first_names(scored_models)}; use the same names, or name the model of all scores with --model"
        )
    remarks = [
        f"left out: {model}, which has no {noun} in {path}"
        for models, noun, path in ((measured_models, "scores", scores_path), (scored_models, "measures", measures_path))
        for model in models
        if model not in common_models
    ]
    return common_models, remarks


def _drop_omitted(rows: pd.DataFrame, selection: Selection) -> pd.DataFrame:
    """Return the rows without those whose revision or step the selection omits."""
    labels = rows[["point", "revision", "step"]].astype(str)
    return rows[~labels.isin(selection.omit).any(axis=1)].copy()


def _parse_values(rows: pd.DataFrame, refuse_duplicates: bool = True) -> pd.DataFrame:
    """Return rows with their `text` parsed to a `value`, without empty cells and numbers that are not finite.

    Raises:
        UserError: if a text is no number, or, with `refuse_duplicates`, if there are two numbers for the same point.
    """
    values = []
    for location, column, text in zip(rows.index, rows["name"], rows["text"], strict=True):
        try:
            values.append(float(text or math.nan))
        except ValueError:
            raise UserError(f"{location}: {column} is {shorten(text, 60)!r}; expected a number or nothing") from None
    parsed = rows.assign(value=np.array(values, dtype=float))
    parsed = parsed[np.isfinite(parsed["value"])].copy()
    keys = ["source", "layer", "name", "model", "point"]
    if refuse_duplicates:
        for location, row in parsed[parsed.duplicated(keys)].iterrows():
            name = " ".join(str(row[column]) for column in keys if row[column] != "")
            raise UserError(f"{location}: there is a second number for {name}; expected one for each point")
    return parsed


def _join_first_names(names: Iterable[object]) -> str:
    """Join the first three distinct names with commas; an ellipsis stands for the others."""
    distinct = list(dict.fromkeys(map(str, names)))
    return ", ".join(distinct[:3] or ["none"]) + (" ..." if len(distinct) > 3 else "")


def _warn_of_equal_weights(rows: pd.DataFrame) -> list[str]:
    """Return a warning for each group of points of a model that have the same weights and so are not independent."""
    rows_with_weights = rows[rows["weights"] != ""]
    warnings = []
    for (model, _), group in rows_with_weights.groupby(["model", "weights"], sort=False):
        points = list(map(str, group["point"].unique()))
        if len(points) > 1:
            names = ", ".join(points)
            warnings.append(f"warning: {model} has the same weights at {names}, which count as {len(points)} points")
    return warnings
