"""A report as one HTML page."""

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
        name: of its files.
        model: whose runs it shows; empty for none.
        svg: as `drawing.inline` gives it, safe to stand in the page.
        panels: what is held fixed in each.
    """

    name: str
    model: str
    svg: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Section:
    """A heading with what stands below it.

    Attributes:
        anchor: the heading's id.
        text: paragraphs.
        empty: said in place of sheets and pictures where there are none.
        commands: that make what is shown.
        wide: printed on paper turned sideways.
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
    """All of a page.

    Attributes:
        head: the line below the title: words, the name of what the page is about, words.
        generator: in the page's `meta`, by which a page of ours is known.
        summary: what was found, as (number, what).
    """

    title: str
    head: tuple[str, str, str]
    generator: str
    summary: Sequence[tuple[str, str]]
    sections: Sequence[Section]


def html(page: Page) -> str:
    """The page; all text is escaped, pictures stand as they are."""
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
