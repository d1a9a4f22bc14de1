"""Writes measurements to files, as the commands do, for the tests that read them."""

from pathlib import Path

from istar.geometry.collect import measures_file
from istar.geometry.collect.measures_file import Measurements


def write_measures(measurements: Measurements, folder: Path) -> None:
    """Write `measures.json` and `measures.csv` to a folder, which is created if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in measures_file.file_contents(measurements).items():
        (folder / name).write_text(text, encoding="utf-8")
