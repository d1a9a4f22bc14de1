"""Differences of methods from Base over the same seeds, from the finished runs in a folder."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from istar.errors import UserError
from istar.reports import cells
from istar.reports.method_comparisons import chosen_runs, is_base, score_by_seed
from istar.reports.run_frame import load_runs


@dataclass(frozen=True)
class SeedDifferences:
    """A method minus Base, on one task with one model."""

    model: str
    task: str
    metric: str
    method: str
    by_seed: dict[int, float]  # difference of the headline metric as `istar.scores.displayed`, by seed


def differences_from_base(folder: Path) -> list[SeedDifferences]:
    """Pair every method with Base by task, model and seed.

    Each method has one configuration, chosen as in the report's table of all methods. Methods without a seed in common
    with Base are left out.

    Raises:
        UserError: if `folder` is not a folder, or no method has a seed in common with Base.
    """
    frame = cells.prepare(load_runs(folder, keep_records=True))
    usable = frame[frame["usable"]]
    listed = [differences for part in cells.by_model_and_task(usable) for differences in _of_task(part)]
    if not listed:
        raise UserError(
            f"{folder} holds no finished runs of Base and another method with the same task, model and seed; run both "
            "with the same seeds"
        )
    return listed


def _of_task(runs: pd.DataFrame) -> list[SeedDifferences]:
    """Return the differences of all methods on one task with one model, in the order of the methods' names."""
    chosen = chosen_runs(runs)
    base = next((score_by_seed(group) for group in chosen.values() if is_base(group)), {})
    model, task, metric = (str(runs[column].iloc[0]) for column in ("model", "task", "metric"))
    rows = []
    for method, group in chosen.items():
        scores = score_by_seed(group)
        common = sorted(scores.keys() & base.keys())
        if common and not is_base(group):
            by_seed = {seed: scores[seed] - base[seed] for seed in common}
            rows.append(SeedDifferences(model, task, metric, method, by_seed))
    return rows
