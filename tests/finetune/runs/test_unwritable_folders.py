"""Runs whose folders cannot be written fail with one line and resume exactly."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from istar.finetune.runs.run import run
from istar.finetune.training.checkpoints import AtomicCheckpointIO
from tests.finetune.runs.faults import EPOCHS, Build, assert_whole, only_folder, refused_in_one_line
from tests.outcomes import assert_same
from tests.permissions import ignores_permissions


@pytest.mark.skipif(ignores_permissions(), reason="root may write everywhere")
def test_a_root_that_cannot_be_written(small: Build, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir(mode=0o500)
    message = refused_in_one_line(small())
    assert "run.root" in message
    assert "cannot be written" in message


@pytest.mark.parametrize(("owner", "name"), [(Path, "mkdir"), (os, "open")], ids=["folder", "lock"])
def test_a_root_that_forbids_writing(small: Build, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    config = small()
    original_function = getattr(owner, name)

    def refuse(path: Any, *arguments: Any, **keywords: Any) -> Any:
        if str(path).startswith(config.run.root):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return original_function(path, *arguments, **keywords)

    monkeypatch.setattr(owner, name, refuse)
    message = refused_in_one_line(config)
    assert f"run.root={config.run.root} cannot be written" in message
    assert "Permission denied" in message


def test_a_root_that_is_a_file(small: Build, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("mine")
    message = refused_in_one_line(small())
    assert "run.root" in message
    assert (tmp_path / "runs").read_text() == "mine"


def forbid_drafts(monkeypatch: pytest.MonkeyPatch, name: str, after: int) -> Callable[[], None]:
    """Refuse to create drafts of files whose name matches a pattern, after the first `after`; returns the undo."""
    original_open, count = Path.open, 0

    def refuse(self: Path, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        nonlocal count
        if "x" in mode and re.fullmatch(rf"\.{name}\.[0-9a-f]{{32}}", self.name):
            count += 1
            if count > after:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return original_open(self, mode, *arguments, **keywords)

    monkeypatch.setattr(Path, "open", refuse)
    return lambda: monkeypatch.setattr(Path, "open", original_open)


@pytest.mark.parametrize(
    ("name", "after"),
    [("manifest.json", 0), (r"step-\d+.ckpt", 3), ("geometry.json", 0)],
)  # fmt: skip
def test_a_folder_that_cannot_be_written_any_more(
    small: Build, undisturbed_run: Path, monkeypatch: pytest.MonkeyPatch, name: str, after: int
) -> None:
    config = small(*EPOCHS)
    allow_drafts = forbid_drafts(monkeypatch, name, after)
    message = refused_in_one_line(config)
    allow_drafts()
    folder = only_folder(config)
    assert "Permission denied" in message
    assert re.search(name, message)
    assert not re.search("[0-9a-f]{32}", message)
    assert_whole(folder)
    run(config)
    assert_same(folder, undisturbed_run)


@pytest.mark.skipif(ignores_permissions(), reason="root may write everywhere")
def test_a_folder_that_loses_its_permissions(
    small: Build, undisturbed_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(*EPOCHS)
    original_save, locked_folders = AtomicCheckpointIO.save_checkpoint, []

    def save_and_lock(self: Any, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        original_save(self, checkpoint, path)
        Path(path).parent.chmod(0o500)
        locked_folders.append(Path(path).parent)

    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", save_and_lock)
    message = refused_in_one_line(config)
    locked_folders[0].chmod(0o700)
    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", original_save)
    assert "Permission denied" in message
    run(config)
    assert_same(only_folder(config), undisturbed_run)
