"""A callback that logs the tokens per second of the training, and a progress bar that shows the time to go."""

import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar
from torch import Tensor

from istar.measures.processes import sum_over_processes
from istar.training.module import log_immediately, token_mask

KEY = "train/tokens_per_second"


def seconds_to_go(seconds: float, steps: int, remaining: int) -> float:
    """Return the duration of `remaining` further steps if they are as fast as the `steps` that took `seconds`."""
    return seconds / steps * remaining


@dataclass(eq=False)
class TokenRate(L.Callback):
    """Log the training's tokens per second every `log_every_n_steps` optimizer steps.

    Tokens are counted without padding and over all processes. The time is that since the last logged step, including
    the time spent on waiting for data and on writing checkpoints, but without validations.

    Attributes:
        max_steps: number of optimizer steps after which the training stops within its epochs; None for no limit.
        tokens_per_second: the latest logged rate; None before.
        time_to_go: estimated time until the training ends, as `h:mm:ss`, from all steps since it started or was
            resumed, including validations; empty until the first logged step.
    """

    max_steps: int | None = None
    tokens_per_second: float | None = field(default=None, init=False)
    time_to_go: str = field(default="", init=False)
    _tokens: Tensor | None = field(default=None, init=False)
    # Start of the interval, moved forward by each validation's duration; None before the first batch.
    _since: float | None = field(default=None, init=False)
    _validation_start: float = field(default=0.0, init=False)
    _first_step: int = field(default=0, init=False)
    _start: float = field(default=0.0, init=False)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._first_step, self._start = trainer.global_step, time.perf_counter()
        self._tokens, self._since = None, None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # The first interval starts here, because the first epoch may start with a refresh of Sigma_S.
        self._since = time.perf_counter() if self._since is None else self._since
        tokens = token_mask(batch).sum()
        self._tokens = tokens if self._tokens is None else self._tokens + tokens

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validation_start = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._since is not None:
            self._since += time.perf_counter() - self._validation_start

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        step = trainer.global_step + 1
        if step % trainer.log_every_n_steps or self._tokens is None or self._since is None:  # type: ignore[attr-defined]
            return
        tokens = float(sum_over_processes(self._tokens.double()))
        now = time.perf_counter()
        self.tokens_per_second = tokens / (now - self._since)
        self._tokens, self._since = None, now
        log_immediately(trainer, {KEY: self.tokens_per_second})
        total = min(int(trainer.estimated_stepping_batches), self.max_steps or sys.maxsize)
        left = seconds_to_go(now - self._start, step - self._first_step, total - step)
        self.time_to_go = str(timedelta(seconds=round(left)))


class TrainingBar(RichProgressBar):
    """Lightning's progress bar of an epoch, with the tokens per second and the time to go until the training ends."""

    def __init__(self, rate: TokenRate) -> None:
        super().__init__(leave=True)
        self._rate = rate

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """Return the values that the bar shows, by name."""
        metrics: dict[str, Any] = super().get_metrics(trainer, pl_module)
        if self._rate.tokens_per_second is None:
            return metrics
        return {**metrics, "tokens/s": f"{self._rate.tokens_per_second:,.0f}", "to go": self._rate.time_to_go}
