"""`metrics.csv` has the same rows, however often it is written, cut or resumed."""

import csv
import errno
import io
import os
import random
from pathlib import Path
from typing import Any

import pytest

from istar.finetune.training import history
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
                assert file.rows == [{"epoch": 0.0, **row} for row in rows[:next_row]]
            case 1:
                checkpoint, position = file.state_dict(), next_row
            case 2 if generator.random() < 0.5:
                file = MetricsFile(tmp_path / "metrics.csv")
                next_row = 0
                if checkpoint is not None:
                    file.load_state_dict(checkpoint)
                    next_row = position
    file.write()
    assert [{"epoch": 0.0, **row} for row in rows] == file.rows
    assert (tmp_path / "metrics.csv").read_text() == expected_text(rows)


def test_a_file_that_takes_long_to_write_is_written_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, file = 0.0, MetricsFile(tmp_path / "metrics.csv")

    def write_slowly(path: Path, text: str) -> None:
        nonlocal seconds
        seconds += 2.0
        path.write_text(text)

    monkeypatch.setattr(history, "write_text", write_slowly)
    monkeypatch.setattr(history.time, "monotonic", lambda: seconds)
    for _ in range(1000):
        file.log_metrics({"loss": 0.5}, step=int(seconds))
        file.save()
        seconds += 1
    # A write at the beginning, and one after each 200 seconds.
    assert seconds == 1000 + 2 * 5


def test_a_checkpoint_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.csv")
    for step in range(1000):
        file.log_metrics({"loss": 0.5}, step)
    assert file.state_dict() == {"rows": 1000}


def test_a_full_disk_keeps_the_file_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = MetricsFile(tmp_path / "metrics.csv")
    file.log_metrics({"loss": 1.5}, 1)
    file.write()
    file.log_metrics({"loss": 2.5}, 2)

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space left on device"):
            file.write()
    assert (tmp_path / "metrics.csv").read_text() == "epoch,step,loss\n0,1,1.5\n"
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
