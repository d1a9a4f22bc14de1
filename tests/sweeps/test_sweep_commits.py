"""A sweep over a model of the hub names and trains its runs by one commit, even if the branch moves meanwhile."""

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from hydra_plugins.istar_sweeper import IstarSweeper
from istar.config import schema
from istar.runs import store
from istar.sweeps.sweep import Runs, SweepRequest, _launcher_overrides

MODEL = ("model=auto", "model.name=org/tiny")
COMMITS = ("0123456789" * 4, "f" * 40)
"""Of the branch before and after it moves; the first one looks like a number."""


def test_the_runs_of_a_sweep_have_one_commit(
    sweeper_for: Callable[..., IstarSweeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = iter(COMMITS)
    monkeypatch.setattr(store, "find_commit", lambda *_: next(commits))
    sweeper = sweeper_for(*MODEL)
    request = SweepRequest(schema.load_sweep(sweeper.config), MODEL, {}, "", Path("runs"), sweeper.compose)
    runs = Runs(request, Console(quiet=True))
    for more in ("seed=1", "model.compile=true"):
        trial = runs.add((*MODEL, more), "search")
        assert trial.config.model.revision == COMMITS[0]
        assert trial.name == runs.folders(trial.config).name
        # What a launcher composes on another machine.
        assert schema.load(sweeper.compose(_launcher_overrides(trial))).model == trial.config.model
