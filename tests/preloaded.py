"""What the server of `tests.forks` has in memory before it forks: the libraries, and the data of `task=demo`."""

from importlib import import_module

from istar.finetune.runs.extras import fast_imports
from istar.finetune.runs.forking import PRELOADED_MODULES

with fast_imports():
    for module in (*PRELOADED_MODULES, "istar.cli.train", "istar.integrations.transformers", "tests.forks"):
        import_module(module)
    from istar.inputs import demo

    for split in ("train", "validation"):
        demo.generate("demo", split)
