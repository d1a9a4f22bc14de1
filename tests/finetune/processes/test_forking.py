"""Runs in forks of a server equal those in this process, and have their own environment and output."""

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from istar.errors import StoppedError, UserError
from istar.finetune.config import Config
from istar.finetune.execute.run import run
from istar.finetune.processes.forking import ForkedProcess, is_supported
from istar.finetune.processes.launch import RunProcesses
from istar.finetune.processes.process_signals import blocked_signals
from istar.runs.record import RunRecord, read_result
from tests.forks import forking
from tests.jobs import Start
from tests.outcomes import assert_same
from tests.waiting import until

pytestmark = pytest.mark.skipif(not is_supported(), reason="runs are forked on Linux alone")


def start_run(config: Config, log: Path, variables: Mapping[str, str] = {}) -> RunProcesses:
    """Start a run in a fork of the tests' server, which has imported the same libraries."""
    forking()
    with blocked_signals():
        return RunProcesses(config, 1, None, variables, log, ForkedProcess)


def wait(run: RunProcesses, *signals: int) -> RunRecord:
    """Wait for the end of a run, and return its record or raise its error."""
    until(run.has_ended)
    return run.read_record(signals)


def test_a_forked_run_equals_one_in_this_process(small: Callable[..., Config], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    variables = {"ISTAR_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    forked = wait(start_run(small("run.geometry=true", f"run.root={tmp_path / 'forked'}"), tmp_path / "log", variables))
    alone = run(small("run.geometry=true", f"run.root={tmp_path / 'alone'}"))
    assert_same(tmp_path / "forked" / forked.name, tmp_path / "alone" / alone.name)
    assert list(cache.iterdir()), "the fork has used another cache than its environment names"
    assert "IsoScore" in (tmp_path / "log").read_text()


def test_an_error_is_that_of_the_run(small: Callable[..., Config], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="layer 7"):
        wait(start_run(small("reg.layers=[7]"), tmp_path / "log"))


def test_a_signal_stops_a_run(small: Callable[..., Config], tmp_path: Path) -> None:
    stopped = start_run(small("trainer.max_epochs=1000"), tmp_path / "log")
    until(lambda: any(tmp_path.glob("runs/*/metrics.csv")))
    stopped.send_signal(signal.SIGTERM)
    with pytest.raises(StoppedError):
        wait(stopped, signal.SIGTERM)


def parent_pid(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
def test_a_killed_server_fails_one_run(tmp_path: Path, start: Start) -> None:
    """The run under way ends by itself and fails, the others start from a new server, and a repetition mends all."""
    settings = ("-m", "seed=1,2,3", "task.limit_train=32", "task.limit_validation=9", "trainer.accelerator=cpu",
                "trainer.max_epochs=8", "reg.num_points=200")  # fmt: skip
    job = start(tmp_path, *settings, python=("-s",))
    job.until(lambda: len(list(tmp_path.glob("runs/demo-*/metrics.csv"))) == 2)
    [forked] = [pid for pid in job.pids() if parent_pid(pid) != job.process.pid and pid != job.process.pid]
    os.kill(parent_pid(forked), signal.SIGKILL)
    outcome = job.wait()
    assert (outcome.code, outcome.stderr) == (1, "")
    assert "1 of 3 runs failed" in outcome.stdout
    job.until_it_is_gone()
    repeated = start(tmp_path, *settings, python=("-s",)).wait().well()
    assert "3 runs, 1 of them to do" in repeated.stdout
    assert {read_result(path.parent).status for path in tmp_path.glob("runs/demo-*/result.json")} == {"finished"}
