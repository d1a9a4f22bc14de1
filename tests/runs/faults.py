"""Helpers for tests of failures: ways to interrupt a run, and checks of what it leaves."""

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

from istar import files, results
from istar.config import Config
from istar.errors import UserError
from istar.runs.run import run
from istar.training import FineTuner
from istar.training.checkpoints import read_checkpoint
from tests.outcomes import only_run

Build = Callable[..., Config]
FOUR_STEPS = ("reg=none", "task.limit_train=32", "data.batch_size=8", "trainer.checkpoint_every_n_steps=1")
EPOCHS = (*FOUR_STEPS, "trainer.max_epochs=2")
DRAFT = re.compile(r"\..*\.[0-9a-f]{32}")
WANDB = (*FOUR_STEPS, "logger=wandb")


class Broken(BaseException):
    """Passes by whatever handles exceptions, as a kill does."""


def only_folder(config: Config) -> Path:
    return only_run(Path(config.run.root))


def metrics_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def in_metrics(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(int(row["step"]), float(row[name])) for row in metrics_of(folder) if row.get(name)]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = (record for record in caplog.records if record.name.startswith("istar"))
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


def break_at(monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException) -> Callable[[], None]:
    """Let the count-th training step raise; the function given back mends it."""
    original, calls = FineTuner.training_step, 0

    def breaks(self: FineTuner, batch: Any, batch_idx: int) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            raise error
        return original(self, batch, batch_idx)

    monkeypatch.setattr(FineTuner, "training_step", breaks)
    return lambda: monkeypatch.setattr(FineTuner, "training_step", original)


def assert_whole(folder: Path) -> None:
    """Nothing in a run's folder is half written."""
    names = [path for path in folder.rglob("*") if DRAFT.fullmatch(path.name)]
    assert names == []
    for path in (folder / "checkpoints").glob("*"):
        assert path.suffix == ".ckpt"
        assert read_checkpoint(path)["state_dict"]
    if (folder / results.RESULT).exists():
        results.read(folder)
    if (folder / "metrics.csv").exists():
        assert all(None not in row and None not in row.values() for row in metrics_of(folder))
    if (folder / "model").exists():
        assert load_file(folder / "model" / "model.safetensors")


def refused_in_one_line(config: Config) -> str:
    with pytest.raises(UserError) as caught:
        run(config)
    message = str(caught.value)
    assert "\n" not in message
    assert "None" not in message
    assert len(message) < 1000
    return message


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, name: str, after: int = 0) -> Iterator[None]:
    """Drafts of a file, named by a pattern, cannot be brought to the disk once `after` of them have been."""
    original, count = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal count
        if re.fullmatch(rf"\.{name}\.[0-9a-f]{{32}}", Path(f"/proc/self/fd/{descriptor}").readlink().name):
            count += 1
            if count > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", fsync)
        yield
