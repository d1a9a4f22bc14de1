"""Files in the working folder that have the names of libraries are not imported by the processes of runs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from istar.finetune.runs import launch
from istar.records import results
from istar.records.config import TrainerConfig
from tests.jobs import Start, at_once, starting

RUN = ("-m", "seed=1", "reg=none", "task.limit_train=16", "task.limit_validation=8", "trainer.max_epochs=1",
       "trainer.accelerator=cpu", "trainer.progress_bar=false", "run.geometry=false")  # fmt: skip


@pytest.fixture
def start(own_cache: Path) -> Iterator[Start]:
    with starting(own_cache) as start:
        yield start


def write_modules(folder: Path) -> Path:
    """Write modules that raise an exception when they are imported, and return their folder."""
    folder.mkdir(exist_ok=True)
    for name in ("evaluate", "sklearn", "datasets", "random", "yaml"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('the {name} of the working folder was imported')")
    return folder


def test_sweeps_and_several_processes(tmp_path: Path, start: Start) -> None:
    """A run that is forked from a server, and one in two processes, each of which is a new interpreter."""
    cases = {"forked": (), "fresh": ("sweep.fork=false", "trainer=ddp", "trainer.devices=2")}
    folders = [write_modules(tmp_path / name) for name in cases]
    jobs = [start(folder, *RUN, *options) for folder, options in zip(folders, cases.values(), strict=True)]
    for done in at_once(*(job.wait for job in jobs)):
        assert done.code == 0, done
    for folder in folders:
        [run] = folder.glob("runs/demo-*")
        assert results.read_result(run).status == "finished"


@pytest.mark.parametrize("python_path", [None, "", os.pathsep, f"{os.pathsep}/elsewhere"])
def test_every_process_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python_path: str | None) -> None:
    """Also those that libraries start with `-c`, such as the workers of `multiprocessing` and loky."""
    monkeypatch.chdir(write_modules(tmp_path))
    if python_path is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", python_path)
    environment = launch._make_process_environment(0, 1, TrainerConfig(), 0)
    code = "import sys, subprocess; subprocess.run([sys.executable, '-c', 'import random, yaml'], check=True)"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    expected = [str(Path(launch.__file__).parents[3]), *(["/elsewhere"] if python_path and "e" in python_path else [])]
    assert environment["PYTHONPATH"].split(os.pathsep) == expected
