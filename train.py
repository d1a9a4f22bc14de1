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

from istar import schema
from istar.config import TrainerConfig
from istar.errors import UserError

SHOW_TRACE = os.environ.get("HYDRA_FULL_ERROR") == "1"

schema.register()


def refuse(message: str) -> NoReturn:
    """Say what is wrong in one line and leave."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def refuse_processes_in_multirun(trainer: TrainerConfig) -> None:
    """Lightning starts further processes by repeating the command line, and with it the whole multirun."""
    is_multirun = HydraConfig.get().mode == RunMode.MULTIRUN
    if is_multirun and (trainer.devices, trainer.num_nodes) != (1, 1):
        raise UserError(
            f"trainer.devices={trainer.devices} and trainer.num_nodes={trainer.num_nodes} with -m: the runs of a "
            "multirun have one process each; call train.py once per run, without -m, for several"
        )


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> object:
    """One run, or one of a multirun."""
    try:
        # Only here, so that --help and mistakes in the config need not wait for the libraries.
        settings = schema.load(config)
        refuse_processes_in_multirun(settings.trainer)
        from rich.console import Console

        from istar.run import run

        return run(settings, Console())
    except UserError as error:
        if SHOW_TRACE:
            raise
        # Not an exception that Hydra would catch and comment on.
        refuse(str(error))


if __name__ == "__main__":
    # Makes Hydra hand its errors on rather than print them over many lines.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        if SHOW_TRACE:
            raise
        refuse(schema.explain(error))
    except ValueError as error:
        # Hydra says some mistakes on the command line with a plain one, `task=null` for example.
        if SHOW_TRACE:
            raise
        refuse(f"{schema.explain(error)} (HYDRA_FULL_ERROR=1 shows where)")
