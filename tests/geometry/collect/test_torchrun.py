"""`istar measure` in several processes, as torchrun starts them."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from socket import socket

import pytest

from istar.cli.main import main
from istar.geometry.collect.measures_file import read_measurement
from istar.geometry.show import compare_page
from tests.forks import run_in_processes
from tests.geometry.collect.test_stream import SENTENCES, TOKENIZER, bert, tolerance
from tests.waiting import SECONDS

REPOSITORY = Path(__file__).resolve().parents[3]


def leave_out_the_page(content: compare_page.PageContent, out: Path, contents: object) -> Path:
    """Stand in for `compare_page._write`, which takes most of the time. The measures have been written before."""
    return out / "index.html"


def measure_as_rank(rank: int, port: int, folder: Path, arguments: Sequence[str]) -> None:
    """Run `istar` with the variables that torchrun sets for one of two processes, and write stdout to `<rank>.txt`."""
    compare_page._write = leave_out_the_page
    os.fsync = lambda descriptor: None
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
    """Run `istar` in three processes with torchrun; return their stdout."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")
    command = [sys.executable, *torchrun, "-m", "istar.cli.main", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "COLUMNS": "150"}
    process = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert process.returncode == 0, process.stderr
    assert (folder / "several" / "index.html").exists()
    return process.stdout


def in_forks(folder: Path, arguments: Sequence[str]) -> str:
    """Run `istar` in two processes as torchrun would start them; return their stdout."""
    with socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    run_in_processes(measure_as_rank, (port, folder, arguments), 2)
    return "".join((folder / f"{rank}.txt").read_text() for rank in range(2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a model and two texts. The second is one block, which only one of the processes reads."""
    bert().save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n".join(SENTENCES * 10))
    (tmp_path / "other.txt").write_text(SENTENCES[-1])
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("run_several_processes", [in_forks, with_torchrun])
def test_measures_equal_those_of_one_process(
    run_several_processes: Callable[[Path, Sequence[str]], str], folder: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr(compare_page, "_write", leave_out_the_page)
    arguments = ["measure", "model", "--text", "text.txt,other.txt", "--length", "16", "--sample", "12"]
    arguments += ["--measures", "all", "--groups", "4", "--dtype", "float64", "--shuffle-buffer", "5"]
    assert main([*arguments, "--out", "one"]) == 0
    output = capsys.readouterr().out
    output_of_several = run_several_processes(folder, [*arguments, "--batch-tokens", "48", "--out", "several"])
    # Only rank 0 prints.
    assert output_of_several.count("embeddings") == output.count("embeddings") > 0
    one, several = (read_measurement(folder / name / "measures.json") for name in ("one", "several"))
    assert several.processes > one.processes == 1
    assert list(several.sources) == list(one.sources) == ["text", "other", "combined"]
    for name, measures_by_tap in one.sources.items():
        for tap, measures in measures_by_tap.items():
            for key, value in measures.items():
                expected = pytest.approx(value, rel=tolerance(key), abs=1e-12, nan_ok=True)
                assert several.sources[name][tap][key] == expected, (name, tap, key)
    # No state file remains.
    assert [path.name for path in (folder / "several").glob(".*")] == [".istar"]
    assert [path.name for path in (folder / "several" / ".istar").iterdir()] == ["manifest.json"]


def test_one_process_only(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WORLD_SIZE", "1")  # as torchrun sets it for its only process
    assert main(["measure", "--checkpoints", "mod*", "--text", "text.txt"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "are measured by one process; call them without torchrun" in line
