"""A context manager that speeds up the import of large libraries."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def fast_imports() -> Iterator[None]:
    """Speed up imports in the `with` block by disabling the garbage collector.

    torch, transformers and Lightning create about a million objects that are never freed. If the garbage collector
    traversed them again and again, it would take a fifth of the import time. After the block, the collector ignores
    the objects that exist by then, so that every full collection is faster.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
