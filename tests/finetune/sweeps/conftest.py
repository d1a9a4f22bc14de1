"""Fixtures that build a sweep as Hydra does, in the process of the tests."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import HydraContext
from rich.console import Console
from sqlalchemy import Engine, event

from hydra_plugins.istar_sweeper import IstarSweeper
from istar.finetune.sweeps.planned_runs import SweepRequest, SweepRuns
from istar.records.config import schema

CONF = Path(__file__).resolve().parents[3] / "conf"
TINY = ("reg.num_points=200", "task.limit_train=32", "task.limit_validation=9", "data.batch_size=8",
        "trainer.max_epochs=2", "trainer.accelerator=cpu", "trainer.progress_bar=false")  # fmt: skip


def compose_sweeper(*arguments: str) -> IstarSweeper:
    """Return the sweeper that Hydra creates for the arguments of a command line."""
    master = compose("config", overrides=list(arguments), return_hydra_config=True)
    sweeper = IstarSweeper(master.hydra.sweeper.params)
    context = HydraContext(GlobalHydra.instance().config_loader(), Callbacks(master))
    sweeper.setup(hydra_context=context, task_function=lambda config: None, config=master)
    return sweeper


@event.listens_for(Engine, "connect")
def wait_for_no_disk(connection: Any, record: Any) -> None:
    """Let SQLite write the files of the tests' studies without waiting for the disk."""
    connection.execute("PRAGMA synchronous=OFF")


@functools.cache
def compose_shared_sweeper(*arguments: str) -> IstarSweeper:
    """Return a sweeper that all tests with these arguments share, because composing takes half a second."""
    return compose_sweeper(*arguments)


@pytest.fixture
def make_sweeper() -> Iterator[Callable[..., IstarSweeper]]:
    """Yield a function that returns the sweeper that Hydra creates for the arguments of a command line."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield compose_sweeper
    HydraConfig.instance().cfg = None


@pytest.fixture
def make_runs(tmp_path: Path, make_sweeper: Callable[..., IstarSweeper]) -> Callable[..., SweepRuns]:
    """Return a function that returns the runs of a sweep for the arguments of a command line; none is started."""

    def build_runs(*arguments: str) -> SweepRuns:
        sweeper = compose_shared_sweeper(*(argument for argument in arguments if "," not in argument))
        HydraConfig.instance().set_config(sweeper.config)
        settings = schema.load_sweep(sweeper.config)
        arguments = (*arguments, f"run.root={tmp_path / 'runs'}")
        request = SweepRequest(settings, arguments, {}, "python train.py", tmp_path / "runs", sweeper.compose)
        return SweepRuns(request, Console(quiet=True))

    return build_runs


def with_grids(sweep: SweepRuns, grids: dict[str, dict[str, Any]], **settings: Any) -> SweepRuns:
    """Return the same sweep over named grids, with other settings of `sweep`, before any run is added."""
    changed = replace(sweep.request.settings, grids=grids, **settings)
    return SweepRuns(replace(sweep.request, settings=changed), Console(quiet=True))


def with_all_runs(sweep: SweepRuns) -> SweepRuns:
    """Add the runs of all grids to a sweep, and return it."""
    sweep.add_grids()
    return sweep
