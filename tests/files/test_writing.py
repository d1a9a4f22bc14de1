"""Files that are replaced atomically."""

import os
from pathlib import Path

import pytest

from istar.files.writing import atomic_write


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match="is a pipe or a device; expected a file"), atomic_write(path) as file:
        file.write(b"content")
    assert path.is_fifo()
    assert [child.name for child in tmp_path.iterdir()] == ["pipe"]
