"""Sweeps from end to end: `train.py -m` runs in its own processes, is killed and is called again."""

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from istar.errors import UserError
from istar.finetune.config import schema
from istar.finetune.sweeps.live_table import read_state
from istar.finetune.sweeps.planned_runs import SweepRuns
from istar.finetune.sweeps.sweep import print_results, run_sweep
from istar.finetune.sweeps.sweep_plan import read_finished_runs
from istar.runs.record import GEOMETRY, RESULT, RunRecord, read_result, write_result
from tests.finetune.sweeps.conftest import TINY, with_all_runs
from tests.finished_runs import make_finished_record
from tests.jobs import Job, Start
from tests.outcomes import assert_same

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")

GRID = ("-m", "reg=istar_scratch", "reg.lambda=-0.2,0.2", "seed=1,2,3", *TINY)
"""Six runs. When two at a time have finished three, enough are left for a signal to arrive before the last one ends."""


def read_records(folder: Path) -> dict[str, RunRecord]:
    """Return the records of the runs of a call made in `folder`, by the names of the runs."""
    return {path.name: read_result(path) for path in (folder / "runs").glob("demo*")}


def read_sweep_state(folder: Path):
    [path] = (folder / "runs" / "sweeps").glob("*/sweep.json")
    return read_state(path)


def read_result_times(job: Job) -> dict[str, int]:
    """Return the modification time of each `result.json` of a job in nanoseconds, by the name of the run."""
    return {path.parent.name: path.stat().st_mtime_ns for path in job.folder.glob("runs/demo-*/result.json")}


# Either all processes are killed, as when a machine loses power, or only the sweep, whose runs notice this and stop.
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["everything", "the sweep"])
def test_a_sweep_that_is_killed_loses_and_repeats_nothing(tmp_path: Path, start: Start, victim: str) -> None:
    undisturbed_result = start(tmp_path / "whole", *GRID, "sweep.jobs=2").wait()
    assert (undisturbed_result.code, undisturbed_result.stderr) == (0, "")
    job = start(tmp_path / "killed", *GRID, "sweep.jobs=2")
    job.until(lambda: len(read_result_times(job)) >= 2)
    if victim == "the sweep":
        job.send(signal.SIGKILL)
    else:
        job.kill()
    job.process.wait()
    job.until_it_is_gone()
    result_times = read_result_times(job)
    assert not read_sweep_state(tmp_path / "killed").is_over
    resumed_job = start(tmp_path / "killed", *GRID, "sweep.jobs=2")
    resumed_result = resumed_job.wait()
    assert (resumed_result.code, resumed_result.stderr) == (0, "")
    assert f"6 runs, {6 - len(result_times)} of them to do" in resumed_result.stdout
    # Finished runs were left unchanged, and the other ones are equal to those of an undisturbed sweep.
    assert {name: read_result_times(resumed_job)[name] for name in result_times} == result_times
    assert read_records(tmp_path / "killed").keys() == read_records(tmp_path / "whole").keys()
    for name in read_records(tmp_path / "whole"):
        assert_same(tmp_path / "killed" / "runs" / name, tmp_path / "whole" / "runs" / name)
    assert read_sweep_state(tmp_path / "killed").is_over
    repeated_result = start(tmp_path / "killed", *GRID, "sweep.jobs=2").wait()
    assert "6 runs, 0 of them to do" in repeated_result.stdout
    assert repeated_result.stdout.count("seed 1") == resumed_result.stdout[
        resumed_result.stdout.index("demo, accuracy") :
    ].count("seed 1")


def test_runs_are_grouped_by_sweep_in_wandb(make_runs: Callable[..., SweepRuns]) -> None:
    ungrouped, grouped = make_runs("seed=1,2", *TINY), make_runs("seed=1,2", "logger=wandb", *TINY)
    own_group = make_runs("seed=1,2", "logger=wandb", "logger.group=mine", *TINY)
    for sweep_runs in (ungrouped, grouped, own_group):
        with_all_runs(sweep_runs)
    assert {run.config.logger.group for run in grouped.planned.values()} == {grouped.folder.name}
    assert {run.config.logger.group for run in own_group.planned.values()} == {"mine"}
    # The logger changes neither the names of the runs nor the folder of the sweep.
    assert ungrouped.planned.keys() == grouped.planned.keys() == own_group.planned.keys()
    assert ungrouped.folder == grouped.folder


def test_finished_runs_are_run_again_only_if_asked(make_runs: Callable[..., SweepRuns], tmp_path: Path) -> None:
    [(name, run)] = with_all_runs(make_runs("seed=1", *TINY)).planned.items()
    write_result(make_finished_record(name, run.config), tmp_path / "runs" / name)
    # Every finished run has these files.
    (tmp_path / "runs" / name / "model").mkdir()
    (tmp_path / "runs" / name / GEOMETRY).write_text("{}")
    statuses = {
        overwrite: [entry.status for entry in with_all_runs(make_runs("seed=1,2", overwrite, *TINY)).state.entries]
        for overwrite in ("run.overwrite=false", "run.overwrite=true")
    }
    assert statuses == {"run.overwrite=false": ["finished", "waiting"], "run.overwrite=true": ["waiting", "waiting"]}
    sweep_runs = with_all_runs(make_runs("seed=1", *TINY))
    (tmp_path / "runs" / name / RESULT).unlink()
    # The record of a finished run is read only once.
    assert sweep_runs.read_record(sweep_runs.planned[name].entry).status == "finished"


def test_a_damaged_result(
    make_runs: Callable[..., SweepRuns], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`run.overwrite=true` would run the whole sweep again. Neither it nor missing data are mended by a new call."""
    names = list(with_all_runs(make_runs("seed=1,2", *TINY)).planned)
    folder = tmp_path / "runs" / names[0]
    folder.mkdir(parents=True)
    (folder / RESULT).write_text("{")
    sweep_runs = with_all_runs(make_runs("seed=1,2", *TINY))
    assert [entry.status for entry in sweep_runs.state.entries] == ["failed", "waiting"]
    sweep_runs.console = Console(width=1000)
    assert print_results(sweep_runs) == 1
    headline, line = capsys.readouterr().out.splitlines()
    assert headline == "1 of 2 runs could not be started:"
    assert line.endswith(f"; delete {folder} to run it again")
    shutil.rmtree(folder)
    assert with_all_runs(make_runs("seed=1,2", *TINY)).state.entries_with("failed") == []


def test_a_dry_run_gives_the_reasons_for_which_runs_cannot_be_started(
    make_runs: Callable[..., SweepRuns], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("task=demo,rte", "model=tiny", f"task.data_dir={tmp_path / 'nowhere'}", "sweep.dry_run=true", *TINY)
    assert run_sweep(make_runs(*arguments).request, Console(width=1000)) == 1
    failures = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  failed: task=rte ")]
    assert len(failures) == 1
    assert "nowhere does not exist" in failures[0]
    arguments = ("reg=none,cosreg", "sweep.seeds=[1,2]", "sweep.dry_run=true", *TINY[1:])
    assert run_sweep(make_runs(*arguments).request, Console(width=1000)) == 0
    plan = capsys.readouterr().out
    assert "2 runs, 2 of them to do; then 2 seeds of the best of each of 2 methods" in plan
    assert plan.count("waiting: ") == 2
    assert not (tmp_path / "runs").exists()


def test_a_smoke_run_stands_for_no_real_run(make_runs: Callable[..., SweepRuns], tmp_path: Path) -> None:
    [(name, run)] = with_all_runs(make_runs("seed=1", *TINY)).planned.items()
    smoke_config = replace(run.config, run=replace(run.config.run, smoke=True))
    write_result(make_finished_record(name, smoke_config), tmp_path / "runs" / name)
    [entry] = with_all_runs(make_runs("seed=1", *TINY)).state.entries
    assert entry.status == "failed"
    assert "is a smoke run, which is never counted; run.overwrite=true runs it again" in entry.error
    assert read_finished_runs(tmp_path / "runs") == []
    [entry] = with_all_runs(make_runs("seed=1", "run.overwrite=true", *TINY)).state.entries
    assert entry.status == "waiting"


def test_smoke_runs_alone(
    make_runs: Callable[..., SweepRuns], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_runs = make_runs("seed=1,2", "run.smoke=true", "run.save_model=false", "run.geometry=false", *TINY)
    for name, run in with_all_runs(sweep_runs).planned.items():
        write_result(make_finished_record(name, run.config), tmp_path / "runs" / name)
        run.entry.status = "finished"
    sweep_runs.console = Console()
    assert print_results(sweep_runs) == 0
    assert capsys.readouterr().out.startswith("2 smoke runs are not counted")
    assert not (sweep_runs.folder / "comparison.md").exists()


@pytest.mark.parametrize(
    ("arguments", "expected_message"),
    [
        (("reg.zeta=0.2,3",), "reg.zeta=3 is outside [0, 1]"),
        (("task=rte,demo", "reg.zta=1"), "reg.zta: there is no such key; did you mean reg.zeta?"),
        (
            ("reg=none,cosreg", "reg.zeta=0.2"),
            "reg.zeta belongs to reg=istar or random_direction, which is not selected",
        ),
        (("reg.lambda=interval(-1,1)",), "an interval is for sweep.search=optuna"),
        (("optim.lr=glob(*)",), "optim.lr"),
        (("task.data_dir=${hydra:job.num}",), "${hydra:job.num} has no value with -m"),
        (("task.data_dir=${nothing}",), "nothing"),
        (("run.push_to_hub=user/model",), "run.push_to_hub is for a single run; istar push uploads a run of a sweep"),
        (("sweep.jobs=0",), "sweep.jobs=0 is too small"),
        (("sweep.search=optna",), "sweep.search=optna is not known; did you mean optuna?"),
        (("sweep.name=a/b",), "sweep.name='a/b' is not a folder name"),
        (("sweep.only=[x]",), "sweep.only=x is not known"),
        (("sweep.grids={a: 1}",), "does not map names to grids"),
    ],
)
def test_mistakes_are_told_before_anything_is_started(
    tmp_path: Path, make_runs: Callable[..., SweepRuns], arguments: tuple[str, ...], expected_message: str
) -> None:
    with pytest.raises((UserError, HydraException, OmegaConfBaseException)) as error:
        run_sweep(make_runs(*arguments).request, Console(quiet=True))
    message = str(error.value) if isinstance(error.value, UserError) else schema.explain(error.value)
    assert expected_message in message
    assert "\n" not in message
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_search_that_is_killed_goes_on(tmp_path: Path, start: Start) -> None:
    arguments = ("-m", "reg=istar_scratch", "reg.lambda=interval(-1,1)", "optim.lr=tag(log,interval(1e-4,1e-2))",
                 "sweep.search=optuna", "sweep.trials=6", "sweep.pruner=asha", "sweep.jobs=2", *TINY,
                 "trainer.max_epochs=4")  # fmt: skip
    job = start(tmp_path, *arguments)
    job.until(lambda: len(read_result_times(job)) >= 1)
    result_times = read_result_times(job)
    job.send(signal.SIGKILL).process.wait()
    job.until_it_is_gone()
    resumed_result = start(tmp_path, *arguments).wait()
    assert (resumed_result.code, resumed_result.stderr) == (0, "")
    records = read_records(tmp_path)
    assert len(records) == 6
    assert {record.status for record in records.values()} <= {"finished", "pruned"}
    assert {key: (tmp_path / "runs" / key / "result.json").stat().st_mtime_ns for key in result_times} == result_times
    for record in records.values():
        assert (len(record.epochs) == 4) == (record.status == "finished")
    assert len(json.loads((next((tmp_path / "runs" / "sweeps").glob("*/sweep.json"))).read_text())["entries"]) == 6
    repeated_result = start(tmp_path, *arguments).wait()
    assert (repeated_result.code, repeated_result.stderr) == (0, "")
    assert len(read_records(tmp_path)) == 6


@pytest.mark.slow
def test_a_pruned_run_can_be_finished_later(tmp_path: Path, start: Start) -> None:
    """A single run with the same settings resumes the pruned run, and its result equals that of a run never pruned."""
    # With some of these learning rates the score rises at once, with others later.
    shared_settings = ("reg=none", "task=demo_sentence", "task.limit_train=400", "task.limit_validation=100",
                       *TINY[3:], "trainer.max_epochs=3")  # fmt: skip
    search_arguments = ("-m", "optim.lr=tag(log,interval(3e-4,1e-2))", "sweep.search=optuna", "sweep.trials=8",
                        "sweep.pruner=asha", "sweep.sampler=random", *shared_settings)  # fmt: skip
    assert start(tmp_path / "search", *search_arguments, "sweep.jobs=2").wait().code == 0
    pruned_records = {key: run for key, run in read_records(tmp_path / "search").items() if run.status == "pruned"}
    assert pruned_records
    name, record = next(iter(pruned_records.items()))
    run_arguments = (f"optim.lr={record.config['optim']['lr']}", *shared_settings)
    for folder in ("search", "alone"):
        assert start(tmp_path / folder, *run_arguments).wait().code == 0
    assert read_records(tmp_path / "search")[name].status == "finished"
    assert_same(tmp_path / "search" / "runs" / name, tmp_path / "alone" / "runs" / name)
