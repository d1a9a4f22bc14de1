"""The files that `logger=tensorboard` writes, read by TensorBoard's own reader."""

import csv
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from istar.errors import UserError
from istar.finetune.runs.run import run
from tests.finetune.runs.artifacts import Build, place


def test_tensorboard_has_what_metrics_csv_has(small: Build) -> None:
    config = small("logger=tensorboard", "trainer.max_epochs=2", "reg=istar")
    record = run(config)
    folder = place(config, record)
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    for row in csv.DictReader((folder / "metrics.csv").read_text().splitlines()):
        for name in row.keys() - {"epoch", "step"}:
            if row[name]:
                values = [event.value for event in events.Scalars(name) if event.step == int(row["step"])]
                assert values == [pytest.approx(float(row[name]), rel=1e-6)]
    # The table of hyperparameters has the scores of the best epoch.
    [best_accuracy] = events.Scalars("best/val/accuracy")
    assert best_accuracy.value == pytest.approx(record.headline["value"])
    # With another logger it is the same run.
    assert run(small("trainer.max_epochs=2", "reg=istar")) == record


def test_tensorboard_is_an_extra(small: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=r"logger=tensorboard needs tensorboard; pip install 'istar\[tensorboard\]'"):
        run(small("logger=tensorboard"))
