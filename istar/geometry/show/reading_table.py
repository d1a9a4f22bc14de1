"""The table of the texts that were measured: how much of each was read, and how long that took."""

import pandas as pd

from istar.drawing.page_tables import Entry, Sheet, number_entry
from istar.geometry.collect.measures_file import Measurements

_COLUMNS = {
    "documents": "documents",
    "sentences": "sentences",
    "characters": "characters",
    "bytes": "bytes",
    "bytes_per_document": "bytes per\ndocument",
    "tokens": "tokens",
    "seconds": "seconds",
    "forward_seconds": "seconds of\nforward passes",
}
"""Headers of the columns, by name."""


def build_reading_sheet(measured: Measurements) -> Sheet:
    """Return a table with how much of each text was read and the time it took, one row per text.

    It has no rows if the measures are of an earlier version, which did not record this.
    """
    frame = pd.DataFrame(
        [{"text": text, **reading} for text, reading in measured.readings.items()],
        columns=["text", *(name for name in _COLUMNS if name != "bytes_per_document")],
    )
    frame.insert(5, "bytes_per_document", frame["bytes"].astype(float) / frame["documents"].astype(float))
    rows = [
        [Entry(str(text)), *(number_entry(float(number)) for number in numbers)]
        for text, *numbers in frame.itertuples(index=False)
    ]
    return Sheet(
        "texts",
        "Texts and time",
        "Each text as far as it was read: documents, their sentences by a rule of thumb (a sentence ends at a line "
        "break, or at a full stop or another end mark before a new beginning), their characters and their bytes in "
        "UTF-8, the tokens that the measures include, and the time. With a maximum number of tokens, the last document "
        "may be read in part and counts as a whole.",
        ("text", *_COLUMNS.values()),
        {"": rows},
        frame,
        tuple(_describe_total_time(measured)),
    )


def _describe_total_time(measured: Measurements) -> list[str]:
    """Return a sentence on how long everything took and on which device, or no sentence if the time is unknown."""
    if measured.seconds is None:
        return []
    process_note = f", in {measured.processes} processes, over which the forward passes are summed" * (
        measured.processes > 1
    )
    return [
        f"Everything took {measured.seconds:,.1f} seconds on {measured.model['device']}{process_note}: also "
        "the loading of the model, its embedding matrices and the computation of the measures, but not the drawing of "
        "this page."
    ]
