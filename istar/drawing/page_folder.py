"""The folder of an HTML page, with the files of its figures and tables."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from istar.drawing import page, page_tables, rendering
from istar.drawing.page import Page, Picture
from istar.drawing.page_tables import Sheet
from istar.drawing.plot import Plot
from istar.files.outputs import Output
from istar.files.writing import to_csv

INDEX, TABLES, FIGURES = "index.html", "tables", "figures"
_MAX_FILE_NAME = 150
"""Most characters of a model's name in the name of a file, of the 255 that file systems allow."""


@dataclass(frozen=True)
class PageKind:
    """A kind of page folder, such as that of `istar report`."""

    noun: str  # name of the folder in error messages
    generator: str  # content of the `generator` meta tag that identifies the page
    extra_files: tuple[str, ...] = ()  # names of further files that belong to the page


def render_pictures(plot: Plot) -> list[Picture]:
    """Render a plot as pictures, one for each model whose runs it shows."""
    models = list(dict.fromkeys(panel.model for panel in plot.panels))
    pictures = []
    for model in models:
        model_plot = replace(plot, panels=tuple(panel for panel in plot.panels if panel.model == model))
        name = f"{plot.name}-{_make_unique_file_name(model, models)}" if model else plot.name
        files = {**rendering.render(model_plot), "csv": to_csv(rendering.tabulate_points(model_plot)).encode()}
        pictures.append(Picture(name, model, rendering.describe(model_plot), model_plot.panels, files))
    return pictures


def page_files(content: Page, tables: Mapping[str, Sheet]) -> dict[str, bytes]:
    """Return the contents of all files of a page, its tables and its figures, by their paths in the page's folder."""
    contents = {INDEX: page.render_html(content).encode()}
    for name, sheet in tables.items():
        texts = {
            "csv": to_csv(sheet.frame),
            "md": page_tables.to_markdown(sheet),
            "tex": page_tables.to_latex(sheet),
        }
        contents |= {f"{TABLES}/{name}.{suffix}": text.encode() for suffix, text in texts.items()}
    for section in content.sections:
        for picture in section.pictures:
            contents |= {f"{FIGURES}/{picture.name}.{suffix}": image for suffix, image in picture.files.items()}
    return contents


def page_output(out: Path, kind: PageKind) -> Output:
    """Return the folder of a page of this kind."""
    return Output(out, kind.noun)


def check(out: Path, kind: PageKind, inputs: Iterable[str | Path] = ()) -> None:
    """Refuse, before any work is done, a folder into which a page of this kind cannot be written.

    Raises:
        UserError: if the folder holds foreign or edited files where the page has its own, or is one of the `inputs`.
    """
    page_output(out, kind).check((INDEX, *kind.extra_files, TABLES, FIGURES), inputs)


def write(out: Path, contents: Mapping[str, bytes], kind: PageKind, drafts: Mapping[str, Path] | None = None) -> Path:
    """Write the files of a page in place of an earlier page of this kind, and return the path of `index.html`.

    Args:
        out: the folder.
        contents: content of each file by its path in the folder.
        kind: kind of the page.
        drafts: drafts of folders that belong to the page, by name; see `istar.files.outputs.Output.make_draft`.

    Raises:
        UserError: if a foreign or edited file would be replaced, or the folder cannot be written.
    """
    # The page itself is last, so that it never shows more than its files have.
    files = dict(sorted(contents.items(), key=lambda item: item[0] == INDEX))
    page_output(out, kind).write(files, drafts or {}, is_complete=True)
    return out / INDEX


def _make_unique_file_name(model: str, models: list[str]) -> str:
    """Return a model's name as a safe file name, with a number if another of the models would get the same name."""
    safe_names = {name: re.sub(r"[^A-Za-z0-9.-]", "-", name)[:_MAX_FILE_NAME] for name in models}
    namesakes = [name for name in models if safe_names[name].lower() == safe_names[model].lower()]
    return safe_names[model] if len(namesakes) == 1 else f"{safe_names[model]}-{namesakes.index(model) + 1}"
