"""Searches: what is asked for, what is kept, and what a later or a neighbouring call makes of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from istar.config import SweepConfig
from istar.errors import UserError
from istar.results import RunRecord
from istar.sweeps.study import Study, count_combinations, get_combination
from istar.sweeps.trials import list_combinations, make_search_spaces
from istar.training.pruning import TrialReference

ARGUMENTS = ["reg=istar", "reg.lambda=interval(-5,5)", "optim.lr=tag(log,interval(1e-5,1e-3))", "reg.zeta=0.2,0.4",
             "data.batch_size=int(interval(8,32))"]  # fmt: skip


def study(
    folder: Path,
    arguments: list[str] = ARGUMENTS,
    grids: Any = None,
    name: Callable[[tuple[str, ...]], str] = " ".join,
    **settings: Any,
) -> Study:
    folder.mkdir(exist_ok=True)
    values = {"search": "optuna", "trials": 4, **settings}
    return Study(SweepConfig(**values), make_search_spaces(arguments, {}, grids or {}, []), folder, name)


def record(value: float, status: str = "finished", metric: str = "accuracy") -> RunRecord:
    return RunRecord("r", status, {}, {"metric": metric, "value": value, "epoch": 1})


def values(overrides: tuple[str, ...]) -> dict[str, str]:
    return dict(override.split("=") for override in overrides)


def test_values_lie_in_their_ranges(tmp_path: Path) -> None:
    found = study(tmp_path, trials=15)
    seen = []
    while asked := found.ask():
        seen.append(values(asked[1]))
        found.tell(asked[0], record(0.5))
    assert len(seen) == 15
    assert all(-5 <= float(own["reg.lambda"]) <= 5 and 1e-5 <= float(own["optim.lr"]) <= 1e-3 for own in seen)
    assert {own["reg.zeta"] for own in seen} == {"0.2", "0.4"}
    assert all(8 <= int(own["data.batch_size"]) <= 32 for own in seen)
    assert all(own["reg"] == "istar" for own in seen)
    # On a logarithmic scale half of them are below 1e-4.
    assert 3 <= sum(float(own["optim.lr"]) < 1e-4 for own in seen) <= 12
    assert len({own["reg.lambda"] for own in seen}) == 15


@pytest.mark.parametrize(("metric", "best"), [("accuracy", 3.0), ("perplexity", 1.0)])
def test_the_best_trial_is_that_of_the_best_metric(tmp_path: Path, metric: str, best: float) -> None:
    search = study(tmp_path)
    value_by_trial = {}
    for value in (2.0, 1.0, 3.0):
        suggestion = search.ask()
        assert suggestion is not None
        number, _ = suggestion
        search.tell(number, record(value, metric=metric))
        value_by_trial[number] = value
    stored = optuna.load_study(study_name=search.name, storage=search.storage)
    assert value_by_trial[stored.best_trial.number] == best


def test_grids_are_a_choice(tmp_path: Path) -> None:
    grids = {"base": {"reg": "none"}, "istar": {"reg": "istar", "reg.lambda": "interval(-1,1)"}}
    found = study(tmp_path, ["seed=1"], grids, trials=12)
    asked = [found.ask() for _ in range(12)]
    kinds = [set(values(own[1])) for own in asked if own]
    assert {"reg", "seed"} in kinds
    assert {"reg", "seed", "reg.lambda"} in kinds


def test_what_is_told_is_kept(tmp_path: Path) -> None:
    found = study(tmp_path)
    for outcome in (record(0.25), record(0.75, "pruned"), UserError("it broke")):
        asked = found.ask()
        assert asked
        found.tell(asked[0], outcome)
    known = optuna.load_study(study_name=tmp_path.name, storage=found.storage).trials
    assert [trial.state.name for trial in known] == ["COMPLETE", "PRUNED", "FAIL"]
    assert known[0].value == 0.25
    # Failed ones do not count, yet each call has so many attempts at most.
    assert found.num_trials_left() == 2
    asked = found.ask()
    assert asked
    found.tell(asked[0], UserError("it broke"))
    assert found.num_trials_left() == 2
    assert found.ask() is None
    assert [number for number, _ in found.ended_trials()] == [0, 1]


def test_a_dead_call_is_continued(tmp_path: Path) -> None:
    first = study(tmp_path)
    done, lost = first.ask(), first.ask()
    assert done
    assert lost
    first.tell(done[0], record(0.5))
    del first._lock
    second = study(tmp_path)
    assert second.ask() == lost
    second.tell(lost[0], record(0.6))
    fresh = [second.ask(), second.ask()]
    # A sampler that begins again at its seed would ask for the same.
    assert all(own and own[1] not in (done[1], lost[1]) for own in fresh)
    assert second.ask() is None


def test_a_living_call_is_left_alone(tmp_path: Path) -> None:
    first, second = study(tmp_path), study(tmp_path)
    mine, yours = first.ask(), second.ask()
    assert mine
    assert yours
    assert mine[0] != yours[0]
    assert second.ask() is not None
    assert first.ask() is not None
    # Together they have begun all four.
    assert first.ask() is None
    assert second.ask() is None
    first.close()
    assert second.ask() == mine


def test_a_stopped_trial_is_asked_for_again(tmp_path: Path) -> None:
    found = study(tmp_path, trials=1)
    asked = found.ask()
    assert asked
    found.release(asked[0])
    assert found.ask() == asked


@pytest.mark.slow
def test_the_best_values_are_looked_for_where_good_ones_were(tmp_path: Path) -> None:
    away = {}
    for sampler in ("random", "tpe"):
        found = study(tmp_path / sampler, ["reg.lambda=interval(-5,5)"], trials=30, sampler=sampler)
        away[sampler] = []
        while asked := found.ask():
            away[sampler].append(abs(float(values(asked[1])["reg.lambda"]) - 2))
            found.tell(asked[0], record(-away[sampler][-1]))
    assert sum(away["tpe"]) < 0.75 * sum(away["random"])


DISCRETE = ["reg.zeta=0.2,0.4", "data.batch_size=int(interval(8,9))"]
"""Four combinations."""


def search(*workers: Study, jobs: int = 2) -> list[tuple[str, ...]]:
    """Let workers in turn start and end trials, `jobs` at a time each; the best values are always the same."""
    started, running = [], [[] for _ in workers]
    while True:
        for worker, own in zip(workers, running, strict=True):
            while len(own) < jobs and (asked := worker.ask()):
                own.append(asked)
                started.append(asked[1])
        if not any(running):
            return started
        for worker, own in zip(workers, running, strict=True):
            if own:
                number, overrides = own.pop(0)
                worker.tell(number, record(float(overrides == ("reg.zeta=0.4", "data.batch_size=9"))))


@pytest.mark.parametrize(
    ("sampler", "workers", "trials", "expected"),
    [("tpe", 1, 3, 3), ("random", 1, 9, 4), ("tpe", 2, 9, 4), ("random", 2, 3, 3)],
)
def test_no_run_is_tried_twice(tmp_path: Path, sampler: str, workers: int, trials: int, expected: int) -> None:
    found = [study(tmp_path, DISCRETE, trials=trials, sampler=sampler) for _ in range(workers)]
    started = search(*found)
    assert len(started) == len(set(started)) == expected
    known = optuna.load_study(study_name=tmp_path.name, storage=found[0].storage).trials
    assert sum(trial.state.name == "COMPLETE" for trial in known) == expected
    assert all(trial.user_attrs["is_duplicate"] for trial in known if trial.state.name == "FAIL")
    if trials == expected:
        assert found[0].num_trials_left() == 0


def test_what_failed_is_not_tried_again_by_the_same_call(tmp_path: Path) -> None:
    found = study(tmp_path, DISCRETE, trials=9)
    started = []
    while asked := found.ask():
        started.append(asked[1])
        found.tell(asked[0], UserError("it broke"))
    assert len(started) == len(set(started)) == 4
    # The next call tries again.
    assert study(tmp_path, DISCRETE, trials=9).ask() is not None


def test_equal_runs_of_different_values_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The continuous key has no effect, as one that is not part of a run's identity."""

    def name(overrides: tuple[str, ...]) -> str:
        return values(overrides)["reg.zeta"]

    monkeypatch.setattr("istar.sweeps.study.MAX_RANDOM_DUPLICATES", 5)
    for arguments in (["reg.zeta=0.2,0.4", "reg.lambda=interval(0,1)"], ["reg.zeta=0.2,0.4", "seed=range(1,4)"]):
        started = search(study(tmp_path / arguments[1][:4], arguments, trials=10, name=name))
        assert sorted(map(name, started)) == ["0.2", "0.4"]


def test_a_grid_of_one_run_beside_one_with_an_interval(tmp_path: Path) -> None:
    """The one run has the best result, so that Optuna suggests it again and again."""
    grids = {"base": {"reg": "none"}, "istar": {"reg": "istar", "reg.lambda": "interval(-1,1)"}}
    found = study(tmp_path, ["seed=1"], grids, trials=6)
    started = []
    while asked := found.ask():
        started.append(asked[1])
        found.tell(asked[0], record(float("reg=none" in asked[1])))
    assert len(set(started)) == len(started) == 6


def test_combinations_have_indices(tmp_path: Path) -> None:
    grids = {"base": {"reg": "none"}, "istar": {"reg": "istar", "reg.lambda": "-1,1", "data.batch_size": "range(8,11)"}}
    found = make_search_spaces(["seed=1,2"], {}, grids, [])
    size = count_combinations(found)
    assert size == 2 + 2 * 3 * 2
    every = [get_combination(found, index) for index in range(size)]
    assert {overrides for _, overrides in every} == {
        one for space in found.values() for one in list_combinations(space)
    }
    parameters = {"grid": "istar", "reg.lambda": "1", "data.batch_size": "9", "seed": "2"}
    overrides = ("reg=istar", "reg.lambda=1", "data.batch_size=9", "seed=2")
    assert (parameters, overrides) in every
    assert count_combinations(make_search_spaces(["reg.lambda=interval(0,1)"], {}, {}, [])) is None


@pytest.mark.parametrize("storage", ["nonsense", "sqlite:////no/such/folder/x.db"])
def test_a_storage_that_cannot_be_used(tmp_path: Path, storage: str) -> None:
    with pytest.raises(UserError, match=r"sweep.storage=.* cannot be used") as error:
        study(tmp_path, storage=storage)
    assert "\n" not in str(error.value)


def test_handles() -> None:
    handle = TrialReference("sqlite:///a#b.db", "table1-1", 12)
    assert TrialReference.parse(str(handle)) == handle
    for text in ("", "a#b", "a#b#c"):
        with pytest.raises(UserError, match=r"expected storage#study#number"):
            TrialReference.parse(text)


def test_held_out_data_judge_a_trial(tmp_path: Path) -> None:
    """Not the validation set, on which the result is reported."""
    search = study(tmp_path, trials=2)
    for reported, held_out in ((0.9, 0.2), (0.1, 0.8)):
        number, _ = search.ask()
        search.tell(number, replace(record(reported), selection={"metric": "accuracy_held_out", "value": held_out}))
    stored = optuna.load_study(study_name=search.name, storage=search.storage)
    assert [trial.value for trial in stored.get_trials()] == [0.2, 0.8]
