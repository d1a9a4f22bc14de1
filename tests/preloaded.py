"""What the server of `tests.forks` has in memory before it forks: the libraries, and the data of `task=demo`."""

import gc
from importlib import import_module

from istar.finetune.execute.extras import fast_imports

with fast_imports():
    for name in ("finetune.processes.preloaded", "cli.train", "integrations.transformers"):
        import_module(f"istar.{name}")
    import_module("tests.forks")
    from istar.texts import demo

    for split in ("train", "validation"):
        demo.generate("demo", split)
# As tests/conftest.py does: a collection in a fork would visit all objects of the libraries.
gc.set_threshold(100_000, 50, 100)
gc.freeze()
