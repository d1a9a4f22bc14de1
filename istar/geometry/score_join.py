"""Joining measures of checkpoints with the scores of the same checkpoints, for `istar correlate`."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from istar.errors import UserError, did_you_mean, shorten
from istar.geometry.saved_checkpoints import step_from_name
from istar.geometry.score_files import read_csv, read_scores
from istar.geometry.trajectory import KEY_COLUMNS

POOLED = "all models"
"""Name of the models together."""
Place = tuple[str, str]
"""Source and layer of a measure."""


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
    given: tuple[str, ...] = ()  # columns of either file that partial correlations hold constant
    pool: bool = False  # whether the checkpoints of all models are the points of one correlation
    resamples: int = 2_000  # number of bootstrap resamples
    seed: int = 0  # seed of the bootstrap
    # Number of neighbouring checkpoints that are drawn together; 0 stands for
    # `istar.statistics.correlation.automatic_block_length`, and None draws single checkpoints.
    block_length: int | None = None

    @property
    def has_rows(self) -> bool:
        """Whether the user has selected measures, layers or sources."""
        return bool(self.measures or self.layers or self.sources)


@dataclass(frozen=True)
class Joined:
    """The measures and the scores of the same points.

    `measures` and `tasks` have a row for each number: `KEYS`, `point` (the revision or the step), `name` (of the
    measure or the task) and `value`.
    """

    models: list[str]  # models that both files have
    measures: pd.DataFrame
    tasks: pd.DataFrame
    task_names: list[str]  # also those of tasks without a number
    # Values of the columns that are held constant, by column, then by model, source, layer and point. Those that come
    # from the scores have an empty source and layer, and count for all.
    given: Mapping[str, Mapping[tuple[Any, ...], float]]
    steps: Mapping[tuple[str, Any], int]  # step of each point of the measures that has one, by model and point
    # All scores of these models at checkpoints with a known step, also those without measures: `model`, `task`,
    # `step`, `score` and `standard_error`, NaN if it is unknown.
    scores_by_step: pd.DataFrame
    remarks: list[str]  # warnings for the user, one line each

    def covariates(self, model: str, place: Place, points: Sequence[Any]) -> np.ndarray:
        """Return what is held constant at each point of a measure, `(points, columns)`; NaN where it is unknown."""
        rows = []
        for point in points:
            keys = ((model, *place, point), (model, "", "", point))
            rows.append([
                next((values[key] for key in keys if key in values), math.nan) for values in self.given.values()
            ])  # fmt: skip
        return np.array(rows, dtype=float).reshape(len(points), len(self.given))


def join(geometry: Path, scores: Path, selection: Selection) -> Joined:
    """Read both files, and keep the rows of the selection.

    Raises:
        UserError: if a file cannot be read or lacks a column, or if the files have no point in common.
    """
    score_cells, remarks = read_scores(scores)
    files = {geometry: read_csv(geometry), scores: score_cells}
    by = selection.by or ("revision" if all("revision" in cells for cells in files.values()) else "step")
    for path, cells in files.items():
        _check_joinable(cells, path, by)
    keyed = {path: _with_keys(cells, by) for path, cells in files.items()}
    given = _given(keyed, selection.given)
    skipped = [name for name in selection.given if name not in selection.measures]
    measured = _long_format(keyed[geometry], geometry, "measures", selection.measures, skipped)
    scored = _long_format(keyed[scores], scores, "scores", (), selection.given).assign(source="", layer="")
    _check_known("--layer", selection.layers, measured["layer"], geometry)
    _check_known("--source", selection.sources, measured["source"], geometry)
    scored = _selected_tasks(scored, selection.tasks, scores)
    if selection.model:
        _check_known("--model", [selection.model], measured["model"], geometry)
        scored["model"] = selection.model
    labels = [rows[column] for rows in (measured, scored) for column in ("revision", "step")]
    _check_known("--omit", selection.omit, pd.concat(labels), geometry)
    models, left_out = _common_models(measured, scored, geometry, scores, list(given.values()))
    measured, scored = (_without_omitted(rows, selection) for rows in (measured, scored))
    remarks += left_out + _equal_weights_warnings(measured)
    scores_by_step = _scores_by_step(scored, measured)
    if selection.pool:
        for rows in (measured, scored, *given.values()):
            rows["point"] = rows["model"] + " " + rows["point"].astype(str)
            rows["model"] = POOLED
        models = [POOLED]
    if selection.layers:
        measured = measured[measured["layer"].isin(selection.layers)]
    if selection.sources:
        measured = measured[measured["source"].isin(selection.sources)]
    measures, tasks = _parse_values(measured), _parse_values(scored)
    if measures.merge(tasks, on=["model", "point"]).empty:
        # The number may be the same where the name is not.
        hint = "; --by step joins by the steps in the names" if by == "revision" else ""
        raise UserError(
            f"no {by} in common: the measures have {_first_names(measures['point'])}, the scores "
            f"{_first_names(tasks['point'])}{hint}"
        )
    return Joined(
        models,
        measures,
        tasks,
        # Tasks without a number keep their rows, with zero points.
        list(scored["name"].unique()),
        {name: _by_place(rows) for name, rows in given.items()},
        _steps(measured),
        scores_by_step,
        remarks,
    )


def _check_joinable(cells: pd.DataFrame, path: Path, by: str) -> None:
    """Refuse a file without the column to join by."""
    # The step may also be named in the revision.
    if by not in cells and not (by == "step" and "revision" in cells):
        expected = "revision" if by == "revision" else "revision or step"
        raise UserError(f"{path} has no column {expected}; expected one to join by")


def _with_keys(cells: pd.DataFrame, by: str) -> pd.DataFrame:
    """Return the cells with all of `KEYS`, empty where the file lacks them, and `point`, the revision or the step."""
    columns = [str(name) for name in cells if name not in KEY_COLUMNS]
    keys = cells.reindex(columns=list(KEY_COLUMNS), fill_value="")
    # A folder and a hub id of the same model have the same last part.
    keys["model"] = [Path(model).name for model in keys["model"]]
    keys["point"] = keys["revision"]
    if by == "step":
        labels = keys["step"].where(keys["step"] != "", keys["revision"])
        keys["point"] = [_parse_step(label, str(location)) for location, label in labels.items()]
    return pd.concat([keys, cells[columns].add_prefix(_VALUE)], axis=1)


_VALUE = "value: "
"""Prefix of the columns that are no keys, which may have the name of one, such as `point`."""


def _long_format(
    keyed: pd.DataFrame, path: Path, noun: str, selected: Sequence[str], skipped: Sequence[str]
) -> pd.DataFrame:
    """Return one row for each cell that is no key, in the order of the file; the index says where the cell is.

    Returns:
        The keys; `name`, the cell's column, or its task if the file has the columns `task` and `score`; and the `text`
        of the cell. With these columns, also `standard_error`, empty if the file has no such column.
    """
    columns = [name.removeprefix(_VALUE) for name in map(str, keyed) if name.startswith(_VALUE)]
    columns = [name for name in columns if name not in skipped]
    if not columns:
        raise UserError(f"{path} has no column of {noun}; expected at least one")
    _check_known("--measure", selected, columns, path)
    keys = keyed[[*KEY_COLUMNS, "point"]]
    if {"task", "score"} <= set(columns):
        errors = keyed.get(f"{_VALUE}standard_error", "")
        return keys.assign(name=keyed[f"{_VALUE}task"], text=keyed[f"{_VALUE}score"], standard_error=errors)
    parts = [keys.assign(name=name, text=keyed[_VALUE + name], row=range(len(keyed))) for name in selected or columns]
    return pd.concat(parts).sort_values("row", kind="stable").drop(columns="row")


def _given(files: Mapping[Path, pd.DataFrame], names: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Return the rows of each column that is held constant, with the `value` as a number.

    A column of the first file counts before one of the second. `step` may also be the step in a revision's name.
    """
    results = {}
    first, second = files
    for name in names:
        for path, keyed in files.items():
            column = name if name in KEY_COLUMNS else _VALUE + name
            if name in KEY_COLUMNS and not (name == "step" and (keyed["step"] + keyed["revision"] != "").any()):
                continue
            if column in keyed:
                rows = keyed[[*KEY_COLUMNS, "point"]].assign(name=name, text=keyed[column])
                if name == "step":
                    labels = rows["step"].where(rows["step"] != "", rows["revision"])
                    rows["text"] = [str(_parse_step(label, str(place))) for place, label in labels.items()]
                rows = rows if path == first else rows.assign(source="", layer="")
                results[name] = _parse_values(rows, is_series=False)
                break
        else:
            known = [column.removeprefix(_VALUE) for keyed in files.values() for column in map(str, keyed)]
            raise UserError(
                f"--given {name}: neither {first} nor {second} has such a column of numbers{did_you_mean(name, known)}"
            )
    return results


def _by_place(rows: pd.DataFrame) -> dict[tuple[Any, ...], float]:
    """Return the values by model, source, layer and point."""
    values: dict[tuple[Any, ...], float] = {}
    columns = (rows[name] for name in ("model", "source", "layer", "point", "name", "value"))
    for location, *key, name, value in zip(rows.index, *columns, strict=True):
        if values.setdefault(tuple(key), value) != value:
            raise UserError(f"{location}: {name} has another value for the same point; expected one for each point")
    return values


def _parse_step(label: str, location: str) -> int:
    """Return the step that a label states, as a number or as `step<n>`."""
    step = _step(label)
    if step is None:
        raise UserError(f"{location}: {shorten(label, 60)!r} is no step; expected a number, or a name such as step1000")
    return step


def _step(label: str) -> int | None:
    try:
        return int(float(label))
    except (ValueError, OverflowError):
        return step_from_name(label)


def _steps(rows: pd.DataFrame) -> dict[tuple[str, Any], int]:
    """Return the step of each point that has one, by model and point."""
    unique = rows.drop_duplicates(["model", "point"])
    labels = unique["step"].where(unique["step"] != "", unique["revision"])
    parsed = {
        (model, point): _step(label)
        for model, point, label in zip(unique["model"], unique["point"], labels, strict=True)
    }
    return {key: step for key, step in parsed.items() if step is not None}


def _scores_by_step(scored: pd.DataFrame, measured: pd.DataFrame) -> pd.DataFrame:
    """Return `Joined.scores_by_step`; the step of a score is the one that its row states, or that of the measures."""
    steps = {**_steps(measured), **_steps(scored)}
    scores = _parse_values(scored)
    errors = scores["standard_error"] if "standard_error" in scores else pd.Series("", scores.index)
    table = pd.DataFrame({
        "model": scores["model"],
        "task": scores["name"],
        "step": [steps.get(key) for key in zip(scores["model"], scores["point"], strict=True)],
        "score": scores["value"],
        "standard_error": pd.to_numeric(errors, errors="coerce"),
    })  # fmt: skip
    return table[table["model"].isin(set(measured["model"]))].dropna(subset=["step"]).sort_values("step", kind="stable")


def _check_known(option: str, names: Iterable[str], known: Iterable[str], path: Path) -> None:
    known = list(dict.fromkeys(known))
    for name in names:
        if name not in known:
            raise UserError(f"{option} {name}: {path} has no such value{did_you_mean(name, known)}")


def _selected_tasks(scored: pd.DataFrame, tasks: Sequence[str], path: Path) -> pd.DataFrame:
    """Return the rows of the selected tasks: of those of this name, and of those whose name begins with it."""
    if not tasks:
        return scored
    known = scored["name"].unique()
    chosen = {task: [name for name in known if name == task or name.startswith(f"{task} ")] for task in tasks}
    for task, names in chosen.items():
        _check_known("--task", [] if names else [task], known, path)
    return scored[scored["name"].isin({name for names in chosen.values() for name in names})].copy()


def _common_models(
    measured: pd.DataFrame, scored: pd.DataFrame, geometry: Path, scores: Path, given: Sequence[pd.DataFrame]
) -> tuple[list[str], list[str]]:
    """Return the models of both files, and a remark for each model that is in one file alone.

    Rows without models get the single model of the other file; so do those of the columns that are held constant.
    """
    for rows, other, path, other_path in ((measured, scored, geometry, scores), (scored, measured, scores, geometry)):
        models = rows["model"].unique()
        if (other["model"] == "").all():
            if len(models) > 1:
                raise UserError(f"{path} has several models, but {other_path} has no column model; add the column")
            other["model"] = models[0]
    for rows in given:
        if (rows["model"] == "").all():
            rows["model"] = measured["model"].iloc[0]
    first, second = (list(rows["model"].unique()) for rows in (measured, scored))
    common = [model for model in first if model in second]
    if not common:
        raise UserError(
            f"no model in common: {geometry} has {_first_names(first)}, {scores} has {_first_names(second)}; "
            "use the same names, or name the model of all scores with --model"
        )
    remarks = [
        f"left out: {model}, which has no {noun} in {path}"
        for names, noun, path in ((first, "scores", scores), (second, "measures", geometry))
        for model in names
        if model not in common
    ]
    return common, remarks


def _without_omitted(rows: pd.DataFrame, selection: Selection) -> pd.DataFrame:
    """Leave out rows whose revision or step is omitted."""
    labels = rows[["point", "revision", "step"]].astype(str)
    return rows[~labels.isin(selection.omit).any(axis=1)].copy()


def _parse_values(rows: pd.DataFrame, is_series: bool = True) -> pd.DataFrame:
    """Parse the texts of `_long_format` to a `value`; leaves out empty cells and numbers that are not finite.

    Raises:
        UserError: if a text is no number, or, for series, if one has a second number at the same point.
    """
    values = []
    for location, column, text in zip(rows.index, rows["name"], rows["text"], strict=True):
        try:
            values.append(float(text or math.nan))
        except ValueError:
            raise UserError(f"{location}: {column} is {shorten(text, 60)!r}; expected a number or nothing") from None
    parsed = rows.assign(value=np.array(values, dtype=float))
    parsed = parsed[np.isfinite(parsed["value"])].copy()
    series = ["source", "layer", "name", "model", "point"]
    if is_series:
        for location, row in parsed[parsed.duplicated(series)].iterrows():
            name = " ".join(str(row[column]) for column in series if row[column] != "")
            raise UserError(f"{location}: there is a second number for {name}; expected one for each point")
    return parsed


def _first_names(names: Iterable[object]) -> str:
    """Return the first three distinct names, separated by commas."""
    distinct = list(dict.fromkeys(map(str, names)))
    return ", ".join(distinct[:3] or ["none"]) + (" ..." if len(distinct) > 3 else "")


def _equal_weights_warnings(rows: pd.DataFrame) -> list[str]:
    """Warn of points that are not independent because the weights are the same."""
    known = rows[rows["weights"] != ""]
    warnings = []
    for (model, _), group in known.groupby(["model", "weights"], sort=False):
        points = list(map(str, group["point"].unique()))
        if len(points) > 1:
            names = ", ".join(points)
            warnings.append(f"warning: {model} has the same weights at {names}, which count as {len(points)} points")
    return warnings
