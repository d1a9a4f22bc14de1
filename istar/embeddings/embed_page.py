"""HTML page of `istar embed`: the tables and figures of *Too Much in Common* for one or more embedding matrices."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pandas as pd

from istar.drawing import page_folder
from istar.drawing.page_folder import Page, PageKind, Section, read_page_texts
from istar.drawing.page_tables import Sheet
from istar.drawing.pictures import render_pictures
from istar.embeddings import embed_figures, embed_tables
from istar.embeddings.embed_models import ModelEmbeddings
from istar.files.writing import to_csv, to_json

JSON = "embeddings.json"
EMBEDDINGS_KIND = PageKind(
    "page of embedding matrices",
    "istar embed",
    (JSON, "embeddings.csv", "wordsim.csv", "unused.csv", "frequency.csv", "words.csv"),
)
_ANISOTROPIC, _ISOTROPIC = 0.5, 0.9
"""A raw matrix is flagged if I(W) is at most the first value. If it is at least the second after centering, only the
mean makes the matrix anisotropic."""
_MAX_FLAGS = 4


_TEXTS = read_page_texts("istar.embeddings")


def make_contents(
    models: Sequence[ModelEmbeddings], sheets: Mapping[str, Sheet], words: pd.DataFrame, out: Path, command: str = ""
) -> dict[str, bytes]:
    """Return the files of the page in `out`, with its figures, tables and data, by path.

    `sheets` is the result of `make_tables`; `words` has the frequencies of the texts' words, if there are texts.
    `command` is the command line to show.
    """
    contents = page_folder.page_files(_make_page(models, sheets, words, out, command), sheets)
    model_records = [{"label": model.label, **model.metadata, "figures": model.measures_by_form} for model in models]
    contents[JSON] = (to_json({"models": model_records}) + "\n").encode()
    rows = [
        {"label": model.label, **model.metadata, "form": form, **measures}
        for model in models
        for form, measures in model.measures_by_form.items()
    ]
    tables = {
        "embeddings": pd.DataFrame(rows).drop(columns="singular_values"),
        "wordsim": _join_tables({model.label: model.word_similarity for model in models}),
        "unused": _join_tables({model.label: model.unused_similarity for model in models}),
        "frequency": _join_tables({model.label: model.token_frequencies for model in models}),
        "words": words,
    }
    for name, table in tables.items():
        if not table.empty:
            contents[f"{name}.csv"] = to_csv(table.convert_dtypes()).encode()
    return contents


def _join_tables(table_by_label: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    tables = [pd.DataFrame({"label": label}, table.index).join(table) for label, table in table_by_label.items()]
    tables = [table for table in tables if not table.empty]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def make_tables(models: Sequence[ModelEmbeddings], words: pd.DataFrame) -> dict[str, Sheet]:
    """Return the page's tables that have rows, by name; `words` is as in `make_contents`."""
    sheets = [embed_tables.make_table1(models)]
    if any(not model.word_similarity.empty for model in models):
        sheets += [embed_tables.make_table2(models), embed_tables.make_table3(models)]
    if not words.empty:
        sheets.append(embed_tables.make_coverage_table(models, words))
    return {sheet.name: replace(sheet, title=_make_title("tables", sheet.name, models)) for sheet in sheets}


def _make_title(kind: str, name: str, models: Sequence[ModelEmbeddings]) -> str:
    texts = _TEXTS[kind][name]
    has_number = "number" in texts and any(map(embed_tables.find_paper_model, models))
    return f"{texts['number']}: {texts['title']}" if has_number else texts["title"]


def describe_anisotropy(models: Sequence[ModelEmbeddings]) -> list[str]:
    """Return at most five lines on unusually anisotropic matrices, the most anisotropic first.

    I(W) is over both signs of the eigenvectors, so that matrices can be compared.
    """

    def get_isotropy(model: ModelEmbeddings, form: str) -> float:
        return float(model.measures_by_form[form]["partition_isotropy_both"])

    flagged = [model for model in models if get_isotropy(model, "raw") <= _ANISOTROPIC]
    flagged.sort(key=lambda model: get_isotropy(model, "raw"))
    if not flagged:
        return [f"No matrix is unusually anisotropic: I(W) over both signs is above {_ANISOTROPIC}; 1 is isotropic."]
    flags = []
    for model in flagged[:_MAX_FLAGS]:
        raw, centered = (get_isotropy(model, form) for form in ("raw", "centered"))
        cause = "a common shift" if centered >= _ISOTROPIC else "more than a common shift"
        flags.append(
            f"{model.label} is anisotropic because of {cause}: I(W) over both signs is {raw:.3f}, and {centered:.3f} "
            "after centering; 1 is isotropic."
        )
    num_others = len(flagged) - len(flags)
    return flags + ([f"{num_others} more in the first table."] if num_others else [])


def _make_page(
    models: Sequence[ModelEmbeddings], sheets: Mapping[str, Sheet], words: pd.DataFrame, out: Path, command: str
) -> Page:
    sections = [
        Section("findings", "What stands out", describe_anisotropy(models)),
        Section("reading", "How to read this", about=list(_TEXTS["reading"].values())),
    ]
    for name in ("table1", "table2", "table3"):
        empty_note = "" if name in sheets else _TEXTS["tables"][name]["missing"]
        title = _make_title("tables", name, models)
        sections.append(Section(name, title, (), sheets.get(name), (), empty_note, is_wide=True))
    plots = embed_figures.make_plots(models, words)
    pictures = render_pictures(plots, out / page_folder.FIGURES)
    for plot in plots:
        empty_note = "" if plot.panels else _TEXTS["figures"][plot.name]["missing"]
        sheet = sheets.get("figure4_coverage") if plot.name == "figure4_frequencies" else None
        title = _make_title("figures", plot.name, models)
        section = Section(plot.name, title, (), sheet, pictures[plot.name], empty_note, about=[plot.caption])
        sections.append(section)
    if command:
        sections.append(Section("reproduce", "This page", ("This page and its files:",), commands=[command]))
    labels = ", ".join(model.label for model in models)
    noun = "model" if len(models) == 1 else "models"
    sizes = [(model.label, model.measures_by_form["raw"]) for model in models]
    return Page(
        title=f"Embedding matrices of {labels if len(models) <= 3 else f'{len(models)} models'}",
        subject_line=(noun.capitalize(), labels, f"measured by istar {version('istar')}"),
        generator=EMBEDDINGS_KIND.generator,
        summary=[(f"{size['rows']:,} \u00d7 {size['dimensions']:,}", label) for label, size in sizes],
        sections=sections,
    )
