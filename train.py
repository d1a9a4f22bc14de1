"""Fine-tune an encoder: `python train.py task=rte reg=istar reg.lambda=-1`; `--help` shows the choices."""

import os
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
from istar.errors import StoppedError, UserError

SHOW_TRACE = os.environ.get("HYDRA_FULL_ERROR") == "1"

schema.register()


def refuse(message: str, code: int = 2) -> NoReturn:
    """Say what is wrong in one line and leave."""
    # Of the processes that torchrun or srun have started, one speaks.
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


def start(settings: Config) -> object:
    """Here, or in processes of its own: each run of a multirun, and each that has several devices."""
    launch.tell_slurm_apart()
    is_multirun = HydraConfig.get().mode == RunMode.MULTIRUN
    if is_multirun and launch.is_one_of_many():
        raise UserError("-m starts the processes of its runs by itself; call it without torchrun or srun")
    processes = launch.processes_to_start(settings.trainer)
    if is_multirun:
        return one_of_many_runs(settings, processes)
    if processes > 1:
        return launch.launch(settings, processes, SHOW_TRACE)
    from rich.console import Console

    from istar.run import run

    return run(settings, Console())


def one_of_many_runs(settings: Config, processes: int) -> object:
    """A run of a multirun: should it fail, it is told, and the others have their turn; a signal ends them all."""
    try:
        return launch.launch(settings, processes, SHOW_TRACE)
    except StoppedError:
        raise
    except UserError as error:
        print(f"error: {' '.join(HydraConfig.get().overrides.task)}: {error}", file=sys.stderr)
        return error


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> object:
    """One run, or one of a multirun."""
    try:
        # Libraries are imported later, so that --help and mistakes in the config need not wait for them.
        return start(schema.load(config))
    except UserError as error:
        if SHOW_TRACE:
            raise
        # Not an exception that Hydra would catch and comment on.
        refuse(str(error), error.exit_code)


if __name__ == "__main__":
    # Makes Hydra hand its errors on rather than print them over many lines.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        main()
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
