"""`istar power` as it is called on the command line."""

from pathlib import Path

import numpy as np
import pytest

from istar.cli.main import main
from istar.statistics.power import pairs_needed, sd_interval, smallest_difference
from tests.reports.synthetic import BASE, istar, record, save


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


def test_the_spread_of_runs(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "needs either --sd or --runs; for example istar power --sd 2.1 --difference 1.0"),
        ("--sd 1 --runs .", "needs either --sd or --runs"),
        ("--sd 1", "--sd needs --difference, for the number of seeds, or --pairs, for the smallest difference"),
        ("--sd 1 --difference 1 --pairs 5", "--difference and --pairs exclude each other"),
        ("--sd 0 --pairs 5", "the standard deviation of the differences is 0.0; expected a finite number above 0"),
        ("--sd nan --pairs 5", "the standard deviation of the differences is nan"),
        ("--sd 1 --pairs 1", "the number of pairs is 1; expected 2 or more"),
        ("--sd 1 --difference 0", "the size of the difference is 0.0"),
        ("--sd 1 --difference 1 --power 80", "the power is 80.0; expected a number between 0 and 1"),
        ("--runs nowhere", "nowhere is not a folder"),
        ("--runs nowhere --difference 0", "the size of the difference is 0.0"),
        ("--runs nowhere --alpha 0", "alpha is 0.0"),
    ],
)
def test_a_mistake_is_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["power", *arguments.split()]) == 2
    printed = capsys.readouterr()
    [line] = printed.err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert printed.out == ""
