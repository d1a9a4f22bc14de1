"""Differences of methods from Base over the same seeds, from the finished runs in a folder."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from istar.errors import UserError
from istar.reports import configurations
from istar.reports.method_comparisons import get_score_by_seed, is_base, select_runs_by_method
from istar.reports.run_frame import load_runs


@dataclass(frozen=True)
class SeedDifferences:
    """Differences of a method from Base over the same seeds, on one task with one model."""

    model: str
    task: str
    metric: str
    method: str
    by_seed: dict[
        int, float
    ]  # difference of the headline metric, scaled by `istar.records.metric_names.displayed`, by seed


def compute_differences_from_base(folder: Path) -> list[SeedDifferences]:
    """Return the difference of every method from Base, by seed, for each task and model in a folder of runs.

    Each method has one configuration, chosen as in the report's table of all methods. Methods without a seed in common
    with Base are left out.

    Raises:
        UserError: if `folder` is not a folder, or no method has a seed in common with Base.
    """
    all_runs = configurations.add_selection_columns(load_runs(folder, keep_records=True))
    usable_runs = all_runs[all_runs["usable"]]
    differences = [
        seed_differences
        for runs in configurations.by_model_and_task(usable_runs)
        for seed_differences in _compute_task_differences(runs)
    ]
    if not differences:
        raise UserError(
            f"{folder} holds no finished runs of Base and another method with the same task, model and seed; run both "
            "with the same seeds"
        )
    return differences


def _compute_task_differences(runs: pd.DataFrame) -> list[SeedDifferences]:
    """Return the differences of all methods from Base on one task with one model, in the order of their names."""
    runs_by_method = select_runs_by_method(runs)
    base_scores = next(
        (get_score_by_seed(method_runs) for method_runs in runs_by_method.values() if is_base(method_runs)), {}
    )
    model, task, metric = (str(runs[column].iloc[0]) for column in ("model", "task", "metric"))
    differences = []
    for method, method_runs in runs_by_method.items():
        scores = get_score_by_seed(method_runs)
        common_seeds = sorted(scores.keys() & base_scores.keys())
        if common_seeds and not is_base(method_runs):
            difference_by_seed = {seed: scores[seed] - base_scores[seed] for seed in common_seeds}
            differences.append(SeedDifferences(model, task, metric, method, difference_by_seed))
    return differences
