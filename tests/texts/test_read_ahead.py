"""Reading ahead in a thread: order, errors, and the end of the thread."""

import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import closing

import pytest

from istar.texts.read_ahead import read_ahead
from tests.waiting import SECONDS


def count(number: int, started: list[int], error: BaseException | None = None) -> Generator[int]:
    """Yield numbers, and record in `started` those that somebody asked for, and -1 at the end."""
    try:
        for item in range(number):
            started.append(item)
            yield item
        if error is not None:
            raise error
    finally:
        started.append(-1)


def find_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("read_ahead")]


@pytest.mark.parametrize("number", [0, 1, 2, 50])
@pytest.mark.parametrize("num_ahead", [1, 2, 7])
def test_all_items_in_their_order(number: int, num_ahead: int) -> None:
    started: list[int] = []
    assert list(read_ahead(count(number, started), num_ahead)) == list(range(number))
    assert started == [*range(number), -1]
    assert find_threads() == []


def test_another_thread_is_at_most_so_many_items_ahead() -> None:
    names: list[str] = []
    is_asked = [threading.Event() for _ in range(9)]

    def items() -> Generator[int]:
        for number, event in enumerate(is_asked):
            names.append(threading.current_thread().name)
            event.set()
            yield number

    with closing(read_ahead(items(), 3)) as ahead:
        for number in range(4):
            assert next(ahead) == number
            assert is_asked[number + 3].wait(SECONDS)  # without being asked for it
            assert len(names) == number + 4
    assert set(names) == {"read_ahead_0"}


@pytest.mark.parametrize("error", [ValueError("no text"), KeyboardInterrupt()])
def test_an_error_comes_after_the_items_before_it(error: BaseException) -> None:
    seen: list[int] = []
    with pytest.raises(type(error)) as caught:
        seen.extend(read_ahead(count(5, [], error)))
    assert caught.value is error
    assert seen == list(range(5))
    assert find_threads() == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_closing_ends_the_thread_and_the_generator(error: type[BaseException]) -> None:
    started: list[int] = []

    def use_items() -> None:
        with closing(read_ahead(count(10**9, started))) as items:
            for item in items:
                if item == 5:
                    raise error

    with pytest.raises(error):
        use_items()
    assert started[-1] == -1
    assert started[-2] <= 7
    assert find_threads() == []


def test_a_program_ends_although_nothing_is_closed() -> None:
    lines = "from itertools import count", "from istar.texts.read_ahead import read_ahead"
    program = "\n".join([*lines, "items = read_ahead(number for number in count())", "next(items)", "1 / 0"])
    completed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert completed.returncode == 1
    assert completed.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
