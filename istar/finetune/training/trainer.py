"""Construction of the Lightning trainer from the config."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import EarlyStopping

from istar.errors import UserError, shorten
from istar.finetune.config import TrainerConfig
from istar.finetune.config.trainer_config import check_argument_types
from istar.finetune.training.checkpoints import AtomicCheckpointIO, Checkpoints
from istar.finetune.training.sharded_training import ShardingStrategy
from istar.runs.names import is_lower_better


@dataclass(eq=False)
class StopAfterLastStep(L.Callback):
    """Stop the training after its last step, and always validate after it.

    The last step is number `max_steps`, or the last one of the last epoch. With its own `max_steps`, Lightning omits
    the validation, and resumes differently at the end of an epoch. It also omits the validation if
    `val_check_interval` does not divide the number of batches, or `check_val_every_n_epoch` the number of epochs.
    """

    max_steps: int | None

    def on_train_batch_end(self, trainer: L.Trainer, *arguments: Any) -> None:
        has_reached_max_steps = self.max_steps is not None and trainer.global_step >= self.max_steps
        is_last_epoch = trainer.max_epochs is not None and trainer.current_epoch + 1 >= trainer.max_epochs
        if has_reached_max_steps:
            trainer.should_stop = True
        if has_reached_max_steps or (trainer.is_last_batch and is_last_epoch):
            # Whatever the settings, validate after this batch, which is the last one.
            trainer.val_check_batch = 1
            if trainer.check_val_every_n_epoch is not None:
                trainer.check_val_every_n_epoch = 1


def build_trainer(
    settings: TrainerConfig,
    selection_metric: str,
    folder: Path,
    callbacks: Sequence[L.Callback],
    checkpoints: Checkpoints | None,
) -> L.Trainer:
    """Build the Lightning trainer of a run, without writing any file.

    The given callbacks run first, then those that the settings request, then `checkpoints`. Early stopping monitors the
    metric that selects the best epoch. Raises a `UserError` if Lightning rejects the settings.
    """
    callbacks = list(callbacks)
    if settings.early_stopping is not None:
        # Early stopping is checked after the validation, because the checkpoint at the end of the epoch stores it.
        monitored, mode = f"val/{selection_metric}", "min" if is_lower_better(selection_metric) else "max"
        early_stopping = EarlyStopping(
            monitored, patience=settings.early_stopping, mode=mode, check_on_train_epoch_end=False
        )
        callbacks.append(early_stopping)
    callbacks.append(StopAfterLastStep(settings.max_steps))
    if checkpoints is not None:
        callbacks.append(checkpoints)
    return _construct_trainer(
        settings,
        enable_checkpointing=checkpoints is not None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        callbacks=callbacks,
        default_root_dir=folder,
        **{name: getattr(settings, name) for name in _PASSED_ON},
        **settings.lightning,
    )


# A callback applies `max_steps`, and the validation sets are already cut to `limit_val_batches`, because metrics need
# complete sets.
_PASSED_ON = (
    "max_epochs", "accumulate_grad_batches", "gradient_clip_val", "deterministic", "fast_dev_run", "log_every_n_steps",
    "limit_train_batches", "val_check_interval", "check_val_every_n_epoch",
)  # fmt: skip
"""Settings that Lightning applies."""


def check_validation_interval(settings: TrainerConfig, num_batches: int) -> None:
    """Raise a `UserError` if validations are more than an epoch of `num_batches` apart; Lightning would raise later."""
    interval, is_within_epochs = settings.val_check_interval, settings.check_val_every_n_epoch is not None
    if type(interval) is int and interval > num_batches and is_within_epochs and not settings.fast_dev_run:
        raise UserError(
            f"trainer.val_check_interval={interval}: an epoch has only {num_batches} batches; to count them across "
            "epochs, set trainer.check_val_every_n_epoch=null too"
        )


def build_bare_trainer(settings: TrainerConfig) -> L.Trainer:
    """Build a trainer without callbacks or loggers, to query the hardware or run forward passes."""
    return _construct_trainer(settings, enable_checkpointing=False)


def count_processes_to_start(trainer: L.Trainer) -> int:
    """Return the number of processes to start on this machine, or 1 if torchrun or SLURM has already started them."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return 1 if environment is None or environment.creates_processes_externally else trainer.num_devices


def writes_checkpoints(settings: TrainerConfig) -> bool:
    """Return whether the run writes checkpoints, to restore the weights of the best epoch from."""
    return settings.checkpoints and not settings.fast_dev_run


@contextmanager
def suppress_lightning_messages() -> Iterator[None]:
    """Within the `with` block, suppress Lightning's device banners and the warnings that do not apply to istar."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for message in _SUPPRESSED_WARNINGS:
            warnings.filterwarnings("ignore", message=f".*{message}")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


_SUPPRESSED_WARNINGS = (
    "does not have many workers",
    "is smaller than the logging interval",
    "is deprecated, use `isinstance.treespec",
    # The batches of `build_evaluation_loader` have all rows.
    "using a custom batch sampler",
    # FineTuningData resumes at the right batch by itself.
    "your dataloader is not resumable",
    # With several processes srun is used, and one process does not need it.
    "The `srun` command is available",
)


def _construct_trainer(settings: TrainerConfig, **arguments: Any) -> L.Trainer:
    plugins: list[Any] = [AtomicCheckpointIO()]
    is_sharded = settings.strategy == "fsdp"
    if SLURMEnvironment.detect():
        # With auto_requeue, Lightning would react to SLURM's signals with another checkpoint and a requeue.
        plugins.append(SLURMEnvironment(auto_requeue=False))
    check_argument_types("trainer", L.Trainer, settings.lightning)
    with suppress_lightning_messages():
        try:
            return L.Trainer(
                # FSDP2 casts the weights itself; see `shard`.
                precision="32-true" if is_sharded else settings.precision,  # type: ignore[arg-type]
                accelerator=settings.accelerator,
                devices=settings.devices,
                num_nodes=settings.num_nodes,
                strategy=ShardingStrategy(settings.precision) if is_sharded else settings.strategy,
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                plugins=plugins,
                **arguments,
            )
        except Exception as error:  # the types depend on the setting
            raise UserError(f"the trainer refuses its settings: {shorten(error)}") from error
