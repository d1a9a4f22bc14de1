"""Starts processes as forks of a server that has imported the libraries once, which each would take seconds for.

The server imports from the folder that pytest was started in. `train.py` itself, as a user starts it, is
tests/cli/test_train.py's.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import BaseContext
from pathlib import Path

from torch.multiprocessing import start_processes

import istar
from istar.cli.main import train_main
from istar.runs.fork_server import IMPORT_TIME_VARIABLES, PRELOADED_MODULES, RANK_KEYS, is_supported

REPOSITORY = Path(__file__).resolve().parents[1]
METHOD = "forkserver" if is_supported() else "spawn"
"""How processes are started. Elsewhere than on Linux, a process that has loaded the libraries cannot be forked."""
MODULES = [
    *PRELOADED_MODULES,
    "istar.cli.train",
    "istar.training.pruning",
    "istar.integrations.transformers",
    "tests.forks",
]


def forking() -> BaseContext:
    """The context of `multiprocessing` whose processes are forks of the server; on Linux alone, see `METHOD`."""
    context = multiprocessing.get_context(METHOD)
    context.set_forkserver_preload(MODULES)
    return context


def works_in_a_fork(environment: Mapping[str, str]) -> bool:
    """Whether none of these variables is read on import, with another value than the server has."""
    return not any(
        name in IMPORT_TIME_VARIABLES or name.startswith("HF_") or (name in RANK_KEYS and value != "0")
        for name, value in environment.items()
    )


def train(arguments: Sequence[str], folder: Path, environment: Mapping[str, str], files: Sequence[Path]) -> None:
    """Do what `python train.py` does in a folder with this environment; stdout and stderr go to the two files."""
    assert Path(istar.__file__).is_relative_to(REPOSITORY), f"the server has imported {istar.__file__}"
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for descriptor, path in enumerate(files, start=1):
        with path.open("ab") as file:
            os.dup2(file.fileno(), descriptor)
    sys.exit(train_main(arguments, "python train.py"))


def run_in_processes(function: Callable[..., object], arguments: tuple[object, ...], processes: int) -> None:
    """Call `function(rank, *arguments)` in several forks at once; raises the error of one that fails."""
    forking()
    start_processes(function, arguments, processes, start_method=METHOD)
