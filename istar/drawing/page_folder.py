"""HTML pages: their content, their rendering as one file, and the folder with files of figures and tables."""

import functools
import tomllib
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from istar.drawing import page_tables
from istar.drawing.page_tables import Sheet
from istar.drawing.pictures import Picture
from istar.files.outputs import Output
from istar.files.writing import to_csv

INDEX, TABLES, FIGURES = "index.html", "tables", "figures"


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


def check(out: Path, kind: PageKind, inputs: Iterable[str | Path] = ()) -> None:
    """Refuse a folder into which a page of this kind cannot be written; call this before any work.

    Raises:
        UserError: if the folder has foreign or edited files in the page's places, or is one of the `inputs`.
    """
    Output(out, kind.noun).check((INDEX, *kind.extra_files, TABLES, FIGURES), inputs)


def write(out: Path, contents: Mapping[str, bytes], kind: PageKind) -> Path:
    """Write the files of a page in place of an earlier page of this kind, and return the path of `index.html`.

    `contents` is by path in `out`.

    Raises:
        UserError: if a foreign or edited file would be replaced, or the folder cannot be written.
    """
    # The page itself is last, so that it never shows more than its files contain.
    files = dict(sorted(contents.items(), key=lambda item: item[0] == INDEX))
    Output(out, kind.noun).write(files, is_complete=True)
    return out / INDEX
