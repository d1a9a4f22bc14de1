"""Callbacks that log the training's tokens per second, and that show its progress and the remaining time."""

import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar
from torch import Tensor

from istar.finetune.training.module import log_immediately, token_mask
from istar.measures.accumulator import sum_over_processes

TOKENS_PER_SECOND_KEY = "train/tokens_per_second"


def estimate_remaining_seconds(elapsed_seconds: float, completed_steps: int, remaining_steps: int) -> float:
    """Return the duration of the remaining steps if they are as fast as the completed ones."""
    return elapsed_seconds / completed_steps * remaining_steps


@dataclass(eq=False)
class TokenRate(L.Callback):
    """Log the training's tokens per second every `log_every_n_steps` optimizer steps.

    Tokens are counted without padding and over all processes. The time since the last logged step includes waiting for
    data and writing checkpoints, but not validations.

    Attributes:
        max_steps: number of optimizer steps after which the training stops within its epochs; None for no limit.
        tokens_per_second: latest logged rate; None before the first one.
        remaining_time: estimated time until the training ends, as `h:mm:ss`, from all steps and validations since it
            started or was resumed; empty until the first logged step.
    """

    max_steps: int | None = None
    tokens_per_second: float | None = field(default=None, init=False)
    remaining_time: str = field(default="", init=False)
    _num_tokens: Tensor | None = field(default=None, init=False)
    # Time of the last logged step, plus the durations of later validations; None before the first batch.
    _interval_start: float | None = field(default=None, init=False)
    _validation_start: float = field(default=0.0, init=False)
    _first_step: int = field(default=0, init=False)
    _training_start: float = field(default=0.0, init=False)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._first_step, self._training_start = trainer.global_step, time.perf_counter()
        self._num_tokens, self._interval_start = None, None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # The first interval starts here, because the first epoch may start with a refresh of the shrinkage covariance.
        self._interval_start = time.perf_counter() if self._interval_start is None else self._interval_start
        num_tokens = token_mask(batch).sum()
        self._num_tokens = num_tokens if self._num_tokens is None else self._num_tokens + num_tokens

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validation_start = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._interval_start is not None:
            self._interval_start += time.perf_counter() - self._validation_start

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        """Log the rate of the interval that ends with this optimizer step, and estimate the remaining time."""
        step = trainer.global_step + 1
        is_logged = step % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]
        if not is_logged or self._num_tokens is None or self._interval_start is None:
            return
        num_tokens = float(sum_over_processes(self._num_tokens.double()))
        now = time.perf_counter()
        self.tokens_per_second = num_tokens / (now - self._interval_start)
        self._num_tokens, self._interval_start = None, now
        log_immediately(trainer, {TOKENS_PER_SECOND_KEY: self.tokens_per_second})
        total_steps = min(int(trainer.estimated_stepping_batches), self.max_steps or sys.maxsize)
        elapsed_seconds = now - self._training_start
        remaining_seconds = estimate_remaining_seconds(elapsed_seconds, step - self._first_step, total_steps - step)
        self.remaining_time = str(timedelta(seconds=round(remaining_seconds)))


class TrainingProgressBar(RichProgressBar):
    """Lightning's progress bar of an epoch, with the tokens per second and the time until the training ends."""

    def __init__(self, token_rate: TokenRate) -> None:
        super().__init__(leave=True)
        self._token_rate = token_rate

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        metrics: dict[str, Any] = super().get_metrics(trainer, pl_module)
        if self._token_rate.tokens_per_second is None:
            return metrics
        tokens_per_second = f"{self._token_rate.tokens_per_second:,.0f}"
        return {**metrics, "tokens/s": tokens_per_second, "to go": self._token_rate.remaining_time}


class EpochLines(L.Callback):
    """Print one line at the end of each epoch, for output that is not a terminal, such as a log file."""

    def __init__(self, token_rate: TokenRate) -> None:
        self._token_rate = token_rate

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the number of the epoch, the metrics that a progress bar would show, and the remaining time."""
        if not trainer.is_global_zero:
            return
        num_epochs = f"/{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
        parts = [f"epoch {trainer.current_epoch + 1}{num_epochs}"]
        parts += [f"{name} {float(value):.4g}" for name, value in trainer.progress_bar_metrics.items()]
        if self._token_rate.tokens_per_second is not None:
            parts += [f"{self._token_rate.tokens_per_second:,.0f} tokens/s", f"{self._token_rate.remaining_time} left"]
        print(*parts, sep=" · ", flush=True)
