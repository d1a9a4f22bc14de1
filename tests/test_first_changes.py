"""The changes that docs/first_changes.md walks through touch the files that CONTRIBUTING.md lists, and work."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.waiting import SECONDS

REPOSITORY = Path(__file__).resolve().parents[1]
ROW_BY_SECTION = {
    "Add a task": "task",
    "Add a penalty": "penalty",
    "Add a measure": "measure",
    "Add a measure of `istar measure`": "measure of `istar measure`",
}
"""Row of the table in CONTRIBUTING.md by section of the page; a later section continues the earlier ones."""


class Block(NamedTuple):
    """A code block of the page: a new file, the new end of a file, or a difference."""

    language: str
    file: str
    code: str


def read_section(title: str) -> str:
    page = (REPOSITORY / "docs" / "first_changes.md").read_text(encoding="utf-8")
    return page.split(f"\n## {title}\n")[1].split("\n## ")[0]


def read_blocks(section: str) -> list[Block]:
    return [Block(*groups) for groups in re.findall(r'^```(\w+) title="([^"\n]+)"\n(.*?)^```$', section, re.M | re.S)]


def apply(block: Block, repository: Path) -> None:
    path = repository / block.file
    if block.language != "diff":
        start = path.read_text(encoding="utf-8").rstrip() + "\n\n\n" if path.exists() else ""
        path.write_text(start + block.code, encoding="utf-8")
        return
    lines = block.code.splitlines(keepends=True)
    before, after = ("\n" + "".join(line[1:] for line in lines if line[0] != sign) for sign in "+-")
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{block.file} has not once:{before}"
    path.write_text(text.replace(before, after), encoding="utf-8")


@pytest.mark.parametrize(("title", "row"), ROW_BY_SECTION.items())
def test_contributing_lists_the_files_of_a_change(title: str, row: str) -> None:
    table = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    [cell] = re.findall(rf"^\| {re.escape(row)} \| (.*) \|$", table, re.M)
    touched = {block.file for block in read_blocks(read_section(title)) if not block.file.startswith("tests/")}
    listed = set(re.findall(r"`((?:istar|docs)/[\w./]+)`", cell))
    folders = {name for name in listed if name.endswith("/")}
    assert {file for file in touched if not file.startswith(tuple(folders) or "-")} == listed - folders
    assert all(any(file.startswith(folder) for file in touched) for folder in folders)


@pytest.mark.slow
def test_the_walk_works(tmp_path: Path) -> None:
    copy = tmp_path / "repository"
    for folder in ("istar", "hydra_plugins", "conf", "sweep", "tests", "docs", "benchmarks"):
        shutil.copytree(REPOSITORY / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
    shutil.copy(REPOSITORY / "pyproject.toml", copy)
    tests: list[str] = []
    for title in ROW_BY_SECTION:
        section = read_section(title)
        for block in read_blocks(section):
            apply(block, copy)
        tests += " ".join(re.findall(r"^pytest (.*)$", section, re.M)).split()
    assert len(tests) >= len(ROW_BY_SECTION)
    for arguments in (["ruff", "check"], ["ruff", "format", "--check"], ["pytest", "-q", *tests]):
        command = [sys.executable, "-m", *arguments]
        completed = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=SECONDS)
        assert completed.returncode == 0, completed.stdout + completed.stderr
