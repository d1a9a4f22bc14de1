"""A callback that logs the training's tokens per second."""

import time
from dataclasses import dataclass, field
from typing import Any

import lightning as L
from torch import Tensor

from istar.finetune.training.module import log_immediately, token_mask
from istar.measures.accumulator import sum_over_processes

TOKENS_PER_SECOND_KEY = "train/tokens_per_second"


@dataclass(eq=False)
class TokenRate(L.Callback):
    """Log the training's tokens per second every `log_every_n_steps` optimizer steps.

    Tokens are counted without padding and over all processes. The time since the last logged step includes waiting for
    data and writing checkpoints, but not validations.
    """

    _num_tokens: Tensor | None = field(default=None, init=False)
    # Time of the last logged step, plus the durations of later validations; None before the first batch.
    _interval_start: float | None = field(default=None, init=False)
    _validation_start: float = field(default=0.0, init=False)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
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
        """Log the rate of the interval that ends with this optimizer step."""
        step = trainer.global_step + 1
        is_logged = step % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]
        if not is_logged or self._num_tokens is None or self._interval_start is None:
            return
        num_tokens = float(sum_over_processes(self._num_tokens.double()))
        now = time.perf_counter()
        log_immediately(trainer, {TOKENS_PER_SECOND_KEY: num_tokens / (now - self._interval_start)})
        self._num_tokens, self._interval_start = None, now
