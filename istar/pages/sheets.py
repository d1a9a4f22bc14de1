"""Tables with captions, and their formats: CSV, Markdown and LaTeX."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd


@dataclass(frozen=True)
class Entry:
    """A cell of a table.

    Attributes:
        text: formatted content.
        bold: whether the value is the best of its column.
        code: whether the text is a command.
        number: whether the cell is aligned to the right.
    """

    text: str
    bold: bool = False
    code: bool = False
    number: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table.

    Attributes:
        name: name of its files, without suffix.
        title: short title, for the heading.
        caption: what the numbers are, with their units and the data split.
        header: names of the columns. A line break marks where the name may break.
        groups: rows by the name of their group; a plain table has one group with an empty name.
        frame: the same numbers unrounded, for CSV.
        notes: sentences below the table.
        row_headers: number of leading columns that identify a row.
        grouped_by: header of the groups' names.
    """

    name: str
    title: str
    caption: str
    header: tuple[str, ...]
    groups: dict[str, list[list[Entry]]]
    frame: pd.DataFrame
    notes: tuple[str, ...] = field(default=())
    row_headers: int = 1
    grouped_by: str = "model"

    @property
    def rows(self) -> list[list[Entry]]:
        """Rows of all groups."""
        return [row for rows in self.groups.values() for row in rows]


def csv(sheet: Sheet) -> str:
    """Return the unrounded numbers as CSV."""
    return sheet.frame.to_csv(index=False)


def markdown(sheet: Sheet) -> str:
    """Return the caption and a GitHub-flavoured table; the groups' names become the first column."""
    header = _with_group(sheet, [_escape_markdown(name) for name in sheet.header])
    lines = [f"**{_escape_markdown(sheet.title)}.** {_escape_markdown(sheet.caption)}", ""]
    lines += [_markdown_row(header), _markdown_row(["---"] * len(header))]
    for group, rows in sheet.groups.items():
        lines += [_markdown_row(_with_group(sheet, [_markdown_entry(entry) for entry in row], group)) for row in rows]
    lines += [line for note in sheet.notes for line in ("", _escape_markdown(note))]
    return "\n".join(lines) + "\n"


def latex(sheet: Sheet) -> str:
    """Return a LaTeX `table*` for documents that use the packages booktabs and graphicx."""
    columns = "".join("r" if _is_number_column(sheet, number) else "l" for number in range(len(sheet.header)))
    lines = [
        r"% needs \usepackage{booktabs,graphicx}",
        r"\begin{table*}",
        r"\centering",
        rf"\caption{{{escape_latex(sheet.caption)}}}",
        rf"\label{{tab:{sheet.name.replace('_', '-')}}}",
        r"\resizebox{\textwidth}{!}{%",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        _latex_row([escape_latex(name) for name in sheet.header]),
    ]
    for group, rows in sheet.groups.items():
        lines.append(r"\midrule")
        if group:
            lines.append(rf"\multicolumn{{{len(sheet.header)}}}{{l}}{{\textbf{{{escape_latex(group)}}}}} \\")
        lines += [_latex_row([_latex_entry(entry) for entry in row]) for row in rows]
    lines += [r"\bottomrule", r"\end{tabular}}", r"\end{table*}"]
    return "\n".join(lines) + "\n"


def escape_latex(text: str) -> str:
    """Escape LaTeX's special characters, and the Greek letters and signs that occur in our tables."""
    return "".join(_LATEX_CHARACTERS.get(letter, letter) for letter in " ".join(text.split()))


_LATEX_CHARACTERS = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "λ": r"$\lambda$", "ζ": r"$\zeta$", "Σ": r"$\Sigma$",
    "±": r"$\pm$", "→": r"$\rightarrow$", "·": r"$\cdot$", "\u2212": r"$-$", "\u00d7": r"$\times$", "\u2013": "--",
}  # fmt: skip


def _latex_entry(entry: Entry) -> str:
    text = escape_latex(entry.text)
    if entry.code:
        text = rf"\texttt{{{text}}}"
    return rf"\textbf{{{text}}}" if entry.bold else text


def _latex_row(texts: Sequence[str]) -> str:
    return " & ".join(texts) + r" \\"


def _markdown_entry(entry: Entry) -> str:
    text = f"`{entry.text.replace('`', ' ')}`" if entry.code and entry.text else _escape_markdown(entry.text)
    text = text.replace("|", "\\|") if entry.code else text
    return f"**{text}**" if entry.bold else text


def _escape_markdown(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "\\`*_|<>[]" else letter for letter in " ".join(text.split()))


def _markdown_row(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _with_group(sheet: Sheet, texts: list[str], group: str | None = None) -> list[str]:
    """Prepend the group's name, or the header of that column, if the table has named groups."""
    if not any(sheet.groups):
        return texts
    return [sheet.grouped_by if group is None else _escape_markdown(group), *texts]


def _is_number_column(sheet: Sheet, number: int) -> bool:
    return any(row[number].number for row in sheet.rows)
