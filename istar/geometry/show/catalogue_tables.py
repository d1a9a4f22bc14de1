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
_ATTRIBUTES = {
    "formula": "what it is",
    "range": "range",
    "convention": "convention",
    "cost": "cost",
    "blind_to": "blind to",
}
"""Titles of the attributes of a measure, by column of the catalogue."""


def make_tables() -> list[Table]:
    """Return the terminal tables of all measures: one for each subject, with a row for each measure.

    A row has the name, which can be copied from one line, and below one another what there is to say about the measure.
    """
    tables = []
    for subject, title in _SUBJECTS.items():
        table = Table(title=title, title_justify="left", show_lines=True)
        table.add_column("name", no_wrap=True)
        table.add_column("description", overflow="fold")
        for row in catalogue_rows(subject, ["name", *_ATTRIBUTES]):
            # Text, because rich would read an interval such as [0, 1] as markup.
            lines = [
                Text.assemble((f"{title}: ", "bold"), row[name]) for name, title in _ATTRIBUTES.items() if row[name]
            ]
            table.add_row(Text(row["name"]), Text("\n").join(lines))
        tables.append(table)
    return tables
