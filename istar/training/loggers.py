"""Weights & Biases beside `metrics.csv`: started within seconds and finished properly, whatever happens."""

import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import Logger

from istar.config import Config, WandbConfig
from istar.errors import UserError, shorten
from istar.files import write_text
from istar.hub import obstacle
from istar.schema import to_dict
from istar.training.metrics_file import MetricsFile

_INIT_SECONDS = 10.0
_FINISH_SECONDS = 60.0

log = logging.getLogger(__name__)


@contextmanager
def logging_to(trainer: L.Trainer, metrics: MetricsFile, config: Config, folder: Path) -> Iterator[None]:
    """Attach the run's loggers to the trainer, and tell them how the run ended.

    Without `wandb.finish` the process's next run would write into this one.
    """
    trainer.loggers = [metrics]
    if isinstance(config.logger, WandbConfig) and trainer.is_global_zero:
        trainer.loggers.append(_wandb_logger(config.logger, config, folder))
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


def _wandb_logger(settings: WandbConfig, config: Config, folder: Path) -> Logger:
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    mode = _mode(settings)
    if mode == "online" and (reason := obstacle(wandb.Settings().base_url)):
        mode = _offline(reason, folder)
    init: dict[str, Any] = {
        "id": _run_id(folder),
        "resume": "allow",
        "name": folder.name,
        "project": settings.project,
        "entity": settings.entity,
        "group": settings.group,
        "tags": settings.tags,
        "dir": folder,
        "config": to_dict(config),
        "settings": wandb.Settings(init_timeout=_INIT_SECONDS, finish_timeout=_FINISH_SECONDS),
    }
    try:
        run = wandb.init(mode=mode, **init)  # type: ignore[arg-type]
    except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
        raise UserError(f"Weights & Biases: {shorten(error)}; logger.mode=offline needs no key") from error
    except wandb.errors.CommError as error:
        run = wandb.init(mode=_offline(shorten(error), folder), **init)  # type: ignore[arg-type]
    # The step of the training, not the count of calls, which differs between a resumed and an undisturbed run.
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return WandbLogger(experiment=run, save_dir=folder)


def _mode(settings: WandbConfig) -> str:
    if settings.mode != "auto":
        return settings.mode
    import wandb

    return os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")


def _offline(reason: str, folder: Path) -> str:
    log.warning(
        "Weights & Biases cannot be used now (%s); this run is logged offline: wandb sync %s sends it later",
        reason,
        folder / "wandb" / "offline-run-*",
    )
    return "offline"


def _run_id(folder: Path) -> str:
    """One W&B run for a run, however often it is resumed, and another one when it is started anew."""
    path = folder / "wandb" / "run-id"
    if not path.exists():
        write_text(path, uuid.uuid4().hex[:12])
    return path.read_text()
