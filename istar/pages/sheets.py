"""A table with its words, and how it is written as CSV, Markdown and LaTeX."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd


@dataclass(frozen=True)
class Entry:
    """A cell of a table; `bold` for the best of its column, `code` for a command, `number` to align to the right."""

    text: str
    bold: bool = False
    code: bool = False
    number: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table.

    Attributes:
        name: of its files.
        title: short, for the heading.
        caption: what its numbers are, with units and split.
        header: the columns' names; a line break is where a narrow column may break.
        groups: rows under a name each; one group without a name for a plain table.
        frame: the same numbers unrounded, for CSV.
        notes: sentences below it.
        row_headers: so many of the first columns name the row.
        grouped_by: what the groups' names are.
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
        """Of all groups."""
        return [row for rows in self.groups.values() for row in rows]


def csv(sheet: Sheet) -> str:
    """All numbers, unrounded."""
    return sheet.frame.to_csv(index=False)


def markdown(sheet: Sheet) -> str:
    """A GitHub-flavoured table under its caption; groups become the first column."""
    header = _with_group(sheet, [_escape_markdown(name) for name in sheet.header])
    lines = [f"**{_escape_markdown(sheet.title)}.** {_escape_markdown(sheet.caption)}", ""]
    lines += [_markdown_row(header), _markdown_row(["---"] * len(header))]
    for group, rows in sheet.groups.items():
        lines += [_markdown_row(_with_group(sheet, [_markdown_entry(entry) for entry in row], group)) for row in rows]
    lines += [line for note in sheet.notes for line in ("", _escape_markdown(note))]
    return "\n".join(lines) + "\n"


def latex(sheet: Sheet) -> str:
    """A `table*` with booktabs' rules, to be included by a document that has booktabs and graphicx."""
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
    """Text as LaTeX shows it: its special characters, and the few Greek letters and signs of our tables."""
    return "".join(_LATEX.get(letter, letter) for letter in " ".join(text.split()))


_LATEX = {
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
    if not any(sheet.groups):
        return texts
    return [sheet.grouped_by if group is None else _escape_markdown(group), *texts]


def _is_number_column(sheet: Sheet, number: int) -> bool:
    return any(row[number].number for row in sheet.rows)
