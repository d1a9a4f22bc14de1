"""Describes what a run was made with: the commit of istar's code, and the hardware."""

import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

_PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
_GIT_TIMEOUT_SECONDS = 30.0
"""Timeout of git, which may be slow on network file systems."""


def describe_code(package_folder: Path = _PACKAGE_FOLDER) -> dict[str, Any]:
    """Return the commit of istar's git checkout, and whether its files were changed since.

    These are the fields `code_commit` and `code_modified` of `RunRecord`. Both are None if istar does not run from a
    git checkout, or git is not installed.

    Args:
        package_folder: folder of istar's modules.
    """
    unknown_fields = {"code_commit": None, "code_modified": None}
    # An installed istar may lie within the checkout of another project, which does not track it.
    if _run_git(package_folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return unknown_fields
    commit = _run_git(package_folder, "rev-parse", "HEAD")
    changes = _run_git(package_folder, "--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
    return {"code_commit": commit, "code_modified": None if changes is None else changes != ""}


def describe_hardware(device: torch.device, num_processes: int) -> dict[str, Any]:
    """Return the name of the device, the number of processes, and the versions of CUDA and the operating system.

    These are the fields `device`, `processes`, `cuda` and `system` of `RunRecord`.

    Args:
        device: device of this process.
        num_processes: number of processes of the run.
    """
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else _get_cpu_name()
    if device.type not in ("cuda", "cpu"):
        device_name = device.type
    return {
        "device": device_name,
        "processes": num_processes,
        "cuda": torch.version.cuda,
        "system": platform.platform(),
    }


def _run_git(folder: Path, *arguments: str) -> str | None:
    # A git hook sets GIT_DIR and the like to its repository, which may be another one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        completed = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout.strip() if completed.returncode == 0 else None


def _get_cpu_name() -> str:
    try:
        match = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.processor() or platform.machine()
