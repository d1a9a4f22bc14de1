"""Rendering a report as a single HTML page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from istar.figures.plot import Panel
from istar.pages.sheets import Sheet


@dataclass(frozen=True)
class Picture:
    """A figure of the page."""

    name: str  # name of its files, without suffix
    model: str  # model whose runs the figure shows; empty for none
    svg: str  # SVG from `drawing.inline`, which the page includes without escaping
    panels: Sequence[Panel]  # panels of the figure, whose fixed settings the page lists
    files: Mapping[str, bytes]  # rendered files by suffix


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
    """Render the page. All text is escaped; pictures are included as they are."""
    environment = Environment(
        loader=PackageLoader("istar.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["picture"] = Markup
    return environment.get_template("report.html").render(page=page)
