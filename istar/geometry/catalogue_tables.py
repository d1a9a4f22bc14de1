"""Terminal tables of all measures, for `istar measure --list`."""

from rich.table import Table
from rich.text import Text

from istar.measures import catalogue_rows
from istar.measures.catalogue import Subject

_SUBJECTS: dict[Subject, str] = {
    "layers": "hidden states of each layer",
    "matrices": "embedding matrices",
    "final_norm": "final normalization",
}
"""Titles of the tables, by what their measures describe."""
_COLUMNS = {
    "name": "name",
    "formula": "what it is",
    "range": "range",
    "convention": "convention",
    "cost": "cost",
    "blind_to": "blind to",
}
"""Headers of the columns, by column of the catalogue."""


def make_tables() -> list[Table]:
    """Return the terminal tables of all measures: one for each subject, with a row for each measure."""
    tables = []
    for subject, title in _SUBJECTS.items():
        table = Table(title=title, title_justify="left", show_lines=True)
        for header in _COLUMNS.values():
            table.add_column(header, overflow="fold")
        for row in catalogue_rows(subject, list(_COLUMNS)):
            # Text, because rich would read an interval such as [0, 1] as markup.
            table.add_row(*map(Text, row.values()))
        tables.append(table)
    return tables
