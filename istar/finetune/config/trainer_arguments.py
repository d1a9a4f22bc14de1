"""Checks of the arguments of `lightning.Trainer` that a config passes on."""

import inspect
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

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


def check_trainer_arguments(arguments: Mapping[str, Any], field_names: Iterable[str]) -> None:
    """Check that `lightning.Trainer` has these arguments, by name, and that a config may set them.

    `field_names` are the fields of `TrainerConfig`, as suggestions for a misspelt name. Raises a `UserError` if an
    argument does not exist or is set by istar.
    """
    if not arguments:
        return
    # Lightning takes seconds to import, and most configs need none of its further arguments.
    from lightning import Trainer

    accepted = set(inspect.signature(Trainer).parameters)
    for name in arguments:
        if name not in accepted:
            known_keys = [f"trainer.{key}" for key in sorted({*field_names, *accepted} - {"lightning"})]
            raise UserError(
                f"trainer.{name}: there is no such key, and lightning.Trainer has no such argument"
                f"{did_you_mean(f'trainer.{name}', known_keys)}"
            )
        if name in _SET_BY_ISTAR:
            raise UserError(f"trainer.{name} cannot be set: {_SET_BY_ISTAR[name]}")


def check_argument_types(prefix: str, function: Any, arguments: Mapping[str, Any]) -> None:
    """Raise a `UserError` for a value of a type that the annotation of an argument of `function` does not allow."""
    parameters = inspect.signature(function).parameters
    for name, value in arguments.items():
        annotation = parameters[name].annotation if name in parameters else Any
        alternatives = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        classes: tuple[Any, ...] = tuple(get_origin(alternative) or alternative for alternative in alternatives)
        classes += (int,) if float in classes else ()
        # Literals and names that only type checkers know are left to the function.
        if annotation is not Any and all(isinstance(each, type) for each in classes) and not isinstance(value, classes):
            expected = " or ".join(each.__name__ for each in classes if each is not type(None))
            raise UserError(f"{prefix}.{name}={value} is not of the expected type: {expected}")


def without_defaults(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments without those that have the default values of `lightning.Trainer`."""
    if not arguments:
        return {}
    from lightning import Trainer

    parameters = inspect.signature(Trainer).parameters
    defaults = {name: [parameters[name].default] for name in arguments}
    if "gradient_clip_algorithm" in arguments:
        defaults["gradient_clip_algorithm"].append("norm")  # what its default, None, means
    return {name: value for name, value in arguments.items() if value not in defaults[name]}
