"""Searches with Optuna: the suggested values, their storage, and its use by later and by concurrent calls."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from istar.errors import UserError
from istar.finetune.config import SweepConfig
from istar.finetune.sweeps.study import Study, list_parameters
from istar.finetune.sweeps.trials import make_search_spaces
from istar.finetune.training.pruning import TrialReference
from istar.runs.record import RunRecord
from tests.finished_runs import NO_KEY

ARGUMENTS = ["reg=istar", "reg.lambda=interval(-5,5)", "optim.lr=tag(log,interval(1e-5,1e-3))", "reg.zeta=0.2,0.4",
             "data.batch_size=int(interval(8,32))"]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def shared_storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the studies of all tests share a database, because its creation takes a quarter of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STORAGE, "storage", f"sqlite:///{tmp_path_factory.mktemp('storage') / 'optuna.db'}")
        yield


STORAGE: dict[str, str] = {}


def open_study(
    folder: Path, arguments: list[str] = ARGUMENTS, grids: Any = None,
    run_name: Callable[[tuple[str, ...]], str] = " ".join, **settings: Any,
) -> Study:  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    sweep_settings = {"search": "optuna", "trials": 4, **STORAGE, **settings}
    return Study(SweepConfig(**sweep_settings), make_search_spaces(arguments, {}, grids or {}, []), folder, run_name)


def make_record(value: float, status: str = "finished", metric: str = "accuracy") -> RunRecord:
    return RunRecord("r", status, {}, NO_KEY, {"metric": metric, "value": value, "epoch": 1})


def parse_overrides(overrides: tuple[str, ...]) -> dict[str, str]:
    return dict(override.split("=") for override in overrides)


@pytest.mark.usefixtures("in_memory")
def test_a_rounded_value_stays_in_its_range(tmp_path: Path) -> None:
    study = open_study(tmp_path, ["reg.lambda=interval(0.123456,0.123457)"], trials=1)
    suggestion = study.ask()
    assert suggestion is not None
    assert suggestion[1] in (("reg.lambda=0.123456",), ("reg.lambda=0.123457",))


@pytest.mark.usefixtures("in_memory")
def test_values_lie_in_their_ranges(tmp_path: Path) -> None:
    study = open_study(tmp_path, trials=3)
    suggested_values = []
    while suggestion := study.ask():
        suggested_values.append(parse_overrides(suggestion[1]))
        study.tell(suggestion[0], make_record(0.5))
    assert len({run_values["reg.lambda"] for run_values in suggested_values}) == len(suggested_values) == 3
    for run_values in suggested_values:
        assert run_values["reg"] == "istar"
        assert -5 <= float(run_values["reg.lambda"]) <= 5
        assert 1e-5 <= float(run_values["optim.lr"]) <= 1e-3
        for key in ("reg.lambda", "optim.lr"):
            assert float(run_values[key]) == float(f"{float(run_values[key]):.4g}")
        assert run_values["reg.zeta"] in ("0.2", "0.4")
        assert 8 <= int(run_values["data.batch_size"]) <= 32
    stored_study = optuna.load_study(study_name=study.name, storage=study.storage)
    assert stored_study.trials[0].distributions == {
        "reg.lambda": FloatDistribution(-5, 5), "optim.lr": FloatDistribution(1e-5, 1e-3, log=True),
        "reg.zeta": CategoricalDistribution(("0.2", "0.4")), "data.batch_size": IntDistribution(8, 32),
    }  # fmt: skip


@pytest.mark.usefixtures("in_memory")
@pytest.mark.parametrize(("metric", "best"), [("accuracy", 2.0), ("perplexity", 1.0)])
def test_the_best_trial_is_that_of_the_best_metric(tmp_path: Path, metric: str, best: float) -> None:
    study = open_study(tmp_path)
    value_by_trial = {}
    for value in (2.0, 1.0):
        suggestion = study.ask()
        assert suggestion is not None
        trial_number, _ = suggestion
        study.tell(trial_number, make_record(value, metric=metric))
        value_by_trial[trial_number] = value
    stored_study = optuna.load_study(study_name=study.name, storage=study.storage)
    assert value_by_trial[stored_study.best_trial.number] == best


def test_what_is_told_is_kept(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    for outcome in (make_record(0.25), make_record(0.75, "pruned"), UserError("it broke")):
        suggestion = study.ask()
        assert suggestion
        study.tell(suggestion[0], outcome)
    stored_trials = optuna.load_study(study_name=tmp_path.name, storage=study.storage).trials
    assert [trial.state.name for trial in stored_trials] == ["COMPLETE", "PRUNED", "FAIL"]
    assert stored_trials[0].value == 0.25
    # Failed trials do not count, but a call starts at most as many trials as were missing when it began.
    assert study.num_trials_left() == 1
    suggestion = study.ask()
    assert suggestion
    study.tell(suggestion[0], UserError("it broke"))
    assert study.num_trials_left() == 0
    assert study.ask() is None
    assert open_study(tmp_path).num_trials_left() == 2
    assert [trial_number for trial_number, _ in study.ended_trials()] == [0, 1]


def test_a_dead_call_is_continued(tmp_path: Path) -> None:
    first = open_study(tmp_path)
    finished_trial, abandoned_trial = first.ask(), first.ask()
    assert finished_trial
    assert abandoned_trial
    first.tell(finished_trial[0], make_record(0.5))
    del first._lock
    second = open_study(tmp_path)
    assert second.ask() == abandoned_trial
    second.tell(abandoned_trial[0], make_record(0.6))
    new_trials = [second.ask(), second.ask()]
    # A sampler that started again from the same seed would suggest the same values.
    assert all(trial and trial[1] not in (finished_trial[1], abandoned_trial[1]) for trial in new_trials)
    assert second.ask() is None


def test_a_living_call_is_left_alone(tmp_path: Path) -> None:
    first, second = open_study(tmp_path), open_study(tmp_path)
    first_trial, second_trial = first.ask(), second.ask()
    assert first_trial
    assert second_trial
    assert first_trial[0] != second_trial[0]
    assert second.ask() is not None
    assert first.ask() is not None
    # Together, both calls have started all four trials.
    assert first.ask() is None
    assert second.ask() is None
    first.close()
    assert second.ask() == first_trial


DISCRETE = ["reg.zeta=0.2,0.4", "data.batch_size=int(interval(8,9))"]
"""A search space of four combinations."""


def run_workers(*workers: Study, jobs: int = 2) -> list[tuple[str, ...]]:
    """Let workers start and end trials in turn, each `jobs` at a time, and return the overrides of all trials.

    The same values always have the best result.
    """
    started, running = [], [[] for _ in workers]
    while True:
        for worker, running_trials in zip(workers, running, strict=True):
            while len(running_trials) < jobs and (suggestion := worker.ask()):
                running_trials.append(suggestion)
                started.append(suggestion[1])
        if not any(running):
            return started
        for worker, running_trials in zip(workers, running, strict=True):
            if running_trials:
                trial_number, overrides = running_trials.pop(0)
                worker.tell(trial_number, make_record(float(overrides == ("reg.zeta=0.4", "data.batch_size=9"))))


def test_workers_try_no_run_twice(tmp_path: Path) -> None:
    studies = [open_study(tmp_path, DISCRETE, trials=3, sampler="random") for _ in range(2)]
    started = run_workers(*studies)
    assert len(started) == len(set(started)) == 3
    stored_trials = optuna.load_study(study_name=tmp_path.name, storage=studies[0].storage).trials
    assert sum(trial.state.name == "COMPLETE" for trial in stored_trials) == 3
    assert studies[0].num_trials_left() == 0


@pytest.mark.usefixtures("in_memory")
def test_a_search_ends_when_all_runs_of_its_space_have_been_tried(tmp_path: Path) -> None:
    studies = [open_study(tmp_path, DISCRETE, trials=9) for _ in range(2)]
    started = run_workers(*studies)
    assert len(started) == len(set(started)) == 4
    stored_trials = optuna.load_study(study_name=tmp_path.name, storage=studies[0].storage).trials
    assert sum(trial.state.name == "COMPLETE" for trial in stored_trials) == 4
    assert all(trial.user_attrs["is_duplicate"] for trial in stored_trials if trial.state.name == "FAIL")


@pytest.mark.usefixtures("in_memory")
def test_what_failed_is_not_tried_again_by_the_same_call(tmp_path: Path) -> None:
    study = open_study(tmp_path, DISCRETE, trials=5)
    started = []
    while suggestion := study.ask():
        started.append(suggestion[1])
        study.tell(suggestion[0], UserError("it broke"))
    assert len(started) == len(set(started)) == 4
    # The next call tries the failed runs again.
    assert open_study(tmp_path, DISCRETE, trials=5).ask() is not None


@pytest.mark.usefixtures("in_memory")
def test_equal_runs_of_different_values_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are told apart by a name that does not depend on the second key, so no name is tried twice."""

    def get_zeta(overrides: tuple[str, ...]) -> str:
        return parse_overrides(overrides)["reg.zeta"]

    monkeypatch.setattr("istar.finetune.sweeps.study.MAX_RANDOM_DUPLICATES", 5)
    for arguments in (["reg.zeta=0.2,0.4", "reg.lambda=interval(0,1)"], ["reg.zeta=0.2,0.4", "seed=range(1,4)"]):
        started = run_workers(open_study(tmp_path / arguments[1][:4], arguments, trials=3, run_name=get_zeta))
        assert sorted(map(get_zeta, started)) == ["0.2", "0.4"]


@pytest.mark.usefixtures("in_memory")
def test_grids_are_a_choice(tmp_path: Path) -> None:
    """One grid has a single run with the best result, so that Optuna suggests the same run repeatedly."""
    grids = {"base": {"reg": "none"}, "istar": {"reg": "istar", "reg.lambda": "interval(-1,1)"}}
    study = open_study(tmp_path, ["seed=1"], grids, trials=6)
    started = []
    while suggestion := study.ask():
        started.append(suggestion[1])
        study.tell(suggestion[0], make_record(float("reg=none" in suggestion[1])))
    assert len(set(started)) == len(started) == 6
    key_sets = [set(parse_overrides(overrides)) for overrides in started]
    assert {"reg", "seed"} in key_sets
    assert {"reg", "seed", "reg.lambda"} in key_sets


def test_all_combinations_of_discrete_spaces_are_listed() -> None:
    grids = {"base": {"reg": "none"}, "istar": {"reg": "istar", "reg.lambda": "-1,1", "data.batch_size": "range(8,11)"}}
    space_by_grid = make_search_spaces(["seed=1,2"], {}, grids, [])
    combinations = list_parameters(space_by_grid)
    assert combinations is not None
    assert len(combinations) == 2 + 2 * 3 * 2
    assert {"grid": "base", "seed": "1"} in combinations
    assert {"grid": "istar", "reg.lambda": "1", "data.batch_size": "9", "seed": "2"} in combinations
    for arguments in (["reg.lambda=interval(0,1)"], ["seed=int(interval(1,200))", "data.batch_size=range(1,101)"]):
        assert list_parameters(make_search_spaces(arguments, {}, {}, [])) is None


@pytest.mark.parametrize("storage", ["nonsense", "sqlite:////no/such/folder/x.db"])
def test_a_storage_that_cannot_be_used(tmp_path: Path, storage: str) -> None:
    with pytest.raises(UserError, match=r"sweep.storage=.* cannot be used") as error:
        open_study(tmp_path, storage=storage)
    assert "\n" not in str(error.value)


def test_a_search_is_in_one_folder(tmp_path: Path) -> None:
    """In another one, the running trials of the first call would count as abandoned."""
    storage = f"journal://{tmp_path / 'search.log'}"
    first = open_study(tmp_path / "first" / "search", storage=storage)
    assert first.ask() is not None
    with pytest.raises(UserError, match=r"is a search in another folder than .*second/search; all its commands need"):
        open_study(tmp_path / "second" / "search", storage=storage)
    second = open_study(tmp_path / "first" / "search", storage=storage)
    assert second.is_waiting()
    assert not first.is_waiting()


def test_handles() -> None:
    handle = TrialReference("runs/a#b/storage.url", "table1-1", 12)
    assert TrialReference.parse(str(handle)) == handle
    for text in ("", "a#b", "a#b#c"):
        with pytest.raises(UserError, match=r"expected file#study#number"):
            TrialReference.parse(text)


@pytest.mark.usefixtures("in_memory")
def test_held_out_data_judge_a_trial(tmp_path: Path) -> None:
    """The validation set, on which the result is reported, is not used."""
    study = open_study(tmp_path, trials=2)
    for reported, held_out in ((0.9, 0.2), (0.1, 0.8)):
        trial_number, _ = study.ask()
        study.tell(trial_number, replace(make_record(reported), selection={"metric": "held_out", "value": held_out}))
    stored_study = optuna.load_study(study_name=study.name, storage=study.storage)
    assert [trial.value for trial in stored_study.get_trials()] == [0.2, 0.8]
