"""Logging to TensorBoard and to Weights & Biases.

Timeouts and fallbacks keep an unreachable W&B server from stopping a run.
"""

import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import lightning as L
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from istar.config import Config, TensorBoardConfig, WandbConfig
from istar.config.schema import to_dict
from istar.errors import UserError, shorten
from istar.files import write_text
from istar.tasks.hub import PROBE_SECONDS, probe
from istar.training.layer_isotropy import isotropy_key
from istar.training.metrics_file import MetricsFile

_INIT_SECONDS = 10.0
_FINISH_SECONDS = 60.0

log = logging.getLogger(__name__)


@contextmanager
def logging_to(trainer: L.Trainer, metrics: MetricsFile, config: Config, folder: Path) -> Iterator[None]:
    """Attach the run's loggers to the trainer, and close the W&B run or TensorBoard's file at the end of the block.

    The W&B run is marked as failed if the block raises. In that case the metrics logged so far are also written to
    `metrics`; a successful run must finalize `metrics` itself within the block.
    """
    trainer.loggers = [metrics]
    if isinstance(config.logger, WandbConfig) and trainer.is_global_zero:
        trainer.loggers.append(_wandb_logger(config.logger, config, folder, _run_id(folder)))
    if isinstance(config.logger, TensorBoardConfig) and trainer.is_global_zero:
        trainer.loggers.append(TensorBoard(folder, name="tensorboard", version="", default_hp_metric=False))
    exit_code = 1
    try:
        yield
        exit_code = 0
    finally:
        if exit_code:
            # An error while writing, such as a full disk, must not hide the error that ended the run.
            with suppress(OSError):
                metrics.finalize("failed")
        for logger in trainer.loggers:
            if isinstance(logger, Wandb):
                logger.finish(exit_code)
            elif isinstance(logger, TensorBoard):
                with suppress(OSError):
                    logger.finalize("failed" if exit_code else "success")


def log_outcome(trainer: L.Trainer, record: Mapping[str, Any]) -> None:
    """Log the fields of `result.json` to W&B or TensorBoard, if the run uses one of them."""
    for logger in trainer.loggers:
        if isinstance(logger, Wandb | TensorBoard):
            logger.log_outcome(record)


@rank_zero_only
def log_outcome_to_agent(config: Config, record: Mapping[str, Any], folder: Path) -> None:
    """Log the outcome of a run that was finished before, if a W&B sweep agent started this process and waits for it."""
    run_id = _agent_run_id()
    if run_id is not None and isinstance(config.logger, WandbConfig):
        logger = _wandb_logger(config.logger, config, folder, run_id)
        logger.log_outcome(record)
        logger.finish(exit_code=0)


class TensorBoard(TensorBoardLogger):
    """Log for TensorBoard; the run's settings and scores are in its table of hyperparameters."""

    @rank_zero_only
    def log_outcome(self, record: Mapping[str, Any]) -> None:
        """Log the settings of the run with the metrics and the isotropy of the best epoch."""
        scores = {f"val/{name}": value for name, value in record["metrics"].items()}
        scores |= {isotropy_key(layer): score for layer, score in record["isotropy"]["after"].items()}
        settings = {key: value for key, value in record["config"].items() if key not in ("logger", "run")}
        self.log_hyperparams(settings, {f"best/{name}": value for name, value in scores.items()})


class Wandb(WandbLogger):
    """Log to W&B; after its first error, such as a crash of its service process, stop logging with a warning."""

    _has_failed = False

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._attempt(lambda: WandbLogger.log_metrics(self, metrics, step))

    def log_outcome(self, record: Mapping[str, Any]) -> None:
        """Log the fields of `result.json`: a summary, a table and a figure."""
        self._attempt(lambda: self.experiment.summary.update(_summary(record)))
        # W&B retries the upload of tables and figures without limit, so it happens in a thread with a timeout.
        log_tables = partial(self._attempt, lambda: self.experiment.log(_isotropy_tables(record)))
        thread = threading.Thread(target=log_tables, daemon=True)
        thread.start()
        thread.join(_FINISH_SECONDS)
        if thread.is_alive():
            log.warning("Weights & Biases does not answer; the run there has its metrics, but lacks its tables")

    def finish(self, exit_code: int) -> None:
        """Close the W&B run; an exit code other than 0 marks it as failed."""
        import wandb

        self._attempt(lambda: self.experiment.finish(exit_code=exit_code))
        if self._has_failed:
            # The run could not be closed, so its service process is stopped.
            with suppress(Exception):
                wandb.teardown(exit_code=exit_code)
            wandb.run = None

    def _attempt(self, call: Callable[[], object]) -> None:
        """Call a function of W&B unless W&B has failed before; on an error, warn and stop logging."""
        if self._has_failed:
            return
        try:
            call()
        except Exception as error:  # W&B raises errors of many types when its connection or service fails.
            self._has_failed = True
            reason = shorten(f"{type(error).__name__}: {error}")
            log.warning(
                "Weights & Biases has failed (%s); the run goes on without it, and metrics.csv has all metrics", reason
            )


def _summary(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the best epoch by logged name, to replace those of the last epoch in W&B's summary."""
    after, before = record["isotropy"]["after"], record["isotropy"]["before"]
    return {
        "status": record["status"],
        **{f"headline/{name}": value for name, value in record["headline"].items()},
        **{f"val/{name}": value for name, value in record["metrics"].items()},
        **{f"constant/{name}": value for name, value in record["baseline"].items()},
        "collapsed": any(record["collapsed"].values()),
        **{isotropy_key(layer): score for layer, score in after.items()},
        **{f"before/{isotropy_key(layer)}": score for layer, score in before.items()},
        "skipped_steps": record["skipped_steps"],
        "seconds/total": record["timing"]["total"],
    }


def _isotropy_tables(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a W&B table and a line plot of IsoScore by layer, before training and at the best epoch."""
    import wandb

    before, after = record["isotropy"]["before"], record["isotropy"]["after"]
    rows: list[Any] = [[layer, before[layer], after[layer]] for layer in after]
    layers = [layer for layer in after if layer != "union"]
    curves = [[scores[layer] for layer in layers] for scores in (before, after)]
    title = f"IsoScore by layer (0: embeddings), {record['name']}"
    figure = wandb.plot.line_series(list(map(int, layers)), curves, ["before", "after"], title, xname="layer")
    return {
        "trainer/global_step": record["epochs"][-1]["step"],
        "isotropy/by_layer": wandb.Table(columns=["layer", "before", "after"], data=rows),
        "isotropy/figure": figure,
    }


def _wandb_logger(settings: WandbConfig, config: Config, folder: Path, run_id: str) -> Wandb:
    """Start or resume a W&B run, offline if the server cannot be used; refuse invalid settings or API keys."""
    # W&B's error reports are sent even by offline runs and delay the end of the process. The viewer query is disabled
    # because `_server_problem` has already made it, and W&B would repeat it twice with retries.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_X_DISABLE_VIEWER", "true")
    import wandb

    init: dict[str, Any] = {
        "resume": "allow",
        # Do not reuse a W&B run that is already open in this process, such as that of another trial.
        "reinit": "create_new",
        "name": folder.name,
        "group": settings.group,
        "job_type": config.reg.name,
        "tags": settings.tags,
        "dir": folder,
        "config": to_dict(config),
        "settings": wandb.Settings(init_timeout=_INIT_SECONDS, finish_timeout=_FINISH_SECONDS),
    }
    if _agent_run_id() is None:
        # A sweep agent sets these in the environment, and W&B warns if they are given again.
        init |= {"id": run_id, "project": settings.project, "entity": settings.entity}
    try:
        mode = _mode(settings.mode)
        if mode == "online" and (reason := _server_problem()):
            mode = _fall_back_to_offline(reason, folder)
        run = wandb.init(mode=mode, **init)  # type: ignore[arg-type]
    # W&B raises a ValueError for invalid settings in the environment.
    except (wandb.errors.UsageError, wandb.errors.AuthenticationError, ValueError) as error:
        raise UserError(f"Weights & Biases: {shorten(error)}; logger.mode=offline needs no key") from error
    except wandb.errors.CommError as error:
        # The service keeps the id of the run that it could not start, so it must be stopped first.
        wandb.teardown(exit_code=1)
        run = wandb.init(mode=_fall_back_to_offline(shorten(error), folder), **init)  # type: ignore[arg-type]
    # Use the training step as the x-axis. W&B's count of log calls differs between resumed and uninterrupted runs.
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return Wandb(experiment=run, save_dir=folder)


def _mode(mode: str) -> str:
    """Return the W&B mode to use; `auto` follows WANDB_MODE, and is offline if there is no API key."""
    if mode != "auto":
        return mode
    import wandb

    settings = wandb.setup().settings
    if settings.mode not in ("online", "run"):
        return str(settings.mode)
    return "online" if settings.identity_token_file or _api_key(settings) else "offline"


def _api_key(settings: Any) -> str | None:
    """Return the API key from W&B's settings or the netrc file; None if there is none. Never prompts the user."""
    if settings.api_key:
        return str(settings.api_key)
    # `wandb login` stores the key as the password of the server's host and port.
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        entry = netrc(path).authenticators(urlsplit(settings.base_url).netloc)
    except (OSError, NetrcParseError):
        return None
    return entry[2] if entry else None


def _server_problem() -> str:
    """Return why the W&B server cannot be used; an empty string if it can. Refuse an API key that it rejects."""
    import requests
    import wandb

    settings = wandb.setup().settings
    url, key = f"{settings.base_url}/graphql", _api_key(settings)

    def send_request() -> int:
        # This is the first query that W&B itself makes. The hub's session would reject it if HF_HUB_OFFLINE is set.
        query = {"query": "query Viewer { viewer { id } }"}
        login = ("api", key) if key else None
        return requests.post(url, json=query, auth=login, timeout=PROBE_SECONDS).status_code

    status, reason = probe(send_request)
    if status == 401 and key:
        raise UserError(
            f"Weights & Biases: {settings.base_url} refuses the API key; correct WANDB_API_KEY or call `wandb login`, "
            "or log without a key with logger.mode=offline"
        )
    # Status 401 without a key is not a problem of the server: W&B then asks for a key or reports that it needs one.
    return reason or (f"HTTP status {status}" if status >= 400 and status != 401 else "")


def _fall_back_to_offline(reason: str, folder: Path) -> str:
    """Warn that the run is logged offline, and return that mode."""
    log.warning(
        "Weights & Biases cannot be used now (%s); this run is logged offline; send it later with: wandb sync %s",
        reason,
        folder / "wandb" / "offline-run-*",
    )
    return "offline"


def _run_id(folder: Path) -> str:
    """Return the id of the W&B run, from a sweep agent or random; it is stored so that a resumed run continues it."""
    path = folder / "wandb" / "run-id"
    agent_run_id = _agent_run_id()
    if agent_run_id is not None or not path.exists():
        write_text(path, agent_run_id or uuid.uuid4().hex[:12])
    return path.read_text()


def _agent_run_id() -> str | None:
    """Return the id of the W&B run for which a sweep agent started this process; None without an agent."""
    return os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
