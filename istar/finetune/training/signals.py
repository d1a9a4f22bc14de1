"""Handling of the signals that stop a run: SIGTERM, SIGUSR1 and SIGUSR2 (SLURM, before the time limit), and Ctrl-C."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import lightning as L

from istar.errors import StoppedError, describe_stop

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
REPEAT_SECONDS = 2.0
"""Seconds to ignore a repeated signal: SLURM signals a process and its parent, which forwards the signal."""


@contextmanager
def preserve_signal_handlers() -> Iterator[None]:
    """Restore the handlers of the stop signals after the `with` block; Lightning does not restore Ctrl-C's."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    previous_handlers = {
        signal_number: signal.getsignal(signal_number) for signal_number in STOP_SIGNALS if is_main_thread
    }
    try:
        yield
    finally:
        for signal_number, handler in previous_handlers.items():
            # The handler is None if it was not installed from Python.
            if handler is not None:
                signal.signal(signal_number, handler)


class StopSignal(L.Callback):
    """Stop the run at a safe point after a stop signal. A later signal of the same kind has its default effect.

    During training, the run stops after the next optimizer step, when `Checkpoints` saves its state. During validation
    and the refresh of the shrinkage covariance, there is nothing new to save, and the run stops at the next batch.

    Attributes:
        signal_number: number of the latest stop signal; None if none was received.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._first_received_at: dict[int, float] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._install_handlers(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._install_handlers(trainer)

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.raise_if_signaled()

    def raise_if_signaled(self) -> None:
        """Raise a `StoppedError` if a signal was received. Call it where there is nothing new to save."""
        if self.signal_number is not None:
            self.raise_stopped("the last checkpoint is kept")

    def raise_stopped(self, saved_state: str) -> NoReturn:
        assert self.signal_number is not None
        stop = describe_stop(self.signal_number)
        raise StoppedError(f"{stop}: {saved_state}; run the same command to resume", self.signal_number)

    def _install_handlers(self, trainer: L.Trainer) -> None:
        """Install the handlers of the stop signals, and stop the run if Lightning has already received SIGTERM."""
        # These replace Lightning's handlers, which would end the training without a checkpoint. Lightning restores the
        # earlier handlers when it is done. Only the main thread may install handlers.
        if threading.current_thread() is threading.main_thread():
            for signal_number in STOP_SIGNALS:
                signal.signal(signal_number, self._handle_signal)
        # Lightning's handler received SIGTERM before: Lightning would exit later with code 0 and without a result.
        if trainer.received_sigterm:
            self.signal_number = signal.SIGTERM
            self.raise_if_signaled()

    def _handle_signal(self, signal_number: int, frame: FrameType | None) -> None:
        """Remember the signal, or apply its default effect if it was first received over `REPEAT_SECONDS` ago."""
        self.signal_number = signal_number
        now = time.monotonic()
        if now - self._first_received_at.setdefault(signal_number, now) > REPEAT_SECONDS:
            signal.signal(
                signal_number, signal.default_int_handler if signal_number == signal.SIGINT else signal.SIG_DFL
            )
            signal.raise_signal(signal_number)
