"""The Lightning trainer: its settings, checkpoints and loggers."""

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger

from istar.config import Config, TrainerConfig, WandbConfig
from istar.errors import UserError, shorten
from istar.schema import to_dict


def build_trainer(config: Config, headline: str, folder: Path, callbacks: Sequence[L.Callback]) -> L.Trainer:
    """The trainer of a run that keeps its files in `folder`; nothing is written yet.

    Args:
        config: of the run.
        headline: metric that chooses the best checkpoint and stops early.
        folder: the run's; its name is the run's name.
        callbacks: stand before those for checkpoints, early stopping and the progress bar.

    Raises:
        UserError: if Lightning refuses the settings.
    """
    settings = config.trainer
    with quiet_lightning():
        try:
            return L.Trainer(
                max_epochs=settings.max_epochs,
                accumulate_grad_batches=settings.accumulate_grad_batches,
                gradient_clip_val=settings.gradient_clip_val,
                precision=settings.precision,  # type: ignore[arg-type]
                accelerator=settings.accelerator,
                devices=settings.devices,
                num_nodes=settings.num_nodes,
                strategy=settings.strategy,
                deterministic=settings.deterministic,
                fast_dev_run=settings.fast_dev_run,
                log_every_n_steps=settings.log_every_n_steps,
                enable_progress_bar=settings.progress_bar,
                enable_checkpointing=settings.checkpoints,
                enable_model_summary=False,
                num_sanity_val_steps=0,
                use_distributed_sampler=False,
                callbacks=[*callbacks, *_settings_callbacks(settings, headline, folder)],
                logger=_loggers(config, folder),
                default_root_dir=folder,
            )
        except (MisconfigurationException, ValueError, TypeError) as error:
            raise UserError(f"the trainer refuses its settings: {shorten(error)}") from error


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


@contextmanager
def closing_loggers(trainer: L.Trainer) -> Iterator[None]:
    """Tell the loggers how the run ended; without `wandb.finish` the process's next run would write into this one."""
    status = "failed"
    try:
        yield
        status = "success"
    finally:
        for logger in trainer.loggers:
            logger.finalize(status)
        if len(trainer.loggers) > 1:
            import wandb

            wandb.finish(exit_code=0 if status == "success" else 1)


_ADVICE = (
    "does not have many workers",
    "is smaller than the logging interval",
    "exists and is not empty. Previous log files",
    "is deprecated, use `isinstance.treespec",
)


def _settings_callbacks(settings: TrainerConfig, headline: str, folder: Path) -> list[L.Callback]:
    monitored: dict[str, Any] = {"monitor": f"val/{headline}", "mode": "max"}
    files: dict[str, Any] = {"dirpath": folder / "checkpoints", "enable_version_counter": False}
    callbacks: list[L.Callback] = []
    if settings.checkpoints:
        callbacks.append(ModelCheckpoint(filename="best", save_weights_only=True, **monitored, **files))
        callbacks.append(ModelCheckpoint(filename="last", **files))
    if settings.early_stopping is not None:
        callbacks.append(EarlyStopping(patience=settings.early_stopping, **monitored))
    if settings.progress_bar:
        callbacks.append(RichProgressBar(leave=True))
    return callbacks


def _loggers(config: Config, folder: Path) -> list[Logger]:
    loggers: list[Logger] = [CSVLogger(folder.parent, name=folder.name, version="")]
    if isinstance(config.logger, WandbConfig):
        loggers.append(_wandb_logger(config.logger, config, folder))
    return loggers


def _wandb_logger(settings: WandbConfig, config: Config, folder: Path) -> Logger:
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    mode = settings.mode
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")
    return WandbLogger(
        name=folder.name,
        project=settings.project,
        entity=settings.entity,
        group=settings.group,
        tags=settings.tags,
        save_dir=folder,
        mode=mode,
        config=to_dict(config),
    )
