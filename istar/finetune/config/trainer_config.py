"""The settings of the trainer."""

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, Union, get_args, get_origin

from istar.errors import UserError, check_at_least, check_one_of, did_you_mean
from istar.finetune.config.fields import FURTHER_KEYS, NEVER_MATTERS, matters


@dataclass
class TrainerConfig:
    """Duration, hardware and checkpoints of the training.

    Arguments of `lightning.Trainer` keep their names. Those without a field here are accepted too, for example
    `trainer.benchmark=true`.
    """

    max_epochs: int = 3
    """Number of epochs."""
    max_steps: int | None = None
    """Number of optimizer steps after which training stops, within `max_epochs`; null stops after the epochs."""
    limit_train_batches: int | float = 1.0
    """Number (2) or fraction (0.5) of an epoch's batches to train on; 1.0 uses all."""
    limit_val_batches: int | float = 1.0
    """Number or fraction of a validation set's batches to predict; 1.0 uses all."""
    val_check_interval: int | float = 1.0
    """Number of batches between two validations, or fraction of an epoch; 1.0 validates after each epoch."""
    check_val_every_n_epoch: int | None = 1
    """Epochs between two validations; null counts `val_check_interval` across epochs. Whatever the interval, the last
    step has a validation."""
    accumulate_grad_batches: int = 2
    """Micro-batches per optimizer step."""
    gradient_clip_val: float | None = 1.0
    """Maximum norm of the gradient; null disables clipping."""
    precision: str = "32-true"
    """32-true, bf16-mixed, 16-mixed (CUDA only), or auto: bf16-mixed if the hardware has instructions for it."""
    accelerator: str = field(default="auto", metadata=NEVER_MATTERS)
    """Hardware to train on: auto, cpu, gpu, or another accelerator of Lightning."""
    devices: Any = field(
        default=1, metadata=matters(as_=lambda config: 1 if config.is_exact_in_parallel else config.trainer.num_devices)
    )
    """Number of devices per node, a list of device indices, or auto. Each device has one process."""
    num_nodes: int = field(default=1, metadata=matters(if_=lambda config: not config.is_exact_in_parallel))
    """Number of nodes (machines)."""
    strategy: str = field(default="auto", metadata=NEVER_MATTERS)
    """auto, ddp, or fsdp, which shards the model over the processes; with several devices auto means ddp."""
    early_stopping: int | None = None
    """Number of validations without a better headline metric after which training stops; null never stops early."""
    checkpoints: bool = True
    """Keep the best and the latest state. Without checkpoints, a run returns its last weights and cannot be resumed."""
    checkpoint_every_n_steps: int | None = field(default=None, metadata=NEVER_MATTERS)
    """Optimizer steps between two checkpoints within an epoch; null writes none by this rule."""
    checkpoint_every_n_minutes: float | None = field(default=10.0, metadata=NEVER_MATTERS)
    """Minutes between two checkpoints within an epoch; null writes none by this rule."""
    keep_models: Any = field(default=None, metadata=NEVER_MATTERS)
    """Optimizer steps after which the model is kept as `models/step-<n>/`: log (0, 1, 2, 4, ..., 512, then every 1000),
    or a number n for every n steps; in both cases also the last step. null keeps none."""
    # Never matters: a run that finishes with `stop` has had no step that `skip` would have skipped.
    nonfinite: str = field(default="stop", metadata=NEVER_MATTERS)
    """Reaction to a NaN or infinite loss or gradient: stop the run, or skip the optimizer step."""
    deterministic: bool | str = False
    """Use deterministic algorithms only; warn allows others, with a warning, where there is no deterministic one."""
    fast_dev_run: bool = False
    """Run one batch of training, validation and prediction, without checkpoints, to test a config."""
    log_every_n_steps: int = field(default=10, metadata=NEVER_MATTERS)
    """Optimizer steps between two logged steps."""
    progress_bar: bool = field(default=True, metadata=NEVER_MATTERS)
    """Print a line for each epoch and, on a terminal, show a bar of what the run does."""
    lightning: dict[str, Any] = field(
        default_factory=dict,
        metadata=FURTHER_KEYS | matters(as_=lambda config: without_defaults(config.trainer.lightning)),
    )
    """Further arguments of `lightning.Trainer` by name, which are keys of the group: trainer.max_time=00:12:00:00."""

    def __post_init__(self) -> None:
        check_trainer_arguments(self.lightning, [f.name for f in fields(self)])
        for name in ("limit_train_batches", "limit_val_batches", "val_check_interval"):
            value = getattr(self, name)
            if not (value > 0 if type(value) is int else isinstance(value, float) and 0 < value <= 1):
                expected = "a number of batches above 0, or a fraction in (0, 1]"
                raise UserError(f"trainer.{name}={value}; expected {expected}")
        for name in (
            "max_epochs", "max_steps", "check_val_every_n_epoch", "accumulate_grad_batches", "early_stopping",
            "log_every_n_steps", "checkpoint_every_n_steps",
        ):  # fmt: skip
            check_at_least(1, f"trainer.{name}", getattr(self, name))
        if self.gradient_clip_val is not None and not self.gradient_clip_val > 0:
            raise UserError(f"trainer.gradient_clip_val={self.gradient_clip_val:g} must be above 0, or null for none")
        minutes = self.checkpoint_every_n_minutes
        if minutes is not None and not 0 < minutes < math.inf:
            raise UserError(f"trainer.checkpoint_every_n_minutes={minutes:g} must be above 0, or null for none")
        if self.keep_models not in (None, "log") and not (type(self.keep_models) is int and self.keep_models > 0):
            expected = "log, a whole number of optimizer steps above 0, or null"
            raise UserError(f"trainer.keep_models={self.keep_models} is not a schedule; expected {expected}")
        if type(self.deterministic) is not bool and self.deterministic != "warn":
            raise UserError(f"trainer.deterministic={self.deterministic}; expected true, false or warn")
        self._check_end()
        check_one_of("trainer.strategy", self.strategy, ("auto", "ddp", "fsdp"))
        if self.strategy == "fsdp" and self.precision == "16-mixed":
            raise UserError("trainer.strategy=fsdp needs trainer.precision=bf16-mixed or 32-true, not 16-mixed")
        check_one_of("trainer.nonfinite", self.nonfinite, ("stop", "skip"))
        check_one_of("trainer.precision", self.precision, ("32-true", "bf16-mixed", "16-mixed", "auto"))

    @property
    def num_devices(self) -> int:
        if type(self.devices) is int and self.devices > 0:
            return self.devices
        # `auto`, -1 or a list depend on the hardware.
        from istar.finetune.training.trainer import build_bare_trainer

        return build_bare_trainer(self).num_devices

    @property
    def num_processes(self) -> int:
        return self.num_devices * self.num_nodes

    def _check_end(self) -> None:
        """Check further arguments of Lightning about the end of the training, which needs a validation."""
        max_time = self.lightning.get("max_time")
        if max_time is not None and not isinstance(max_time, str | dict):
            expected = "days:hours:minutes:seconds, e.g. 00:12:00:00"
            raise UserError(f"trainer.max_time={max_time} is not a duration; expected {expected}")
        if max_time is not None and self.check_val_every_n_epoch not in (None, 1):
            raise UserError(
                f"trainer.max_time={max_time} may end the training in an epoch without a validation; leave out "
                f"trainer.check_val_every_n_epoch={self.check_val_every_n_epoch}"
            )
        for name in ("min_epochs", "min_steps"):
            if self.max_steps is not None and self.lightning.get(name) is not None:
                raise UserError(
                    f"trainer.{name}={self.lightning[name]} may require more steps than trainer.max_steps="
                    f"{self.max_steps} allows; leave out one of them"
                )


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
    """Raise a `UserError` for an argument that `lightning.Trainer` lacks, or that no config may set.

    `field_names` are the fields of `TrainerConfig`, as suggestions for a misspelt name.
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
    """Raise a `UserError` if the value of an argument has a type that its annotation in `function` does not allow."""
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
