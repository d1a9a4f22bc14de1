"""Weights & Biases beside `metrics.csv`: started within seconds and finished properly, whatever happens."""

import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import WandbLogger

from istar.config import Config, WandbConfig
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
    """Attach the run's loggers to the trainer, and tell W&B how the run ended.

    Whoever ends well finalizes `metrics` within the block; here only what a broken run has logged is saved.
    """
    trainer.loggers = [metrics]
    if isinstance(config.logger, WandbConfig) and trainer.is_global_zero:
        trainer.loggers.append(_wandb_logger(config.logger, config, folder, _run_id(folder)))
    exit_code = 1
    try:
        yield
        exit_code = 0
    finally:
        if exit_code:
            # What ended the run is the reason to tell, not that a full disk does not take the last rows either.
            with suppress(OSError):
                metrics.finalize("failed")
        for logger in trainer.loggers:
            if isinstance(logger, Wandb):
                logger.finish(exit_code)


def log_outcome(trainer: L.Trainer, record: Mapping[str, Any]) -> None:
    """Send what `result.json` will say to W&B, where that is used."""
    for logger in trainer.loggers:
        if isinstance(logger, Wandb):
            logger.log_outcome(record)


@rank_zero_only
def answer_agent(config: Config, record: Mapping[str, Any], folder: Path) -> None:
    """Tell an agent of a W&B sweep, which waits for a run that it has named, the outcome of one finished before."""
    agents = _id_of_agent()
    if agents is not None and isinstance(config.logger, WandbConfig):
        logger = _wandb_logger(config.logger, config, folder, agents)
        logger.log_outcome(record)
        logger.finish(exit_code=0)


class Wandb(WandbLogger):
    """W&B, whose service is a process of its own: should that die, it is missed, but the run goes on.

    Args:
        experiment: what `wandb.init` gave.
        save_dir: the run's folder.
    """

    def __init__(self, experiment: Any, save_dir: Path) -> None:
        super().__init__(experiment=experiment, save_dir=save_dir)
        self._is_lost = False

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._attempt(lambda: WandbLogger.log_metrics(self, metrics, step))

    def log_outcome(self, record: Mapping[str, Any]) -> None:
        """Log a run's record: tables, and the summary that stands for the run in W&B's own tables.

        Args:
            record: the fields of `result.json`.
        """
        self._attempt(lambda: self.experiment.summary.update(_summary(record)))
        self._attempt(lambda: self._log_figures(record))

    def _log_figures(self, record: Mapping[str, Any]) -> None:
        """Tables are asked of the server at once, and again for as long as it fails: another thread may wait for it."""
        thread = threading.Thread(target=lambda: self._attempt(lambda: self.experiment.log(_figures(record))))
        thread.daemon = True
        thread.start()
        thread.join(_FINISH_SECONDS)
        if thread.is_alive():
            log.warning(
                "Weights & Biases does not answer; the tables of this run are missing there, its metrics are not"
            )

    def finish(self, exit_code: int) -> None:
        """Close W&B's run; an exit code other than 0 makes it a failed one."""
        import wandb

        self._attempt(lambda: self.experiment.finish(exit_code=exit_code))
        if self._is_lost:
            # It could not be closed, so it is left behind together with its service.
            with suppress(Exception):
                wandb.teardown(exit_code=exit_code)
            wandb.run = None

    def _attempt(self, call: Callable[[], object]) -> None:
        if self._is_lost:
            return
        try:
            call()
        except Exception as error:  # whatever its connection and its service come upon
            self._is_lost = True
            reason = shorten(f"{type(error).__name__}: {error}")
            log.warning("Weights & Biases has failed (%s); the run goes on without it, metrics.csv has all", reason)


def _summary(record: Mapping[str, Any]) -> dict[str, Any]:
    """The headline's epoch under the names that every epoch was logged by: left alone, W&B would show the last one."""
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


def _figures(record: Mapping[str, Any]) -> dict[str, Any]:
    """IsoScore* by layer, before training and at the headline's epoch: a table, and a figure of it."""
    import wandb

    before, after = record["isotropy"]["before"], record["isotropy"]["after"]
    layers = [layer for layer in after if layer != "union"]
    rows: list[Any] = [[layer, before[layer], after[layer]] for layer in after]
    curves = [[scores[layer] for layer in layers] for scores in (before, after)]
    title = f"IsoScore* by layer (0: embeddings), {record['name']}"
    return {
        "trainer/global_step": record["epochs"][-1]["step"],
        "isotropy/by_layer": wandb.Table(columns=["layer", "before", "after"], data=rows),
        "isotropy/figure": wandb.plot.line_series(
            [int(layer) for layer in layers], curves, keys=["before", "after"], title=title, xname="layer"
        ),
    }


def _wandb_logger(settings: WandbConfig, config: Config, folder: Path, run_id: str) -> Wandb:
    # Reports on W&B itself would go to the server from an offline run, too, and hold up the end of the process; whose
    # account it is has been asked by `_obstacle`, and would be asked twice more with retries.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_X_DISABLE_VIEWER", "true")
    import wandb

    # An agent has them in the environment, and W&B warns of others.
    place = {"id": run_id, "project": settings.project, "entity": settings.entity} if _id_of_agent() is None else {}
    init: dict[str, Any] = {
        **place,
        "resume": "allow",
        # Never into a run that the same process has open, another trial's or the caller's.
        "reinit": "create_new",
        "name": folder.name,
        "group": settings.group,
        "job_type": config.reg.name,
        "tags": settings.tags,
        "dir": folder,
        "config": to_dict(config),
        "settings": wandb.Settings(init_timeout=_INIT_SECONDS, finish_timeout=_FINISH_SECONDS),
    }
    try:
        mode = _mode(settings.mode)
        if mode == "online" and (reason := _obstacle()):
            mode = _offline(reason, folder)
        run = wandb.init(mode=mode, **init)  # type: ignore[arg-type]
    # A ValueError is one of the environment's settings.
    except (wandb.errors.UsageError, wandb.errors.AuthenticationError, ValueError) as error:
        raise UserError(f"Weights & Biases: {shorten(error)}; logger.mode=offline needs no key") from error
    except wandb.errors.CommError as error:
        # The service still holds the id of the run that it could not start.
        wandb.teardown(exit_code=1)
        run = wandb.init(mode=_offline(shorten(error), folder), **init)  # type: ignore[arg-type]
    # The step of the training, not the count of calls, which differs between a resumed and an undisturbed run.
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return Wandb(run, folder)


def _mode(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    import wandb

    session = wandb.setup().settings
    if session.mode not in ("online", "run"):
        return str(session.mode)
    return "online" if session.identity_token_file or _key(session) else "offline"


def _key(session: Any) -> str | None:
    """The API key, looked for where W&B does; neither the terminal nor the server is asked."""
    from wandb.sdk.lib.wbauth import read_netrc_auth

    key: str | None = session.api_key or read_netrc_auth(host=session.base_url)
    return key


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

    status, reason = probe(ask)
    if status == 401 and key:
        raise UserError(
            f"Weights & Biases: {session.base_url} refuses the API key; mend WANDB_API_KEY or call `wandb login`, "
            "or go without a key by logger.mode=offline"
        )
    # Without a key, W&B asks for one or says that it needs one.
    return reason or (f"HTTP status {status}" if status >= 400 and status != 401 else "")


def _offline(reason: str, folder: Path) -> str:
    log.warning(
        "Weights & Biases cannot be used now (%s); this run is logged offline: wandb sync %s sends it later",
        reason,
        folder / "wandb" / "offline-run-*",
    )
    return "offline"


def _run_id(folder: Path) -> str:
    """One W&B run for a run, however often it is resumed, and another one when it is started anew.

    In a W&B sweep it is the one that the agent has named, and stays that if the run is resumed without an agent.
    """
    path = folder / "wandb" / "run-id"
    agents = _id_of_agent()
    if agents is not None:
        write_text(path, agents)
    elif not path.exists():
        write_text(path, uuid.uuid4().hex[:12])
    return path.read_text()


def _id_of_agent() -> str | None:
    """The W&B run that an agent of a sweep has started this process for."""
    return os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
