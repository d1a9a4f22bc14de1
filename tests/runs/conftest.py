"""Fixtures of whole runs, of W&B servers and of a forbidden network."""

import errno
import http.server
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from istar.config import Config
from istar.results import RunRecord
from istar.runs.run import run
from istar.tasks.hub import request_status
from istar.training import loggers
from tests.runs.artifacts import place
from tests.runs.faults import (
    EPOCHS,
    Build,
    only_folder,
)
from tests.waiting import SECONDS


@pytest.fixture(scope="session")
def undisturbed(composed: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of EPOCHS that nothing disturbed."""
    shared = ("task.limit_validation=16", "trainer.accumulate_grad_batches=1", "trainer.log_every_n_steps=1",
              "trainer.progress_bar=false", "trainer.accelerator=cpu", "run.isotropy_zeta=null")  # fmt: skip
    config = composed(*shared, *EPOCHS, f"run.root={tmp_path_factory.mktemp('undisturbed')}")
    run(config)
    return only_folder(config)


@pytest.fixture(scope="session")
def done(composed: Build, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Config, RunRecord, Path]]:
    """Runs that several tests look at and none changes; each is trained once."""
    known: dict[tuple[str, ...], tuple[Config, RunRecord, Path]] = {}

    def get(*overrides: str) -> tuple[Config, RunRecord, Path]:
        if overrides not in known:
            config = composed(
                "task.limit_train=48",
                "task.limit_validation=24",
                "data.batch_size=8",
                "data.eval_batch_size=5",
                "trainer.max_epochs=2",
                "trainer.log_every_n_steps=1",
                "trainer.progress_bar=false",
                "trainer.accelerator=cpu",
                f"run.root={tmp_path_factory.mktemp('done')}",
                *overrides,
            )
            record = run(config)
            known[overrides] = (config, record, place(config, record))
        return known[overrides]

    return get


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
    monkeypatch.setattr(loggers, "PROBE_TIMEOUT_SECONDS", SECONDS)
    monkeypatch.setattr(loggers, "request_status", partial(request_status, timeout=SECONDS))
    monkeypatch.setattr(loggers, "_INIT_TIMEOUT_SECONDS", SECONDS)
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
