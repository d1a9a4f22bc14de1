"""What a run does when its surroundings fail: the network, the disk, its own files, and other processes."""

import copy
import csv
import errno
import http.server
import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file

from istar import files, models, results
from istar.config import Config
from istar.errors import UserError
from istar.files import sole_writer
from istar.runs import run as run_module
from istar.runs.run import run
from istar.tasks.hub import probe
from istar.training import FineTuner, loggers
from istar.training.checkpoints import FORMAT, AtomicCheckpointIO, load, resumable
from tests.outcomes import assert_same, only_run
from tests.waiting import SECONDS, until
from tests.wandb_records import logged_by, offline_records, recorded

Build = Callable[..., Config]
FOUR_STEPS = ("reg=none", "task.limit_train=32", "data.batch_size=8", "trainer.checkpoint_every_n_steps=1")
EPOCHS = (*FOUR_STEPS, "trainer.max_epochs=2")
DRAFT = re.compile(r"\..*\.[0-9a-f]{32}")


class Broken(BaseException):
    """Passes by whatever handles exceptions, as a kill does."""


def only_folder(config: Config) -> Path:
    return only_run(Path(config.run.root))


def metrics_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def undisturbed(composed: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of EPOCHS that nothing disturbed."""
    shared = ("task.limit_validation=16", "trainer.accumulate_grad_batches=1", "trainer.log_every_n_steps=1",
              "trainer.progress_bar=false", "trainer.accelerator=cpu")  # fmt: skip
    config = composed(*shared, *EPOCHS, f"run.root={tmp_path_factory.mktemp('undisturbed')}")
    run(config)
    return only_folder(config)


def test_drafts_are_removed_wherever_they_are_and_nothing_else(tmp_path: Path) -> None:
    draft = f".RTE.tsv.{'0f' * 16}"
    for name in ("RTE.tsv", draft, ".notes.txt", f"x{draft}"):
        for folder in (tmp_path, tmp_path / "submission"):
            folder.mkdir(exist_ok=True)
            (folder / name).write_text("mine")
    files.remove_drafts(tmp_path)
    kept = [".notes.txt", "RTE.tsv", f"x{draft}"]
    assert sorted(path.name for path in tmp_path.glob("*.*")) == kept
    assert sorted(path.name for path in (tmp_path / "submission").iterdir()) == kept


def break_at(monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException) -> Callable[[], None]:
    """Let the count-th training step raise; the function given back mends it."""
    original, calls = FineTuner.training_step, 0

    def breaks(self: FineTuner, batch: Any, batch_idx: int) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            raise error
        return original(self, batch, batch_idx)

    monkeypatch.setattr(FineTuner, "training_step", breaks)
    return lambda: monkeypatch.setattr(FineTuner, "training_step", original)


def assert_whole(folder: Path) -> None:
    """Nothing in a run's folder is half written."""
    names = [path for path in folder.rglob("*") if DRAFT.fullmatch(path.name)]
    assert names == []
    for path in (folder / "checkpoints").glob("*"):
        assert path.suffix == ".ckpt"
        assert load(path)["state_dict"]
    if (folder / results.RESULT).exists():
        results.read(folder)
    if (folder / "metrics.csv").exists():
        assert all(None not in row and None not in row.values() for row in metrics_of(folder))
    if (folder / "model").exists():
        assert load_file(folder / "model" / "model.safetensors")


def refused_in_one_line(config: Config) -> str:
    with pytest.raises(UserError) as caught:
        run(config)
    message = str(caught.value)
    assert "\n" not in message
    assert "None" not in message
    assert len(message) < 1000
    return message


# ---- Weights & Biases


class Server:
    """Answers each request with a status; `early` are those of the first requests, `known` are always well answered.

    Args:
        status: of all others.
        early: of the first requests, one each.
        known: what a request holds, and the answer's data.
    """

    def __init__(self, status: int, early: tuple[int, ...] = (), known: dict[bytes, Any] | None = None) -> None:
        self.requests: list[str] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                asked = self.rfile.read(int(self.headers.get("content-length") or 0))
                number = len(outer.requests)
                outer.requests.append(f"{self.command} {self.path}")
                data = next((data for name, data in (known or {}).items() if name in asked), None)
                answered = 200 if data is not None else early[number] if number < len(early) else status
                body = b"" if self.command == "HEAD" else json.dumps({"data": data}).encode()
                self.send_response(answered)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_HEAD = do_PUT = do_POST  # noqa: N815

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(*arguments: Any) -> Server:
        started.append(Server(*arguments))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def closed() -> str:
    """The address of a port where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def wandb_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """`wandb_at(url)`: a user with an API key, and W&B at that address; nothing of the real user's is seen."""
    import wandb

    wandb.teardown()
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    # Set and deleted, so that what the run sets is gone afterwards.
    for name in ("WANDB_ERROR_REPORTING", "WANDB_X_DISABLE_VIEWER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    environment = {
        "WANDB_API_KEY": "0123456789" * 4,
        "WANDB_SILENT": "true",
        "WANDB_CONFIG_DIR": str(tmp_path / "wandb_config"),
        "WANDB_CACHE_DIR": str(tmp_path / "wandb_cache"),
        "NETRC": str(tmp_path / "netrc"),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    # A server that does answer is never too late.
    monkeypatch.setattr(loggers, "PROBE_SECONDS", SECONDS)
    monkeypatch.setattr(loggers, "probe", partial(probe, seconds=SECONDS))
    monkeypatch.setattr(loggers, "_INIT_SECONDS", SECONDS)
    yield lambda url: monkeypatch.setenv("WANDB_BASE_URL", url)
    wandb.teardown()


@dataclass
class Patience:
    """What was begun that may have to wait for W&B.

    Attributes:
        probes: how long the server was given to answer each of the run's own questions.
        starts: the mode of each call of `wandb.init`, and how long it and the end of the run may take.
    """

    probes: list[float] = field(default_factory=list)
    starts: list[tuple[str, float, float]] = field(default_factory=list)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Patience:
    """W&B retries for as long as it may; one that is offline asks nobody and never has to."""
    import requests
    import wandb

    found, post, init = Patience(), requests.post, wandb.init

    def asking(*arguments: Any, timeout: float, **named: Any) -> Any:
        found.probes.append(timeout)
        return post(*arguments, timeout=timeout, **named)

    def starting(mode: str, settings: Any, **named: Any) -> Any:
        found.starts.append((mode, settings.init_timeout, settings.finish_timeout))
        if mode == "offline":
            settings.init_timeout = SECONDS
        return init(mode=mode, settings=settings, **named)

    monkeypatch.setattr(requests, "post", asking)
    monkeypatch.setattr(wandb, "init", starting)
    return found


def in_metrics(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(int(row["step"]), float(row[name])) for row in metrics_of(folder) if row.get(name)]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = (record for record in caplog.records if record.name.startswith("istar"))
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


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


WANDB = (*FOUR_STEPS, "logger=wandb")


def test_wandb_that_cannot_be_reached(
    small: Build, wandb_at: Any, closed: str, caplog: Any, patience: Patience
) -> None:
    wandb_at(closed)
    config = small(*WANDB)
    run(config)
    assert len(patience.probes) == 1
    assert [mode for mode, *_ in patience.starts] == ["offline"]
    assert_logged_offline(only_folder(config), caplog)


def test_wandb_that_never_answers(
    small: Build, wandb_at: Any, silent: str, caplog: Any, monkeypatch: Any, patience: Patience
) -> None:
    wandb_at(silent)
    monkeypatch.setattr(loggers, "PROBE_SECONDS", 0.5)
    config = small(*WANDB)
    run(config)
    assert patience.probes == [0.5]
    assert [mode for mode, *_ in patience.starts] == ["offline"]
    assert_logged_offline(only_folder(config), caplog)


@pytest.mark.parametrize(
    ("status", "early"),
    [(500, ()), (403, ()), (500, (200,)), (403, (200,))],
    ids=["500", "403", "500 after the probe", "403 after the probe"],
)
def test_wandb_that_fails(
    small: Build,
    wandb_at: Any,
    serve: Any,
    caplog: Any,
    monkeypatch: Any,
    patience: Patience,
    status: int,
    early: tuple[int, ...],
) -> None:
    server = serve(status, early)
    wandb_at(server.url)
    monkeypatch.setattr(loggers, "_INIT_SECONDS", 4.0)
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


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Any]]:
    """Call it to forbid connections to other processes than one's own; gives the list of attempts."""
    attempts: list[Any] = []
    original = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        if self.family == getattr(socket, "AF_UNIX", None):
            return original(self, address)
        attempts.append(address)
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    def create_connection(address: Any, *arguments: Any, **named: Any) -> None:
        attempts.append(address)
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    def forbid() -> list[Any]:
        monkeypatch.setattr(socket.socket, "connect", connect)
        monkeypatch.setattr(socket.socket, "connect_ex", connect)
        monkeypatch.setattr(socket, "create_connection", create_connection)
        return attempts

    return forbid


def test_attempts_to_connect_are_seen(no_network: Any, closed: str) -> None:
    import requests

    attempts = no_network()
    with pytest.raises(requests.ConnectionError):
        requests.get(closed, timeout=SECONDS)
    with pytest.raises(OSError, match="unreachable"):
        socket.create_connection(("127.0.0.1", 9))
    assert len(attempts) == 2


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_wandb_offline_touches_no_network(small: Build, wandb_at: Any, serve: Any, no_network: Any, mode: str) -> None:
    server = serve(200)
    wandb_at(server.url)
    attempts = no_network()
    config = small(*WANDB, f"logger.mode={mode}")
    run(config)
    assert attempts == server.requests == []
    assert len(offline_records(only_folder(config))) == (1 if mode == "offline" else 0)


def test_wandb_offline_reports_nothing_at_the_end_of_the_process(
    repository: Path, wandb_at: Any, serve: Any, tmp_path: Path
) -> None:
    server = serve(500)
    wandb_at(server.url)
    command = [sys.executable, "train.py", "task=demo", "logger=wandb", "logger.mode=offline", *FOUR_STEPS,
               "task.limit_validation=8", "trainer.max_epochs=1", f"run.root={tmp_path / 'runs'}",
               f"hydra.run.dir={tmp_path / 'hydra'}", "trainer.progress_bar=false",
               "trainer.accelerator=cpu"]  # fmt: skip
    done = subprocess.run(
        command,
        cwd=repository,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert server.requests == []
    assert "deprecated" not in done.stderr + done.stdout
    assert "opentelemetry" not in done.stderr + done.stdout


def test_wandb_knows_one_run_by_one_id(
    small: Build, wandb_at: Any, closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    wandb_at(closed)
    config = small(*WANDB, "logger.mode=offline")
    mend = break_at(monkeypatch, 3, RuntimeError("out of luck"))
    with pytest.raises(RuntimeError, match="luck"):
        run(config)
    assert wandb.run is None
    folder = only_folder(config)
    time.sleep(1.1)  # W&B names its folders by the second
    mend()
    run(config)
    assert wandb.run is None
    first, second = offline_records(folder)
    known = (folder / "wandb" / "run-id").read_text()
    for records, exit_code, steps in ((first, 1, [0, 1]), (second, 0, [2, 3])):
        assert {record.run.run_id for record in records if record.HasField("run")} == {known}
        assert [record.exit.exit_code for record in records if record.HasField("exit")] == [exit_code]
        assert [step for step, _ in logged_by(records, "train/loss")] == steps
    both = logged_by(first, "train/loss") + logged_by(second, "train/loss")
    assert both == in_metrics(folder, "train/loss")
    run(small(*WANDB, "logger.mode=offline", "run.overwrite=true"))
    assert (folder / "wandb" / "run-id").read_text() != known
    [again] = offline_records(folder)
    assert {record.run.run_id for record in again if record.HasField("run")} == {
        (folder / "wandb" / "run-id").read_text()
    }


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


def test_wandb_that_fails_behind_the_start(
    small: Build, wandb_at: Any, serve: Any, caplog: Any, monkeypatch: Any, patience: Patience
) -> None:
    """W&B's own retries go on beside the training and are cut off behind it; its record is whole and can be sent."""
    import wandb

    monkeypatch.setattr(loggers, "_FINISH_SECONDS", 2.0)
    server = serve(500, (), STARTED)
    wandb_at(server.url)
    config = small(*WANDB)
    run(config)
    assert patience.starts == [("online", SECONDS, 2.0)]
    assert wandb.run is None
    [warning] = warnings_in(caplog)
    assert "does not answer; the tables of this run are missing" in warning
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


# ---- the hub


@pytest.mark.parametrize("since", ["the start", "assembly"])
def test_a_run_on_local_folders_needs_no_network(
    small: Build, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: Any, since: str
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    data = tmp_path / "data"
    data.mkdir()
    for split, rows in (("train", 16), ("validation", 8)):
        lines = [
            json.dumps({"sentence1": f"the {split} lamp {n} is old", "sentence2": "a lamp is old", "label": n % 2})
            for n in range(rows)
        ]
        (data / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    attempts: list[Any] = []
    assemble = run_module._assemble

    def then_without(*arguments: Any) -> Any:
        job = assemble(*arguments)
        attempts.append(no_network())
        return job

    if since == "the start":
        attempts.append(no_network())
    else:
        monkeypatch.setattr(run_module, "_assemble", then_without)
    config = small("task=rte", f"task.data_dir={data}", "model=auto", f"model.name={undisturbed / 'model'}")
    assert run(config).status == "finished"
    assert attempts == [[]]


# ---- the disk is full


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, name: str, after: int = 0) -> Iterator[None]:
    """Drafts of a file, named by a pattern, cannot be brought to the disk once `after` of them have been."""
    original, count = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal count
        if re.fullmatch(rf"\.{name}\.[0-9a-f]{{32}}", Path(f"/proc/self/fd/{descriptor}").readlink().name):
            count += 1
            if count > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", fsync)
        yield


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """The operating system refuses to write more into a file: not a pretence."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def limited(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, size: int, after: int) -> Callable[[], None]:
    """Let calls of a function, but for the first ones, write `size` bytes into a file at most."""
    original, count = getattr(owner, name), 0

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count <= after:
            return original(*arguments, **named)
        with files_up_to(size):
            return original(*arguments, **named)

    monkeypatch.setattr(owner, name, call)
    return lambda: monkeypatch.setattr(owner, name, original)


@pytest.mark.parametrize(
    ("size", "after", "kept"),
    [(0, 0, None), (100_000, 0, None), (100_000, 3, "step-3.ckpt"), (0, 4, "step-3.ckpt"), (1000, 5, "step-4.ckpt")],
)
def test_a_checkpoint_that_the_disk_does_not_take(
    small: Build, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, size: int, after: int, kept: str | None
) -> None:
    """The fourth is that of the best weights, after which comes the state behind the first epoch."""
    config = small(*EPOCHS)
    mend = limited(monkeypatch, AtomicCheckpointIO, "save_checkpoint", size, after)
    message = refused_in_one_line(config)
    mend()
    folder = only_folder(config)
    assert f"the checkpoint {folder / 'checkpoints'}" in message
    assert "cannot be written" in message
    assert "File too large" in message
    assert f"the last good state is {folder / 'checkpoints' / kept}" in message if kept else "no checkpoint" in message
    assert "same command" in message
    assert_whole(folder)
    assert results.read(folder).status == "failed"
    run(config)
    assert_same(folder, undisturbed)


@pytest.mark.parametrize(
    ("name", "after"),
    [(r"step-\d+\.ckpt", 2), (r"best-epoch-\d+\.ckpt", 1), (r"metrics\.csv", 0), (r"metrics\.csv", 5),
     (r"predictions\.jsonl", 0), (r"result\.json", 0), (r"config\.yaml", 0)],
)  # fmt: skip
def test_a_file_that_the_disk_does_not_take(
    small: Build, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, name: str, after: int
) -> None:
    config = small(*EPOCHS)
    with full_disk(monkeypatch, name, after):
        message = refused_in_one_line(config)
    folder = only_folder(config)
    assert re.search(name, message)
    assert "No space left on device" in message
    assert_whole(folder)
    run(config)
    assert_same(folder, undisturbed)


@pytest.mark.parametrize("size", [0, 10_000, 100_000])
def test_a_model_that_the_disk_does_not_take(
    small: Build, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    config = small(*EPOCHS)
    mend = limited(monkeypatch, models, "save", size, 0)
    message = refused_in_one_line(config)
    mend()
    folder = only_folder(config)
    assert "File too large" in message
    assert "the model cannot be written" in message
    assert "the last good state is" in message
    assert not (folder / "model").exists()
    assert_whole(folder)
    run(config)
    assert_same(folder, undisturbed)


# ---- folders that cannot be written


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_root_that_cannot_be_written(small: Build, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir(mode=0o500)
    message = refused_in_one_line(small())
    assert "run.root" in message
    assert "cannot be written" in message


@pytest.mark.parametrize(("owner", "name"), [(Path, "mkdir"), (os, "open")], ids=["folder", "lock"])
def test_a_root_that_forbids_writing(small: Build, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """As the test before, also for root."""
    config = small()
    original = getattr(owner, name)

    def forbidden(path: Any, *arguments: Any, **named: Any) -> Any:
        if str(path).startswith(config.run.root):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return original(path, *arguments, **named)

    monkeypatch.setattr(owner, name, forbidden)
    message = refused_in_one_line(config)
    assert f"run.root={config.run.root} cannot be written" in message
    assert "Permission denied" in message


def test_a_root_that_is_a_file(small: Build, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("mine")
    message = refused_in_one_line(small())
    assert "run.root" in message
    assert (tmp_path / "runs").read_text() == "mine"


def forbid_drafts(monkeypatch: pytest.MonkeyPatch, name: str, after: int) -> Callable[[], None]:
    """Drafts of a file, named by a pattern, cannot be opened once `after` of them have been."""
    original, count = Path.open, 0

    def forbidden(self: Path, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        nonlocal count
        if "x" in mode and re.fullmatch(rf"\.{name}\.[0-9a-f]{{32}}", self.name):
            count += 1
            if count > after:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return original(self, mode, *arguments, **named)

    monkeypatch.setattr(Path, "open", forbidden)
    return lambda: monkeypatch.setattr(Path, "open", original)


@pytest.mark.parametrize(
    ("name", "after"),
    [("config.yaml", 0), (r"step-\d+.ckpt", 0), (r"step-\d+.ckpt", 3), ("metrics.csv", 2), ("predictions.jsonl", 0),
     ("geometry.json", 0), ("result.json", 0)],
)  # fmt: skip
def test_a_folder_that_cannot_be_written_any_more(
    small: Build, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, name: str, after: int
) -> None:
    config = small(*EPOCHS)
    mend = forbid_drafts(monkeypatch, name, after)
    message = refused_in_one_line(config)
    mend()
    folder = only_folder(config)
    assert "Permission denied" in message
    assert re.search(name, message)
    assert not re.search("[0-9a-f]{32}", message)
    assert_whole(folder)
    run(config)
    assert_same(folder, undisturbed)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_loses_its_permissions(small: Build, undisturbed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(*EPOCHS)
    original, locked = AtomicCheckpointIO.save_checkpoint, []

    def save(self: Any, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        original(self, checkpoint, path)
        Path(path).parent.chmod(0o500)
        locked.append(Path(path).parent)

    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", save)
    message = refused_in_one_line(config)
    locked[0].chmod(0o700)
    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", original)
    assert "Permission denied" in message
    run(config)
    assert_same(only_folder(config), undisturbed)


# ---- checkpoints


@pytest.fixture(scope="module")
def good(undisturbed: Path) -> Path:
    [path] = (undisturbed / "checkpoints").glob("step-*.ckpt")
    return path


@pytest.fixture
def checkpoints(good: Path, tmp_path: Path) -> Path:
    """A folder with a good checkpoint, step-1, and room for a newer one."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "step-1.ckpt").hardlink_to(good)
    for best in good.parent.glob("best-epoch-*.ckpt"):
        (folder / best.name).hardlink_to(best)
    return folder


def name_of_run(good: Path) -> str:
    return good.parents[1].name


def assert_refused(checkpoints: Path, run_name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The newer one is refused in a line and kept aside, and the one before serves; without that, none does."""
    newer, older = checkpoints / "step-2.ckpt", checkpoints / "step-1.ckpt"
    damaged = newer.read_bytes()
    caplog.clear()
    assert resumable(checkpoints, run_name, 1) == older
    [warning] = warnings_in(caplog)
    assert str(newer) in warning
    assert "\n" not in warning
    assert not newer.exists()
    assert (checkpoints / "step-2.ckpt.refused").read_bytes() == damaged
    aside = older.rename(checkpoints / "aside")
    (checkpoints / "step-2.ckpt.refused").rename(newer)
    caplog.clear()
    assert resumable(checkpoints, run_name, 1) is None
    assert len(warnings_in(caplog)) == 1
    aside.rename(older)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(equal(*pair) for pair in zip(one, other, strict=True))
    return type(one) is type(other) and (one == other or (one != one and other != other))


@pytest.mark.parametrize("part", range(20))
def test_a_truncated_checkpoint(checkpoints: Path, good: Path, caplog: Any, part: int) -> None:
    data = good.read_bytes()
    (checkpoints / "step-2.ckpt").write_bytes(data[: part * len(data) // 20])
    assert_refused(checkpoints, name_of_run(good), caplog)


def test_a_checkpoint_without_its_last_byte(checkpoints: Path, good: Path, caplog: Any) -> None:
    (checkpoints / "step-2.ckpt").write_bytes(good.read_bytes()[:-1])
    assert_refused(checkpoints, name_of_run(good), caplog)


def test_flipped_bits(checkpoints: Path, good: Path, caplog: Any) -> None:
    """Thirty anywhere and thirty where the archive keeps its own books; each is refused, or harmless."""
    data, original = good.read_bytes(), load(good)
    generator = random.Random(7)
    newer = checkpoints / "step-2.ckpt"
    books = data.index(b"PK\x01\x02")
    places = [generator.randrange(len(data)) for _ in range(30)]
    places += [generator.randrange(books, len(data)) for _ in range(30)]
    refused = 0
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << generator.randrange(8)
        newer.write_bytes(damaged)
        caplog.clear()
        found = resumable(checkpoints, name_of_run(good), 1)
        if found == newer:
            assert equal(load(newer), original), place
            assert warnings_in(caplog) == []
        else:
            refused += 1
            assert found == checkpoints / "step-1.ckpt"
            assert (checkpoints / "step-2.ckpt.refused").exists()
            [warning] = warnings_in(caplog)
            assert str(newer) in warning
            assert "\n" not in warning
    assert refused > 20


def edited(good: Path, edit: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    content = copy.deepcopy(load(good))
    edit(content)
    return content


def test_equal_sees_a_difference(good: Path) -> None:
    original = load(good)
    assert equal(original, load(good))

    def nudge(content: dict[str, Any]) -> None:
        next(iter(content["state_dict"].values())).view(torch.int32).view(-1)[0] ^= 1

    assert not equal(original, edited(good, nudge))


class RunsCode:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def state(content: dict[str, Any]) -> dict[str, Any]:
    return content["callbacks"]["Checkpoints"]


FOREIGN = {
    "empty dict": lambda good: {},
    "a dict": lambda good: {"weights": torch.zeros(3)},
    "weights only": lambda good: {"state_dict": load(good)["state_dict"], "callbacks": {}},
    "callbacks without ours": lambda good: edited(good, lambda content: content["callbacks"].pop("Checkpoints")),
    "another run": lambda good: edited(good, lambda content: state(content).update(run="demo-tiny-none-0")),
    "another format": lambda good: edited(good, lambda content: state(content).update(format=FORMAT + 1)),
    "no format": lambda good: edited(good, lambda content: state(content).pop("format")),
}
NO_DICTS = {
    "a list": lambda good: [1, 2],
    "a tensor": lambda good: torch.zeros(3),
    "no callbacks": lambda good: {"callbacks": None},
    "no history": lambda good: edited(good, lambda content: content["callbacks"].pop("History")),
    "no run": lambda good: edited(good, lambda content: state(content).pop("run")),
    "no random numbers": lambda good: edited(good, lambda content: state(content).pop("random")),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_checkpoint(checkpoints: Path, good: Path, caplog: Any, kind: str) -> None:
    torch.save(FOREIGN[kind](good), checkpoints / "step-2.ckpt")
    assert_refused(checkpoints, name_of_run(good), caplog)


@pytest.mark.parametrize("kind", NO_DICTS)
def test_a_checkpoint_of_another_shape(checkpoints: Path, good: Path, caplog: Any, kind: str) -> None:
    torch.save(NO_DICTS[kind](good), checkpoints / "step-2.ckpt")
    assert_refused(checkpoints, name_of_run(good), caplog)


@pytest.mark.parametrize("kind", ["empty", "text", "another archive", "pickled by hand"])
def test_what_is_no_checkpoint_at_all(checkpoints: Path, good: Path, caplog: Any, tmp_path: Path, kind: str) -> None:
    import pickle
    import zipfile

    newer, marker = checkpoints / "step-2.ckpt", tmp_path / "marker"
    if kind == "another archive":
        with zipfile.ZipFile(newer, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(RunsCode(marker)))
            archive.writestr("archive/version", "3")
    else:
        newer.write_bytes({"empty": b"", "text": b"not yours"}.get(kind, pickle.dumps(RunsCode(marker))))
    assert_refused(checkpoints, name_of_run(good), caplog)
    assert not marker.exists()


@pytest.mark.parametrize("is_old", [False, True], ids=["archive", "old format"])
def test_a_checkpoint_that_would_run_code(
    checkpoints: Path, good: Path, caplog: Any, tmp_path: Path, is_old: bool
) -> None:
    marker = tmp_path / "marker"
    content = edited(good, lambda content: content.update(extra=RunsCode(marker)))
    torch.save(content, checkpoints / "step-2.ckpt", _use_new_zipfile_serialization=not is_old)
    assert_refused(checkpoints, name_of_run(good), caplog)
    assert not marker.exists()
    torch.load(checkpoints / "step-2.ckpt.refused", weights_only=False)
    assert marker.exists()


def test_a_checkpoint_of_two_processes(checkpoints: Path, good: Path) -> None:
    content = edited(good, lambda content: state(content).update(random=state(content)["random"] * 2))
    torch.save(content, checkpoints / "step-2.ckpt")
    with pytest.raises(
        UserError, match=r"written by 2 processes and cannot go on with 1; .*run\.overwrite=true"
    ) as told:
        resumable(checkpoints, name_of_run(good), 1)
    assert "\n" not in str(told.value)
    assert resumable(checkpoints, name_of_run(good), 2) == checkpoints / "step-2.ckpt"


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("count", [4, 7])
@pytest.mark.parametrize("which", ["the newest", "all"])
def test_a_run_with_damaged_checkpoints_ends_as_the_undisturbed_one(
    small: Build, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, which: str, count: int
) -> None:
    config = small(*EPOCHS)
    mend = break_at(monkeypatch, count, Broken())
    with pytest.raises(Broken):
        run(config)
    mend()
    folder = only_folder(config)
    states = sorted((folder / "checkpoints").glob("step-*.ckpt"))
    assert [path.name for path in states] == [f"step-{count - 2}.ckpt", f"step-{count - 1}.ckpt"]
    damaged = states if which == "all" else states[-1:]
    for path in damaged:
        damage(path)
    caplog.clear()
    run(config)
    warnings = warnings_in(caplog)
    for path, warning in zip(reversed(damaged), warnings, strict=False):
        assert str(path) in warning
        assert "checksum" in warning
    assert warnings[len(damaged) :] == (
        [] if which == "all" else [f"{folder} was interrupted; it goes on from {states[0].name}"]
    )
    assert_same(folder, undisturbed)


@pytest.mark.parametrize("is_gone", [False, True], ids=["damaged", "gone"])
def test_a_run_with_damaged_best_weights_ends(small: Build, monkeypatch: pytest.MonkeyPatch, is_gone: bool) -> None:
    """A state is of use only together with the weights of the best epoch before it."""
    config = small(*EPOCHS, "optim.lr=1e-9")  # the first epoch is the best
    mend = break_at(monkeypatch, 7, Broken())
    with pytest.raises(Broken):
        run(config)
    mend()
    best = only_folder(config) / "checkpoints" / "best-epoch-1.ckpt"
    if is_gone:
        best.unlink()
    else:
        damage(best)
    assert run(config).headline["epoch"] == 1


def test_a_run_refuses_a_checkpoint_of_two_processes(small: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(*EPOCHS)
    mend = break_at(monkeypatch, 3, Broken())
    with pytest.raises(Broken):
        run(config)
    mend()
    newest = only_folder(config) / "checkpoints" / "step-2.ckpt"
    torch.save(edited(newest, lambda content: state(content).update(random=state(content)["random"] * 2)), newest)
    assert "2 processes" in refused_in_one_line(config)


# ---- another process


HOLD = """
import sys
from pathlib import Path
from istar.files import sole_writer
with sole_writer(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path, repository: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that writes into `<tmp_path>/runs/one` until its input ends."""
    environment = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", HOLD, str(tmp_path / "runs" / "one")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_one_writer_at_a_time(tmp_path: Path, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / "one"
    monkeypatch.setattr(files, "_LOCK_SECONDS", 0.2)
    with pytest.raises(UserError, match="is being written by another process") as told, sole_writer(folder):
        pass
    assert "\n" not in str(told.value)
    other.kill()
    assert other.wait() == -signal.SIGKILL
    # It has let go of the folder: there is nothing to wait for.
    monkeypatch.setattr(files, "_LOCK_SECONDS", 0.0)
    with sole_writer(folder):
        pass


def test_a_writer_that_is_just_ending_is_waited_for(
    tmp_path: Path, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep, waits = time.sleep, []

    def let_go(seconds: float) -> None:
        other.stdin.close()
        waits.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(files, "_LOCK_SECONDS", SECONDS)
    monkeypatch.setattr(time, "sleep", let_go)
    with sole_writer(tmp_path / "runs" / "one"):
        assert waits
    assert other.wait() == 0
