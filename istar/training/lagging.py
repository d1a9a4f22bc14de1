"""Figures that a device computes and the host reads later, so that it need not wait for them."""

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor

LAG = 8
"""How many later ones are sent before one is read: by then a device is done with it, and the host never far ahead."""

T = TypeVar("T")


class Lagging(Generic[T]):
    """Hands out what was sent, in order, each one when `LAG` later ones have been sent; from a CPU at once.

    When one comes out is a matter of counting, not of time, so that all processes see theirs at the same point of
    the training.
    """

    def __init__(self) -> None:
        self._sent: deque[tuple[T, Tensor, torch.Event | None]] = deque()

    def send(self, about: T, values: Tensor) -> None:
        """Copy values to the host as soon as they are there.

        Args:
            about: what they are, handed out with them.
            values: (n,), not changed afterwards.
        """
        arrived = None
        # On a device the copy goes to pinned memory.
        host = values.detach().to("cpu", non_blocking=True)
        if values.device.type != "cpu":
            arrived = torch.Event(values.device)
            arrived.record()
        self._sent.append((about, host, arrived))

    def read(self, everything: bool = False) -> Iterator[tuple[T, list[float]]]:
        """What it is time for.

        Args:
            everything: wait also for what was sent last.
        """
        while self._sent and (everything or len(self._sent) > self._lag()):
            about, host, arrived = self._sent.popleft()
            if arrived is not None:
                arrived.synchronize()
            yield about, host.tolist()

    def _lag(self) -> int:
        return 0 if self._sent[0][2] is None else LAG
