"""The page for users of other scripts names only keys that exist."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from istar.finetune.config import Config

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coming_from.md"
OURS = [row.split(" | ")[-1] for row in PAGE.read_text().splitlines() if row.startswith("| ")][2:]
KEYS = [
    code
    for cell in OURS
    for code in re.findall(r"`([^`]+)`", cell)
    if re.fullmatch(r"[\w.@]+=\S+( [\w.@]+=\S+)*", code) and "..." not in code and "<" not in code
]


@pytest.mark.parametrize("code", KEYS)
def test_the_overrides_compose(code: str, composed: Callable[..., Config]) -> None:
    composed(*code.split())
