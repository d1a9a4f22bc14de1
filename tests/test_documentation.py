"""The documentation site builds strictly, has every page of its navigation, and has no broken internal link."""

import ast
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

import istar
from istar import measures, regularizers
from istar.finetune.config import Config, schema
from tests.waiting import SECONDS

REPOSITORY = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((REPOSITORY / "docs" / "tutorials").glob("*.ipynb"))
REQUIRED_MODULES = ("mkdocs", "material", "mkdocstrings", "latex2mathml", "nbformat")


class Links(HTMLParser):
    """Parser of a page: collects its identifiers, the targets of its links, and the files that it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.identifiers: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.identifiers |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("img", "script", "source") and "src" in values:
            self.loaded.append(values["src"])
        elif tag == "link" and "href" in values and values.get("rel") in ("stylesheet", "icon"):
            self.loaded.append(values["href"])


def test_the_walks_through_the_commands_name_files_and_functions_that_exist() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    walks = page.partition("## Where to begin reading")[2].partition("## Decisions")[0].split("```")[1]
    modules: dict[str, str] = {}
    for path in (REPOSITORY / "istar").rglob("*.py"):
        modules[path.name] = modules.get(path.name, "") + path.read_text(encoding="utf-8")
    named = re.findall(r"(\w+\.py)(?: +([a-z]+_[a-z_]+|[A-Z]\w+|run|identify|prepare|assemble|train)\b)?", walks)
    assert len(named) > 30
    for file, function in named:
        assert file in modules
        assert not function or re.search(rf"^(def|class) {function}\b", modules[file], re.MULTILINE), (file, function)


def test_the_modules_that_pages_name_exist() -> None:
    pages = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("benchmarks/*.md")]
    named = {name for page in pages for name in re.findall(r"istar/[\w/]+\.py", page.read_text(encoding="utf-8"))}
    # `docs/first_changes.md` adds a penalty.
    missing = {name for name in named if not (REPOSITORY / name).is_file()} - {"istar/regularizers/normreg.py"}
    assert len(named) > 10
    assert missing == set()


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


def test_the_docstrings_parse_without_warnings(caplog: pytest.LogCaptureFixture) -> None:
    """Warnings about docstrings abort the strict build of the site, which is too slow for the fast tests."""
    griffe = pytest.importorskip("griffe", reason="the site needs griffe: pip install 'istar[docs]'")
    num_docstrings = 0

    def parse(parent: Any) -> None:
        nonlocal num_docstrings
        for member in parent.members.values():
            if not member.is_alias:
                num_docstrings += bool(member.docstring and member.docstring.parsed)
                parse(member)

    with caplog.at_level("WARNING"):
        parse(griffe.load("istar", search_paths=[REPOSITORY], docstring_parser="google"))
    assert num_docstrings > 2000
    assert caplog.messages == []


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


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    """Return the parsed HTML pages of the site by their paths."""
    return {path: Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def list_files(entries: object) -> Iterator[str]:
    """Yield the files of a nested navigation."""
    if isinstance(entries, str):
        yield entries
    elif isinstance(entries, dict):
        for entry in entries.values():
            yield from list_files(entry)
    elif isinstance(entries, list):
        for entry in entries:
            yield from list_files(entry)


def read_navigation() -> list[str]:
    """Return the files in the navigation of mkdocs.yml."""
    # Parse from the line of the navigation on; above it are tags that only MkDocs can read.
    text = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    return list(list_files(yaml.safe_load(text[text.index("\nnav:") :])["nav"]))


@pytest.mark.slow
def test_every_page_of_the_navigation_exists(site: Path) -> None:
    assert len(read_navigation()) > 20
    assert [name for name in read_navigation() if not (site / name).with_suffix(".html").is_file()] == []


def test_every_written_page_is_in_the_navigation() -> None:
    folder = REPOSITORY / "docs"
    page_names = {str(path.relative_to(folder).with_suffix(".md")) for path in [*folder.rglob("*.md"), *NOTEBOOKS]}
    assert page_names - set(read_navigation()) == set()


@pytest.mark.slow
def test_no_internal_link_is_broken(site: Path, pages: dict[Path, Links]) -> None:
    broken = []
    for path, page in pages.items():
        # The page for missing addresses is served at any address, so its links are not relative to its own path.
        if path.name == "404.html":
            continue
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].identifiers):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []


@pytest.mark.slow
def test_the_pages_load_nothing_from_a_network(pages: dict[Path, Links]) -> None:
    loaded = {link for page in pages.values() for link in page.loaded}
    assert {link for link in loaded if urlsplit(link).netloc} == set()


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
def test_the_reference_has_every_command_and_name(site: Path, pages: dict[Path, Links]) -> None:
    text = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    commands = {"train", "results", "report", "watch", "measure", "embed", "correlate", "compare", "power"}
    assert set(re.findall(r'<h2 id="istar-(\w+)"', text)) >= commands
    identifiers = {identifier for page in pages.values() for identifier in page.identifiers}
    for package in (istar, measures, regularizers):
        public_objects = [getattr(package, name) for name in package.__all__ if not name.startswith("__")]
        assert {f"{value.__module__}.{value.__qualname__}" for value in public_objects} - identifiers == set()


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
