"""Helpers for tests of whole runs: readers of the files in a run folder, and data in GLUE's file format."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from istar.config import Config
from istar.results import RunRecord

Build = Callable[..., Config]
DEMOS = ("demo", "demo_sentence", "demo_regression", "demo_span")
REGS = ("none", "istar", "cosreg")
TINY = ("model=tiny",)


def place(config: Config, record: RunRecord) -> Path:
    return Path(config.run.root) / record.name


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def logged(folder: Path) -> dict[str, list[float]]:
    """Each column of metrics.csv without its gaps."""
    with (folder / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    return {key: [float(row[key]) for row in table if row[key]] for key in table[0]}


def everything_measured(record: RunRecord) -> list[Any]:
    return [record.headline, record.metrics, record.baseline, record.isotropy, record.epochs, record.collapsed]


def folders_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != ".locks") if root.exists() else []


def table(folder: Path, name: str, *lines: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(line.replace("|", "\t") + "\n" for line in lines), encoding="utf-8")


def rte(folder: Path, train: int = 32, validation: int = 12, positive: Callable[[int], bool] | None = None) -> Path:
    """RTE's own files; by default every other pair is an entailment."""
    is_positive = positive or (lambda number: number % 2 == 0)

    def line(split: str, number: int) -> str:
        label = "entailment" if is_positive(number) else "not_entailment"
        return f"{number}|the {split} lamp number {number} is old .|a lamp is old .|{label}"

    table(folder / "RTE", "train.tsv", "index|sentence1|sentence2|label", *(line("train", n) for n in range(train)))
    table(folder / "RTE", "dev.tsv", "index|sentence1|sentence2|label", *(line("dev", n) for n in range(validation)))
    tests = (f"{n}|some lamp number {n} is old .|a lamp is old ." for n in range(7))
    table(folder / "RTE", "test.tsv", "index|sentence1|sentence2", *tests)
    return folder
