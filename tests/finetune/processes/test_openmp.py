"""Commands and their processes let OpenMP's threads sleep before torch is loaded; the library changes no variable."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from istar.errors import UserError
from istar.finetune.processes import launch
from istar.finetune.processes.openmp import let_threads_sleep
from tests.waiting import SECONDS

REPOSITORY = Path(__file__).resolve().parents[3]
ENTRY_POINT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]["istar"]
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
END_AT_TORCH = f"""
import os, runpy, sys

VARIABLES = {VARIABLES!r}

class End:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(*(os.environ.get(variable) for variable in VARIABLES), flush=True)
            os._exit(0)

sys.meta_path.insert(0, End())
"""
"""Ends the process when anything imports torch, after the variables have been printed."""
SCRIPT = (
    f"sys.path.insert(0, {str(REPOSITORY)!r}); runpy.run_path({str(REPOSITORY / 'train.py')!r}, run_name='__main__')"
)
CONSOLE_SCRIPT = "from {0} import {1}; sys.exit({1}())".format(*ENTRY_POINT.split(":"))
MODULE = "runpy.run_module('istar.cli.main', run_name='__main__')"
CHILD = "runpy.run_module('istar.finetune.processes.child', run_name='__main__')"


def run_python(code: str, *arguments: str, **variables: str) -> str:
    """Return the output of code in a new process without the variables, except the given ones."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | variables
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=SECONDS, check=True,
    ).stdout.strip()  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "arguments"),
    [
        (SCRIPT, ["task=demo"]),
        (SCRIPT, ["-m", "seed=1,2"]),
        (CONSOLE_SCRIPT, ["train", "task=demo"]),
        (CONSOLE_SCRIPT, ["measure", "model", "--text", "text"]),
        (CONSOLE_SCRIPT, ["embed", "model", "--out", "folder"]),
        (MODULE, ["measure", "model", "--text", "text"]),
    ],
)
def test_a_command_sets_the_policy_before_torch_is_loaded(entry: str, arguments: list[str]) -> None:
    assert run_python(END_AT_TORCH + entry, *arguments) == "None 10000 1"


def test_a_policy_of_the_user_stays() -> None:
    code = END_AT_TORCH + CONSOLE_SCRIPT
    assert run_python(code, "train", "task=demo", OMP_WAIT_POLICY="active") == "active None None"
    assert run_python(code, "train", "task=demo", GOMP_SPINCOUNT="7") == "None 7 None"
    assert run_python(code, "train", "task=demo", KMP_BLOCKTIME="200") == "None None 200"


def test_gnu_openmp_spins_for_a_short_time_then() -> None:
    """The library itself says how it waits, if it is GNU's."""
    environment: dict[str, str] = {"OMP_DISPLAY_ENV": "verbose"}
    let_threads_sleep(environment)
    completed = subprocess.run(
        [sys.executable, "-c", "import torch"],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=SECONDS, check=True,
    )  # fmt: skip
    spin_counts = [line.split("'")[1] for line in completed.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    if not spin_counts:
        pytest.skip("torch uses another OpenMP than GNU's")
    assert set(spin_counts) == {"10000"}


def test_processes_of_a_run_sleep_and_the_process_that_starts_them_is_left_alone(
    composed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    environments = []

    def start(arguments: Any, environment: Any, log_path: Any) -> Any:
        environments.append(environment)

    before = dict(os.environ)
    run = launch.RunProcesses(composed(), 2, spawn=start)
    with pytest.raises(UserError):  # it has no result
        run.read_record([])
    assert [environment["GOMP_SPINCOUNT"] for environment in environments] == ["10000", "10000"]
    assert dict(os.environ) == before
    # A new interpreter of a run has the variables of its environment when it loads torch.
    assert run_python(END_AT_TORCH + CHILD, OMP_WAIT_POLICY="passive") == "passive None None"


def test_the_library_leaves_the_environment_alone() -> None:
    code = """
import os
before = dict(os.environ)
import istar, torch
istar.measure(torch.randn(64, 4))
assert istar.isoscore(torch.randn(64, 4)) > 0
print(dict(os.environ) == before, set(os.environ) ^ set(before))
"""
    assert run_python(code) == "True set()"
