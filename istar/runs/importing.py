"""Importing large libraries in less time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def large_imports() -> Iterator[None]:
    """For a block that imports: put off garbage collections, and keep later ones from what is there behind it.

    torch, transformers and Lightning make a million objects that stay. The collector would walk over them again and
    again as they grow, a fifth of the time of their import, and at every full collection afterwards.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
