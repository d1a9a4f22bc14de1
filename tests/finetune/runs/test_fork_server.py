"""Processes forked from a server behave as if each were the first one and had a new interpreter.

No test calls the GPU's driver, since after its first call no fork could use the GPU; a server that calls it fails here.
A server takes seconds to import the libraries, so most tests share one; the others have servers that are themselves
forks. The processes execute a line of Python instead of a run, in a server that is otherwise the real one. Sweeps with
forked runs, and that their results are those of train.py, are tested in sweeps/test_sweep.py.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from istar.errors import UserError
from istar.finetune.runs import fork_server, launch
from istar.finetune.runs.fork_server import ForkedProcess, ServerPool
from tests.forks import ForkedScript
from tests.waiting import until

pytestmark = pytest.mark.skipif(not fork_server.is_supported(), reason="runs are forked on Linux alone")

REPOSITORY = Path(__file__).resolve().parents[3]
SERVER_SCRIPT = """
import sys
import torch
from istar.finetune.runs import fork_server, launch

def touched(*_): raise SystemError("the driver was called")
for name in ("is_available", "device_count", "init", "_lazy_init"): setattr(torch.cuda, name, touched)
for name in [name for name in vars(torch._C) if name.startswith("_cuda_")]: setattr(torch._C, name, touched)

def main(arguments):
    parent, code = arguments
    assert int(parent) == __import__("os").getppid()
    exec(code, {"parent": parent})
    sys.stdout.flush()
    __import__("os")._exit(0)

launch.main = main
fork_server.main(sys.argv[1:])
"""
PRINT_STATE = """
import json, os, random, signal, sys, threading, warnings
import numpy, torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
print(json.dumps({
    "environment": dict(os.environ), "cwd": os.getcwd(), "leads": os.getsid(0) == os.getpid(), "argv": sys.argv,
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "sigterm": str(signal.getsignal(signal.SIGTERM)),
    "threads": torch.get_num_threads(), "alive": threading.active_count(), "seed": torch.initial_seed(),
    "tasks": len(os.listdir("/proc/self/task")), "files": sorted(os.listdir("/proc/self/fd")),
    "rank": rank_zero_only.rank, "modules": len(sys.modules), "filters": len(warnings.filters),
    "dtype": str(torch.get_default_dtype()), "marked": hasattr(torch, "marked"),
    "cuda": torch.cuda.is_initialized(),
}))
"""
DISTURB = """
import os, random, signal, sys, threading, warnings
import numpy, torch
os.environ["LEFT"] = "1"; os.chdir("/"); torch.manual_seed(7); torch.set_num_threads(3); torch.marked = True
torch.set_default_dtype(torch.float64); sys.modules["left"] = sys; sys.argv.append("left")
warnings.simplefilter("error")
signal.signal(signal.SIGTERM, signal.SIG_IGN); threading.Thread(target=threading.Event().wait, daemon=True).start()
(torch.ones(500, 500) @ torch.ones(500, 500)).sum(); os.open("/dev/null", os.O_RDONLY)
"""

THREADS = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}
"""OpenBLAS starts its threads in a fork with the first product, not, as in a new process, when it is loaded."""
Start = Callable[..., ForkedProcess]


def make_environment(**variables: str) -> dict[str, str]:
    """Return the environment of a process: that of this process, few threads, and these variables."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), **THREADS, **variables}


def fail(warning: str) -> None:
    """Fail the test because of a warning."""
    raise AssertionError(warning)


def wait_for_exit_code(process: ForkedProcess) -> int:
    """Wait for the end of a process and return its exit code."""
    until(lambda: process.poll() is not None)
    assert process.returncode is not None
    return process.returncode


@pytest.fixture(scope="module", autouse=True)
def server_script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make all pools start SERVER_SCRIPT instead of the real server; yields its path."""
    script = tmp_path_factory.mktemp("server") / "server.py"
    script.write_text(SERVER_SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "COMMAND", (sys.executable, str(script)))
        yield script


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    """Yield a pool of servers that must not warn or print anything."""
    folder = tmp_path_factory.mktemp("logs")
    with ServerPool(folder / "server.log", fail) as servers:
        yield servers
    assert (folder / "server.log").read_text() == ""


@pytest.fixture
def run_code(servers: ServerPool, tmp_path: Path) -> Callable[..., dict[str, object]]:
    """Return a function that executes code in a forked process and returns the JSON value that the code prints."""

    def run(code: str = PRINT_STATE, environment: Mapping[str, str] = make_environment()) -> dict[str, object]:
        log = tmp_path / f"{len(list(tmp_path.iterdir()))}.log"
        assert wait_for_exit_code(servers.spawn([code], environment, log)) == 0, log.read_text()
        return json.loads(log.read_text())

    return run


def test_nothing_is_left_of_the_one_before(run_code: Callable[..., dict[str, object]], servers: ServerPool) -> None:
    state_before = run_code()
    assert wait_for_exit_code(servers.spawn([DISTURB], make_environment(), None)) == 0
    assert run_code() == state_before
    assert state_before["tasks"] == state_before["alive"] == 1
    assert state_before["files"] == ["0", "1", "2", "3"]  # the last: the folder that is listed
    assert (state_before["leads"], state_before["cuda"], state_before["rank"]) == (True, False, 0)


def test_random_numbers_without_a_seed_differ(run_code: Callable[..., dict[str, object]]) -> None:
    draw = "import json, random, numpy; print(json.dumps([random.random(), numpy.random.random()]))"
    first, second = run_code(draw), run_code(draw)
    assert not set(first) & set(second)


def test_each_has_its_own_environment(run_code: Callable[..., dict[str, object]]) -> None:
    environment = make_environment(CUDA_VISIBLE_DEVICES="3", LOCAL_RANK="1", RANK="1")
    state = run_code(environment=environment)
    assert environment.items() <= state["environment"].items()  # type: ignore[attr-defined]
    assert state["rank"] == 1
    without_ranks = {name: value for name, value in environment.items() if name not in ("LOCAL_RANK", "RANK", "HOME")}
    state = run_code(environment=without_ranks)
    assert not {"LOCAL_RANK", "RANK", "HOME", "LEFT"} & state["environment"].keys()  # type: ignore[attr-defined]
    assert state["rank"] == 0


@pytest.mark.slow
def test_threads_are_what_the_environment_says(run_code: Callable[..., dict[str, object]]) -> None:
    """The number of threads that torch reports, and of those that a large product uses, are as in a new interpreter."""
    code = (
        "import json, os, torch; a = torch.ones(600, 600); (a @ a).exp().sum()\n"
        "print(json.dumps([torch.get_num_threads(), len(os.listdir('/proc/self/task'))]))"
    )
    counts_in_fork = run_code(code)
    completed = subprocess.run(
        [sys.executable, "-c", code], env=make_environment(), capture_output=True, text=True, check=True
    )
    assert counts_in_fork == json.loads(completed.stdout)
    assert counts_in_fork[0] == min(2, os.cpu_count() or 1)  # type: ignore[index]


def test_signals_wait_until_the_process_is_ready(
    run_code: Callable[..., dict[str, object]], servers: ServerPool
) -> None:
    assert run_code()["blocked"] == sorted(launch.FORWARDED_SIGNALS)
    process = servers.spawn(
        ["import os, signal; signal.sigwait([signal.SIGUSR1]); os._exit(7)"], make_environment(), None
    )
    # The signal is sent before there is a process.
    process.send_signal(signal.SIGUSR1)
    assert wait_for_exit_code(process) == 7
    process.send_signal(signal.SIGKILL)
    assert wait_for_exit_code(process) == 7


def test_one_that_is_killed_does_not_disturb_the_others(servers: ServerPool) -> None:
    undisturbed = servers.spawn(["import signal; signal.sigwait([signal.SIGUSR1])"], make_environment(), None)
    for number in (signal.SIGKILL, signal.SIGSEGV):
        process = servers.spawn([f"import os; os.kill(os.getpid(), {number:d})"], make_environment(), None)
        assert wait_for_exit_code(process) == -number
    sleeping = servers.spawn(["import time; time.sleep(3600)"], make_environment(), None)
    sleeping.kill()
    assert sleeping.wait() == -signal.SIGKILL
    assert undisturbed.poll() is None
    undisturbed.send_signal(signal.SIGUSR1)
    assert wait_for_exit_code(undisturbed) == 0


def test_an_error_is_in_the_log(servers: ServerPool, tmp_path: Path) -> None:
    assert wait_for_exit_code(servers.spawn(["1 / 0"], make_environment(), tmp_path / "log")) == launch.UNEXPECTED_ERROR
    assert "ZeroDivisionError" in (tmp_path / "log").read_text()


SLEEP_WITH_PARENT = """
import os, signal, time
from istar.finetune.runs import launch
signal.pthread_sigmask(signal.SIG_UNBLOCK, launch.FORWARDED_SIGNALS)
launch._terminate_with_parent(int(parent))
print(os.getpid(), flush=True)
time.sleep(3600)
"""


def read_pid(log: Path) -> int:
    """Wait until a process has printed its PID to this file, and return it."""
    until(lambda: log.exists() and log.read_text().endswith("\n"))
    return int(log.read_text())


def is_gone(pid: int) -> bool:
    """Return whether a process has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"  # its parent has ended, so the init process of this machine reaps it


@pytest.fixture
def forked_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start servers as forks of a process that has already imported the libraries."""
    monkeypatch.setattr(fork_server, "subprocess", SimpleNamespace(Popen=ForkedScript))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_servers")
def test_a_server_that_is_killed_and_one_that_nobody_needs_any_more(tmp_path: Path) -> None:
    with ServerPool(tmp_path / "server.log", fail) as servers:
        for ending in ("killed", "left"):
            process = servers.spawn([SLEEP_WITH_PARENT], make_environment(), tmp_path / ending)
            pid = read_pid(tmp_path / ending)
            [server] = servers._server_by_variables.values()
            if ending == "killed":
                server._process.kill()
                with pytest.raises(UserError, match=r"that starts the runs was killed by SIGKILL .*; the same command"):
                    process.wait()
                until(lambda pid=pid: is_gone(pid))
                process.send_signal(signal.SIGTERM)
    # The second process had another server, which has ended with the block.
    assert server._process.returncode == 0
    until(lambda: is_gone(pid))


def make_pool(
    library: str, folder: Path, monkeypatch: pytest.MonkeyPatch, warn: Callable[[str], None] = fail
) -> ServerPool:
    """Return a pool whose servers import this library instead of those of a run."""
    (folder / "library.py").write_text(library)
    script = folder / "server.py"
    script.write_text(
        f"from istar.finetune.runs import fork_server; fork_server.PRELOADED_MODULES = ('library',)\n{SERVER_SCRIPT}"
    )
    monkeypatch.setattr(fork_server, "COMMAND", (sys.executable, str(script)))
    return ServerPool(folder / "server.log", warn)


@pytest.mark.usefixtures("forked_servers")
@pytest.mark.slow
def test_a_library_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_pool("import nowhere", tmp_path, monkeypatch) as servers:
        process = servers.spawn(["pass"], make_environment(), None)
        with pytest.raises(UserError, match=r"the process that starts the runs ended with exit code 1 .*server\.log"):
            process.wait()
    assert "ModuleNotFoundError: No module named 'nowhere'" in (tmp_path / "server.log").read_text()


@pytest.mark.usefixtures("forked_servers")
def test_fresh_processes_replace_forks_that_are_not_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    start_thread = "threading.Thread(target=time.sleep, args=(3600,), name='tracer', daemon=True)"

    def spawn_fresh(arguments: Sequence[str], environment: Mapping[str, str], log: Path | None) -> object:
        return subprocess.Popen([sys.executable, "-c", *arguments], env=environment, start_new_session=True)

    monkeypatch.setattr(launch, "spawn", spawn_fresh)
    wait_then_exit = "import signal; signal.sigwait([signal.SIGUSR1]); raise SystemExit({})"
    with make_pool(
        f"import threading, time; {start_thread}.start()", tmp_path, monkeypatch, warnings.append
    ) as servers:
        # Both are requested before the server has said that it cannot fork; the third one is requested afterwards.
        first, second = (servers.spawn([wait_then_exit.format(code)], make_environment(), None) for code in (3, 4))
        first.send_signal(signal.SIGUSR1)
        assert wait_for_exit_code(first) == 3
        until(lambda: second.poll() is None and second.is_fresh)
        second.send_signal(signal.SIGUSR1)
        assert second.wait() == 4
        third = servers.spawn(["raise SystemExit(5)"], make_environment(OMP_NUM_THREADS="4"), None)
        assert third.wait() == 5
    [warning] = warnings
    assert "threads that a fork would lose: tracer, so that" in warning
    assert "sweep.fork=false" in warning
    assert "\n" not in warning
    # The server leaves without an error.
    assert (tmp_path / "server.log").read_text() == ""


def test_what_prevents_a_fork() -> None:
    code = """if True:
        import torch
        from istar.finetune.runs.fork_server import reason_not_to_fork
        print(reason_not_to_fork())
        torch.cuda.is_initialized = lambda: True
        print(reason_not_to_fork())
        (torch.ones(600, 600) @ torch.ones(600, 600)).sum()
        print(reason_not_to_fork())"""
    command = [sys.executable, "-c", code]
    completed = subprocess.run(command, check=True, env=make_environment(), capture_output=True, text=True)
    no_reason, gpu_reason, thread_reason = completed.stdout.splitlines()
    assert (no_reason, gpu_reason) == ("", "loading the libraries has begun to use the GPU")
    assert thread_reason.startswith("loading the libraries has left threads that a fork would lose: ")


@pytest.mark.usefixtures("forked_servers")
def test_a_fork_that_the_system_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "server.py"
    refuse = "def refuse(*_): raise BlockingIOError(11, 'Resource temporarily unavailable')"
    script.write_text(
        f"{refuse}\nfrom istar.finetune.runs import fork_server as s\n"
        f"s.PRELOADED_MODULES, s._fork = (), refuse\n{SERVER_SCRIPT}"
    )
    monkeypatch.setattr(fork_server, "COMMAND", (sys.executable, str(script)))
    with ServerPool(tmp_path / "server.log", fail) as servers:
        for _ in range(2):
            with pytest.raises(UserError, match=r"the process of the run could not be started: .*unavailable"):
                servers.spawn(["pass"], make_environment(), None).wait()
        # The same server is used both times.
        assert len(servers._server_by_variables) == 1
        assert (tmp_path / "server.log").read_text() == ""
