"""When two runs are the same: bit by bit, durations and paths aside."""

from pathlib import Path

from benchmarks.chaos import differences, only_run, outcome

__all__ = ["assert_same", "only_run"]


def assert_same(folder: Path, other: Path, but_for_the_name: bool = False) -> None:
    """Two run folders hold the same weights, predictions, geometry, rows of metrics, `result.json` and names of files.

    Args:
        folder: of a run.
        other: of another.
        but_for_the_name: where another config made another name.
    """
    ours, theirs = outcome(folder), outcome(other)
    if but_for_the_name:
        for record in (ours["result.json"], theirs["result.json"]):
            del record["name"], record["config"]["trainer"]
    for number, (row, expected) in enumerate(zip(ours["metrics.csv"], theirs["metrics.csv"], strict=True)):
        assert row == expected, f"row {number} of metrics.csv"
    assert differences(ours, theirs) == []
