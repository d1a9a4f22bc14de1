"""The code and the command in docs/statistics.md print the output that the guide shows."""

import re
from pathlib import Path

import pytest

from istar.cli.main import main

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "statistics.md").read_text(encoding="utf-8")


def test_the_example_of_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    [code] = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    expected_command_output, expected_code_output = re.findall(r"```text\n(.*?)```", GUIDE, re.DOTALL)
    exec(compile(code, "docs/statistics.md", "exec"), {})
    assert capsys.readouterr().out == expected_code_output
    assert main(["power", "--sd", "2.1", "--difference", "1.0"]) == 0
    assert capsys.readouterr().out == expected_command_output
