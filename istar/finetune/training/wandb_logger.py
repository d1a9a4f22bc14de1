"""Logging to Weights & Biases (W&B); timeouts and fallbacks keep an unreachable server from stopping a run."""

import logging
import os
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import wandb
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import WandbLogger

from istar.errors import UserError, shorten
from istar.files.writing import write_text
from istar.finetune.config import Config, WandbConfig
from istar.finetune.config.schema import to_dict
from istar.finetune.training.loggers import ResultLogger
from istar.models.hub import PROBE_TIMEOUT_SECONDS, request_status
from istar.runs.names import isotropy_key

_INIT_TIMEOUT_SECONDS = 10.0
_FINISH_TIMEOUT_SECONDS = 60.0

log = logging.getLogger(__name__)


@rank_zero_only
def log_result_to_sweep_agent(config: Config, result: Mapping[str, Any], folder: Path) -> None:
    """Log the result of an already finished run to W&B if a W&B sweep agent has started this process."""
    run_id = _get_sweep_agent_run_id()
    if run_id is not None and isinstance(config.logger, WandbConfig):
        logger = start_wandb_run(config.logger, config, folder, run_id)
        logger.log_result(result)
        logger.finish(exit_code=0)


class FailSafeWandbLogger(WandbLogger, ResultLogger):
    """W&B logger that warns and stops logging after W&B's first error, such as a crash of its service process."""

    _has_failed = False

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._call_unless_failed(lambda: WandbLogger.log_metrics(self, metrics, step))

    def log_result(self, result: Mapping[str, Any]) -> None:
        """Log a run's result to W&B: a summary of its scores, and a table and a line plot of the layers' IsoScore."""
        self._call_unless_failed(lambda: self.experiment.summary.update(_make_wandb_summary(result)))
        # W&B retries the upload of tables and figures without limit, so it happens in a thread with a timeout.
        log_charts = partial(self._call_unless_failed, lambda: self.experiment.log(_make_isotropy_charts(result)))
        thread = threading.Thread(target=log_charts, daemon=True)
        thread.start()
        thread.join(_FINISH_TIMEOUT_SECONDS)
        if thread.is_alive():
            log.warning("Weights & Biases does not answer; the run there has its metrics, but lacks its tables")

    def finish(self, exit_code: int) -> None:
        """Close the W&B run; an exit code other than 0 marks it as failed."""
        self._call_unless_failed(lambda: self.experiment.finish(exit_code=exit_code))
        if self._has_failed:
            # The run could not be closed, so its service process is stopped.
            with suppress(Exception):
                wandb.teardown(exit_code=exit_code)
            wandb.run = None

    def _call_unless_failed(self, wandb_call: Callable[[], object]) -> None:
        """Call W&B; after the first error, warn and skip this and all later calls."""
        if self._has_failed:
            return
        try:
            wandb_call()
        except Exception as error:  # W&B raises errors of many types when its connection or service fails.
            self._has_failed = True
            reason = shorten(f"{type(error).__name__}: {error}")
            log.warning(
                "Weights & Biases has failed (%s); the run goes on without it, and metrics.csv has all metrics", reason
            )


def _make_wandb_summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the best epoch's values by logged name, which replace W&B's summary of the last epoch."""
    isotropy_after, isotropy_before = result["isotropy"]["after"], result["isotropy"]["before"]
    return {
        "status": result["status"],
        **{f"headline/{name}": value for name, value in result["headline"].items()},
        **{f"val/{name}": value for name, value in result["metrics"].items()},
        **{f"constant/{name}": value for name, value in result["baseline"].items()},
        "collapsed": any(result["collapsed"].values()),
        **{isotropy_key(layer): score for layer, score in isotropy_after.items()},
        **{f"before/{isotropy_key(layer)}": score for layer, score in isotropy_before.items()},
        "skipped_steps": result["skipped_steps"],
        "seconds/total": result["timing"]["total"],
    }


def _make_isotropy_charts(result: Mapping[str, Any]) -> dict[str, Any]:
    before, after = result["isotropy"]["before"], result["isotropy"]["after"]
    rows: list[Any] = [[layer, before[layer], after[layer]] for layer in after]
    layers = [layer for layer in after if layer != "union"]
    curves = [[scores[layer] for layer in layers] for scores in (before, after)]
    title = f"IsoScore by layer (0: embeddings), {result['name']}"
    line_plot = wandb.plot.line_series(list(map(int, layers)), curves, ["before", "after"], title, xname="layer")
    return {
        "trainer/global_step": result["epochs"][-1]["step"],
        "isotropy/by_layer": wandb.Table(columns=["layer", "before", "after"], data=rows),
        "isotropy/figure": line_plot,
    }


def start_wandb_run(settings: WandbConfig, config: Config, folder: Path, run_id: str) -> FailSafeWandbLogger:
    """Start or resume a W&B run, offline if the server cannot be used, and return its logger.

    Raises a `UserError` if W&B rejects the settings or the API key.
    """
    # W&B's error reports are sent even by offline runs and delay the end of the process. The viewer query, which W&B
    # sends twice with retries, is not needed: the request that starts the run has the same errors.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_X_DISABLE_VIEWER", "true")
    init_arguments: dict[str, Any] = {
        "resume": "allow",
        # Do not reuse a W&B run that is already open in this process, such as another trial's.
        "reinit": "create_new",
        "name": folder.name,
        "group": settings.group,
        "job_type": config.reg.name,
        "tags": [*settings.tags, *(["smoke"] if config.is_smoke else [])],
        "dir": folder,
        "config": to_dict(config),
        "settings": wandb.Settings(init_timeout=_INIT_TIMEOUT_SECONDS, finish_timeout=_FINISH_TIMEOUT_SECONDS),
    }
    if _get_sweep_agent_run_id() is None:
        # A sweep agent sets these in the environment, and W&B warns if they are given again.
        init_arguments |= {"id": run_id, "project": settings.project, "entity": settings.entity}
    try:
        mode = _choose_wandb_mode(settings.mode)
        if mode == "online" and (reason := _find_server_problem()):
            mode = _fall_back_to_offline(reason, folder)
        run = wandb.init(mode=mode, **init_arguments)  # type: ignore[arg-type]
    # W&B raises a ValueError for invalid settings in the environment.
    except (wandb.errors.Error, ValueError) as error:
        hint = _find_wandb_hint(str(error), folder)
        if isinstance(error, wandb.errors.CommError):
            # The service keeps the id of the run that it could not start, so it must be stopped first.
            wandb.teardown(exit_code=1)
        if hint or not isinstance(error, wandb.errors.CommError):
            raise UserError(f"Weights & Biases: {shorten(error)}{hint}") from error
        run = wandb.init(mode=_fall_back_to_offline(shorten(error), folder), **init_arguments)  # type: ignore[arg-type]
    # Use the training step as the x-axis. W&B's count of log calls differs between resumed and uninterrupted runs.
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return FailSafeWandbLogger(experiment=run, save_dir=folder)


def _find_wandb_hint(message: str, folder: Path) -> str:
    if setting := re.search(r"error for Settings\s+(\w+)", message):
        is_tags = setting[1] == "run_tags"
        return f"; correct {'logger.tags' if is_tags else f'the environment variable WANDB_{setting[1].upper()}'}"
    key_hint = "; correct WANDB_API_KEY or call `wandb login`; logger.mode=offline needs no key"
    id_hint = "correct WANDB_RUN_ID" if "WANDB_RUN_ID" in os.environ else f"remove {folder / 'wandb' / 'run-id'}"
    hints = {
        r"^Invalid project name": f"; correct {'WANDB_PROJECT' if 'WANDB_PROJECT' in os.environ else 'logger.project'}",
        r"^Run ID": f"; {id_hint}",
        r"error 401|not logged in": f", so it refuses the API key{key_hint}",
        r"API key": key_hint,
        r"not found|permission denied": "; correct logger.entity and logger.project, or use a key that may write there",
    }
    return next((hint for pattern, hint in hints.items() if re.search(pattern, message, re.IGNORECASE)), "")


def _choose_wandb_mode(mode: str) -> str:
    """Return the W&B mode. The setting `auto` follows WANDB_MODE, but is offline without an API key."""
    if mode != "auto":
        return mode
    settings = wandb.setup().settings
    if settings.mode not in ("online", "run"):
        return str(settings.mode)
    return "online" if settings.identity_token_file or _find_api_key(settings) else "offline"


def _find_api_key(settings: Any) -> str | None:
    """Return the API key from W&B's settings or the netrc file, or None if neither has one. Never prompt the user."""
    if settings.api_key:
        return str(settings.api_key)
    # `wandb login` stores the key as the password of the server's host and port.
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        login = netrc(path).authenticators(urlsplit(settings.base_url).netloc)
    except (OSError, NetrcParseError):
        return None
    if login is None:
        return None
    _, _, password = login
    return password


def _find_server_problem() -> str:
    """Return why the W&B server cannot be reached, or "" if it can; W&B itself would try for 10 s to reach it."""
    url = wandb.setup().settings.base_url

    def send_request() -> int:
        # The hub's session would reject the request if HF_HUB_OFFLINE is set.
        try:
            with urlopen(Request(url, method="HEAD"), timeout=PROBE_TIMEOUT_SECONDS) as response:
                return int(response.status)
        except HTTPError as error:
            return error.code

    status, reason = request_status(send_request)
    return reason or (f"HTTP status {status}" if status >= 500 else "")


def _fall_back_to_offline(reason: str, folder: Path) -> str:
    log.warning(
        "Weights & Biases cannot be used now (%s); this run is logged offline; send it later with: wandb sync %s",
        reason,
        folder / "wandb" / "offline-run-*",
    )
    return "offline"


def load_or_create_run_id(folder: Path) -> str:
    """Return the id of the W&B run: the sweep agent's, the stored one, or a new random one.

    The id is stored in the folder, so that a resumed run continues the same W&B run.
    """
    path = folder / "wandb" / "run-id"
    agent_run_id = _get_sweep_agent_run_id()
    if agent_run_id is not None or not path.exists():
        write_text(path, agent_run_id or uuid.uuid4().hex[:12])
    return path.read_text(errors="replace")


def _get_sweep_agent_run_id() -> str | None:
    return os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
