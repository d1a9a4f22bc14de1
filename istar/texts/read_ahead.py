"""Reading ahead of a consumer, in a thread."""

from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def read_ahead(items: Generator[T], num_ahead: int = 2) -> Generator[T]:
    """Yield the items of a generator that runs in a thread, at most `num_ahead` items ahead of the caller.

    An error of the generator is raised here, after the items before it. Closing ends the thread, as soon as it has
    computed its present item, and closes the generator. An error in the caller's loop closes nothing by itself: use
    `contextlib.closing`.
    """

    def take() -> list[T]:
        return list(islice(items, 1))

    executor = ThreadPoolExecutor(1, "read_ahead")
    with closing(items):
        try:
            waiting = deque(executor.submit(take) for _ in range(num_ahead))
            while item := waiting.popleft().result():
                waiting.append(executor.submit(take))
                yield item[0]
        finally:
            executor.shutdown(cancel_futures=True)
