"""Fine-tune an encoder: `python train.py task=rte reg=istar reg.lambda=-1`; `--help` shows the choices."""

import os
import signal
import sys
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from istar import launch, schema
from istar.config import Config
from istar.errors import SHOW_TRACE, StoppedError, UserError
from istar.importing import large_imports

schema.register()


def refuse(message: str, code: int = 2) -> NoReturn:
    """Say what is wrong in one line and leave."""
    # Of the processes that torchrun or srun have started, one speaks.
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


def start(settings: Config, search: str | None) -> object:
    """Here, or in processes of its own: each run of a sweep, and each that has several devices."""
    launch.tell_slurm_apart()
    processes = launch.processes_to_start(settings.trainer)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return one_of_many_runs(settings, processes, search)
    if processes > 1:
        return launch.launch(settings, processes, SHOW_TRACE, search)
    with large_imports():
        from rich.console import Console

        from istar.run import run

    return run(settings, Console(), search)


def one_of_many_runs(settings: Config, processes: int, search: str | None) -> object:
    """A run of a sweep in a place that one of Hydra's launchers has found: should it fail, the sweep is told."""
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


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> object:
    """One run, or one of a multirun."""
    try:
        # Libraries are imported later, so that --help and mistakes in the config need not wait for them.
        return start(schema.load(config), config.sweep.trial)
    except UserError as error:
        if SHOW_TRACE:
            raise
        # Not an exception that Hydra would catch and comment on.
        refuse(str(error), error.exit_code)


if __name__ == "__main__":
    # Makes Hydra hand its errors on rather than print them over many lines.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv[1:] = ["sweep.dry_run=true" if argument == "--dry-run" else argument for argument in sys.argv[1:]]
    try:
        main()
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
