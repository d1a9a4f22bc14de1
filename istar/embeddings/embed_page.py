"""HTML page of `istar embed`: the tables and figures of *Too Much in Common* for several embedding matrices."""

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import pandas as pd

from istar.drawing import page_folder
from istar.drawing.page import Page, Section
from istar.drawing.page_folder import PageKind
from istar.drawing.page_tables import Sheet
from istar.embeddings import embed_figures, embed_tables
from istar.embeddings.embed_findings import describe_embeddings
from istar.embeddings.embed_models import ModelEmbeddings
from istar.files.writing import to_csv
from istar.geometry.show.compare_page import join_names
from istar.geometry.show.spheres import make_spectra

JSON = "embeddings.json"
KIND = PageKind(
    "page of embedding matrices",
    "istar embed",
    (JSON, "embeddings.csv", "wordsim.csv", "unused.csv", "frequency.csv", "words.csv"),
)
_NO_TEXTS = "Not computed, because no texts were given (--text)."
_MISSING_REASONS = {
    "table2": "Not computed, because no benchmarks were given (--wordsim), or no model has enough of their words.",
    "figure1_projection": "Matrices of one dimension have no projection.",
    "figure3_unused": "No model has unused tokens, or 2,000 tokens, of which the last 1,000 would stand for them.",
    "figure4_frequencies": _NO_TEXTS,
    "figure5_norms": "The rows of each matrix have equal norms.",
    "figure6_centering": "The rows of each matrix have equal norms.",
    "frequency_norms": _NO_TEXTS,
}
"""Reasons why tables and figures are missing, by their names."""
_READING_NOTES = (
    "The tables and figures are those of Too Much in Common (Biś et al., NAACL 2021), computed from these models. The "
    "paper's numbers stand beside a model whose label, or the last part of whose name, is that of one of the paper's "
    "models.",
)


def write_page(
    models: Sequence[ModelEmbeddings], sheets: Mapping[str, Sheet], words: pd.DataFrame, out: Path, command: str = ""
) -> Path:
    """Write the page of embedding matrices with its figures, tables and data files, and return the page's path.

    Args:
        models: the measured matrices.
        sheets: tables by name; see `make_tables`.
        words: frequencies of the texts' words; empty without texts.
        out: output folder.
        command: command line, to show on the page.

    Raises:
        UserError: see `istar.drawing.page_folder.write`.
    """
    contents = page_folder.page_files(_make_page(models, sheets, words, command), sheets)
    model_records = [{"label": model.label, **model.metadata, "figures": model.measures_by_form} for model in models]
    contents[JSON] = (json.dumps({"models": model_records}, indent=1) + "\n").encode()
    for name, table in _make_csv_tables(models, words).items():
        if not table.empty:
            contents[f"{name}.csv"] = to_csv(table.convert_dtypes()).encode()
    return page_folder.write(out, contents, KIND)


def make_tables(models: Sequence[ModelEmbeddings], words: pd.DataFrame) -> dict[str, Sheet]:
    """Return the page's tables that have rows, by name.

    Args:
        models: the measured matrices.
        words: frequencies of the texts' words; empty without texts.
    """
    sheets = [embed_tables.make_table1(models)]
    if any(not model.word_similarity.empty for model in models):
        sheets += [embed_tables.make_table2(models), embed_tables.make_table3(models)]
    if not words.empty:
        sheets.append(embed_tables.make_coverage_table(models, words))
    return {sheet.name: sheet for sheet in sheets}


def _make_csv_tables(models: Sequence[ModelEmbeddings], words: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the content of the CSV files by their names, without suffix.

    Apart from the words, they are the files of a single matrix for all models, with a column for the model's label.
    """
    rows = [
        {"label": model.label, **model.metadata, "form": form, **measures}
        for model in models
        for form, measures in model.measures_by_form.items()
    ]
    tables_by_name: dict[str, list[pd.DataFrame]] = {"wordsim": [], "unused": [], "frequency": []}
    for model in models:
        tables = (model.word_similarity, model.unused_similarity, model.token_frequencies)
        for name, table in zip(tables_by_name, tables, strict=True):
            if not table.empty:
                labelled_table = table.copy()
                labelled_table.insert(0, "label", model.label)
                tables_by_name[name].append(labelled_table)
    joined_tables = {
        name: pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
        for name, tables in tables_by_name.items()
    }
    return {"embeddings": pd.DataFrame(rows).drop(columns="singular_values"), **joined_tables, "words": words}


def _make_page(
    models: Sequence[ModelEmbeddings], sheets: Mapping[str, Sheet], words: pd.DataFrame, command: str
) -> Page:
    """Assemble the page of embedding matrices from its tables and plots."""
    sections = [
        Section("findings", "What stands out", describe_embeddings(models)),
        Section("reading", "How to read this", _READING_NOTES),
    ]
    sections += [_make_table_section(sheets, name, title) for name, title in _TABLE_TITLES.items()]
    for plot in embed_figures.make_plots(models, words, make_spectra()):
        empty_note = "" if plot.panels else _MISSING_REASONS[plot.name]
        coverage_sheet = sheets.get("figure4_coverage") if plot.name == "figure4_frequencies" else None
        sections.append(
            Section(
                plot.name, plot.title, [plot.caption], coverage_sheet, page_folder.render_pictures(plot), empty_note
            )
        )
    if command:
        sections.append(Section("reproduce", "This page", ("This page and its files:",), commands=[command]))
    labels = [model.label for model in models]
    subject_line = (
        "Model" if len(labels) == 1 else "Models",
        ", ".join(labels),
        f"measured by istar {version('istar')}",
    )
    num_rows = sum(model.measures_by_form["raw"]["rows"] for model in models)
    title = f"Embedding matrices of {join_names(labels) if len(labels) > 1 else labels[0]}"
    summary = [(str(len(labels)), "model" if len(labels) == 1 else "models"), (f"{num_rows:,}", "embeddings")]
    return Page(title, subject_line, KIND.generator, summary, sections)


_TABLE_TITLES = {
    "table1": "Table 1: isotropy and norms",
    "table2": "Table 2: average word similarity",
    "table3": "Table 3: word similarity by benchmark",
}


def _make_table_section(sheets: Mapping[str, Sheet], name: str, title: str) -> Section:
    """Return the section with the table of this name, or with the reason why the table is missing."""
    sheet = sheets.get(name)
    return Section(name, title, (), sheet, empty_note="" if sheet else _MISSING_REASONS["table2"], is_wide=True)
