"""Strings from data are shown as they are: square brackets and colons are not rich's markup."""

import io
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from istar.cli.main import main
from istar.drawing.terminal import make_console
from istar.files.writing import write_text
from istar.finetune.sweeps import live_table
from tests.reports.synthetic import BASE, istar, record, save

TEXTS = ("cannot read [/data/x]", "[cpu] out of memory", "[enforce fail at alloc.cpp:1]", "[bold]x[/bold] :warning:")
PACKAGE = Path(__file__).resolve().parents[2] / "istar"


@pytest.mark.parametrize("text", TEXTS)
def test_every_way_to_print(text: str) -> None:
    file = io.StringIO()
    console = make_console(file=file, width=200)
    table = Table(text, title=text, caption=text)
    table.add_row(text)
    console.print(table)
    console.print(text)
    console.out(text)
    assert file.getvalue().count(text) == 6


def test_results_and_power(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    for seed, text in enumerate(TEXTS):
        save(record("rte", "mine", BASE, seed, status="failed", changes={"error": text}), tmp_path)
        save(record(text, "[cpu]", BASE, seed), tmp_path)
        save(record(text, "[cpu]", istar(), seed), tmp_path)
    for folder in tmp_path.glob("rte-*"):
        content = (folder / "result.json").read_text()
        seed = int(re.findall(r'"seed": (\d)', content)[0])
        (folder / "result.json").write_text(content.replace("loss is NaN at step 7", TEXTS[seed]))
    assert main(["results", str(tmp_path)]) == 0
    assert main(["power", "--runs", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert all(f"failed\t{text}" in output for text in TEXTS)
    assert "[cpu]" in output


def test_watch(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    entries = [live_table.SweepEntry("run", (text,), text, "[cpu]", text, 1, text, text, "running") for text in TEXTS]
    state = live_table.SweepState("[/sweep]", "train.py -m", "runs", 1, entries=entries)
    write_text(tmp_path / "sweeps" / "a" / live_table.STATE_FILE, json.dumps(asdict(state)))
    assert main(["watch", str(tmp_path), "--once"]) == 0
    output = capsys.readouterr().out
    assert all(text in output for text in ("[/sweep]", *TEXTS))


def test_there_is_one_console() -> None:
    """Other consoles would read markup; so would the columns of progress bars, and `track`."""
    for path in [*PACKAGE.rglob("*.py"), *PACKAGE.parent.glob("hydra_plugins/*.py")]:
        text = path.read_text(encoding="utf-8")
        if path.name != "terminal.py":
            assert not re.search(r"(?<!class )\bConsole\(|from_markup|get_console|rich import print", text), path
        for column in re.findall(r"TextColumn\([^)]*\)", text):
            assert "markup=False" in column, path
        for description in re.findall(r"\btrack\(\w+, ([^,)]+)", text):
            assert description.startswith(('"', 'description="', "escape(")), path
