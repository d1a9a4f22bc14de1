"""The example in docs/quantization.md prints what the guide says."""

import re
from pathlib import Path

import pytest

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "quantization.md").read_text(encoding="utf-8")


def test_the_example_of_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    [code] = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    [expected_output] = re.findall(r"```text\n(.*?)```", GUIDE, re.DOTALL)
    exec(compile(code, "docs/quantization.md", "exec"), {})
    assert capsys.readouterr().out == expected_output
