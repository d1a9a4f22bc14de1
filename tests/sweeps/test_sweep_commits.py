"""A sweep over a model of the hub names and trains its runs by one commit, even if the branch moves meanwhile."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from hydra_plugins.istar_sweeper import IstarSweeper
from istar import results
from istar.config import schema
from istar.errors import UserError
from istar.results import RunRecord
from istar.sweeps.study import Study
from istar.sweeps.sweep import SweepRequest, SweepRuns, _make_launcher_overrides, run_search
from istar.tasks import hub

MODEL = ("model=auto", "model.name=org/tiny")
COMMITS = ("12345678901234567890e1234567890123456789", "f" * 40)
"""Of the branch before and after it moves; the first one looks like a number."""


@pytest.fixture
def runs(
    sweeper_for: Callable[..., IstarSweeper], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., SweepRuns]:
    """The runs of a call of a sweep, before which the branch has moved."""
    commits = iter(COMMITS)
    monkeypatch.setattr(hub, "find_commit", lambda name, revision, kind: revision or next(commits))

    def call(*more: str) -> SweepRuns:
        sweeper = sweeper_for(*MODEL, *more)
        settings = schema.load_sweep(sweeper.config)
        request = SweepRequest(settings, (*MODEL, "seed=1,2"), {}, "", tmp_path / "runs", sweeper.compose)
        return SweepRuns(request, Console(quiet=True))

    return call


def test_the_runs_of_a_sweep_have_one_commit(runs: Callable[..., SweepRuns]) -> None:
    call = runs()
    for more in ("seed=1", "model.compile=true"):
        trial = call.add_run((*MODEL, more), "search")
        assert trial.config.model.revision == COMMITS[0]
        assert trial.name == call.run_folders.find(trial.config).name
        # What a launcher composes on another machine.
        overrides = _make_launcher_overrides(trial)
        assert schema.load(call.request.compose(overrides)).model == trial.config.model
    assert runs().add_run(MODEL, "search").config.model.revision == COMMITS[1]


def test_a_search_does_not_mix_the_results_of_two_commits(runs: Callable[..., SweepRuns]) -> None:
    first, second = (runs("sweep.search=optuna") for _ in COMMITS)
    first.folder.mkdir(parents=True)
    with closing(Study(first.request.settings, first.space_by_grid, first.folder, first.run_name)) as study:
        number, overrides = study.ask() or (0, ())
        name = first.add_run(overrides, "search").name
        record = RunRecord(name, "finished", {}, {"metric": "accuracy", "value": 0.5, "epoch": 1})
        study.tell(number, record)
        results.write(record, first.request.root / name)
    with pytest.raises(
        UserError, match=r"a finished trial whose run demo-tiny-\S+ does not exist.*or the earlier commit"
    ):
        run_search(second, None)  # type: ignore[arg-type]
