"""HTML page of `istar embed`: the tables and figures of *Too Much in Common* for several embedding matrices."""

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import pandas as pd

from istar.errors import UserError
from istar.geometry import embed_figures, embed_tables
from istar.geometry.compare_page import enumerate_names
from istar.geometry.embed_models import ModelEmbeddings
from istar.geometry.spheres import make_spectra
from istar.pages import folder
from istar.pages.folder import PageKind
from istar.pages.page import Page, Section
from istar.pages.sheets import Sheet

JSON = "embeddings.json"
KIND = PageKind(
    "page of embedding matrices",
    "istar embed",
    (JSON, "embeddings.csv", "wordsim.csv", "unused.csv", "frequency.csv", "words.csv"),
)
_NO_TEXTS = "Not computed, because no texts were given (--text)."
_EMPTY = {
    "table2": "Not computed, because no benchmarks were given (--wordsim), or no model has enough of their words.",
    "figure1_projection": "Matrices of one dimension have no projection.",
    "figure3_unused": "No model has unused tokens, or 2,000 tokens, of which the last 1,000 would stand for them.",
    "figure4_frequencies": _NO_TEXTS,
    "figure5_norms": "The rows of each matrix have equal norms.",
    "figure6_centering": "The rows of each matrix have equal norms.",
    "frequency_norms": _NO_TEXTS,
}
"""Why a table or figure may be missing, by its name."""
_READING = (
    "The tables and figures are those of Too Much in Common (Bis et al., NAACL 2021), computed from these models. The "
    "paper's numbers stand beside a model whose label, or the last part of whose name, is that of one of the paper's "
    "models.",
)


def check(out: Path) -> None:
    """Refuse a folder that `write` would refuse, so that the error comes before the models are measured.

    Raises:
        UserError: if the folder holds anything but an earlier page.
    """
    folder.check_replaceable(out, KIND)
    if (out / JSON).exists() and not folder.has_generator(out / folder.INDEX, KIND):
        raise UserError(f"--out {out} holds the measures of a single matrix; expected another folder: --out <folder>")


def refuse_page(out: Path) -> None:
    """Refuse to write the measures of a single matrix into the folder of a page.

    Raises:
        UserError: if the folder holds a page of `istar embed`.
    """
    if folder.has_generator(out / folder.INDEX, KIND):
        raise UserError(f"--out {out} holds a page of several matrices; expected another folder: --out <folder>")


def write(
    subjects: Sequence[ModelEmbeddings], sheets: Mapping[str, Sheet], words: pd.DataFrame, out: Path, command: str = ""
) -> Path:
    """Write the page with its figures and tables, `embeddings.json` and the CSV files; returns the page's path.

    Args:
        subjects: the measured matrices.
        sheets: tables by name; see `tables`.
        words: frequencies of the texts' words; empty without texts.
        out: output folder.
        command: command line that made the page, which the page shows.

    Raises:
        UserError: if the folder holds anything but an earlier page, or cannot be written.
    """
    check(out)
    contents = folder.page_files(_page(subjects, sheets, words, command), sheets)
    records = [{"label": subject.label, **subject.about, "figures": subject.figures} for subject in subjects]
    contents[JSON] = (json.dumps({"models": records}, indent=1) + "\n").encode()
    for name, table in _csv_tables(subjects, words).items():
        if not table.empty:
            contents[f"{name}.csv"] = table.convert_dtypes().to_csv(index=False).encode()
    folder.replace_folder(out, contents, KIND)
    return out / folder.INDEX


def tables(subjects: Sequence[ModelEmbeddings], words: pd.DataFrame) -> dict[str, Sheet]:
    """Return the tables that have rows, by name."""
    sheets = [embed_tables.table1(subjects)]
    if any(not subject.similarity.empty for subject in subjects):
        sheets += [embed_tables.table2(subjects), embed_tables.table3(subjects)]
    if not words.empty:
        sheets.append(embed_tables.coverage(subjects, words))
    return {sheet.name: sheet for sheet in sheets}


def _csv_tables(subjects: Sequence[ModelEmbeddings], words: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the files that `istar embed` writes for one matrix, here with the label of each row's model."""
    measures = [
        {"label": subject.label, **subject.about, "form": form, **figures}
        for subject in subjects
        for form, figures in subject.figures.items()
    ]
    frames: dict[str, list[pd.DataFrame]] = {"wordsim": [], "unused": [], "frequency": []}
    for subject in subjects:
        parts = {"wordsim": subject.similarity, "unused": subject.unused, "frequency": subject.frequency}
        for name, part in parts.items():
            if not part.empty:
                labelled = part.copy()
                labelled.insert(0, "label", subject.label)
                frames[name].append(labelled)
    joined = {name: pd.concat(parts, ignore_index=True) if parts else pd.DataFrame() for name, parts in frames.items()}
    return {"embeddings": pd.DataFrame(measures).drop(columns="singular_values"), **joined, "words": words}


def _page(subjects: Sequence[ModelEmbeddings], sheets: Mapping[str, Sheet], words: pd.DataFrame, command: str) -> Page:
    """Put the page together from its tables and plots."""
    sections = [Section("reading", "How to read this", _READING)]
    sections += [_table(sheets, name, title) for name, title in _TABLES.items()]
    for plot in embed_figures.plots(subjects, words, make_spectra()):
        empty = "" if plot.panels else _EMPTY[plot.name]
        coverage = sheets.get("figure4_coverage") if plot.name == "figure4_frequencies" else None
        sections.append(Section(plot.name, plot.title, [plot.caption], coverage, folder.render_pictures(plot), empty))
    if command:
        sections.append(Section("reproduce", "This page", ("This page and its files:",), commands=[command]))
    names = [subject.label for subject in subjects]
    head = ("Models", ", ".join(names), f"measured by istar {version('istar')}")
    rows = sum(subject.figures["raw"]["rows"] for subject in subjects)
    title = f"Embedding matrices of {enumerate_names(names) if len(names) > 1 else names[0]}"
    return Page(title, head, KIND.generator, [(str(len(names)), "models"), (f"{rows:,}", "embeddings")], sections)


_TABLES = {
    "table1": "Table 1: isotropy and norms",
    "table2": "Table 2: average word similarity",
    "table3": "Table 3: word similarity by benchmark",
}


def _table(sheets: Mapping[str, Sheet], name: str, title: str) -> Section:
    """Return the section of a table, or of the reason why it is missing."""
    sheet = sheets.get(name)
    return Section(name, title, (), sheet, empty_note="" if sheet else _EMPTY["table2"], is_wide=True)
