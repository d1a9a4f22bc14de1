"""Compressed copies of archives that torch has written."""

import zipfile
from pathlib import Path


def compress_archive(source: Path, destination: Path) -> None:
    """Write a copy of a zip archive in which all members are compressed."""
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(destination, "w", zipfile.ZIP_DEFLATED) as copy:
        for member in archive.infolist():
            copy.writestr(member.filename, archive.read(member))
