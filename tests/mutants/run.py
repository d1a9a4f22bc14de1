"""Break the numerical code, one operator or number at a time, and report whether the tests notice: `make mutants`.

The mutants are a fixed sample of the changes that the syntax trees allow. For each, the tests of its package run until
one fails, first those named after its module. The exit code is 1 if more mutants survive than `--survivors`: some of
them change nothing that can be observed, and others lack a test.
"""

import argparse
import ast
import copy
import hashlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.machinery import SourceFileLoader
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("measures", "regularizers", "hidden_states")
LIBRARIES = ["torch", "scipy.stats", "sklearn.metrics", "hydra", "pytest", "transformers.models.bert.modeling_bert"]
"""Modules that are imported once and shared by all processes. None of them is changed."""
OPPOSITES: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.USub: ast.UAdd, ast.Not: ast.UAdd,
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
UNCHANGED = (ast.Raise, ast.JoinedStr, ast.AnnAssign)
"""Nodes of messages and types. Constants of modules, such as sizes of blocks, are not changed either."""
SECONDS = 100
"""A mutant whose tests take longer has changed a loop, and counts as killed."""


class Mutant(NamedTuple):
    path: Path
    number: int
    """Position of the changed node in `find_nodes`."""
    change: str


def find_nodes(tree: ast.AST) -> Iterator[Any]:
    """Yield the operations, comparisons and numbers of a tree in a fixed order."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, UNCHANGED) and not (isinstance(tree, ast.Module) and isinstance(node, ast.Assign)):
            is_number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
            if is_number or type(getattr(node, "op", getattr(node, "ops", [None])[0])) in OPPOSITES:
                yield node
            yield from find_nodes(node)


def change(node: Any) -> Any:
    """Replace the operator by its opposite, or add 1 to the number."""
    if isinstance(node, ast.Constant):
        node.value = 1 + node.value  # type: ignore[operator]
    elif isinstance(node, ast.Compare):
        node.ops[0] = OPPOSITES[type(node.ops[0])]()
    else:
        node.op = OPPOSITES[type(node.op)]()
    return node


def list_mutants(one_in: int) -> list[Mutant]:
    """Sample one in so many changes by a hash of the line, so that edits elsewhere do not change the sample."""
    mutants = []
    for path in sorted(path for package in PACKAGES for path in (REPOSITORY / "istar" / package).glob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        for index, node in enumerate(find_nodes(ast.parse("\n".join(lines)))):
            text = f"{path.stem}: {lines[node.lineno - 1].strip()}  ->  {ast.unparse(change(copy.deepcopy(node)))}"
            if int(hashlib.sha256(text.encode()).hexdigest(), 16) % one_in == 0:
                mutants.append(Mutant(path, index, f"{path.relative_to(REPOSITORY)}:{node.lineno}: {text}"))
    return mutants


def find_tests(mutant: Mutant | None) -> list[str]:
    """Return the tests to run, in their order: those named after the module of a mutant, and those of its package."""
    names = [*PACKAGES] if mutant is None else [mutant.path.parent.name]
    if names == ["regularizers"]:
        names.append("hidden_states")  # the reader's tests choose tokens by `regularizers.points`
    folders = [REPOSITORY / "tests" / name for name in names]
    files = [] if mutant is None else sorted(folders[0].glob(f"test_{mutant.path.stem}*.py"))
    return [str(path) for path in (*files, *folders)]


def is_killed(mutant: Mutant | None) -> bool:
    """Return whether a test fails in this process, which has imported nothing of the package yet."""
    import pytest

    if mutant is not None:
        get_code = SourceFileLoader.get_code

        def get_changed_code(loader: SourceFileLoader, name: str) -> Any:
            if loader.path != str(mutant.path):
                return get_code(loader, name)
            tree = ast.parse(mutant.path.read_text(encoding="utf-8"))
            change(list(find_nodes(tree))[mutant.number])
            return compile(tree, mutant.path, "exec")

        SourceFileLoader.get_code = get_changed_code  # type: ignore[method-assign, assignment]
        signal.signal(signal.SIGALRM, lambda *_: pytest.exit("too slow", returncode=pytest.ExitCode.TESTS_FAILED))
        signal.alarm(SECONDS)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    # Plugins that are imported already cannot have their assertions rewritten, which does not matter.
    options = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = pytest.main([*options, *find_tests(mutant)])
    assert code != pytest.ExitCode.NO_TESTS_COLLECTED
    return code != pytest.ExitCode.OK


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each mutant with its verdict; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__.partition("\n")[0])
    parser.add_argument("word", nargs="?", default="", help="only mutants with this word in their path or line")
    parser.add_argument("--one-in", type=int, default=32, help="size of the sample")
    parser.add_argument("--survivors", type=int, default=8, help="how many mutants may survive")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    options = parser.parse_args(arguments)
    os.chdir(REPOSITORY)
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    context = get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    mutants = [mutant for mutant in list_mutants(options.one_in) if options.word in mutant.change]
    survivors = 0
    with ProcessPoolExecutor(options.jobs, context, max_tasks_per_child=1) as pool:
        unchanged = pool.submit(is_killed, None)
        for mutant, killed in zip(mutants, pool.map(is_killed, mutants), strict=True):
            survivors += not killed
            print(f"{'killed' if killed else 'SURVIVED':<10}{mutant.change}", flush=True)
        assert not unchanged.result(), "a test fails without a change"
    print(f"{len(mutants)} mutants, {survivors} survived; expected at most {options.survivors}")
    return int(survivors > options.survivors)


if __name__ == "__main__":
    sys.exit(main())
