"""`python -m istar` is the command `istar`."""

import runpy

import pytest

from istar import __version__


def test_the_package_is_executed_as_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["istar", "--version"])
    with pytest.raises(SystemExit) as error:
        runpy.run_module("istar", run_name="__main__")
    assert error.value.code == 0
    assert capsys.readouterr().out == f"istar {__version__}\n"
