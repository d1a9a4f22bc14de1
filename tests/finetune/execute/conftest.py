"""Fixtures: finished runs, stand-ins for W&B's server, and a network that cannot be reached."""

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

from istar.finetune.config import Config
from istar.finetune.execute.run import run
from istar.finetune.training import wandb_logger
from istar.models.hub import request_status
from istar.runs.record import RunRecord
from tests.finetune.execute.artifacts import place
from tests.finetune.execute.faults import EPOCHS, Build, only_folder
from tests.waiting import SECONDS


@pytest.fixture(scope="session")
def undisturbed_run(composed: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with the overrides EPOCHS that was never interrupted."""
    overrides = ("task.limit_validation=16", "trainer.accumulate_grad_batches=1", "trainer.log_every_n_steps=1",
              "trainer.progress_bar=false", "trainer.accelerator=cpu", "run.isotropy_zeta=null")  # fmt: skip
    config = composed(*overrides, *EPOCHS, f"run.root={tmp_path_factory.mktemp('undisturbed')}")
    run(config)
    return only_folder(config)


@pytest.fixture(scope="session")
def cached_run(
    composed: Build, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Config, RunRecord, Path]]:
    """Return a function that trains each run once and returns its config, record and folder; tests only read them."""
    runs: dict[tuple[str, ...], tuple[Config, RunRecord, Path]] = {}

    def get_run(*overrides: str) -> tuple[Config, RunRecord, Path]:
        # The default task need not be composed again.
        overrides = tuple(override for override in overrides if override != "task=demo")
        if overrides not in runs:
            config = composed(
                "task.limit_train=48", "task.limit_validation=24", "data.batch_size=8", "data.eval_batch_size=5",
                "trainer.max_epochs=2", "trainer.log_every_n_steps=1", "trainer.progress_bar=false",
                "trainer.accelerator=cpu", "run.isotropy_zeta=null", f"run.root={tmp_path_factory.mktemp('done')}",
                *overrides,
            )  # fmt: skip
            record = run(config)
            runs[overrides] = (config, record, place(config, record))
        return runs[overrides]

    return get_run


class Server:
    """An HTTP server that answers each request with a status, and records the requests.

    Args:
        status: the status of all answers but those below.
        first_statuses: the statuses of the answers to the first requests, in their order.
        data_by_content: by a part of a request's body, the data of the answer, whose status is 200.
    """

    def __init__(
        self, status: int, first_statuses: tuple[int, ...] = (), data_by_content: dict[bytes, Any] | None = None
    ) -> None:
        self.requests: list[str] = []
        recorder = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers.get("content-length") or 0))
                index = len(recorder.requests)
                recorder.requests.append(f"{self.command} {self.path}")
                data = next((data for name, data in (data_by_content or {}).items() if name in content), None)
                code = 200 if data is not None else first_statuses[index] if index < len(first_statuses) else status
                body = b"" if self.command == "HEAD" else json.dumps({"data": data}).encode()
                self.send_response(code)
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
def start_server() -> Iterator[Callable[..., Server]]:
    """Yield a function that starts a `Server` with its arguments; the servers are closed after the test."""
    started: list[Server] = []

    def start(*arguments: Any) -> Server:
        started.append(Server(*arguments))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def closed_url() -> str:
    """Return the URL of a port on which no process listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def silent_url() -> Iterator[str]:
    """Yield the URL of a server that accepts connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def wandb_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Yield a function that sets the URL of W&B's server, with an API key and without the real user's settings."""
    import wandb

    wandb.teardown()
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    # The run sets these variables. Set and deleted here, they are removed after the test.
    for name in ("WANDB_ERROR_REPORTING", "WANDB_X_DISABLE_VIEWER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    environment = {
        "WANDB_API_KEY": "0123456789" * 4, "WANDB_SILENT": "true", "WANDB_CONFIG_DIR": str(tmp_path / "wandb_config"),
        "WANDB_CACHE_DIR": str(tmp_path / "wandb_cache"), "NETRC": str(tmp_path / "netrc"),
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    # A server that answers is never given up on a slow machine.
    monkeypatch.setattr(wandb_logger, "PROBE_TIMEOUT_SECONDS", SECONDS)
    monkeypatch.setattr(wandb_logger, "request_status", partial(request_status, timeout=SECONDS))
    monkeypatch.setattr(wandb_logger, "_INIT_TIMEOUT_SECONDS", SECONDS)
    yield lambda url: monkeypatch.setenv("WANDB_BASE_URL", url)
    wandb.teardown()


@dataclass
class WandbWaits:
    """The calls of a run that may have to wait for W&B's server. All timeouts are in seconds.

    Attributes:
        probes: the timeout of each request that the run itself sent.
        starts: the mode of each call of `wandb.init`, and the timeouts of the call and of the end of the run.
    """

    probes: list[float] = field(default_factory=list)
    starts: list[tuple[str, float, float]] = field(default_factory=list)


@pytest.fixture
def wandb_waits(monkeypatch: pytest.MonkeyPatch) -> WandbWaits:
    """Record the timeouts of requests and of `wandb.init`. Offline, `wandb.init` gets all the time that it needs."""
    import wandb

    waits, original_open, original_init = WandbWaits(), wandb_logger.urlopen, wandb.init

    def record_open(request: Any, timeout: float) -> Any:
        waits.probes.append(timeout)
        return original_open(request, timeout=timeout)

    def record_init(mode: str, settings: Any, **keywords: Any) -> Any:
        waits.starts.append((mode, settings.init_timeout, settings.finish_timeout))
        if mode == "offline":
            settings.init_timeout = SECONDS
        return original_init(mode=mode, settings=settings, **keywords)

    monkeypatch.setattr(wandb_logger, "urlopen", record_open)
    monkeypatch.setattr(wandb, "init", record_init)
    return waits


@pytest.fixture
def forbid_network(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Any]]:
    """Return a function that forbids all connections but Unix sockets, and returns the growing list of attempts."""
    attempts: list[Any] = []
    original_connect = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        if self.family == getattr(socket, "AF_UNIX", None):
            return original_connect(self, address)
        attempts.append(address)
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    def create_connection(address: Any, *arguments: Any, **keywords: Any) -> None:
        attempts.append(address)
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    def forbid() -> list[Any]:
        monkeypatch.setattr(socket.socket, "connect", connect)
        monkeypatch.setattr(socket.socket, "connect_ex", connect)
        monkeypatch.setattr(socket, "create_connection", create_connection)
        return attempts

    return forbid
