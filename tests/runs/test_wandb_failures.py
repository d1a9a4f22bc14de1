"""Runs whose W&B server is unreachable, silent, failing or refusing, or whose W&B service dies."""

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from istar import models
from istar.runs.run import run
from istar.training import FineTuner, loggers
from tests.runs.faults import WANDB, Build, full_disk, in_metrics, only_folder, refused_in_one_line, warnings_in
from tests.waiting import SECONDS, until
from tests.wandb_records import logged_by, offline_records, recorded


def assert_logged_offline(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def test_wandb_that_cannot_be_reached(small: Build, wandb_at: Any, closed: str, caplog: Any, patience: Any) -> None:
    wandb_at(closed)
    config = small(*WANDB)
    run(config)
    assert len(patience.probes) == 1
    assert [mode for mode, *_ in patience.starts] == ["offline"]
    assert_logged_offline(only_folder(config), caplog)


def test_wandb_that_never_answers(
    small: Build, wandb_at: Any, silent: str, caplog: Any, monkeypatch: Any, patience: Any
) -> None:
    wandb_at(silent)
    monkeypatch.setattr(loggers, "PROBE_TIMEOUT_SECONDS", 0.5)
    config = small(*WANDB)
    run(config)
    assert patience.probes == [0.5]
    assert [mode for mode, *_ in patience.starts] == ["offline"]
    assert_logged_offline(only_folder(config), caplog)


@pytest.mark.parametrize(
    ("status", "early"),
    [
        pytest.param(500, (), id="500"),
        pytest.param(403, (), id="403"),
        pytest.param(500, (200,), id="500 after the probe", marks=pytest.mark.slow),
        pytest.param(403, (200,), id="403 after the probe", marks=pytest.mark.slow),
    ],
)
def test_wandb_that_fails(
    small: Build,
    wandb_at: Any,
    serve: Any,
    caplog: Any,
    monkeypatch: Any,
    patience: Any,
    status: int,
    early: tuple[int, ...],
) -> None:
    server = serve(status, early)
    wandb_at(server.url)
    monkeypatch.setattr(loggers, "_INIT_TIMEOUT_SECONDS", 4.0)
    config = small(*WANDB)
    run(config)
    assert len(patience.probes) == 1
    assert [mode for mode, *_ in patience.starts] == (["online", "offline"] if early else ["offline"])
    assert patience.starts[0][1] == 4.0
    assert server.requests[0] == "POST /graphql"
    assert (len(server.requests) > 1) == bool(early)
    assert_logged_offline(only_folder(config), caplog)
    assert str(status) in caplog.text


@pytest.mark.parametrize("mode", ["auto", "online"])
def test_wandb_that_refuses_the_key(small: Build, wandb_at: Any, serve: Any, mode: str) -> None:
    import wandb

    wandb_at(serve(401).url)
    message = refused_in_one_line(small(*WANDB, f"logger.mode={mode}"))
    assert "refuses the API key" in message
    assert "WANDB_API_KEY" in message
    assert "logger.mode=offline" in message
    assert wandb.run is None


def test_a_hub_that_must_not_be_asked_forbids_no_wandb(
    small: Build, wandb_at: Any, serve: Any, monkeypatch: Any
) -> None:
    """W&B's library asks its own server, not the hub's library, which refuses every server."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    server = serve(401)
    wandb_at(server.url)
    refused_in_one_line(small(*WANDB))
    assert server.requests == ["POST /graphql"]


def test_without_a_key_nobody_is_asked(small: Build, wandb_at: Any, serve: Any, monkeypatch: Any, caplog: Any) -> None:
    server = serve(200)
    wandb_at(server.url)
    monkeypatch.delenv("WANDB_API_KEY")
    config = small(*WANDB)
    run(config)
    assert server.requests == []
    assert warnings_in(caplog) == []
    [records] = offline_records(only_folder(config))
    assert len(logged_by(records, "train/loss")) == 4


def test_online_needs_a_key(small: Build, wandb_at: Any, serve: Any, monkeypatch: Any) -> None:
    wandb_at(serve(401).url)
    monkeypatch.delenv("WANDB_API_KEY")
    message = refused_in_one_line(small(*WANDB, "logger.mode=online"))
    assert "logger.mode=offline needs no key" in message


@pytest.mark.parametrize(("name", "value"), [("WANDB_MODE", "sometimes"), ("WANDB_BASE_URL", "nowhere")])
def test_a_wandb_setting_that_is_none(small: Build, wandb_at: Any, monkeypatch: Any, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert "Weights & Biases" in refused_in_one_line(small(*WANDB))


def test_a_key_of_the_wrong_form(small: Build, wandb_at: Any, serve: Any, monkeypatch: Any) -> None:
    wandb_at(serve(200).url)
    monkeypatch.setenv("WANDB_API_KEY", "short")
    assert "Weights & Biases" in refused_in_one_line(small(*WANDB))


def test_a_key_in_the_netrc_file_counts(small: Build, wandb_at: Any, serve: Any, monkeypatch: Any) -> None:
    server = serve(401)
    wandb_at(server.url)
    monkeypatch.delenv("WANDB_API_KEY")
    netrc = Path(os.environ["NETRC"])
    netrc.write_text(f"machine {server.url.removeprefix('http://')} login user password {'0123456789' * 4}\n")
    netrc.chmod(0o600)
    assert "refuses the API key" in refused_in_one_line(small(*WANDB))


STARTED = {
    b"query Viewer": {"viewer": {"id": "x"}},
    b"query RunResumeStatus": {"model": None},
    b"mutation UpsertBucket": {
        "upsertBucket": {
            "bucket": {
                "id": "x",
                "name": "n",
                "displayName": "n",
                "config": "{}",
                "project": {"id": "p", "name": "istar", "entity": {"id": "e", "name": "me"}},
            },
            "inserted": True,
        }
    },
}


@pytest.mark.slow
def test_wandb_that_fails_behind_the_start(
    small: Build, wandb_at: Any, serve: Any, caplog: Any, monkeypatch: Any, patience: Any
) -> None:
    """W&B's own retries go on beside the training and are cut off behind it; its record is whole and can be sent."""
    import wandb

    monkeypatch.setattr(loggers, "_FINISH_TIMEOUT_SECONDS", 2.0)
    server = serve(500, (), STARTED)
    wandb_at(server.url)
    config = small(*WANDB)
    run(config)
    assert patience.starts == [("online", SECONDS, 2.0)]
    assert wandb.run is None
    [warning] = warnings_in(caplog)
    assert "does not answer; the run there has its metrics, but lacks its tables" in warning
    folder = only_folder(config)
    wandb.teardown()  # as at the end of the process
    [path] = (folder / "wandb").glob("run-*/run-*.wandb")
    assert logged_by(recorded(path), "train/loss") == in_metrics(folder, "train/loss")


def own_services() -> list[int]:
    """W&B's service processes that this process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
            status, parent = rest.split()[:2]
            if name.startswith("wandb-core") and int(parent) == os.getpid() and status != "Z":
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("when", ["in a step", "at the end"])
def test_a_wandb_service_that_dies(
    small: Build, wandb_at: Any, closed: str, caplog: Any, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    import wandb

    wandb_at(closed)
    owner, name = (FineTuner, "configure_gradient_clipping") if when == "in a step" else (models, "save")
    original, killed = getattr(owner, name), []

    def kill(*arguments: Any, **named: Any) -> Any:
        if not killed:
            killed.extend(own_services())
            for service in killed:
                os.kill(service, signal.SIGKILL)
            until(lambda: not own_services())
        return original(*arguments, **named)

    monkeypatch.setattr(owner, name, kill)
    config = small(*WANDB, "logger.mode=offline")
    assert run(config).status == "finished"
    assert len(killed) == 1
    assert wandb.run is None
    [warning] = warnings_in(caplog)
    assert "Weights & Biases has failed" in warning
    assert [step for step, _ in in_metrics(only_folder(config), "train/loss")] == [0, 1, 2, 3]
    shutil.rmtree(config.run.root)
    caplog.clear()
    assert run(config).status == "finished"
    assert warnings_in(caplog) == []
    [records] = offline_records(only_folder(config))
    assert len(logged_by(records, "train/loss")) == 4


def test_a_disk_full_of_metrics_finishes_the_wandb_run(
    small: Build, wandb_at: Any, closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    wandb_at(closed)
    config = small(*WANDB, "logger.mode=offline")
    with full_disk(monkeypatch, "metrics.csv"):
        refused_in_one_line(config)
    assert wandb.run is None
    [records] = offline_records(only_folder(config))
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [1]
