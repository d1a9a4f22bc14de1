"""Running several trials at a time. The runs are stand-ins that start no process; test_sweep.py has real ones."""

import signal
from pathlib import Path
from typing import Any, ClassVar

import pytest

from istar.errors import LockedError, StoppedError, UserError
from istar.finetune.config import Config, SweepConfig, TrainerConfig
from istar.finetune.processes import forking, launch
from istar.finetune.sweeps import pool
from istar.finetune.sweeps.planned_runs import make_entry
from istar.finetune.sweeps.pool import make_slot_environment, run_trials
from istar.finetune.sweeps.trials import Trial
from istar.runs.record import RunRecord
from tests.finished_runs import NO_KEY


class Run:
    """Stand-in for `RunProcesses`: ends at the third check, with the outcome that the start of its name selects."""

    alive: ClassVar[list["Run"]] = []
    max_alive = 0

    def __init__(
        self, config: Any, processes: int, study: str | None, variables: dict[str, str], log: Path, start: Any
    ) -> None:
        self.name, self.checks_left, self.signals = log.stem, 3, []
        self.variables = variables
        Run.alive.append(self)
        Run.max_alive = max(Run.max_alive, len(Run.alive))

    def send_signal(self, signal_number: int) -> None:
        self.signals.append(signal_number)

    def has_ended(self) -> bool:
        self.checks_left -= 1
        ended = bool(self.signals) or self.checks_left <= 0
        if ended:
            Run.alive.remove(self)
        return ended

    def read_record(self, signals: Any) -> RunRecord:
        if self.signals:
            raise StoppedError("stopped by SIGTERM: saved", signal.SIGTERM)
        if self.name.startswith("locked"):
            raise LockedError("another process has it")
        if self.name.startswith("bad"):
            raise UserError("it broke")
        return RunRecord(self.name, "finished", {}, NO_KEY)


class Source:
    def __init__(self, config: Config, *names: str) -> None:
        self.waiting = [Trial(config, make_entry(name, (), config, None)) for name in names]
        self.elsewhere: list[Trial] = []
        self.running: list[str] = []
        self.outcome_by_run: dict[str, str] = {}

    def next_trial(self) -> Trial | None:
        return self.waiting.pop(0) if self.waiting else None

    def on_started(self, trial: Trial, log: Path | None) -> None:
        self.running.append(trial.name)

    def on_ended(self, trial: Trial, outcome: RunRecord | UserError, status: str | None = None) -> None:
        assert trial.name not in self.outcome_by_run
        self.outcome_by_run[trial.name] = status or (
            outcome.status if isinstance(outcome, RunRecord) else f"failed: {outcome}"
        )

    def set_aside(self, trial: Trial) -> None:
        self.elsewhere.append(trial)

    def is_waiting(self) -> bool:
        return bool(self.elsewhere)

    def tick(self) -> None:
        pass

    def warn(self, message: str) -> None:
        raise AssertionError(message)


@pytest.fixture(autouse=True)
def use_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    Run.alive, Run.max_alive = [], 0
    monkeypatch.setattr(pool, "RunProcesses", Run)
    monkeypatch.setattr(pool, "list_visible_gpus", list)


def execute(source: Source, tmp_path: Path, jobs: int = 2, fail_fast: bool = False) -> None:
    run_trials(source, SweepConfig(jobs=jobs, fail_fast=fail_fast), tmp_path / "logs")


@pytest.mark.parametrize("jobs", [1, 2, 3, 20])
def test_so_many_at_a_time_and_each_of_them_once(composed: Any, tmp_path: Path, jobs: int) -> None:
    names = [f"run{number}" for number in range(7)]
    source = Source(composed(), *names, "bad1", "bad2")
    execute(source, tmp_path, jobs)
    assert source.outcome_by_run == dict.fromkeys(names, "finished") | dict.fromkeys(
        ["bad1", "bad2"], "failed: it broke"
    )
    assert sorted(source.running) == ["bad1", "bad2", *names]
    assert Run.max_alive == min(jobs, 9)


def test_fail_fast(composed: Any, tmp_path: Path) -> None:
    source = Source(composed(), "bad", "b", "c", "d")
    execute(source, tmp_path, fail_fast=True)
    # The run beside it is stopped, or has ended at the same moment; the waiting runs are not started.
    assert source.outcome_by_run["bad"] == "failed: it broke"
    assert source.outcome_by_run.keys() == {"bad", "b"}
    assert [trial.name for trial in source.waiting] == ["c", "d"]


def test_one_that_cannot_be_started(composed: Any, tmp_path: Path) -> None:
    source = Source(composed("trainer.devices=[0,1]"), "a", "b")
    execute(source, tmp_path)
    assert all("say how many devices a run gets" in outcome for outcome in source.outcome_by_run.values())
    assert source.running == []


def test_a_signal_stops_all_and_begins_no_other(composed: Any, tmp_path: Path) -> None:
    class Stopping(Source):
        def tick(self) -> None:
            if not self.outcome_by_run:
                signal.raise_signal(signal.SIGINT)

    source = Stopping(composed(), "a", "b", "c")
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(StoppedError, match=r"interrupted; run the same command to resume") as error:
        execute(source, tmp_path)
    assert error.value.exit_code == 128 + signal.SIGINT
    assert source.outcome_by_run == {"a": "stopped", "b": "stopped"}
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("fork", [True, False])
def test_how_processes_are_started(composed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork: bool) -> None:
    start_functions, environments = [], []

    class Recorded(Run):
        def __init__(self, *arguments: Any) -> None:
            start_functions.append(arguments[-1])
            environments.append(arguments[3])
            super().__init__(*arguments)

    monkeypatch.setattr(pool, "RunProcesses", Recorded)
    run_trials(Source(composed(), "a"), SweepConfig(fork=fork), tmp_path / "logs", {"OMP_NUM_THREADS": "7"})
    assert environments == [{"OMP_NUM_THREADS": "7"}]
    assert (start_functions == [launch.spawn]) == (not fork or not forking.is_supported())


class SourceWithRunsElsewhere(Source):
    """Makes a run that is executed elsewhere available again after a few ticks in which no run is alive."""

    num_ticks = 0

    def tick(self) -> None:
        if Run.alive:
            return
        self.num_ticks += 1
        if self.num_ticks > 3 and self.elsewhere:
            trial = self.elsewhere.pop()
            trial.entry.name = trial.name.removeprefix("locked-")
            self.waiting.append(trial)


def test_what_another_process_executes_is_waited_for(composed: Any, tmp_path: Path) -> None:
    """A locked run neither fails nor, with fail_fast, ends the sweep; the other runs go on in the meantime."""
    source = SourceWithRunsElsewhere(composed(), "locked-a", "b", "locked-c", "d")
    execute(source, tmp_path, fail_fast=True)
    assert source.outcome_by_run == dict.fromkeys("abcd", "finished")
    assert source.running == ["locked-a", "b", "locked-c", "d", "c", "a"]


@pytest.mark.parametrize(
    ("slot", "jobs", "devices", "gpus", "expected"),
    [
        (0, 1, 1, ["0", "1"], {}),
        (0, 2, 1, ["0", "1"], {"CUDA_VISIBLE_DEVICES": "0"}),
        (1, 2, 1, ["0", "1"], {"CUDA_VISIBLE_DEVICES": "1"}),
        (1, 2, 2, ["4", "5", "6", "7"], {"CUDA_VISIBLE_DEVICES": "6,7"}),
        (3, 4, 1, ["0", "1"], {"CUDA_VISIBLE_DEVICES": "1"}),
        (1, 2, 2, ["GPU-a", "GPU-b", "GPU-c"], {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-a"}),
    ],
)
def test_gpus_are_dealt_out(slot: int, jobs: int, devices: int, gpus: list[str], expected: dict[str, str]) -> None:
    assert make_slot_environment(slot, jobs, TrainerConfig(devices=devices), gpus) == expected


def test_threads_are_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert make_slot_environment(0, 4, TrainerConfig(devices=2), []) == {"OMP_NUM_THREADS": "2"}
    assert make_slot_environment(0, 4, TrainerConfig(accelerator="cpu"), ["0"]) == {"OMP_NUM_THREADS": "4"}
    assert make_slot_environment(0, 99, TrainerConfig(), []) == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert make_slot_environment(0, 4, TrainerConfig(), []) == {}
