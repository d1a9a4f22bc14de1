"""Runs with W&B offline use no network; a server or service that fails does not end a run."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from istar.finetune.execute.identify import identify
from istar.finetune.execute.run import run
from istar.finetune.training import wandb_logger
from istar.finetune.training.module import FineTuner
from istar.models import pretrained
from tests.finetune.execute.faults import (
    FOUR_STEPS,
    WANDB,
    Build,
    break_at,
    full_disk,
    in_metrics,
    only_folder,
    refused_in_one_line,
    warnings_in,
)
from tests.waiting import SECONDS, until, until_the_next_second
from tests.wandb_records import logged_by, offline_records, recorded


def assert_logged_offline(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Assert that the only warning names the offline run of W&B, and that this run has all four steps."""
    import wandb

    assert wandb.run is None
    [warning] = warnings_in(caplog)
    assert "Weights & Biases cannot be used now (" in warning
    assert f"wandb sync {folder / 'wandb' / 'offline-run-*'}" in warning
    assert "\n" not in warning
    [records] = offline_records(folder)
    rows = logged_by(records, "train/loss")
    assert [step for step, _ in rows] == [0, 1, 2, 3]
    assert rows == in_metrics(folder, "train/loss")
    assert logged_by(records, "val/accuracy") == in_metrics(folder, "val/accuracy") != []
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]


@pytest.mark.parametrize(
    ("status", "first_statuses"),
    [(None, ()), (0, ()), (500, ()), (500, (200,)), (403, (200,))],
    ids=["not reached", "no answer", "500", "500 after the probe", "403 after the probe"],
)
@pytest.mark.slow
def test_wandb_that_fails(
    small: Build, wandb_at: Any, start_server: Any, closed_url: str, silent_url: str, caplog: Any, monkeypatch: Any,
    wandb_waits: Any, status: int | None, first_statuses: tuple[int, ...],
) -> None:  # fmt: skip
    server = start_server(status, first_statuses)
    wandb_at(server.url if status else silent_url if status == 0 else closed_url)
    timeout = 0.5 if status == 0 else SECONDS
    monkeypatch.setattr(wandb_logger, "PROBE_TIMEOUT_SECONDS", timeout)
    monkeypatch.setattr(wandb_logger, "_INIT_TIMEOUT_SECONDS", 4.0)
    config = small(*WANDB)
    run(config)
    assert wandb_waits.probes == [timeout]
    assert [mode for mode, *_ in wandb_waits.starts] == (["online", "offline"] if first_statuses else ["offline"])
    assert wandb_waits.starts[0][1] == 4.0
    assert_logged_offline(only_folder(config), caplog)
    if status:
        assert server.requests[0] == "HEAD /"
        assert (len(server.requests) > 1) == bool(first_statuses)
        assert str(status) in caplog.text


@pytest.mark.parametrize("mode", ["auto", "online"])
def test_wandb_refuses_the_key(small: Build, wandb_at: Any, start_server: Any, monkeypatch: Any, mode: str) -> None:
    """The server of W&B is probed without the hub's library, which refuses all requests in offline mode."""
    import wandb

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    server = start_server(401)
    wandb_at(server.url)
    message = refused_in_one_line(small(*WANDB, f"logger.mode={mode}"))
    assert "refuses the API key" in message
    assert "WANDB_API_KEY" in message
    assert "logger.mode=offline" in message
    assert server.requests[0] == "HEAD /"
    assert wandb.run is None


def test_no_key_asks_nobody(small: Build, wandb_at: Any, start_server: Any, monkeypatch: Any, caplog: Any) -> None:
    server = start_server(200)
    wandb_at(server.url)
    monkeypatch.delenv("WANDB_API_KEY")
    config = small(*WANDB)
    run(config)
    assert server.requests == []
    assert warnings_in(caplog) == []
    [records] = offline_records(only_folder(config))
    assert len(logged_by(records, "train/loss")) == 4
    message = refused_in_one_line(small(*WANDB, "logger.mode=online", "seed=2"))
    assert "logger.mode=offline needs no key" in message


@pytest.mark.parametrize(
    ("name", "value"), [("WANDB_MODE", "sometimes"), ("WANDB_BASE_URL", "nowhere"), ("WANDB_INIT_TIMEOUT", "long")]
)
def test_wrong_setting(small: Build, wandb_at: Any, start_server: Any, monkeypatch: Any, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    message = refused_in_one_line(small(*WANDB))
    assert message.startswith("Weights & Biases: ")
    assert message.endswith(f"; correct the environment variable {name}")
    monkeypatch.delenv(name)
    wandb_at(start_server(200).url)
    monkeypatch.setenv("WANDB_API_KEY", "short")
    assert "Weights & Biases" in refused_in_one_line(small(*WANDB))


@pytest.mark.parametrize("mode", ["offline", "disabled", "online"])
@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("logger.project=me/istar", "correct logger.project"),
        (f"logger.project={'x' * 129}", "correct logger.project"),
        (f"logger.tags=[{'x' * 65}]", "correct logger.tags"),
    ],
)
def test_hints_of_errors(small: Build, wandb_at: Any, start_server: Any, override: str, hint: str, mode: str) -> None:
    wandb_at(start_server(200).url)
    config = small(*WANDB, f"logger.mode={mode}", override)
    message = refused_in_one_line(config)
    assert message.endswith(f"; {hint}")
    assert "key" not in message
    # The folder is a run's now.
    path = identify(config).folder / "wandb" / "run-id"
    path.write_text("a/b")
    message = refused_in_one_line(small(*WANDB, f"logger.mode={mode}"))
    assert message.endswith(f"; remove {path}")
    assert "key" not in message


@pytest.mark.parametrize("text", ["entity nobody not found during upsertBucket", "permission denied"])
def test_an_unknown_entity(small: Build, wandb_at: Any, start_server: Any, monkeypatch: Any, text: str) -> None:
    import wandb

    def refuse(**keywords: Any) -> None:
        raise wandb.errors.CommError(text)

    wandb_at(start_server(200).url)
    monkeypatch.setattr(wandb, "init", refuse)
    message = refused_in_one_line(small(*WANDB, "logger.mode=online", "logger.entity=nobody"))
    assert message.startswith(f"Weights & Biases: {text}; correct logger.entity and logger.project")
    assert "offline" not in message


def test_a_key_in_the_netrc_file_counts(small: Build, wandb_at: Any, start_server: Any, monkeypatch: Any) -> None:
    server = start_server(401)
    wandb_at(server.url)
    monkeypatch.delenv("WANDB_API_KEY")
    netrc = Path(os.environ["NETRC"])
    netrc.write_text(f"machine {server.url.removeprefix('http://')} login user password {'0123456789' * 4}\n")
    netrc.chmod(0o600)
    assert "refuses the API key" in refused_in_one_line(small(*WANDB))


START_ANSWERS = {
    b"query Viewer": {"viewer": {"id": "x"}},
    b"query RunResumeStatus": {"model": None},
    b"mutation UpsertBucket": {
        "upsertBucket": {
            "bucket": {
                "id": "x", "name": "n", "displayName": "n", "config": "{}",
                "project": {"id": "p", "name": "istar", "entity": {"id": "e", "name": "me"}},
            },
            "inserted": True,
        }
    },
}  # fmt: skip


@pytest.mark.slow
def test_wandb_that_fails_behind_the_start(
    small: Build, wandb_at: Any, start_server: Any, caplog: Any, monkeypatch: Any, wandb_waits: Any
) -> None:
    """W&B retries during the training and is cut off after it; its record is complete and can be uploaded later."""
    import wandb

    monkeypatch.setattr(wandb_logger, "_FINISH_TIMEOUT_SECONDS", 2.0)
    server = start_server(500, (200,), START_ANSWERS)
    wandb_at(server.url)
    config = small(*WANDB)
    run(config)
    assert wandb_waits.starts == [("online", SECONDS, 2.0)]
    assert wandb.run is None
    [warning] = warnings_in(caplog)
    assert "does not answer; the run there has its metrics, but lacks its tables" in warning
    folder = only_folder(config)
    wandb.teardown()  # as at the end of the process
    [path] = (folder / "wandb").glob("run-*/run-*.wandb")
    assert logged_by(recorded(path), "train/loss") == in_metrics(folder, "train/loss")


def find_services() -> list[int]:
    """Return the PIDs of the service processes of W&B that this process has started."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
            status, parent = rest.split()[:2]
            if name.startswith("wandb-core") and int(parent) == os.getpid() and status != "Z":
                pids.append(int(path.parent.name))
    return pids


@pytest.mark.parametrize("death_stage", ["in a step", pytest.param("at the end", marks=pytest.mark.slow)])
def test_a_wandb_service_that_dies(
    small: Build, wandb_at: Any, closed_url: str, caplog: Any, monkeypatch: pytest.MonkeyPatch, death_stage: str
) -> None:
    import wandb

    wandb_at(closed_url)
    owner, name = (FineTuner, "configure_gradient_clipping") if death_stage == "in a step" else (pretrained, "save")
    original_function, killed_pids = getattr(owner, name), []

    def kill(*arguments: Any, **keywords: Any) -> Any:
        if not killed_pids:
            killed_pids.extend(find_services())
            for pid in killed_pids:
                os.kill(pid, signal.SIGKILL)
            until(lambda: not find_services())
        return original_function(*arguments, **keywords)

    monkeypatch.setattr(owner, name, kill)
    config = small(*WANDB, "logger.mode=offline")
    assert run(config).status == "finished"
    assert len(killed_pids) == 1
    assert wandb.run is None
    [warning] = warnings_in(caplog)
    assert "Weights & Biases has failed" in warning
    assert [step for step, _ in in_metrics(only_folder(config), "train/loss")] == [0, 1, 2, 3]
    if death_stage == "in a step":
        return
    shutil.rmtree(config.run.root)
    caplog.clear()
    assert run(config).status == "finished"
    assert warnings_in(caplog) == []
    [records] = offline_records(only_folder(config))
    assert len(logged_by(records, "train/loss")) == 4


def test_full_disk_ends_the_run(small: Build, wandb_at: Any, closed_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    wandb_at(closed_url)
    config = small(*WANDB, "logger.mode=offline")
    with full_disk(monkeypatch, "metrics.csv"):
        refused_in_one_line(config)
    assert wandb.run is None
    [records] = offline_records(only_folder(config))
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [1]


@pytest.mark.slow
def test_wandb_disabled_touches_no_network(small: Build, wandb_at: Any, start_server: Any, forbid_network: Any) -> None:
    server = start_server(200)
    wandb_at(server.url)
    attempts = forbid_network()
    config = small(*WANDB, "logger.mode=disabled")
    run(config)
    assert attempts == server.requests == []
    assert offline_records(only_folder(config)) == []


@pytest.mark.slow
def test_offline_nothing_is_reported(repository: Path, wandb_at: Any, start_server: Any, tmp_path: Path) -> None:
    server = start_server(500)
    wandb_at(server.url)
    command = [sys.executable, "train.py", "task=demo", "logger=wandb", "logger.mode=offline", *FOUR_STEPS,
               "task.limit_validation=8", "trainer.max_epochs=1", f"run.root={tmp_path / 'runs'}",
               "trainer.progress_bar=false", "trainer.accelerator=cpu"]  # fmt: skip
    completed = subprocess.run(
        command, cwd=repository, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=SECONDS,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    assert server.requests == []
    assert "deprecated" not in completed.stderr + completed.stdout
    assert "opentelemetry" not in completed.stderr + completed.stdout


def test_wandb_offline_touches_no_network_and_knows_one_run_by_one_id(
    small: Build, wandb_at: Any, start_server: Any, forbid_network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    server = start_server(200)
    wandb_at(server.url)
    attempts = forbid_network()
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
    assert attempts == server.requests == []
    first, second = offline_records(folder)
    run_id = (folder / "wandb" / "run-id").read_text()
    for records, exit_code, steps in ((first, 1, [0, 1]), (second, 0, [2, 3])):
        assert {record.run.run_id for record in records if record.HasField("run")} == {run_id}
        assert [record.exit.exit_code for record in records if record.HasField("exit")] == [exit_code]
        assert [step for step, _ in logged_by(records, "train/loss")] == steps
    losses = logged_by(first, "train/loss") + logged_by(second, "train/loss")
    assert losses == in_metrics(folder, "train/loss")
