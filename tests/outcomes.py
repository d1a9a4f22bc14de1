"""Compare two run folders bit by bit, except for durations and paths."""

from pathlib import Path

from benchmarks.chaos import differences, only_run, outcome

__all__ = ["assert_same", "only_run", "outcome"]


def assert_same(folder: Path, other: Path, but_for_the_name: bool = False) -> None:
    """Assert that weights, predictions, geometry, metrics, `result.json` and file names of two runs are equal.

    Args:
        but_for_the_name: ignore the names of the runs and their `trainer` settings.
    """
    actual_outcome, expected_outcome = outcome(folder), outcome(other)
    if but_for_the_name:
        for record in (actual_outcome["result.json"], expected_outcome["result.json"]):
            del record["name"], record["config"]["trainer"]
    for index, (row, expected_row) in enumerate(
        zip(actual_outcome["metrics.csv"], expected_outcome["metrics.csv"], strict=True)
    ):
        assert row == expected_row, f"row {index} of metrics.csv"
    unequal = differences(actual_outcome, expected_outcome)
    assert not unequal, f"the runs differ in {', '.join(unequal)}"
