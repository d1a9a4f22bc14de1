"""Functions that write files and folders atomically, and that lock folders."""

import errno
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from istar.errors import LockedError, UserError, shorten


def cache_folder(cache_dir: str | None) -> Path:
    """Return the folder of cached data: `cache_dir`, or $ISTAR_CACHE, or ~/.cache/istar."""
    return Path(cache_dir or os.environ.get("ISTAR_CACHE", "~/.cache/istar")).expanduser()


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that replaces `path` atomically when the `with` block ends without an exception.

    The block writes to a temporary file in the same folder, which is created if needed. The temporary file is then
    flushed to disk and renamed to `path`. After an exception, it is removed and `path` is unchanged.

    Raises:
        OSError: if the file cannot be written, or if `path` is a pipe or a device; the error names `path`.
    """
    refuse_special_file(path)  # a rename would remove it
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary_path = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary_path.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary_path.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        # The original error names the temporary file or, if the disk is full, no file.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        temporary_path.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` when the `with` block ends without an exception.

    If another process has created `path` in the meantime, its folder is kept. After an exception, the temporary folder
    is removed.

    Raises:
        OSError: if the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary_folder = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    temporary_folder.mkdir()
    try:
        yield temporary_folder
        try:
            temporary_folder.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(temporary_folder, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    with atomic_write(path) as file:
        file.write(text.encode())


def to_json(contents: Any) -> str:
    """Return nested dictionaries and lists as JSON, with null for numbers that are not finite."""
    contents = replace_nested(contents, lambda value: isinstance(value, float) and not math.isfinite(value), None)
    return json.dumps(contents, indent=1, allow_nan=False)


def replace_nested(value: Any, is_replaced: Callable[[Any], bool], substitute: Any) -> Any:
    """Return a copy of nested dictionaries and lists, with `substitute` for each value that `is_replaced` accepts."""
    if isinstance(value, dict):
        return {key: replace_nested(item, is_replaced, substitute) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nested(item, is_replaced, substitute) for item in value]
    return substitute if is_replaced(value) else value


def to_csv(frame: Any, separator: str = ",") -> str:
    """Return a data frame as CSV without its index, with all texts escaped by `escape_cell`."""
    escaped_frame = frame.rename(columns=escape_cell)
    for position, dtype in enumerate(escaped_frame.dtypes):
        if dtype.kind == "O":
            escaped_frame.isetitem(position, escaped_frame.iloc[:, position].map(escape_cell))
    text: str = escaped_frame.to_csv(index=False, sep=separator)
    return text


def escape_cell(value: Any) -> Any:
    """Return a value for a CSV cell; a text that spreadsheets would execute as a formula gets an apostrophe.

    Numbers stay as they are, even as texts.

    >>> escape_cell("=HYPERLINK(A1)"), escape_cell("-1.5"), escape_cell(-1.5)
    ("'=HYPERLINK(A1)", '-1.5', -1.5)
    """
    if not isinstance(value, str) or not value.startswith(_FORMULA_STARTS) or value == "-":
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def unescape_cell(value: Any) -> Any:
    """Undo `escape_cell`.

    >>> unescape_cell("'@model"), unescape_cell("'tis")
    ('@model', "'tis")
    """
    is_escaped = isinstance(value, str) and value[:1] == "'" and value[1:].startswith(_FORMULA_STARTS)
    return value[1:] if is_escaped else value


_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""Characters with which a formula begins in spreadsheets."""


def refuse_special_file(path: Path) -> None:
    """Raise an OSError for a pipe, socket or device: reading it may never end, and replacing it would remove it."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "is a pipe or a device; expected a file", str(path))


def remove_temporary_files(folder: Path) -> None:
    """Remove the temporary files that killed processes left in a folder and its subfolders."""
    for path in folder.rglob(".*"):
        if is_temporary(path):
            path.unlink(missing_ok=True)


def is_temporary(path: Path) -> bool:
    """Return whether this is an unfinished file of `atomic_write`, perhaps left by a killed process."""
    return _TEMPORARY_NAME.fullmatch(path.name) is not None and not path.is_dir()


_TEMPORARY_NAME = re.compile(r"\..+\.[0-9a-f]{32}")


def _sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a rename survives a crash of the machine, if the file system can."""
    file_descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file_descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(file_descriptor)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder during the `with` block, so that no other process that uses the lock writes to it.

    The lock is also released when the process ends for any reason.

    Raises:
        LockedError: if another process keeps the lock for 10 seconds.
        UserError: if the lock file cannot be written.
    """
    path = _lock_path(folder)
    lock = FileLock(path, timeout=_LOCK_TIMEOUT_SECONDS)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise LockedError(
            f"{folder} is being written by another process; wait for it, the same command then finds its result"
        ) from error
    except OSError as error:
        raise UserError(f"run.root={folder.parent} cannot be written: {shorten(error)}") from error
    try:
        yield
    finally:
        lock.release()


def is_locked(folder: Path) -> bool:
    """Return whether a process has locked a folder at the moment.

    A lock file that cannot be opened counts as not locked, because writing to the folder will report the reason.
    """
    path = _lock_path(folder)
    if not path.exists():
        return False
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:
        return False


def _lock_path(folder: Path) -> Path:
    """Return the path of a folder's lock file, outside the folder so that a locked folder can be renamed."""
    return folder.parent / ".locks" / f"{folder.name}.lock"


_LOCK_TIMEOUT_SECONDS = 10.0
"""How long to wait for a lock; long enough for another process to stop, for example after a Slurm requeue."""
