"""What `istar train` and `python train.py` do: Hydra composes a config from the command line, and a run is made of it.

`--help` shows the choices.
"""

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from istar.config import Config, schema
from istar.errors import SHOW_TRACE, StoppedError, UserError
from istar.runs import extras, launch
from istar.runs.importing import large_imports


def main(arguments: Sequence[str], command: str) -> None:
    """Carry out one run, or with `-m` several of them; a mistake is one line and an exit code.

    Args:
        arguments: overrides and Hydra's options, as on the command line.
        command: what was typed before them, `istar train`, for the messages that repeat it.
    """
    # Makes Hydra hand its errors on rather than print them over many lines.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # Where Hydra and the sweeper read what was asked.
    sys.argv = [command, *("sweep.dry_run=true" if argument == "--dry-run" else argument for argument in arguments)]
    schema.register()
    try:
        hydra.main(version_base="1.3", config_path=str(schema.config_folder()), config_name="config")(compose_and_run)()
    except UserError as error:
        if SHOW_TRACE:
            raise
        refuse(str(error), error.exit_code)
    except (HydraException, OmegaConfBaseException) as error:
        if SHOW_TRACE:
            raise
        refuse(schema.explain(error))
    except KeyboardInterrupt:
        if SHOW_TRACE:
            raise
        refuse("stopped by SIGINT", 130)
    except ValueError as error:
        # Hydra says some mistakes on the command line with a plain one, `task=null` for example.
        if SHOW_TRACE:
            raise
        refuse(f"{schema.explain(error)} (HYDRA_FULL_ERROR=1 shows where)")


def compose_and_run(config: DictConfig) -> object:
    """One run, or one of a multirun."""
    try:
        # Libraries are imported later, so that --help and mistakes in the config need not wait for them.
        return start(schema.load(config), config.sweep.trial)
    except UserError as error:
        if SHOW_TRACE:
            raise
        # Not an exception that Hydra would catch and comment on.
        refuse(str(error), error.exit_code)


def start(settings: Config, search: str | None) -> object:
    """Train in this process, or in new processes for a run of a sweep or with several devices; returns the result."""
    if search is not None:
        extras.require("sweep.trial", "sweep")
    launch.tell_slurm_apart()
    processes = launch.processes_to_start(settings.trainer)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return one_of_many_runs(settings, processes, search)
    if processes > 1:
        return launch.launch(settings, processes, SHOW_TRACE, search)
    with large_imports():
        from rich.console import Console

        from istar.runs.run import run

    return run(settings, Console(), search)


def one_of_many_runs(settings: Config, processes: int, search: str | None) -> object:
    """Train one run of a multirun in new processes; returns its result, or the error that the sweep is to report."""
    try:
        return launch.launch(settings, processes, SHOW_TRACE, search)
    except StoppedError as error:
        if not launch.in_queue():
            raise
        if error.exit_code == StoppedError.exit_code + signal.SIGTERM:
            launch.wait_for_slurm()
        return error
    except UserError as error:
        return error


def refuse(message: str, code: int = 2) -> NoReturn:
    """Print one line that says what is wrong, and exit with the code."""
    # Only the first of the processes that torchrun or srun have started prints it.
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(f"error: {message}", file=sys.stderr)
    sys.exit(code)
