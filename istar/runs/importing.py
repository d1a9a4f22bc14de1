"""A context manager that speeds up the import of large libraries."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def large_imports() -> Iterator[None]:
    """Disable garbage collection during imports, and exempt the imported objects from later collections.

    torch, transformers and Lightning create about a million objects that are never freed. Traversing them again and
    again takes a fifth of the import time, and slows down every full collection afterwards.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
