"""Which runs a sweep starts and when, and how long they may take. The runs are stand-ins."""

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from istar.errors import LockedError, StoppedError, UserError
from istar.files import writing
from istar.files.writing import lock_folder, write_text
from istar.finetune.config import Config
from istar.finetune.processes.child import UNEXPECTED_ERROR
from istar.finetune.sweeps import comparison, pool, sweep
from istar.finetune.sweeps.live_table import Board, SweepEntry, read_state
from istar.finetune.sweeps.planned_runs import SweepRuns
from istar.finetune.sweeps.study import Study
from istar.finetune.sweeps.sweep import TrialQueue, run_queue
from istar.finetune.sweeps.trials import Trial
from istar.runs.record import CONFIG, GEOMETRY, RunRecord, read_result, write_result
from tests.finetune.sweeps.conftest import TINY, with_all_runs, with_grids
from tests.finished_runs import NO_KEY, make_finished_record
from tests.waiting import until

GRID = ("seed=1,2,3", *TINY)


def write_run(folder: Path, config: Config) -> None:
    """Write the files that a finished run has."""
    write_result(make_finished_record(folder.name, config, value=config.seed / 10), folder)
    (folder / "model").mkdir(exist_ok=True)
    (folder / GEOMETRY).write_text("{}")


class Run:
    """Stand-in for `RunProcesses` that finishes at once.

    The first run with a seed in `locked_seeds` finds its folder locked. Runs with a seed in `failing_seeds` fail.
    """

    def __init__(self, config: Config, processes: int, study: Any, variables: Any, log: Path, start: Any) -> None:
        self.name, self.config = log.stem, config
        self.is_locked = config.seed in Run.locked_seeds
        Run.locked_seeds.discard(config.seed)
        Run.seeds.append(config.seed)
        Run.rates.append(config.optim.lr)

    locked_seeds: set[int]
    failing_seeds: set[int]
    seeds: list[int]
    rates: list[float]

    def send_signal(self, signal_number: int) -> None:
        pass

    def has_ended(self) -> bool:
        return True

    def read_record(self, signals: Any) -> RunRecord:
        if self.is_locked:
            raise LockedError("another process has it")
        if self.config.seed in Run.failing_seeds:
            raise UserError("it broke")
        folder = Path(self.config.run.root) / self.name
        write_run(folder, self.config)
        return read_result(folder)


@pytest.fixture(autouse=True)
def use_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    Run.locked_seeds, Run.failing_seeds, Run.seeds, Run.rates = set(), set(), [], []
    monkeypatch.setattr(pool, "RunProcesses", Run)
    monkeypatch.setattr(sweep, "CHECK_INTERVAL_SECONDS", 0)


class Queue(TrialQueue):
    """Calls `on_wait` at every tick at which only other processes execute runs, whatever became of the others."""

    on_wait: Callable[[], None]

    def tick(self) -> None:
        if self.is_waiting() and not self.runs.state.entries_with("waiting", "running"):
            self.on_wait()
        super().tick()


@pytest.fixture
def locks() -> Iterator[ExitStack]:
    """Yield the stack of the locks that other processes hold."""
    with ExitStack() as stack:
        yield stack


def execute(runs: SweepRuns, on_wait: Callable[[], None] = lambda: None) -> dict[int, str]:
    """Execute the runs; returns the status of each seed."""
    with Board(runs.folder, runs.state, Console(quiet=True)) as board:
        queue = Queue(runs, board)
        queue.on_wait = on_wait
        run_queue(queue)
    return {entry.seed: entry.status for entry in runs.state.entries}


def list_trials(runs: SweepRuns) -> list[tuple[Trial, SweepEntry]]:
    return [(run, run.entry) for run in runs.planned.values()]


def lock(runs: SweepRuns, seed: int, locks: ExitStack) -> tuple[Path, Config]:
    """Lock the folder of the run with this seed; returns the folder and the config."""
    [trial] = [run for run in runs.planned.values() if run.config.seed == seed]
    folder = runs.request.root / trial.name
    locks.enter_context(lock_folder(folder))
    return folder, trial.config


@pytest.mark.parametrize("is_finished", [True, False])
def test_waiting_for_another_process(make_runs: Callable[..., SweepRuns], locks: ExitStack, is_finished: bool) -> None:
    """The result of the other process is used; a run that it has left unfinished is executed by the sweep."""
    sweep_runs = with_all_runs(make_runs(*GRID))
    folder, config = lock(sweep_runs, 1, locks)

    def end_elsewhere() -> None:
        assert Run.seeds == [2, 3]
        if is_finished:
            write_run(folder, config)
        locks.close()

    assert execute(sweep_runs, end_elsewhere) == {1: "finished", 2: "finished", 3: "finished"}
    assert Run.seeds == ([2, 3] if is_finished else [2, 3, 1])
    assert sweep_runs.planned[folder.name].entry.value == 0.1


def test_a_run_that_was_finished_since_the_sweep_began_is_not_started(make_runs: Callable[..., SweepRuns]) -> None:
    sweep_runs = with_all_runs(make_runs(*GRID))
    [trial] = [run for run in sweep_runs.planned.values() if run.config.seed == 2]
    folder = sweep_runs.request.root / trial.name
    write_run(folder, trial.config)
    assert execute(sweep_runs) == {1: "finished", 2: "finished", 3: "finished"}
    assert Run.seeds == [1, 3]


def test_the_lock_may_be_taken_between_the_look_and_the_start(make_runs: Callable[..., SweepRuns]) -> None:
    Run.locked_seeds = {2}
    assert execute(with_all_runs(make_runs(*GRID))) == {1: "finished", 2: "finished", 3: "finished"}
    # The sweep starts the run again as soon as no process has the lock.
    assert sorted(Run.seeds) == [1, 2, 2, 3]


def test_a_signal_ends_the_wait(make_runs: Callable[..., SweepRuns], locks: ExitStack) -> None:
    sweep_runs = with_all_runs(make_runs(*GRID))
    lock(sweep_runs, 1, locks)
    with pytest.raises(StoppedError, match="stopped by SIGTERM; run the same command to resume"):
        execute(sweep_runs, lambda: signal.raise_signal(signal.SIGTERM))
    assert [entry.status for entry in sweep_runs.state.entries] == ["elsewhere", "finished", "finished"]


def test_seeds_are_last(make_runs: Callable[..., SweepRuns], locks: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeds repeat the run that another process executes, because it has the best learning rate."""
    request = make_runs("optim.lr=1e-3,1e-4", "seed=1", *TINY).request
    request = replace(request, settings=replace(request.settings, seeds=[1, 2]))
    other_sweep_runs = with_all_runs(make_runs("optim.lr=1e-4", "seed=1", *TINY))
    [(trial, _)] = list_trials(other_sweep_runs)
    folder = request.root / trial.name
    locks.enter_context(lock_folder(folder))

    class Finishing(TrialQueue):
        def tick(self) -> None:
            if self.runs.state.entries_with("elsewhere") and self.runs.state.entries_with("finished"):
                write_result(make_finished_record(trial.name, trial.config, value=0.9), folder)
                (folder / "model").mkdir()
                (folder / GEOMETRY).write_text("{}")
                locks.close()
            super().tick()

    monkeypatch.setattr(sweep, "TrialQueue", Finishing)
    monkeypatch.setattr(sweep, "print_results", lambda make_runs: 0)
    assert sweep.run_sweep(request, Console(quiet=True)) == 0
    assert (Run.seeds, Run.rates) == ([1, 2], [1e-3, 1e-4])


def test_one_command_writes_at_a_time(make_runs: Callable[..., SweepRuns], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commands that share a search removed each other's unfinished files."""
    monkeypatch.setattr(writing, "_LOCK_TIMEOUT_SECONDS", 0.1)
    sweep_runs = make_runs(*GRID)
    with lock_folder(sweep_runs.folder), pytest.raises(LockedError):
        sweep.run_sweep(sweep_runs.request, Console(quiet=True))
    assert Run.seeds == []
    assert not sweep_runs.folder.exists()
    assert sweep.run_sweep(sweep_runs.request, Console(quiet=True)) == 0
    before = {path.name: path.read_bytes() for path in sweep_runs.folder.glob("*.md")}
    with lock_folder(sweep_runs.folder), pytest.raises(LockedError):
        sweep.print_results(with_all_runs(make_runs(*GRID)))
    assert {path.name: path.read_bytes() for path in sweep_runs.folder.glob("*.md")} == before != {}


def test_fail_fast_starts_no_further_runs(make_runs: Callable[..., SweepRuns], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those of the grid nor the repetitions of the best."""
    monkeypatch.setattr(comparison, "build_comparison_plots", lambda records: [])
    Run.failing_seeds = {2}
    request = make_runs("sweep.fail_fast=true", "sweep.seeds=[1,7]", *GRID).request
    assert sweep.run_sweep(request, Console(quiet=True)) == 1
    [state_file] = request.root.glob("sweeps/*/sweep.json")
    assert [entry.status for entry in read_state(state_file).entries] == ["finished", "failed", "waiting"]
    assert Run.seeds == [1, 2]


def test_a_launcher_that_finds_a_lock(make_runs: Callable[..., SweepRuns]) -> None:
    """A run whose folder is locked is launched again; a run with another error has failed."""
    launched: list[list[str]] = []

    def launch(jobs: Any) -> list[RunRecord | UserError]:
        seeds = [next(text for text in overrides if text.startswith("seed=")) for overrides in jobs]
        launched.append(seeds)
        errors = {"seed=2": LockedError("another process has it"), "seed=3": UserError("it broke")}
        record = RunRecord("r", "finished", {}, NO_KEY)
        return [errors[seed] if seed in errors and len(launched) == 1 else record for seed in seeds]

    sweep_runs = with_all_runs(make_runs(*GRID))
    sweep_runs.request = replace(sweep_runs.request, launcher=launch)
    assert execute(sweep_runs) == {1: "finished", 2: "finished", 3: "failed"}
    assert launched == [["seed=1", "seed=2", "seed=3"], ["seed=2"]]


def test_a_result_arrives_while_the_launcher_waits_for_others(make_runs: Callable[..., SweepRuns]) -> None:
    """It is kept if the launcher fails as a whole."""
    sweep_runs = with_all_runs(make_runs("seed=1,2", *TINY))
    (first, first_entry), (second, _) = list_trials(sweep_runs)

    def launch(jobs: Any) -> list[RunRecord | UserError]:
        write_run(sweep_runs.request.root / first.name, first.config)
        until(lambda: first_entry.status == "finished")
        raise UserError("a worker has died")

    sweep_runs.request = replace(sweep_runs.request, launcher=launch)
    with pytest.raises(UserError, match="a worker has died"):
        execute(sweep_runs)
    entries = read_state(sweep_runs.folder / "sweep.json").entries
    assert [(entry.name, entry.status, entry.value) for entry in entries] == [
        (first.name, "finished", 0.1), (second.name, "running", None)
    ]  # fmt: skip


@pytest.mark.usefixtures("in_memory")
def test_a_search_takes_trials_over(make_runs: Callable[..., SweepRuns], monkeypatch: pytest.MonkeyPatch) -> None:
    """The call with nothing left to start waits for the trial of the other call, and has its result."""
    arguments = ("optim.lr=1e-3,1e-4", "sweep.trials=2", "sweep.search=optuna", *TINY)
    sweep_runs, other_runs = make_runs(*arguments), make_runs(*arguments)
    other = Study(other_runs.request.settings, other_runs.space_by_grid, other_runs.folder, other_runs.run_name)
    suggestion = other.ask()
    assert suggestion is not None
    trial = other_runs.add_run(suggestion[1])

    class Waiting(sweep.SearchQueue):
        def tick(self) -> None:
            if self.is_waiting() and self.runs.state.entries_with("finished"):
                folder = self.runs.request.root / trial.name
                write_run(folder, trial.config)
                other.tell(suggestion[0], read_result(folder))
            super().tick()

    monkeypatch.setattr(sweep, "SearchQueue", Waiting)
    with Board(sweep_runs.folder, sweep_runs.state, Console(quiet=True)) as board:
        sweep.run_search(sweep_runs, board)
    other.close()
    assert len(Run.rates) == 1
    assert [entry.status for entry in sweep_runs.state.entries] == ["finished"] * 2
    assert sweep_runs.state.entries[1].name == trial.name


@pytest.mark.usefixtures("in_memory")
def test_a_search_resumes_killed_runs_and_replaces_failed_ones(
    make_runs: Callable[..., SweepRuns], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runs with the seeds 1, 2 and 4 are stopped by a signal, killed while they load, and killed in training.

    The run with seed 3 records its failure. That with seed 5 has a mistake, which is found before the training.
    """

    class Ending(Run):
        def read_record(self, signals: Any) -> RunRecord:
            seed, folder = self.config.seed, Path(self.config.run.root) / self.name
            error = StoppedError("stopped", signal.SIGTERM) if seed == 1 else UserError(f"seed {seed} broke")
            if seed in (2, 3):
                error.exit_code = UNEXPECTED_ERROR
            if seed in (3, 4):
                write_text(folder / CONFIG, "")
            if seed == 3:
                write_result(replace(make_finished_record(self.name, self.config), status="failed"), folder)
            raise error

    def search() -> list[int]:
        Run.seeds = []
        request = make_runs("seed=1,2,3,4,5", "sweep.trials=5", "sweep.search=optuna", *TINY).request
        sweep.run_sweep(request, Console(width=1000))
        return Run.seeds

    monkeypatch.setattr(comparison, "build_comparison_plots", lambda records: [])
    with monkeypatch.context() as patch:
        patch.setattr(pool, "RunProcesses", Ending)
        assert sorted(search()) == [1, 2, 3, 4, 5]
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("]")[0] for line in lines if line.startswith("[")] == [f"[{end}/5" for end in range(1, 6)]
    failures = lines[lines.index("5 of 5 runs failed:") + 1 :]
    replaced = [line for line in failures if line.endswith("; the same command tries other values")]
    assert {line.partition(" ")[0] for line in map(str.strip, replaced)} == {"seed=3", "seed=5"}
    seeds = search()
    assert (set(seeds[:3]), set(seeds[3:])) == ({1, 2, 4}, {3, 5})
    assert "failed" not in capsys.readouterr().out
    assert search() == []


def test_the_best_is_chosen_by_held_out_data(make_runs: Callable[..., SweepRuns]) -> None:
    """The metric on the validation set is only reported."""
    sweep_runs = with_all_runs(make_runs("optim.lr=1e-4,1e-3", "sweep.seeds=[7]", *TINY))
    for trial, entry in list_trials(sweep_runs):
        is_better = trial.config.optim.lr == 1e-3
        held_out = {"set": "held_out", "metric": "accuracy_held_out", "value": 0.9 if is_better else 0.1}
        record = make_finished_record(trial.name, trial.config, 0.1 if is_better else 0.9, selection=held_out)
        entry.apply_record(record)
    [overrides] = sweep_runs.list_repetitions_of_best()
    assert {"optim.lr=0.001", "seed=7"} <= set(overrides)


def test_the_best_of_each_grid_is_repeated(make_runs: Callable[..., SweepRuns]) -> None:
    """Two weights of the same penalty are two methods if they stand in grids of their own."""
    grids = {"up": {"reg": "istar", "reg.lambda": 1}, "down": {"reg": "istar", "reg.lambda": -1}}
    sweep_runs = with_all_runs(with_grids(make_runs("optim.lr=1e-4,1e-3", *TINY), grids, seeds=[7, 8]))
    for trial, entry in list_trials(sweep_runs):
        is_up = trial.config.reg.weight > 0  # type: ignore[attr-defined]
        is_better = (trial.config.optim.lr == 1e-3) == is_up
        record = make_finished_record(trial.name, trial.config, 0.1 + 0.5 * is_better + 0.2 * is_up)
        write_result(record, sweep_runs.request.root / trial.name)
        entry.apply_record(record)
    repetitions = [set(overrides) for overrides in sweep_runs.list_repetitions_of_best()]
    assert len(repetitions) == 4
    for weight, rate in (("1", "0.001"), ("-1", "0.0001")):
        for seed in (7, 8):
            assert any({f"reg.lambda={weight}", f"optim.lr={rate}", f"seed={seed}"} <= found for found in repetitions)
    # The comparison has the best configurations alone, and names what the search has found.
    assert sweep.print_results(sweep_runs) == 0
    table = (sweep_runs.folder / "comparison.md").read_text()
    assert sorted(re.findall(r"I-STAR [^|]*\w", table)) == ["I-STAR λ=-1 ζ=0.4 lr=0.0001", "I-STAR λ=1 ζ=0.4 lr=0.001"]


def test_a_search_repeats_the_best_of_each_grid(make_runs: Callable[..., SweepRuns]) -> None:
    """The same holds for a repeated command, which finds the trials of the first one."""
    pytest.importorskip("optuna")
    grids = {"up": {"reg": "istar", "reg.lambda": 1}, "down": {"reg": "istar", "reg.lambda": -1}}
    settings = {"search": "optuna", "trials": 4, "seeds": [7]}
    for _ in range(2):
        sweep_runs = with_grids(make_runs("seed=1,2", *TINY), grids, **settings)
        with Board(sweep_runs.folder, sweep_runs.state, Console(quiet=True)) as board:
            sweep.run_search(sweep_runs, board)
        repetitions = [set(overrides) for overrides in sweep_runs.list_repetitions_of_best()]
        assert len(repetitions) == 2
        for weight in (1, -1):
            assert any({f"reg.lambda={weight}", "seed=7"} <= repetition for repetition in repetitions)
    assert len(Run.seeds) == 4


def test_a_launcher_cannot_choose_the_precision(make_runs: Callable[..., SweepRuns]) -> None:
    """The runs may be executed on another machine, whose precision this machine does not know."""
    sweep_runs = make_runs("seed=1,2", "trainer.precision=auto", *TINY)
    sweep_runs.request = replace(sweep_runs.request, launcher=lambda jobs: [])
    with pytest.raises(UserError, match=r"^trainer\.precision=auto: .*name the precision"):
        with_all_runs(sweep_runs)


@pytest.mark.slow
def test_a_search_waits(make_runs: Callable[..., SweepRuns], locks: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of the other process becomes the value of the trial."""
    optuna = pytest.importorskip("optuna")
    arguments = ("sweep.search=optuna", "sweep.trials=3", *TINY)
    sweep_runs = make_runs("seed=1,2,3", *arguments)
    folder, config = lock(with_all_runs(make_runs("seed=2", *arguments)), 2, locks)

    class Finishing(sweep.SearchQueue):
        def tick(self) -> None:
            if len(self.runs.state.entries_with("finished")) == 2:
                write_run(folder, config)
                locks.close()
            super().tick()

    monkeypatch.setattr(sweep, "SearchQueue", Finishing)
    with Board(sweep_runs.folder, sweep_runs.state, Console(quiet=True)) as board:
        sweep.run_search(sweep_runs, board)
    assert sorted(Run.seeds) == [1, 3]
    [study] = optuna.get_all_study_summaries(f"sqlite:///{sweep_runs.folder / 'optuna.db'}")
    trials = optuna.load_study(
        study_name=study.study_name, storage=f"sqlite:///{sweep_runs.folder / 'optuna.db'}"
    ).trials
    complete = {trial.params["seed"]: trial.value for trial in trials if trial.state.name == "COMPLETE"}
    assert complete == {"1": 0.1, "2": 0.2, "3": 0.3}


def test_the_end_of_a_search_names_the_best_trial_and_its_command(
    make_runs: Callable[..., SweepRuns], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "build_comparison_plots", lambda records: [])
    intervals = "reg.lambda=interval(-1,1)", "optim.lr=interval(1e-4,1e-2)"
    sweep_runs = make_runs(*intervals, "sweep.search=optuna", *TINY)
    sweep_runs.console = Console(width=1000, file=StringIO())
    for value, weight, rate in ((0.5, 0.2, 0.001), (0.9, 0.3, 0.002), (0.7, 0.4, 0.003)):
        trial = sweep_runs.add_run((f"reg.lambda={weight}", f"optim.lr={rate}", *TINY))
        record = make_finished_record(trial.name, trial.config, value)
        write_result(record, sweep_runs.request.root / trial.name)
        trial.entry.apply_record(record)
    assert sweep.print_results(sweep_runs) == 0
    lines = sweep_runs.console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[-2].endswith("I-STAR λ=0.3 ζ=0.4: accuracy 90.00 (1 seed), optim.lr=0.002; its command:")
    assert lines[-1] == f"  python train.py reg.lambda=0.3 optim.lr=0.002 {' '.join(TINY)}"
    table = (sweep_runs.folder / "comparison.md").read_text()
    labels = [f"I-STAR λ={weight} ζ=0.4 lr={rate}" for weight, rate in ((0.3, 0.002), (0.4, 0.003), (0.2, 0.001))]
    assert re.findall(r"I-STAR [^|]*\w", table) == labels
