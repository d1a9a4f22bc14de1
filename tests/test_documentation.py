"""What the pages name exists, and the strict build of the site, which checks links and navigation, passes."""

import ast
import html
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import istar
from istar import measures, regularizers
from istar.finetune.config import Config, schema
from tests.waiting import SECONDS

REPOSITORY = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((REPOSITORY / "docs" / "tutorials").glob("*.ipynb"))
REQUIRED_MODULES = ("mkdocs", "material", "mkdocstrings", "latex2mathml", "nbformat")


def test_the_modules_and_functions_that_pages_name_exist() -> None:
    pages = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("benchmarks/*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    # `docs/first_changes.md` adds a penalty.
    named = set(re.findall(r"istar/[\w/]+\.py", text)) - {"istar/regularizers/normreg.py"}
    assert len(named) > 10
    assert {name for name in named if not (REPOSITORY / name).is_file()} == set()
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    walks = page.partition("## Where to begin reading")[2].partition("## Decisions")[0].split("```")[1]
    modules: dict[str, str] = {}
    for path in (REPOSITORY / "istar").rglob("*.py"):
        modules[path.name] = modules.get(path.name, "") + path.read_text(encoding="utf-8")
    steps = re.findall(r"(\w+\.py)(?: +([a-z]+_[a-z_]+|[A-Z]\w+|run|identify|prepare|assemble|train)\b)?", walks)
    assert len(steps) > 30
    for file, function in steps:
        assert file in modules
        assert not function or re.search(rf"^(def|class) {function}\b", modules[file], re.MULTILINE), (file, function)


def test_the_rows_of_a_table_have_as_many_cells_as_its_header() -> None:
    """Renderers show the source of a table whose second line has another number of cells."""
    paths = [path for folder in (".", "benchmarks", "docs", "examples") for path in (REPOSITORY / folder).glob("*.md")]
    for path in paths:
        for table in re.findall(r"(?:^\|.*\n)+", path.read_text(encoding="utf-8"), re.MULTILINE):
            rows = [re.split(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", row)) for row in table.splitlines()]
            assert {len(row) for row in rows} == {len(rows[0])}, f"{path.name}: {table}"


def test_the_tests_that_the_security_policy_names_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (REPOSITORY / "SECURITY.md").read_text(encoding="utf-8"))
    assert len(named) > 20
    for file, test in named:
        assert f"def {test}(" in (REPOSITORY / file).read_text(encoding="utf-8"), (file, test)


def test_what_pages_and_notebooks_import_exists() -> None:
    paths = [path for path in (REPOSITORY / "docs").rglob("*") if path.suffix in (".md", ".ipynb", ".py")]
    paths.remove(REPOSITORY / "docs" / "first_changes.md")  # adds what it imports; tests/test_first_changes.py does so
    imports = {
        (path.name, module, name)
        for path in (*paths, REPOSITORY / "README.md")
        for module, names in re.findall(r"from (istar[\w.]*) import ([\w, ]+)", path.read_text(encoding="utf-8"))
        for name in names.replace(" ", "").split(",")
    }
    assert len(imports) > 15

    def exists(module: str, name: str) -> bool:
        imported = importlib.import_module(module)
        return hasattr(imported, name) or importlib.util.find_spec(f"{module}.{name}") is not None

    assert [item for item in imports if not exists(*item[1:])] == []


def test_the_architecture_has_the_docstring_of_every_package() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = [path for path in (REPOSITORY / "istar").rglob("__init__.py") if path.parent.name != "istar"]
    assert len(packages) > 20
    rows = []
    for path in packages:
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        first_paragraph = docstring.partition("\n\n")[0].replace("\n", " ")
        rows.append(f"| `{path.parent.relative_to(REPOSITORY)}/` | {first_paragraph} |")
    assert sorted(line for line in page.splitlines() if line.startswith("| `istar/")) == sorted(rows)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site and return its folder."""
    missing = [module for module in REQUIRED_MODULES if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"the site needs {', '.join(missing)}: pip install 'istar[docs]'")
    folder = tmp_path_factory.mktemp("documentation") / "site"
    # With --quiet, MkDocs counts no warnings, and --strict has no effect.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    completed = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return folder


@pytest.mark.slow
def test_the_reference_has_every_key(site: Path, composed: Callable[..., Config]) -> None:
    text = (site / "reference" / "config.html").read_text(encoding="utf-8")
    documented_keys = set(re.findall(r"<td><code>([\w.]+)</code></td>", text))
    assert {"reg.lambda", "reg.zeta", "logger.project", "sweep.jobs"} <= documented_keys
    for overrides in (("task=rte", "reg=istar", "logger=wandb"), ("task=demo", "reg=cosreg", "logger=csv")):
        groups = schema.to_dict(composed(*overrides))
        keys = {f"{group}.{key}" for group, values in groups.items() if isinstance(values, dict) for key in values}
        assert keys | {"seed"} <= documented_keys


@pytest.mark.slow
def test_the_reference_has_every_command_and_name_and_the_site_loads_nothing_from_a_network(site: Path) -> None:
    text = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    commands = {"train", "results", "report", "watch", "measure", "embed", "correlate", "compare", "power"}
    assert set(re.findall(r'<h2 id="istar-(\w+)"', text)) >= commands
    pages = "\n".join(path.read_text(encoding="utf-8") for path in site.rglob("*.html"))
    for package in (istar, measures, regularizers):
        public_objects = [getattr(package, name) for name in package.__all__ if not name.startswith("__")]
        assert [value for value in public_objects if f'id="{value.__module__}.{value.__qualname__}"' not in pages] == []
    loaded = re.findall(r'<(?:img|script|source)[^>]* src="[^"]+"|<link[^>]* rel="(?:stylesheet|icon)"[^>]*>', pages)
    assert loaded
    assert [tag for tag in loaded if "//" in tag and 'src="data:' not in tag] == []


@pytest.mark.slow
def test_differences_are_copied_without_signs(site: Path) -> None:
    page = (site / "first_changes.html").read_text(encoding="utf-8")
    copied = [html.unescape(code) for code in re.findall(r'data-copy="([^"]*)"', page)]
    assert '    "Kurtosis",\n    "NormReg",' in copied
    assert len(copied) == page.count('class="language-diff highlight"')


@pytest.mark.slow
def test_pages_rank_above_the_python_reference_and_the_search_needs_no_server(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    assert (site / "search" / "search_index.js").read_text(encoding="utf-8") == f"var __index = {index}"
    boosts = {entry["location"]: entry.get("boost", 1) for entry in json.loads(index)["docs"]}
    assert boosts["reference/measures.html"] < boosts["tutorials/measure_a_model.html"] < boosts["measures.html"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_executed_in_order_and_names_no_place_of_a_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    code_cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code_cells] == list(range(1, len(code_cells) + 1))
    assert any(cell["outputs"] for cell in code_cells)
    assert [output for cell in code_cells for output in cell["outputs"] if output["output_type"] == "error"] == []
    assert not re.search(r"/(?:home|root|tmp|Users|usr|opt)/", text)
    assert len(text) < 300_000


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    copy = shutil.copy(path, tmp_path)
    command = [sys.executable, REPOSITORY / "docs" / "execute_notebooks.py", copy]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=2 * SECONDS)
    assert completed.returncode == 0, completed.stderr[-3000:]
