"""The state of the code and the hardware in the record of a run."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from istar.finetune.execute.provenance import describe_code

UNKNOWN = {"code_commit": None, "code_modified": None}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a package in a git checkout with one commit."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    package = tmp_path / "checkout" / "istar"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    run_git(package, "init", "-q", "..")
    run_git(package, "add", ".")
    run_git(package, "-c", "user.name=A", "-c", "user.email=a@b.c", "commit", "-q", "-m", "first")
    return package


def run_git(folder: Path, *arguments: str) -> str:
    """Run git in a folder and return its output."""
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_a_checkout_has_a_commit_and_may_be_modified(package: Path) -> None:
    commit = run_git(package, "rev-parse", "HEAD")
    (package / "notes.txt").touch()
    assert describe_code(package) == {"code_commit": commit, "code_modified": False}
    (package / "__init__.py").write_text("more = 1")
    describe_code.cache_clear()
    assert describe_code(package) == {"code_commit": commit, "code_modified": True}


def test_an_installed_package_within_the_checkout_of_another_project_has_no_commit(package: Path) -> None:
    installed = package.parent / "venv" / "istar"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    assert describe_code(installed) == UNKNOWN


def test_neither_has_a_folder_without_git(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_code(tmp_path) == UNKNOWN
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_code(package) == UNKNOWN


def test_a_git_hook_does_not_mislead(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = run_git(package, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert describe_code(package)["code_commit"] == commit
