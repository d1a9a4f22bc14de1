"""Tables with captions, and their formats: CSV, Markdown and LaTeX."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd


@dataclass(frozen=True)
class Entry:
    """A cell of a table."""

    text: str  # formatted content
    bold: bool = False  # whether the value is the best of its column
    code: bool = False  # whether the text is a command
    number: bool = False  # whether the cell is aligned to the right


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


def latex(sheet: Sheet) -> str:
    """Return a LaTeX `table*` for documents that use the packages booktabs and graphicx."""
    are_numbers = [any(row[column].number for row in sheet.rows) for column in range(len(sheet.header))]
    alignment = "".join("r" if is_number else "l" for is_number in are_numbers)
    lines = [
        r"% needs \usepackage{booktabs,graphicx}",
        r"\begin{table*}",
        r"\centering",
        rf"\caption{{{_escape_latex(sheet.caption)}}}",
        rf"\label{{tab:{sheet.name.replace('_', '-')}}}",
        r"\resizebox{\textwidth}{!}{%",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        _latex_row(map(_escape_latex, sheet.header)),
    ]
    for group, rows in sheet.groups.items():
        lines.append(r"\midrule")
        if group:
            lines.append(rf"\multicolumn{{{len(sheet.header)}}}{{l}}{{\textbf{{{_escape_latex(group)}}}}} \\")
        lines += [_latex_row(map(_latex_entry, row)) for row in rows]
    lines += [r"\bottomrule", r"\end{tabular}}", r"\end{table*}"]
    return "\n".join(lines) + "\n"


def _escape_latex(text: str) -> str:
    """Escape LaTeX's special characters, and the Greek letters and signs that occur in our tables."""
    return " ".join(text.split()).translate(_LATEX_CHARACTERS)


_LATEX_CHARACTERS = str.maketrans({
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "λ": r"$\lambda$", "ζ": r"$\zeta$", "Σ": r"$\Sigma$",
    "±": r"$\pm$", "→": r"$\rightarrow$", "·": r"$\cdot$", "\u2212": r"$-$", "\u00d7": r"$\times$", "\u2013": "--",
})  # fmt: skip


def _latex_entry(entry: Entry) -> str:
    text = _escape_latex(entry.text)
    if entry.code:
        text = rf"\texttt{{{text}}}"
    return rf"\textbf{{{text}}}" if entry.bold else text


def _latex_row(texts: Iterable[str]) -> str:
    return " & ".join(texts) + r" \\"


def _markdown_entry(entry: Entry) -> str:
    text = f"`{entry.text.replace('`', ' ')}`" if entry.code and entry.text else _escape_markdown(entry.text)
    text = text.replace("|", "\\|") if entry.code else text
    return f"**{text}**" if entry.bold else text


def _escape_markdown(text: str) -> str:
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(text.split()))
