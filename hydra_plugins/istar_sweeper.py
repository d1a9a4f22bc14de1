"""Hands Hydra's `-m` over to `istar.sweeps`. Hydra finds its plugins in this package and nowhere else."""

import pickle
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

_VALUE = re.compile(r"(?!hydra\.)(seed|\w+\.[\w.]+)=")
"""An override that sets a value, rather than choosing the option of a group or adding or removing a key."""
_HERE = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"


class IstarSweeper(Sweeper):
    """What `-m` does: see `istar.sweeps.sweep`.

    Args:
        params: values to sweep over by key, as in Hydra's own sweeper; the command line goes before them.
    """

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        self.params = dict(params or {})

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context = config, hydra_context
        self.launcher = None
        if config.hydra.launcher._target_ != _HERE:
            self.launcher = Plugins.instance().instantiate_launcher(
                hydra_context=hydra_context, task_function=task_function, config=config
            )
        self._launched = 0
        self._composed: dict[tuple[str, ...], bytes] = {}

    def sweep(self, arguments: list[str]) -> None:
        from rich.console import Console

        from istar.config import schema
        from istar.errors import SHOW_TRACE, UserError
        from istar.runs import launch
        from istar.sweeps.sweep import Request, sweep

        launch.tell_slurm_apart()
        if launch.is_one_of_many():
            raise UserError("-m starts the processes of its runs by itself; call it without torchrun or srun")
        request = Request(
            schema.load_sweep(self.config),
            arguments,
            self.params,
            f"{sys.argv[0]} {shlex.join(sys.argv[1:])}",
            Path(self.config.run.root).expanduser(),
            self._compose,
            self._launch if self.launcher is not None else None,
            SHOW_TRACE,
        )
        sys.exit(sweep(request, Console()))

    def _compose(self, overrides: Sequence[str]) -> DictConfig:
        """As Hydra does, but what several runs have in common, the choice of the groups' options, only once."""
        values = [override for override in overrides if _VALUE.match(override)]
        common = tuple(override for override in overrides if not _VALUE.match(override))
        if common not in self._composed:
            composed = self.hydra_context.config_loader.load_sweep_config(self.config, list(common))
            # Bytes, which are read in a seventh of the time of a deep copy.
            wanted = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
            self._composed[common] = pickle.dumps(wanted)
        config: DictConfig = pickle.loads(self._composed[common])
        for override in map(_parsed, values):
            try:
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
            except OmegaConfBaseException as error:
                raise HydraException(f"Error merging override {override.input_line}") from error
        return config

    def _launch(self, wanted: Sequence[Sequence[str]]) -> list[Any]:
        from istar.errors import UserError, shorten

        assert self.launcher is not None
        try:
            returned = self.launcher.launch([list(overrides) for overrides in wanted], initial_job_idx=self._launched)
        except Exception as error:
            # What submitit says of a job that was killed ends with all that it has printed.
            told = shorten(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", 500)
            raise UserError(
                f"{told}; jobs that still run go on, and then the same command gathers the results and runs the rest"
            ) from error
        self._launched += len(wanted)
        outcomes: list[Any] = []
        for job in returned:
            try:
                outcomes.append(job.return_value)
            except Exception as error:
                outcomes.append(UserError(f"{type(error).__name__}: {shorten(error)}"))
        return outcomes


@cache
def _parsed(override: str) -> Override:
    """Most of a run's overrides are those of its neighbours, and the parser is slow."""
    [parsed] = OverridesParser.create().parse_overrides([override])
    return parsed


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="istar",
    node={"_target_": f"{__name__}.{IstarSweeper.__name__}", "params": None},
)
