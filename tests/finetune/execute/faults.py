"""Helpers for tests of failures: ways to interrupt a run, and checks of the files that it leaves."""

import csv
import errno
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from istar.errors import UserError
from istar.files import writing
from istar.finetune.config import Config
from istar.finetune.execute.run import run
from istar.finetune.training.checkpoints import read_checkpoint
from istar.finetune.training.module import FineTuner
from istar.runs.record import RESULT, read_result
from tests.outcomes import only_run

Build = Callable[..., Config]
FOUR_STEPS = ("reg=none", "task.limit_train=32", "data.batch_size=8", "trainer.checkpoint_every_n_steps=1")
EPOCHS = (*FOUR_STEPS, "trainer.max_epochs=2", "run.geometry=true")
DRAFT = re.compile(r"\..*\.[0-9a-f]{32}")
WANDB = (*FOUR_STEPS, "logger=wandb")


class Broken(BaseException):
    """An error that `except Exception` does not catch, as a kill cannot be caught."""


def only_folder(config: Config) -> Path:
    """Return the folder of the only run below this config's root."""
    return only_run(Path(config.run.root))


def metrics_of(folder: Path) -> list[dict[str, str]]:
    """Return the rows of metrics.csv."""
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def in_metrics(folder: Path, name: str) -> list[tuple[int, float]]:
    """Return the step and the value of each row of metrics.csv that has a value in this column."""
    return [(int(row["step"]), float(row[name])) for row in metrics_of(folder) if row.get(name)]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings and errors that istar has logged."""
    istar_records = (record for record in caplog.records if record.name.startswith("istar"))
    return [record.getMessage() for record in istar_records if record.levelno >= logging.WARNING]


def break_at(monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException) -> Callable[[], None]:
    """Make the count-th training step raise an error; the returned function undoes this."""
    original_step, calls = FineTuner.training_step, 0

    def fail_at_count(self: FineTuner, batch: Any, batch_idx: int) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            raise error
        return original_step(self, batch, batch_idx)

    monkeypatch.setattr(FineTuner, "training_step", fail_at_count)
    return lambda: monkeypatch.setattr(FineTuner, "training_step", original_step)


def interrupt_and_resume(config: Config, patch: pytest.MonkeyPatch, owner: Any, name: str, counts: list[int]) -> None:
    """Stop a run at these calls of a function, counted from each start, and resume it each time."""
    original = getattr(owner, name)
    for count in counts:
        calls = 0

        def interrupt_at_count(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == count:  # noqa: B023
                raise Broken
            return original(*arguments, **options)

        with patch.context() as context:
            context.setattr(owner, name, interrupt_at_count)
            with pytest.raises(Broken):
                run(config)
    run(config)


def assert_whole(folder: Path) -> None:
    """Assert that no file in a run's folder is half written."""
    drafts = [path for path in folder.rglob("*") if DRAFT.fullmatch(path.name)]
    assert drafts == []
    for path in (folder / "checkpoints").glob("*"):
        assert path.suffix == ".ckpt"
        assert read_checkpoint(path)["state_dict"]
    if (folder / RESULT).exists():
        read_result(folder)
    if (folder / "metrics.csv").exists():
        assert all(None not in row and None not in row.values() for row in metrics_of(folder))
    if (folder / "model").exists():
        assert load_file(folder / "model" / "model.safetensors")


def refused_in_one_line(config: Config) -> str:
    """Assert that the run is refused with a one-line message, and return the message."""
    with pytest.raises(UserError) as error:
        run(config)
    message = str(error.value)
    assert "\n" not in message
    assert "None" not in message
    assert len(message) < 1000
    return message


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, name: str, after: int = 0) -> Iterator[None]:
    """Make the disk seem full for files whose name matches a pattern, after `after` of them have been written."""
    original_fsync, count = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal count
        # A file that is replaced is written under another name; metrics.csv is also appended to.
        if re.fullmatch(rf"\.{name}\.[0-9a-f]{{32}}|{name}", Path(f"/proc/self/fd/{descriptor}").readlink().name):
            count += 1
            if count > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original_fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(writing.os, "fsync", fsync)
        yield
