import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from istar.drawing.page_tables import Sheet
from istar.reports import configurations
from istar.reports.method_comparisons import compare_methods
from istar.reports.run_frame import read_runs
from istar.reports.task_averages import build_over_tasks_sheet
from tests.reports.synthetic import BASE, METRICS, cosreg, istar, record, save

REGS: dict[str, dict[str, Any]] = {
    "Base": BASE, "CosReg λ=1": cosreg(), "I-STAR λ=-1 ζ=0.4": istar(-1), "I-STAR λ=1 ζ=0.4": istar(1),
}  # fmt: skip
TASKS = ("rte", "cola", "stsb", "mrpc", "sst2", "qnli")


def write_runs(root: Path, levels: np.ndarray, seeds: int = 2, tasks: tuple[str, ...] = TASKS) -> np.ndarray:
    """Write runs whose means are about `levels` (tasks, methods); returns the scores (tasks, methods, seeds)."""
    random = np.random.default_rng(0)
    scores = levels[..., None] + random.normal(0, 0.001, (*levels.shape, seeds))
    for (task_index, task), (method_index, reg) in itertools.product(enumerate(tasks), enumerate(REGS.values())):
        for seed in range(1, seeds + 1):
            save(
                record(task, "mine", reg, seed, float(scores[task_index, method_index, seed - 1])), root, geometry=False
            )
    return scores


def build_sheet(root: Path) -> Sheet:
    return build_over_tasks_sheet(compare_methods(configurations.add_selection_columns(read_runs(root, True))))


def test_each_task_has_the_same_weight(tmp_path: Path) -> None:
    levels = np.random.default_rng(1).uniform(0.4, 0.8, (6, 4)) + np.array([0, 0.1, 0.3, 0.5])
    scores = write_runs(tmp_path, levels)
    sheet = build_sheet(tmp_path)
    assert sheet.notes == ("mine: 6 tasks (sst2, qnli, rte, mrpc, cola, stsb).",)
    assert list(sheet.frame["method"]) == list(REGS)[1:]
    assert set(sheet.frame["tasks"]) == {6}
    for method_index, row in enumerate(sheet.frame.to_dict("records"), 1):
        differences = 100 * (scores[:, method_index] - scores[:, 0]).mean(axis=-1)
        interval = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
        expected = (differences.mean(), interval.low, interval.high)
        assert (row["minus_reference"], row["low"], row["high"]) == pytest.approx(expected, rel=1e-9)


def test_equal_differences_have_no_interval(tmp_path: Path) -> None:
    for task, (reg, value) in itertools.product(TASKS[:3], ((BASE, 0.5), (istar(), 0.625))):
        save(record(task, "mine", reg, 1, value), tmp_path, geometry=False)
    sheet = build_sheet(tmp_path)
    [row] = sheet.rows
    assert [entry.text for entry in row] == ["I-STAR λ=-1 ζ=0.4", "3", "+12.50", "-"]


def test_losses_are_not_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = ("one", "two", "three")
    monkeypatch.setitem(METRICS, "three", "perplexity")
    write_runs(tmp_path, np.random.default_rng(2).uniform(20, 40, (3, 4)), tasks=tasks)
    sheet = build_sheet(tmp_path)
    assert sheet.rows == []
    assert sheet.notes == ("mine: losses and perplexities have no common unit over tasks.",)


def test_too_few_tasks_are_said(tmp_path: Path) -> None:
    write_runs(tmp_path, np.full((2, 4), 0.5), tasks=("rte", "cola"))
    # A task on which only Base has finished does not count.
    save(record("mrpc", "mine", BASE, 1), tmp_path, geometry=False)
    sheet = build_sheet(tmp_path)
    assert sheet.rows == []
    assert sheet.notes == ("mine: averages need 3 tasks; Base and another method have finished on 2 tasks.",)


def test_methods_with_other_tasks_seeds_or_budgets_are_left_out(tmp_path: Path) -> None:
    tasks = TASKS[:3]
    write_runs(tmp_path, np.random.default_rng(3).uniform(0.4, 0.8, (3, 4)), tasks=tasks)
    save(record("rte", "mine", istar(1), 3, 0.5), tmp_path, geometry=False)
    save(record("cola", "mine", cosreg(), 1, 0.5, optim__lr=1.0), tmp_path, geometry=False)
    for seed in (1, 2):
        save(record("cola", "mine", istar(5), seed, 0.5), tmp_path, geometry=False)
    sheet = build_sheet(tmp_path)
    assert list(sheet.frame["method"]) == ["I-STAR λ=-1 ζ=0.4"]
    assert sheet.notes[0].endswith("another budget than Base: CosReg λ=1, I-STAR λ=1 ζ=0.4, I-STAR λ=5 ζ=0.4.")
