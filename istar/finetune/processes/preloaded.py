"""Imports the libraries of a run, as far as they are installed, into the server of a sweep before it forks."""

from contextlib import suppress
from importlib import import_module

from istar.finetune.execute.extras import fast_imports

with fast_imports():
    for module in (
        "istar.finetune.execute.execute",
        "istar.finetune.training.pruning",
        "transformers.models.bert.modeling_bert",
        "wandb",
    ):
        with suppress(ImportError):
            import_module(module)
