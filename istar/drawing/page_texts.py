"""Titles, captions and explanations of pages, which are data: the file `texts.toml` of a package."""

import tomllib
from importlib.resources import files
from typing import Any


def read_page_texts(package: str) -> dict[str, Any]:
    """Return the texts of a package's page: tables of titles and captions by the names of its figures and tables."""
    return tomllib.loads(files(package).joinpath("texts.toml").read_text(encoding="utf-8"))
