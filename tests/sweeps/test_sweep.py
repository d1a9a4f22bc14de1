"""Sweeps as a user meets them: train.py -m called for real, killed, called again."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra.errors import HydraException

from hydra_plugins.istar_sweeper import IstarSweeper
from istar import results
from istar.config import schema
from istar.config.schema import to_dict
from istar.errors import UserError
from istar.files import lock_folder
from istar.results import RunRecord
from istar.runs import fork_server
from istar.sweeps.board import read_state
from istar.sweeps.sweep import SweepRuns
from tests.jobs import Done, Job, Start, at_once, starting
from tests.outcomes import assert_same
from tests.sweeps.conftest import TINY, with_all_runs

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")

GRID = ("-m", "reg=istar_scratch", "reg.lambda=-0.2,0.2", "seed=1,2,3", *TINY)
"""Six runs: when three are done, two at a time, there is more to come than can end while a signal is on its way."""


@pytest.fixture
def start(own_cache: Path) -> Iterator[Start]:
    with starting(own_cache) as start:
        yield start


def records(folder: Path) -> dict[str, RunRecord]:
    """The runs of a call made in a folder, by their names."""
    return {path.name: results.read(path) for path in (folder / "runs").glob("demo*")}


def state(folder: Path):
    [path] = (folder / "runs" / "sweeps").glob("*/sweep.json")
    return read_state(path)


def ended(job: Job) -> dict[str, int]:
    """When the results that lie there were written."""
    return {path.parent.name: path.stat().st_mtime_ns for path in job.folder.glob("runs/demo-*/result.json")}


# Either as when a machine loses power, or the sweep alone, whose runs notice that it is gone and stop by themselves.
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["everything", "the sweep"])
def test_a_sweep_that_is_killed_loses_and_repeats_nothing(tmp_path: Path, start: Start, victim: str) -> None:
    undisturbed = start(tmp_path / "whole", *GRID, "sweep.jobs=2").wait()
    assert (undisturbed.code, undisturbed.stderr) == (0, "")
    job = start(tmp_path / "killed", *GRID, "sweep.jobs=2")
    job.until(lambda: len(ended(job)) >= 2)
    if victim == "the sweep":
        job.send(signal.SIGKILL)
    else:
        job.kill()
    job.process.wait()
    job.until_it_is_gone()
    written = ended(job)
    assert not state(tmp_path / "killed").is_over
    last = start(tmp_path / "killed", *GRID, "sweep.jobs=2")
    done = last.wait()
    assert (done.code, done.stderr) == (0, "")
    assert f"6 runs, {6 - len(written)} of them to do" in done.stdout
    # What was finished was left alone, what was not is as if nothing had happened.
    assert {name: ended(last)[name] for name in written} == written
    assert records(tmp_path / "killed").keys() == records(tmp_path / "whole").keys()
    for name in records(tmp_path / "whole"):
        assert_same(tmp_path / "killed" / "runs" / name, tmp_path / "whole" / "runs" / name)
    assert state(tmp_path / "killed").is_over
    again = start(tmp_path / "killed", *GRID, "sweep.jobs=2").wait()
    assert "6 runs, 0 of them to do" in again.stdout
    assert again.stdout.count("seed 1") == done.stdout[done.stdout.index("demo, accuracy") :].count("seed 1")


@pytest.mark.slow
def test_the_best_of_each_method_goes_on_with_more_seeds(tmp_path: Path, start: Start) -> None:
    search = ("+sweep=table1", "task=demo", "data.batch_size=8", "optim.lr=1e-3,1e-5", "trainer.max_epochs=2",
              "reg.lambda=-0.2", "reg.zeta=0.4", "sweep.only=[base,istar]", "sweep.seeds=[1,2]",
              "reg.num_points=200")  # fmt: skip
    small = [argument for argument in TINY if argument.partition("=")[0] not in {a.partition("=")[0] for a in search}]
    arguments = [argument for argument in (*search, *small) if not argument.startswith("reg.num_points")]
    before = start(tmp_path, *arguments, "--dry-run").wait()
    assert (before.code, before.stderr) == (0, "")
    assert "4 runs, 4 of them to do; then 2 seeds of the best of each of 2 methods" in before.stdout
    assert before.stdout.count("waiting: ") == 4
    assert not (tmp_path / "runs").exists()
    done = start(tmp_path, *arguments, "sweep.jobs=2").wait()
    assert (done.code, done.stderr) == (0, "")
    found = list(records(tmp_path).values())
    assert len(found) == 6
    for name in ("none", "istar"):
        own = [record for record in found if record.config["reg"]["name"] == name]
        first = {record.config["optim"]["lr"]: record.headline["value"] for record in own if record.config["seed"] == 1}
        [second] = [record for record in own if record.config["seed"] == 2]
        assert len(first) == 2
        assert first[second.config["optim"]["lr"]] == max(first.values())
    assert {entry.stage for entry in state(tmp_path).entries} == {"search", "seeds"}
    assert re.search(
        r"about \d+ (s|min), 2 at a time \(by 6 finished runs",
        start(tmp_path, *arguments, "task.limit_train=24", "--dry-run", "sweep.jobs=2").wait().stdout,
    )


def test_failures_are_told_and_may_stop_all(tmp_path: Path, start: Start) -> None:
    layers = ("-m", "seed=1", "reg=cosreg", "reg.layers=[7],[8],last", *TINY[1:])

    def call(name: str, *more: str) -> Done:
        return start(tmp_path / name, *layers, *more).wait()

    going_on, stopped = at_once(lambda: call("on"), lambda: call("fast", "sweep.fail_fast=true"))
    assert (going_on.code, going_on.stderr) == (1, "")
    assert "2 of 3 runs failed; the same command runs them again:" in going_on.stdout
    assert [entry.status for entry in state(tmp_path / "on").entries] == ["failed", "failed", "finished"]
    assert all("does not exist" in (entry.error or "") for entry in state(tmp_path / "on").entries[:2])
    assert (stopped.code, stopped.stderr) == (1, "")
    assert [entry.status for entry in state(tmp_path / "fast").entries] == ["failed", "waiting", "waiting"]


@pytest.mark.slow
@pytest.mark.skipif(not fork_server.is_supported(), reason="runs are forked on Linux alone")
def test_the_process_that_starts_the_runs_is_killed(tmp_path: Path, start: Start) -> None:
    """The run under way is lost, the others are not; and all are bit by bit what train.py makes of them by itself."""
    longer = (*TINY, "trainer.max_epochs=8")
    job = start(tmp_path / "sweep", "-m", "seed=1,2,3", *longer)
    alone = start(tmp_path / "alone", "seed=2", *longer)
    job.until(lambda: len(list((tmp_path / "sweep").glob("runs/demo-*/metrics.csv"))) == 2)
    [server] = [pid for pid in job.pids() if parent(pid) == job.process.pid]
    os.kill(server, signal.SIGKILL)
    done = job.wait()
    assert (done.code, done.stderr) == (1, "")
    assert re.search(r"seed 2: failed: the process that starts the runs was killed by SIGKILL \(\S+\)", done.stdout)
    assert [entry.status for entry in state(tmp_path / "sweep").entries] == ["finished", "failed", "finished"]
    job.until_it_is_gone()
    again = start(tmp_path / "sweep", "-m", "seed=1,2,3", *longer)
    assert "3 runs, 1 of them to do" in again.wait().well().stdout
    again.until_it_is_gone()
    alone.wait().well()
    [name] = records(tmp_path / "alone")
    assert_same(tmp_path / "sweep" / "runs" / name, tmp_path / "alone" / "runs" / name)


@pytest.mark.slow
def test_a_run_that_another_process_executes(tmp_path: Path, start: Start, runs: Callable[..., SweepRuns]) -> None:
    """It is not begun as long as its folder is locked, and nothing is reported as failed."""
    first, second = with_all_runs(runs("seed=1,2", *TINY)).trial_by_name
    with lock_folder(tmp_path / "runs" / first):
        job = start(tmp_path, "-m", "seed=1,2", *TINY)
        job.until(lambda: second in ended(job) and state(tmp_path).entries_with("finished") != [])
        assert [entry.status for entry in state(tmp_path).entries] == ["elsewhere", "finished"]
    done = job.wait().well()
    assert "failed" not in done.stdout
    assert records(tmp_path).keys() == {first, second}
    assert [entry.status for entry in state(tmp_path).entries] == ["finished", "finished"]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_runs_are_grouped_by_sweep_in_wandb(runs: Callable[..., SweepRuns]) -> None:
    plain, grouped = runs("seed=1,2", *TINY), runs("seed=1,2", "logger=wandb", *TINY)
    own = runs("seed=1,2", "logger=wandb", "logger.group=mine", *TINY)
    for found in (plain, grouped, own):
        with_all_runs(found)
    assert {trial.config.logger.group for trial in grouped.trial_by_name.values()} == {grouped.folder.name}
    assert {trial.config.logger.group for trial in own.trial_by_name.values()} == {"mine"}
    # Wherever they are logged, they are the same runs of the same sweep.
    assert plain.trial_by_name.keys() == grouped.trial_by_name.keys() == own.trial_by_name.keys()
    assert plain.folder == grouped.folder


def test_finished_runs_are_run_again_only_if_asked(runs: Callable[..., SweepRuns], tmp_path: Path) -> None:
    [(name, trial)] = with_all_runs(runs("seed=1", *TINY)).trial_by_name.items()
    headline = {"metric": "accuracy", "value": 0.5, "epoch": 1}
    results.write(RunRecord(name, "finished", to_dict(trial.config), headline), tmp_path / "runs" / name)
    # As every finished run has.
    (tmp_path / "runs" / name / "model").mkdir()
    (tmp_path / "runs" / name / results.GEOMETRY).write_text("{}")
    statuses = {
        overwrite: [entry.status for entry in with_all_runs(runs("seed=1,2", overwrite, *TINY)).state.entries]
        for overwrite in ("run.overwrite=false", "run.overwrite=true")
    }
    assert statuses == {"run.overwrite=false": ["finished", "waiting"], "run.overwrite=true": ["waiting", "waiting"]}


def test_data_that_cannot_be_loaded_fail_their_runs_alone(runs: Callable[..., SweepRuns]) -> None:
    found = with_all_runs(runs("task=demo,rte", "task.data_dir=null", *TINY))
    demo, rte = found.state.entries
    assert (demo.status, rte.status) == ("waiting", "failed")
    assert rte.error
    assert found.state.entries_with("failed") == [rte]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("reg.zeta=0.2,3",), "reg.zeta=3 is outside [0, 1]"),
        (("task=rte,demo", "reg.zta=1"), "reg.zta: there is no such key; did you mean reg.zeta?"),
        (
            ("reg=none,istar", "reg.zeta=0.2"),
            "reg.zeta belongs to reg=istar or random_direction, which is not selected",
        ),
        (("reg.lambda=interval(-1,1)",), "an interval is for sweep.search=optuna"),
        (("sweep.jobs=0",), "sweep.jobs=0 is too small"),
        (("sweep.search=optna",), "sweep.search=optna is not known; did you mean optuna?"),
        (("sweep.name=a/b",), "sweep.name='a/b' is not a folder name"),
        (("sweep.only=[x]",), "sweep.only=x is not known"),
        (("sweep.grids={a: 1}",), "does not map names to grids"),
    ],
)
def test_mistakes_are_told_before_anything_is_started(
    tmp_path: Path, sweeper_for: Callable[..., IstarSweeper], arguments: tuple[str, ...], told: str
) -> None:
    # What is not swept over, Hydra composes before it asks the sweeper.
    fixed = [argument for argument in arguments if "," not in argument and "interval" not in argument]

    def call() -> None:
        sweeper_for(f"run.root={tmp_path / 'runs'}", *fixed).sweep(list(arguments))

    with pytest.raises((UserError, HydraException)) as error:
        call()
    message = str(error.value) if isinstance(error.value, UserError) else schema.explain(error.value)
    assert told in message
    assert "\n" not in message
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_search_that_is_killed_goes_on(tmp_path: Path, start: Start) -> None:
    search = ("-m", "reg=istar_scratch", "reg.lambda=interval(-1,1)", "optim.lr=tag(log,interval(1e-4,1e-2))",
              "sweep.search=optuna", "sweep.trials=6", "sweep.pruner=asha", "sweep.jobs=2", *TINY,
              "trainer.max_epochs=4")  # fmt: skip
    job = start(tmp_path, *search)
    job.until(lambda: len(ended(job)) >= 1)
    written = ended(job)
    job.send(signal.SIGKILL).process.wait()
    job.until_it_is_gone()
    done = start(tmp_path, *search).wait()
    assert (done.code, done.stderr) == (0, "")
    found = records(tmp_path)
    assert len(found) == 6
    assert {record.status for record in found.values()} <= {"finished", "pruned"}
    assert {name: (tmp_path / "runs" / name / "result.json").stat().st_mtime_ns for name in written} == written
    for record in found.values():
        assert (len(record.epochs) == 4) == (record.status == "finished")
    assert len(json.loads((next((tmp_path / "runs" / "sweeps").glob("*/sweep.json"))).read_text())["entries"]) == 6
    again = start(tmp_path, *search).wait()
    assert (again.code, again.stderr) == (0, "")
    assert len(records(tmp_path)) == 6


@pytest.mark.slow
def test_a_pruned_run_can_be_finished_later(tmp_path: Path, start: Start) -> None:
    """The same run asked for by itself goes on from where the search gave it up, and ends as if it had not been."""
    # Some of these rates learn at once, others later.
    scored = ("reg=none", "task=demo_sentence", "task.limit_train=400", "task.limit_validation=100",
              *TINY[3:], "trainer.max_epochs=3")  # fmt: skip
    search = ("-m", "optim.lr=tag(log,interval(3e-4,1e-2))", "sweep.search=optuna", "sweep.trials=8",
              "sweep.pruner=asha", "sweep.sampler=random", *scored)  # fmt: skip
    assert start(tmp_path / "search", *search, "sweep.jobs=2").wait().code == 0
    pruned = {name: record for name, record in records(tmp_path / "search").items() if record.status == "pruned"}
    assert pruned
    name, record = next(iter(pruned.items()))
    alone = (f"optim.lr={record.config['optim']['lr']}", *scored)
    for folder in ("search", "alone"):
        assert start(tmp_path / folder, *alone).wait().code == 0
    assert records(tmp_path / "search")[name].status == "finished"
    assert_same(tmp_path / "search" / "runs" / name, tmp_path / "alone" / "runs" / name)
