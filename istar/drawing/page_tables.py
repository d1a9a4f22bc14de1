"""Tables with captions, and their formats: CSV, Markdown and LaTeX."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from istar.drawing.hover_points import format_number
from istar.files import writing


@dataclass(frozen=True)
class Entry:
    """A cell of a table."""

    text: str  # formatted content
    bold: bool = False  # whether the value is the best of its column
    code: bool = False  # whether the text is a command
    number: bool = False  # whether the cell is a number, which is aligned to the right

    @property
    def parts(self) -> tuple[str, str]:
        """The text before and from the decimal point on, such as ("71", ".67 ± 0.50")."""
        match = re.match(r"[<>]?[-+\u2212]?\d[\d,]*", self.text)
        whole = match[0] if match else self.text
        return whole, self.text[len(whole) :]


def number_entry(value: float, half_width: float = math.nan) -> Entry:
    """Return a table cell with a formatted number, or an en dash for NaN.

    If the half-width of the number's interval is finite, the cell has both numbers, such as "0.160 \u00b1 0.017": the
    half-width has two significant digits, and the number has as many decimals as the half-width.
    """
    if math.isnan(value):
        return Entry("\u2013", number=True)
    if not math.isfinite(half_width):
        return Entry(format_number(value), number=True)
    # The number would need too many decimals or digits to match a very small or large half-width.
    if not 1e-9 <= half_width < 1e12:
        return Entry(f"{format_number(value)} \u00b1 {half_width:.2g}", number=True)
    decimals = max(0, 1 - math.floor(math.log10(half_width)))
    return Entry(f"{value:,.{decimals}f} \u00b1 {half_width:,.{decimals}f}", number=True)


def numeric_entries(texts: Iterable[str]) -> list[Entry]:
    """Return a table cell for each number, which is already formatted."""
    return [Entry(text, number=True) for text in texts]


@dataclass(frozen=True)
class Sheet:
    """A table with a caption."""

    name: str  # name of its files, without suffix
    title: str  # short title, for the heading
    caption: str  # what the numbers are, with their units and the data split
    header: tuple[str, ...]  # names of the columns; a line break marks where the name may break
    rows_by_group: dict[str, list[list[Entry]]]  # rows by the name of their group; a plain table has one group named ""
    frame: pd.DataFrame  # the same numbers unrounded, for CSV
    notes: tuple[str, ...] = ()  # sentences below the table
    num_row_headers: int = 1  # number of leading columns that identify a row
    group_header: str = "model"  # header of the groups' names

    @property
    def rows(self) -> list[list[Entry]]:
        """Rows of all groups."""
        return [row for rows in self.rows_by_group.values() for row in rows]


_MAX_REST_WIDTH = 30
"""Most characters from the decimal point on for which the page reserves space; its style has a class for each width."""


def rest_widths(sheet: Sheet) -> list[int]:
    """Return for each column the largest number of characters from the decimal point on; 0 for a column of texts.

    The page gives all numbers of a column this width after the units, so that their decimal points are aligned.
    """
    return [
        min(max((len(entry.parts[1]) for entry in entries if entry.number), default=0), _MAX_REST_WIDTH)
        for entries in _collect_columns(sheet)
    ]


def _collect_columns(sheet: Sheet) -> list[list[Entry]]:
    """Return the cells of each column, in the rows of all groups."""
    return [[row[index] for row in sheet.rows] for index in range(len(sheet.header))]


_COLUMN_GAP = 2
"""Space between two columns, in characters."""
_MAX_PRINTED_TEXT = 30
"""Most characters of a text in a line; longer texts are broken into lines on paper."""


def divide(sheet: Sheet, max_characters: int) -> list[Sheet]:
    """Divide a table that is too wide for paper into tables beside each other, with some of the columns in each.

    The columns that identify a row are in every part.

    Args:
        sheet: the table.
        max_characters: most characters of a line on paper.

    Returns:
        The parts from left to right; only the table itself if it is not too wide.
    """
    widths = [
        max([len(line) for line in name.split("\n")] + [_count_printed_characters(entry) for entry in entries])
        + _COLUMN_GAP
        for name, entries in zip(sheet.header, _collect_columns(sheet), strict=True)
    ]
    if sum(widths) <= max_characters:
        return [sheet]
    parts = _divide_columns(widths, sheet.num_row_headers, max_characters)
    # The last part may have little left. In the shortest lines that need no further part, all parts are about as wide.
    for num_characters in range(max_characters - 1, max(widths), -1):
        narrower_parts = _divide_columns(widths, sheet.num_row_headers, num_characters)
        if len(narrower_parts) > len(parts):
            break
        parts = narrower_parts
    return [_select_columns(sheet, columns) for columns in parts]


def _divide_columns(widths: Sequence[int], num_row_headers: int, max_characters: int) -> list[list[int]]:
    """Return the indices of the columns of each part, as many as fit into a line, and at least one.

    The first `num_row_headers` columns are in every part.
    """
    parts: list[list[int]] = []
    for index in range(num_row_headers, len(widths)):
        if not parts or sum(widths[column] for column in (*parts[-1], index)) > max_characters:
            parts.append(list(range(num_row_headers)))
        parts[-1].append(index)
    return parts


def _count_printed_characters(entry: Entry) -> int:
    """Return the width of a cell on paper in characters."""
    return len(entry.text) if entry.number else min(len(entry.text), _MAX_PRINTED_TEXT)


def _select_columns(sheet: Sheet, columns: Sequence[int]) -> Sheet:
    """Return the table with these columns only, by their indices."""
    rows_by_group = {
        group: [[row[index] for index in columns] for row in rows] for group, rows in sheet.rows_by_group.items()
    }
    return replace(sheet, header=tuple(sheet.header[index] for index in columns), rows_by_group=rows_by_group)


def to_csv(sheet: Sheet) -> str:
    """Return the table as CSV, with unrounded numbers."""
    return writing.to_csv(sheet.frame)


def to_markdown(sheet: Sheet) -> str:
    """Return the table as GitHub-flavoured Markdown with its caption; names of groups become the first column."""
    has_groups = any(sheet.rows_by_group)
    header = [_escape_markdown(name) for name in sheet.header]
    table_rows = [[sheet.group_header, *header] if has_groups else header]
    table_rows.append(["---"] * len(table_rows[0]))
    for group, rows in sheet.rows_by_group.items():
        for row in rows:
            cell_texts = [_format_markdown_entry(entry) for entry in row]
            table_rows.append([_escape_markdown(group), *cell_texts] if has_groups else cell_texts)
    lines = [f"**{_escape_markdown(sheet.title)}.** {_escape_markdown(sheet.caption)}", ""]
    lines += [f"| {' | '.join(cell_texts)} |" for cell_texts in table_rows]
    for note in sheet.notes:
        lines += ["", _escape_markdown(note)]
    return "\n".join(lines) + "\n"


_LATEX_HEAD = r"""% needs \usepackage{booktabs,graphicx,siunitx}
\begin{table*}
\sisetup{detect-weight=true, retain-explicit-plus=true, group-digits=integer, group-separator={,},
  group-minimum-digits=4}"""
_MAX_LATEX_LINE = 120
"""A LaTeX column breaks its texts into lines if one of them has more characters than this."""
_LATEX_SENTENCES = r"p{0.6\textwidth}"
"""Type of a LaTeX column whose texts are broken into lines."""
_LATEX_NUMBER = re.compile(r"([<>]?)([-+\u2212]?)(\d[\d,]*)(\.\d+)?(?:e([-+]?\d+))?( .*)?")
"""Comparison, sign, whole digits, decimals and exponent of a cell, and the rest, such as a deviation."""


def to_latex(sheet: Sheet) -> str:
    """Return the table as a LaTeX `table*` for documents that use the packages booktabs, graphicx and siunitx.

    A column of numbers and dashes becomes a column `S` of siunitx, which aligns the numbers at their decimal points. Of
    "mean ± std", only the mean is a number and the rest is a text behind it, because siunitx would not align means
    whose deviations have different sizes. Other columns are texts.
    """
    columns = _collect_columns(sheet)
    number_types = [_build_siunitx_column_type(entries) for entries in columns]
    frame = pd.DataFrame([
        [_format_latex_entry(entry, bool(number_type)) for entry, number_type in zip(row, number_types, strict=True)]
        for row in sheet.rows
    ], columns=range(len(sheet.header)))  # fmt: skip
    are_right_aligned = [any(entry.number for entry in entries) for entries in columns]
    text_types = [_choose_text_column_type(entries) for entries in columns]
    column_types = "".join(
        number_type or ("r" if is_right_aligned else text_type)
        for number_type, is_right_aligned, text_type in zip(number_types, are_right_aligned, text_types, strict=True)
    )
    header: dict[object, str] = dict(enumerate(map(_escape_latex, sheet.header)))
    styler = frame.style.hide(axis="index").format_index(header.__getitem__, axis=1)
    table = styler.to_latex(
        column_format=column_types,
        environment="table*",
        position_float="centering",
        hrules=True,
        caption=_escape_latex(sheet.caption),
        label=f"tab:{sheet.name.replace('_', '-')}",
        siunitx=True,
    )
    table_head, table_body = table.split("\\midrule\n", 1)
    table_head = table_head.replace("\\begin{table*}", _LATEX_HEAD, 1)
    table_head = table_head.replace("\\begin{tabular}", "\\resizebox{\\textwidth}{!}{%\n\\begin{tabular}", 1)
    body_lines = iter(table_body.splitlines())
    lines = []
    for group, group_rows in sheet.rows_by_group.items():
        lines.append(r"\midrule")
        if group:
            lines.append(rf"\multicolumn{{{len(sheet.header)}}}{{l}}{{\textbf{{{_escape_latex(group)}}}}} \\")
        lines += [next(body_lines) for _ in group_rows]
    lines += [r"\bottomrule", r"\end{tabular}}", r"\end{table*}"]
    return table_head + "\n".join(lines) + "\n"


def _build_siunitx_column_type(entries: Sequence[Entry]) -> str:
    """Return the siunitx type of a column, `S` with the sizes of its numbers, or an empty text if a cell is a text."""
    matches = [_LATEX_NUMBER.fullmatch(entry.text) for entry in entries if entry.number and not _is_dash(entry)]
    if not matches or any(match is None for match in matches) or not all(entry.number for entry in entries):
        return ""
    parts_of_numbers = zip(*(match.groups(default="") for match in matches if match), strict=True)
    comparisons, signs, wholes, decimals, exponents, rests = parts_of_numbers
    # The format reserves space for the comparison and the sign that any number of the column has.
    prefix = max(comparisons) + ("+" if "+" in signs else "-" if any(signs) else "")
    num_digits = max(len(text.replace(",", "")) for text in wholes)
    table_format = f"{prefix}{num_digits}.{max(map(len, decimals)) - 1 if any(decimals) else 0}"
    if any(exponents):
        table_format += f"e-{max(len(str(abs(int(text or 0)))) for text in exponents)}"
    longest_rest = max(rests, key=len)
    rest_space = f", table-space-text-post={{~{_escape_latex(longest_rest)}}}" if longest_rest else ""
    return f"S[table-format={table_format}{rest_space}]"


def _choose_text_column_type(entries: Sequence[Entry]) -> str:
    """Return the LaTeX type of a column of texts, which breaks long texts into lines, but never commands."""
    is_long = any(len(entry.text) > _MAX_LATEX_LINE for entry in entries)
    return _LATEX_SENTENCES if is_long and not any(entry.code for entry in entries) else "l"


def _is_dash(entry: Entry) -> bool:
    """Return whether a cell stands for a missing number: it is empty, a hyphen or an en dash."""
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


def _format_latex_entry(entry: Entry, is_siunitx_column: bool) -> str:
    """Return a cell as LaTeX. A siunitx column has numbers without braces, and anything else in braces."""
    match = _LATEX_NUMBER.fullmatch(entry.text) if is_siunitx_column else None
    if match is None:
        text = _escape_latex(entry.text)
        text = rf"\texttt{{{text}}}" if entry.code else text
        text = rf"\textbf{{{text}}}" if entry.bold else text
        return f"{{{text}}}" if is_siunitx_column else text
    comparison, sign, whole, decimals, exponent, rest = match.groups(default="")
    text = f"{comparison}{sign}{whole}{decimals}".replace(",", "").replace("\u2212", "-")
    text += f"e{int(exponent)}" if exponent else ""
    text = rf"\bfseries {text}" if entry.bold else text
    math_weight = r"\boldmath" if entry.bold else ""
    return f"{text} {{~{math_weight}{_escape_latex(rest)}}}" if rest else text


def _format_markdown_entry(entry: Entry) -> str:
    """Return a cell as Markdown, in backquotes if it is a command, and in bold if it is the best of its column."""
    text = f"`{entry.text.replace('`', ' ')}`" if entry.code and entry.text else _escape_markdown(entry.text)
    text = text.replace("|", "\\|") if entry.code else text
    return f"**{text}**" if entry.bold else text


def _escape_markdown(text: str) -> str:
    """Escape the special characters of Markdown, and replace each run of white space by a space."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(text.split()))
