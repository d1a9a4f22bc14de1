"""Imports the libraries that runs need; `istar.finetune.runs.forking` forks processes that have imported them."""

from importlib import import_module

from istar.finetune.runs import extras
from istar.finetune.runs.extras import fast_imports

MODULES = ["istar.finetune.runs.run", "wandb", "transformers.models.bert.modeling_bert"]
if extras.is_installed("optuna"):
    MODULES.append("istar.finetune.training.pruning")

with fast_imports():
    for _name in MODULES:
        import_module(_name)
