"""Sweeps as jobs of a queue, by submitit's executor for this machine; docs/slurm.md is about SLURM itself."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from istar import results
from tests.test_launch import LONG, start

__all__ = ["start"]

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")
JOBS = ("-m", "hydra/launcher=local_jobs", *LONG)


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")


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


@pytest.mark.slow
def test_a_job_that_fails_is_told_in_one_line_and_the_others_go_on(tmp_path, start):
    done = start(tmp_path, *JOBS, "seed=1", "reg.layers=[7],last", "trainer.max_epochs=1").wait()
    assert (done.code, done.stderr) == (1, "")
    [line] = [line for line in done.stdout.splitlines() if line.startswith("[1/2] ")]
    assert "failed: layer 7 does not exist" in line
    assert "1 of 2 runs failed" in done.stdout
    [folder] = (tmp_path / "runs").glob("demo-*")
    assert results.read(folder).config["reg"]["layers"] == "last"
