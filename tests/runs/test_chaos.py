"""The short version of `python -m benchmarks.chaos`."""

import pytest

from benchmarks import chaos

SHORT = ("trainer.max_epochs=3", "task.limit_train=200", "task.limit_validation=20")


def test_kills_with_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["--kills", "2", "--processes", "1", *SHORT]) == 0
    assert "2 of 2" in capsys.readouterr().out


@pytest.mark.slow
def test_kills_with_two_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["--kills", "4", "--processes", "2", "--seed", "1", *SHORT]) == 0
    assert "4 of 4" in capsys.readouterr().out


@pytest.mark.slow
def test_kills_of_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["--sweep", "--kills", "3", *SHORT]) == 0
    assert "3 of 3" in capsys.readouterr().out
