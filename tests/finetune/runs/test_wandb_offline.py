"""Runs with W&B offline use no network, and a resumed run keeps its ID."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from istar.finetune.runs.run import run
from tests.finetune.runs.faults import FOUR_STEPS, WANDB, Build, break_at, in_metrics, only_folder
from tests.waiting import SECONDS, until_the_next_second
from tests.wandb_records import logged_by, offline_records


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_wandb_offline_touches_no_network(
    small: Build, wandb_at: Any, start_server: Any, forbid_network: Any, mode: str
) -> None:
    server = start_server(200)
    wandb_at(server.url)
    attempts = forbid_network()
    config = small(*WANDB, f"logger.mode={mode}")
    run(config)
    assert attempts == server.requests == []
    assert len(offline_records(only_folder(config))) == (1 if mode == "offline" else 0)


@pytest.mark.slow
def test_wandb_offline_reports_nothing_at_the_end_of_the_process(
    repository: Path, wandb_at: Any, start_server: Any, tmp_path: Path
) -> None:
    server = start_server(500)
    wandb_at(server.url)
    command = [sys.executable, "train.py", "task=demo", "logger=wandb", "logger.mode=offline", *FOUR_STEPS,
               "task.limit_validation=8", "trainer.max_epochs=1", f"run.root={tmp_path / 'runs'}",
               "trainer.progress_bar=false", "trainer.accelerator=cpu"]  # fmt: skip
    completed = subprocess.run(
        command,
        cwd=repository,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert completed.returncode == 0, completed.stderr
    assert server.requests == []
    assert "deprecated" not in completed.stderr + completed.stdout
    assert "opentelemetry" not in completed.stderr + completed.stdout


def test_wandb_knows_one_run_by_one_id(
    small: Build, wandb_at: Any, closed_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    wandb_at(closed_url)
    config = small(*WANDB, "logger.mode=offline")
    restore_step = break_at(monkeypatch, 3, RuntimeError("out of luck"))
    with pytest.raises(RuntimeError, match="luck"):
        run(config)
    assert wandb.run is None
    folder = only_folder(config)
    until_the_next_second()
    restore_step()
    run(config)
    assert wandb.run is None
    first, second = offline_records(folder)
    run_id = (folder / "wandb" / "run-id").read_text()
    for records, exit_code, steps in ((first, 1, [0, 1]), (second, 0, [2, 3])):
        assert {record.run.run_id for record in records if record.HasField("run")} == {run_id}
        assert [record.exit.exit_code for record in records if record.HasField("exit")] == [exit_code]
        assert [step for step, _ in logged_by(records, "train/loss")] == steps
    losses = logged_by(first, "train/loss") + logged_by(second, "train/loss")
    assert losses == in_metrics(folder, "train/loss")
    run(small(*WANDB, "logger.mode=offline", "run.overwrite=true"))
    assert (folder / "wandb" / "run-id").read_text() != run_id
    [new_records] = offline_records(folder)
    assert {record.run.run_id for record in new_records if record.HasField("run")} == {
        (folder / "wandb" / "run-id").read_text()
    }
