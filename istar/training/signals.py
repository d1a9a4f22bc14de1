"""Signals that ask a run to stop: SIGTERM (schedulers), SIGUSR1 and 2 (SLURM, before the time limit) and Ctrl-C."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import lightning as L

from istar.errors import StoppedError

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
ECHO_SECONDS = 2.0


@contextmanager
def handlers_put_back() -> Iterator[None]:
    """What listened to these signals before the block does so after it; Lightning forgets Ctrl-C."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in STOPPING if is_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: set by something that is not Python.
            if handler is not None:
                signal.signal(number, handler)


class StopSignal(L.Callback):
    """Takes note of the first signal; a later one of the same kind acts as it would have without this callback.

    During training the run stops behind the next optimizer step, where `Checkpoints` saves; during validation and the
    refresh of the shrinkage covariance there is nothing new to save, and it stops at the next batch.

    Attributes:
        number: of the signal that came; None before.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._first: dict[int, float] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._listen(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._listen(trainer)

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.interrupt_if_asked()

    def interrupt_if_asked(self) -> None:
        """Stop here, where nothing needs saving.

        Raises:
            StoppedError: if a signal has come.
        """
        if self.number is not None:
            self.interrupt("the last checkpoint is kept")

    def interrupt(self, what: str) -> NoReturn:
        """Leave the training.

        Raises:
            StoppedError: always.
        """
        assert self.number is not None
        name = signal.Signals(self.number).name
        raise StoppedError(f"stopped by {name}: {what}; the same command goes on from there", self.number)

    def _listen(self, trainer: L.Trainer) -> None:
        # Behind Lightning's own handlers, which would end the training without a checkpoint; Lightning puts back
        # what there was before when it is done. Only the main thread may.
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                signal.signal(number, self._note)
        # One that came while only Lightning listened: it would leave later, with exit code 0 and no result.
        if trainer.received_sigterm:
            self.number = signal.SIGTERM
            self.interrupt_if_asked()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        now = time.monotonic()
        # SLURM signals all processes of a step; what the one that waits for this one hands on is the same once more.
        if now - self._first.setdefault(number, now) > ECHO_SECONDS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            signal.raise_signal(number)
