"""Compares two run folders bit by bit, except for durations and paths."""

from pathlib import Path

from benchmarks.chaos import differences, only_run, outcome

__all__ = ["assert_same", "only_run", "outcome"]


def assert_same(folder: Path, other: Path, but_for_the_name: bool = False) -> None:
    """Assert that weights, predictions, geometry, metrics, `result.json` and file names of two runs are equal.

    Args:
        but_for_the_name: ignore the names of the runs and their `trainer` settings.
    """
    ours, theirs = outcome(folder), outcome(other)
    if but_for_the_name:
        for record in (ours["result.json"], theirs["result.json"]):
            del record["name"], record["config"]["trainer"]
    for number, (row, expected) in enumerate(zip(ours["metrics.csv"], theirs["metrics.csv"], strict=True)):
        assert row == expected, f"row {number} of metrics.csv"
    unequal = differences(ours, theirs)
    assert not unequal, f"the runs differ in {', '.join(unequal)}"
