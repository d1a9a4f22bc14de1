"""`istar measure` in several processes, as torchrun starts them."""

import csv
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from socket import socket

import pytest

from istar.cli.main import main
from tests.forks import run_in_processes
from tests.geometry.test_stream import SENTENCES, TOKENIZER, bert
from tests.waiting import SECONDS

pytestmark = pytest.mark.usefixtures("blank_figures")

REPOSITORY = Path(__file__).resolve().parents[2]


def measure_as_rank(rank: int, port: int, folder: Path, arguments: Sequence[str]) -> None:
    """Run `istar` with the variables that torchrun sets for one of two processes, and write stdout to `<rank>.txt`."""
    os.chdir(folder)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "COLUMNS": "150",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none",
    }  # fmt: skip
    with Path(f"{rank}.txt").open("w") as file, redirect_stdout(file):
        exit_code = main(arguments)
    # Skip the interpreter's shutdown, in which the remains of a process group may abort.
    os._exit(exit_code)


def with_torchrun(folder: Path, arguments: Sequence[str]) -> str:
    """Run `istar` with torchrun; return its stdout."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    command = [sys.executable, *torchrun, "-m", "istar.cli.main", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "COLUMNS": "150"}
    process = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def in_two_processes(folder: Path, arguments: Sequence[str]) -> str:
    """Run `istar` in two processes as torchrun would start them; return their stdout."""
    with socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    run_in_processes(measure_as_rank, (port, folder, arguments), 2)
    return "".join((folder / f"{rank}.txt").read_text() for rank in range(2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bert().float().save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n".join(SENTENCES * 20))
    return tmp_path


@pytest.mark.parametrize("run_two_processes", [in_two_processes, pytest.param(with_torchrun, marks=pytest.mark.slow)])
def test_measures_equal_those_of_one_process(
    run_two_processes: Callable[[Path, Sequence[str]], str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "150")
    arguments = ("measure", "model", "--text", "text.txt", "--length", "16", "--batch-tokens", "64", "--sample", "50")
    assert main([*arguments, "--out", "one"]) == 0
    output = capsys.readouterr().out
    output_of_two = run_two_processes(folder, [*arguments, "--out", "two"])
    # Only rank 0 prints.
    assert output_of_two.count("embeddings") == output.count("embeddings") > 0
    tables = []
    for name in ("one", "two"):
        with (folder / name / "measures.csv").open(newline="") as file:
            tables.append(list(csv.DictReader(file)))
        assert (folder / name / "index.html").exists()
        assert [path.name for path in (folder / name).glob(".*")] == [".istar"]
        assert [path.name for path in (folder / name / ".istar").iterdir()] == ["manifest.json"]
    for row, row_of_two in zip(*tables, strict=True):
        for key, value in row.items():
            if key in ("model", "revision", "source", "layer") or not value:
                assert row_of_two[key] == value
            else:
                # Layer normalization makes one singular value 0, so its computed value is a rounding error of float32.
                relative_tolerance = 0.1 if key == "effective_rank_error" else 1e-3 if "rank" in key else 1e-5
                # The power law is a fit of the logarithms of small variances.
                relative_tolerance = 1e-4 if key == "alpha_req_error" else relative_tolerance
                assert float(row_of_two[key]) == pytest.approx(float(value), rel=relative_tolerance), key


def test_checkpoints_need_a_single_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WORLD_SIZE", "1")  # as torchrun sets it for its only process
    assert main(["measure", "--checkpoints", "mod*", "--text", "text.txt"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "are measured by one process; call them without torchrun" in line
