"""Writing files so that a reader finds the old one or the new one, never half of one."""

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from istar.errors import UserError, shorten


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A binary file that takes the place of `path` when the block ends well, and is removed when it does not.

    It lies in the same folder (which is made if absent) until it and its name are on the disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with draft.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        # The operating system names the draft, which nobody knows, or for a full disk no file at all.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        draft.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file whole or not at all."""
    with atomic_write(path) as file:
        file.write(text.encode())


def remove_drafts(folder: Path) -> None:
    """Remove what a process that was killed while writing left behind in a folder and those in it."""
    for path in folder.rglob(".*"):
        if _DRAFT.fullmatch(path.name):
            path.unlink(missing_ok=True)


_DRAFT = re.compile(r"\..+\.[0-9a-f]{32}")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Let no other process write into a folder; the lock ends with the process, however that ends.

    Raises:
        UserError: if another process holds it after some seconds, or its place cannot be written.
    """
    lock = FileLock(folder.parent / ".locks" / f"{folder.name}.lock", timeout=_LOCK_SECONDS)
    try:
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise UserError(
            f"{folder} is being written by another process; wait for it, the same command then finds its result"
        ) from error
    except OSError as error:
        raise UserError(f"run.root={folder.parent} cannot be written: {shorten(error)}") from error
    try:
        yield
    finally:
        lock.release()


_LOCK_SECONDS = 10.0
"""Long enough for a process that is just being stopped, as after a requeue."""
