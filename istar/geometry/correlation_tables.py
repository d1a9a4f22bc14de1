"""The tables of `istar correlate`, in the form of Table 1 of *Anisotropy is Not Inherent to Transformers*."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from istar.files import write_text
from istar.geometry.correlate import LEVEL, PARTIAL, STATISTICS, CorrelationResults
from istar.geometry.score_join import Selection
from istar.pages import sheets
from istar.pages.sheets import Entry, Sheet

_MEASURE_TITLES = {
    "partition_isotropy_as_computed": "I(W), signs as computed",
    "partition_isotropy_both": "I(W), both signs",
}


def write(results: CorrelationResults, table: Sheet, out: Path) -> list[Path]:
    """Write all rows to `correlation.csv` and the table's rows to `table.csv` and `table.md`; returns the paths."""
    texts = {
        "correlation.csv": pd.DataFrame(results.rows).to_csv(index=False),
        "table.csv": sheets.to_csv(table),
        "table.md": sheets.to_markdown(table),
    }
    for name, text in texts.items():
        write_text(out / name, text)
    return [out / name for name in texts]


def sheet(results: CorrelationResults, selection: Selection) -> Sheet:
    """Return the selected rows in the form of the paper's Table 1.

    Without a selection, these are for each model the measures that the paper reports, see `choices`, or else all of
    its rows. The paper's I(W) has the signs as computed; the table has the one over both signs.
    """
    rows = results.rows
    if not selection.has_rows:
        rows = [row for group in _by_model(results).values() for row in _headline_rows(group) or group]
    first_columns = ["task", "model", *STATISTICS, "source", "layer", "measure", "n"]
    frame = pd.DataFrame(rows)
    frame = frame[[*first_columns, *frame.columns.difference(first_columns, sort=False)]]
    statistics = [*STATISTICS, *(f"partial_{name}" for name in PARTIAL if selection.given)]
    has_notes = any(_note(row) for row in rows)
    header = ["task", "measure", "layer", "n", *(_statistic_title(name) for name in statistics)]
    header += ["note"] if has_notes else []
    groups: dict[str, list[list[Entry]]] = {}
    for row in rows:
        notes = [Entry(_note(row))] if has_notes else []
        groups.setdefault(row["model"], []).append([*_entries(row, statistics), *notes])
    return Sheet(
        "correlation",
        "Geometry and tasks",
        _caption(selection),
        tuple(header),
        groups,
        frame,
        (*choices(results, selection), *results.remarks),
    )


@dataclass(frozen=True)
class Headline:
    """Where a model's measures in the table are taken, as (source, layer); None if the model has no such place."""

    matrix: tuple[str, str] | None  # output embeddings if they are not tied to the input embeddings, otherwise these
    last: tuple[str, str] | None  # final normalization, or else the last layer


def headline(rows: Sequence[Mapping[str, Any]]) -> Headline:
    """Choose the places of one model. Of several texts, all together count, otherwise the first one."""
    locations = list(dict.fromkeys((row["source"], row["layer"]) for row in rows))
    matrix = next((key for which in ("output", "input") for key in locations if key[1] == f"{which}_embeddings"), None)
    numbers = {key: number for key in locations if (number := _layer_number(key[1])) is not None}
    sources = list(dict.fromkeys(source for source, _ in numbers))
    source = "combined" if "combined" in sources else next(iter(sources), "")
    of_source = {key: number for key, number in numbers.items() if key[0] == source}
    return Headline(matrix, max(of_source, key=lambda key: of_source[key], default=None))


def _layer_number(layer: str) -> float | None:
    """Return the position of a layer; infinity for the final normalization, and None for anything else."""
    if layer == "final_norm":
        return math.inf
    match = re.fullmatch(r"layer_(\d+)", layer)
    return int(match[1]) if match else None


def _headline_rows(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Select a model's I(W) over both signs, and IsoScore, InterSim and IntraSim of its last layer.

    The value over both signs can be compared between matrices, which the one with the signs as computed cannot.
    """
    places = headline(rows)
    chosen = {(places.matrix, "partition_isotropy_both")}
    chosen |= {(places.last, measure) for measure in ("isoscore", "inter_sim", "intra_sim")}
    return [row for row in rows if ((row["source"], row["layer"]), row["measure"]) in chosen]


def _by_model(results: CorrelationResults) -> dict[str, list[dict[str, Any]]]:
    """Group the rows by model, in order of appearance."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in results.rows:
        groups.setdefault(row["model"], []).append(row)
    return groups


def choices(results: CorrelationResults, selection: Selection) -> list[str]:
    """Say for each model which of its rows the table shows; empty with a selection by the user."""
    if selection.has_rows:
        return []
    lines = []
    for model, rows in _by_model(results).items():
        measures: dict[tuple[str, str], list[str]] = {}
        for row in _headline_rows(rows):
            names = measures.setdefault((row["source"], row["layer"]), [])
            if row["measure"] not in names:
                names.append(row["measure"])
        parts = [
            f"{', '.join(map(_measure_title, names))} of {_readable(layer)}{f' over {source}' * bool(source)}"
            for (source, layer), names in measures.items()
        ]
        chosen = "; ".join(parts) or "all measures, because it has none of an embedding matrix or a numbered layer"
        lines.append(f"{model or 'the model'}: {chosen}")
    return lines


def _measure_title(measure: str) -> str:
    return _readable(_MEASURE_TITLES.get(measure, measure))


def _readable(name: str) -> str:
    return name.replace("_", " ")


def _entries(row: Mapping[str, Any], statistics: Sequence[str]) -> list[Entry]:
    """Return the cells of one row; undefined statistics are dashes."""
    names = (row["task"], _measure_title(row["measure"]), row["layer"])
    return [
        *(Entry(_readable(name)) for name in names),
        *(Entry(text, number=True) for text in (str(row["n"]), *(_with_interval(row, name) for name in statistics))),
    ]


def _with_interval(row: Mapping[str, Any], name: str) -> str:
    """Return a statistic and its interval, if it has one."""
    value, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
    if math.isnan(value):
        return "-"
    return f"{value:.2f}" if math.isnan(low) else f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _note(row: Mapping[Any, Any]) -> str:
    """Return why statistics of a row are undefined, those with columns held constant included."""
    partial = row.get("partial_note", "")
    return (
        row["note"] if partial in ("", row["note"]) else "; ".join(filter(None, (row["note"], f"partial: {partial}")))
    )


def _statistic_title(name: str) -> str:
    method = name.removeprefix("partial_")
    return method.capitalize() if method == name else f"partial {method.capitalize()}"


def _caption(selection: Selection) -> str:
    """Return the caption: what the intervals are, and what is held constant."""
    blocks = "" if selection.block_length is None else " of blocks of neighbouring checkpoints"
    caption = (
        f"Correlation of measures with scores over n points of the training, with {LEVEL:.0%} intervals from "
        f"{selection.resamples} bootstrap resamples{blocks}."
    )
    if selection.given:
        caption += (
            f" Partial: with {', '.join(map(_readable, selection.given))} held constant, and Fisher's intervals, which "
            "assume independent points."
        )
    return caption


def tables(table: Sheet) -> list[Table]:
    """Return one terminal table for each model, without the notes."""
    results = []
    for model, rows in table.rows_by_group.items():
        result = Table(title=f"{model or table.title}: {table.caption}", title_justify="left")
        for name in ("task", "measure"):
            result.add_column(name, overflow="fold")
        result.add_column("n", justify="right", overflow="fold")
        names = [name for name in table.header[4:] if name != "note"]
        for name in names:
            result.add_column(name, justify="right", overflow="fold", min_width=13)
        for row in rows:
            task, measure, layer, n, *statistics = [entry.text for entry in row[: 4 + len(names)]]
            # The interval stands below the statistic.
            result.add_row(task, f"{measure}\n{layer}".strip(), n, *(text.replace(" ", "\n", 1) for text in statistics))
        results.append(result)
    return results


def reasons(table: Sheet) -> list[str]:
    """Return why statistics of the table are undefined: at most five reasons, and how many more there are."""
    noted = [row for row in table.frame.to_dict("records") if _note(row)]
    lines = list(dict.fromkeys(f"{row['task']} with {row['measure']}: {_note(row)}" for row in noted))
    return lines[:5] + ([f"... and {len(lines) - 5} more; see table.md"] if len(lines) > 5 else [])
