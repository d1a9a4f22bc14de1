import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from istar.drawing.plot import describe
from istar.drawing.rendering import render
from istar.reports import configurations, rank_figure, report
from istar.reports.method_comparisons import compare_methods
from istar.reports.rank_figure import RankedMethods, rank_methods
from istar.reports.run_frame import read_runs
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


def rank_methods_in(root: Path) -> list[RankedMethods]:
    return rank_methods(compare_methods(configurations.add_selection_columns(read_runs(root, keep_records=True))))


def test_ranks_are_those_of_the_means_over_seeds(tmp_path: Path) -> None:
    levels = np.random.default_rng(1).uniform(0.4, 0.8, (6, 4)) + np.array([0, 0.1, 0.3, 0.5])
    scores = write_runs(tmp_path, levels)
    [ranked] = rank_methods_in(tmp_path)
    assert ranked.tasks == ("sst2", "qnli", "rte", "mrpc", "cola", "stsb")
    means = pd.DataFrame(scores.mean(axis=-1), columns=list(REGS))
    expected = means.rank(axis=1, ascending=False).mean()
    assert ranked.average_rank_by_method == pytest.approx(expected.to_dict())
    assert list(ranked.average_rank_by_method.values()) == sorted(ranked.average_rank_by_method.values())
    chi_square = stats.friedmanchisquare(*means.to_numpy().T).statistic
    f_statistic = 5 * chi_square / (6 * 3 - chi_square)
    assert ranked.friedman_p == pytest.approx(stats.f.sf(f_statistic, 3, 15), rel=1e-9)
    # Table 5 of Demšar (2006) has q = 2.569 for four methods.
    assert ranked.critical_difference == pytest.approx(2.569 * np.sqrt(4 * 5 / (6 * 6)), abs=1e-3)
    for method_index, name in enumerate(list(REGS)[1:], 1):
        differences = 100 * (scores[:, method_index] - scores[:, 0]).mean(axis=-1)
        reference_interval = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
        assert ranked.difference_by_method[name].mean == pytest.approx(differences.mean(), rel=1e-9)
        assert ranked.difference_by_method[name].interval == pytest.approx(
            (reference_interval.low, reference_interval.high), rel=1e-9
        )


def test_bars_overlap_unless_methods_differ() -> None:
    ranks = {"A": 1.0, "B": 1.9, "C": 3.0}
    ranked = RankedMethods("m", TASKS, ranks, friedman_p=0.05, critical_difference=1.0)
    # Without a rejection by Friedman's test, no two methods differ.
    [panel] = rank_figure.build_rank_plot([ranked]).panels
    assert {line.x_error for line in panel.lines} == {()}
    assert (
        "No difference between the methods was found by Friedman's test (p = 0.05, alpha = 0.05)." in ranked.summarize()
    )
    [panel] = rank_figure.build_rank_plot([dataclasses.replace(ranked, alpha=0.1)]).panels
    [[half_width]] = {line.x_error for line in panel.lines}
    overlaps = [high - low < 2 * half_width for low, high in itertools.pairwise(ranks.values())]
    assert overlaps == [True, False]


def test_losses_are_ranked_and_not_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for task in ("one", "two", "three"):
        monkeypatch.setitem(METRICS, task, "perplexity")
    levels = np.array([[30.0, 20.0, 25.0, 40.0], [31.0, 21.0, 26.0, 41.0], [32.0, 22.0, 27.0, 42.0]])
    write_runs(tmp_path, levels, tasks=("one", "two", "three"))
    [ranked] = rank_methods_in(tmp_path)
    assert ranked.average_rank_by_method == {"CosReg λ=1": 1, "I-STAR λ=-1 ζ=0.4": 2, "Base": 3, "I-STAR λ=1 ζ=0.4": 4}
    assert {(difference.mean, difference.interval) for difference in ranked.difference_by_method.values()} == {
        (None, None)
    }


def test_too_few_tasks_are_said(tmp_path: Path) -> None:
    write_runs(tmp_path, np.full((2, 4), 0.5), tasks=("rte", "cola"))
    # A task on which only Base has finished does not count.
    save(record("mrpc", "mine", BASE, 1), tmp_path, geometry=False)
    [ranked] = rank_methods_in(tmp_path)
    assert ranked.summarize() == (
        "mine: methods are compared over tasks from 3 tasks on; Base and another method have finished on 2 tasks."
    )
    assert rank_figure.build_rank_plot([ranked]).panels == ()
    assert rank_figure.build_rank_sheet([ranked]).rows == []


def test_methods_with_other_tasks_seeds_or_budgets_are_not_ranked(tmp_path: Path) -> None:
    tasks = TASKS[:3]
    write_runs(tmp_path, np.random.default_rng(3).uniform(0.4, 0.8, (3, 4)), tasks=tasks)
    save(record("rte", "mine", istar(1), 3, 0.5), tmp_path, geometry=False)
    save(record("cola", "mine", cosreg(), 1, 0.5, optim__lr=1.0), tmp_path, geometry=False)
    for seed in (1, 2):
        save(record("cola", "mine", istar(5), seed, 0.5), tmp_path, geometry=False)
    [ranked] = rank_methods_in(tmp_path)
    assert set(ranked.average_rank_by_method) == {"Base", "I-STAR λ=-1 ζ=0.4"}
    assert set(ranked.unranked_methods) == {"CosReg λ=1", "I-STAR λ=1 ζ=0.4", "I-STAR λ=5 ζ=0.4"}
    assert "Not ranked, because on at least one of these tasks they have no run" in ranked.summarize()
    for task in tasks:
        save(record(task, "mine", istar(-1), 7, 0.5), tmp_path, geometry=False)
    [ranked] = rank_methods_in(tmp_path)
    assert (
        "no method has finished with the seeds, the data and the budget of Base on all of its 3 tasks"
        in ranked.summarize()
    )


@pytest.mark.slow
def test_the_page_of_three_tasks(tmp_path: Path) -> None:
    write_runs(tmp_path / "runs", np.random.default_rng(4).uniform(0.4, 0.8, (3, 4)), tasks=TASKS[:3])
    report.write_report(tmp_path / "runs", tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert "4 methods on 3 tasks (rte, cola, stsb)" in page
    assert (tmp_path / "report" / "figures" / "ranks-mine.svg").is_file()
    assert list(pd.read_csv(tmp_path / "report" / "tables" / "over_tasks.csv")["tasks"]) == [3] * 4


def test_the_diagram() -> None:
    ranks = {"I-STAR λ=1": 1.25, "Base": 2.0, "CosReg": 2.75}
    ranked = RankedMethods("mine", TASKS, ranks, friedman_p=0.01, critical_difference=0.9)
    plot = rank_figure.build_rank_plot([ranked])
    files = render(plot, ["svg"])
    [panel] = plot.panels
    assert [(line.label, line.x, line.x_error) for line in panel.lines] == [
        (name, (rank,), (0.45,)) for name, rank in ranks.items()
    ]
    assert all(name in files["svg"].decode() for name in ranks)
    assert describe(plot) == "mine: average rank: I-STAR λ=1 1.25; Base 2.00; CosReg 2.75."
