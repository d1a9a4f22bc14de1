"""`istar measure` in several processes, started as torchrun does."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from istar.cli.main import main
from tests.geometry.test_stream import TOKENIZER, WORDS, bert
from tests.waiting import SECONDS

REPOSITORY = Path(__file__).resolve().parents[2]


def call(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Call `istar` in two processes."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    command = [sys.executable, *torchrun, "-m", "istar.cli.main", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "COLUMNS": "150"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bert().float().save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n".join(WORDS * 20))
    return tmp_path


def test_measures_equal_those_of_one_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "150")
    arguments = ("measure", "model", "--text", "text.txt", "--length", "16", "--batch-size", "4", "--sample", "50")
    assert main([*arguments, "--out", "one"]) == 0
    printed = capsys.readouterr().out
    two = call(folder, *arguments, "--out", "two")
    assert two.returncode == 0, two.stderr
    # Only rank 0 prints.
    assert two.stdout.count("embeddings") == printed.count("embeddings") > 0
    tables = []
    for name in ("one", "two"):
        with (folder / name / "measures.csv").open(newline="") as file:
            tables.append(list(csv.DictReader(file)))
        assert (folder / name / "index.html").exists()
        assert not list((folder / name).glob(".*"))
    for ours, theirs in zip(*tables, strict=True):
        for key, value in ours.items():
            if key in ("model", "revision", "source", "layer") or not value:
                assert theirs[key] == value
            else:
                assert float(theirs[key]) == pytest.approx(float(value), rel=1e-3 if "rank" in key else 1e-5), key


def test_checkpoints_need_a_single_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WORLD_SIZE", "1")  # as torchrun sets it for its only process
    assert main(["measure", "--checkpoints", "mod*", "--text", "text.txt"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "are measured by one process; call them without torchrun" in line
