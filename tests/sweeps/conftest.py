"""Hydra's side of a sweep, without a process of its own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import HydraContext

from hydra_plugins.istar_sweeper import IstarSweeper

CONF = Path(__file__).resolve().parents[2] / "conf"


@pytest.fixture
def sweeper_for() -> Iterator[Callable[..., IstarSweeper]]:
    """The sweeper that Hydra makes of a command line."""

    def make(*arguments: str) -> IstarSweeper:
        master = compose("config", overrides=list(arguments), return_hydra_config=True)
        HydraConfig.instance().set_config(master)
        sweeper = IstarSweeper(master.hydra.sweeper.params)
        context = HydraContext(GlobalHydra.instance().config_loader(), Callbacks(master))
        sweeper.setup(hydra_context=context, task_function=lambda config: None, config=master)
        return sweeper

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield make
    HydraConfig.instance().cfg = None
