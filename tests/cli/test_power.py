"""`istar power` as it is called on the command line."""

import json
from pathlib import Path

import numpy as np
import pytest

from istar.cli.main import main
from istar.cli.power import compare_with_base
from istar.errors import UserError
from istar.statistics.power import pairs_needed, sd_interval, smallest_difference
from tests.reports.synthetic import BASE, cosreg, istar, record, save


@pytest.fixture(autouse=True)
def use_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_the_number_of_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["power", "--sd", "2.1", "--difference", "1.0"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(
        f"To find a difference of 1 with probability 0.8, train each method with {pairs_needed(1, 2.1)} "
    )
    assert main(["power", "--sd", "2.1", "--difference", "1.0", "--alpha", "0.01", "--power", "0.9"]) == 0
    assert f"with {pairs_needed(1, 2.1, 0.01, 0.9)} seeds" in capsys.readouterr().out


def test_the_smallest_difference(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["power", "--sd", "2.1", "--pairs", "10"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("With 10 seeds for each method")
    assert f" is {smallest_difference(2.1, 10):.3g} (" in line


@pytest.fixture
def run_root(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for seed in range(1, 6):
        save(record("rte", "mine", BASE, seed, 0.6), tmp_path)
        save(record("rte", "mine", istar(-3), seed, 0.6 + float(random.normal(0, 0.02))), tmp_path)
        save(record("rte", "mine", istar(1), seed, 0.7), tmp_path)
    save(record("rte", "mine", istar(2), 1, 0.7), tmp_path)
    return tmp_path


def split_row(text: str, method: str) -> list[str]:
    [line] = [line for line in text.splitlines() if method in line]
    return [cell.strip() for cell in line.strip("│┃").split("│")]


def test_the_spread_of_runs(
    run_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    differences = 2 * np.random.default_rng(0).normal(0, 1, 5)
    sd = float(np.std(differences, ddof=1))
    low, high = sd_interval(sd, 5)
    expected_cells = ["mine", "rte, accuracy", "I-STAR λ=-3 ζ=0.4", "5", f"{sd:.3g}", f"{low:.3g} to {high:.3g}"]
    answer_by_options = {
        "--difference 1": str(pairs_needed(1.0, sd)),
        "--pairs 20": f"{smallest_difference(sd, 20):.3g}",
        "": f"{smallest_difference(sd, 5):.3g}",
    }
    for options, answer in answer_by_options.items():
        assert main(["power", "--runs", str(run_root), *options.split()]) == 0
        text = capsys.readouterr().out
        assert split_row(text, "λ=-3") == [*expected_cells, answer]
        assert split_row(text, "λ=1")[3:] == ["5", "0", "-", "all differences are equal"]
        assert split_row(text, "λ=2")[3:] == ["1", "-", "-", "needs 2 seeds"]
        assert "│ Base" not in text
    for options, message in (("--difference 0", "the size of the difference is 0.0"), ("--alpha 0", "alpha is 0.0")):
        assert main(["power", "--runs", str(run_root), *options.split()]) == 2
        assert message in capsys.readouterr().err


def test_a_pipe_gets_values_and_json(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    differences = 2 * np.random.default_rng(0).normal(0, 1, 5)
    sd = float(np.std(differences, ddof=1))
    assert main(["power", "--runs", str(run_root), "--json"]) == 0
    rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)}
    row = rows["I-STAR λ=-3 ζ=0.4"]
    assert (row["sd"], row["low"], row["high"]) == pytest.approx((sd, *sd_interval(sd, 5)), rel=1e-9)
    assert row["smallest_difference"] == pytest.approx(smallest_difference(sd, 5), rel=1e-9)
    assert rows["I-STAR λ=2 ζ=0.4"]["note"] == "needs 2 seeds"
    assert main(["power", "--runs", str(run_root)]) == 0
    header, *lines = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    [values] = [line for line in lines if "I-STAR λ=-3 ζ=0.4" in line]
    assert float(values[header.index("sd")]) == row["sd"]
    assert main(["power", "--sd", "2.1", "--difference", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"seeds_needed": pairs_needed(1, 2.1)}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "needs either --sd or --runs; for example istar power --sd 2.1 --difference 1.0"),
        ("--sd 1 --runs .", "needs either --sd or --runs"),
        ("--sd 1", "--sd needs --difference, for the number of seeds, or --pairs, for the smallest difference"),
        ("--sd 1 --difference 1 --pairs 5", "--difference and --pairs exclude each other"),
        ("--sd 0 --pairs 5", "the standard deviation of the differences is 0.0"),
        ("--runs nowhere", "nowhere is not a folder"),
    ],
)
def test_a_mistake_is_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["power", *arguments.split()]) == 2
    printed = capsys.readouterr()
    [line] = printed.err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert printed.out == ""


def test_methods_are_paired_with_base_by_task_model_and_seed(tmp_path: Path) -> None:
    base_values = {1: 0.60, 2: 0.62, 3: 0.59}
    method_values = {2: 0.63, 3: 0.64, 4: 0.99}
    for seed, value in base_values.items():
        save(record("rte", "mine", BASE, seed, value), tmp_path)
        save(record("clm", "mine", BASE, seed, 40.0 + seed), tmp_path)
        save(record("clm", "mine", istar(-3), seed, 30.0), tmp_path)
    for seed, value in method_values.items():
        save(record("rte", "mine", istar(-3), seed, value), tmp_path)
    # These runs are in no pair: a configuration that is not selected, a failed run, and a model without Base.
    save(record("rte", "mine", istar(-3), 1, 0.99, optim__lr=1e-4), tmp_path)
    save(record("rte", "mine", cosreg(), 1, status="failed"), tmp_path)
    save(record("rte", "other", istar(-3), 1, 0.9), tmp_path)
    differences = {
        (method.model, method.task, method.metric, method.name): comparison.difference_by_seed
        for comparison in compare_with_base(tmp_path)
        if (method := comparison.method)
    }
    # Differences of accuracies are in percentage points, those of perplexities are not scaled.
    assert differences == {
        ("mine", "rte", "accuracy", "I-STAR λ=-3 ζ=0.4"): pytest.approx({2: 1.0, 3: 5.0}),
        ("mine", "clm", "perplexity", "I-STAR λ=-3 ζ=0.4"): pytest.approx({1: -11.0, 2: -12.0, 3: -13.0}),
    }


def test_runs_without_a_pair(tmp_path: Path) -> None:
    save(record("rte", "mine", BASE, 1, 0.6), tmp_path)
    save(record("rte", "mine", istar(), 2, 0.6), tmp_path)
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path, tmp_path / "empty"):
        with pytest.raises(UserError, match="holds no finished runs of Base"):
            compare_with_base(folder)
