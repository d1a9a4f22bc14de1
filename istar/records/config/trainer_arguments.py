"""Checks of the arguments of `lightning.Trainer` that a config passes on."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from istar.errors import UserError, did_you_mean

_SET_BY_ISTAR = {
    "barebones": "a run needs its callbacks",
    "callbacks": "the keys of the groups trainer and run choose them",
    "default_root_dir": "use run.root",
    "enable_autolog_hparams": "every run records its config",
    "enable_checkpointing": "use trainer.checkpoints",
    "enable_model_summary": "istar prints no summary",
    "enable_progress_bar": "use trainer.progress_bar",
    "limit_predict_batches": "a submission needs the complete test set",
    "limit_test_batches": "test sets are only predicted; see task.submission",
    "logger": "use the group logger, e.g. logger=wandb",
    "model_registry": "use run.save_model",
    "num_sanity_val_steps": "every run validates before the training",
    "overfit_batches": "use task.limit_train and task.limit_validation",
    "plugins": "checkpoints are written by istar",
    "use_distributed_sampler": "the data has a sampler that resumes exactly",
}
"""Arguments of `lightning.Trainer` that no config may set, with the reason or the key to use instead."""

_MEANING_OF_NONE = {
    "gradient_clip_algorithm": "norm",
    "limit_train_batches": 1.0,
    "limit_val_batches": 1.0,
    "val_check_interval": 1.0,
}
"""Arguments of `lightning.Trainer` with the default None -> the value that None means."""


def check_trainer_arguments(arguments: Mapping[str, Any], field_names: Iterable[str]) -> None:
    """Check that `lightning.Trainer` has these arguments, by name, and that a config may set them.

    `field_names` are the fields of `TrainerConfig`, as suggestions for a misspelt name.

    Raises:
        UserError: if an argument does not exist, is set by istar, or has a value that istar does not support.
    """
    if not arguments:
        return
    # Lightning takes seconds to import, and most configs need none of its further arguments.
    from lightning import Trainer

    accepted = set(inspect.signature(Trainer).parameters)
    for name, value in arguments.items():
        if name not in accepted:
            known_keys = [f"trainer.{key}" for key in sorted({*field_names, *accepted} - {"lightning"})]
            raise UserError(
                f"trainer.{name}: there is no such key, and lightning.Trainer has no such argument"
                f"{did_you_mean(f'trainer.{name}', known_keys)}"
            )
        if name in _SET_BY_ISTAR:
            raise UserError(f"trainer.{name} cannot be set: {_SET_BY_ISTAR[name]}")
        if name == "max_steps" and not (type(value) is int and value > 0):
            raise UserError(f"trainer.max_steps={value}: expected a whole number above 0")
        if name == "val_check_interval" and not isinstance(value, int | float):
            raise UserError(
                f"trainer.val_check_interval={value}: expected a number of batches or a fraction of an epoch"
            )
        if name == "limit_val_batches" and not is_batch_limit(value):
            raise UserError(
                f"trainer.limit_val_batches={value}: expected a whole number above 0 or a fraction in (0, 1]"
            )


def redundant_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of the arguments with the default values of `lightning.Trainer`."""
    if not arguments:
        return []
    from lightning import Trainer

    parameters = inspect.signature(Trainer).parameters
    redundant_names = []
    for name, value in arguments.items():
        default_values = [parameters[name].default, _MEANING_OF_NONE.get(name)]
        # 1 and 1.0 are equal, but limit one batch and all batches.
        if any(type(value) is type(default) and value == default for default in default_values):
            redundant_names.append(name)
    return redundant_names


def is_batch_limit(value: Any) -> bool:
    """Return whether a value limits a number of batches: a positive integer, or a fraction in (0, 1]."""
    return value > 0 if type(value) is int else isinstance(value, float) and 0 < value <= 1
