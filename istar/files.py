"""Writing files so that a reader finds the old one or the new one, never half of one."""

import os
import uuid
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file through a temporary one in the same folder, which is made if absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with draft.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
