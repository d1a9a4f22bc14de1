"""Fixtures that build a sweep as Hydra does, in the process of the tests."""

import copy
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from sqlalchemy import Engine, event

from hydra_plugins.istar_sweeper import IstarSweeper
from istar.cli import train
from istar.finetune.config import SweepConfig, schema
from istar.finetune.sweeps.planned_runs import SweepRequest, SweepRuns

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
def compose_shared_sweeper() -> IstarSweeper:
    """Return a sweeper that tests share: it composes the options of config groups once for all of them."""
    return compose_sweeper()


def merge_sweep_settings(config: DictConfig, arguments: Iterable[str]) -> SweepConfig:
    """Return the settings of the sweep of a config after the `sweep.` overrides among arguments."""
    merged = copy.deepcopy(config)
    overrides = [argument for argument in arguments if argument.startswith("sweep.")]
    for override in OverridesParser.create().parse_overrides(overrides):
        OmegaConf.update(merged, override.key_or_group, override.value(), merge=True)
    return schema.load_sweep(merged)


@pytest.fixture
def make_sweeper() -> Iterator[Callable[..., IstarSweeper]]:
    """Yield a function that returns the sweeper that Hydra creates for the arguments of a command line."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield compose_sweeper
    HydraConfig.instance().cfg = None


@pytest.fixture
def shared_sweeper(make_sweeper: Callable[..., IstarSweeper]) -> IstarSweeper:
    """Return the sweeper of a command line without overrides; read it only."""
    sweeper = compose_shared_sweeper()
    HydraConfig.instance().set_config(sweeper.config)
    return sweeper


@pytest.fixture
def make_runs(tmp_path: Path, shared_sweeper: IstarSweeper) -> Callable[..., SweepRuns]:
    """Return a function that returns the runs of a sweep for the arguments of a command line; none is started."""

    def build_runs(*arguments: str) -> SweepRuns:
        settings = merge_sweep_settings(shared_sweeper.config, arguments)
        arguments = (*arguments, f"run.root={tmp_path / 'runs'}")
        root, loader = tmp_path / "runs", shared_sweeper.hydra_context.config_loader
        compose = shared_sweeper.compose
        request = SweepRequest(settings, arguments, {}, "python train.py", root, compose, config_loader=loader)
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


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the studies of a test in Optuna's storage in memory, in a fraction of the time that a database takes."""
    storage = optuna.storages.InMemoryStorage()
    monkeypatch.setattr(optuna.storages, "get_storage", lambda url: storage)


Call = Callable[..., int]
"""Type of the fixture `call`."""


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    """Return a function that calls `istar train` in this process and `tmp_path`, and returns its exit code."""

    def run_command(*arguments: str) -> int:
        GlobalHydra.instance().clear()
        with pytest.MonkeyPatch.context() as patch:
            # As in a new interpreter; pytest's handlers are there when a test begins.
            patch.setattr(logging.root, "handlers", [])
            try:
                train.run_train(arguments, "istar train")
            except SystemExit as error:
                return int(error.code or 0)
        return 0

    # Hydra configures the logging of the process, and disables the loggers that exist.
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            monkeypatch.setattr(logger, "disabled", logger.disabled)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", [])
    yield run_command
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None
