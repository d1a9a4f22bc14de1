"""Sweeps as jobs of a queue, by submitit's executor for this machine; docs/scaling.md describes SLURM itself."""

import os
import re
import signal
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import MissingConfigException

from istar.finetune.config import schema
from istar.runs.record import read_result
from tests.finetune.processes.test_launch import LONG, Job, single_process_run
from tests.outcomes import assert_same

__all__ = ["single_process_run"]  # a fixture

pytestmark = [pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")]
JOBS = ("-m", "hydra/launcher=local_jobs", *LONG)


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")


def find_job_pid(submitter: Job, argument: str) -> int:
    """Return the PID of the process that submitit has started for the run with this argument."""
    pids = [
        pid
        for pid in submitter.pids()
        if b"submitit.core._submit" in Path(f"/proc/{pid}/cmdline").read_bytes()
        and argument in read_seed_override(submitter.folder, pid)
    ]
    [pid] = pids
    return pid


def read_seed_override(folder: Path, pid: int) -> str:
    """Return `seed=<seed>` of the run of a job, from the config with which its training was started."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        command = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        if "istar.finetune.processes.child" in command:
            config_path = Path(command[command.index("istar.finetune.processes.child") + 2])
            return f"seed={yaml.safe_load(config_path.read_text())['seed']}"
    return ""


def read_logs(folder: Path, kind: str = "out") -> str:
    """Return the text of all logs of a local queue."""
    return "".join(path.read_text() for path in folder.glob(f"runs/sweeps/local/*/*_log.{kind}"))


def test_what_the_jobs_ask_for(repository):
    with initialize_config_dir(str(repository / "conf"), version_base="1.3", job_name="test"):
        overrides = ["hydra/launcher=slurm", "trainer.devices=2", "hydra.launcher.partition=long"]
        settings = compose("config", overrides, return_hydra_config=True).hydra.launcher
    assert settings._target_.endswith(".SlurmLauncher")
    assert (settings.nodes, settings.tasks_per_node, settings.gpus_per_node) == (1, 1, 2)
    assert settings.additional_parameters.requeue
    assert settings.max_num_timeout > 0
    assert settings.partition == "long"
    assert settings.submitit_folder == "runs/sweeps/slurm/%j"


def test_the_missing_package_is_one_line():
    error = MissingConfigException("", "hydra/launcher/submitit_slurm")
    assert schema.explain(error).endswith("pip install 'istar[slurm]'")


@pytest.mark.slow
def test_a_job_that_fails_is_told_in_one_line_and_the_others_go_on(tmp_path, start):
    done = start(tmp_path, *JOBS, "seed=1", "reg.layers=[7],last", "trainer.max_epochs=1").wait()
    assert (done.code, done.stderr) == (1, "")
    # The finished run is reported when it ends, the failed one when the launcher returns, which may be at once.
    [line] = [line for line in done.stdout.splitlines() if " failed: " in line]
    assert line.startswith(("[1/2] ", "[2/2] "))
    assert "failed: layer 7 does not exist" in line
    assert "1 of 2 runs failed" in done.stdout
    [folder] = (tmp_path / "runs").glob("demo-*")
    assert read_result(folder).config["reg"]["layers"] == "last"


@pytest.mark.slow
def test_a_preempted_job_is_saved_and_queued_again(tmp_path, start, single_process_run):
    submitter = start(tmp_path, *JOBS, "seed=1,2").until(lambda: last_saved_step(tmp_path, 1) > 0)
    os.kill(find_job_pid(submitter, "seed=1"), signal.SIGUSR2)
    done = submitter.wait()
    assert (done.code, done.stderr) == (0, "")
    log = read_logs(tmp_path)
    assert len(re.findall(r"INFO .* Requeued job", log)) == 1
    [step] = re.findall(r"was interrupted; it resumes from step-(\d+)\.ckpt", read_logs(tmp_path, "err"))
    assert int(step) > 0
    runs = {read_result(path).config["seed"]: path for path in (tmp_path / "runs").glob("demo-*")}
    assert sorted(runs) == [1, 2]
    assert_same(runs[1], single_process_run)


@pytest.mark.slow
def test_a_job_that_is_ended_does_not_end_the_others(tmp_path, start, single_process_run):
    submitter = start(tmp_path, *JOBS, "seed=1,2").until(lambda: last_saved_step(tmp_path, 2) > 0)
    os.kill(find_job_pid(submitter, "seed=2"), signal.SIGTERM)
    done = submitter.wait()
    assert (done.code, done.stderr) == (1, "")
    assert re.search(r"seed 2: stopped by SIGTERM: saved at step \d+; run the same command to resume", done.stdout)
    assert "1 of 2 runs are not done; run the same command to resume" in done.stdout
    resumed = start(tmp_path, *JOBS, "seed=1,2").wait()
    assert (resumed.code, resumed.stderr) == (0, "")
    assert "it resumes from step-" in read_logs(tmp_path, "err")
    assert len(list((tmp_path / "runs").glob("demo-*/result.json"))) == 2


@pytest.mark.slow
def test_a_job_that_is_killed_is_one_line(tmp_path, start):
    submitter = start(tmp_path, *JOBS, "seed=1").until(lambda: last_saved_step(tmp_path, 1) > 0)
    os.kill(find_job_pid(submitter, "seed=1"), signal.SIGKILL)
    done = submitter.wait()
    assert done.code == 2
    assert done.line().startswith("error: UncompletedJobError: Job ")
    assert "the same command" in done.line()
    submitter.until_it_is_gone()


def last_saved_step(folder: Path, seed: int) -> int:
    """Return the last step that the run with this seed has saved, or 0."""
    for path in folder.glob("runs/demo-*/config.yaml"):
        if yaml.safe_load(path.read_text())["seed"] == seed:
            steps = path.parent.glob("checkpoints/step-*.ckpt")
            return max((int(step.stem.removeprefix("step-")) for step in steps), default=0)
    return 0
