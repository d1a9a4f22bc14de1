"""The workflows contain no logic: all their commands are targets of the Makefile."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
TARGETS = set(re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem
)
def test_workflows_call_targets_of_the_makefile(path: Path) -> None:
    workflow: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    commands = []
    for job in workflow["jobs"].values():
        in_matrix = job.get("strategy", {}).get("matrix", {}).get("target", [])
        commands += [f"make {target}" for target in in_matrix]
        commands += [step["run"] for step in job["steps"] if "run" in step and "matrix.target" not in step["run"]]
    assert commands
    for command in commands:
        match = re.fullmatch(r"make ([a-z]+)( PYTHON=python)?", command)
        assert match, command
        assert match[1] in TARGETS


def test_the_versions_of_python_on_the_package_index_are_tested() -> None:
    workflow: Any = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [text.rpartition(" ")[2] for text in project["classifiers"] if ":: Python ::" in text]
    assert named == workflow["jobs"]["linux"]["strategy"]["matrix"]["python"]
