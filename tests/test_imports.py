"""Imports run one way: each part of the package imports only the parts that a table without cycles allows."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from istar import measures
from tests.waiting import SECONDS

PACKAGE = Path(__file__).resolve().parents[1] / "istar"
MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    """Return the full name of a module from its path."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def parse(path: Path) -> tuple[ast.Module, list[ast.AST]]:
    """Return the syntax tree of a module, and all its nodes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return tree, list(ast.walk(tree))


@functools.cache
def imported_names(path: Path) -> set[str]:
    """Return the full names that a module imports, also within functions; `from istar import x` counts as istar.x."""
    names: set[str] = set()
    for node in parse(path)[1]:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            assert node.module is not None
            names |= {f"istar.{alias.name}" for alias in node.names} if node.module == "istar" else {node.module}
    return names


def part_of(name: str) -> str:
    """Return the part of the package that a module belongs to: `istar.measures.moments` -> `measures`."""
    return name.split(".")[1] if "." in name else ""


# The parts of the package that each of its parts may import.
ALLOWED = {
    "errors": set(),
    "files": {"errors"},
    "drawing": {"files"},
    "measures": {"errors"},
    "statistics": {"errors"},
    "sums": {"errors", "measures"},
    "regularizers": {"errors", "measures"},
    "hidden_states": {"errors", "measures", "regularizers"},
    "runs": {"errors", "files"},
    "monitoring": {"drawing", "errors", "files", "hidden_states", "measures", "regularizers", "runs"},
    "integrations": {"errors", "files", "hidden_states", "measures", "monitoring", "regularizers"},
    "models": {"errors", "files", "hidden_states", "runs"},
    "texts": {"errors", "files", "models", "runs"},
    "vectors": {"errors", "files", "measures"},
    "geometry": {"drawing", "errors", "files", "hidden_states", "measures", "models", "runs", "statistics", "sums",
                 "texts", "vectors"},
    "embeddings": {"drawing", "errors", "files", "measures", "models", "runs", "statistics", "texts",
                   "vectors"},
    "reports": {"drawing", "errors", "files", "measures", "runs", "statistics"},
    "finetune": {"drawing", "errors", "files", "hidden_states", "measures", "models", "monitoring", "regularizers",
                 "runs", "sums", "texts"},
    "cli": {"drawing", "embeddings", "errors", "files", "finetune", "geometry", "measures", "models", "reports",
            "runs", "statistics", "texts", "vectors"},
}  # fmt: skip
LIBRARIES = {
    "measures": {"torch"},
    "statistics": {"numpy", "scipy"},
    "sums": {"numpy", "torch"},
    "regularizers": {"torch"},
    "hidden_states": {"torch", "accelerate"},  # accelerate only for the parameters that it has offloaded
    "errors": set(),
    "files": {"filelock", "yaml"},
    "runs": set(),
    "monitoring": {"matplotlib", "pandas", "safetensors", "torch"},
    "vectors": {"numpy", "pandas", "pyarrow", "safetensors", "torch"},
    "drawing": {"jinja2", "markupsafe", "matplotlib", "numpy", "pandas", "rich"},
    "reports": {"matplotlib", "numpy", "pandas", "rich", "scipy", "torch", "yaml"},
}


def test_imports_run_one_way() -> None:
    # The package itself imports the public names of the library.
    public = {"errors", "geometry", "hidden_states", "measures", "monitoring", "regularizers", "reports", "vectors"}
    allowed = {"": public, "__main__": {"cli"}, **ALLOWED}
    wrong = {}
    for path in MODULES:
        part = part_of(module_name(path))
        parts = {part_of(name) for name in imported_names(path) if name.split(".")[0] == "istar"}
        wrong[module_name(path)] = parts - {part, "__version__"} - allowed[part]
    assert {name: parts for name, parts in wrong.items() if parts} == {}


def test_the_table_has_no_cycles() -> None:
    remaining = dict(ALLOWED)
    while remaining:
        lowest = {name for name, allowed in remaining.items() if not allowed & set(remaining)}
        assert lowest, f"these import each other: {sorted(remaining)}"
        remaining = {name: allowed for name, allowed in remaining.items() if name not in lowest}


def test_no_file_name_has_two_meanings() -> None:
    """Commands in istar/cli/ are left out: each has the name of the module that it calls."""
    names = [path.stem for path in MODULES if path.stem != "__init__" and path.parent.name != "cli"]
    assert sorted(names) == sorted(set(names))


def test_the_tests_have_the_tree_of_the_package() -> None:
    """A folder of tests has the name of a package with modules, and tests named after a module are in its folder."""
    root = Path(__file__).parent
    folders = {path.parent.relative_to(PACKAGE) for path in MODULES if path.stem != "__init__"} - {Path()}
    test_files = [path.relative_to(root) for path in root.rglob("test_*.py")]
    assert {path.parent for path in test_files} == folders | {Path()}
    homes: dict[str, set[Path]] = {}
    for path in MODULES:
        homes.setdefault(f"test_{path.stem}", set()).add(path.parent.relative_to(PACKAGE))
    assert [path for path in test_files if path.parent not in homes.get(path.stem, {path.parent})] == []


def test_libraries_of_the_light_parts() -> None:
    wrong = {}
    for path in MODULES:
        libraries = {name.split(".")[0] for name in imported_names(path)} - {"istar"} - set(sys.stdlib_module_names)
        wrong[module_name(path)] = libraries - LIBRARIES.get(part_of(module_name(path)), libraries)
    assert {name: libraries for name, libraries in wrong.items() if libraries} == {}


@functools.cache
def imports_by_time(path: Path) -> tuple[set[str], set[tuple[str, int]]]:
    """Return the full names that the import of a module imports, and those with lines that it leaves for later."""
    now: set[str] = set()
    later: set[tuple[str, int]] = set()

    def visit(node: ast.AST, is_later: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                module = f"{child.module}." if isinstance(child, ast.ImportFrom) else ""
                names = {module + alias.name for alias in child.names}
                later.update((name, child.lineno) for name in names) if is_later else now.update(names)
            is_type_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            visit(child, is_later or is_type_only or isinstance(child, ast.FunctionDef))

    visit(parse(path)[0], False)
    return now, later


@functools.cache
def loaded_libraries(name: str) -> frozenset[str]:
    """Return the libraries, and their modules, that the import of a name loads, also through modules of istar."""
    paths = {module_name(path): path for path in MODULES}
    libraries, done, remaining = set(), set(), [name]
    while remaining:
        parts = remaining.pop().split(".")
        prefixes = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
        if parts[0] != "istar":
            libraries |= prefixes
            continue
        if prefixes & {f"istar.measures.{name}" for name in measures.__all__}:
            libraries.add("torch")  # `istar.measures` imports them when they are first used
        for module in prefixes & set(paths) - done:
            done.add(module)
            remaining += imports_by_time(paths[module])[0]
    return frozenset(libraries - set(sys.stdlib_module_names))


def test_an_import_that_is_left_for_later_saves_a_library() -> None:
    """Imports are at the top, unless a caller that never gets there is spared the time for a library, or its extra."""
    useless = []
    for path in MODULES:
        name = module_name(path)
        if name in ("istar", "istar.measures"):  # their public names are imported on first use
            continue
        for imported, line in imports_by_time(path)[1]:
            if loaded_libraries(imported) <= loaded_libraries(name):
                useless.append(f"{path.relative_to(PACKAGE.parent)}:{line} {imported}")
    assert sorted(useless) == []


FORBIDDEN_LIBRARIES = {
    "istar.statistics.conclusions": "torch lightning transformers datasets hydra matplotlib pandas",
    "istar.statistics.over_tasks": "torch lightning transformers datasets hydra matplotlib pandas",
    "istar.runs.record": "torch lightning transformers datasets hydra matplotlib",
    "istar.reports.run_frame": "torch lightning transformers datasets hydra",
    "istar.finetune.config.groups": "torch lightning transformers datasets hydra matplotlib",
    "istar.geometry.show.compare_page": "torch lightning transformers datasets hydra sklearn",
    "istar.finetune.config.schema": "lightning transformers datasets evaluate",
    "istar.finetune.execute.identify": "lightning transformers hydra_plugins optuna matplotlib",
    "istar.finetune.execute.run": "lightning transformers datasets matplotlib",
    "istar.finetune.execute.precision": "lightning transformers datasets matplotlib",
    "istar.finetune.execute.execute": "peft optuna wandb",
}
"""By module: the libraries that its import must not import. One process imports the modules without torch in order, and
another one those with torch, so that none may come after one that may import what it may not. Of modules that need
only torch, see tests/test_package.py."""
WITHOUT_TORCH = [module for module, libraries in FORBIDDEN_LIBRARIES.items() if "torch" in libraries.split()]
WITH_TORCH = [module for module in FORBIDDEN_LIBRARIES if module not in WITHOUT_TORCH]
IMPORT_SCRIPT = """
import importlib, sys

for module in sys.argv[1:]:
    importlib.import_module(module)
    print(module, *sys.modules)
"""


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param(WITHOUT_TORCH, id="without torch"),
        # An import of torch takes seconds.
        pytest.param(WITH_TORCH, id="with torch", marks=pytest.mark.slow),
    ],
)
def test_what_an_import_brings_along(modules: list[str]) -> None:
    completed = subprocess.run(
        [sys.executable, "-c", IMPORT_SCRIPT, *modules],
        capture_output=True, text=True, check=True, cwd=PACKAGE.parent, timeout=SECONDS,
    )  # fmt: skip
    loaded = {line.split()[0]: set(line.split()[1:]) for line in completed.stdout.splitlines()}
    imported = {module: set(FORBIDDEN_LIBRARIES[module].split()) & loaded[module] for module in modules}
    assert imported == {module: set() for module in modules}


def test_every_public_measure_is_found_in_a_module() -> None:
    """`istar.measures` imports its names on first use, which the import of a module of the same name would prevent."""
    assert not {path.stem for path in (PACKAGE / "measures").glob("*.py")}.intersection(measures.__all__)
    assert [name for name in measures.__all__ if not hasattr(measures, name)] == []
    assert set(measures.__all__) <= set(dir(measures))


def test_nobody_asks_for_the_type_of_a_penalty() -> None:
    """All penalties have one interface; only their own packages may tell them apart."""
    import istar
    from istar.hidden_states import AttachedPenalty
    from istar.regularizers import Penalty

    public_classes = {name: getattr(istar, name) for name in istar.__all__ if isinstance(getattr(istar, name), type)}
    names = {name for name, value in public_classes.items() if issubclass(value, Penalty | AttachedPenalty)}
    assert {"IStar", "CosReg", "HiddenStatePenalty", "EmbeddingPenalty"} <= names
    questions = []
    for path in MODULES:
        if part_of(module_name(path)) in ("regularizers", "hidden_states"):
            continue
        for node in parse(path)[1]:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                asked = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
                asked |= {name.attr for name in ast.walk(node.args[1]) if isinstance(name, ast.Attribute)}
                questions += [f"{path.name}:{node.lineno}"] if asked & names else []
    assert questions == []


SHARED_NAMES = {"run", "main", "load", "log", "T", "PenaltyCallback", "MonitorCallback"}
"""Names of one role in several modules: parts of a command, entry points, and callbacks of a library."""


def test_no_public_name_has_two_homes() -> None:
    homes: dict[str, list[str]] = {}
    for path in MODULES:
        for node in parse(path)[0].body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names = [node.name]
            elif isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names = [node.target.id]
            else:
                continue
            for name in names:
                if not name.startswith("_"):
                    homes.setdefault(name, []).append(module_name(path))
    assert {name: modules for name, modules in homes.items() if len(modules) > 1 and name not in SHARED_NAMES} == {}
