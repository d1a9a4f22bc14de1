"""Rendering a report as a single HTML page."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from istar.figures.plot import Panel
from istar.pages.sheets import Sheet


@dataclass(frozen=True)
class Picture:
    """A figure of the page."""

    name: str  # name of its files, without suffix
    model: str  # model whose runs the figure shows; empty for none
    description: str  # what the figure shows, in words
    panels: Sequence[Panel]  # panels of the figure, whose fixed settings the page lists
    files: Mapping[str, bytes]  # rendered files by suffix

    @property
    def data_uri(self) -> str:
        """The SVG as a URI, which makes the page independent of other files."""
        return "data:image/svg+xml;base64," + b64encode(self.files["svg"]).decode()


@dataclass(frozen=True)
class Section:
    """A section of the page."""

    anchor: str  # id of the heading
    title: str
    text: Sequence[str] = ()  # paragraphs
    sheet: Sheet | None = None  # table; a table without rows is left out
    pictures: Sequence[Picture] = ()
    empty: str = ""  # sentence that explains why there is no table or figure
    commands: Sequence[str] = ()  # commands that make the content
    wide: bool = False  # whether the section is printed in landscape format


@dataclass(frozen=True)
class Page:
    """The content of a page."""

    title: str
    head: tuple[str, str, str]  # the line below the title: a noun, the name of the page's subject, and details
    generator: str  # content of the `generator` meta tag, which identifies the page
    summary: Sequence[tuple[str, str]]  # key figures as (number, label)
    sections: Sequence[Section]


def html(page: Page) -> str:
    """Render the page as HTML, which needs no other files."""
    environment = Environment(
        loader=PackageLoader("istar.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("report.html").render(page=page)
