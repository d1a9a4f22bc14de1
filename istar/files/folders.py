"""What a folder contains, and which part of an argument of a command names a file or folder."""

import os
import re
from pathlib import Path

from istar.errors import UserError

ADAPTER_CONFIG_FILE = "adapter_config.json"
"""File in an adapter folder with peft's settings and the name of the base model."""


def list_visible(folder: Path, pattern: str = "*") -> list[Path]:
    """Return the paths below a folder that match a glob pattern, sorted, without hidden files and folders.

    Names of hidden ones begin with a dot: locks of editors, metadata of file systems, unfinished work of processes.
    A missing folder contains nothing. Raises an OSError if the folder cannot be read.
    """
    if folder.is_dir():
        next(folder.iterdir(), None)  # `glob` would find nothing in a folder that cannot be read
    paths = sorted(folder.glob(pattern))
    return [path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def describe_saved_splits(folder: Path) -> str:
    """Return the end of an error message, with the paths of the splits that `DatasetDict.save_to_disk` wrote."""
    splits = ", ".join(str(path.parent) for path in list_visible(folder, "*/state.json"))
    return f"; it has the saved splits {splits}" if splits else ""


def is_model_folder(folder: Path) -> bool:
    """Return whether a folder contains a model of `save_pretrained`, or adapters that peft wrote without a config."""
    return any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG_FILE))


def split_label(argument: str) -> tuple[str, str]:
    """Split `[label=]<path or id>` into the label, empty if there is none, and the rest.

    What exists is never parsed: the label ends where the path of something existing begins. If nothing exists, it ends
    at the last equals sign that no slash precedes. Raises a `UserError` if the label cannot name a folder.
    """
    starts = [0, *(sign.end() for sign in re.finditer("=", argument))]
    default_start = [start for start in starts if "/" not in argument[:start]][-1]
    start = next((start for start in starts if os.path.exists(argument[start:])), default_start)  # noqa: PTH110
    label = argument[: start - 1] if start else ""
    if start:
        to_file_name(label)
    return label, argument[start:]


def to_file_name(label: str) -> str:
    """Return a label with underscores for slashes, or raise a `UserError` if it cannot name a file or folder."""
    if label in ("", ".", "..", ".istar"):
        raise UserError(f"{label!r} cannot name a folder for results; expected a label with letters or digits")
    return label.replace("/", "_")
