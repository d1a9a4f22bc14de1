"""How the threads of OpenMP wait for each other, which OpenMP reads from the environment when torch is loaded."""

from collections.abc import MutableMapping

_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""The variables that set it: of all OpenMP libraries, of GNU's, and of Intel's and LLVM's."""


def let_threads_sleep(environment: MutableMapping[str, str]) -> None:
    """Make OpenMP's threads sleep while they wait, unless these environment variables already say how they wait.

    By default they spin. Next to busy processes, a spinning thread takes the core from the thread that it waits for,
    and a product on two cores takes several times as long.
    """
    if not any(name in environment for name in _VARIABLES):
        environment["OMP_WAIT_POLICY"] = "passive"
