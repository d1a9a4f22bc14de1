"""Only one process at a time writes into a run folder."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from istar.errors import LockedError
from istar.files import writing
from istar.files.writing import is_locked, lock_folder
from tests.waiting import SECONDS

HOLD_LOCK = """
import sys
from pathlib import Path
from istar.files.writing import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def lock_holder(tmp_path: Path, repository: Path) -> Iterator["subprocess.Popen[str]"]:
    """Start a process that holds the lock of `<tmp_path>/runs/one` until its input ends."""
    environment = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", HOLD_LOCK, str(tmp_path / "runs" / "one")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_one_writer_at_a_time(tmp_path: Path, lock_holder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / "one"
    monkeypatch.setattr(writing, "_LOCK_TIMEOUT_SECONDS", 0.2)
    # Asking for a lock leaves nothing behind.
    assert not is_locked(tmp_path / "others" / "one")
    assert not (tmp_path / "others").exists()
    assert is_locked(folder)
    with pytest.raises(LockedError, match="is being written by another process") as error, lock_folder(folder):
        pass
    assert "\n" not in str(error.value)
    lock_holder.kill()
    assert lock_holder.wait() == -signal.SIGKILL
    # The killed process no longer holds the lock, so there is nothing to wait for.
    monkeypatch.setattr(writing, "_LOCK_TIMEOUT_SECONDS", 0.0)
    assert not is_locked(folder)
    with lock_folder(folder):
        pass


def test_an_ending_writer_is_waited_for(tmp_path: Path, lock_holder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original_sleep, waits = time.sleep, []

    def release_and_sleep(seconds: float) -> None:
        lock_holder.stdin.close()
        waits.append(seconds)
        original_sleep(seconds)

    monkeypatch.setattr(writing, "_LOCK_TIMEOUT_SECONDS", SECONDS)
    monkeypatch.setattr(time, "sleep", release_and_sleep)
    with lock_folder(tmp_path / "runs" / "one"):
        assert waits
    assert lock_holder.wait() == 0
