"""The files that `logger=tensorboard` writes, read by TensorBoard's own reader."""

import csv
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from istar.errors import UserError
from istar.finetune.execute.run import run
from tests.finetune.execute.artifacts import Build, folders_in, place


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


def test_several_loggers_of_lightning_at_once(small: Build) -> None:
    config = small("logger=tensorboard", "logger.also.CSVLogger.name=more", "logger.also.TensorBoardLogger={}")
    record = run(config)
    folder = place(config, record)
    with (folder / "more" / "version_0" / "metrics.csv").open() as file:
        [best] = [row["best/val/accuracy"] for row in csv.DictReader(file) if row["best/val/accuracy"]]
    assert float(best) == pytest.approx(record.headline["value"])
    assert "optim" in (folder / "more" / "version_0" / "hparams.yaml").read_text()
    events = EventAccumulator(str(folder / "lightning_logs" / "version_0"))
    events.Reload()
    [best_accuracy] = events.Scalars("best/val/accuracy")
    assert best_accuracy.value == pytest.approx(record.headline["value"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("logger.also.CsvLogger={}", r"logger\.also=CsvLogger is not known; did you mean CSVLogger"),
        ("logger.also.CSVLogger=x", r"logger\.also\.CSVLogger=x is not a mapping of arguments"),
        ("logger.also.CSVLogger.flush_logs_every_n_steps=x", r"CSVLogger\.flush_logs_every_n_steps=x .* type: int$"),
        ("logger.also.CSVLogger.name=[a]", r"CSVLogger\.name=\['a'\] is not of the expected type: str$"),
        ("logger.also.CSVLogger.folder=x", r"logger\.also\.CSVLogger: .*folder.* has the arguments"),
        ("logger.also.CometLogger={}", r"logger\.also\.CometLogger needs comet_ml; pip install comet_ml"),
        ("logger.also.NeptuneLogger={}", r"logger\.also=NeptuneLogger is not known"),
    ],
)
def test_a_logger_that_cannot_be_used_is_refused(small: Build, override: str, message: str) -> None:
    for value in ("x", "null", "3"):
        with pytest.raises(UserError, match=r"^logger\.also=.* is not a mapping, e\.g\. \{CSVLogger: \{\}\}$"):
            small(f"logger.also={value}")
    config = small()
    record = run(config)
    with pytest.raises(UserError, match=message):
        run(small(override, "run.overwrite=true"))
    assert folders_in(Path(config.run.root)) == [record.name]


def test_the_files_of_a_logger_of_lightning_may_be_elsewhere(small: Build, tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("CSVLogger", "TensorBoardLogger")}
    run(
        small(
            "logger.also.TensorBoardLogger.max_queue=5",
            *(f"logger.also.{name}.save_dir={folder}" for name, folder in folders.items()),
        )
    )
    for folder in folders.values():
        assert (folder / "lightning_logs" / "version_0" / "hparams.yaml").is_file()
