"""The config of a run: all its groups, with the rules that concern several of them.

Defaults are defined only in the dataclasses of the groups, which check their values in `__post_init__`; the files in
conf/ contain only values that differ. `istar.finetune.config.schema` turns these classes into Hydra's schema of keys
and types.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from istar.errors import UserError, did_you_mean
from istar.finetune.config.fields import NEVER_MATTERS, collects_further_keys, matters, values_that_count
from istar.finetune.config.model_config import ModelConfig
from istar.finetune.config.monitor_config import MonitorConfig
from istar.finetune.config.optim_config import OPTIMIZERS, OptimConfig
from istar.finetune.config.output_config import RunConfig
from istar.finetune.config.task_config import DataConfig, TaskConfig
from istar.finetune.config.trainer_config import TrainerConfig

if TYPE_CHECKING:  # imports torch
    from istar.finetune.config.reg_config import RegConfig


@dataclass
class Config:
    """All settings of a run."""

    task: TaskConfig
    model: ModelConfig
    reg: "RegConfig" = field(metadata=matters(as_=lambda config: config.reg.effective))
    data: DataConfig
    optim: OptimConfig
    trainer: TrainerConfig
    monitor: MonitorConfig
    logger: Any = field(metadata=NEVER_MATTERS)
    run: RunConfig = field(metadata=NEVER_MATTERS)
    seed: int = 42
    """Seed of the initialization of the head, of dropout, and of the order of the training data; from 0 to 2^32 - 1."""

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise UserError(f"seed={self.seed} is not a whole number in [0, 2^32)")
        if self.trainer.strategy == "fsdp" and self.data.eval_batch_size < 2:
            # A batch of one example cannot be split to give all processes as many batches.
            raise UserError("trainer.strategy=fsdp needs data.eval_batch_size=2 or more")
        if self.trainer.strategy == "fsdp" and self.optim.name in ("Adafactor", "Rprop"):
            raise UserError(f"{self.optim.name} cannot train sharded weights; use trainer.strategy=ddp, or another one")
        if self.task.stream:
            self._check_stream()

    @property
    def is_smoke(self) -> bool:
        """Whether the run only tests its config, so that no table or comparison counts it."""
        return self.run.smoke or self.trainer.fast_dev_run

    @property
    def is_exact_in_parallel(self) -> bool:
        """Whether W processes with batches of B examples train as one process does with batches of W * B examples."""
        # Each process chooses its share of the points of a reading, which may end the training.
        return not self.task.stream and self.reg.effective.is_exact_in_parallel and not self.monitor.stops

    @property
    def merged_batch_size(self) -> int:
        """Training examples per micro-batch, of all processes together if they train as one process does."""
        return self.data.batch_size * (self.trainer.num_processes if self.is_exact_in_parallel else 1)

    def _check_stream(self) -> None:
        if self.trainer.max_steps is None:
            raise UserError("task.stream=true needs trainer.max_steps, because a stream has no length")
        interval = self.trainer.val_check_interval
        train_limit = self.trainer.limit_train_batches
        is_unlimited = type(train_limit) is float and train_limit == 1
        is_counted = type(interval) is int or interval == 1
        advice_by_key = {
            "task.limit_train": (self.task.limit_train, "set null, and end the training by trainer.max_steps"),
            "task.validation_fraction": (self.task.validation_fraction, "set null"),
            "data.num_workers": (self.data.num_workers or None, "set 0: each process reads its own shards"),
            "trainer.limit_train_batches": (None if is_unlimited else train_limit, "use trainer.max_steps"),
            "trainer.val_check_interval": (None if is_counted else interval, "give a whole number of batches"),
        }
        for key, (value, advice) in advice_by_key.items():
            if value is not None:
                raise UserError(f"{key}={value} does not work with task.stream=true; {advice}")


def settings_of(config: Config) -> dict[str, Any]:
    """Return what decides the outcome of a run besides its data and its model, as plain data.

    Configs with equal settings describe the same run. The groups and keys are those of the command line. Fields that
    never matter are left out, and a value without an effect is replaced by the one that counts; the metadata of each
    field says which, see `istar.finetune.config.fields.matters`. A penalty of weight 0 counts as `reg=none`.
    Raises a `UserError` if `find_task_spec` refuses the task.
    """
    return values_that_count(config, config)


def check_keys(overrides: Iterable[str]) -> None:
    """Raise a `UserError` for a key that its config group lacks and that is much like another key of the group.

    Hydra refuses all unknown keys, but only after seconds: its schema contains the options of penalties, which import
    torch. Keys that are not much like another are left to Hydra, because they may be options of a penalty.
    """
    class_by_group: dict[str, Any] = {group.name: group.type for group in fields(Config) if is_dataclass(group.type)}
    for override in overrides:
        key, equals, _ = override.lstrip("+").partition("=")
        group, _, name = key.partition(".")
        classes = OPTIMIZERS.values() if group == "optim" else filter(None, [class_by_group.get(group)])
        known = [option for config_class in classes for option in fields(config_class)] if name.isidentifier() else []
        known_keys = [f"{group}.{option.name}" for option in known]
        accepts_all = not equals or not known or any(map(collects_further_keys, known))
        if not accepts_all and key not in known_keys and (hint := did_you_mean(key, known_keys, cutoff=0.75)):
            raise UserError(describe_unknown_key(key, hint))


def describe_unknown_key(key: str, hint: str) -> str:
    """Return the message about an unknown key; `hint` names a similar one, as `did_you_mean` returns it."""
    return f"{key}: there is no such key{hint}; `istar train --cfg job` lists all"
