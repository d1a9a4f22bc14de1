"""Signals of a process that starts others: it forwards them, and delays them until the others can receive them."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


class Receiver(Protocol):
    """What signals are forwarded to, such as `launch.RunProcesses`."""

    def send_signal(self, signal_number: int, /) -> None: ...


@contextmanager
def forward_signals(runs: Sequence[Receiver]) -> Iterator[list[int]]:
    """Forward signals to the processes of the runs during the `with` block; yield the growing list of their numbers."""
    received_signals: list[int] = []

    def forward(signal_number: int, frame: FrameType | None) -> None:
        received_signals.append(signal_number)
        for run in runs:
            run.send_signal(signal_number)

    is_main_thread = threading.current_thread() is threading.main_thread()
    previous_handlers = {
        signal_number: signal.signal(signal_number, forward) for signal_number in FORWARDED_SIGNALS if is_main_thread
    }
    try:
        yield received_signals
    finally:
        for signal_number, handler in previous_handlers.items():
            signal.signal(signal_number, handler)


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Delay signals until the end of the `with` block.

    A process that is started in the block inherits the signal mask, and unblocks the signals when it is ready.
    """
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
