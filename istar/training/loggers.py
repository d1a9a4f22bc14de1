"""Weights & Biases beside `metrics.csv`: started within seconds and finished properly, whatever happens."""

import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import Logger

from istar.config import Config, WandbConfig
from istar.errors import UserError, shorten
from istar.files import write_text
from istar.hub import PROBE_SECONDS, answer
from istar.schema import to_dict
from istar.training.metrics_file import MetricsFile

_INIT_SECONDS = 10.0
_FINISH_SECONDS = 60.0

log = logging.getLogger(__name__)


@contextmanager
def logging_to(trainer: L.Trainer, metrics: MetricsFile, config: Config, folder: Path) -> Iterator[None]:
    """Attach the run's loggers to the trainer, and tell them how the run ended."""
    trainer.loggers = [metrics]
    if isinstance(config.logger, WandbConfig) and trainer.is_global_zero:
        trainer.loggers.append(_wandb_logger(config.logger, config, folder))
    status = "failed"
    try:
        yield
        metrics.finalize("success")
        status = "success"
    finally:
        if status == "failed":
            # What ended the run is the reason to tell, not that a full disk does not take the last rows either.
            with suppress(OSError):
                metrics.finalize(status)
        for logger in trainer.loggers[1:]:
            _finish_wandb(logger, status)


def _finish_wandb(logger: Logger, status: str) -> None:
    """Without this the process's next run would write into this one."""
    import wandb

    logger.finalize(status)
    wandb.finish(exit_code=0 if status == "success" else 1)


def _wandb_logger(settings: WandbConfig, config: Config, folder: Path) -> Logger:
    # Its reports about itself would go to its server from an offline run, too, and hold up the end of the process.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    mode = _mode(settings.mode)
    if mode == "online" and (reason := _obstacle()):
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
        # The service still holds the id of the run that it could not start.
        wandb.teardown(exit_code=1)
        run = wandb.init(mode=_offline(shorten(error), folder), **init)  # type: ignore[arg-type]
    # The step of the training, not the count of calls, which differs between a resumed and an undisturbed run.
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return WandbLogger(experiment=run, save_dir=folder)


def _mode(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    import wandb

    session = wandb.setup().settings
    if session.mode != "online":
        return str(session.mode)
    return "online" if session.identity_token_file or _key(session) else "offline"


def _key(session: Any) -> str | None:
    """The API key, looked for where W&B does; neither the terminal nor the server is asked."""
    from requests.utils import get_netrc_auth

    login = get_netrc_auth(session.base_url)
    return session.api_key or (login and login[1])


def _obstacle() -> str:
    """Why the W&B server cannot be used; empty if it knows the key.

    Raises:
        UserError: if it refuses the key.
    """
    import requests
    import wandb

    session = wandb.setup().settings
    url, key = f"{session.base_url}/graphql", _key(session)

    def ask() -> int:
        # What W&B itself asks first. Not by the hub's session, which refuses all where HF_HUB_OFFLINE is set.
        query = {"query": "query Viewer { viewer { id } }"}
        login = ("api", key) if key else None
        return requests.post(url, json=query, auth=login, timeout=PROBE_SECONDS).status_code

    status, reason = answer(ask)
    if status == 401 and key:
        raise UserError(
            f"Weights & Biases: {session.base_url} refuses the API key; mend WANDB_API_KEY or call `wandb login`, "
            "or go without a key by logger.mode=offline"
        )
    return reason or (f"HTTP status {status}" if status >= 400 else "")


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
