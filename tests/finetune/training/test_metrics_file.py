"""`metrics.csv` is appended to, and holds the same rows however often it is written, cut or resumed."""

import csv
import errno
import io
import os
import random
from pathlib import Path
from typing import Any

import pytest

from istar.finetune.training.history import MetricsFile

NAMES = ("train/loss", "val/accuracy", "=f1", "geometry/layer_1/isoscore")


def expected_text(rows: list[dict[str, Any]]) -> str:
    """Return the file with these rows, written at once."""
    columns = list(dict.fromkeys(["epoch", "step", *(name for row in rows for name in row)]))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writerow({name: f"'{name}" if name.startswith("=") else name for name in columns})
    writer.writerows({"epoch": 0, **row} for row in rows)
    return text.getvalue()


@pytest.mark.parametrize("seed", range(20))
def test_the_file_of_a_resumed_run_has_every_row_once(tmp_path: Path, seed: int) -> None:
    """Rows are logged, written and lost in a random order; a resumed run logs the rows after its checkpoint again."""
    generator = random.Random(seed)
    rows = [
        {"step": step, **{name: generator.random() for name in generator.sample(NAMES[: 1 + step // 10], 1)}}
        for step in range(40)
    ]
    file, checkpoint, position = MetricsFile(tmp_path / "metrics.csv"), None, 0
    next_row = 0
    while next_row < len(rows):
        row = dict(rows[next_row])
        file.log_metrics({name: value for name, value in row.items() if name != "step"}, step=row["step"])
        next_row += 1
        match generator.randrange(5):
            case 0:
                file.write()
                assert list(file.read_rows()) == [{"epoch": 0.0, **row} for row in rows[:next_row]]
            case 1:
                checkpoint, position = file.state_dict(), next_row
            case 2 if generator.random() < 0.5:
                file = MetricsFile(tmp_path / "metrics.csv")
                next_row = 0
                if checkpoint is not None:
                    file.load_state_dict(checkpoint)
                    next_row = position
    assert [{"epoch": 0.0, **row} for row in rows] == list(file.read_rows())
    assert (tmp_path / "metrics.csv").read_text() == expected_text(rows)


def test_rows_are_appended_to_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    file = MetricsFile(path)
    inodes = []
    for step in range(6):
        file.log_metrics({"loss": 0.5, **({"accuracy": 0.1} if step > 2 else {})}, step)
        file.write()
        inodes.append(path.stat().st_ino)
    assert len(set(inodes[:3])) == len(set(inodes[3:])) == 1
    assert inodes[2] != inodes[3]
    assert path.read_text().splitlines()[:2] == ["epoch,step,loss,accuracy", "0,0,0.5,"]


def test_a_checkpoint_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.csv")
    for step in range(1000):
        file.log_metrics({"loss": 0.5}, step)
    assert file.state_dict() == {"rows": 1000}


def test_a_full_disk_leaves_no_half_of_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = MetricsFile(tmp_path / "metrics.csv")
    file.log_metrics({"loss": 1.5}, 1)
    file.write()
    file.log_metrics({"loss": 2.5}, 2)

    def fail(descriptor: int) -> None:
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match=r"No space left on device: '.*metrics\.csv'"):
            file.write()
    file.log_metrics({"loss": 3.5}, 3)
    file.write()
    assert (tmp_path / "metrics.csv").read_text() == "epoch,step,loss\n0,1,1.5\n0,2,2.5\n0,3,3.5\n"


@pytest.mark.parametrize("content", [None, "epoch,step,loss\n0,1,1.5\n"])
def test_a_damaged_file_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | None) -> None:
    if content is not None:
        (tmp_path / "metrics.csv").write_text(content)
    file = MetricsFile(tmp_path / "metrics.csv")
    file.load_state_dict({"rows": 3})
    assert ("lacks 2 rows" if content else "lacks the rows before the checkpoint") in caplog.text
    file.log_metrics({"loss": 4.5}, 4)
    file.write()
    assert (tmp_path / "metrics.csv").read_text() == (content or "epoch,step,loss\n") + "0,4,4.5\n"
