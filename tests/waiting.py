"""Wait in tests for an event, for as long as a busy machine may need."""

import time
from collections.abc import Callable

SECONDS = 600.0
"""The longest wait for anything, in seconds. It ends only hangs: no test may depend on it, even on a slow machine."""


def until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    """Wait until a condition holds; fail if it does not hold in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def until_the_next_second() -> None:
    """Wait for the next second of the clock, so that W&B, which names folders by the second, uses a new folder."""
    second = int(time.time())
    until(lambda: int(time.time()) > second)
