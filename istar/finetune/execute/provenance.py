"""What a run was made with: the versions of the code and of libraries, and the hardware."""

import functools
import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

_REPORTED_PACKAGES = ("istar", "torch", "lightning", "transformers", "datasets", "numpy", "scikit-learn")
_PACKAGE_FOLDER = Path(__file__).resolve().parents[2]
_GIT_TIMEOUT_SECONDS = 30.0
"""Timeout of git on slow network file systems."""


def installed_versions() -> dict[str, str]:
    """Return the installed versions of istar and of the libraries that affect results."""
    return {name: version(name) for name in _REPORTED_PACKAGES}


@functools.cache
def describe_code(package_folder: Path = _PACKAGE_FOLDER) -> dict[str, Any]:
    """Return the fields `code_commit` and `code_modified` of `RunRecord`.

    Both are None if git is not installed or does not track the modules in `package_folder`. A process keeps the first
    result, because later commits do not change the modules that it has imported.
    """
    unknown_fields = {"code_commit": None, "code_modified": None}
    # An installed istar may lie within the checkout of another project, which does not track it.
    if _run_git(package_folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return unknown_fields
    commit = _run_git(package_folder, "rev-parse", "HEAD")
    changes = _run_git(package_folder, "--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
    return {"code_commit": commit, "code_modified": None if changes is None else changes != ""}


def describe_hardware(device: torch.device, num_processes: int) -> dict[str, Any]:
    """Return the fields `device` (of this process), `processes`, `cuda` and `system` of `RunRecord`."""
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else _get_cpu_name()
    if device.type not in ("cuda", "cpu"):
        device_name = device.type
    system = {"cuda": torch.version.cuda, "system": platform.platform()}
    return {"device": device_name, "processes": num_processes, **system}


def _run_git(folder: Path, *arguments: str) -> str | None:
    # A git hook sets GIT_DIR and the like to its repository, which may be another one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        completed = subprocess.run(
            ["git", *arguments], cwd=folder, env=environment, capture_output=True, text=True,
            timeout=_GIT_TIMEOUT_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout.strip() if completed.returncode == 0 else None


def _get_cpu_name() -> str:
    try:
        match = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.processor() or platform.machine()
