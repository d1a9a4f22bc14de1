"""What a run was made with: the state of istar's code, and the hardware."""

import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

_PACKAGE = Path(__file__).resolve().parents[1]
_GIT_SECONDS = 30.0
"""Timeout of git, which may be slow on network file systems."""


def code_state(package: Path = _PACKAGE) -> dict[str, Any]:
    """Return the fields `code_commit` and `code_modified` of `RunRecord`.

    Both are None if istar does not run from a git checkout, or git is not installed.

    Args:
        package: folder of istar's modules.
    """
    unknown = {"code_commit": None, "code_modified": None}
    # An installed istar may lie within the checkout of another project, which does not track it.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return unknown
    commit = _git(package, "rev-parse", "HEAD")
    changes = _git(package, "--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
    return {"code_commit": commit, "code_modified": None if changes is None else changes != ""}


def hardware(device: torch.device, processes: int) -> dict[str, Any]:
    """Return the fields `device`, `processes`, `cuda` and `system` of `RunRecord`.

    Args:
        device: device of this process.
        processes: number of processes of the run.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    if device.type not in ("cuda", "cpu"):
        name = device.type
    return {"device": name, "processes": processes, "cuda": torch.version.cuda, "system": platform.platform()}


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command in a folder, or None if it fails."""
    # A git hook sets GIT_DIR and the like to its repository, which may be another one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=_GIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    """Return the model of the CPU, or else its architecture."""
    try:
        match = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.processor() or platform.machine()
