"""Files in the working folder that have the names of libraries are not imported by the processes of runs."""

import multiprocessing
import os
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from istar.finetune.config import TrainerConfig
from istar.finetune.processes import forking, launch


def write_modules(folder: Path) -> Path:
    """Write modules that raise an exception when they are imported, and return their folder."""
    folder.mkdir(exist_ok=True)
    for name in ("evaluate", "sklearn", "datasets", "random", "yaml"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('the {name} of the working folder was imported')")
    return folder


def test_the_server_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server imports the libraries in the working folder of the sweep, and its forks inherit them."""
    server: Any = forkserver.ForkServer()
    for name in ("set_forkserver_preload", "ensure_running", "connect_to_new_process", "get_inherited_fds"):
        monkeypatch.setattr(forkserver, name, getattr(server, name))
    monkeypatch.setattr(forking, "PRELOADED_MODULES", ["random", "yaml"])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.chdir(write_modules(tmp_path))
    try:
        forking.start_server(launch._make_process_environment(0, 1, TrainerConfig(), None))
        process = multiprocessing.get_context("forkserver").Process(target=os.getpid)
        process.start()
        process.join()
    finally:
        server._stop()
    assert process.exitcode == 0


@pytest.mark.parametrize("python_path", [None, "", os.pathsep, f"{os.pathsep}/elsewhere"])
def test_every_process_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python_path: str | None) -> None:
    """Also those that libraries start with `-c`, such as the workers of `multiprocessing` and loky."""
    monkeypatch.chdir(write_modules(tmp_path))
    if python_path is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", python_path)
    environment = launch._make_process_environment(0, 1, TrainerConfig(), None)
    code = "import sys, subprocess; subprocess.run([sys.executable, '-c', 'import random, yaml'], check=True)"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    expected = [str(Path(launch.__file__).parents[3]), *(["/elsewhere"] if python_path and "e" in python_path else [])]
    assert environment["PYTHONPATH"].split(os.pathsep) == expected
