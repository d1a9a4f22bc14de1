"""Helpers for tests of whole runs: readers of the files in a run folder, and data in GLUE's file format."""

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from istar.finetune.config import Config, ModelConfig
from istar.finetune.execute.build_config import build_config
from istar.finetune.execute.build_model import build_model, build_tokenizer
from istar.runs.record import RunRecord
from istar.runs.tasks import TaskSpec

Build = Callable[..., Config]
DEMOS = ("demo", "demo_regression", "demo_span")
TINY = ("model=tiny",)


def place(config: Config, record: RunRecord) -> Path:
    """Return the folder of a run."""
    return Path(config.run.root) / record.name


def build(config: ModelConfig, spec: TaskSpec, texts: Sequence[str] | None = None) -> tuple[Any, Any]:
    """Return the model and the tokenizer with which a training begins."""
    tokenizer = build_tokenizer(config, texts)
    return build_model(config, spec, build_config(config, spec, tokenizer), tokenizer), tokenizer


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file with JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def logged(folder: Path) -> dict[str, list[float]]:
    """Return the values in each column of metrics.csv, without empty cells."""
    with (folder / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    return {key: [float(row[key]) for row in table if row[key]] for key in table[0]}


def everything_measured(record: RunRecord) -> list[Any]:
    """Return everything in a record that the run has measured, apart from times."""
    return [record.headline, record.metrics, record.baseline, record.isotropy, record.epochs, record.collapsed]


def folders_in(root: Path) -> list[str]:
    """Return the sorted names of the files and folders in a folder, without the locks; none if it does not exist."""
    return sorted(path.name for path in root.iterdir() if path.name != ".locks") if root.exists() else []


def table(folder: Path, name: str, *lines: str) -> None:
    """Write a file of tab-separated values, which the lines separate by `|`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(line.replace("|", "\t") + "\n" for line in lines), encoding="utf-8")


def rte(folder: Path, train: int = 32, validation: int = 12, positive: Callable[[int], bool] | None = None) -> Path:
    """Write files in RTE's format and return their parent folder; by default every second pair is an entailment."""
    is_positive = positive or (lambda number: number % 2 == 0)

    def line(split: str, number: int) -> str:
        label = "entailment" if is_positive(number) else "not_entailment"
        return f"{number}|the {split} lamp number {number} is old .|a lamp is old .|{label}"

    table(folder / "RTE", "train.tsv", "index|sentence1|sentence2|label", *(line("train", n) for n in range(train)))
    table(folder / "RTE", "dev.tsv", "index|sentence1|sentence2|label", *(line("dev", n) for n in range(validation)))
    test_lines = (f"{n}|some lamp number {n} is old .|a lamp is old ." for n in range(7))
    table(folder / "RTE", "test.tsv", "index|sentence1|sentence2", *test_lines)
    return folder
