"""Fine-tune an encoder: `python train.py task=rte reg=istar reg.lambda=-1`; `--help` shows the choices."""

import os
import sys
from typing import NoReturn

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from istar import schema
from istar.errors import UserError

SHOW_TRACE = os.environ.get("HYDRA_FULL_ERROR") == "1"

schema.register()


def refuse(message: str) -> NoReturn:
    """Say what is wrong in one line and leave."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> object:
    """One run, or one of a multirun."""
    try:
        # Only here, so that --help and mistakes in the config need not wait for the libraries.
        settings = schema.load(config)
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
