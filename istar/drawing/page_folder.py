"""HTML pages: their content, their rendering as one file, and the folder with files of figures and tables."""

import functools
import os
import re
import signal
import sys
import tomllib
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from importlib.resources import files as package_files
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from istar.drawing import page_tables, rendering
from istar.drawing.page_tables import Sheet
from istar.drawing.plot import Panel, Plot
from istar.files.outputs import Output
from istar.files.writing import to_csv

INDEX, TABLES, FIGURES = "index.html", "tables", "figures"
NARROW = "narrow.svg"
"""Suffix of a figure for phones."""
MAX_PROCESSES = 8
"""Most processes that draw figures at the same time."""
_MAX_FILE_NAME = 150
"""Most characters of a model's name in a file name; file systems allow 255 for the whole."""


@dataclass(frozen=True)
class Picture:
    """A rendered figure of a page."""

    name: str  # name of its files, without suffix
    model: str  # model of the runs in the figure; empty for none
    description: str  # what the figure shows, in words
    panels: Sequence[Panel]  # panels of the figure; the page lists their fixed settings
    files: Mapping[str, bytes]  # rendered files by suffix

    @property
    def sources(self) -> tuple[str, str]:
        """The wide and the narrow SVG as sources of an image, so that the page needs no other files."""
        wide, narrow = (b64encode(self.files[suffix]).decode() for suffix in ("svg", NARROW))
        return f"data:image/svg+xml;base64,{wide}", f"data:image/svg+xml;base64,{narrow}"


@dataclass(frozen=True)
class Section:
    """A section of a page: a heading with paragraphs, a table and figures."""

    anchor: str  # id of the heading
    title: str
    paragraphs: Sequence[str] = ()
    sheet: Sheet | None = None  # table; a table without rows is left out
    pictures: Sequence[Picture] = ()
    empty_note: str = ""  # explains why the table or figure is missing
    commands: Sequence[str] = ()  # commands that make the content
    is_wide: bool = False  # whether the section is printed on landscape pages
    about: Sequence[str] = ()  # explanations, which are folded
    link: tuple[str, str] | None = None  # text and target of a link

    @property
    def is_empty(self) -> bool:
        """Whether the page only names the section, in its last line."""
        return bool(self.empty_note) and not self.pictures and not (self.sheet and self.sheet.rows)


@dataclass(frozen=True)
class Page:
    """The content of an HTML page."""

    title: str
    subject_line: tuple[str, str, str]  # line below the title: a noun, the name of the page's subject, and details
    generator: str  # content of the `generator` meta tag, which identifies the page
    summary: Sequence[tuple[str, str]]  # key figures as (number, label)
    sections: Sequence[Section]


def render_html(page: Page) -> str:
    """Render a page as HTML that needs no other files."""
    environment = _make_environment()
    style, script = (environment.get_template(name).render() for name in ("report.css", "report.js"))
    return environment.get_template("report.html").render(
        page=page,
        style=Markup(style),
        script=Markup(script),
        policy=Markup(_build_security_policy(style, script)),
    )


@functools.cache
def _make_environment() -> Environment:
    """Return the environment of the templates, which are compiled once."""
    environment = Environment(
        loader=PackageLoader("istar.drawing"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["break_header"] = page_tables.break_header
    return environment


def _build_security_policy(style: str, script: str) -> str:
    """Return a Content-Security-Policy that allows only this style, this script and embedded images."""
    sources = {
        "default-src": "'none'",
        "style-src": _compute_policy_hash(style),
        "script-src": _compute_policy_hash(script),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {source}" for name, source in sources.items())


def _compute_policy_hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def read_page_texts(package: str) -> dict[str, Any]:
    """Return the texts of a package's page: titles and captions by the names of its figures and tables."""
    return tomllib.loads(package_files(package).joinpath("texts.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class PageKind:
    """A kind of page folder, for example for `istar report`."""

    noun: str  # name of the folder in error messages
    generator: str  # content of the `generator` meta tag that identifies the page
    extra_files: tuple[str, ...] = ()  # names of further files that belong to the page


def render_pictures(
    plots: Iterable[Plot], out: Path, on_drawn: Callable[[str], object] = lambda name: None
) -> dict[str, list[Picture]]:
    """Render plots as pictures, one for each model in a plot, and return them by the names of the plots.

    A picture that an earlier page in the folder `out` has, with the same content and formats, is not drawn again. The
    others are drawn by several processes at once. `on_drawn` is called with the name of each picture once it is there.
    """
    parts = {plot.name: _split_by_model(plot) for plot in plots}
    plot_by_name = {name: plot for plots_by_name in parts.values() for name, plot in plots_by_name.items()}
    images_by_name = {
        name: _read_drawn(out / FIGURES / name, rendering.compute_identifier(plot))
        for name, plot in plot_by_name.items()
    }
    missing = [name for name, images in images_by_name.items() if not images]
    for name in images_by_name.keys() - missing:
        on_drawn(name)
    with _open_pool(len(missing)) as map_to_pool:
        for name, images in zip(missing, map_to_pool(_draw, [plot_by_name[name] for name in missing]), strict=True):
            images_by_name[name] = images
            on_drawn(name)

    def make_picture(name: str, plot: Plot) -> Picture:
        files = {**images_by_name[name], "csv": to_csv(rendering.tabulate_points(plot)).encode()}
        return Picture(name, plot.panels[0].model, rendering.describe(plot), plot.panels, files)

    return {
        plot_name: [make_picture(*part) for part in plots_by_name.items()] for plot_name, plots_by_name in parts.items()
    }


def _split_by_model(plot: Plot) -> dict[str, Plot]:
    """Return a plot for each model in a plot, by the name of its picture."""
    models = list(dict.fromkeys(panel.model for panel in plot.panels))
    names = {model: f"{plot.name}-{_make_unique_file_name(model, models)}" if model else plot.name for model in models}
    return {
        name: replace(plot, panels=tuple(panel for panel in plot.panels if panel.model == model))
        for model, name in names.items()
    }


def _draw(plot: Plot) -> dict[str, bytes]:
    return {**rendering.render(plot), NARROW: rendering.render_narrow(plot)}


@contextmanager
def _open_pool(num_tasks: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """Provide a `map` that calls a function in up to `MAX_PROCESSES` forks of this process.

    It is the ordinary `map` for a single task or core, and on other systems than Linux, where forks of a process with
    threads are not safe.
    """
    num_processes = min(num_tasks, MAX_PROCESSES, len(os.sched_getaffinity(0))) if sys.platform == "linux" else 1
    if num_processes <= 1:
        yield map
        return
    # Ctrl-C ends this process, which ends the others.
    ignore_interrupts = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(num_processes, get_context("fork"), ignore_interrupts) as pool:
        yield pool.map


def _read_drawn(path: Path, identifier: str) -> dict[str, bytes]:
    """Return the drawn files of a figure by suffix, if all exist and contain the identifier; otherwise nothing."""
    images = {}
    for suffix in (*rendering.FIGURE_FORMATS.get(), NARROW):
        try:
            images[suffix] = path.with_name(f"{path.name}.{suffix}").read_bytes()
        except OSError:
            return {}
    return images if all(identifier.encode() in image for image in images.values()) else {}


def page_files(content: Page, tables: Mapping[str, Sheet]) -> dict[str, bytes]:
    """Return all files of a page, its tables and its figures, by their paths in the page's folder."""
    contents = {INDEX: render_html(content).encode()}
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
    """Refuse a folder into which a page of this kind cannot be written; call this before any work.

    Raises:
        UserError: if the folder has foreign or edited files in the page's places, or is one of the `inputs`.
    """
    page_output(out, kind).check((INDEX, *kind.extra_files, TABLES, FIGURES), inputs)


def write(out: Path, contents: Mapping[str, bytes], kind: PageKind, drafts: Mapping[str, Path] | None = None) -> Path:
    """Write the files of a page in place of an earlier page of this kind, and return the path of `index.html`.

    `contents` is by path in `out`; `drafts` are folders by name, see `istar.files.outputs.Output.make_draft`.

    Raises:
        UserError: if a foreign or edited file would be replaced, or the folder cannot be written.
    """
    # The page itself is last, so that it never shows more than its files contain.
    files = dict(sorted(contents.items(), key=lambda item: item[0] == INDEX))
    page_output(out, kind).write(files, drafts or {}, is_complete=True)
    return out / INDEX


def _make_unique_file_name(model: str, models: list[str]) -> str:
    """Return a model's name as a safe file name, numbered if another model would get the same name."""
    safe_names = {name: re.sub(r"[^A-Za-z0-9.-]", "-", name)[:_MAX_FILE_NAME] for name in models}
    namesakes = [name for name in models if safe_names[name].lower() == safe_names[model].lower()]
    return safe_names[model] if len(namesakes) == 1 else f"{safe_names[model]}-{namesakes.index(model) + 1}"
