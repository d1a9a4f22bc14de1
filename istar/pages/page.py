"""Rendering a report as a single HTML page."""

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from istar.figures.plot import Panel
from istar.pages.sheets import Sheet


@dataclass(frozen=True)
class Picture:
    """A figure of the page.

    Attributes:
        name: name of its files.
        model: model whose runs the figure shows; empty for none.
        svg: SVG from `drawing.inline`. The page includes it without escaping.
        panels: panels of the figure, whose fixed settings the page lists.
    """

    name: str
    model: str
    svg: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Section:
    """A section of the page.

    Attributes:
        anchor: id of the heading.
        title: heading.
        text: paragraphs.
        sheet: table; a table without rows is left out.
        pictures: figures.
        empty: sentence that explains why there is no table or figure.
        commands: commands that make the content.
        wide: whether the section is printed in landscape format.
    """

    anchor: str
    title: str
    text: Sequence[str] = ()
    sheet: Sheet | None = None
    pictures: Sequence[Picture] = ()
    empty: str = ""
    commands: Sequence[str] = ()
    wide: bool = False


@dataclass(frozen=True)
class Page:
    """The content of a page.

    Attributes:
        title: title of the page.
        head: the three parts of the line below the title: a noun, the name of the page's subject, and details.
        generator: content of the `generator` meta tag, which identifies the page.
        summary: key figures as (number, label).
        sections: sections in their order.
    """

    title: str
    head: tuple[str, str, str]
    generator: str
    summary: Sequence[tuple[str, str]]
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
