"""Tables with captions, and their formats: Markdown, LaTeX and the terminal."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from rich.table import Table

from istar.drawing.terminal import make_console

EMPTY_CELL = "-"
_EMPTY_TEXTS = {"", EMPTY_CELL, "\u2013"}
_MAX_HEADER = 12
"""Most characters of a header in one line."""


@dataclass(frozen=True)
class Entry:
    """A cell of a table."""

    text: str  # formatted content
    bold: bool = False  # whether the value is the best of its column
    code: bool = False  # whether the text is a command
    number: bool = False  # whether the cell is a number, aligned to the right


def number_entry(value: float, half_width: float = math.nan) -> Entry:
    """Return a table cell with a number in four significant digits, or an en dash for NaN.

    From 1,000 to 10^12, the number is a whole number with separators.
    With a finite half-width of the number's interval, the cell has both, such as "0.160 \u00b1 0.017": the half-width
    with two significant digits, and the number with as many decimals. A half-width below a hundred-thousandth of the
    number has one digit, and the number at most five.
    """
    if math.isnan(value):
        return Entry("\u2013", number=True)
    if not math.isfinite(half_width):
        return Entry(f"{value:,.0f}" if 1_000 <= abs(value) < 1e12 else f"{value:.4g}", number=True)
    if half_width < 1e-5 * abs(value) or not 1e-6 <= half_width < 1e12:
        return Entry(f"{value:.5g} \u00b1 {half_width:.1g}", number=True)
    decimals = max(0, 1 - math.floor(math.log10(half_width)))
    return Entry(f"{value:,.{decimals}f} \u00b1 {half_width:,.{decimals}f}", number=True)


def break_header(name: str) -> str:
    """Return the header of a column in at most two lines, broken at its line break or near its middle."""
    first, *others = name.split("\n")
    if others or len(name) <= _MAX_HEADER:
        return "\n".join([first, " ".join(others)]).rstrip("\n")
    breaks = [match.start() for match in re.finditer(" ", name)]
    middle = min(breaks, key=lambda index: abs(2 * index - len(name)), default=len(name))
    return f"{name[:middle]}\n{name[middle + 1 :]}".rstrip("\n")


def format_mean_and_std(mean: float | None, std: float | None, format_spec: str = ".2f") -> str:
    """Format as `62.53 ± 0.70`; without a deviation (None or NaN) as `62.53`, without a mean as a dash."""
    if mean is None:
        return EMPTY_CELL
    return f"{mean:{format_spec}}" if pd.isna(std) else f"{mean:{format_spec}} ± {std:{format_spec}}"


def format_p_value(p_value: float | None) -> str:
    """Format with four decimals; below 0.001 as `<0.001`, and None as a dash."""
    if p_value is None:
        return EMPTY_CELL
    return "<0.001" if p_value < 0.001 else f"{p_value:.4f}"


def group_rows_by_model(
    rows: Iterable[Mapping[str, Any]], format_row: Callable[[Mapping[str, Any]], list[Entry]]
) -> dict[str, list[list[Entry]]]:
    """Return the formatted rows by their value of `model`, in order of appearance."""
    rows_by_model: dict[str, list[list[Entry]]] = {}
    for row in rows:
        rows_by_model.setdefault(str(row["model"]), []).append(format_row(row))
    return rows_by_model


def numeric_entries(texts: Iterable[str]) -> list[Entry]:
    """Return a table cell for each formatted number."""
    return [Entry(text, number=True) for text in texts]


@dataclass(frozen=True)
class Sheet:
    """A table with a caption."""

    name: str  # name of its files, without suffix
    title: str  # short title, for the heading
    caption: str  # what the numbers are, with their units and the data split
    header: tuple[str, ...]  # names of the columns; a line break marks where the name may break
    rows_by_group: dict[str, list[list[Entry]]]  # rows by group; a plain table has one group named ""
    frame: pd.DataFrame  # the same numbers unrounded, for CSV
    notes: tuple[str, ...] = ()  # sentences below the table
    num_row_headers: int = 1  # number of leading columns that identify a row
    group_header: str = "model"  # header of the groups' names
    descriptive: tuple[str, ...] = ()  # headers of columns that `fold_columns` moves into a note if they are constant

    @property
    def rows(self) -> list[list[Entry]]:
        """Rows of all groups."""
        return [row for rows in self.rows_by_group.values() for row in rows]

    def put_groups_into_column(self) -> tuple[list[str], list[list[Entry]]]:
        """Return the header and the rows of all groups, with the names of groups as the first column."""
        if not any(self.rows_by_group):
            return list(self.header), self.rows
        rows = [[Entry(group), *row] for group, group_rows in self.rows_by_group.items() for row in group_rows]
        return [self.group_header, *self.header], rows


def fold_columns(sheet: Sheet) -> Sheet:
    """Return a table without empty columns, and with a note instead of each descriptive column of a single value.

    Only the display changes: the frame keeps all columns. A table of one row keeps its descriptive columns.
    """
    kept: list[int] = []  # indices of the columns that stay
    folded: list[str] = []  # what the note says
    for index, (header, *cells) in enumerate(zip(sheet.header, *sheet.rows, strict=True)):
        texts = {entry.text for entry in cells}
        if len(texts) == 1 < len(cells) and header in sheet.descriptive and not texts <= _EMPTY_TEXTS:
            folded.append(f"{' '.join(header.split())} {texts.pop()}")
        elif index < sheet.num_row_headers or not texts <= _EMPTY_TEXTS:
            kept.append(index)
    return replace(
        sheet,
        header=tuple(sheet.header[index] for index in kept),
        rows_by_group={
            group: [[row[index] for index in kept] for row in rows] for group, rows in sheet.rows_by_group.items()
        },
        notes=(*([f"In all rows: {'; '.join(folded)}."] if folded else []), *sheet.notes),
    )


def to_terminal_table(sheet: Sheet) -> Table:
    """Return the table for the terminal; names of groups become the first column."""
    has_groups = any(sheet.rows_by_group)
    table = Table(title=sheet.title, title_justify="left", padding=(0, 0, 0, 1))
    num_names = sheet.num_row_headers + has_groups
    for index, header in enumerate((sheet.group_header, *sheet.header) if has_groups else sheet.header):
        # Only the first names of a row, which may be long, are folded.
        is_whole = index >= max(1, num_names - 1)
        table.add_column(header, justify="left" if index < num_names else "right", overflow="fold", no_wrap=is_whole)
    for group, rows in sheet.rows_by_group.items():
        for index, row in enumerate(rows):
            cells = [entry.text for entry in row]
            is_last = index == len(rows) - 1
            table.add_row(*([group if index == 0 else "", *cells] if has_groups else cells), end_section=is_last)
    return table


def make_markdown_table(rows: Iterable[Sequence[str]]) -> str:
    """Return rows of Markdown cells, of which the first is the header, as a table, without a line break at its end."""
    header, *others = rows
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *others))


def to_markdown(sheet: Sheet) -> str:
    """Return the table as GitHub-flavoured Markdown with its caption; names of groups become the first column."""
    header, rows = sheet.put_groups_into_column()
    table_rows = [list(map(_escape_markdown, header)), *(list(map(_format_markdown_entry, row)) for row in rows)]
    lines = [f"**{_escape_markdown(sheet.title)}.** {_escape_markdown(sheet.caption)}", ""]
    lines.append(make_markdown_table(table_rows))
    for note in sheet.notes:
        lines += ["", _escape_markdown(note)]
    return "\n".join(lines) + "\n"


def to_latex(sheet: Sheet) -> str:
    """Return the table as a LaTeX `table` for the package booktabs; names of groups become the first column."""
    header, rows = sheet.put_groups_into_column()
    frame = pd.DataFrame(
        [list(map(_format_latex_entry, row)) for row in rows], columns=list(map(_escape_latex, header))
    )
    are_numbers = [any(row[index].number for row in rows) for index in range(len(header))]
    table = frame.to_latex(
        index=False,
        escape=False,
        column_format="".join("r" if is_number else "l" for is_number in are_numbers),
        caption=_escape_latex(sheet.caption),
        label=f"tab:{sheet.name.replace('_', '-')}",
    )
    return f"% needs \\usepackage{{booktabs}}\n{table}"


def _escape_latex(text: str) -> str:
    return " ".join(text.split()).translate(_LATEX_CHARACTERS)


_LATEX_CHARACTERS = str.maketrans({
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "λ": r"$\lambda$", "ζ": r"$\zeta$", "Σ": r"$\Sigma$",
    "±": r"$\pm$", "²": "$^2$", "→": r"$\rightarrow$", "·": r"$\cdot$", "\u2212": r"$-$", "\u00d7": r"$\times$",
    "\u2013": "--",
})  # fmt: skip


def _format_latex_entry(entry: Entry) -> str:
    text = _escape_latex(entry.text)
    text = rf"\texttt{{{text}}}" if entry.code else text
    return rf"\textbf{{{text}}}" if entry.bold else text


def _format_markdown_entry(entry: Entry) -> str:
    text = f"`{entry.text.replace('`', ' ')}`" if entry.code and entry.text else _escape_markdown(entry.text)
    text = text.replace("|", "\\|") if entry.code else text
    return f"**{text}**" if entry.bold else text


def _escape_markdown(text: str) -> str:
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(text.split()))


def print_json(frames: Mapping[str, pd.DataFrame]) -> None:
    """Print the rows of each table as an array of objects, by the name of the table, as JSON."""
    rows = {name: json.loads(frame.to_json(orient="records", double_precision=15)) for name, frame in frames.items()}
    make_console().out(json.dumps(rows, indent=1, ensure_ascii=False), highlight=False)
