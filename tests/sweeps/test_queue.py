"""Which runs a sweep starts and when, while other processes execute some of them. The runs are stand-ins."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from istar import results
from istar.config import Config
from istar.config.schema import to_dict
from istar.errors import LockedError, StoppedError, UserError
from istar.files import lock_folder
from istar.results import RunRecord
from istar.sweeps import pool, sweep
from istar.sweeps.board import Board
from istar.sweeps.sweep import SweepRuns, TrialQueue, run_queue, select_best_configurations
from tests.sweeps.conftest import TINY, with_all_runs, with_grids

GRID = ("seed=1,2,3", *TINY)


def record_of(name: str, config: Config) -> RunRecord:
    headline = {"metric": "accuracy", "value": config.seed / 10, "epoch": 1}
    return RunRecord(name, "finished", to_dict(config), headline)


def write_result(folder: Path, config: Config) -> None:
    """Write what a finished run leaves."""
    results.write(record_of(folder.name, config), folder)
    (folder / "model").mkdir(exist_ok=True)
    (folder / results.GEOMETRY).write_text("{}")


class Run:
    """Has ended at once and is finished; the seeds in `locked` find their folders locked the first time."""

    def __init__(self, config: Config, processes: int, study: Any, variables: Any, log: Path, start: Any) -> None:
        self.name, self.config = log.stem, config
        self.is_locked = config.seed in Run.locked
        Run.locked.discard(config.seed)
        Run.seeds.append(config.seed)
        Run.rates.append(config.optim.lr)

    locked: set[int]
    seeds: list[int]
    rates: list[float]

    def send_signal(self, number: int) -> None:
        pass

    def has_ended(self) -> bool:
        return True

    def read_record(self, signals: Any) -> RunRecord:
        if self.is_locked:
            raise LockedError("another process has it")
        folder = Path(self.config.run.root) / self.name
        write_result(folder, self.config)
        return results.read(folder)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    Run.locked, Run.seeds, Run.rates = set(), [], []
    monkeypatch.setattr(pool, "RunProcesses", Run)
    monkeypatch.setattr(sweep, "CHECK_INTERVAL_SECONDS", 0)


class Queue(TrialQueue):
    """Calls `on_wait` whenever nothing is left but what other processes execute."""

    on_wait: Callable[[], None]

    def tick(self) -> None:
        if {entry.status for entry in self.runs.state.entries} == {"finished", "elsewhere"}:
            self.on_wait()
        super().tick()


@pytest.fixture
def locks() -> Iterator[ExitStack]:
    """What other processes hold."""
    with ExitStack() as stack:
        yield stack


def execute(runs: SweepRuns, on_wait: Callable[[], None] = lambda: None) -> dict[int, str]:
    """Execute the runs; returns the status of each seed."""
    with Board(runs.folder, runs.state, Console(quiet=True)) as board:
        queue = Queue(runs, board)
        queue.on_wait = on_wait
        run_queue(queue)
    return {entry.seed: entry.status for entry in runs.state.entries}


def lock(runs: SweepRuns, seed: int, locks: ExitStack) -> tuple[Path, Config]:
    """Lock the folder of the run with this seed; returns the folder and the config."""
    [trial] = [trial for trial in runs.trial_by_name.values() if trial.config.seed == seed]
    folder = runs.request.root / trial.name
    locks.enter_context(lock_folder(folder))
    return folder, trial.config


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_run_of_another_process_is_waited_for(
    runs: Callable[..., SweepRuns], locks: ExitStack, is_finished: bool
) -> None:
    """Its result counts; a run that the other process has left unfinished is executed here."""
    ours = with_all_runs(runs(*GRID))
    folder, config = lock(ours, 1, locks)

    def end_elsewhere() -> None:
        assert Run.seeds == [2, 3]
        if is_finished:
            write_result(folder, config)
        locks.close()

    assert execute(ours, end_elsewhere) == {1: "finished", 2: "finished", 3: "finished"}
    assert Run.seeds == ([2, 3] if is_finished else [2, 3, 1])
    assert ours.entry_by_name[folder.name].value == 0.1


def test_a_run_that_was_finished_since_the_sweep_began_is_not_started(runs: Callable[..., SweepRuns]) -> None:
    ours = with_all_runs(runs(*GRID))
    [trial] = [trial for trial in ours.trial_by_name.values() if trial.config.seed == 2]
    folder = ours.request.root / trial.name
    write_result(folder, trial.config)
    assert execute(ours) == {1: "finished", 2: "finished", 3: "finished"}
    assert Run.seeds == [1, 3]


def test_the_lock_may_be_taken_between_the_look_and_the_start(runs: Callable[..., SweepRuns]) -> None:
    Run.locked = {2}
    waits: list[None] = []
    assert execute(with_all_runs(runs(*GRID)), lambda: waits.append(None)) == {
        1: "finished",
        2: "finished",
        3: "finished",
    }
    # With one job at a time it is begun again as soon as nobody has the lock.
    assert sorted(Run.seeds) == [1, 2, 2, 3]


def test_a_signal_ends_the_wait(runs: Callable[..., SweepRuns], locks: ExitStack) -> None:
    ours = with_all_runs(runs(*GRID))
    lock(ours, 1, locks)
    with pytest.raises(StoppedError, match="stopped by SIGTERM; run the same command to resume"):
        execute(ours, lambda: signal.raise_signal(signal.SIGTERM))
    assert [entry.status for entry in ours.state.entries] == ["elsewhere", "finished", "finished"]


def test_the_seeds_follow_when_all_is_settled(
    runs: Callable[..., SweepRuns], locks: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best learning rate is that of the run that another process executes."""
    request = runs("optim.lr=1e-3,1e-4", "seed=1", *TINY).request
    request = replace(request, settings=replace(request.settings, seeds=[1, 2]))
    theirs = with_all_runs(runs("optim.lr=1e-4", "seed=1", *TINY))
    [(name, trial)] = theirs.trial_by_name.items()
    folder = request.root / name
    locks.enter_context(lock_folder(folder))

    class Finishing(TrialQueue):
        def tick(self) -> None:
            if self.runs.state.entries_with("elsewhere") and self.runs.state.entries_with("finished"):
                record = record_of(name, trial.config)
                results.write(replace(record, headline={**record.headline, "value": 0.9}), folder)
                (folder / "model").mkdir()
                (folder / results.GEOMETRY).write_text("{}")
                locks.close()
            super().tick()

    monkeypatch.setattr(sweep, "TrialQueue", Finishing)
    monkeypatch.setattr(sweep, "print_results", lambda runs: 0)
    assert sweep.run_sweep(request, Console(quiet=True)) == 0
    assert (Run.seeds, Run.rates) == ([1, 2], [1e-3, 1e-4])


def test_a_launcher_that_finds_a_lock(runs: Callable[..., SweepRuns]) -> None:
    """What its jobs find locked is launched again; another error is a failure."""
    launched: list[list[str]] = []

    def launch(jobs: Any) -> list[RunRecord | UserError]:
        seeds = [next(text for text in overrides if text.startswith("seed=")) for overrides in jobs]
        launched.append(seeds)
        errors = {"seed=2": LockedError("another process has it"), "seed=3": UserError("it broke")}
        return [
            errors[seed] if seed in errors and len(launched) == 1 else RunRecord("r", "finished", {}) for seed in seeds
        ]

    ours = with_all_runs(runs(*GRID))
    ours.request = replace(ours.request, launcher=launch)
    assert execute(ours) == {1: "finished", 2: "finished", 3: "failed"}
    assert launched == [["seed=1", "seed=2", "seed=3"], ["seed=2"]]


@pytest.mark.parametrize(("sampler", "trials", "expected"), [("tpe", 5, 5), ("random", 5, 5), ("tpe", 9, 6)])
def test_a_search_executes_as_many_different_runs_as_it_has_trials(
    runs: Callable[..., SweepRuns], sampler: str, trials: int, expected: int
) -> None:
    """Unless the space has fewer; what is running or has ended is not executed again and is no failure."""
    pytest.importorskip("optuna")
    ours = runs(
        "optim.lr=1e-3,1e-4", "seed=1,2,3", f"sweep.trials={trials}", f"sweep.sampler={sampler}",
        "sweep.search=optuna", "sweep.jobs=2", *TINY,
    )  # fmt: skip
    with Board(ours.folder, ours.state, Console(quiet=True)) as board:
        sweep.run_search(ours, board)
    executed = list(zip(Run.seeds, Run.rates, strict=True))
    assert len(executed) == len(set(executed)) == expected
    assert [entry.status for entry in ours.state.entries] == ["finished"] * expected
    assert ours.state.to_come == 0


def test_a_search_waits_for_a_run_of_another_process(
    runs: Callable[..., SweepRuns], locks: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result is the trial's."""
    optuna = pytest.importorskip("optuna")
    arguments = ("sweep.search=optuna", "sweep.trials=3", *TINY)
    ours = runs("seed=1,2,3", *arguments)
    folder, config = lock(with_all_runs(runs("seed=2", *arguments)), 2, locks)

    class Finishing(sweep.SearchQueue):
        def tick(self) -> None:
            if len(self.runs.state.entries_with("finished")) == 2:
                write_result(folder, config)
                locks.close()
            super().tick()

    monkeypatch.setattr(sweep, "SearchQueue", Finishing)
    with Board(ours.folder, ours.state, Console(quiet=True)) as board:
        sweep.run_search(ours, board)
    assert sorted(Run.seeds) == [1, 3]
    [study] = optuna.get_all_study_summaries(f"sqlite:///{ours.folder / 'optuna.db'}")
    trials = optuna.load_study(study_name=study.study_name, storage=f"sqlite:///{ours.folder / 'optuna.db'}").trials
    complete = {trial.params["seed"]: trial.value for trial in trials if trial.state.name == "COMPLETE"}
    assert complete == {"1": 0.1, "2": 0.2, "3": 0.3}


def test_the_best_is_chosen_by_held_out_data(runs: Callable[..., SweepRuns]) -> None:
    """Its metric on the validation set is only reported."""
    sweep = with_all_runs(runs("optim.lr=1e-4,1e-3", "sweep.seeds=[7]", *TINY))
    for trial in sweep.trial_by_name.values():
        is_better = trial.config.optim.lr == 1e-3
        record = record_of(trial.name, trial.config)
        held_out = {"set": "held_out", "metric": "accuracy_held_out", "value": 0.9 if is_better else 0.1}
        reported = {**record.headline, "value": 0.1 if is_better else 0.9}
        sweep.entry_by_name[trial.name].apply_record(replace(record, headline=reported, selection=held_out))
    [overrides] = sweep.list_repetitions_of_best()
    assert {"optim.lr=0.001", "seed=7"} <= set(overrides)


def test_the_best_of_each_grid_is_repeated(runs: Callable[..., SweepRuns]) -> None:
    """Two weights of the same penalty are two methods if they stand in grids of their own."""
    grids = {"up": {"reg": "istar", "reg.lambda": 1}, "down": {"reg": "istar", "reg.lambda": -1}}
    sweep = with_all_runs(with_grids(runs("optim.lr=1e-4,1e-3", *TINY), grids, seeds=[7, 8]))
    records = []
    for trial in sweep.trial_by_name.values():
        is_up = trial.config.reg.weight > 0  # type: ignore[attr-defined]
        is_better = (trial.config.optim.lr == 1e-3) == is_up
        record = record_of(trial.name, trial.config)
        records.append(replace(record, headline={**record.headline, "value": 0.1 + 0.5 * is_better + 0.2 * is_up}))
        sweep.entry_by_name[trial.name].apply_record(records[-1])
    repeated = [set(overrides) for overrides in sweep.list_repetitions_of_best()]
    assert len(repeated) == 4
    for weight, rate in (("1", "0.001"), ("-1", "0.0001")):
        for seed in (7, 8):
            assert any({f"reg.lambda={weight}", f"optim.lr={rate}", f"seed={seed}"} <= each for each in repeated)
    shown = select_best_configurations(records, sweep.grid_by_run)
    assert {(run.config["reg"]["lambda"], run.config["optim"]["lr"]) for run in shown} == {(1, 1e-3), (-1, 1e-4)}


def test_a_search_repeats_the_best_of_each_grid(runs: Callable[..., SweepRuns]) -> None:
    """So does the same command when it finds the trials of an earlier call."""
    pytest.importorskip("optuna")
    grids = {"up": {"reg": "istar", "reg.lambda": 1}, "down": {"reg": "istar", "reg.lambda": -1}}
    settings = {"search": "optuna", "trials": 4, "seeds": [7]}
    for _ in range(2):
        ours = with_grids(runs("seed=1,2", *TINY), grids, **settings)
        with Board(ours.folder, ours.state, Console(quiet=True)) as board:
            sweep.run_search(ours, board)
        repeated = [set(overrides) for overrides in ours.list_repetitions_of_best()]
        assert len(repeated) == 2
        for weight in (1, -1):
            assert any({f"reg.lambda={weight}", "seed=7"} <= each for each in repeated)
    assert len(Run.seeds) == 4


def test_a_launcher_cannot_choose_the_precision(runs: Callable[..., SweepRuns]) -> None:
    """The machine that executes the runs may be another one than this."""
    sweep = runs("seed=1,2", "trainer.precision=auto", *TINY)
    sweep.request = replace(sweep.request, launcher=lambda jobs: [])
    with pytest.raises(UserError, match=r"^trainer\.precision=auto: .*name the precision"):
        with_all_runs(sweep)
