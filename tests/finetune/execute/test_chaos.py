"""The short version of `python -m benchmarks.chaos`."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import chaos
from tests.jobs import Fork

SHORT = ("trainer.max_epochs=3", "task.limit_train=100", "task.limit_validation=20")


def start_in_a_fork(root: Path, command: Sequence[str]) -> Fork:
    """Start a command as `chaos.start` does, but in a fork, which need not import the libraries for seconds."""
    root.mkdir(parents=True, exist_ok=True)
    _, _, *arguments = command
    environment = {**os.environ, "ISTAR_CACHE": str(root.parent / "cache")}
    log = root.with_suffix(".log")
    return Fork([*arguments, f"run.root={root}"], root.parent, environment, [log, log])


@pytest.mark.slow
def test_kills_with_one_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "start", start_in_a_fork)
    assert chaos.main(["--kills", "2", "--processes", "1", *SHORT]) == 0
    assert "2 of 2" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_kills_with_two_processes(capsys: pytest.CaptureFixture[str], strategy: str) -> None:
    settings = [*SHORT, f"trainer.strategy={strategy}"]
    assert chaos.main(["--kills", "4", "--processes", "2", "--seed", "1", *settings]) == 0
    assert "4 of 4" in capsys.readouterr().out


@pytest.mark.slow
def test_kills_of_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["--sweep", "--kills", "3", *SHORT]) == 0
    assert "3 of 3" in capsys.readouterr().out
