"""How tests wait: for an event, for as long as a busy machine may need."""

import time
from collections.abc import Callable

SECONDS = 600.0
"""The longest wait for anything. It only ends a hang, so it is never to decide a test on a slow machine."""


def until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    """Wait for a condition, and fail if it never holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def until_the_next_second() -> None:
    """Wait until the clock shows another second, by which W&B names the folder of a run."""
    second = int(time.time())
    until(lambda: int(time.time()) > second)
