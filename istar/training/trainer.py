"""The Lightning trainer: its settings and callbacks."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, RichProgressBar

from istar.config import TrainerConfig
from istar.errors import UserError, shorten
from istar.training.checkpoints import AtomicCheckpointIO, Checkpoints


def build_trainer(
    settings: TrainerConfig,
    headline: str,
    folder: Path,
    callbacks: Sequence[L.Callback],
    checkpoints: Checkpoints | None,
) -> L.Trainer:
    """The trainer of a run that keeps its files in `folder`; nothing is written yet.

    Args:
        settings: of the config.
        headline: metric that stops early.
        folder: the run's; its name is the run's name.
        callbacks: stand before those for early stopping, the progress bar and checkpoints.
        checkpoints: writes them; None keeps none.

    Raises:
        UserError: if Lightning refuses the settings.
    """
    monitoring = _settings_callbacks(settings, headline)
    last = [] if checkpoints is None else [checkpoints]
    return _trainer(
        settings,
        max_epochs=settings.max_epochs,
        accumulate_grad_batches=settings.accumulate_grad_batches,
        gradient_clip_val=settings.gradient_clip_val,
        deterministic=settings.deterministic,
        fast_dev_run=settings.fast_dev_run,
        log_every_n_steps=settings.log_every_n_steps,
        enable_progress_bar=settings.progress_bar,
        enable_checkpointing=checkpoints is not None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        callbacks=[*callbacks, *monitoring, *last],
        default_root_dir=folder,
    )


def bare_trainer(settings: TrainerConfig) -> L.Trainer:
    """One that trains nothing, but knows the hardware.

    Raises:
        UserError: if Lightning refuses the settings.
    """
    return _trainer(settings, enable_checkpointing=False, enable_progress_bar=False)


def processes_to_start(trainer: L.Trainer) -> int:
    """How many processes this machine has to start for a trainer; 1 where torchrun or SLURM have started them."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return 1 if environment is None or environment.creates_processes_externally else trainer.num_devices


def count_devices(settings: TrainerConfig) -> int:
    """What `auto`, -1 or a list of devices comes to on this machine.

    Raises:
        UserError: if Lightning refuses the settings.
    """
    if type(settings.devices) is int and settings.devices > 0:
        return settings.devices
    return bare_trainer(settings).num_devices


def check_hardware(settings: TrainerConfig) -> None:
    """Refuse what Lightning would change with no more than a warning: 16-mixed becomes bf16-mixed on a CPU.

    Raises:
        UserError: for 16-mixed without a CUDA device.
    """
    on_cuda = torch.cuda.is_available() and settings.accelerator in ("auto", "gpu", "cuda")
    if settings.precision == "16-mixed" and not on_cuda:
        raise UserError("trainer.precision=16-mixed needs a CUDA device; use bf16-mixed or 32-true on this machine")


def keeps_checkpoints(settings: TrainerConfig) -> bool:
    """Whether the best epoch's weights can be brought back after training."""
    return settings.checkpoints and not settings.fast_dev_run


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Without advice on workers and banners about devices, which say nothing about the run."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for advice in _ADVICE:
            warnings.filterwarnings("ignore", message=f".*{advice}")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


_ADVICE = (
    "does not have many workers",
    "is smaller than the logging interval",
    "is deprecated, use `isinstance.treespec",
    # Ours is: FineTuningData goes on where it was.
    "your dataloader is not resumable",
    # It is used where there are several processes, and one process needs none.
    "The `srun` command is available",
)


def _trainer(settings: TrainerConfig, **arguments: Any) -> L.Trainer:
    with quiet_lightning():
        try:
            trainer = L.Trainer(
                precision=settings.precision,  # type: ignore[arg-type]
                accelerator=settings.accelerator,
                devices=settings.devices,
                num_nodes=settings.num_nodes,
                strategy=settings.strategy,
                logger=False,
                enable_model_summary=False,
                plugins=_plugins(),
                **arguments,
            )
        except (MisconfigurationException, ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"the trainer refuses its settings: {shorten(error)}") from error
    return trainer


def _plugins() -> list[Any]:
    # By itself Lightning would answer SLURM's signals with a checkpoint and a requeue of its own.
    slurm = [SLURMEnvironment(auto_requeue=False)] if SLURMEnvironment.detect() else []
    return [AtomicCheckpointIO(), *slurm]


def _settings_callbacks(settings: TrainerConfig, headline: str) -> list[L.Callback]:
    callbacks: list[L.Callback] = []
    if settings.early_stopping is not None:
        # With the validation, not with the epoch's end, where the checkpoint is written that has to know.
        callbacks.append(
            EarlyStopping(
                f"val/{headline}", patience=settings.early_stopping, mode="max", check_on_train_epoch_end=False
            )
        )
    if settings.progress_bar:
        callbacks.append(RichProgressBar(leave=True))
    return callbacks
