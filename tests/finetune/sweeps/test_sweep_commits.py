"""All runs of a sweep over a hub model are named after and trained from one commit, even if the branch moves."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from hydra_plugins.istar_sweeper import IstarSweeper
from istar.errors import UserError
from istar.finetune.config import schema
from istar.finetune.execute.identify import name_run
from istar.finetune.sweeps.planned_runs import SweepRequest, SweepRuns
from istar.finetune.sweeps.study import Study
from istar.finetune.sweeps.sweep import _make_launcher_overrides, run_search
from istar.models import hub
from istar.runs.record import write_result
from tests.finetune.sweeps.conftest import merge_sweep_settings
from tests.finished_runs import make_finished_record

MODEL = ("model=auto", "model.name=org/tiny")
COMMITS = ("12345678901234567890e1234567890123456789", "f" * 40)
"""Commits of the branch before and after it moves. The first one looks like a number."""


@pytest.fixture
def make_runs(
    shared_sweeper: IstarSweeper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., SweepRuns]:
    """Return a function that creates the runs of a new call of a sweep; the branch moves between two calls."""
    commits = iter(COMMITS)
    monkeypatch.setattr(hub, "find_commit", lambda name, revision, kind: revision or next(commits))

    def build_runs(*overrides: str) -> SweepRuns:
        settings = merge_sweep_settings(shared_sweeper.config, overrides)
        request = SweepRequest(settings, (*MODEL, "seed=1,2"), {}, "", tmp_path / "runs", shared_sweeper.compose)
        return SweepRuns(request, Console(quiet=True))

    return build_runs


def test_the_runs_of_a_sweep_have_one_commit(make_runs: Callable[..., SweepRuns]) -> None:
    sweep_runs = make_runs()
    for override in ("seed=1", "model.compile=true"):
        trial = sweep_runs.add_run((*MODEL, override))
        assert trial.config.model.revision == COMMITS[0]
        assert trial.name == name_run(trial.config, sweep_runs.key_maker.make(trial.config))
        # A launcher composes these overrides on another machine.
        overrides = _make_launcher_overrides(trial)
        assert schema.load(sweep_runs.request.compose(overrides)).model == trial.config.model
    assert make_runs().add_run(MODEL).config.model.revision == COMMITS[1]


def test_a_search_does_not_mix_the_results_of_two_commits(make_runs: Callable[..., SweepRuns]) -> None:
    first, second = (make_runs("sweep.search=optuna") for _ in COMMITS)
    first.folder.mkdir(parents=True)
    with closing(Study(first.request.settings, first.space_by_grid, first.folder, first.run_name)) as study:
        trial_number, overrides = study.ask() or (0, ())
        trial = first.add_run(overrides)
        record = make_finished_record(trial.name, trial.config)
        study.tell(trial_number, record)
        write_result(record, first.request.root / trial.name)
    with pytest.raises(UserError, match=r"a finished trial, but its run demo-tiny-\S+ does not exist"):
        run_search(second, None)  # type: ignore[arg-type]
