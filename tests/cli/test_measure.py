"""`istar measure` on files of vectors, and bounds of measures."""

import json
from pathlib import Path

import numpy as np
import pytest

import istar
from istar.cli.main import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    np.save("queries.npy", random.normal(size=(300, 8)) * np.linspace(1, 2, 8) + 1)
    np.savez("corpus.npz", train=random.normal(size=(200, 8)), test=random.normal(size=(100, 8)).astype("float16"))
    return tmp_path


@pytest.mark.usefixtures("folder", "blank_figures")
def test_the_command_measures_what_the_function_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "queries.npy", "small=corpus.npz:test", "--measures", "all", "--out", "page"]) == 0
    output = capsys.readouterr().out
    assert "queries" in output
    assert "small" in output
    expected = istar.measure({"queries": "queries.npy", "small": "corpus.npz:test"}, measures="all")
    geometry = istar.load("page")
    assert geometry.table.equals(expected.table)
    assert geometry.measurements.command.startswith("istar measure queries.npy small=corpus.npz:test")
    assert {path.name for path in Path("page").iterdir()} >= {"index.html", "measures.csv", "measures.json", "figures"}
    assert main(["measure", "queries.npy", "--json", "--out", "one"]) == 0
    [rows] = json.loads(capsys.readouterr().out).values()
    assert rows[0]["points"] == 300


@pytest.mark.usefixtures("folder", "blank_figures")
def test_an_interval_beyond_a_bound_is_a_line_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    Path("checks.yaml").write_text("'*': {isoscore: [0.1, null], inter_sim: [null, 0.01]}\n")
    assert main(["measure", "queries.npy", "--out", "page", "--check", "checks.yaml"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2].startswith("queries")
    assert f"inter_sim of queries is {istar.load('page')['inter_sim']['queries']:.4g}, with a 95%" in lines[-2]
    assert lines[-2].endswith("expected at most 0.01")
    assert lines[-1] == "error: 1 measure is beyond the bounds of --check"
    assert Path("page/index.html").is_file()
    Path("checks.yaml").write_text("'*': {isoscore: [0.1, null]}\n")
    assert main(["measure", "queries.npy", "--out", "page", "--check", "checks.yaml"]) == 0


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["corpus.npz"], "corpus.npz has several matrices"),
        (["missing.npy"], "missing.npy: there is no such file"),
        (["queries.npy", "--text", "a.txt"], "--text does not go with files of vectors; leave it out"),
        (["queries.npy", "--max-tokens", "3"], "--max-tokens does not go with files of vectors"),
        (["queries.npy", "bert-base"], "bert-base is not a file of vectors"),
        (["queries.npy", "x/queries.npy"], "several files have the same name; give them names"),
        (["queries.npy", "--check", "none.yaml"], "none.yaml: there is no such file"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_measured(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["measure", *arguments, "--out", "page"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1
    assert not Path("page").exists()
