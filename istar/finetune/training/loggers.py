"""Logging to Weights & Biases, to TensorBoard and to other loggers of Lightning."""

import inspect
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import loggers
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from istar.errors import UserError, shorten
from istar.finetune.config import Config, TensorBoardConfig, WandbConfig
from istar.finetune.config.output_config import LIGHTNING_LOGGERS
from istar.finetune.config.schema import to_dict
from istar.finetune.config.trainer_config import check_argument_types
from istar.finetune.training.history import MetricsFile
from istar.runs.names import isotropy_key


class ResultLogger(Logger):
    """A logger that also logs the result of a finished run, and learns how the run has ended."""

    @abstractmethod
    def log_result(self, result: Mapping[str, Any]) -> None:
        """Log the content of `result.json`."""

    @abstractmethod
    def finish(self, exit_code: int) -> None:
        """Close the logger; an exit code other than 0 marks the run as failed."""


@contextmanager
def attach_loggers(trainer: L.Trainer, metrics_file: MetricsFile, config: Config, folder: Path) -> Iterator[None]:
    """Attach the metrics file and the configured loggers to a trainer; close them after the `with` block.

    If the block raises an exception, the W&B run is marked as failed, and the metrics logged so far are written to
    `metrics_file`. Otherwise, the caller must finalize `metrics_file` within the block.
    """
    trainer.loggers = [metrics_file]
    if trainer.is_global_zero:
        trainer.loggers.extend(_make_loggers(config, folder))
    exit_code = 1
    try:
        yield
        exit_code = 0
    finally:
        if exit_code:
            # An error while writing, such as a full disk, must not hide the error that ended the run.
            with suppress(OSError):
                metrics_file.finalize("failed")
        for logger in trainer.loggers:
            if isinstance(logger, ResultLogger):
                logger.finish(exit_code)


def check_further_loggers(config: Config) -> None:
    """Check the loggers of `logger.also` without creating them, because some write files or contact a server.

    Raises a `UserError` if the library of a logger is not installed, or the logger does not take an argument.
    """
    for name, arguments in config.logger.also.items():
        module = LIGHTNING_LOGGERS[name]
        if find_spec(module) is None:
            raise UserError(f"logger.also.{name} needs {module}; pip install {module}")
        try:
            inspect.signature(getattr(loggers, name)).bind(**_add_folder(name, arguments, ""))
        except TypeError as error:
            raise _make_logger_error(name, error) from error
        check_argument_types(f"logger.also.{name}", getattr(loggers, name), arguments)


def log_result(trainer: L.Trainer, result: Mapping[str, Any]) -> None:
    """Log a finished run's result, the content of its `result.json`, to the loggers of the trainer.

    W&B and TensorBoard also get the isotropy of each layer. Loggers of `logger.also` get the metrics of the best epoch.
    """
    for logger in trainer.loggers[1:]:  # the first one is the metrics file
        if isinstance(logger, ResultLogger):
            logger.log_result(result)
        else:
            logger.log_metrics({f"best/val/{name}": value for name, value in result["metrics"].items()})
            logger.finalize("success")


def _make_loggers(config: Config, folder: Path) -> Iterator[Logger]:
    if isinstance(config.logger, WandbConfig):
        # W&B takes seconds to import.
        from istar.finetune.training.wandb_logger import load_or_create_run_id, start_wandb_run

        yield start_wandb_run(config.logger, config, folder, load_or_create_run_id(folder))
    if isinstance(config.logger, TensorBoardConfig):
        yield TensorBoardResultLogger(folder, name="tensorboard", version="", default_hp_metric=False)
    for name, arguments in config.logger.also.items():
        try:
            logger = getattr(loggers, name)(**_add_folder(name, arguments, str(folder)))
            logger.log_hyperparams(to_dict(config))
        except Exception as error:  # the types depend on the library
            raise _make_logger_error(name, error) from error
        yield logger


def _add_folder(name: str, arguments: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return the arguments of a logger, with the folder for its files unless they have one or it writes none."""
    parameters = inspect.signature(getattr(loggers, name)).parameters
    return {**{key: folder for key in ("save_dir", "root_dir") if key in parameters}, **arguments}


def _make_logger_error(name: str, error: Exception) -> UserError:
    return UserError(f"logger.also.{name}: {shorten(error)}; lightning.pytorch.loggers.{name} has the arguments")


class TensorBoardResultLogger(TensorBoardLogger, ResultLogger):
    """TensorBoard logger that also writes a run's settings and final scores to the table of hyperparameters."""

    @rank_zero_only
    def log_result(self, result: Mapping[str, Any]) -> None:
        scores = {f"val/{name}": value for name, value in result["metrics"].items()}
        scores |= {isotropy_key(layer): score for layer, score in result["isotropy"]["after"].items()}
        settings = {key: value for key, value in result["config"].items() if key not in ("logger", "run")}
        self.log_hyperparams(settings, {f"best/{name}": value for name, value in scores.items()})

    def finish(self, exit_code: int) -> None:
        """Write what is left; a full disk must not hide the error that ended the run."""
        with suppress(OSError):
            self.finalize("failed" if exit_code else "success")
