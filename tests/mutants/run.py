"""Break the product, one line at a time, and report whether the tests notice: `make mutants`.

Each mutation of `tests/mutants/table.py` is applied to a copy of the checkout, in which the test that the table names
must fail. The exit code is 1 if a mutation survives, if its line is no longer in the product, or if a test fails
without a mutation.
"""

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.mutants.table import MUTATIONS, REPOSITORY, Mutation

LIBRARIES = ["torch", "lightning", "datasets", "hydra", "scipy.stats", "sklearn.metrics", "matplotlib.pyplot", "pytest",
             "optuna", "transformers.models.bert.modeling_bert"]  # fmt: skip
"""Modules that are imported once and shared by all processes. None of them is mutated."""
COPIED_PATHS = ("benchmarks", "conf", "docs", "hydra_plugins", "istar", "sweep", "tests", "pyproject.toml", "train.py")
PASSED, FAILED = 100, 101
"""Exit codes of a process: those of pytest plus 100, to distinguish a failed test from a process that crashes."""
VERDICTS = {FAILED: "killed", PASSED: "SURVIVED"}


@dataclass(frozen=True)
class Attempt:
    """A run of pytest on a copy of the checkout; without a mutation, all tests must pass."""

    mutation: Mutation | None
    tests: Sequence[str]
    folder: Path

    @property
    def log(self) -> Path:
        """The file with the output of pytest."""
        return self.folder.with_suffix(".log")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each mutation as soon as its test has ended; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only mutations with one of these words in their lines")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    options = parser.parse_args(arguments)
    selected = [
        mutation
        for mutation in MUTATIONS
        if not options.words or any(word in f"{mutation.mistake} {mutation.file}" for word in options.words)
    ]
    outdated = [mutation for mutation in selected if mutation.problem()]
    for mutation in outdated:
        print(f"{'outdated':<11}{mutation.mistake} {mutation.problem()}", flush=True)
    selected = [mutation for mutation in selected if mutation not in outdated]
    problems = len(outdated)
    with tempfile.TemporaryDirectory(prefix="istar-mutants-") as name:
        unmutated_attempt = Attempt(None, sorted({mutation.test for mutation in selected}), Path(name) / "unchanged")
        attempts = [unmutated_attempt] if selected else []
        attempts += [
            Attempt(mutation, [mutation.test], Path(name) / str(index)) for index, mutation in enumerate(selected)
        ]
        for attempt, code in run_attempts(attempts, options.jobs):
            is_expected = code == (PASSED if attempt.mutation is None else FAILED)
            problems += not is_expected
            print(describe_result(attempt.mutation, code), flush=True)
            if not is_expected:
                print(attempt.log.read_text(encoding="utf-8"), flush=True)
    print(f"{len(selected) + len(outdated)} mutations, {problems} problems")
    return int(problems > 0)


def describe_result(mutation: Mutation | None, code: int) -> str:
    """Describe the result of an attempt."""
    if mutation is None:
        return f"{'passed' if code == PASSED else 'FAILED':<11}all tests, without a mutation"
    verdict = VERDICTS.get(code, f"broken: {code}")
    return f"{verdict:<11}{mutation.mistake} ({mutation.file}; {mutation.test})"


def run_attempts(attempts: Sequence[Attempt], jobs: int) -> Iterator[tuple[Attempt, int]]:
    """Execute the attempts, a number of them at a time; yields each with pytest's exit code when it has ended."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    waiting = list(attempts)
    running: dict[int, tuple[Attempt, BaseProcess]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            attempt = waiting.pop(0)
            process = start(attempt, context)
            running[process.sentinel] = attempt, process
        for sentinel in wait(list(running)):
            attempt, process = running.pop(sentinel)  # type: ignore[call-overload]
            process.join()
            shutil.rmtree(attempt.folder)
            yield attempt, process.exitcode


def start(attempt: Attempt, context: ForkServerContext) -> BaseProcess:
    """Copy the checkout, apply the mutation, and start pytest on the copy."""
    attempt.folder.mkdir()
    for path in (REPOSITORY / name for name in COPIED_PATHS):
        if path.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, attempt.folder / path.name, ignore=ignore, symlinks=True)
        else:
            shutil.copy(path, attempt.folder)
    if attempt.mutation is not None:
        attempt.mutation.apply(attempt.folder)
    process = context.Process(target=run_pytest, args=(attempt.tests, attempt.folder, attempt.log))
    process.start()
    return process


def run_pytest(tests: Sequence[str], folder: Path, log: Path) -> None:
    """Run pytest in a copy of the checkout, in a process that has imported nothing of the checkout but this module."""
    os.chdir(folder)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[:] = [str(folder), *(path for path in sys.path if Path(path).resolve() != REPOSITORY)]
    import pytest

    import istar

    assert Path(istar.__file__).is_relative_to(folder), istar.__file__
    # Plugins that are imported already cannot have their assertions rewritten, which does not matter.
    options = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    sys.exit(PASSED + pytest.main([*options, *tests]))


if __name__ == "__main__":
    sys.exit(main())
