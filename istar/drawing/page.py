"""The content of an HTML page, and its rendering as a single file."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from istar.drawing.page_tables import Sheet
from istar.drawing.plot import Panel


@dataclass(frozen=True)
class Picture:
    """A rendered figure of a page."""

    name: str  # name of its files, without suffix
    model: str  # model whose runs the figure shows; empty for none
    description: str  # what the figure shows, in words
    panels: Sequence[Panel]  # panels of the figure, whose fixed settings the page lists
    files: Mapping[str, bytes]  # rendered files by suffix

    @property
    def source(self) -> str:
        """The SVG as the source of an image, so that the page needs no other files."""
        return f"data:image/svg+xml;base64,{b64encode(self.files['svg']).decode()}"


@dataclass(frozen=True)
class Section:
    """A section of a page: a heading with paragraphs, a table and figures."""

    anchor: str  # id of the heading
    title: str
    paragraphs: Sequence[str] = ()
    sheet: Sheet | None = None  # table; a table without rows is left out
    pictures: Sequence[Picture] = ()
    empty_note: str = ""  # sentence that explains why there is no table or figure
    commands: Sequence[str] = ()  # commands that make the content
    is_wide: bool = False  # whether the section is printed on landscape pages


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
    environment = Environment(
        loader=PackageLoader("istar.drawing"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    style, script = (environment.get_template(name).render() for name in ("report.css", "report.js"))
    return environment.get_template("report.html").render(
        page=page,
        style=Markup(style),
        script=Markup(script),
        policy=Markup(_build_security_policy(style, script)),
    )


def _build_security_policy(style: str, script: str) -> str:
    """Return a Content-Security-Policy that allows this style element, this script element and embedded images only."""
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
    """Return the SHA-256 hash of a style or script as a source of a Content-Security-Policy."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
