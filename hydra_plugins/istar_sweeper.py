"""Hydra's sweeper plugin for `-m`, which calls `istar.finetune.sweeps`. Hydra only finds plugins in this package."""

import copy
import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, flag_override

if TYPE_CHECKING:
    from istar.finetune.sweeps.planned_runs import SweepRequest


class IstarSweeper(Sweeper):
    """Runs a sweep; see `istar.finetune.sweeps.sweep`.

    `params` maps keys to the values to sweep over, as in Hydra's basic sweeper. The command line takes precedence.
    """

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        self.params = dict(params or {})

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context = config, hydra_context
        # Runs need no launcher. joblib imports the plugins again, and Hydra would warn about their options.
        with flag_override(config, "readonly", False):
            texts = [text for text in config.hydra.overrides.hydra if not re.match(r"[+~]*hydra.launcher\b", text)]
            config.hydra.overrides.hydra = texts
        # Hydra sets it for each run, but the sweep needs run.root, which may be ${hydra:runtime.cwd}/runs.
        job_config = _without_storage(config)
        HydraConfig.instance().set_config(job_config)
        self.launcher = None
        _check_launcher(config)
        # istar.finetune.sweeps.pool replaces Hydra's basic launcher, which executes the runs one after another in this
        # process.
        if config.hydra.runtime.choices["hydra/launcher"] != "basic":
            self.launcher = Plugins.instance().instantiate_launcher(
                hydra_context=hydra_context, task_function=task_function, config=job_config
            )
        self._launched = 0

    def sweep(self, arguments: list[str]) -> None:
        from istar.drawing.terminal import make_console
        from istar.errors import UserError, mask_secrets
        from istar.finetune.processes import ranks
        from istar.finetune.sweeps.sweep import run_sweep

        ranks.fix_slurm_detection()
        if ranks.has_external_launcher():
            raise UserError("-m starts the processes of its runs by itself; call it without torchrun or srun")
        if self.launcher is None:
            self._refuse_job_callbacks()
        command = mask_secrets(f"{sys.argv[0]} {shlex.join(sys.argv[1:])}")
        # After a return, Hydra calls on_multirun_end; as for its own sweepers, not after a failure.
        if code := run_sweep(self.request(arguments, command), make_console()):
            sys.exit(code)

    def request(self, arguments: Sequence[str], command: str) -> "SweepRequest":
        """Return the sweep that the overrides request; `command` is the command line, for messages that repeat it.

        Raises:
            UserError: if a key of `sweep` is unknown or has a value that is not allowed.
        """
        from istar.finetune.config import schema
        from istar.finetune.sweeps.planned_runs import SweepRequest

        return SweepRequest(
            settings=schema.load_sweep(self.config),
            arguments=arguments,
            params=self.params,
            command=command,
            root=Path(self.config.run.root).expanduser(),
            compose=self.compose,
            config_loader=self.hydra_context.config_loader,
            environment={name: str(value) for name, value in self.config.hydra.job.env_set.items()},
            launcher=self._launch if self.launcher is not None else None,
        )

    def _refuse_job_callbacks(self) -> None:
        """Raise a `UserError` for Hydra callbacks at the start or end of a run, which executes in other processes."""
        from istar.errors import UserError

        for callback in self.hydra_context.callbacks.callbacks:
            for name in ("on_job_start", "on_job_end"):
                nothing = getattr(Callback, name)
                if getattr(type(callback), name, nothing) is not nothing:
                    raise UserError(
                        f"hydra.callbacks: {type(callback).__name__}.{name} is not called with -m, because runs have "
                        "processes without Hydra; use on_multirun_start and on_multirun_end"
                    )

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Compose the config of a run as Hydra does, without its `hydra` node, whose values are filled in.

        Raises:
            HydraException: if an override does not fit the config.
            UserError: if the config depends on the number of the run in the sweep.
        """
        from istar.errors import UserError

        sweep_config = HydraConfig.instance().cfg
        composed = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        config = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
        for key in ("job.num", "job.id"):
            if f"{{hydra:{key}}}" in OmegaConf.to_yaml(config):
                raise UserError(
                    f"${{hydra:{key}}} has no value with -m, because a run is identified by its config and has no "
                    "number; run folders are named after their configs"
                )
        HydraConfig.instance().set_config(composed)
        try:
            OmegaConf.resolve(config)
        finally:
            HydraConfig.instance().cfg = sweep_config
        return config

    def _launch(self, jobs: Sequence[Sequence[str]]) -> list[Any]:
        """Execute runs through Hydra's launcher; return the record or the error of each.

        Raises a `UserError` if the launcher fails as a whole.
        """
        from istar.errors import UserError, shorten
        from istar.finetune.processes.launch import make_import_variables

        assert self.launcher is not None
        # The jobs inherit the environment, even from sbatch.
        os.environ.update(make_import_variables())
        try:
            returns = self.launcher.launch([list(overrides) for overrides in jobs], initial_job_idx=self._launched)
        except Exception as error:
            # submitit appends the whole output of a killed job to its message.
            message = shorten(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", 500)
            raise UserError(
                f"{message}; jobs of a queue go on; after them, the same command gathers the results and runs the rest"
            ) from error
        self._launched += len(jobs)
        outcomes: list[Any] = []
        for job in returns:
            try:
                outcomes.append(job.return_value)
            except Exception as error:
                outcomes.append(UserError(f"{type(error).__name__}: {shorten(error)}"))
        return outcomes


def _check_launcher(config: DictConfig) -> None:
    """Raise a `UserError` if a launcher is not installed, or it has a Ray that would wait for ever or for minutes."""
    from istar.errors import UserError, shorten
    from istar.finetune.execute import extras
    from istar.finetune.sweeps.pool import list_visible_gpus

    name = config.hydra.runtime.choices["hydra/launcher"]
    extra = name.partition("_")[0]
    if extra in ("ray", "joblib"):
        extras.require(f"hydra/launcher={name}", extra)
    if extra != "ray":
        return
    num_gpus, init = config.hydra.launcher.ray.remote.num_gpus, config.hydra.launcher.ray.init
    key = f"hydra.launcher.ray.remote.num_gpus={num_gpus}"
    if not isinstance(num_gpus, int | float):
        raise UserError(f"{key} is not a number; set it, or trainer.devices, to the number of GPUs of a run")
    if init.address == "local":
        if num_gpus > (available := len(list_visible_gpus()) if init.num_gpus is None else init.num_gpus):
            raise UserError(f"{key}: this machine has {available} GPUs; hydra.launcher.ray.remote.num_gpus=0 uses CPUs")
        return
    if not Path(config.run.root).expanduser().is_absolute():
        raise UserError(f"run.root={config.run.root}: the nodes of a Ray cluster need an absolute path that they share")
    address = os.environ.get("RAY_ADDRESS", "auto") if init.address == "auto" else str(init.address)
    if match := re.fullmatch(r"(?:ray://)?([^:/]+):(\d+)", address):
        try:
            socket.create_connection((match[1], int(match[2])), timeout=10).close()
        except OSError as error:
            raise UserError(f"no Ray can be reached at {address} ({shorten(error)}); no run has started") from error


def _without_storage(config: DictConfig) -> DictConfig:
    """Return a copy of a config without `sweep.storage`, a possible password that launchers would write to files."""
    copied = copy.deepcopy(config)
    with flag_override(copied, ["readonly", "struct"], False):
        copied.sweep.storage = None
        overrides = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
        copied.hydra.overrides.task = [text for text in overrides if "sweep.storage" not in text]
        copied.hydra.job.override_dirname = ""
    return copied


ConfigStore.instance().store(
    group="hydra/sweeper", name="istar", node={"_target_": f"{__name__}.{IstarSweeper.__name__}", "params": None}
)
