"""`result.json`: how it is written and read."""

import json
import os
import stat
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from istar.errors import UserError
from istar.files import writing
from istar.runs.key import RunKey
from istar.runs.record import RESULT, RunRecord, read_result, write_predictions, write_result

RECORD = RunRecord(
    name="demo-tiny-none-0123456789ab", status="finished",
    config={"task": {"name": "demo"}, "model": {"name": "tiny"}, "reg": {"name": "none"},
            "trainer": {"max_epochs": 2}, "seed": 1},
    key=RunKey({"task": {"name": "demo"}, "model": {}, "reg": {"name": "none"}, "seed": 1}, "data", "tiny@main"),
    headline={"metric": "accuracy", "value": 0.75, "epoch": 2}, metrics={"accuracy": 0.75, "f1": 1 / 3},
    isotropy={"before": {"0": 0.1, "union": 0.2}, "after": {"0": 0.3, "union": 0.4}, "points": 12},
    timing={"total": 1.5, "shrinkage": []},
)  # fmt: skip


# ---- writing


def test_round_trip(tmp_path: Path) -> None:
    write_result(RECORD, tmp_path / "new" / "folder")
    assert read_result(tmp_path / "new" / "folder") == RECORD
    text = (tmp_path / "new" / "folder" / RESULT).read_text()
    assert json.loads(text) == asdict(RECORD)
    assert text.startswith('{\n  "name": "demo-tiny-none-0123456789ab",\n')
    assert text.endswith("}\n")
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == [RESULT]


def test_text_is_utf8_with_plain_line_ends(tmp_path: Path) -> None:
    writing.write_text(tmp_path / "a.txt", "Zürich\r\nλ\n")
    assert (tmp_path / "a.txt").read_bytes() == "Zürich\r\nλ\n".encode()


@pytest.mark.parametrize("step", ["serialize", "fsync", "replace"])
def test_a_failing_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    write_result(RECORD, tmp_path)

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*{"fsync": (os, "fsync"), "replace": (Path, "replace")}.get(step, (os, "unused")), fail, False)
        metrics: Any = {"accuracy": object() if step == "serialize" else 0.5}
        with pytest.raises((OSError, TypeError), match=r"No space|not JSON serializable"):
            write_result(replace(RECORD, status="failed", metrics=metrics), tmp_path)
    assert read_result(tmp_path) == RECORD
    assert [path.name for path in tmp_path.iterdir()] == [RESULT]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_file_mode_follows_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    previous_umask = os.umask(umask)
    try:
        write_result(RECORD, tmp_path)
    finally:
        os.umask(previous_umask)
    assert stat.S_IMODE((tmp_path / RESULT).stat().st_mode) == mode


def test_predictions_are_json_lines(tmp_path: Path) -> None:
    rows = [{"id": 0, "prediction": "Zürich\n\u2028x"}, {"id": 1, "prediction": 0.1 + 0.2}]
    write_predictions(tmp_path / "p.jsonl", rows)
    lines = (tmp_path / "p.jsonl").read_text(encoding="utf-8").split("\n")
    assert lines.pop() == ""
    assert [json.loads(line) for line in lines] == rows
    assert "Zürich" in lines[0]


# ---- reading


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no result\.json") as error:
        read_result(tmp_path / "nowhere")
    assert "\n" not in str(error.value)
