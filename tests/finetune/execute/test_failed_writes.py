"""Runs that cannot write fail with one line, leave no half-written file and resume exactly."""

import errno
import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from istar.files import writing
from istar.finetune.execute.run import run
from istar.finetune.training.checkpoints import AtomicCheckpointIO
from istar.models import pretrained
from istar.runs.record import read_result
from tests.finetune.execute.faults import (
    EPOCHS,
    FOUR_STEPS,
    Build,
    assert_whole,
    full_disk,
    only_folder,
    refused_in_one_line,
)
from tests.outcomes import assert_same


def test_drafts_are_removed_wherever_they_are_and_nothing_else(tmp_path: Path) -> None:
    draft = f".RTE.tsv.{'0f' * 16}"
    for name in ("RTE.tsv", draft, ".notes.txt", f"x{draft}"):
        for folder in (tmp_path, tmp_path / "submission"):
            folder.mkdir(exist_ok=True)
            (folder / name).write_text("mine")
    writing.remove_temporary_files(tmp_path)
    expected_names = [".notes.txt", "RTE.tsv", f"x{draft}"]
    assert sorted(path.name for path in tmp_path.glob("*.*")) == expected_names
    assert sorted(path.name for path in (tmp_path / "submission").iterdir()) == expected_names


@contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """Make the operating system refuse to write more than `size` bytes into a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def limit_writes(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, size: int, after: int) -> Callable[[], None]:
    """Let a function write at most `size` bytes into a file after its first `after` calls; returns the undo."""
    original_function, calls = getattr(owner, name), 0

    def limited_function(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls <= after:
            return original_function(*arguments, **keywords)
        with limit_file_size(size):
            return original_function(*arguments, **keywords)

    monkeypatch.setattr(owner, name, limited_function)
    return lambda: monkeypatch.setattr(owner, name, original_function)


@pytest.mark.parametrize(
    ("size", "after", "last_checkpoint"),
    [
        pytest.param(0, 0, None, marks=pytest.mark.slow),
        (100_000, 3, "step-3.ckpt"),
        pytest.param(1000, 5, "step-4.ckpt", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_that_the_disk_does_not_take(
    small: Build, undisturbed_run: Path, monkeypatch: pytest.MonkeyPatch, size: int, after: int,
    last_checkpoint: str | None,
) -> None:  # fmt: skip
    """The fourth checkpoint has the best weights, and the fifth has the state after the first epoch."""
    config = small(*EPOCHS)
    restore_disk = limit_writes(monkeypatch, AtomicCheckpointIO, "save_checkpoint", size, after)
    message = refused_in_one_line(config)
    restore_disk()
    folder = only_folder(config)
    assert f"the checkpoint {folder / 'checkpoints'}" in message
    assert "cannot be written" in message
    assert "File too large" in message
    assert (
        f"the last good state is {folder / 'checkpoints' / last_checkpoint}" in message
        if last_checkpoint
        else "no checkpoint" in message
    )
    assert "same command" in message
    assert_whole(folder)
    assert read_result(folder).status == "failed"
    run(config)
    assert_same(folder, undisturbed_run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "after"),
    [(r"best-epoch-\d+\.ckpt", 0), (r"metrics\.csv", 5), (r"predictions\.jsonl", 0), (r"result\.json", 0)],
)
def test_full_disk(small: Build, undisturbed_run: Path, monkeypatch: pytest.MonkeyPatch, name: str, after: int) -> None:
    config = small(*EPOCHS)
    with full_disk(monkeypatch, name, after):
        message = refused_in_one_line(config)
    folder = only_folder(config)
    assert re.search(name, message)
    assert "No space left on device" in message
    assert_whole(folder)
    run(config)
    assert_same(folder, undisturbed_run)


def test_a_model_that_the_disk_does_not_take(small: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(*FOUR_STEPS)
    restore_disk = limit_writes(monkeypatch, pretrained, "save", 10_000, 0)
    message = refused_in_one_line(config)
    restore_disk()
    folder = only_folder(config)
    assert "File too large" in message
    assert "the model cannot be written" in message
    assert "the last good state is" in message
    assert not (folder / "model").exists()
    assert_whole(folder)


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
    [
        ("manifest.json", 0),
        pytest.param(r"step-\d+.ckpt", 3, marks=pytest.mark.slow),
        pytest.param("geometry.json", 0, marks=pytest.mark.slow),
    ],
)
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
