"""How the threads of OpenMP wait for each other, which OpenMP reads from the environment when torch is loaded."""

from collections.abc import MutableMapping

_VARIABLES = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
"""How long threads spin before they sleep: in GNU's library rounds, by default 300,000; in Intel's and LLVM's ms."""


def let_threads_sleep(environment: MutableMapping[str, str]) -> None:
    """Make OpenMP's threads sleep soon while they wait, unless environment variables already say how they wait.

    By default they spin for about a millisecond. Next to busy processes, a spinning thread takes the core from the
    thread that it waits for. Threads that sleep at once would be woken too late on an idle machine.
    """
    if not environment.keys() & {"OMP_WAIT_POLICY", *_VARIABLES}:
        environment.update(_VARIABLES)
