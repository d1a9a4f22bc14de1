"""The tables of `istar correlate`, in the form of Table 1 of *Anisotropy is Not Inherent to Transformers*."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from istar.drawing import page_tables
from istar.drawing.page_tables import Entry, Sheet
from istar.files.outputs import Output
from istar.files.writing import to_csv
from istar.geometry.correlation import score_figure
from istar.geometry.correlation.correlate import CONFIDENCE_LEVEL, PARTIAL_METHODS, STATISTICS, CorrelationResults
from istar.geometry.correlation.published_correlations import look_up_correlations
from istar.geometry.correlation.score_join import Selection
from istar.geometry.show.model_figures import MEASURE_TITLES

_MEASURE_TITLES = {
    **MEASURE_TITLES,
    "partition_isotropy_as_computed": "I(W), signs as computed",
    "partition_isotropy_both": "I(W), both signs",
}
FILES = ("correlation.csv", "table.csv", "table.md", *score_figure.FILES)
"""All files that `istar correlate` may write."""
_PUBLISHED_MEASURES = ("partition_isotropy_as_computed", "partition_isotropy_both")
"""Measures of output embeddings beside which the table has the paper's correlations."""


def make_output(out: Path) -> Output:
    """Return the output folder of `istar correlate`."""
    return Output(out, "correlation")


def write_results(results: CorrelationResults, table: Sheet, out: Path) -> list[Path]:
    """Write all correlations, the `table` of `make_sheet` and a figure of the scores, and return the paths.

    Raises:
        UserError: see `istar.files.outputs.Output.write`.
    """
    contents = {
        "correlation.csv": to_csv(pd.DataFrame(results.rows)).encode(),
        "table.csv": page_tables.to_csv(table).encode(),
        "table.md": page_tables.to_markdown(table).encode(),
        **score_figure.render_files(results.scores_by_step),
    }
    make_output(out).write(contents, is_complete=True)
    return [out / name for name in contents]


def make_sheet(results: CorrelationResults, selection: Selection) -> Sheet:
    """Return the table of correlations, in the form of Table 1 of *Anisotropy is Not Inherent to Transformers*.

    If the user has selected no measures, layers or sources, the table has for each model the measures that the paper
    reports, or all measures if the model has none of these. The paper's I(W) has the eigenvectors' signs as computed;
    the table's I(W) is over both signs. The paper's correlations stand beside those of its models and tasks.
    """
    rows = results.rows
    if not selection.has_row_filter:
        rows = [
            row
            for model_rows in _group_by_model(results).values()
            for row in _select_headline_rows(model_rows) or model_rows
        ]
    comparisons = [_compare_with_paper(row) for row in rows]
    has_published = any(comparisons)
    rows = [{**row, **comparison} for row, comparison in zip(rows, comparisons, strict=True)]
    leading_columns = ["task", "model", *STATISTICS, "source", "layer", "measure", "n"]
    frame = pd.DataFrame(rows)
    frame = frame[[*leading_columns, *frame.columns.difference(leading_columns, sort=False)]]
    statistics = [*STATISTICS, *(f"partial_{name}" for name in PARTIAL_METHODS if selection.covariates)]
    has_notes = any(_join_notes(row) for row in rows)
    header = ["task", "measure", "layer", "n", *(_make_statistic_title(name) for name in statistics)]
    header += [*(["paper", "minus paper"] if has_published else []), *(["note"] if has_notes else [])]
    cells_by_model: dict[str, list[list[Entry]]] = {}
    for row in rows:
        paper_cells = _make_paper_cells(row) if has_published else []
        note_cells = [Entry(_join_notes(row))] if has_notes else []
        cells_by_model.setdefault(row["model"], []).append([*_make_cells(row, statistics), *paper_cells, *note_cells])
    return Sheet(
        "correlation",
        "Geometry and tasks",
        _make_caption(selection, has_published),
        tuple(header),
        cells_by_model,
        frame,
        (*describe_shown_rows(results, selection), *results.remarks),
    )


@dataclass(frozen=True)
class HeadlinePlaces:
    """Source and layer of the measures of a model that the table shows; None if the model has no such place."""

    matrix: tuple[str, str] | None  # output embeddings if they are not tied to the input embeddings, otherwise these
    last_layer: tuple[str, str] | None  # final normalization, or else the last layer


def choose_headline_places(rows: Sequence[Mapping[str, Any]]) -> HeadlinePlaces:
    """Choose the embedding matrix and the layer of one model whose measures the table shows.

    If the layers were measured over several texts, those over all texts together are chosen, otherwise those over the
    first text.
    """
    places = list(dict.fromkeys((row["source"], row["layer"]) for row in rows))
    matrices = [
        (source, layer) for side in ("output", "input") for source, layer in places if layer == f"{side}_embeddings"
    ]
    position_by_place = {
        (source, layer): position for source, layer in places if (position := _parse_layer_position(layer)) is not None
    }
    sources = list(dict.fromkeys(source for source, _ in position_by_place))
    chosen_source = "combined" if "combined" in sources else next(iter(sources), "")
    layers = [(source, layer) for source, layer in position_by_place if source == chosen_source]
    last_layer = max(layers, key=lambda place: position_by_place[place], default=None)
    return HeadlinePlaces(next(iter(matrices), None), last_layer)


def _parse_layer_position(layer: str) -> float | None:
    """Return the position of a layer in the model: infinity for the final normalization, None if it is no layer."""
    if layer == "final_norm":
        return math.inf
    match = re.fullmatch(r"layer_(\d+)", layer)
    return int(match[1]) if match else None


def _select_headline_rows(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return a model's rows of I(W) over both signs, and of IsoScore, InterSim and IntraSim of its last layer.

    I(W) over both signs of the eigenvectors can be compared between matrices; with the signs as computed it cannot.
    """
    places = choose_headline_places(rows)
    headline_keys = {(places.matrix, "partition_isotropy_both")}
    headline_keys |= {(places.last_layer, measure) for measure in ("isoscore", "inter_sim", "intra_sim")}
    return [row for row in rows if ((row["source"], row["layer"]), row["measure"]) in headline_keys]


def _group_by_model(results: CorrelationResults) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each model, with the models in order of appearance."""
    rows_by_model: dict[str, list[dict[str, Any]]] = {}
    for row in results.rows:
        rows_by_model.setdefault(row["model"], []).append(row)
    return rows_by_model


def describe_shown_rows(results: CorrelationResults, selection: Selection) -> list[str]:
    """Return a sentence for each model that says which of its measures the table shows.

    The list is empty if the user has selected measures, layers or sources.
    """
    if selection.has_row_filter:
        return []
    sentences = []
    for model, rows in _group_by_model(results).items():
        measures_by_place: dict[tuple[str, str], list[str]] = {}
        for row in _select_headline_rows(rows):
            measures = measures_by_place.setdefault((row["source"], row["layer"]), [])
            if row["measure"] not in measures:
                measures.append(row["measure"])
        place_texts = [
            f"{', '.join(map(_make_measure_title, measures))} of {_replace_underscores(layer)}"
            f"{f' over {source}' * bool(source)}"
            for (source, layer), measures in measures_by_place.items()
        ]
        shown_measures = (
            "; ".join(place_texts) or "all measures, because it has none of an embedding matrix or a numbered layer"
        )
        sentences.append(f"{model or 'the model'}: {shown_measures}")
    return sentences


def _make_measure_title(measure: str) -> str:
    return _replace_underscores(_MEASURE_TITLES.get(measure, measure))


def _replace_underscores(name: str) -> str:
    return name.replace("_", " ")


def _make_cells(row: Mapping[str, Any], statistics: Sequence[str]) -> list[Entry]:
    """Return the cells of one row of correlations; undefined statistics are dashes."""
    names = (row["task"], _make_measure_title(row["measure"]), row["layer"])
    numbers = (str(row["n"]), *(_format_with_interval(row, name) for name in statistics))
    return [*(Entry(_replace_underscores(name)) for name in names), *(Entry(text, number=True) for text in numbers)]


def _compare_with_paper(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the paper's correlations (`paper_<statistic>`), and how much larger those of a row of I(W) are.

    The differences are `minus_paper_<statistic>`. The result is empty if the paper has no such correlations.
    """
    if row["layer"] != "output_embeddings" or row["measure"] not in _PUBLISHED_MEASURES:
        return {}
    published = look_up_correlations(row["model"], row["task"])
    differences = {f"minus_paper_{name}": row[name] - value for name, value in published.items()}
    return {f"paper_{name}": value for name, value in published.items()} | differences


def _make_paper_cells(row: Mapping[str, Any]) -> list[Entry]:
    """Return the cells of a row with the paper's statistics, and with the differences from them; dashes without any."""
    cells = []
    for prefix, format_spec in (("paper", ".2f"), ("minus_paper", "+.2f")):
        values = [row.get(f"{prefix}_{name}", math.nan) for name in STATISTICS]
        is_defined = not any(map(math.isnan, values))
        cells.append(Entry(", ".join(f"{value:{format_spec}}" for value in values) if is_defined else "-", number=True))
    return cells


def _format_with_interval(row: Mapping[str, Any], statistic: str) -> str:
    """Return a statistic of a row as text, with its interval if it has one; a dash if it is undefined."""
    value, low, high = (row[f"{statistic}{suffix}"] for suffix in ("", "_low", "_high"))
    if math.isnan(value):
        return "-"
    return f"{value:.2f}" if math.isnan(low) else f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _join_notes(row: Mapping[Any, Any]) -> str:
    """Return why statistics of a row are undefined, including the partial correlations; empty if all are defined."""
    note, partial_note = row["note"], row.get("partial_note", "")
    return note if partial_note in ("", note) else "; ".join(filter(None, (note, f"partial: {partial_note}")))


def _make_statistic_title(name: str) -> str:
    """Return the title of a statistic, such as `partial Pearson`."""
    method = name.removeprefix("partial_")
    return method.capitalize() if method == name else f"partial {method.capitalize()}"


def _make_caption(selection: Selection, has_published: bool) -> str:
    """Return the caption of the table, which says what the intervals are, what is held constant, and what is published.

    Args:
        selection: rows of the table, and settings of the bootstrap.
        has_published: whether the table has the paper's correlations.
    """
    blocks = "" if selection.block_length is None else " of blocks of neighbouring checkpoints"
    caption = (
        f"Correlation of measures with scores over n points of the training, with {CONFIDENCE_LEVEL:.0%} intervals "
        f"from {selection.resamples} bootstrap resamples{blocks}."
    )
    if selection.covariates:
        caption += (
            f" Partial: with {', '.join(map(_replace_underscores, selection.covariates))} held constant, and Fisher's "
            "intervals, which assume independent points."
        )
    if has_published:
        caption += (
            " Paper: Pearson, Spearman and Kendall of Table 1 of Machina and Mercer (2024), of I(W) with the signs as "
            "computed, without step 0."
        )
    return caption


def make_terminal_tables(sheet: Sheet) -> list[Table]:
    """Return the tables of correlations for the terminal, without the notes.

    Partial correlations, and those of the paper, have tables of their own for each model, because all columns together
    would be wider than a terminal.
    """
    # The first four columns are the task, the measure, the layer and n.
    statistics = {index: header for index, header in enumerate(sheet.header) if index >= 4 and header != "note"}
    partial_indices = [index for index, header in statistics.items() if header.startswith("partial")]
    paper_indices = [index for index, header in statistics.items() if "paper" in header]
    main_indices = [index for index in statistics if index not in (*partial_indices, *paper_indices)]
    tables = []
    for model, rows in sheet.rows_by_group.items():
        name = model or sheet.title
        tables.append(_make_terminal_table(f"{name}: {sheet.caption}", sheet, rows, main_indices))
        if partial_indices:
            tables.append(_make_terminal_table(f"{name}, partial correlations", sheet, rows, partial_indices))
        published_rows = [row for row in rows if any(row[index].text != "-" for index in paper_indices)]
        if published_rows:
            tables.append(_make_terminal_table(f"{name}, Table 1 of the paper", sheet, published_rows, paper_indices))
    return tables


def _make_terminal_table(title: str, sheet: Sheet, rows: Sequence[Sequence[Entry]], indices: Sequence[int]) -> Table:
    """Return a table of some rows of a sheet for the terminal, with the columns of statistics that have these indices.

    The layer stands below the measure, and an interval below its statistic.
    """
    table = Table(title=title, title_justify="left", padding=(0, 0, 0, 1))
    for header in ("task", "measure"):
        table.add_column(header, overflow="fold")
    table.add_column("n", justify="right", overflow="fold")
    for index in indices:
        table.add_column(sheet.header[index], justify="right", overflow="fold", min_width=14)
    for row in rows:
        task, measure, layer, n = [entry.text for entry in row[:4]]
        statistics = [row[index].text.replace(" [", "\n[") for index in indices]
        table.add_row(task, f"{measure}\n{layer}".strip(), n, *statistics)
    return table


def describe_undefined(sheet: Sheet) -> list[str]:
    """Return why statistics of the table are undefined: at most five reasons, and how many more there are."""
    noted_rows = [row for row in sheet.frame.to_dict("records") if _join_notes(row)]
    reasons = list(
        dict.fromkeys(
            f"{row['task']} with {_make_measure_title(row['measure'])}: {_join_notes(row)}" for row in noted_rows
        )
    )
    return reasons[:5] + ([f"... and {len(reasons) - 5} more; see table.md"] if len(reasons) > 5 else [])
