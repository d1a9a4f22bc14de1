"""Imports run one way along the road: measures, regularizers, tasks, models, training, results, reports."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import SECONDS

PACKAGE = Path(__file__).resolve().parents[1] / "istar"
MODULES = sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> Iterator[str]:
    """Full names, also of imports within functions; `from istar import x` counts as istar.x."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            assert node.module is not None
            if node.module == "istar":
                yield from (f"istar.{alias.name}" for alias in node.names)
            else:
                yield node.module


def part(name: str) -> str:
    """`istar.measures.moments` -> `measures`."""
    return name.split(".")[1] if "." in name else ""


# What each part of the package may import from it. The assembling ones may import everything below them.
ALLOWED = {
    "errors": set(),
    "importing": set(),
    "extras": {"errors"},
    "files": {"errors"},
    "hub": {"errors"},
    "measures": {"measures", "errors"},
    "regularizers": {"regularizers", "measures", "errors"},
    "integrations": {"integrations", "regularizers", "measures", "errors", "files"},
    "config": {"regularizers", "errors"},
    "schema": {"config", "errors"},
    "tiny": set(),
    "tasks": {"tasks", "errors", "files", "hub"},
    "models": {"tasks", "tiny", "config", "errors", "hub"},
    "geometry": {"geometry", "reports", "models", "tasks", "measures", "config", "errors", "files", "hub"},
    "training": {"training", "tasks", "regularizers", "measures", "config", "schema", "errors", "files", "hub"},
    "results": {"files", "errors"},
    "folders": {"results", "tasks", "training", "config", "schema", "errors"},
    "reports": {"reports", "results", "config", "measures", "files", "errors"},
}
ASSEMBLING = {"run", "launch", "forking", "sweeps", "training_command", "cli"}
LIBRARIES = {
    "measures": {"torch"},
    "regularizers": {"torch"},
    "config": {"omegaconf"},
    "schema": {"hydra", "omegaconf"},
    "errors": set(),
    "importing": set(),
    "extras": set(),
    "files": {"filelock"},
    "results": set(),
    "reports": {"jinja2", "markupsafe", "matplotlib", "numpy", "pandas", "rich", "scipy", "torch", "yaml"},
}


@pytest.mark.parametrize("path", MODULES, ids=map(dotted, MODULES))
def test_one_way_road(path: Path) -> None:
    own = part(dotted(path))
    if own in ASSEMBLING:
        return
    used = {part(name) for name in imported(path) if name.split(".")[0] == "istar"}
    if own == "":
        # The library's public names.
        assert used <= {"errors", "measures", "regularizers"}
        return
    if own not in ALLOWED:
        # A part that this table does not know yet: at least it leaves the assembling to the assemblers.
        assert not used & ASSEMBLING
        return
    assert used <= ALLOWED[own], f"{dotted(path)} imports {sorted(used - ALLOWED[own])}"


@pytest.mark.parametrize("path", MODULES, ids=map(dotted, MODULES))
def test_libraries_of_the_light_parts(path: Path) -> None:
    own = part(dotted(path))
    if own not in LIBRARIES:
        return
    used = {name.split(".")[0] for name in imported(path)} - {"istar"} - set(sys.stdlib_module_names)
    assert used <= LIBRARIES[own], f"{dotted(path)} imports {sorted(used - LIBRARIES[own])}"


def test_only_assemblers_assemble() -> None:
    """Nobody else imports both what trains and what reports, or run itself."""
    for path in MODULES:
        used = {part(name) for name in imported(path) if name.split(".")[0] == "istar"}
        if part(dotted(path)) not in ASSEMBLING:
            assert not used & ASSEMBLING
            assert not ("training" in used and "reports" in used)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("istar.measures", "lightning transformers datasets hydra omegaconf evaluate matplotlib pandas"),
        ("istar.regularizers", "lightning transformers datasets hydra omegaconf evaluate matplotlib pandas"),
        ("istar.geometry.wordsim", "lightning transformers datasets hydra omegaconf evaluate matplotlib pandas"),
        ("istar.folders", "lightning transformers hydra_plugins optuna matplotlib"),
        ("istar.results", "torch lightning transformers datasets hydra matplotlib"),
        ("istar.reports.tables", "torch lightning transformers datasets hydra"),
        ("istar.schema", "lightning transformers datasets evaluate"),
    ],
)
def test_what_an_import_brings_along(module: str, absent: str) -> None:
    code = f"import sys, {module}; print(*sorted(set({absent.split()!r}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent, timeout=SECONDS
    )
    assert done.stdout.split() == []
