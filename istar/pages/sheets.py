"""Tables with captions, and their formats: CSV, Markdown and LaTeX."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from istar.figures.spots import number


@dataclass(frozen=True)
class Entry:
    """A cell of a table."""

    text: str  # formatted content
    bold: bool = False  # whether the value is the best of its column
    code: bool = False  # whether the text is a command
    number: bool = False  # whether the cell is aligned to the right

    @property
    def parts(self) -> tuple[str, str]:
        """The text up to the units of its number, and the rest from the decimal point on; ("71", ".67 ± 0.50")."""
        match = re.match(r"[<>]?[-+\u2212]?\d[\d,]*", self.text)
        whole = match[0] if match else self.text
        return whole, self.text[len(whole) :]


def number_entry(value: float, half_width: float = math.nan) -> Entry:
    """Return a cell with a number as `istar.figures.spots.number` formats it, and an en dash for NaN.

    A finite half-width of the number's interval follows with two significant digits, and the number has as many
    decimals: "0.160 \u00b1 0.017".
    """
    if math.isnan(value):
        return Entry("\u2013", number=True)
    if not math.isfinite(half_width):
        return Entry(number(value), number=True)
    if not 1e-9 <= half_width < 1e12:
        return Entry(f"{number(value)} \u00b1 {half_width:.2g}", number=True)
    decimals = max(0, 1 - math.floor(math.log10(half_width)))
    return Entry(f"{value:,.{decimals}f} \u00b1 {half_width:,.{decimals}f}", number=True)


@dataclass(frozen=True)
class Sheet:
    """A table."""

    name: str  # name of its files, without suffix
    title: str  # short title, for the heading
    caption: str  # what the numbers are, with their units and the data split
    header: tuple[str, ...]  # names of the columns; a line break marks where the name may break
    groups: dict[str, list[list[Entry]]]  # rows by the name of their group; a plain table has one group named ""
    frame: pd.DataFrame  # the same numbers unrounded, for CSV
    notes: tuple[str, ...] = ()  # sentences below the table
    row_headers: int = 1  # number of leading columns that identify a row
    grouped_by: str = "model"  # header of the groups' names

    @property
    def rows(self) -> list[list[Entry]]:
        """Rows of all groups."""
        return [row for rows in self.groups.values() for row in rows]


_MAX_WIDTH = 30
"""Most characters behind the units that the page reserves space for; it has a class for each width."""


def rest_widths(sheet: Sheet) -> list[int]:
    """Return the most characters behind the units of a column's numbers, by column; 0 for a column of texts.

    The page gives this width to what follows the units, so that the decimal points of a column are below each other.
    """
    return [
        min(max((len(row[column].parts[1]) for row in sheet.rows if row[column].number), default=0), _MAX_WIDTH)
        for column in range(len(sheet.header))
    ]


def csv(sheet: Sheet) -> str:
    """Return the unrounded numbers as CSV."""
    return sheet.frame.to_csv(index=False)


def markdown(sheet: Sheet) -> str:
    """Return the caption and a GitHub-flavoured table; the groups' names become the first column."""
    has_groups = any(sheet.groups)
    header = [_escape_markdown(name) for name in sheet.header]
    table = [[sheet.grouped_by, *header] if has_groups else header]
    table.append(["---"] * len(table[0]))
    for group, rows in sheet.groups.items():
        for row in rows:
            texts = [_markdown_entry(entry) for entry in row]
            table.append([_escape_markdown(group), *texts] if has_groups else texts)
    lines = [f"**{_escape_markdown(sheet.title)}.** {_escape_markdown(sheet.caption)}", ""]
    lines += [f"| {' | '.join(texts)} |" for texts in table]
    for note in sheet.notes:
        lines += ["", _escape_markdown(note)]
    return "\n".join(lines) + "\n"


_LATEX_HEAD = r"""% needs \usepackage{booktabs,graphicx,siunitx}
\begin{table*}
\sisetup{detect-weight=true, retain-explicit-plus=true, group-digits=integer, group-separator={,},
  group-minimum-digits=4}"""
_LINE = 120
"""Most characters of a text in a column of LaTeX whose rows have one line each."""
_LATEX_SENTENCES = r"p{0.6\textwidth}"
"""Type of a LaTeX column with longer texts."""
_LATEX_NUMBER = re.compile(r"([<>]?)([-+\u2212]?)(\d[\d,]*)(\.\d+)?(?:e([-+]?\d+))?( .*)?")
"""Comparison, sign, whole digits, decimals and exponent of a cell, and what is behind them, such as a deviation."""


def latex(sheet: Sheet) -> str:
    """Return a LaTeX `table*` for documents that use the packages booktabs, graphicx and siunitx.

    A column of numbers, of which some may be dashes, is a column `S` of siunitx, which aligns them at their decimal
    points. Of "mean ± std" the mean is a number and the rest a text behind it, as siunitx would not align means whose
    deviations have different sizes. Other columns are texts.
    """
    formats = [_siunitx_format([row[column] for row in sheet.rows]) for column in range(len(sheet.header))]
    frame = pd.DataFrame([
        [_latex_entry(entry, bool(numbers)) for entry, numbers in zip(row, formats, strict=True)] for row in sheet.rows
    ], columns=range(len(sheet.header)))  # fmt: skip
    are_right = [any(row[column].number for row in sheet.rows) for column in range(len(sheet.header))]
    texts = [_text_format([row[column] for row in sheet.rows]) for column in range(len(sheet.header))]
    columns = zip(formats, are_right, texts, strict=True)
    alignment = "".join(numbers or ("r" if right else text) for numbers, right, text in columns)
    header: dict[object, str] = dict(enumerate(map(_escape_latex, sheet.header)))
    styler = frame.style.hide(axis="index").format_index(header.__getitem__, axis=1)
    table = styler.to_latex(
        column_format=alignment,
        environment="table*",
        position_float="centering",
        hrules=True,
        caption=_escape_latex(sheet.caption),
        label=f"tab:{sheet.name.replace('_', '-')}",
        siunitx=True,
    )
    head, rest = table.split("\\midrule\n", 1)
    head = head.replace("\\begin{table*}", _LATEX_HEAD, 1)
    head = head.replace("\\begin{tabular}", "\\resizebox{\\textwidth}{!}{%\n\\begin{tabular}", 1)
    rows = iter(rest.splitlines())
    lines = []
    for group, entries in sheet.groups.items():
        lines.append(r"\midrule")
        if group:
            lines.append(rf"\multicolumn{{{len(sheet.header)}}}{{l}}{{\textbf{{{_escape_latex(group)}}}}} \\")
        lines += [next(rows) for _ in entries]
    lines += [r"\bottomrule", r"\end{tabular}}", r"\end{table*}"]
    return head + "\n".join(lines) + "\n"


def _siunitx_format(entries: Sequence[Entry]) -> str:
    """Return the type `S` of a column with the size of its numbers; an empty text if a cell has no number, but text."""
    matches = [_LATEX_NUMBER.fullmatch(entry.text) for entry in entries if entry.number and not _is_dash(entry)]
    if not matches or any(match is None for match in matches) or not all(entry.number for entry in entries):
        return ""
    parts = zip(*(match.groups(default="") for match in matches if match), strict=True)
    comparisons, signs, wholes, decimals, exponents, rests = parts
    sign = max(comparisons) + ("+" if "+" in signs else "-" if any(signs) else "")
    whole = max(len(text.replace(",", "")) for text in wholes)
    layout = f"{sign}{whole}.{max(map(len, decimals)) - 1 if any(decimals) else 0}"
    if any(exponents):
        layout += f"e-{max(len(str(abs(int(text or 0)))) for text in exponents)}"
    longest = max(rests, key=len)
    space = f", table-space-text-post={{~{_escape_latex(longest)}}}" if longest else ""
    return f"S[table-format={layout}{space}]"


def _text_format(entries: Sequence[Entry]) -> str:
    """Return the type of a column of texts: lines that are broken if there are sentences; commands are never broken."""
    has_sentences = any(len(entry.text) > _LINE for entry in entries) and not any(entry.code for entry in entries)
    return _LATEX_SENTENCES if has_sentences else "l"


def _is_dash(entry: Entry) -> bool:
    return entry.text in ("", "-", "\u2013")


def _escape_latex(text: str) -> str:
    """Escape LaTeX's special characters, and the Greek letters and signs that occur in our tables."""
    return " ".join(text.split()).translate(_LATEX_CHARACTERS)


_LATEX_CHARACTERS = str.maketrans({
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "λ": r"$\lambda$", "ζ": r"$\zeta$", "Σ": r"$\Sigma$",
    "±": r"$\pm$", "²": "$^2$", "→": r"$\rightarrow$", "·": r"$\cdot$", "\u2212": r"$-$", "\u00d7": r"$\times$",
    "\u2013": "--",
})  # fmt: skip


def _latex_entry(entry: Entry, is_siunitx: bool) -> str:
    """Return a cell; in a column of siunitx, a number without braces, and anything else in braces."""
    number = _LATEX_NUMBER.fullmatch(entry.text) if is_siunitx else None
    if number is None:
        text = _escape_latex(entry.text)
        text = rf"\texttt{{{text}}}" if entry.code else text
        text = rf"\textbf{{{text}}}" if entry.bold else text
        return f"{{{text}}}" if is_siunitx else text
    comparison, sign, whole, decimals, exponent, rest = number.groups(default="")
    text = f"{comparison}{sign}{whole}{decimals}".replace(",", "").replace("\u2212", "-")
    text += f"e{int(exponent)}" if exponent else ""
    text = rf"\bfseries {text}" if entry.bold else text
    weight = r"\boldmath" if entry.bold else ""
    return f"{text} {{~{weight}{_escape_latex(rest)}}}" if rest else text


def _markdown_entry(entry: Entry) -> str:
    text = f"`{entry.text.replace('`', ' ')}`" if entry.code and entry.text else _escape_markdown(entry.text)
    text = text.replace("|", "\\|") if entry.code else text
    return f"**{text}**" if entry.bold else text


def _escape_markdown(text: str) -> str:
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(text.split()))
