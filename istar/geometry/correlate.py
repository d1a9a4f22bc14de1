"""`istar correlate`: whether tasks are done better where the geometry is another, over the points of a training.

*Anisotropy is Not Inherent to Transformers* (Machina and Mercer, 2024), section 5.4 and Table 1: Pearson, Spearman and
Kendall (tau-b) between a measure and a task's scores, over checkpoints.
"""

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import scipy.stats
from rich.table import Table

from istar.errors import UserError, did_you_mean, shorten
from istar.files import write_text
from istar.geometry.trajectory import KEYS, Stop
from istar.pages import sheets
from istar.pages.sheets import Entry, Sheet

By = Literal["revision", "step"]
STATISTICS = ("pearson", "spearman", "kendall")
LEAST = 3
"""Points: any two lie on a line."""
LEVEL = 0.95


@dataclass(frozen=True)
class Selection:
    """What is correlated, and how.

    Attributes:
        by: column to join by; by default the revision if both files have it, else the step.
        measures: columns; all if empty. layers and sources likewise.
        omit: revisions or steps to leave out, such as the untrained model, as the paper does.
        resamples: of the bootstrap.
        seed: of it.
    """

    by: By | None = None
    measures: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    omit: tuple[str, ...] = ()
    resamples: int = 2_000
    seed: int = 0


@dataclass(frozen=True)
class Correlated:
    """What was found.

    Attributes:
        rows: for each model, source, layer, measure and task n, the statistics with `_low` and `_high`, and a `note`
            on why there are none.
        remarks: what else a reader should know.
    """

    rows: list[dict[str, Any]]
    remarks: list[str] = field(default_factory=list)


Point = tuple[str, str | int]
"""Model and revision or step."""


@dataclass(frozen=True)
class _Series:
    """A number for each point, of a measure (source, layer, measure) or a task."""

    name: tuple[str, ...]
    values: dict[Point, float] = field(default_factory=dict)


def correlate(geometry: Path, scores: Path, selection: Selection) -> Correlated:
    """Join a table of measures, such as `trajectory.csv`, with one of scores, and correlate.

    Args:
        geometry: columns revision or step, optionally model, source, layer, weights; all others are measures.
        scores: columns revision or step, optionally model; then one for each task, or `task` and `score`.
        selection: see there.

    Raises:
        UserError: for files that do not hold this, or have no point in common.
    """
    measured, scored = _File(geometry), _File(scores)
    by = selection.by or ("revision" if "revision" in measured.header and "revision" in scored.header else "step")
    for file in (measured, scored):
        _check_key(file, by)
    places = [row.get(name, "") for file in (measured, scored) for _, row in file.records() for name in _PLACES]
    _check_known("--omit", selection.omit, places, geometry)
    models = _models(measured, scored)
    measures = _measures(measured, by, selection)
    tasks = _tasks(scored, by, selection)
    if len(models) == 1:
        # One of the files need not name it.
        measures, tasks = ([_renamed(one, models[0]) for one in series] for series in (measures, tasks))
    _check_common(measures, tasks, by)
    rows = [row for model in models for row in _correlations(model, measures, tasks, selection)]
    return Correlated(rows, list(_remarks(measured, by, selection)))


# ---- reading


class _File:
    """A CSV file, whose mistakes are told with their line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.reader(file)
                self.header = [name.strip() for name in next(reader, [])]
                self.rows = [(reader.line_num, row) for row in reader if any(row)]
        except (OSError, ValueError, csv.Error) as error:
            raise UserError(f"{path} cannot be read: {shorten(error)}; expected a CSV file") from error
        twice = next((name for name in self.header if self.header.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"{path}: two columns are called {twice!r}")
        if not self.rows:
            raise UserError(f"{path} has no rows; expected a header and rows below it")
        for line, row in self.rows:
            if len(row) != len(self.header):
                raise UserError(f"{path}, line {line}: {len(row)} cells below {len(self.header)} columns")

    def records(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Place and cells of each row."""
        for line, row in self.rows:
            yield f"{self.path}, line {line}", {k: v.strip() for k, v in zip(self.header, row, strict=True)}


_PLACES = ("revision", "step")


def _check_key(file: _File, by: By) -> None:
    # The step may also be the number in the revision.
    if by not in file.header and not (by == "step" and "revision" in file.header):
        told = "revision" if by == "revision" else "revision or step"
        raise UserError(f"{file.path} has no column {told}; expected one to join by beside the numbers")


def _number(text: str, place: str, column: str) -> float:
    """NaN for an empty cell."""
    try:
        return float(text) if text else math.nan
    except ValueError:
        raise UserError(f"{place}: {column} is {shorten(text, 60)!r}; expected a number or nothing") from None


def _model(row: Mapping[str, str]) -> str:
    # Folders and hub ids of one model end alike.
    return Path(row.get("model", "")).name


def _point(row: Mapping[str, str], by: By, place: str) -> Point:
    if by == "revision":
        return _model(row), row["revision"]
    text = row.get("step") or row.get("revision", "")
    try:
        step = int(float(text))
    except (ValueError, OverflowError):
        found = Stop(text, "").step
        if found is None:
            raise UserError(f"{place}: {shorten(text, 60)!r} has no number; expected a step") from None
        step = found
    return _model(row), step


def _is_omitted(row: Mapping[str, str], point: Point, selection: Selection) -> bool:
    return not {str(point[1]), row.get("revision"), row.get("step")}.isdisjoint(selection.omit)


def _measures(file: _File, by: By, selection: Selection) -> list[_Series]:
    """One for each source, layer and measure, in the file's order."""
    columns = [name for name in file.header if name not in KEYS]
    _check_known("--measure", selection.measures, columns, file.path)
    for option, name in (("--layer", "layer"), ("--source", "source")):
        wanted = getattr(selection, f"{name}s")
        _check_known(option, wanted, list(dict.fromkeys(row.get(name, "") for _, row in file.records())), file.path)
    found: dict[tuple[str, ...], _Series] = {}
    for place, row in file.records():
        source, layer, point = row.get("source", ""), row.get("layer", ""), _point(row, by, place)
        if (selection.layers and layer not in selection.layers) or _is_omitted(row, point, selection):
            continue
        if selection.sources and source not in selection.sources:
            continue
        for measure in selection.measures or columns:
            _add(found, (source, layer, measure), point, _number(row[measure], place, measure), place)
    return [series for series in found.values() if series.values]


def _tasks(file: _File, by: By, selection: Selection) -> list[_Series]:
    """One for each task: columns of their own, or rows with `task` and `score`."""
    is_long = {"task", "score"} <= set(file.header)
    columns = [name for name in file.header if name not in KEYS]
    if not columns:
        raise UserError(f"{file.path} has no column of scores; expected one for each task, or task and score")
    found: dict[tuple[str, ...], _Series] = {}
    for place, row in file.records():
        point = _point(row, by, place)
        if _is_omitted(row, point, selection):
            continue
        for task, score in [(row["task"], "score")] if is_long else zip(columns, columns, strict=True):
            _add(found, (task,), point, _number(row[score], place, score), place)
    return list(found.values())


def _add(found: dict[tuple[str, ...], _Series], name: tuple[str, ...], point: Point, value: float, place: str) -> None:
    series = found.setdefault(name, _Series(name))
    if point in series.values:
        told = " ".join(part for part in (*name, *map(str, point)) if part)
        raise UserError(f"{place}: there is a second number for {told}; expected one for each point")
    if math.isfinite(value):
        series.values[point] = value


def _check_known(option: str, wanted: Iterable[str], known: Sequence[str], path: Path) -> None:
    for name in wanted:
        if name not in known:
            raise UserError(f"{option} {name}: {path} has no such one{did_you_mean(name, known)}")


def _models(measured: _File, scored: _File) -> list[str]:
    """Of both files."""
    first, second = (list(dict.fromkeys(_model(row) for _, row in file.records())) for file in (measured, scored))
    if "model" not in measured.header or "model" not in scored.header:
        several = measured if len(first) > 1 else scored
        if len(first) > 1 or len(second) > 1:
            other = scored if several is measured else measured
            raise UserError(f"{several.path} has several models, but {other.path} has no column model")
        return first if "model" in measured.header else second
    common = [name for name in first if name in second]
    if not common:
        raise UserError(
            f"no model in common: {measured.path} has {_some(first)}, {scored.path} has {_some(second)}; "
            "without a column model the scores are taken as they are"
        )
    return common


def _renamed(series: _Series, model: str) -> _Series:
    return _Series(series.name, {(own or model, place): value for (own, place), value in series.values.items()})


def _check_common(measures: Sequence[_Series], tasks: Sequence[_Series], by: By) -> None:
    first, second = ({point: None for one in series for point in one.values} for series in (measures, tasks))
    if not first.keys() & second.keys():
        # The number may be the same where the name is not.
        other = "; --by step joins by the numbers in the names" if by == "revision" else ""
        raise UserError(
            f"no {by} in common: the measures have {_some(point[1] for point in first)}, the scores "
            f"{_some(point[1] for point in second)}{other}"
        )


def _some(names: Iterable[object]) -> str:
    found = list(dict.fromkeys(map(str, names)))
    return ", ".join(found[:3]) + (" ..." if len(found) > 3 else "") if found else "none"


def _remarks(file: _File, by: By, selection: Selection) -> Iterator[str]:
    """Which points are not independent because their weights are the same."""
    seen: dict[tuple[str, str], list[str]] = {}
    for place, row in file.records():
        point = _point(row, by, place)
        if row.get("weights") and not _is_omitted(row, point, selection):
            seen.setdefault((point[0], row["weights"]), []).append(str(point[1]))
    for (model, _), points in seen.items():
        same = list(dict.fromkeys(points))
        if len(same) > 1:
            yield f"warning: {model} has the same weights at {', '.join(same)}, which count as {len(same)} points"


# ---- correlating


def _correlations(
    model: str, measures: Sequence[_Series], tasks: Sequence[_Series], selection: Selection
) -> Iterator[dict[str, Any]]:
    resampled = cache(lambda points: _weights(len(points), selection))
    resampled_task = cache(lambda number, points: Resampled(_at(tasks[number], points), resampled(points)))
    for measure in measures:
        own = {point for point in measure.values if point[0] == model}
        if not own:
            continue
        # Of one measure the tasks mostly share their points.
        resampled_measure = cache(lambda points, measure=measure: Resampled(_at(measure, points), resampled(points)))
        for number, task in enumerate(tasks):
            points = tuple(point for point in task.values if point in own)
            source, layer, name = measure.name
            row = {"model": model, "source": source, "layer": layer, "measure": name, "task": task.name[0]}
            note = _why_not(_at(measure, points), _at(task, points))
            if note:
                found = dict.fromkeys((f"{s}{end}" for s in STATISTICS for end in ("", "_low", "_high")), math.nan)
            else:
                found = correlations(resampled_measure(points), resampled_task(number, points))
            yield {**row, "n": len(points), **found, "note": note}


def _at(series: _Series, points: Sequence[Point]) -> np.ndarray:
    return np.array([series.values[point] for point in points])


def _why_not(measure: np.ndarray, scores: np.ndarray) -> str:
    if len(measure) < LEAST:
        return f"{len(measure)} common point{'s' * (len(measure) != 1)}; {LEAST} are needed"
    for name, values in (("measure", measure), ("score", scores)):
        # What differs by rounding alone is constant.
        if np.ptp(values) <= 1e-12 * np.abs(values).max():
            return f"the {name} is constant"
    return ""


def _weights(count: int, selection: Selection) -> np.ndarray:
    """How often each point is drawn in each resample, `(resamples, count)`."""
    random = np.random.default_rng(selection.seed)
    return random.multinomial(count, np.full(count, 1 / count), selection.resamples).astype(float)


class Resampled:
    """A series with all that the statistics of its resamples need from it alone.

    A resample is how often each point is drawn. So ranks and pairs in it are sums over the original points, and all
    resamples are a matrix product. Where a resample is constant, its statistics are NaN.

    Args:
        values: `(n,)`.
        weights: `(resamples, n)`, how often each is drawn.
    """

    def __init__(self, values: np.ndarray, weights: np.ndarray) -> None:
        self.values, self.weights = values, weights
        self.signs = np.sign(values[:, None] - values)
        # Draws of one point are ties, as in tau-b; whole numbers, so that zero is exact.
        self.untied = ((weights @ np.abs(self.signs)) * weights).sum(1)
        self.units = self._units(np.broadcast_to(values, weights.shape))
        # Ranks but for a factor and a constant, which a correlation does not see.
        self.rank_units = self._units(weights @ self.signs.T)

    def _units(self, values: np.ndarray) -> np.ndarray:
        """Vectors whose products are correlations."""
        weights = self.weights
        mean = (weights * values).sum(1, keepdims=True) / weights.sum(1, keepdims=True)
        scaled = np.sqrt(weights) * (values - mean)
        norms = np.linalg.norm(scaled, axis=1, keepdims=True)
        norms[self.untied == 0] = math.nan
        return np.asarray(scaled / norms)


def correlations(measure: Resampled, task: Resampled) -> dict[str, float]:
    """The three statistics, each with the ends of its 95% percentile interval."""
    x, y = measure.values, task.values
    values = (
        scipy.stats.pearsonr(x, y).statistic,
        scipy.stats.spearmanr(x, y).statistic,
        scipy.stats.kendalltau(x, y).statistic,
    )
    found: dict[str, float] = {}
    for name, value, draws in zip(STATISTICS, values, resamples(measure, task), strict=True):
        defined = draws[np.isfinite(draws)]
        low, high = np.quantile(defined, ((1 - LEVEL) / 2, (1 + LEVEL) / 2)) if len(defined) else (math.nan, math.nan)
        found |= {name: float(value), f"{name}_low": float(low), f"{name}_high": float(high)}
    return found


def resamples(measure: Resampled, task: Resampled) -> np.ndarray:
    """Pearson, Spearman and Kendall of each resample, `(3, resamples)`."""
    weights = measure.weights
    agreeing = ((weights @ (measure.signs * task.signs)) * weights).sum(1)
    pairs = np.sqrt(measure.untied * task.untied)
    return np.stack([
        (measure.units * task.units).sum(1),
        (measure.rank_units * task.rank_units).sum(1),
        agreeing / np.where(pairs > 0, pairs, math.nan),
    ])  # fmt: skip


# ---- what is written and shown


def write(found: Correlated, shown: Sheet, out: Path) -> list[Path]:
    """Write `correlation.csv`, everything, and the rows that are shown as `table.csv` and `table.md`; their paths."""
    texts = {
        "correlation.csv": pd.DataFrame(found.rows).to_csv(index=False),
        "table.csv": sheets.csv(shown),
        "table.md": sheets.markdown(shown),
    }
    for name, text in texts.items():
        write_text(out / name, text)
    return [out / name for name in texts]


def sheet(found: Correlated, selection: Selection) -> Sheet:
    """The rows that were asked for, or those that the paper speaks of, in the form of its Table 1."""
    chosen = selection.measures or selection.layers or selection.sources
    rows = found.rows if chosen else _headline(found.rows) or found.rows
    order = ("task", "model", *STATISTICS, "source", "layer", "measure", "n")
    frame = pd.DataFrame(rows)
    frame = frame[[*order, *(name for name in frame if name not in order)]]
    has_notes = any(row["note"] for row in rows)
    header = ("task", "measure", "layer", "n", "Pearson", "Spearman", "Kendall", *(["note"] if has_notes else []))
    groups: dict[str, list[list[Entry]]] = {}
    for row in rows:
        groups.setdefault(row["model"], []).append(_entries(row, has_notes))
    return Sheet(
        "correlation",
        "Geometry and tasks",
        f"Correlation of measures with scores over n points of the training, with {LEVEL:.0%} intervals from "
        f"{selection.resamples} bootstrap resamples.",
        header,
        groups,
        frame,
    )


def _headline(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """I(W) of the matrix nearest to the output, and of the last layer IsoScore, InterSim and IntraSim."""
    known = list(dict.fromkeys((row["source"], row["layer"]) for row in rows))
    matrix = next((key for which in ("output", "input") for key in known if key[1] == f"{which}_embeddings"), None)
    hidden = [key for key in known if key[1] == "final_norm" or key[1].startswith("layer_")]
    last = next((key for key in reversed(hidden) if key[0] == "combined"), hidden[-1] if hidden else None)
    wanted = {(matrix, "partition_isotropy_as_computed")} | {
        (last, measure) for measure in ("isoscore", "inter_sim", "intra_sim")
    }
    return [row for row in rows if ((row["source"], row["layer"]), row["measure"]) in wanted]


_SIGNS = {"partition_isotropy_as_computed": "I(W)", "partition_isotropy_both": "I(W) both signs"}


def _entries(row: Mapping[str, Any], has_notes: bool) -> list[Entry]:
    cells = [
        "-" if math.isnan(row[name]) else f"{row[name]:.2f} [{row[f'{name}_low']:.2f}, {row[f'{name}_high']:.2f}]"
        for name in STATISTICS
    ]
    measure = _SIGNS.get(row["measure"], row["measure"])
    texts = [Entry(text.replace("_", " ")) for text in (row["task"], measure, row["layer"])]
    numbers = [Entry(str(row["n"]), number=True), *(Entry(cell, number=True) for cell in cells)]
    return [*texts, *numbers, *([Entry(row["note"])] if has_notes else [])]


def tables(shown: Sheet) -> list[Table]:
    """The same for the terminal, one for each model, without the notes."""
    found = []
    for model, rows in shown.groups.items():
        table = Table(title=f"{model or shown.title}: {shown.caption}", title_justify="left")
        for name in ("task", "measure", "n", *STATISTICS):
            justify: Any = "left" if name in ("task", "measure") else "right"
            table.add_column(name, justify=justify, overflow="fold", min_width=13 if name in STATISTICS else None)
        for task, measure, layer, *rest in ([entry.text for entry in row] for row in rows):
            cells = (cell.replace(" [", "\n[") for cell in rest[: 1 + len(STATISTICS)])
            table.add_row(task, f"{measure}\n{layer}".strip(), *cells)
        found.append(table)
    return found


def reasons(shown: Sheet) -> list[str]:
    """Why there are dashes, the first few of them."""
    told = list(dict.fromkeys(
        f"{row['task']} with {row['measure']}: {row['note']}" for row in shown.frame.to_dict("records") if row["note"]
    ))  # fmt: skip
    return told[:5] + ([f"... and {len(told) - 5} more; see table.md"] if len(told) > 5 else [])
